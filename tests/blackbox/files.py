"""Uploads and downloads of files, for tests."""
import asyncio
import base64
import contextlib
import glob
import hashlib
import io
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import time

import httpx
from PIL import Image

from ports import free_port
from support import PATIENCE, ROOT, eventually

TUS = {"tus-resumable": "1.0.0"}


def picture(width=800, height=600, format="PNG", color=(200, 30, 60), **options):
    """The bytes of a picture with a gradient."""
    image = Image.linear_gradient("L").resize((width, height)).convert("RGB")
    image = Image.blend(image, Image.new("RGB", (width, height), color), 0.5)
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


class Uploader:
    """One user who uploads and downloads over HTTP."""

    def __init__(self, gateway, user):
        self.gateway, self.user = gateway, user
        self.token = gateway.dev_token(user)
        # A gateway with a clock of its own may close an idle connection at any moment of ours.
        reused = httpx.Limits(max_keepalive_connections=0 if gateway.prefix else None)
        self.http = httpx.AsyncClient(base_url=f"http://{gateway.client}", timeout=PATIENCE, limits=reused)

    def headers(self, **more):
        return {"authorization": f"Bearer {self.token}", **more}

    async def begin(self, conversation, size, name="cat.png", **fields):
        body = {"conversation": conversation, "name": name, "size": size, **fields}
        return await self.http.post("/v1/attachments", json=body, headers=self.headers())

    async def append(self, file, offset, data):
        headers = self.headers(**TUS, **{"upload-offset": str(offset), "content-type": "application/offset+octet-stream"})
        return await self.http.patch(f"/v1/attachments/{file}/upload", content=data, headers=headers)

    async def head(self, file):
        return await self.http.head(f"/v1/attachments/{file}/upload", headers=self.headers(**TUS))

    async def delete(self, file):
        return await self.http.delete(f"/v1/attachments/{file}/upload", headers=self.headers(**TUS))

    async def upload(self, conversation, data, name="cat.png", **fields):
        """Uploads a file and returns its id."""
        begun = await self.begin(conversation, len(data), name, **fields)
        assert begun.status_code == 201, begun.text
        file = begun.json()["id"]
        done = await self.append(file, 0, data)
        assert done.status_code == 204 and done.headers["file-state"] in ("ready", "scanning"), (done.text, done.headers)
        if done.headers["file-state"] == "scanning":
            # The gateway looked at it for longer than the request waits: a build without optimisation decodes slowly.
            async def is_ready():
                return (await self.head(file)).headers["file-state"] == "ready"

            await eventually(is_ready)
        return file

    async def find(self, file, **query):
        """Asks for the address of a file."""
        return await self.http.get(f"/v1/attachments/{file}", params=query, headers=self.headers())

    async def download(self, file, **query):
        """Downloads a file, without the token."""
        found = await self.find(file, **query)
        assert found.status_code == 302, found.text
        return await self.http.get(found.headers["location"])


class Bucket:
    """A bucket in a storage that is compatible with S3: tests/s3server."""

    SERVER = os.environ.get("S3_SERVER", str(ROOT / "target/s3server/debug/s3-server"))
    NAME, PREFIX, ACCESS, SECRET = "files-of-chat", "chat/", "the-access-key", "a secret that only gateways know"

    def __init__(self):
        self.root = pathlib.Path(tempfile.mkdtemp(prefix="chat-test-s3-"))
        (self.root / self.NAME).mkdir()
        self.address = f"127.0.0.1:{free_port()}"
        self.origin = f"http://{self.address}"
        self.process = None

    def start(self, prefix=()):
        command = [*prefix, self.SERVER, self.address, str(self.root), self.ACCESS, self.SECRET]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout.readline() == b"ready\n"
        return self

    def kill(self):
        self.process.kill()
        self.process.wait()

    def settings(self, **more):
        """Settings of a gateway that keeps files in this bucket."""
        s3 = {"endpoint": self.origin, "bucket": self.NAME, "prefix": self.PREFIX, "access_key": self.ACCESS, "secret_key": self.SECRET}
        return {"attachments__store": "s3", **{f"attachments__s3__{name}": value for name, value in s3.items()}, **more}

    def objects(self):
        """The keys of all objects."""
        return files_under(self.root / self.NAME)

    def parts(self):
        """The parts of uploads that are not joined."""
        return sorted(path.name for path in self.root.iterdir() if ".part-" in path.name)

    def uploads(self):
        """The uploads that are not complete."""
        return [path.name for path in self.root.glob(".upload-*.json")]

    def bytes_with(self, marker):
        """The files of the storage that contain a marker."""
        return files_with(self.root, marker)


class BucketUploader(Uploader):
    """One user whose files go to a bucket."""

    async def parts(self, file):
        return await self.http.post(f"/v1/attachments/{file}/parts", headers=self.headers())

    async def complete(self, file):
        return await self.http.post(f"/v1/attachments/{file}/complete", headers=self.headers())

    async def put(self, part, data):
        """Sends a part of a file to the bucket, without the token."""
        body = data[part["offset"]:part["offset"] + part["size"]]
        return await self.http.put(part["url"], content=body)

    async def upload(self, conversation, data, name="cat.png", **fields):
        begun = await self.begin(conversation, len(data), name, **fields)
        assert begun.status_code == 201, begun.text
        file = begun.json()["id"]
        assert begun.json()["upload"] == {"parts": f"/v1/attachments/{file}/parts", "part_bytes": 16 << 20}
        for part in (await self.parts(file)).json()["parts"]:
            sent = await self.put(part, data)
            assert sent.status_code == 200, sent.text
        done = await self.complete(file)
        # What is no picture that can be read may keep its metadata.
        assert (done.status_code, {**done.json(), "metadata": "kept"}) == (200, {"state": "ready", "metadata": "kept"})
        return file


def metadata(**values):
    """The header `upload-metadata` of tus."""
    return ",".join(f"{key} {base64.b64encode(value.encode()).decode()}" for key, value in values.items())


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def files_under(root):
    """The files in a folder, also while others remove some."""
    return sorted(os.path.relpath(os.path.join(folder, name), root) for folder, _, names in os.walk(root) for name in names)


def files_with(root, marker):
    """The files in a folder that contain a marker."""
    return [name for name in files_under(root) if marker in pathlib.Path(root, name).read_bytes()]


def names_in(gateway):
    """The files in the directory of attachments, without the key."""
    return [name for name in files_under(os.path.join(gateway.directory, "attachments")) if name != "signing.key"]


def bytes_with(gateway, marker):
    """The files of the directory of attachments that contain a marker."""
    return files_with(os.path.join(gateway.directory, "attachments"), marker)


class Clamd:
    """A real clamd whose only signature is `MARKER`. CLAMD names the program."""

    MARKER = b"malicious, says the signature of the tests"

    def __init__(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="chat-test-clamd-"))
        signatures = self.folder / "signatures"
        signatures.mkdir()
        (signatures / "test.ndb").write_text(f"Chat.Test:0:*:{self.MARKER.hex()}\n")
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.process = None

    def start(self):
        settings = {
            "Foreground": "yes",
            "DatabaseDirectory": self.folder / "signatures",
            "TCPAddr": "127.0.0.1",
            "TCPSocket": self.port,
            "TemporaryDirectory": self.folder,
            "StreamMaxLength": "1M",
            "LogFile": self.folder / "log",
            "User": "root",
        }
        path = self.folder / "clamd.conf"
        path.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        program = os.environ.get("CLAMD", "clamd")
        self.process = subprocess.Popen([program, "-c", str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and self.process.poll() is None:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1) as asked:
                    asked.sendall(b"zPING\0")
                    if asked.recv(8) == b"PONG\0":
                        return self
            except OSError:
                time.sleep(0.05)
        raise AssertionError(f"clamd does not answer: {(self.folder / 'log').read_text()}")

    def stop(self):
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None


def memory_of(pid, field="VmHWM"):
    """A number of /proc/<pid>/status in MiB: the most memory that a process had (`VmHWM`), or the most addresses (`VmPeak`)."""
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(f"the process {pid} has ended")


class Decoders:
    """The processes in which a gateway decodes pictures."""

    def __init__(self, gateway):
        self.gateway = gateway

    def now(self):
        """The processes that have limited themselves, and read or decode a picture."""
        found = []
        for task in glob.glob(f"/proc/{self.gateway.process.pid}/task/*/children"):
            with contextlib.suppress(OSError):
                found += [int(child) for child in pathlib.Path(task).read_text().split() if is_limited(child)]
        return found

    async def next(self):
        """Waits until a picture is decoded. Returns the process, which is stopped."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            for child in self.now():
                os.kill(child, signal.SIGSTOP)
                return child
            await asyncio.sleep(0.001)
        raise AssertionError("no picture is decoded")

    async def peaks(self):
        """Notes the most memory and the most addresses of each process, in MiB, until it is cancelled."""
        found = {}
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                for child in self.now():
                    with contextlib.suppress(OSError):
                        found[child] = (memory_of(child), memory_of(child, "VmPeak"))
                await asyncio.sleep(0.002)
        return found


def is_limited(pid):
    limits = pathlib.Path(f"/proc/{pid}/limits").read_text().splitlines()
    return any(line.split()[3:5] == ["0", "0"] for line in limits if line.startswith("Max open files"))


def is_running(pid):
    """Whether a process runs: not if it has ended and nobody has asked how."""
    try:
        return not pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].startswith(" Z")
    except OSError:
        return False
