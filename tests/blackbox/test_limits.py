"""Limits that the documents name and that are no settings, and defaults."""
import asyncio
import contextlib
import ctypes
import os
import pathlib
import time

import pytest

from clock import Clock, told
from support import PATIENCE, uuid4, within
from test_edge import turned_away
from test_messages import refused
from test_misuse_http import everything, raw, status, token, with_keys


async def test_a_session_subscribes_to_a_hundred_channels(people, gateway, codec):
    alice, bob = await people("alice", "bob")
    channels = [await alice.create("channel", name=f"c{n}", public=True) for n in range(101)]
    for channel in channels[:100]:
        await bob.ask("subscribe", conversation=channel)
    await refused(bob.ask("subscribe", conversation=channels[100]), "too_large")
    # It is a limit of the session. One that it has already is no further one, and one that ends makes room.
    await bob.ask("subscribe", conversation=channels[0])
    other = await gateway.connect(bob.user, codec)
    await other.ask("subscribe", conversation=channels[100])
    await bob.ask("unsubscribe", conversation=channels[0])
    await bob.ask("subscribe", conversation=channels[100])
    for channel in channels:
        await alice.send(channel, "news")
    for channel in channels[1:]:
        await bob.message(channel, "news")
    assert not [e for e in await bob.quiet() if e.get("body") == "news"]
    await other.close()


async def test_a_connect_brings_two_thousand_entries(people, gateway, codec):
    alice, bob = await people("alice", "bob")
    groups = [await alice.create("group", bob.user) for _ in range(6)]
    await bob.close()
    for group in groups:
        sends = [await alice.begin("send", conversation=group, client_id=uuid4(), body="missed") for _ in range(400)]
        assert {reply["type"] for reply in await asyncio.gather(*sends)} == {"sent"}
    back = await gateway.connect(bob.user, codec, cursors={group: [1, 0] for group in groups})
    seqs = {group: [] for group in groups}
    for _ in range(2_000):
        event = await back.message()
        seqs[event["conversation"]].append(event["seq"])
    resync = await back.event("resync")
    assert resync == {"type": "resync", "conversation": resync["conversation"], "head": 401}
    whole = list(range(2, 402))
    assert seqs == {group: [] if group == resync["conversation"] else whole for group in groups}
    # With fewer conversations there are no more than two thousand.
    fewer = await gateway.connect(bob.user, codec, cursors={group: [1, 0] for group in groups[1:]})
    for _ in range(2_000):
        await fewer.message()
    for client in (back, fewer):
        assert await client.quiet() == []
        await client.close()


@contextlib.contextmanager
def stopped(gateway, thread):
    """Stops one thread of a gateway, as a debugger does: the others go on."""
    seize, interrupt, detach = 0x4206, 0x4207, 17
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    [task] = [task for task in pathlib.Path(f"/proc/{gateway.process.pid}/task").iterdir() if (task / "comm").read_text() == f"{thread}\n"]
    for request in (seize, interrupt):
        assert ptrace(request, int(task.name), None, None) == 0, os.strerror(ctypes.get_errno())
    deadline = time.monotonic() + PATIENCE
    while ") t " not in (task / "stat").read_text():
        assert time.monotonic() < deadline, f"{thread} does not stop"
    try:
        yield
    finally:
        ptrace(detach, int(task.name), None, None)


@pytest.mark.embedded
async def test_a_session_has_64_requests_in_progress(start, codec):
    gateway = start(session__request_timeout_ms=600_000)
    alice, other = await gateway.connect("alice", codec), await gateway.connect("alice", codec)
    dm = await alice.create("dm", "bob")
    await alice.send(dm, "The first one is stored.")

    async def send():
        return await alice.begin("send", conversation=dm, client_id=uuid4(), body="hi")

    with stopped(gateway, "store-writer"):
        sent = [await send() for _ in range(63)]
        await alice.ask("ping")
        sent.append(await send())
        late = [await alice.begin("ping"), await send()]
        # The gateway reads no further here, but from another session of the same user.
        for _ in range(100):
            await other.ask("ping")
        assert not [reply for reply in [*sent, *late] if reply.done()]
    seqs = [(await within(reply, PATIENCE)).get("seq") for reply in [*sent, *late]]
    assert seqs == [*range(2, 66), None, 66]
    await asyncio.gather(alice.close(), other.close())


@pytest.mark.embedded
async def test_the_head_of_a_request_comes_within_ten_seconds(start, tmp_path):
    clock = Clock(tmp_path)
    gateway = start(prefix=clock.prefix)
    head = b"GET /icon.svg HTTP/1.1\r\nhost: localhost\r\n"
    fresh = [await raw(gateway, head) for _ in range(2)]
    used = [await raw(gateway, head + b"\r\n") for _ in range(2)]
    for reader, _ in used:
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    (slow, writer), (never, _) = fresh
    (again, next_writer), (idle, _) = used

    await told(gateway)  # The gateway has read what came.
    clock.forward(3)
    await told(gateway)
    for late in (writer, next_writer):
        late.write(b"connection: close\r\n\r\n" if late is writer else head + b"connection: close\r\n\r\n")
    assert status(await everything(slow)) == 200
    assert b"HTTP/1.1 200 OK" in await everything(again), "the second request on this connection"
    clock.forward(8)
    await told(gateway)
    assert await everything(never) == b"", "half a head is closed without an answer"
    assert b"HTTP/1.1 " not in await everything(idle)


@pytest.mark.embedded
async def test_the_connection_of_a_proxy_waits_for_two_minutes(start, tmp_path):
    clock = Clock(tmp_path)
    gateway = start(prefix=clock.prefix, client__trusted_proxies='["127.0.0.1/32"]')
    request = b"GET /icon.svg HTTP/1.1\r\nhost: localhost\r\n"
    (again, writer), (idle, _) = used = [await raw(gateway, request + b"\r\n") for _ in range(2)]
    for reader, _ in used:
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    await told(gateway)
    clock.forward(120)
    await told(gateway)
    writer.write(request + b"connection: close\r\n\r\n")
    assert b"HTTP/1.1 200 OK" in await everything(again)
    clock.forward(11)
    await told(gateway)
    assert b"HTTP/1.1 " not in await everything(idle)


@pytest.mark.embedded
async def test_clocks_may_differ_by_ten_seconds(start):
    gateway = with_keys(start)
    now = int(time.time())
    for claims in ({"exp": now - 2}, {"nbf": now + 5}, {"iat": now + 5}):
        client = await gateway.open()
        expires = claims.get("exp", now + 600)
        hello = await client.connect("alice", token("alice", exp=expires, **{k: v for k, v in claims.items() if k != "exp"}))
        assert hello["expires_at"] == (expires + 10) * 1_000
        if "exp" in claims:
            assert await client.closed() == 4002
        await client.close()
    for claims, close_code in (({"exp": now - 11}, 4002), ({"nbf": now + 3_600}, 4501)):
        assert await turned_away(gateway, token("alice", **claims)) == ("unauthorized", close_code)
