"""Inbox, unread counts, receipts, typing, presence, and reconnecting with cursors."""
import asyncio
import random
import time
import uuid

import pytest

from clock import Clock, time_shift
from support import Gateway, eventually, uuid4
from test_messages import refused


async def test_inbox_is_newest_first_with_preview_and_unread(people):
    alice, bob, carol = await people("alice", "bob", "carol")
    dm = await alice.create("dm", bob.user)
    group = await carol.create("group", bob.user, name="G")
    await alice.send(dm, "one")
    await later(bob)
    await alice.send(dm, "ý" * 500)
    items = await bob.inbox()
    assert [i["conversation"] for i in items] == [dm, group]
    item = items[0]
    assert (item["kind"], item["name"], item["last_seq"], item["unread"], item["read_seq"], item["rev"]) == (
        "dm", alice.user, 2, 2, 0, 0)
    last = item["last_message"]
    assert (last["seq"], last["sender"], last["preview"]) == (2, alice.user, "ý" * 100)
    assert (await alice.inbox(dm))["unread"] == 0, "a sender has unread messages"
    await later(bob)
    await carol.send(group, "newer")
    assert [i["conversation"] for i in await bob.inbox()] == [group, dm]


async def later(client):
    """Waits until the clock is past the newest message, so that the next one has another `at`."""
    newest = (await client.inbox())[0]["last_message"]["at"]
    while (await client.ask("ping"))["time"] <= newest:
        pass


async def test_inbox_pages(people):
    alice = await people("alice")
    ids = [await alice.create("group", name=f"g{i}") for i in range(7)]
    seen, before = [], None
    while True:
        page = await alice.ask("inbox", limit=3, **({"before": before} if before else {}))
        assert len(page["items"]) <= 3
        seen += [i["conversation"] for i in page["items"]]
        before = page.get("next")
        if not before:
            break
    assert sorted(seen) == sorted(ids)
    await refused(alice.ask("inbox", before="nonsense"), "bad_request")


async def test_read_on_one_device_clears_unread_on_the_other(people, gateway, codec):
    phone, bob = await people("alice", "bob")
    laptop = await gateway.connect(phone.user, codec)
    dm = await bob.create("dm", phone.user)
    for i in range(3):
        await bob.send(dm, str(i))
    assert (await laptop.inbox(dm))["unread"] == 3
    await phone.ask("read", conversation=dm, seq=2)
    for client in (laptop, bob):
        receipt = await client.event("receipt")
        assert (receipt["user"], receipt["read_seq"], receipt["delivered_seq"]) == (phone.user, 2, 2)
    assert (await laptop.inbox(dm))["unread"] == 1
    await phone.ask("read", conversation=dm, seq=1)
    assert (await laptop.inbox(dm))["read_seq"] == 2, "a watermark went down"
    await laptop.close()


async def test_each_recipient_is_at_sent_delivered_or_read(people):
    alice, bob, carol, dave = await people("alice", "bob", "carol", "dave")
    group = await alice.create("group", bob.user, carol.user, dave.user)
    seq = (await alice.send(group, "who has seen this?"))["seq"]
    await bob.ask("delivered", conversation=group, seq=seq)
    await carol.ask("read", conversation=group, seq=seq)
    assert (await alice.event("receipt", lambda e: e["user"] == bob.user))["delivered_seq"] == seq
    items = (await alice.ask("participants", conversation=group))["items"]

    def status(item):
        return "read" if item["read_seq"] >= seq else "delivered" if item["delivered_seq"] >= seq else "sent"

    assert {i["user"]: status(i) for i in items} == {
        alice.user: "read", bob.user: "delivered", carol.user: "read", dave.user: "sent"}


async def test_unread_is_exact_under_concurrent_sends_and_reads(people):
    alice, bob, carol = await people("alice", "bob", "carol")
    group = await alice.create("group", bob.user, carol.user)

    async def chatter(client):
        for i in range(40):
            sent = await client.send(group, f"{i}")
            if random.random() < 0.3:
                await client.ask("read", conversation=group, seq=random.randint(1, sent["seq"]))

    async def reader(client):
        for _ in range(40):
            head = (await client.history(group, limit=1))["head"]
            await client.ask("read", conversation=group, seq=random.randint(max(1, head - 5), head))
            item = await client.inbox(group)
            assert item["unread"] == item["last_seq"] - item["read_seq"]

    await asyncio.gather(chatter(alice), chatter(bob), reader(carol), reader(alice))
    log = await alice.everything(group)
    participants = {i["user"]: i for i in (await alice.ask("participants", conversation=group))["items"]}
    for client in (alice, bob, carol):
        item = await client.inbox(group)
        assert item["last_seq"] == len(log) == 81
        assert item["read_seq"] == participants[client.user]["read_seq"]
        assert item["unread"] == 81 - item["read_seq"]
        mine = max((m["seq"] for m in log if m["sender"] == client.user), default=1)
        assert item["read_seq"] >= mine, "a sender has unread messages before their own"


async def test_typing_reaches_the_others_at_most_every_three_seconds(gateway, codec, people):
    alice, bob = await people("alice", "bob")
    elsewhere = await gateway.connect(alice.user, codec)
    dm = await alice.create("dm", bob.user)
    for _ in range(5):
        await alice.post(type="typing", conversation=dm)
    await alice.send(dm, "what came of it")
    await bob.message(dm, "what came of it")  # Frames keep their order, so every typing event came before.
    assert [e["user"] for e in bob.events if e["type"] == "typing"] == [alice.user]
    # Alice knows it, on all her devices.
    for own in (alice, elsewhere):
        await own.message(dm, "what came of it")
        assert not [e for e in own.events if e["type"] == "typing"]
    await elsewhere.close()


@pytest.mark.embedded
async def test_typing_is_told_again_after_three_seconds(start, codec, tmp_path):
    clock = Clock(tmp_path)
    gateway = start(prefix=clock.prefix)
    alice, bob = await gateway.connect("alice", codec), await gateway.connect("bob", codec)
    group = await alice.create("group", "bob")
    for n in range(3):
        for _ in range(2):
            await alice.post(type="typing", conversation=group)
        assert await bob.event("typing") == {"type": "typing", "conversation": group, "user": "alice"}
        await alice.send(group, f"message {n}")
        await bob.message(group, f"message {n}")
        assert not [e for e in alice.events + bob.events if e["type"] == "typing"]
        clock.forward(3)
    await asyncio.gather(alice.close(), bob.close())


async def test_nobody_is_told_who_types_in_a_channel(people):
    alice, bob = await people("alice", "bob")
    channel = await alice.create("channel", bob.user)
    group = await alice.create("group", bob.user)
    for conversation in (channel, group):
        await alice.post(type="typing", conversation=conversation)
    assert (await bob.event("typing"))["conversation"] == group
    await alice.send(channel, "what came of it")
    await bob.message(channel, "what came of it")  # A typing event would have come before.
    assert not [e for e in alice.events + bob.events if e["type"] == "typing"]


async def test_presence_with_last_seen(people, gateway, codec, names):
    alice = await people("alice")
    [bob_name] = names("bob")
    [item] = (await alice.ask("watch", users=[bob_name]))["items"]
    assert item == {"user": bob_name, "online": False}
    bob = await gateway.connect(bob_name, codec)
    tablet = await gateway.connect(bob_name, codec)
    assert (await alice.event("presence"))["online"] is True
    await bob.close()
    [item] = (await alice.ask("watch", users=[bob_name]))["items"]
    assert item["online"] is True, "the user is offline although another session is connected"
    await tablet.close()
    gone = await alice.event("presence")
    assert gone["online"] is False and gone["last_seen"] >= bob.hello["time"]

    async def stored():
        [item] = (await alice.ask("watch", users=[bob_name]))["items"]
        return item.get("last_seen") == gone["last_seen"]

    assert await eventually(stored)
    await alice.ask("unwatch", users=[bob_name])
    again = await gateway.connect(bob_name, codec)
    assert await alice.quiet() == []
    await again.close()
    await refused(alice.ask("watch", users=[f"u{i}" for i in range(501)]), "too_large")


async def test_reconnecting_with_cursors_misses_nothing(people, gateway, codec):
    alice, bob = await people("alice", "bob")
    dm = await alice.create("dm", bob.user)
    group = await alice.create("group", bob.user)
    channel = await alice.create("channel", bob.user)
    quiet = await alice.create("group", bob.user)
    for conversation in (dm, group, channel):
        await alice.send(conversation, "before")
    await bob.close()
    for i in range(3):
        for conversation in (dm, group, channel):
            await alice.send(conversation, f"missed {i}")
    cursors = {dm: [1, 0], group: [2, 0], channel: [2, 0], quiet: [1, 0]}
    back = await gateway.connect(bob.user, codec, cursors=cursors)
    await alice.send(dm, "live")
    assert (await back.message(dm, "live"))["seq"] == 5
    for conversation, first in ((dm, 2), (group, 3), (channel, 3)):
        got = [(await back.message(conversation)) for _ in range(3)]
        assert [m["seq"] for m in got] == [first, first + 1, first + 2]
        assert [m["body"] for m in got] == [f"missed {i}" for i in range(3)]
    # An entry that is sent meanwhile may be read for the session, delivered to it, or both.
    assert [event for event in await back.quiet() if (event.get("conversation"), event.get("seq")) != (dm, 5)] == []
    await back.close()


async def test_a_gap_too_large_to_push_is_a_resync(people, gateway, codec):
    alice, bob = await people("alice", "bob")
    dm = await alice.create("dm", bob.user)
    await bob.close()
    for reply in [await alice.begin("send", conversation=dm, client_id=uuid4(), body=str(i)) for i in range(501)]:
        await reply
    back = await gateway.connect(bob.user, codec, cursors={dm: [0, 0]})
    assert (await back.event("resync")) == {"type": "resync", "conversation": dm, "head": 501}
    await back.close()
    almost = await gateway.connect(bob.user, codec, cursors={dm: [1, 0]})
    assert [(await almost.message(dm))["seq"] for _ in range(500)] == list(range(2, 502))
    await almost.close()


async def test_a_cursor_for_a_conversation_the_user_is_not_in(people, gateway, codec):
    alice, bob = await people("alice", "bob")
    group = await alice.create("group", bob.user)
    empty = await alice.create("dm", bob.user)
    await bob.close()
    await alice.ask("remove", conversation=group, user=bob.user)
    back = await gateway.connect(bob.user, codec, cursors={group: [1, 0], uuid4(): [5, 0], empty: [0, 0]})
    changes = [await back.event("conversation") for _ in range(2)]
    assert {c["change"] for c in changes} == {"removed"}
    assert await back.quiet() == []
    await back.close()


async def test_cursors_for_invented_conversations_are_ignored(people, gateway, codec):
    alice, bob = await people("alice", "bob")
    dm = await alice.create("dm", bob.user)
    await alice.send(dm, "real")
    await bob.close()
    cursors = {uuid4(): [1, 0] for _ in range(500)} | {dm: [0, 0]}
    back = await gateway.connect(bob.user, codec, cursors=cursors)
    assert (await back.message(dm))["body"] == "real"
    assert len([e for e in await back.quiet() if e["type"] == "conversation"]) <= 101
    await back.close()


async def test_nothing_is_lost_between_resume_and_live(people, gateway, codec):
    """A client reconnects while messages flow. After ignoring known seqs it has every message exactly once."""
    alice, bob = await people("alice", "bob")
    group = await alice.create("group", bob.user)
    channel = await alice.create("channel", bob.user)
    await bob.close()
    total, done = 300, asyncio.Event()

    async def flow():
        for i in range(total):
            await asyncio.gather(alice.send(group, str(i)), alice.send(channel, str(i)))
        done.set()

    flowing = asyncio.create_task(flow())
    seen = {group: 1, channel: 1}
    while True:
        finished = done.is_set()
        client = await gateway.connect(bob.user, codec, cursors={c: [s, 0] for c, s in seen.items()})
        await client.quiet()
        await asyncio.sleep(random.random() * 0.02)  # connections of random length: the point of the test
        await client.close()
        for event in client.events:
            if event["type"] == "message":
                conversation, seq = event["conversation"], event["seq"]
                assert seq <= seen[conversation] + 1, f"a gap before {seq}"
                seen[conversation] = max(seen[conversation], seq)
        if finished:
            break
    await flowing
    assert seen == {group: total + 1, channel: total + 1}


async def test_what_a_home_remembers_of_a_user_follows_every_change(people, gateway, codec):
    alice, bob = await people("alice", "bob")
    both = [await alice.create("group", bob.user), await alice.create("channel", bob.user)]
    await bob.close()
    seqs = {conversation: 1 for conversation in both}

    async def back():
        return await gateway.connect(bob.user, codec, cursors={c: [seq, 0] for c, seq in seqs.items()})

    async def both_send(body):
        return [await alice.send(conversation, body) for conversation in both]

    async def gets(client, body):
        for conversation in both:
            seqs[conversation] = (await client.message(conversation, body))["seq"]

    await (await back()).close()

    def remembered():
        return gateway.metrics().get("chat_places_remembered_total", 0)

    before = remembered()
    for number in range(3):
        await both_send(f"missed {number}")
        client = await back()
        await gets(client, f"missed {number}")
        await client.close()
    assert remembered() > before

    client = await back()
    for conversation in both:
        await alice.ask("remove", conversation=conversation, user=bob.user)
        await client.event("conversation", lambda e: e["change"] == "removed" and e["conversation"] == conversation)
    await client.close()
    await both_send("not for bob")
    client = await back()
    for conversation in both:
        await client.event("conversation", lambda e: e["change"] == "removed" and e["conversation"] == conversation)
    assert "message" not in {e["type"] for e in await client.quiet()}
    await client.close()

    for conversation in both:
        await alice.ask("add", conversation=conversation, user=bob.user)
    client = await back()
    await both_send("for bob again")
    await gets(client, "for bob again")
    await client.close()


# Wrong clocks.


@pytest.mark.embedded
@pytest.mark.parametrize("ends", ["stop", "kill"])
async def test_a_clock_that_was_fast_keeps_no_conversation_on_top(start, tmp_path, ends):
    """A gateway's clock is two hours ahead for a while. After that it is right."""
    data = str(tmp_path / "data")
    fast = Gateway(data)
    fast.prefix = time_shift("+2h")
    fast.start()
    try:
        alice = await fast.connect("alice")
        ids = {name: await alice.create("channel" if name == "channel" else "group", "bob", name=name) for name in ("old", "channel", "group")}
        ahead = await alice.send(ids["old"], "from the future")
        assert ahead["at"] > (time.time() + 3600) * 1000
        await alice.send(ids["channel"], "from the future too")
        await alice.send(ids["group"], "the newest so far")
        assert [i["name"] for i in await alice.inbox()] == ["group", "channel", "old"]
        await alice.close()
        assert ends == "kill" or fast.stop() == 0
    finally:
        fast.close()
    right = start(data)
    # Nobody has read anything yet when Bob's friend writes to him.
    carol = await right.connect("carol")
    dm = await carol.create("dm", "bob")
    sent = await carol.send(dm, "later")
    assert abs(sent["at"] / 1000 - time.time()) < 3600, "the time that people see is right at once"
    bob = await right.connect("bob")
    wanted = ["carol", "group", "channel", "old"]
    assert [i["name"] for i in await bob.inbox()] == wanted
    for name in ("old", "channel", "group", "old"):
        await bob.send(ids[name], "now")
        wanted = [name, *(other for other in wanted if other != name)]
        assert [i["name"] for i in await bob.inbox()] == wanted
    # Pages are in the same order, and so is what another process reads from the store.
    for gateway in (right, None):
        if gateway is None:
            assert right.stop() == 0
            gateway = start(data)
            bob = await gateway.connect("bob")
        seen, before = [], None
        while True:
            page = await bob.ask("inbox", limit=1, **({"before": before} if before else {}))
            seen += [i["name"] for i in page["items"]]
            before = page.get("next")
            if not before:
                break
        assert seen == wanted
    ranks = [uuid_time(i["last_message"]["message_id"]) for i in await bob.inbox()]
    assert ranks == sorted(ranks, reverse=True), "docs/protocol.md: by the time in message_id"
    for client in (bob, carol):
        await client.close()


def uuid_time(text):
    assert uuid.UUID(text).version == 1
    return uuid.UUID(text).time
