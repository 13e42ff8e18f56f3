"""Uploads and downloads that last: places, the least rate, rights that end meanwhile, and connections that break."""
import asyncio
import json
import os
import signal
import socket
import time

import pytest

from files import TUS, Decoders, Uploader, picture, sha256
from support import PATIENCE, UNLIMITED, eventually, uuid4, within
from test_misuse_http import service, token, with_keys

pytestmark = pytest.mark.embedded
MANY = {**UNLIMITED, "limits__connections_per_address": 1_000, "attachments__uploads_per_minute": 10_000}


class Patch:
    """A PATCH of an upload whose bytes come bit by bit, on a connection of its own."""

    def __init__(self, up, file, size, offset=0):
        self.up, self.file, self.size, self.offset = up, file, size, offset

    async def open(self, sent=b""):
        host, port = self.up.gateway.client.rsplit(":", 1)
        self.reader, self.writer = await asyncio.open_connection(host, int(port))
        head = f"PATCH /v1/attachments/{self.file}/upload HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {self.up.token}\r\n"
        head += f"tus-resumable: 1.0.0\r\nupload-offset: {self.offset}\r\ncontent-type: application/offset+octet-stream\r\n"
        self.writer.write((head + f"content-length: {self.size}\r\n\r\n").encode() + sent)
        await self.writer.drain()
        self.answer = asyncio.create_task(self.reader.read())
        return self

    async def trickle(self, data, every):
        """Sends the same bytes again and again until the gateway answers. Returns the status and the error."""
        deadline = time.monotonic() + PATIENCE
        while not self.answer.done():
            assert time.monotonic() < deadline, "the gateway goes on reading"
            try:
                self.writer.write(data)
                await self.writer.drain()
            except ConnectionError:
                break
            await asyncio.wait([self.answer], timeout=every)
        return await self.end()

    async def end(self):
        """Waits until the gateway has answered and closed. Returns the status and the error."""
        try:
            answer = await within(self.answer, PATIENCE)
        except ConnectionError:
            return None, None
        self.writer.close()
        head, body = answer.split(b"\r\n\r\n", 1)
        return int(head.split(b" ")[1]), json.loads(body or b"{}").get("code")

    def cut(self):
        """Closes the connection without reading the answer."""
        self.answer.cancel()
        self.writer.close()


async def two(start, **settings):
    gateway = start(**{**MANY, **settings})
    alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
    dm = await alice.create("dm", "bob")
    return gateway, Uploader(gateway, "alice"), Uploader(gateway, "bob"), dm


async def begun(up, conversation, size, count=1):
    answers = [await up.begin(conversation, size, "data.bin") for _ in range(count)]
    return [answer.json()["id"] for answer in answers]


async def test_slow_uploads_do_not_hold_their_places(start):
    # Sixteen users with four uploads each, or one with 64: all places.
    gateway, alice, bob, dm = await two(start, attachments__uploads_at_once=64)
    files = await begun(alice, dm, 50_000, 64)
    slow = [await Patch(alice, file, 50_000).open(b"x") for file in files]
    [other] = await begun(bob, dm, 4)

    async def are_taken():
        return (await bob.append(other, 0, b"four")).status_code == 503

    await eventually(are_taken)
    # A byte per second each: the gateway gives them up, and says so.
    ends = await asyncio.gather(*(patch.trickle(b"x", 1) for patch in slow))
    assert set(ends) <= {(503, "unavailable"), (None, None)} and (503, "unavailable") in ends, set(ends)
    assert (await bob.append(other, 0, b"four")).headers["file-state"] == "ready"
    # What has come counts.
    offset = int((await alice.head(files[0])).headers["upload-offset"])
    assert 1 < offset < 100
    done = await alice.append(files[0], offset, b"x" * (50_000 - offset))
    assert (done.status_code, done.headers["file-state"]) == (204, "ready")


async def test_the_head_of_an_upload_holds_no_place(start):
    gateway, alice, bob, dm = await two(start, attachments__uploads_at_once=64)
    files = await begun(alice, dm, 50_000, 70)
    halves = [await Patch(alice, file, 50_000).open() for file in files]
    [other] = await begun(bob, dm, 4)
    assert (await bob.append(other, 0, b"four")).headers["file-state"] == "ready"
    # Also of the files themselves nothing is taken.
    done = await alice.append(files[0], 0, b"x" * 50_000)
    assert (done.status_code, done.headers["file-state"]) == (204, "ready")
    # Strangers are refused at the head, and the others after some seconds.
    stranger = Uploader(gateway, "mallory")
    stranger.token = "nonsense"
    assert await (await Patch(stranger, files[1], 50_000).open()).end() == (401, "unauthorized")
    first, *others = await asyncio.gather(*(half.end() for half in halves))
    assert first == (409, "conflict"), "the file is complete"
    assert set(others) == {(503, "unavailable")}, set(others)


async def test_a_body_without_an_end_is_answered(start):
    """All bytes of the file have come, but more of the body is announced: it is not waited for."""
    _, alice, _, dm = await two(start)
    [file] = await begun(alice, dm, 10)
    assert await (await Patch(alice, file, 20).open(b"0123456789")).end() == (204, None)
    assert (await alice.head(file)).headers["file-state"] == "ready"
    # More than the file has is refused, as before.
    [file] = await begun(alice, dm, 10)
    assert await (await Patch(alice, file, 20).open(b"0123456789a")).end() == (413, "too_large")


async def test_a_connection_that_breaks_loses_nothing_that_has_come(start):
    gateway, alice, _, dm = await two(start)
    data = os.urandom(1_000_000)
    # Several times, because it is a race: the connection ends with the last byte, or in the middle.
    for _ in range(5):
        whole, part = await begun(alice, dm, len(data), 2)
        (await Patch(alice, whole, len(data)).open(data)).cut()
        (await Patch(alice, part, len(data)).open(data[:100_000])).cut()

        async def has_come():
            return (await alice.head(part)).headers["upload-offset"] == "100000"

        await eventually(has_come)

        async def is_ready():
            return (await alice.head(whole)).headers["file-state"] == "ready"

        await eventually(is_ready)
        assert (await alice.download(whole)).content == data
        # Nobody writes to the other one any more, and it goes on.
        done = await alice.append(part, 100_000, data[100_000:])
        assert (done.status_code, done.headers["file-state"]) == (204, "ready")
        assert (await alice.download(part)).content == data
    assert gateway.metrics().get("chat_uploads", 0) == 0


async def test_an_upload_that_is_given_up_is_no_fault_of_the_disk(start):
    gateway, alice, _, dm = await two(start)
    [file] = await begun(alice, dm, 1_000)
    patch = await Patch(alice, file, 1_000).open(b"x" * 500)

    async def has_come():
        return (await alice.head(file)).headers["upload-offset"] == "500"

    await eventually(has_come)
    assert (await alice.delete(file)).status_code == 204

    async def is_gone():
        return (await alice.head(file)).status_code == 404

    await eventually(is_gone)
    patch.writer.write(b"x" * 500)
    assert await patch.end() == (409, "conflict")
    assert not [line for line in gateway.log() if line.get("level") == "ERROR"]


async def test_the_last_part_is_answered_before_a_long_look_ends(start):
    gateway, alice, _, dm = await two(start)
    client = await gateway.connect("alice")
    data = picture(2_000, 2_000)
    file = (await alice.begin(dm, len(data))).json()["id"]
    uploading = asyncio.create_task(alice.append(file, 0, data))
    # It is stopped, as on a machine that is busy.
    child = await Decoders(gateway).next()
    try:
        done = await uploading
        assert (done.status_code, done.headers["file-state"]) == (204, "scanning")
    finally:
        os.kill(child, signal.SIGCONT)
    told = await client.event("attachment", lambda event: event["file"] == file)
    assert told["state"] == "ready"
    await client.close()


async def test_the_audit_log_has_the_method_of_the_header(start):
    gateway = with_keys(start, **MANY)
    alice, up = await gateway.connect("alice"), Uploader(gateway, "alice")
    [file] = await begun(up, await alice.create("dm", "bob"), 1_000)
    async with service(gateway, "messages:write", user="alice") as http:
        for method, override in (("POST", "HEAD"), ("GET", "DELETE")):
            headers = {**TUS, "x-http-method-override": override}
            await http.request(method, f"/v1/attachments/{file}/upload", headers=headers)
            audit = [line for line in gateway.log() if line.get("target") == "audit"]
            assert audit[-1]["request"] == f"{override} /v1/attachments/{{file}}/upload"
            assert audit[-1]["file"] == file
    await alice.close()


async def test_an_upload_ends_with_the_right_to_upload(start):
    """The token expires, sessions are closed, the user leaves or is removed, the file is given up: while the bytes come."""
    gateway = with_keys(start, **MANY, auth__leeway_s=0, attachments__uploads_at_once=8)
    alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
    group = await alice.create("group", "bob", "carol", "dave", name="G")
    size = 10 << 20

    async def going(who):
        up = Uploader(gateway, who)
        [file] = await begun(up, group, size)
        patch = await Patch(up, file, size).open(b"x" * 10_000)

        async def has_come():
            return (await up.head(file)).headers["upload-offset"] != "0"

        await eventually(has_come)
        # More than the least rate.
        return up, file, asyncio.create_task(patch.trickle(b"x" * 2_000, 0.1))

    removed, closed = await going("bob"), await going("carol")
    given_up, left = await going("alice"), await going("dave")
    expiring = Uploader(gateway, "alice")
    [file] = await begun(expiring, group, size)
    expiring.token = token("alice", exp=time.time() + 4)
    expired = asyncio.create_task((await Patch(expiring, file, size).open(b"x" * 10_000)).trickle(b"x" * 2_000, 0.1))
    staying = await going("alice")

    await alice.ask("remove", conversation=group, user="bob")
    assert (await given_up[0].delete(given_up[1])).status_code == 204
    dave = await gateway.connect("dave")
    await dave.ask("leave", conversation=group)
    async with service(gateway, "sessions:close") as http:
        assert (await http.delete("/v1/users/carol/sessions")).status_code == 200
    assert await removed[2] in [(403, "forbidden"), (None, None)]
    assert await left[2] in [(403, "forbidden"), (None, None)]
    assert await closed[2] in [(401, "unauthorized"), (None, None)]
    assert await expired in [(401, "unauthorized"), (None, None)]
    assert await given_up[2] in [(409, "conflict"), (None, None)]
    # Another upload of the same user, with a valid token, has gone on all the time.
    assert not staying[2].done()
    staying[2].cancel()
    for client in (alice, bob, dave):
        await client.close()


class Unread:
    """A download of which a client reads nothing, or a byte now and then."""

    def __init__(self, gateway, path):
        host, port = gateway.client.rsplit(":", 1)
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        self.socket.connect((host, int(port)))
        self.socket.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        self.socket.setblocking(False)

    async def sip(self, every):
        """Reads a byte now and then until the gateway has closed the connection. Returns the bytes that came."""
        count, loop = 0, asyncio.get_running_loop()
        while True:
            try:
                data = await within(loop.sock_recv(self.socket, 1), PATIENCE)
            except ConnectionError:
                return count
            if not data:
                return count
            count += 1
            await asyncio.sleep(every)


async def test_downloads_that_are_not_read_hold_nothing(start):
    gateway, alice, bob, dm = await two(start)
    data = bytes(range(256)) * (1 << 16)
    file = await alice.upload(dm, data, "data.bin")
    path = (await alice.find(file)).headers["location"]
    unread = [Unread(gateway, path) for _ in range(16)]

    async def are_taken():
        return gateway.metrics().get("chat_downloads", 0) == 16

    await eventually(are_taken)
    # The places of this user are taken. Others have their own.
    again = await alice.http.get(path)
    assert (again.status_code, again.json()["code"]) == (429, "rate_limited")
    group = await (await gateway.connect("alice")).create("group", "bob", name="G")
    own = await bob.upload(group, b"of bob", "data.bin")
    assert (await bob.download(own)).content == b"of bob"
    # The gateway ends what is not read, and the places are free again.

    async def are_free():
        return gateway.metrics().get("chat_downloads", 0) == 0

    await eventually(are_free)
    assert (await alice.http.get(path)).content == data
    for each in unread:
        each.socket.close()


async def test_a_download_that_is_hardly_read_is_ended(start):
    gateway, alice, _, dm = await two(start)
    file = await alice.upload(dm, bytes(16 << 20), "data.bin")
    slow = Unread(gateway, (await alice.find(file)).headers["location"])
    sipping = asyncio.create_task(slow.sip(0.3))
    for count in (1, 0):

        async def are_open():
            return gateway.metrics().get("chat_downloads", 0) == count

        await eventually(are_open)
    sipping.cancel()
    slow.socket.close()


async def test_a_download_over_a_slow_line_is_not_ended(start):
    gateway, alice, _, dm = await two(start)
    data = bytes(range(256)) * (1 << 16)
    file = await alice.upload(dm, data, "data.bin")
    path = (await alice.find(file)).headers["location"]
    host, port = gateway.client.rsplit(":", 1)
    # It takes three times as much as it must, for longer than the gateway waits for one that takes nothing. Its receive
    # buffer is small, as on a slow line nothing piles up in it: a system whose large buffer is full announces room only when
    # a sixteenth of it is free, which may take longer than the gateway waits.
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    slow.connect((host, int(port)))
    reader, writer = await asyncio.open_connection(sock=slow, limit=1 << 14)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    head, body = await reader.readuntil(b"\r\n\r\n"), bytearray()
    until = time.monotonic() + 35
    while time.monotonic() < until:
        body += await reader.readexactly(40 << 10)
        await asyncio.sleep(1)
    body += await reader.read()
    assert head.startswith(b"HTTP/1.1 200 ") and sha256(body) == sha256(data)
    writer.close()


async def test_the_address_of_a_reader_is_for_that_reader(start):
    gateway, alice, bob, dm = await two(start)
    client = await gateway.connect("alice")
    file = await alice.upload(dm, b"some bytes", "data.bin")
    await client.send(dm, "", attachments=[{"id": file}])
    hers, his = (await alice.find(file)).headers["location"], (await bob.find(file)).headers["location"]
    assert hers != his and "alice" not in hers
    of = {"r": hers.split("r=")[1].split("&")[0], "his": his.split("r=")[1].split("&")[0]}
    assert (await alice.http.get(hers.replace(of["r"], of["his"]))).status_code == 403
    assert (await alice.http.get(hers.replace("&r=" + of["r"], ""))).status_code == 403
    await client.close()
