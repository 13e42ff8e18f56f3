"""Clients that misuse the gateway, by mistake or on purpose, can neither read other users' data nor slow them down."""
import asyncio
import base64
import contextlib
import json
import os
import pathlib
import socket
import struct
import time

import pytest

from support import PATIENCE, UNLIMITED, Refused, eventually, uuid4, within
from test_messages import refused


class Raw:
    """A WebSocket client on a blocking socket. It sends frames that a library would not, and reads only when asked to."""

    def __init__(self, gateway, receive_buffer=None):
        host, port = gateway.client.rsplit(":", 1)
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(PATIENCE)
        self.socket.connect((host, int(port)))
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(
            f"GET /v1/ws HTTP/1.1\r\nHost: {gateway.client}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: chat.v1.json\r\n\r\n".encode()
        )
        self.buffer = b""
        head = self.until(b"\r\n\r\n")
        assert b" 101 " in head, head

    def until(self, end):
        while end not in self.buffer:
            self.more()
        taken, self.buffer = self.buffer.split(end, 1)
        return taken

    def more(self):
        read = self.socket.recv(1 << 16)
        if not read:
            raise EOFError
        self.buffer += read

    @staticmethod
    def frame(opcode, payload, final=True):
        """A client's frame. Its mask is zero, so the payload stays as it is."""
        size = len(payload)
        length = bytes([0x80 | size]) if size < 126 else b"\xfe" + struct.pack(">H", size) if size < 1 << 16 else b"\xff" + struct.pack(">Q", size)
        return bytes([opcode | (0x80 if final else 0)]) + length + b"\0\0\0\0" + payload

    def post(self, **frame):
        self.socket.sendall(self.frame(1, json.dumps(frame).encode()))

    def read(self):
        """Returns the opcode and payload of the next frame. Skips pings and pongs."""
        while True:
            while len(self.buffer) < 2:
                self.more()
            opcode, size, at = self.buffer[0] & 15, self.buffer[1] & 127, 2
            extended = {126: 2, 127: 8}.get(size, 0)
            while len(self.buffer) < at + extended:
                self.more()
            if extended:
                size = int.from_bytes(self.buffer[at : at + extended], "big")
            at += extended
            while len(self.buffer) < at + size:
                self.more()
            payload, self.buffer = self.buffer[at : at + size], self.buffer[at + size :]
            if opcode not in (9, 10):
                return opcode, payload

    def reply(self):
        opcode, payload = self.read()
        assert opcode == 1, (opcode, payload)
        return json.loads(payload)

    def close_code(self):
        """Reads until the gateway sends a close frame, and returns its code."""
        while True:
            opcode, payload = self.read()
            if opcode == 8:
                return struct.unpack(">H", payload[:2])[0]

    def connect(self, token, **fields):
        self.post(type="connect", id=1, token=token, **fields)
        return self.reply()


def cpu(gateway):
    """CPU time of a gateway's threads, in seconds."""
    tasks = pathlib.Path(f"/proc/{gateway.process.pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def memory(gateway):
    """Resident memory of a gateway, in bytes."""
    status = pathlib.Path(f"/proc/{gateway.process.pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) << 10


# Reading other users' data


@pytest.mark.embedded
async def test_unsubscribing_from_a_private_channel_reveals_nothing(start, codec):
    """Events that wait for the next pass over a channel's sockets go to subscribers only."""
    gateway = start(**UNLIMITED)
    alice, bob, mallory, removed = [await gateway.connect(user, codec) for user in ("alice", "bob", "mallory", "removed")]
    others = [await gateway.connect(user, codec) for user in ("dave", "erin", "frank")]
    channel = await alice.create("channel", bob.user, removed.user, *(other.user for other in others), name="secrets")
    await removed.event("conversation", lambda e: e["change"] == "added")
    await alice.ask("remove", conversation=channel, user=removed.user)
    await removed.event("conversation", lambda e: e["change"] == "removed")
    for n in range(0, 100, 10):
        strangers = [stranger.ask("unsubscribe", conversation=channel) for stranger in (mallory, removed)]
        said = await asyncio.gather(*(alice.send(channel, f"secret {n + i}") for i in range(10)), *strangers)
        assert [reply["type"] for reply in said[10:]] == ["ok", "ok"]
    await bob.message(channel, "secret 99")
    assert gateway.metrics()["chat_events_held_total"] > 0
    for stranger in (mallory, removed):
        assert not [e for e in await stranger.quiet() if "secret" in e.get("body", "")]


async def test_a_channel_made_private_is_hidden_from_subscribers_who_never_joined(people):
    alice, bob, carol, dave = await people("alice", "bob", "carol", "dave")
    channel = await alice.create("channel", name="open", public=True)
    lookers = [bob, carol, dave, await alice.gateway.connect(dave.user, alice.codec)]
    for looker in lookers:
        await looker.ask("subscribe", conversation=channel)
    await carol.ask("join", conversation=channel)
    await carol.event("conversation", lambda e: e["change"] == "added")
    await alice.ask("update", conversation=channel, public=False)
    for n in range(20):
        await alice.send(channel, f"hidden {n}")
    await carol.message(channel, "hidden 19")
    for looker in lookers:
        if looker is not carol:
            await looker.event("conversation", lambda e: e["conversation"] == channel and e["change"] == "removed")
            assert not [e for e in await looker.quiet() if "hidden" in e.get("body", "")]
            await refused(looker.ask("subscribe", conversation=channel), "not_found")
            await refused(looker.history(channel), "not_found")
    # Once the channel is public again, users can subscribe again.
    await alice.ask("update", conversation=channel, public=True)
    await bob.ask("subscribe", conversation=channel)
    await alice.send(channel, "seen")
    await bob.message(channel, "seen")
    await lookers[-1].close()


async def test_a_removed_user_gets_nothing_sent_after_the_removal(people):
    """Over Cassandra this runs on several gateways. The race is rare here; the simulation forces it
    (tests/rust/cluster.rs, `Mutation::Private`)."""
    alice, bob = await people("alice", "bob")
    phones = [await alice.gateway.connect(bob.user, alice.codec) for _ in range(3)]
    for n in range(5):
        channel = await alice.create("channel", bob.user, name="short")
        for device in (bob, *phones):
            await device.event("conversation", lambda e: e["change"] == "added" and e["conversation"] == channel)
        await alice.ask("remove", conversation=channel, user=bob.user)
        await alice.send(channel, "without bob")
        await alice.message(channel, "without bob")
        for device in (bob, *phones):
            await device.event("conversation", lambda e: e["change"] == "removed" and e["conversation"] == channel)
            assert not [e for e in await device.quiet() if e.get("body") == "without bob"]
    for phone in phones:
        await phone.close()


# Slowing other users down


@pytest.mark.embedded
async def test_lists_are_bounded_and_their_cost_is_linear(start, codec):
    gateway = start(limits__creations_burst=100000, **UNLIMITED)
    mallory = await gateway.connect("mallory", codec)

    async def cost(count):
        users = [f"{n:x}" for n in range(count)]
        before = cpu(gateway)
        for _ in range(40):
            await refused(mallory.ask("create", kind="group", participants=users), "too_large")
            await refused(mallory.ask("watch", users=users), "too_large")
            await refused(mallory.ask("unwatch", users=users), "too_large")
        return cpu(gateway) - before

    await cost(2000)
    # The minimum of three runs: other work on the machine only adds to a run.
    small, large = [min([await cost(count) for _ in range(3)]) for count in (2000, 8000)]
    assert large < 9 * small, f"four times as many users cost {large / small:.1f} times as much CPU"
    await mallory.close()


async def test_a_refused_watch_changes_nothing(people, names):
    alice, bob = await people("alice", "bob")
    first = [*names(*(f"one-{n}" for n in range(499))), bob.user]
    await alice.ask("watch", users=first)
    await refused(alice.ask("watch", users=[*first, "one-more"]), "too_large")
    await refused(alice.ask("watch", users=[*first[:10], *names("extra")]), "too_large")
    second = names(*(f"two-{n}" for n in range(500)))
    await refused(alice.ask("watch", users=second), "too_large")
    late = await alice.gateway.connect(second[0], alice.codec)
    await bob.close()
    await alice.event("presence", lambda e: e["user"] == bob.user and not e["online"])
    assert not [e for e in await alice.quiet() if e.get("user") == late.user]
    await alice.ask("unwatch", users=first)
    items = (await alice.ask("watch", users=second))["items"]
    assert len(items) == 500 and items[0]["online"]
    await late.close()


async def test_failed_subscriptions_do_not_count_against_the_limit(people):
    alice, bob = await people("alice", "bob")
    for _ in range(110):
        await refused(bob.ask("subscribe", conversation=uuid4()), "not_found")
    channel = await alice.create("channel", name="open", public=True)
    await bob.ask("subscribe", conversation=channel)
    await alice.send(channel, "hello")
    await bob.message(channel, "hello")
    await bob.ask("unsubscribe", conversation=channel)
    await alice.send(channel, "unseen")
    assert not [e for e in await bob.quiet() if e.get("body") == "unseen"]


@pytest.mark.embedded
async def test_a_user_in_thousands_of_channels_cannot_join_another(start):
    gateway = start(**UNLIMITED, limits__creations_per_minute=1 << 20, limits__creations_burst=1 << 20)
    alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
    channel = await alice.create("channel", name="one more", public=True)
    for _ in range(0, 5_000, 25):
        await asyncio.gather(*(bob.create("channel", name="mine") for _ in range(25)))
    await refused(bob.ask("join", conversation=channel), "too_large")
    await bob.ask("subscribe", conversation=channel)  # Subscriptions have a bound of their own.


@pytest.mark.embedded
async def test_a_flood_of_pings_ends_with_the_token_and_counts_as_requests(start):
    gateway = start(limits__requests_per_second=100_000_000, limits__requests_burst=100_000_000, auth__leeway_s=0)
    pings = Raw.frame(9, b"") * 2000
    request = Raw.frame(1, b'{"type":"ping","id":2}')
    short = gateway.token("mallory", "--ttl", "2s")

    def until_closed(raw, flood):
        """Sends a flood for at most 10 s. Returns the last bytes before the connection ended, None if it did not end."""
        ends = time.monotonic() + 10
        raw.socket.setblocking(False)
        received, left = b"", b""
        while time.monotonic() < ends:
            left = left or flood  # Continues a partly sent frame.
            # If sending fails, the close code can still be in the receive buffer.
            with contextlib.suppress(BlockingIOError, ConnectionError):
                left = left[raw.socket.send(left) :]
            try:
                came = raw.socket.recv(1 << 16)
            except BlockingIOError:
                continue
            except ConnectionError:
                return received
            if not came:
                return received
            received = (received + came)[-200:]
        return None

    raw = Raw(gateway)
    raw.connect(short)
    # Many bytes without a message would also close the connection, and earlier than the token.
    ended = await asyncio.to_thread(until_closed, raw, pings + request)
    assert ended is not None, "the connection outlives its token"
    assert struct.pack(">H", 4002) in ended
    # At the default rate the flood exceeds the rate limit.
    gateway = start()
    raw = Raw(gateway)
    raw.connect(gateway.dev_token("mallory"))
    ended = await asyncio.to_thread(until_closed, raw, pings)
    assert ended is not None and struct.pack(">H", 4004) in ended


@pytest.mark.embedded
async def test_endless_tiny_fragments_of_a_frame_are_refused(start):
    gateway = start()
    raw = Raw(gateway)
    raw.connect(gateway.dev_token("mallory"))
    pieces = Raw.frame(1, b"{", final=False) + Raw.frame(0, b"", final=False) * 100_000

    def send_and_read():
        try:
            raw.socket.sendall(pieces)
        except ConnectionError:
            pass  # The close code can have arrived before.
        return raw.close_code()

    raw.socket.settimeout(10)
    assert await asyncio.to_thread(send_and_read) == 4500
    others = await gateway.connect("alice")
    assert (await others.ask("ping"))["type"] == "pong"
    await others.close()


@pytest.mark.embedded
async def test_a_user_has_one_rate_on_all_connections(start, codec):
    gateway = start(limits__requests_per_second=1, limits__requests_burst=20)
    devices = [await gateway.connect("alice", codec) for _ in range(4)]
    accepted, start_time = 0, time.monotonic()

    async def ping(device):
        nonlocal accepted
        try:
            await device.ask("ping")
            accepted += 1
        except Refused as refusal:
            assert refusal.code == "rate_limited" and refusal.error["retry_after_ms"] >= 1

    for n in range(32):
        await ping(devices[n % 4])
    for device in devices:
        await device.close()
    # The same rate goes on. A connection is closed after 20 refusals.
    again = await gateway.connect("alice", codec)
    for _ in range(20):
        await ping(again)
    assert 20 <= accepted <= 20 + time.monotonic() - start_time
    other = await gateway.connect("bob", codec)
    assert (await other.ask("ping"))["type"] == "pong"
    for client in (again, other):
        await client.close()


@pytest.mark.embedded
async def test_creating_and_inviting_have_rates_of_their_own(start, codec):
    gateway = start(limits__creations_burst=3, limits__creations_per_minute=1, limits__group_participants=10,
                    limits__invitations_burst=10, limits__invitations_per_minute=1)
    mallory, alice = await gateway.connect("mallory", codec), await gateway.connect("alice", codec)
    group = await mallory.create("group", "u1", "u2", "u3", "u4")
    await mallory.create("dm", "u5")
    await mallory.create("dm", "u6")
    with pytest.raises(Refused) as refusal:
        await mallory.create("dm", "u7")
    assert refusal.value.code == "rate_limited" and refusal.value.error["retry_after_ms"] > 1000
    for n in range(7, 11):
        await mallory.ask("add", conversation=group, user=f"u{n}")
    await refused(mallory.ask("add", conversation=group, user="u11"), "rate_limited")
    await mallory.send(group, "that is all")
    await alice.create("dm", "u1")
    for client in (mallory, alice):
        await client.close()


# A session is never closed because of replies to its own requests


@pytest.mark.embedded
async def test_a_slow_reader_gets_every_page_it_asked_for(start):
    gateway = start(**UNLIMITED)
    alice = await gateway.connect("alice")
    channel = await alice.create("channel", name="long")
    for _ in range(20):
        await asyncio.gather(*(alice.send(channel, "x" * 15_000) for _ in range(2)))
    raw = Raw(gateway, receive_buffer=4096)
    raw.connect(gateway.dev_token("alice"))
    for n in range(40):
        raw.post(type="history", id=100 + n, conversation=channel, limit=200)
    # These round trips give the gateway time to fill its queues.
    for _ in range(50):
        await alice.history(channel, limit=1)

    def all_pages():
        pages = {}
        while len(pages) < 40:
            reply = raw.reply()
            if "id" in reply:
                assert reply["type"] == "history", reply
                pages[reply["id"]] = len(reply["messages"])
        return pages

    pages = await asyncio.to_thread(all_pages)
    assert min(pages.values()) == max(pages.values()) > 10
    await alice.close()


@pytest.mark.embedded
@pytest.mark.parametrize("how", ["history", "subscribe"])
async def test_a_user_over_the_byte_rate_waits_alone_and_also_after_reconnecting(start, codec, how):
    # The allowance does not refill during the test, so each wait has the maximum of 5 s.
    gateway = start(limits__request_bytes_per_second=1, limits__request_bytes_burst=1 << 20)
    alice, bob = [await gateway.connect(user, codec) for user in ("alice", "bob")]
    channel = await bob.create("channel", name="large", public=True)
    for _ in range(16):
        await bob.send(channel, "x" * 15_000)
    # The fourth exceeds the allowance, and is still answered: only the next request waits.
    for _ in range(4):
        if how == "history":
            assert len((await alice.history(channel, limit=200))["messages"]) > 10
        else:
            await alice.ask("subscribe", conversation=channel, after=0)
    if how == "subscribe":
        # Pushed messages delay nothing by themselves, only the next request for as much.
        await alice.ask("subscribe", conversation=channel, after=0)
    arrived = []
    pong = asyncio.ensure_future(alice.ask("ping"))
    pong.add_done_callback(lambda _: arrived.append("pong"))
    again = asyncio.ensure_future(gateway.connect("alice", codec))
    again.add_done_callback(lambda _: arrived.append("connected"))
    carol = await gateway.connect("carol", codec)
    dm = await carol.create("dm", "dave")
    await carol.send(dm, "nobody else waits")
    await carol.message(dm, "nobody else waits")
    assert not arrived
    assert (await pong)["type"] == "pong"
    await (await again).close()
    await asyncio.gather(alice.close(), bob.close(), carol.close())


async def test_five_thousand_cursors_come_in_parts(gateway, codec, names):
    alice, bob = [await gateway.connect(user, codec) for user in names("alice", "bob")]
    group = await alice.create("group", bob.user, name="known")
    cursors = {uuid4(): [7, 0] for _ in range(4_999)}
    for n in range(3):
        await alice.send(group, f"missed {n}")
    await bob.close()
    bob = await gateway.open(codec)
    bob.user = names("bob")[0]
    parts = list(cursors.items())
    parts = [dict(parts[n : n + 1000]) for n in range(0, len(parts), 1000)]
    parts[2][group] = [1, 0]
    token = bob.gateway.dev_token(bob.user)
    connected = await bob.begin("connect", token=token, cursors=parts[0], more=True)
    for n, part in enumerate(parts[1:], start=2):
        assert not connected.done()
        await bob.post(type="cursors", cursors=part, **({"more": True} if n < len(parts) else {}))
    hello = await within(connected, PATIENCE)
    assert hello["type"] == "connected" and hello["limits"]["cursors"] == 5000
    assert [(await bob.message(group))["body"] for _ in range(3)] == [f"missed {n}" for n in range(3)]
    await refused(bob.ask("cursors", cursors={}), "bad_request")
    for client in (alice, bob):
        await client.close()


@pytest.mark.embedded
async def test_cursors_in_parts_need_a_token_and_are_bounded(start, codec):
    gateway, impatient = start(), start(session__connect_timeout_ms=1500)
    stranger = await gateway.open(codec)
    await refused(stranger.ask("connect", token="nonsense", cursors={}, more=True), "unauthorized")
    assert await stranger.closed() == 4501
    token = gateway.dev_token("mallory")
    endless = await gateway.open(codec)
    await endless.begin("connect", token=token, cursors={}, more=True)
    for _ in range(70):
        await endless.post(type="cursors", cursors={}, more=True)
    assert await endless.closed() == 4500
    other = await gateway.open(codec)
    await other.begin("connect", token=token, cursors={}, more=True)
    await other.post(type="ping")
    assert await other.closed() == 4500
    token = impatient.dev_token("mallory")
    silent = await impatient.open(codec)
    await silent.begin("connect", token=token, cursors={}, more=True)
    assert await silent.closed() == 4006


@pytest.mark.embedded
async def test_an_oversized_frame_gets_its_close_code_and_no_reset(start):
    """A client still sending when its frame is refused must be able to finish sending and to read the close code."""
    gateway = start()
    token = gateway.dev_token("alice")
    name = 'chat_sessions_closed_total{reason="bad frame"}'
    for size in (66_000, 70_000, 200_000):
        for connected in (True, False):
            raw = Raw(gateway)
            if connected:
                raw.connect(token)
            before = gateway.metrics().get(name, 0)
            frame = Raw.frame(1, b"x" * size)
            raw.socket.sendall(frame[:8000])

            async def seen():
                return gateway.metrics().get(name, 0) > before

            await eventually(seen)
            for at in range(8000, size, size // 5):
                raw.socket.sendall(frame[at : at + size // 5])
                gateway.metrics()  # After this round trip a reset would have arrived.
            assert await asyncio.to_thread(raw.close_code) == 4500
            raw.socket.close()
