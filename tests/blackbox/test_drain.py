"""How a gateway stops: whatever a client or a stranger does, conversations have their part of the time."""
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import urllib.request

import pytest

from files import TUS, Uploader
from support import BINARY, PATIENCE, UNLIMITED, Gateway, eventually, uuid4, within
from test_webhooks import Receiver, settings

CUT = "some requests did not end in half of drain.grace_ms, and were cut"


class Raw:
    """A socket that says and reads what a test wants."""

    def __init__(self, gateway, head="", receive_buffer=None, port=None):
        host, number = (port or gateway.client).rsplit(":", 1)
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(PATIENCE)
        self.socket.connect((host, int(number)))
        self.socket.sendall(head.encode())

    async def answer(self):
        """Reads until the gateway closes. Returns the status and the headers, or None if there was no answer."""
        text = (await asyncio.to_thread(self.everything)).decode(errors="replace")
        if not text:
            return None
        head = text.split("\r\n\r\n", 1)[0].split("\r\n")
        return int(head[0].split()[1]), dict(line.lower().split(": ", 1) for line in head[1:])

    def everything(self):
        got = b""
        with contextlib.suppress(ConnectionResetError):
            while part := self.socket.recv(65_536):
                got += part
        return got


class Drip:
    """An upload that never ends: a first part, and then some bytes again and again."""

    def __init__(self, gateway, token, file, offset, data):
        head = f"PATCH /v1/attachments/{file}/upload HTTP/1.1\r\nHost: {gateway.client}\r\nAuthorization: Bearer {token}\r\n"
        head += f"Tus-Resumable: 1.0.0\r\nUpload-Offset: {offset}\r\nContent-Type: application/offset+octet-stream\r\n"
        head += f"Content-Length: {len(data) - offset}\r\n\r\n"
        self.raw = Raw(gateway, head)
        self.data, self.sent, self.ended = data, offset, threading.Event()
        self.thread = threading.Thread(target=self.drip, daemon=True)
        self.thread.start()

    def drip(self):
        part = 100_000
        with contextlib.suppress(OSError):
            while not self.ended.is_set():
                self.raw.socket.sendall(self.data[self.sent:self.sent + part])
                self.sent, part = self.sent + part, 10
                self.ended.wait(0.2)

    async def answer(self):
        got = await self.raw.answer()
        self.ended.set()
        return got


async def begun(gateway, user, dm, size):
    """Begins an upload of random bytes. Returns the uploader, the file and the bytes."""
    up, data = Uploader(gateway, user), os.urandom(size)
    answer = await up.begin(dm, size, "data.bin")
    assert answer.status_code == 201, answer.text
    return up, answer.json()["id"], data


async def at_least(up, file, size):
    async def has_come():
        return int((await up.head(file)).headers["upload-offset"]) >= size

    await eventually(has_come)


async def unread_download(gateway, up, dm, size=8 << 20):
    """A download whose client reads nothing of it."""
    file = await up.upload(dm, os.urandom(size), "large.bin")
    path = (await up.find(file)).headers["location"]
    raw = Raw(gateway, f"GET {path} HTTP/1.1\r\nHost: {gateway.client}\r\n\r\n", receive_buffer=4096)
    # It has begun when its first byte is there.
    await asyncio.to_thread(raw.socket.recv, 1, socket.MSG_PEEK)
    return raw


async def continues(gateway, file, data, offset):
    """The upload continues after a restart, from where the gateway said it was."""
    up = Uploader(gateway, "alice")
    known = await up.head(file)
    assert (known.status_code, int(known.headers["upload-offset"])) == (200, offset)
    done = await up.append(file, offset, data[offset:])
    assert (done.status_code, done.headers["file-state"]) == (204, "ready"), done.text
    assert (await up.download(file)).content == data


def messages(gateway):
    return [line["message"] for line in gateway.log() if "message" in line]


@pytest.mark.embedded
async def test_a_drain_ends_an_upload_and_says_how_far_it_came(start):
    # Were the upload waited for, the log would say so.
    gateway = start(**UNLIMITED)
    alice = await gateway.connect("alice")
    dm = await alice.create("dm", "bob")
    up, file, data = await begun(gateway, "alice", dm, 1_000_000)
    drip = Drip(gateway, up.token, file, 0, data)
    await at_least(up, file, 100_000)
    stopping = asyncio.create_task(asyncio.to_thread(gateway.stop))
    status, headers = await drip.answer()
    assert (status, headers["retry-after"], headers["tus-resumable"]) == (503, "1", "1.0.0")
    assert await stopping == 0
    assert CUT not in messages(gateway)
    await continues(start(gateway.directory), file, data, int(headers["upload-offset"]))


@pytest.mark.embedded
async def test_a_client_can_read_why_its_upload_is_refused(start):
    """The kernel resets a connection that is closed with unread bytes, and the answer may be lost."""
    gateway = start(**UNLIMITED)
    alice = await gateway.connect("alice")
    dm = await alice.create("dm", "bob")
    up, file, data = await begun(gateway, "alice", dm, 40 << 20)
    head = f"PATCH /v1/attachments/{file}/upload HTTP/1.1\r\nHost: {gateway.client}\r\nAuthorization: Bearer {up.token}\r\n"
    head += "Tus-Resumable: 1.0.0\r\nUpload-Offset: 1\r\nContent-Type: application/offset+octet-stream\r\n"
    raw = Raw(gateway, head + f"Content-Length: {len(data)}\r\n\r\n")

    def push():
        # The gateway closes only after the client has had time to read.
        for at in range(0, 4 << 20, 1 << 16):
            raw.socket.sendall(data[at:at + (1 << 16)])

    await asyncio.to_thread(push)
    status, headers = await raw.answer()
    assert (status, headers["connection"]) == (409, "close"), "the offset is wrong, and the body was not read"
    await alice.close()


@pytest.mark.embedded
async def test_a_drain_waits_for_no_stranger(start):
    gateway = start(drain__delay_ms=4000, drain__spread_ms=0)
    alice = await gateway.connect("alice")
    halves = [Raw(gateway, head) for head in ("", "GET / HT", "GET /v1/ws HTTP/1.1\r\nHost: x\r\n")]
    halves.append(Raw(gateway, "GET /health/live HTTP/1.1\r\n", port=gateway.internal))
    # A request that is answered, and half of the next one.
    again = f"GET /icon.svg HTTP/1.1\r\nHost: {gateway.client}\r\n\r\n"
    halves.append(Raw(gateway, again))
    await asyncio.to_thread(halves[-1].socket.recv, 1, socket.MSG_PEEK)
    halves[-1].socket.sendall(again[:30].encode())
    stopping = asyncio.create_task(asyncio.to_thread(gateway.stop))
    await alice.event("reconnect")
    for half in [*halves[:3], halves[4]]:
        await asyncio.to_thread(half.everything)
        assert alice.socket.close_code is None, "it is closed long before the clients are"
    assert await alice.closed() == 1012
    assert await stopping == 0
    assert CUT not in messages(gateway)


@pytest.mark.embedded
async def test_a_drain_cuts_what_can_be_requested_again(start):
    # Half of this is much less than the time in which a client must take something of a response.
    gateway = start(drain__grace_ms=6000, **UNLIMITED)
    alice = await gateway.connect("alice")
    dm = await alice.create("dm", "bob")
    raw = await unread_download(gateway, Uploader(gateway, "alice"), dm)
    assert await asyncio.to_thread(gateway.stop) == 0
    assert CUT not in messages(gateway)
    assert len(await asyncio.to_thread(raw.everything)) < 8 << 20


@pytest.mark.embedded
async def test_a_body_that_does_not_come_whole_is_refused_by_a_drain(start):
    gateway = start(**UNLIMITED)
    token = gateway.token("backend", "--role", "service", "--scope", "conversations:write")
    head = f"POST /v1/conversations HTTP/1.1\r\nHost: {gateway.client}\r\nAuthorization: Bearer {token}\r\nChat-User: alice\r\n"
    raw = Raw(gateway, head + "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{\"kind\":")

    async def has_come():
        return gateway.metrics().get("chat_sockets", 0) >= 1

    await eventually(has_come)
    stopping = asyncio.create_task(asyncio.to_thread(gateway.stop))
    status, headers = await raw.answer()
    assert (status, headers["retry-after"]) == (503, "1")
    assert await stopping == 0
    assert CUT not in messages(gateway)


class SilentScanner:
    """Takes connections like clamd, and never answers."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self.listener.getsockname()[1]
        self.asked = threading.Event()
        threading.Thread(target=self.take, daemon=True).start()

    def take(self):
        with contextlib.suppress(OSError):
            while True:
                taken, _ = self.listener.accept()
                threading.Thread(target=self.read, args=[taken], daemon=True).start()

    def read(self, taken):
        with contextlib.suppress(OSError):
            while taken.recv(65_536):
                self.asked.set()

    def stop(self):
        self.listener.close()


@pytest.mark.embedded
async def test_a_request_that_hangs_leaves_half_of_the_time_to_conversations(start):
    """Rule [drain-core]."""
    scanner = SilentScanner()
    gateway = start(drain__grace_ms=4000, attachments__scanner=scanner.address, **UNLIMITED)
    alice = await gateway.connect("alice")
    dm = await alice.create("dm", "bob")
    up, file, data = await begun(gateway, "alice", dm, 1000)
    appending = asyncio.create_task(up.append(file, 0, data))
    assert await asyncio.to_thread(scanner.asked.wait, PATIENCE)
    sent = await alice.send(dm, "hello")
    assert await asyncio.to_thread(gateway.stop) == 0, "the conversations were stored"
    assert CUT in messages(gateway)
    with contextlib.suppress(Exception):
        await appending
    scanner.stop()
    again = start(gateway.directory)
    bob = await again.connect("bob")
    assert [m["seq"] for m in await bob.everything(dm)] == [sent["seq"]]
    up = Uploader(again, "alice")

    async def is_ready():
        return (await up.head(file)).headers["file-state"] == "ready"

    await eventually(is_ready)
    await bob.close()


class Silent(Receiver):
    """A receiver of webhooks that takes requests, and answers none before it is told to."""

    def __init__(self):
        super().__init__()
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def take(self, request):
        self.asked.set()
        await self.answers.wait()
        return await super().take(request)


@pytest.mark.embedded
async def test_a_drain_under_load_with_everything_that_holds_it_up(start, tmp_path):
    receiver = await Silent().start()
    gateway = start(config=settings(tmp_path, receiver), drain__spread_ms=2000, **UNLIMITED)
    alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
    dm = await alice.create("dm", "bob")
    await alice.send(dm, "for the webhook")
    await within(receiver.asked.wait(), PATIENCE)
    up, file, data = await begun(gateway, "alice", dm, 1_000_000)
    drip = Drip(gateway, up.token, file, 0, data)
    half, unread = Raw(gateway, "GET /v1/ws HT"), await unread_download(gateway, up, dm)
    await at_least(up, file, 100_000)
    acknowledged = []

    async def talk():
        with contextlib.suppress(ConnectionError):
            while True:
                replies = [await alice.begin("send", conversation=dm, client_id=uuid4(), body="x") for _ in range(20)]
                for reply in await asyncio.gather(*replies, return_exceptions=True):
                    if isinstance(reply, Exception):
                        raise reply
                    acknowledged.append(reply["seq"])

    talking = asyncio.create_task(talk())

    async def is_talking():
        return len(acknowledged) > 100

    await eventually(is_talking)
    stopping = asyncio.create_task(asyncio.to_thread(gateway.stop))
    status, headers = await drip.answer()
    assert status == 503
    assert await half.answer() is None
    assert [await client.closed() for client in (alice, bob)] == [1012, 1012]
    assert await stopping == 0
    assert CUT not in messages(gateway)
    await asyncio.wait([talking])
    await asyncio.to_thread(unread.everything)
    receiver.answers.set()
    again = start(gateway.directory, config=settings(tmp_path, receiver))
    back = await again.connect("bob")
    log = [m["seq"] for m in await back.everything(dm)]
    assert log == list(range(1, len(log) + 1)) and set(acknowledged) <= set(log)
    await receiver.until(lambda events: {e["data"].get("seq") for e in events} >= set(log))
    await continues(again, file, data, int(headers["upload-offset"]))
    await back.close()
    await receiver.stop()


@pytest.mark.embedded
def test_half_of_the_time_must_be_enough_for_the_clients(tmp_path):
    gateway = Gateway(str(tmp_path))
    gateway.settings = {"drain__delay_ms": "3000", "drain__spread_ms": "2001", "drain__grace_ms": "10000"}
    done = gateway.command("config", "check", check=False)
    assert done.returncode != 0 and "drain.grace_ms" in done.stderr, done.stderr
    gateway.settings["drain__spread_ms"] = "2000"
    gateway.command("config", "check")


@pytest.mark.embedded
async def test_no_signal_ends_a_gateway_without_a_drain(start):
    gateway = start()
    alice = await gateway.connect("alice")
    for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGPIPE"):
        gateway.process.send_signal(getattr(signal, name))

        async def is_told():
            return name == "SIGPIPE" or any(line.get("signal") == name for line in gateway.log())

        await eventually(is_told)
        assert (await alice.ask("ping"))["type"] == "pong"
    # A terminal sends Ctrl-C to all its processes, and some pass it on: two are one.
    for _ in range(2):
        gateway.process.send_signal(signal.SIGINT)
    assert (await alice.event("reconnect"))["after_ms"] >= 0
    assert await alice.closed() == 1012
    assert await asyncio.to_thread(gateway.process.wait, PATIENCE) == 0
    gateway.start()
    gateway.process.send_signal(signal.SIGQUIT)
    assert await asyncio.to_thread(gateway.process.wait, PATIENCE) == 0
    assert "stopped: everything is stored" in messages(gateway)


@pytest.mark.embedded
async def test_a_later_signal_stops_a_drain(start):
    gateway = start(drain__delay_ms=60_000, drain__grace_ms=240_000)
    alice = await gateway.connect("alice")
    gateway.process.send_signal(signal.SIGTERM)
    await alice.event("reconnect")

    async def has_ended():
        gateway.process.send_signal(signal.SIGHUP)
        gateway.process.send_signal(signal.SIGTERM)
        return gateway.process.poll() is not None

    await eventually(has_ended)
    assert gateway.process.returncode == 1
    assert "stopped at once by a second signal" in open(gateway.log_path).read()


@pytest.mark.embedded
async def test_a_gateway_outlives_the_reader_of_its_log(tmp_path):
    gateway = Gateway(str(tmp_path))
    process = subprocess.Popen([BINARY], env=gateway.env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        for line in process.stdout:
            ready = json.loads(line) if line.startswith(b"{") else {}
            if ready.get("message") == "ready":
                break
        process.stdout.close()
        process.send_signal(signal.SIGHUP)
        for _ in range(2):
            live = urllib.request.urlopen(f"http://{ready['internal']}/health/ready", timeout=PATIENCE)
            assert json.load(live) == {"status": "ready"}
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
