"""Unread counts and numbers of messages: system entries and deleted messages do not count."""
import asyncio
import random

import pytest

from changes import all_ok, changed, delete, edit, react, sends, unread_by_hand
from support import Refused, eventually
from test_messages import refused


async def unread(client, conversation):
    return (await client.inbox(conversation))["unread"]


async def test_system_entries_and_deleted_messages_do_not_count(people):
    alice, bob = await people("alice", "bob")
    at = await alice.create("group", bob.user, name="G")
    item = await bob.inbox(at)
    assert (item["last_seq"], item["unread"], item["last_message"]["kind"]) == (1, 0, "system")
    await alice.send(at, "one")  # 2
    await alice.ask("update", conversation=at, name="H")  # 3
    await alice.send(at, "two")  # 4
    await alice.ask("add", conversation=at, user="zoe")  # 5
    item = await bob.inbox(at)
    assert (item["last_seq"], item["unread"], item["last_message"]["kind"]) == (5, 2, "system")
    details = await bob.ask("conversation", conversation=at)
    assert (details["message_count"], details["head"], details.get("rev", 0)) == (2, 5, 0)
    await bob.ask("read", conversation=at, seq=3)
    assert await unread(bob, at) == 1
    await alice.send(at, "three")  # 6
    await delete(alice, at, 4)
    assert await unread(bob, at) == 1
    await delete(alice, at, 2)
    assert await unread(bob, at) == 1, "a message that was read does not count when it is deleted"
    assert (await bob.ask("conversation", conversation=at))["message_count"] == 1
    await delete(alice, at, 6)
    item = await bob.inbox(at)
    assert (item["unread"], item["last_seq"], item["last_message"]["deleted"], item["last_message"]["preview"]) == (0, 6, True, "")
    details = await bob.ask("conversation", conversation=at)
    assert (details["message_count"], details["head"], details["rev"]) == (0, 6, 3)
    await alice.send(at, "four")
    item = await bob.inbox(at)
    assert item["unread"] == 1 and "deleted" not in item["last_message"]


async def test_edits_and_reactions_do_not_count(people):
    alice, bob = await people("alice", "bob")
    dm = await alice.create("dm", bob.user)
    await all_ok(alice, sends(dm, "one", "two"))
    await bob.ask("read", conversation=dm, seq=2)
    await edit(alice, dm, 1, "one, edited")
    await edit(alice, dm, 2, "two, edited")
    await react(alice, dm, 2, "👍")
    assert await unread(bob, dm) == 0
    assert (await bob.ask("conversation", conversation=dm))["message_count"] == 2


@pytest.mark.parametrize("kind", ["dm", "group"])
async def test_more_than_64_unread_deletions_are_never_too_low_and_right_after_reading(people, kind):
    alice, bob = await people("alice", "bob")
    at = await alice.create(kind, bob.user)
    await all_ok(alice, sends(at, *map(str, range(150))))
    first = 1 if kind == "dm" else 2
    seqs = list(range(first, first + 150))
    assert await unread(bob, at) == 150
    gone = random.sample(seqs, 64)
    for n in range(0, 64, 16):
        await delete(alice, at, *gone[n : n + 16])
        assert await unread(bob, at) == 150 - n - 16, "with up to 64 deletions the count is exact"
    rest = [seq for seq in seqs if seq not in gone]
    more = random.sample(rest, 50)
    for seq in more:
        await delete(alice, at, seq)
        gone.append(seq)
        assert await unread(bob, at) >= 150 - len(gone), "the count is too low"
    assert (await bob.ask("conversation", conversation=at))["message_count"] == 150 - len(gone)
    # After reading so far that at most 64 of the deleted ones are unread, the count is exact.
    places = sorted(gone)
    for read in (places[-65], places[-40], places[-1], seqs[-1]):
        await bob.ask("read", conversation=at, seq=read)
        left = sum(1 for seq in seqs if seq > read and seq not in gone)
        assert await unread(bob, at) == left == await unread_by_hand(bob, at, read)


async def test_unread_in_a_channel(people):
    alice, bob = await people("alice", "bob")
    channel = await alice.create("channel", bob.user, name="news", public=True)
    await all_ok(alice, sends(channel, "one", "two", "three"))
    await alice.ask("update", conversation=channel, name="olds")
    item = await bob.inbox(channel)
    assert (item["last_seq"], item["unread"]) == (5, 3)
    await delete(alice, channel, 3)
    await changed(bob, channel, 3)

    async def two():
        return await unread(bob, channel) == 2

    assert await eventually(two)
    await bob.ask("read", conversation=channel, seq=3)
    assert await unread(bob, channel) == 1
    await bob.ask("read", conversation=channel, seq=5)
    assert await unread(bob, channel) == 0
    assert (await bob.ask("conversation", conversation=channel))["message_count"] == 2


async def test_unread_of_one_who_leaves_and_joins_again(people):
    alice, bob = await people("alice", "bob")
    at = await alice.create("group", bob.user)
    await all_ok(alice, sends(at, "one", "two"))
    await alice.ask("remove", conversation=at, user=bob.user)  # 4
    await all_ok(alice, sends(at, "three", "four"))  # 5, 6
    await delete(alice, at, 2, 5)
    await alice.ask("add", conversation=at, user=bob.user)  # 7
    item = await bob.inbox(at)
    assert (item["joined_seq"], item["read_seq"], item["unread"]) == (7, 7, 0)
    await all_ok(alice, sends(at, "five", "six", "seven"))  # 8 to 10
    await delete(alice, at, 6, 9)
    assert await unread(bob, at) == 2
    await bob.ask("read", conversation=at, seq=8)
    assert await unread(bob, at) == 1
    assert (await bob.ask("conversation", conversation=at))["message_count"] == 3


async def test_a_race_of_sends_reads_deletions_and_joins(people):
    """In the end the unread count of each participant equals a count by hand."""
    alice, bob, carol, dave = await people("alice", "bob", "carol", "dave")
    at = await alice.create("group", bob.user, carol.user, dave.user)
    removed = set()  # deleted or being deleted: at most 64, so that counts are exact
    sent = []

    async def chatter(client):
        for n in range(50):
            sent.append((client, (await client.send(at, f"{client.user} {n}"))["seq"]))
            if random.random() < 0.3:
                await client.ask("read", conversation=at, seq=random.choice(sent)[1])

    async def deleter():
        while len(removed) < 60:
            mine = [seq for client, seq in sent if client in (alice, bob) and seq not in removed]
            if not mine:
                await asyncio.sleep(0)
                await alice.ask("ping")
                continue
            some = set(random.sample(mine, min(len(mine), random.randint(1, 3))))
            removed.update(some)
            await delete(alice, at, *some)  # Alice is the owner.

    async def reader(client):
        for _ in range(60):
            head = (await client.history(at, limit=1))["head"]
            await client.ask("read", conversation=at, seq=random.randint(max(1, head - 20), head))
            item = await client.inbox(at)
            assert 0 <= item["unread"] <= item["last_seq"] - item["read_seq"]

    async def visitor():
        for n in range(12):
            await alice.ask("remove" if n % 2 == 0 else "add", conversation=at, user=dave.user)
            try:
                await dave.ask("read", conversation=at, seq=random.choice(sent)[1] if sent else 1)
            except Refused as refusal:
                assert refusal.code == "forbidden", refusal

    await asyncio.gather(chatter(alice), chatter(bob), deleter(), reader(carol), reader(bob), visitor())
    log = await alice.everything(at)
    assert {m["seq"] for m in log if "deleted" in m} == removed
    people_there = {i["user"]: i for i in (await alice.ask("participants", conversation=at))["items"]}
    for client in (alice, bob, carol, dave):
        item = await client.inbox(at)
        assert (item["last_seq"], item["read_seq"]) == (len(log), people_there[client.user]["read_seq"])
        assert item["unread"] == await unread_by_hand(client, at, item["read_seq"])
        await client.ask("read", conversation=at, seq=len(log))
        assert await unread(client, at) == 0
    details = await alice.ask("conversation", conversation=at)
    by_hand = sum(1 for m in log if m["kind"] == "text" and "deleted" not in m)
    assert (details["message_count"], details["head"]) == (by_hand, len(log))
    await refused(carol.ask("read", conversation=at, seq=len(log) + 1), "bad_request")
