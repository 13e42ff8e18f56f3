"""Acknowledged changes survive restarts, kill -9 and imports: none is lost, doubled or reversed."""
import asyncio
import json
import random

import pytest
import websockets

from changes import Follower, all_ok, counted, delete, edit, entry, pages, react, reactors, sends, unread_by_hand
from support import PATIENCE, STORE, UNLIMITED, Gateway, Refused, eventually, uuid4, within

GONE = (ConnectionError, OSError, TimeoutError, websockets.WebSocketException)
EMOJI = (":a:", ":b:", ":c:", ":d:")


class Operation:
    """A change that was asked for. `state` is asked, acknowledged or refused; asked means that nobody knows whether it was done."""

    def __init__(self, value):
        self.value, self.state, self.rev = value, "asked", None


class Changer:
    """One session at a time that edits and deletes its own messages and reacts to all. It remembers what was acknowledged."""

    def __init__(self, user, conversation, pool):
        self.user, self.conversation = user, conversation
        self.pool, self.mine, self.bodies = pool, [], {}  # pool: seqs of all changers' messages
        self.edits, self.reactions, self.deletions = {}, {}, {}
        self.acknowledged, self.stop = 0, False

    def choose(self):
        """Returns a request and its operation."""
        what = random.random()
        if self.mine and what < 0.35:
            seq = random.choice(self.mine)
            operation = Operation(uuid4())
            self.edits.setdefault(seq, []).append(operation)
            return "edit", {"seq": seq, "body": operation.value}, operation
        if len(self.mine) > 5 and what < 0.4:
            seqs = random.sample(self.mine, random.randint(1, 3))
            operation = Operation(True)
            for seq in seqs:
                self.mine.remove(seq)
                self.pool.remove(seq)
                self.deletions.setdefault(seq, []).append(operation)
            return "delete", {"seqs": seqs}, operation
        seq, emoji = random.choice(self.pool), random.choice(EMOJI)
        operation = Operation(random.random() < 0.6)
        self.reactions.setdefault((seq, emoji), []).append(operation)
        return ("react" if operation.value else "unreact"), {"seq": seq, "emoji": emoji}, operation

    async def answered(self, type, operation, reply):
        answer = await within(reply, PATIENCE)
        if answer["type"] == "ok":
            operation.state, operation.rev = "acknowledged", answer["rev"]
            self.acknowledged += 1
        elif answer["code"] != "unavailable":
            assert answer["code"] == "conflict" and type != "delete", answer
            operation.state = "refused"  # The other user, or an earlier request, has deleted the message.

    async def run(self, gateway, window=20):
        """Works until the connection ends, or until `stop`."""
        client, waiting = None, []
        try:
            client = await gateway.connect(self.user)
            for _ in range(8):
                body = uuid4()
                seq = (await client.send(self.conversation, body))["seq"]
                self.bodies[seq] = body
                self.mine.append(seq)
                self.pool.append(seq)
            while not self.stop:
                while len(waiting) < window:
                    type, fields, operation = self.choose()
                    waiting.append((type, operation, await client.begin(type, conversation=self.conversation, **fields)))
                await self.answered(*waiting.pop(0))
            while waiting:
                await self.answered(*waiting.pop(0))
        except GONE:
            pass
        except Refused as refusal:
            assert refusal.code == "unavailable", refusal
        finally:
            for type, operation, reply in waiting:
                if reply.done() and not reply.exception():
                    await self.answered(type, operation, reply)
            if client:
                await client.close()

    @staticmethod
    def possible(first, operations):
        """The values that a register may have: of the last acknowledged operation, or of one that was asked for later."""
        values = [first]
        for operation in operations:
            if operation.state == "acknowledged":
                values = [operation.value]
            elif operation.state == "asked":
                values.append(operation.value)
        return values

    def check(self, entries, listed):
        """Compares the entries and the listed reactors {seq: {(user, emoji)}} with what was acknowledged."""
        for seq, body in self.bodies.items():
            deleted = "deleted" in entries[seq]
            assert deleted in self.possible(False, self.deletions.get(seq, [])), f"the deletion of {seq}"
            if not deleted:
                assert entries[seq]["body"] in self.possible(body, self.edits.get(seq, [])), f"an acknowledged edit of {seq} is lost or reversed"
        for (seq, emoji), operations in self.reactions.items():
            if seq not in listed:
                continue  # The message is deleted.
            on = (self.user, emoji) in listed[seq]
            assert on in self.possible(False, operations), f"an acknowledged reaction {emoji} of {self.user} to {seq} is lost or reversed"

    def revs(self):
        """The revs of acknowledged edits. Each edit is a change, because each body is another one."""
        return [o.rev for operations in self.edits.values() for o in operations if o.state == "acknowledged" and o.rev]


async def check(client, conversation, changers):
    """Checks all registers, that summaries equal the reactors listed, and the numbers of messages. Returns the entries."""
    entries, rev = await pages(client, conversation)
    listed = {seq: await reactors(client, conversation, seq, 500) for seq, m in entries.items() if m["kind"] == "text" and "deleted" not in m}
    for seq, pairs in listed.items():
        assert entries[seq].get("reactions", {}) == counted(pairs), f"the summary of {seq} differs from its reactors"
        mine = sorted(emoji for user, emoji in pairs if user == client.user)
        assert sorted(entries[seq].get("mine", [])) == mine
    theirs = [c for c in changers if c.conversation == conversation]
    for changer in theirs:
        changer.check(entries, listed)
    revs = [r for c in theirs for r in c.revs()]
    assert len(set(revs)) == len(revs) and max(revs, default=0) <= rev, "two changes have one rev, or the newest is missing"
    details = await client.ask("conversation", conversation=conversation)
    assert details["message_count"] == sum(1 for m in entries.values() if m["kind"] == "text" and "deleted" not in m)
    assert details["head"] == max(entries) and details["rev"] >= rev
    await unread_is_exact(client, conversation)
    return entries


async def unread_is_exact(client, conversation):
    """Unread is exact after reading; before it is never too low."""
    item = await client.inbox(conversation)
    if item is None:
        return
    assert item["unread"] >= await unread_by_hand(client, conversation, item["read_seq"])
    gone = [m["seq"] for m in await client.everything(conversation) if "deleted" in m]
    if len(gone) > 64:
        await client.ask("read", conversation=conversation, seq=sorted(gone)[-64])
    item = await client.inbox(conversation)
    assert item["unread"] == await unread_by_hand(client, conversation, item["read_seq"])


async def test_repeated_kills_lose_double_and_reverse_no_change(start):
    gateway = start(**UNLIMITED)
    alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
    conversations = [await alice.create("dm", "bob"), await alice.create("group", "bob", "carol"), await bob.create("channel", "alice", "carol")]
    pools = {conversation: [] for conversation in conversations}
    changers = [Changer(user, c, pools[c]) for c in conversations for user in ("alice", "bob")]
    followers = {c: Follower(c) for c in conversations[1:]}
    carol = await gateway.connect("carol")
    for follower in followers.values():
        await follower.read(carol)
    for client in (alice, bob, carol):
        await client.close()
    # Over Cassandra each start waits until the lease of the killed process has ended.
    for round in range(10 if STORE == "embedded" else 4):
        running = [asyncio.create_task(c.run(gateway)) for c in changers]
        target = sum(c.acknowledged for c in changers) + random.randint(50, 600)

        async def enough():
            for task in running:
                if task.done():
                    task.result()
            return sum(c.acknowledged for c in changers) >= target

        await eventually(enough)
        gateway.kill()
        await asyncio.gather(*running)
        gateway = start(gateway.directory, **UNLIMITED)
        cursors = {}
        for follower in followers.values():
            cursors |= follower.cursors()
        carol = await gateway.connect("carol", cursors=cursors)
        for follower in followers.values():
            before = follower.cursor
            await follower.agrees(carol)
            assert follower.cursor >= before
        alice = await gateway.connect("alice")
        for conversation in conversations:
            entries = await check(alice, conversation, changers)
            for changer in changers:
                # What nobody knew is known now, so that the next round cannot take one for the other.
                changer_settles(changer, conversation, entries, await listed_of(alice, conversation, changer))
        for client in (alice, carol):
            await client.close()
    assert sum(c.acknowledged for c in changers) > 500


async def listed_of(client, conversation, changer):
    if changer.conversation != conversation:
        return {}
    return {seq: await reactors(client, conversation, seq, 500) for seq in {seq for seq, _ in changer.reactions if seq in changer.pool}}


def changer_settles(changer, conversation, entries, listed):
    """Takes over the stored values as acknowledged ones: from now on they must not change by themselves."""
    if changer.conversation != conversation:
        return

    def known(value):
        operation = Operation(value)
        operation.state = "acknowledged"
        return [operation]

    for seq in changer.bodies:
        if "deleted" in entries[seq]:
            changer.deletions[seq] = known(True)
            if seq in changer.mine:
                changer.mine.remove(seq)
            if seq in changer.pool:
                changer.pool.remove(seq)
        else:
            revs = [o for o in changer.edits.get(seq, []) if o.state == "acknowledged" and o.rev]
            changer.edits[seq] = revs + known(entries[seq]["body"])
            changer.deletions.pop(seq, None)
            if seq not in changer.mine:
                changer.mine.append(seq)
                changer.pool.append(seq)
    for seq, emoji in changer.reactions:
        if seq in listed:
            changer.reactions[(seq, emoji)] = known((changer.user, emoji) in listed[seq])


async def test_an_edit_that_is_repeated_after_a_kill_is_one_edit(start):
    gateway = start(**UNLIMITED)
    alice = await gateway.connect("alice")
    dm = await alice.create("dm", "bob")
    await all_ok(alice, sends(dm, "one"))
    base = await edit(alice, dm, 1, "two")
    for round in range(4 if STORE == "embedded" else 2):
        body = f"edit {round}"
        try:
            pending = await alice.begin("edit", conversation=dm, seq=1, body=body, base_rev=base)
            if round % 2:
                await within(pending, PATIENCE)
        except GONE:
            pass
        gateway.kill()
        gateway = start(gateway.directory, **UNLIMITED)
        alice = await gateway.connect("alice")
        rev = await edit(alice, dm, 1, body, base_rev=base)
        assert await edit(alice, dm, 1, body, base_rev=base) == rev, "a repeated edit is another change"
        assert rev == base + 1
        base = rev
        assert (await entry(alice, dm, 1))["body"] == body
    await alice.close()


async def test_a_restart_keeps_every_state(start, codec):
    gateway = start(**UNLIMITED)
    alice, bob = await gateway.connect("alice", codec), await gateway.connect("bob", codec)
    conversations = [await alice.create("dm", "bob"), await alice.create("group", "bob"), await alice.create("channel", "bob")]
    for at in conversations:
        await all_ok(alice, sends(at, "one", "two", "three", "four", "five"))
        await edit(alice, at, 2, "two, edited")
        await react(bob, at, 2, "👍")
        await delete(alice, at, 3)
        await react(alice, at, 4, "🎉")
        await react(alice, at, 4, "🎉", on=False)
        await bob.ask("read", conversation=at, seq=2)
        await edit(alice, at, 5, "the newest, edited") if at != conversations[0] else await edit(alice, at, 5, "five, edited")

    async def seen(client):
        found = []
        for at in conversations:
            entries, rev = await pages(client, at)
            details = await client.ask("conversation", conversation=at)
            item = await client.inbox(at)
            if item["kind"] == "channel":
                item.pop("rev")  # A gateway that has not asked the owner yet does not know it.
            changes = await client.ask("changes", conversation=at, after=0)
            found.append([entries, rev, item, *({k: v for k, v in reply.items() if k != "id"} for reply in (details, changes))])
        return found

    async def settled():  # The heads of channels, and revs of inbox rows, are written behind.
        items = await bob.inbox()
        return all(item["rev"] == 6 for item in items) and len(items) == 3

    assert await eventually(settled)
    before = {"alice": await seen(alice), "bob": await seen(bob)}
    last = {}
    for how in ("stop", "kill"):
        if how == "stop":
            assert gateway.stop() == 0
        else:
            gateway.kill()
        gateway = start(gateway.directory, **UNLIMITED)
        for user, expected in before.items():
            client = await gateway.connect(user, codec)

            async def same():
                last[user] = await seen(client)
                return last[user] == expected

            try:
                await eventually(same)
            except AssertionError:
                raise AssertionError(f"{user} sees {last[user]} after a {how}, not {expected}") from None
            await client.close()
    alice = await gateway.connect("alice", codec)
    assert [await react(alice, at, 2, ":x:") for at in conversations] == [7, 7, 7]
    await alice.close()


async def test_import_of_messages_that_changed(start, tmp_path):
    group = "0199c0de-0000-7000-8000-00000000beef"
    at, later = 1_790_000_000_000, 1_790_000_500_000
    lines = [
        {"type": "conversation", "kind": "group", "id": group, "name": "Old", "participants": ["alice", "bob", "carol"], "at": at},
        {"type": "message", "conversation": group, "sender": "alice", "body": "the newest body", "at": at + 1, "edited_at": later},
        {"type": "message", "conversation": group, "sender": "bob", "body": "", "at": at + 2, "deleted": True},
        {"type": "message", "conversation": group, "sender": "bob", "body": "gone", "at": at + 3, "deleted": {"by": "alice", "at": later}},
        {"type": "message", "conversation": group, "sender": "carol", "body": "liked", "at": at + 4,
         "reactions": [{"user": "alice", "emoji": "👍", "at": later}, {"user": "bob", "emoji": "👍"}, {"user": "bob", "emoji": "🎉"}]},
        {"type": "message", "conversation": group, "sender": "carol", "body": "plain", "at": at + 5},
    ]
    file = tmp_path / "old.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    stopped = Gateway(str(tmp_path / "data"))
    assert stopped.command("import", str(file)).stdout.startswith("1 conversations and 5 messages imported, 0 messages were there already")
    assert stopped.command("import", str(file)).stdout.startswith("0 conversations and 0 messages imported, 5 messages were there already")
    gateway = start(str(tmp_path / "data"))
    alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
    entries, rev = await pages(alice, group)
    assert (entries[2]["body"], entries[2]["edited_at"], entries[2]["at"]) == ("the newest body", later, at + 1)
    assert entries[3]["body"] == "" and entries[3]["deleted"]["by"] == "bob"
    assert (entries[4]["body"], entries[4]["deleted"]) == ("", {"by": "alice", "at": later})
    assert (entries[5]["body"], entries[5]["reactions"], entries[5]["mine"]) == ("liked", {"👍": 2, "🎉": 1}, ["👍"])
    assert "edited_at" not in entries[6] and "rev" not in entries[6]
    items = (await alice.ask("reactions", conversation=group, seq=5))["items"]
    assert {(i["user"], i["emoji"]) for i in items} == {("alice", "👍"), ("bob", "👍"), ("bob", "🎉")}
    assert next(i["at"] for i in items if i["user"] == "alice") == later
    details = await alice.ask("conversation", conversation=group)
    assert (details["message_count"], details["head"], details["rev"]) == (3, 6, rev)
    item = await alice.inbox(group)
    assert item["unread"] == await unread_by_hand(alice, group, item["read_seq"])
    # The imported states go on like others.
    assert await edit(alice, group, 2, "edited again") == rev + 1
    assert await react(bob, group, 5, "👍", on=False) == rev + 2
    assert (await entry(alice, group, 5))["reactions"] == {"👍": 1, "🎉": 1}
    for client in (alice, bob):
        await client.close()


@pytest.mark.embedded
@pytest.mark.parametrize("wrong, why", [
    ({"edited_at": "yesterday"}, "wrong.jsonl:2"), ({"deleted": "yes"}, "wrong.jsonl:2"), ({"reactions": [{"user": "bob"}]}, "wrong.jsonl:2"),
    ({"reactions": [{"user": "bob", "emoji": "a b"}]}, "wrong.jsonl:2"),
])
def test_an_import_names_a_line_with_a_wrong_change(tmp_path, wrong, why):
    file = tmp_path / "wrong.jsonl"
    lines = [{"type": "conversation", "kind": "dm", "participants": ["alice", "bob"]},
             {"type": "message", "dm": ["alice", "bob"], "sender": "alice", "body": "x", **wrong}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = Gateway(str(tmp_path / "data")).command("import", str(file), check=False)
    assert done.returncode == 1 and why in done.stderr, done.stderr
