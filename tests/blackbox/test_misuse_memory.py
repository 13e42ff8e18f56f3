"""Bounds on the memory that one client can make a gateway use: open conversations, pages of history, client ids."""
import asyncio
import itertools
import os

import pytest

from support import UNLIMITED, Refused, eventually, uuid4, within
from test_misuse import Raw

pytestmark = pytest.mark.embedded

FAST = {
    **UNLIMITED,
    "limits__creations_per_minute": 1_000_000,
    "limits__creations_burst": 1_000_000,
    "limits__invitations_burst": 1_000_000,
}


def resident_mib(gateway):
    """Resident memory of the gateway, in MiB."""
    lines = open(f"/proc/{gateway.process.pid}/status").read().splitlines()
    kib = next(line.split()[1] for line in lines if line.startswith("VmRSS:"))
    return int(kib) / 1024


async def many(client, count, request, at_once=60):
    """Makes `count` requests, `at_once` in parallel. Returns all replies, including errors."""
    numbers, replies = iter(range(count)), []

    async def some():
        for number in numbers:
            reply = await within(await request(client, number), 60)
            replies.append(reply)

    await asyncio.gather(*[some() for _ in range(at_once)])
    return replies


async def insist(client, type, **fields):
    """Repeats a request until it succeeds, after the time that each refusal names."""
    while True:
        try:
            return await client.ask(type, **fields)
        except Refused as error:
            assert error.code in ("unavailable", "rate_limited") and error.error["retry_after_ms"] > 0, error
            await asyncio.sleep(error.error["retry_after_ms"] / 1000)


async def test_one_user_opening_thousands_of_conversations_affects_no_other(start):
    gateway = start(limits__open_conversations=100, **FAST)
    mallory = await gateway.connect("mallory")
    alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
    dm = await alice.create("dm", "bob")

    def invent(client, number):
        return client.begin("create", kind="dm", participants=[f"invented-{number}"])

    flood = asyncio.create_task(many(mallory, 2_000, invent))
    sent = 0
    while not flood.done():
        await alice.send(dm, str(sent))
        group = await bob.create("group", "alice", name=f"g{sent}")
        await bob.send(group, "hello")
        sent += 1
    replies = await flood
    assert sent > 5, "the flood ended before the others could send"
    created = [reply for reply in replies if reply["type"] == "created"]
    assert len(created) == 2_000, [reply for reply in replies if reply["type"] != "created"][:3]
    assert gateway.metrics()["chat_conversations_open"] <= 100
    messages = (await alice.ask("history", conversation=dm, after=0, limit=200))["messages"]
    assert [m["body"] for m in messages] == [str(n) for n in range(sent)][:200]


async def test_many_users_can_use_more_conversations_than_may_be_open(start):
    gateway = start(limits__open_conversations=10, **FAST)
    people = [await gateway.connect(f"user-{n}") for n in range(20)]
    for round in range(3):
        groups = await asyncio.gather(*[p.create("group", name=f"g{round}") for p in people])
        seqs = await asyncio.gather(*[p.send(g, "hello") for p, g in zip(people, groups)])
        assert all(sent["seq"] == 2 for sent in seqs)
    assert gateway.metrics()["chat_conversations_open"] <= 10


async def test_evicted_conversations_lose_nothing(start):
    gateway = start(limits__open_conversations=64, **FAST)
    alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
    group = await alice.create("group", "bob", name="G")
    first = str(uuid4())
    places = [(await alice.send(group, f"m{n}", client_id=first if n == 0 else None))["seq"] for n in range(100)]
    await bob.ask("read", conversation=group, seq=40)
    before = gateway.metrics().get("chat_conversations_evicted_total", 0)
    mallory = await gateway.connect("mallory")
    replies = await many(mallory, 200, lambda c, n: c.begin("create", kind="dm", participants=[f"invented-{n}"]))
    assert all(reply["type"] == "created" for reply in replies)
    assert gateway.metrics()["chat_conversations_evicted_total"] > before
    again = await alice.ask("send", conversation=group, client_id=first, body="m0", retry=True)
    assert (again["seq"], again["duplicate"]) == (places[0], True)
    history = await bob.ask("history", conversation=group, after=1, limit=200)
    assert [m["body"] for m in history["messages"]] == [f"m{n}" for n in range(100)]
    assert history["head"] == places[-1]
    item = await bob.inbox(group)
    assert (item["read_seq"], item["unread"]) == (40, places[-1] - 40)
    assert (await alice.send(group, "next"))["seq"] == places[-1] + 1
    late = await gateway.connect("bob", cursors={group: [places[-1], 0]})
    assert (await late.event("message"))["body"] == "next"


async def test_evicting_a_busy_conversation_loses_and_reorders_nothing(start):
    gateway = start(limits__open_conversations=2, **FAST)
    alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
    mallory = await gateway.connect("mallory")
    dm = await alice.create("dm", "bob")
    done = asyncio.Event()

    async def evict():
        for number in itertools.count():
            if done.is_set():
                return
            await insist(mallory, "create", kind="dm", participants=[f"invented-{number}"])

    evicting = [asyncio.create_task(evict()) for _ in range(4)]
    seqs = []
    for n in range(300):
        seqs.append((await insist(alice, "send", conversation=dm, client_id=str(uuid4()), body=str(n)))["seq"])
    done.set()
    await asyncio.gather(*evicting)
    assert seqs == list(range(1, 301))
    got = [await bob.event("message") for _ in range(300)]
    assert [m["body"] for m in got] == [str(n) for n in range(300)]
    assert gateway.metrics()["chat_conversations_evicted_total"] > 10


LINK = "https://example.org/" + "x" * 2_000


LINKS = [{"url": LINK, "name": "n" * 1_000, "mime": "m" * 1_000}] * 10


async def send_linked(client, conversation, count):
    def send(client, n):
        return client.begin("send", conversation=conversation, client_id=str(uuid4()), body="look", attachments=LINKS)

    replies = await many(client, count, send, 20)
    assert all(reply["type"] == "sent" for reply in replies)


async def test_pages_of_long_links_do_not_pile_up(start):
    gateway = start(**FAST)
    alice = await gateway.connect("alice")
    groups = [await alice.create("group", name=f"g{n}") for n in range(4)]
    for group in groups:
        await send_linked(alice, group, 200)
    reader = await gateway.connect("alice")
    # The first read of each group fills caches, which must not count.
    await many(reader, 4, lambda c, n: c.begin("history", conversation=groups[n % 4], before=100, limit=200), 4)
    before = resident_mib(gateway)
    replies = await many(
        reader, 300, lambda c, n: c.begin("history", conversation=groups[n % 4], before=20 + n // 2, limit=200), 2)
    grown = resident_mib(gateway) - before
    assert all(reply["type"] == "history" and 1 <= len(reply["messages"]) < 50 for reply in replies)
    for reply in replies:
        seqs = [m["seq"] for m in reply["messages"]]
        assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
    # At most 64 MiB of pages are kept; the rest is for pages in flight.
    assert grown < 160, f"{grown:.0f} MiB"


async def test_a_page_of_long_links_has_the_requested_messages(start):
    gateway = start(**FAST)
    alice = await gateway.connect("alice")
    group = await alice.create("group", name="g")
    await send_linked(alice, group, 300)

    async def page(**where):
        reply = await alice.ask("history", conversation=group, limit=200, **where)
        seqs = [m["seq"] for m in reply["messages"]]
        assert seqs == list(range(seqs[0], seqs[0] + len(seqs))) and len(seqs) < 200
        return seqs

    assert (await page())[-1] == 301
    assert (await page(before=200))[-1] == 199
    assert (await page(after=10))[0] == 11
    assert 150 in await page(around=150)
    seqs = []
    while not seqs or seqs[-1] < 301:
        seqs += await page(after=seqs[-1] if seqs else 1)
    assert seqs == list(range(2, 302))


async def test_resuming_after_hundreds_of_long_links_is_a_resync(start):
    gateway = start(**FAST)
    alice = await gateway.connect("alice")
    channel = await alice.create("channel", name="c")
    await send_linked(alice, channel, 300)
    late = await gateway.connect("alice", cursors={channel: [1, 0]})
    resync = await late.event("resync")
    assert (resync["conversation"], resync["head"]) == (channel, 301)


def entries_read(gateway):
    """Number of messages that the gateway has read from the store."""
    return gateway.metrics().get("chat_history_entries_read_total", 0)


async def test_messages_too_many_to_push_are_not_read(start):
    gateway = start(**FAST)
    alice = await gateway.connect("alice")
    group, channel = await alice.create("group", name="g"), await alice.create("channel", name="c", public=True)
    for conversation in (group, channel):
        replies = await many(alice, 520, lambda c, n: c.begin(
            "send", conversation=conversation, client_id=str(uuid4()), body="x" * 1_000))
        assert all(reply["type"] == "sent" for reply in replies)
    before = entries_read(gateway)
    late = await gateway.connect("alice", cursors={group: [1, 0], channel: [1, 0]})
    for _ in range(2):
        assert (await late.event("resync"))["head"] == 521
    bob = await gateway.connect("bob")
    assert (await bob.ask("subscribe", conversation=channel, after=1))["head"] == 521
    assert (await bob.event("resync"))["head"] == 521
    assert entries_read(gateway) == before


async def test_the_gateway_reads_no_further_for_a_client_that_reads_nothing(start):
    gateway = start(**FAST)
    alice = await gateway.connect("alice")
    groups = [await alice.create("group", name=f"g{n}") for n in range(4)]
    for group in groups:
        replies = await many(alice, 250, lambda c, n: c.begin(
            "send", conversation=group, client_id=str(uuid4()), body="x" * 15_000))
        assert all(reply["type"] == "sent" for reply in replies)
    before = entries_read(gateway)
    late = Raw(gateway, receive_buffer=4096)
    cursors = {group: [1, 0] for group in groups}
    await asyncio.to_thread(late.connect, gateway.dev_token("alice"), cursors=cursors)
    seen = 0
    while True:  # Waits until the buffers of the socket are full.
        await asyncio.sleep(1)
        seen, last = entries_read(gateway) - before, seen
        if seen and seen == last:
            break
    assert seen < 900, "the gateway reads ahead of a client that takes nothing"

    def rest():
        return [(event["conversation"], event["seq"]) for event in (late.reply() for _ in range(4 * 250))]

    places = await asyncio.to_thread(rest)
    for group in groups:
        assert [seq for conversation, seq in places if conversation == group] == list(range(2, 252))
    late.socket.close()


async def test_client_ids_and_entries_of_many_conversations_stay_within_the_setting(start):
    gateway = start(memory__mib=16, store__embedded__cache_mib=8, **FAST)
    alice = await gateway.connect("alice")
    groups = [await alice.create("group", name=f"g{n}") for n in range(60)]
    body = "x" * 4_000
    for group in groups:
        await many(alice, 100, lambda c, n: c.begin(
            "send", conversation=group, client_id=str(uuid4()), body=body), 50)
    # 60 conversations with 64 entries of 4 KB in memory have 15 MiB, twice their share of memory.mib.
    async def is_within():
        return 0 < gateway.metrics().get("chat_conversations_open_bytes", 0) <= 8 << 20

    await eventually(is_within)
    assert gateway.metrics()["chat_conversations_evicted_total"] > 0
    for group in groups:
        history = await alice.ask("history", conversation=group, limit=10)
        assert (history["head"], len(history["messages"])) == (101, 10)


def test_memory_mib_has_a_default_and_a_minimum(start, tmp_path):
    gateway = start()
    line = next(line for line in gateway.log() if line["message"].startswith("memory for conversations"))
    assert line["mib"] >= 256
    gateway.settings["memory__mib"] = 1
    refused = gateway.command("config", "check", check=False)
    assert refused.returncode != 0 and "memory.mib" in refused.stderr + refused.stdout
