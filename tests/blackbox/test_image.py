"""The image of the Dockerfile without a container engine: what its build gets, and the gateway as its user, in a root directory of its own."""
import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest

from files import Uploader, picture
from ports import free_port
from support import BINARY, ROOT, Gateway
from test_misuse_http import KEYS, token

pytestmark = pytest.mark.embedded
NONROOT = 65532  # the user of that name in the base image
# The libraries that the base image has, and so all that the program may need. The packages are libc6, libgcc-s1 and libstdc++6:
# https://github.com/GoogleContainerTools/distroless/tree/main/cc
LIBRARIES = {
    "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0",
    "librt.so.1", "libstdc++.so.6",
}


def instructions():
    """The instructions of each stage, as pairs of a name and what follows it."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M)
    lines = filter(None, text.replace("\\\n", " ").splitlines())
    stages = []
    for name, rest in (line.split(maxsplit=1) for line in lines):
        if name == "FROM":
            stages.append([])
        stages[-1].append((name, rest))
    return stages


def copied():
    """What the build stage gets of this project."""
    build, _ = instructions()
    return [source for name, rest in build if name == "COPY" for source in rest.split()[:-1]]


def test_the_build_gets_every_file_that_it_reads(tmp_path):
    sources = copied()
    read = pathlib.Path(BINARY + ".d").read_text().split(": ", 1)[1].split()
    read = [os.path.relpath(file, ROOT) for file in read]
    assert "src/main.rs" in read
    assert [file for file in read if not any(pathlib.PurePath(file).is_relative_to(source) for source in sources)] == []
    # Cargo needs the manifests of all packages, also of those that are not built.
    for source in sources:
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, tmp_path / source)
    host = re.search("host: (.*)", subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True).stdout)[1]
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", host]
    subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)


def image(root):
    """Makes the root directory of the image. Returns its settings, and the command that starts the program of it."""
    _, final = instructions()
    said = dict(final)
    for folder in ("data", "dev", "proc", "usr/local/bin"):
        (root / folder).mkdir(parents=True)
    copies = [rest for name, rest in final if name == "COPY"]
    assert copies == ["--from=build /build/target/release/chat-gateway /usr/local/bin/chat-gateway", "--from=build --chown=nonroot:nonroot /data /data"]
    shutil.copy(BINARY, root / "usr/local/bin/chat-gateway")
    os.chown(root / "data", NONROOT, NONROOT)
    linked = subprocess.run(["ldd", BINARY], capture_output=True, text=True, check=True).stdout
    for library in re.findall(r"(/\S+) \(0x", linked):
        assert pathlib.Path(library).name in LIBRARIES
        (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, root / library[1:])
    assert said["USER"] == "nonroot"
    [program] = json.loads(said["ENTRYPOINT"])
    # Like an engine, it mounts /dev and /proc. The name of the program on this machine, which comes first, is left out.
    begin = f'mount --rbind /dev "$0"/dev && mount -t proc proc "$0"/proc && shift && exec chroot --userspec={NONROOT}:{NONROOT} "$0" {program} "$@"'
    return said, ["unshare", "--mount", "sh", "-c", begin, str(root)]


async def test_the_image_serves_as_its_user_and_keeps_its_data(tmp_path):
    root = tmp_path / "root"
    said, prefix = image(root)
    settings = {name.lower(): value for name, value in re.findall(r"CHAT__(\w+)=(\S+)", said["ENV"])}
    # The ports may be taken here.
    listens = {name: settings[name].rsplit(":", 1)[0] for name in ("client__listen", "internal__listen")}
    assert listens == {"client__listen": "0.0.0.0", "internal__listen": "127.0.0.1"}
    settings |= {name: f"{address}:{free_port()}" for name, address in listens.items()}
    gateway = Gateway(str(tmp_path / "logs"), auth__keys=KEYS, **settings)
    gateway.prefix, gateway.arguments, gateway.dev_token = prefix, json.loads(said["CMD"]), token
    check = json.loads(said["HEALTHCHECK"].split(" CMD ")[1])[1:]
    try:
        for turn in range(2):
            gateway.start()
            gateway.client = gateway.client.replace("0.0.0.0", "127.0.0.1")
            status = pathlib.Path(f"/proc/{gateway.process.pid}/status").read_text()
            assert re.search(r"\nUid:(.*)", status)[1].split() == [str(NONROOT)] * 4
            healthy = subprocess.run([*prefix, BINARY, *check], env=gateway.env(), capture_output=True, text=True)
            assert (healthy.returncode, healthy.stdout.strip()) == (0, '{"status":"ready"}'), healthy
            alice = await gateway.connect("alice")
            if turn == 0:
                dm = await alice.create("dm", "bob")
                # The program starts itself to decode a picture.
                file = await Uploader(gateway, "alice").upload(dm, picture())
                await alice.send(dm, "look", attachments=[{"id": file}])
            [message] = (await alice.history(dm))["messages"]
            assert (message["body"], message["attachments"][0]["width"]) == ("look", 800)
            await alice.close()
            assert said["STOPSIGNAL"] == "SIGTERM" and gateway.stop() == 0
    finally:
        gateway.close()
