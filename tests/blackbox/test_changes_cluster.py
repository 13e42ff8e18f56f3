"""Changes on three gateways over Cassandra: seen everywhere, resumed anywhere, and kept when a gateway is killed or paused."""
import asyncio
import random
import signal

import pytest

from changes import Follower, all_ok, changed, delete, edit, react, reactors, sends, visible
from support import Refused, Three, eventually, uuid4
from test_changes_durability import GONE, Changer, check
from test_cluster import others, up, whole  # noqa: F401  `up` is a fixture

pytestmark = pytest.mark.cassandra


@pytest.fixture
def three(up):  # noqa: F811
    return up(Three)


class Restless(Changer):
    """A changer that works through any gateway that answers, until it is stopped."""

    async def everywhere(self, cluster):
        while not self.stop:
            node = random.choice([node for node in cluster.nodes if node.process.poll() is None])
            try:
                await self.run(node, window=8)
            except GONE:
                pass
            # What nobody knows stays so; the next gateway may be the one that is dead.
            await asyncio.sleep(0.05)


async def connected(node, user, **fields):
    """Connects a user while another gateway, which may be the user's home, does not answer."""

    async def connect():
        try:
            return await node.connect(user, **fields)
        except GONE:
            return None
        except Refused as refusal:
            assert refusal.code == "unavailable", refusal
            return None

    return await eventually(connect)


class Crowd:
    """Users who change messages of a group and a channel through all gateways, and followers on each gateway."""

    async def begin(self, cluster):
        self.cluster = cluster
        first = await cluster.connect("alice")
        self.conversations = [await first.create("group", "bob", "carol"), await first.create("channel", "bob", "carol"),
                              await first.create("dm", "bob")]
        await first.close()
        pools = {c: [] for c in self.conversations}
        self.changers = [Restless(user, c, pools[c]) for c in self.conversations for user in ("alice", "bob")]
        self.tasks = [asyncio.create_task(c.everywhere(cluster)) for c in self.changers]
        await self.progress()
        return self

    async def progress(self, changes=100):
        target = sum(c.acknowledged for c in self.changers) + changes

        async def there():
            for task in self.tasks:
                if task.done():
                    task.result()
            return sum(c.acknowledged for c in self.changers) >= target

        await eventually(there)

    async def settle(self):
        """Stops all changers. Then each gateway must show the same, with every acknowledged change."""
        for changer in self.changers:
            changer.stop = True
        await asyncio.gather(*self.tasks)
        for conversation in self.conversations:
            seen = []
            for node in self.cluster.nodes:
                # A gateway that was paused may have to come back as a new one first.
                client = await connected(node, "alice")
                entries = await check(client, conversation, self.changers)
                seen.append({seq: visible(m) for seq, m in entries.items()})
                await client.close()
            assert seen[0] == seen[1] == seen[2], "gateways show different states"

    async def cancel(self):
        for changer, task in zip(self.changers, self.tasks):
            changer.stop = True
            task.cancel()


@pytest.fixture
async def crowd(three):
    crowd = await Crowd().begin(three)
    yield crowd
    await crowd.cancel()


async def test_takeovers_lose_double_and_reverse_no_change(crowd, three):
    followers = []
    for node in three.nodes:
        for conversation in crowd.conversations[:2]:
            client = await node.connect("carol")
            follower = Follower(conversation)
            await follower.read(client)
            followers.append(follower)
    for victim in random.sample(range(3), 3):
        three.nodes[victim].kill()
        await crowd.progress()
        for follower in followers:
            if follower.client.reader.done():
                # The follower resumes on another gateway with its cursor.
                node = random.choice(others(three, victim))
                follower.client = await connected(node, "carol", cursors=follower.cursors())
        await asyncio.to_thread(three.nodes[victim].start)
        await whole(three)
        await crowd.progress()
    await crowd.settle()
    for follower in followers:
        await follower.agrees(follower.client)
        await follower.client.close()


async def test_a_paused_owner_loses_no_change(crowd, three):
    for victim in random.sample(range(3), 2):
        node = three.nodes[victim]
        node.process.send_signal(signal.SIGSTOP)
        try:
            # The others take over. A changer that is connected to the paused gateway waits until it goes on.
            probe = await connected(random.choice(others(three, victim)), "alice")

            async def accepted():
                for conversation in crowd.conversations:
                    seq = next(s for s in crowd.changers[0].bodies) if conversation == crowd.conversations[0] else None
                    try:
                        if seq:
                            await react(probe, conversation, seq, ":paused:")
                        else:
                            await probe.send(conversation, "paused")
                    except Refused as refusal:
                        if refusal.code == "unavailable":
                            return False
                        assert refusal.code == "conflict", refusal
                return True

            assert await eventually(accepted)
            await probe.close()
        finally:
            node.process.send_signal(signal.SIGCONT)
        await whole(three)
        await crowd.progress(20)
    await crowd.settle()


async def test_a_change_reaches_users_on_every_gateway(three):
    alice = await three.nodes[0].connect("alice")
    for kind in ("dm", "group", "channel"):
        at = await alice.create(kind, "bob") if kind == "dm" else await alice.create(kind, "bob", "carol")
        await all_ok(alice, sends(at, "one", "two"))
        seq = 1 if kind == "dm" else 2
        bobs = [await node.connect("bob") for node in three.nodes]
        rev = await edit(alice, at, seq, "edited")
        for bob in bobs:
            assert (await changed(bob, at, seq, lambda i: "body" in i))["body"] == "edited"
            assert (await bob.history(at))["rev"] >= rev
        rev = await react(bobs[1], at, seq, "👍")
        for bob in bobs:
            assert (await bob.event("reacted", lambda e: e["conversation"] == at))["rev"] == rev
            assert (await changed(bob, at, seq, lambda i: "reactions" in i))["reactions"] == {"👍": 1}
            assert await reactors(bob, at, seq) == {("bob", "👍")}
        await delete(alice, at, seq)
        for bob in bobs:
            assert "deleted" in await changed(bob, at, seq, lambda i: "deleted" in i)
            await bob.close()
    await alice.close()


async def test_resuming_on_another_gateway_brings_the_missed_changes(three):
    alice = await three.nodes[0].connect("alice")
    conversations = [await alice.create("group", "bob"), await alice.create("channel", "bob")]
    followers = [Follower(at) for at in conversations]
    bob = await three.nodes[0].connect("bob")
    for follower in followers:
        await all_ok(alice, sends(follower.conversation, "one", "two", "three"))
        await react(bob, follower.conversation, 2, "👍")
        await follower.read(bob)
    for node in (*three.nodes, *three.nodes):
        await bob.close()
        texts = {}
        for follower in followers:
            at = follower.conversation
            texts[at] = uuid4()
            await edit(alice, at, 3, texts[at])
            await react(alice, at, 4, f":{texts[at][:8]}:")
            await react(alice, at, 4, f":{texts[at][:8]}:", on=False)
        cursors = {}
        for follower in followers:
            cursors |= follower.cursors()
        bob = await node.connect("bob", cursors=cursors)
        for follower in followers:
            await follower.agrees(bob)
            assert follower.states[3]["body"] == texts[follower.conversation]
    for client in (alice, bob):
        await client.close()


async def test_subscribers_of_a_channel_follow_a_takeover(three):
    """Nobody reconnects: the gateways subscribe again at the next owner with their [seq, rev]."""
    alice = await three.nodes[0].connect("alice")
    channel = await alice.create("channel", name="open", public=True)
    await all_ok(alice, sends(channel, "one", "two"))
    readers = []
    for number, node in enumerate(three.nodes[:2]):
        reader = await node.connect(f"reader-{number}")
        await reader.ask("subscribe", conversation=channel, after=3, rev=0)
        follower = Follower(channel)
        await follower.read(reader)
        readers.append((follower, reader))
    for round in range(3):
        three.nodes[2].kill()

        async def edited():
            try:
                return await edit(alice, channel, 2, f"round {round}")
            except Refused as refusal:
                assert refusal.code == "unavailable", refusal

        rev = await eventually(edited)
        await asyncio.to_thread(three.nodes[2].start)
        await whole(three)
        for follower, reader in readers:

            async def told():
                await follower.follow(reader)
                return follower.cursor >= rev and follower.states[2]["body"] == f"round {round}"

            assert await eventually(told), "a subscriber lacks a change"
    for client in (alice, *(reader for _, reader in readers)):
        await client.close()
