"""The guarantees of three gateways on one store when one of them dies, pauses, leaves, is cut off, or comes back."""
import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
import urllib.error

import pytest
import websockets

from support import UNLIMITED, Apart, Gateway, Refused, Three, clean, cql, eventually, keyspace_of, member, uuid4, within
from test_cassandra import in_thread, nodes, ready as status

pytestmark = pytest.mark.cassandra

ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "4"))
# What a gateway logs whose end is cut short, or whose conversations wait for the end of its lease.
CUT_OFF = {"some requests did not end in half of drain.grace_ms, and were cut",
           "could not leave the ring; the others wait until the lease of this gateway has ended"}
# What it logs if the machine is so slow that its lease ends.
LAPSED = {"the lease could not be renewed", "the lease had ended; proposing a new version"}
QUICK = {"session__request_timeout_ms": 5000, **UNLIMITED}
GONE = (ConnectionError, OSError, TimeoutError, urllib.error.URLError, websockets.WebSocketException)


@pytest.fixture
def up():
    """Returns a function that starts a cluster. After the test all database nodes are up and the clusters are stopped."""
    started = []

    def go(kind, **settings):
        cluster = kind(**QUICK, **settings)
        started.append(cluster)
        return cluster.start()

    yield go
    nodes("resume", 1, 2, 3)
    nodes("revive", 1, 2, 3)
    for cluster in started:
        cluster.close()
        clean(cluster.directory)


@pytest.fixture
def three(up):
    return up(Three)


class Person:
    """A user who writes and listens through any gateway that answers, and repeats a message until it is acknowledged.
    Like every client that must miss nothing, it sends cursors, ignores known seqs, and reads `history` at a gap."""

    def __init__(self, name, cluster, conversations):
        self.name, self.cluster = name, cluster
        self.acknowledged, self.seen, self.upto = {}, {c: set() for c in conversations}, dict.fromkeys(conversations, 0)
        self.client, self.stop, self.given_up, self.connections, self.refusals = None, False, False, 0, 0

    async def connected(self):
        while self.client is None or self.client.reader.done():
            node = random.choice([node for node in self.cluster.nodes if node.process.poll() is None])
            cursors = {conversation: [seq, 0] for conversation, seq in self.upto.items()}
            try:
                self.client = await within(node.connect(self.name, cursors=cursors), 6)
                self.connections += 1
            except (Refused, *GONE):
                self.client = None
                await asyncio.sleep(0.05)
        return self.client

    async def elsewhere(self):
        client, self.client = self.client, None
        client.socket.transport.abort()

    async def listen(self):
        """Handles the events received so far."""
        events, self.client.events = self.client.events, []
        for event in events:
            if event["type"] == "message":
                self.take(event)
            elif event["type"] == "resync":
                await self.read(event["conversation"])
        for conversation, seen in self.seen.items():
            if max(seen, default=0) > self.upto[conversation]:
                await self.read(conversation)

    def take(self, message):
        conversation = message["conversation"]
        self.seen[conversation].add(message["seq"])
        while self.upto[conversation] + 1 in self.seen[conversation]:
            self.upto[conversation] += 1

    async def read(self, conversation):
        while True:
            page = await self.client.history(conversation, after=self.upto[conversation], limit=200)
            for message in page["messages"]:
                self.take({**message, "conversation": conversation})
            if self.upto[conversation] >= page["head"]:
                return

    async def run(self):
        while not self.stop:
            conversation, id, retry = random.choice(list(self.seen)), uuid4(), {}
            while not self.given_up:
                await self.connected()
                try:
                    reply = await within(self.client.send(conversation, id, id, **retry), 8)
                    await within(self.listen(), 8)
                except (Refused, *GONE) as error:
                    if isinstance(error, Refused):
                        assert error.code == "unavailable", error
                        self.refusals += 1
                    await self.elsewhere()
                    retry = {"retry": True}
                    continue
                self.acknowledged[id] = (conversation, reply["seq"])
                break
            await asyncio.sleep(random.random() / 20)


async def settle(people):
    """Stops all writers. Then histories must be equal and complete, and every user must have every message."""
    for person in people:
        person.stop = True
    await asyncio.gather(*(person.task for person in people))
    for person in people:
        await person.connected()
    places = {}
    for conversation in people[0].seen:
        seen = [[(m["seq"], m["client_id"]) for m in await p.client.everything(conversation)] for p in people]
        assert all(log == seen[0] for log in seen), "gateways return different histories"
        assert [seq for seq, _ in seen[0]] == list(range(1, len(seen[0]) + 1)), "the log has gaps"
        assert len({id for _, id in seen[0]}) == len(seen[0]), "a message is in the log twice"
        places |= {id: (conversation, seq) for seq, id in seen[0]}
        for person in people:

            async def all_seen():
                await person.listen()
                return person.upto[conversation] == len(seen[0])

            assert await eventually(all_seen), "a connected user lacks messages"

            async def exact():
                return (await person.client.inbox(conversation))["last_seq"] == len(seen[0])

            assert await eventually(exact), "the inbox differs from the log"
    for person in people:
        for id, place in person.acknowledged.items():
            assert places.get(id) == place, "an acknowledged message is not at its seq"
        await person.client.close()


@contextlib.asynccontextmanager
async def crowd(cluster, count=6):
    names = [f"person-{n}" for n in range(count)]
    first = await cluster.connect(names[0])
    conversations = [await first.create("group", *names[1:], name=f"group {n}") for n in range(6)]
    conversations.append(await first.create("channel", *names[1:]))
    await first.close()
    people = [Person(name, cluster, conversations) for name in names]
    for person in people:
        person.task = asyncio.create_task(person.run())
    try:
        await progress(people)
        yield people
    finally:
        for person in people:
            person.stop = person.given_up = True
            person.task.cancel()


async def progress(people, messages=100):
    target = sum(len(p.acknowledged) for p in people) + messages

    async def there():
        for person in people:
            if person.task.done():
                person.task.result()
        return sum(len(p.acknowledged) for p in people) >= target

    await eventually(there)


class Probe:
    """One more session, on a gateway that stays up, which measures when each conversation accepts messages."""

    async def begin(self, people, node):
        self.client = await node.connect(people[0].name)
        self.conversations = list(people[0].seen)
        return self

    async def accepted(self, since):
        """Sends a message to each conversation. Returns the seconds from `since` until the last is acknowledged."""

        async def one(conversation):
            id, retry = uuid4(), {}
            while True:
                try:
                    await self.client.send(conversation, id, id, **retry)
                    return time.monotonic() - since
                except Refused as refusal:
                    assert refusal.code == "unavailable", refusal
                    retry = {"retry": True}

        return max(await asyncio.gather(*map(one, self.conversations)))

    async def slowest(self, until):
        """Sends messages until the task `until` is done. Returns the longest seconds from sent to acknowledged."""
        longest = 0
        while not until.done():
            longest = max(longest, await self.accepted(time.monotonic()))
        return longest


def others(three, victim):
    return [node for node in three.nodes if node is not three.nodes[victim]]


async def killed(cluster, people, victim):
    probe = await Probe().begin(people, random.choice(others(cluster, victim)))
    began = time.monotonic()
    cluster.nodes[victim].kill()
    took = await probe.accepted(began)
    await probe.client.close()
    await progress(people)
    await asyncio.to_thread(cluster.nodes[victim].start)
    return took


async def stopped(cluster, people, victim):
    node, began = cluster.nodes[victim], time.monotonic()
    node.process.send_signal(signal.SIGSTOP)
    try:
        while time.monotonic() < began + 10:
            await progress(people, 20)
    finally:
        node.process.send_signal(signal.SIGCONT)

    async def back():
        return any("coming back as a new one" in str(line) for line in node.log())

    await eventually(back)


async def cut_off(cluster, people, victim, hosts):
    """Cuts a gateway off from hosts for 12 s: longer than a lease, and than peers wait for a heartbeat or a link."""
    began = time.monotonic()
    cluster.cut(victim, hosts)
    try:
        while time.monotonic() < began + 12:
            await progress(people, 20)
    finally:
        cluster.mend(victim)


async def parted(cluster, people, victim):
    await cut_off(cluster, people, victim, [cluster.hosts[(victim + 1) % 3]])


async def without_store(cluster, people, victim):
    await cut_off(cluster, people, victim, cluster.stores)


async def alone(cluster, people, victim):
    await cut_off(cluster, people, victim, cluster.stores + cluster.hosts)


async def store_node_killed(cluster, people, victim):
    await in_thread("kill", victim + 1)
    await progress(people)
    await in_thread("revive", victim + 1)


CHAOS = (killed, parted, without_store, stopped, killed, alone, store_node_killed, killed)


async def whole(cluster):
    """Waits until every gateway is ready. Prints their logs if one does not become ready."""

    async def ready():
        try:
            return all([await asyncio.to_thread(status, node) == 200 for node in cluster.nodes])
        except OSError:
            return False

    try:
        await eventually(ready)
    except AssertionError:
        for node in cluster.nodes:
            print(node.process.poll(), *open(node.log_path).readlines()[-120:], sep="\n", flush=True)
        raise


@pytest.mark.alone
async def test_nothing_is_lost_when_gateways_die_pause_or_are_cut_off(up):
    cluster = up(Apart)
    takeovers = []
    async with crowd(cluster) as people:
        for number, happens in zip(range(ROUNDS), itertools.cycle(CHAOS)):
            victim = random.randrange(3)
            print(f"round {number + 1}: {happens.__name__}, gateway {victim + 1}", flush=True)
            if took := await happens(cluster, people, victim):
                takeovers.append(took)
            await whole(cluster)
            await progress(people)
        acknowledged = sum(len(p.acknowledged) for p in people)
        await settle(people)
    takeovers = sorted(round(took, 2) for took in takeovers)
    print(f"{acknowledged} messages acknowledged; seconds from kill -9 until every conversation accepted messages: {takeovers}", flush=True)


async def reading_parts(cluster, name, conversations):
    """Reads random parts of logs through random gateways. Read repair copies just these parts from node to node."""
    while True:
        node = random.choice([node for node in cluster.nodes if node.process.poll() is None])
        client = None
        try:
            client = await within(node.connect(name), 6)
            for _ in range(20):
                conversation = random.choice(conversations)
                head = (await within(client.history(conversation, limit=1), 8))["head"]
                before, limit = random.randint(max(1, head - 40), head + 1), random.randint(1, 20)
                await within(client.history(conversation, before=before, limit=limit), 8)
        except (Refused, *GONE):
            await asyncio.sleep(0.05)
        if client:
            client.socket.transport.abort()


@pytest.mark.alone
async def test_takeovers_lose_nothing_while_database_nodes_are_paused_in_turn(three):
    """Rule [settle-whole]: what a takeover settles reaches other nodes in each case, and readers copy parts of it."""
    async with crowd(three) as people:
        reader = asyncio.create_task(reading_parts(three, people[0].name, list(people[0].seen)))
        # It ends with the test, however that ends.
        people[0].task.add_done_callback(lambda _: reader.cancel())
        for victim in range(3):
            three.nodes[victim].kill()
            for node in range(victim, victim + 3):
                node = node % 3 + 1
                await in_thread("pause", node)
                # Longer than a lease, and than the gateway waits for a node: owners change while it is silent.
                await asyncio.sleep(2.5)
                await in_thread("resume", node)
            await progress(people)
            await asyncio.to_thread(three.nodes[victim].start)
            await whole(three)
        assert not reader.done(), reader.result()
        await settle(people)


async def test_a_rolling_restart_is_no_more_than_a_reconnect(three):
    pauses, usual = [], []
    async with crowd(three) as people:
        for victim, node in enumerate(three.nodes):
            probe = await Probe().begin(people, random.choice(others(three, victim)))
            usual.append(await probe.slowest(asyncio.create_task(asyncio.sleep(1))))
            leaving = asyncio.create_task(asyncio.to_thread(node.stop))
            pauses.append(await probe.slowest(leaving))
            assert await leaving == 0, "\n".join(str(line) for line in node.log()[-12:])
            # It left by itself: no request had to be cut, and nobody waits for the end of its lease.
            said = {line.get("message") for line in node.log()}
            assert said & LAPSED or not said & CUT_OFF and len(ring_of(three)["members"]) <= 2, said
            await probe.client.close()
            await progress(people)
            await asyncio.to_thread(node.start)
            await progress(people)
        refusals = sum(p.refusals for p in people)  # 0, unless the machine is so slow that leases end.
        await settle(people)
    print(f"{refusals} refusals, each accepted when repeated; slowest message while a gateway left, in seconds:",
        [round(t, 3) for t in pauses], "and in the second before it left:", [round(t, 3) for t in usual], flush=True)


async def test_a_drain_is_clean_while_another_gateway_is_paused(up):
    """What the paused one has to acknowledge cannot end before the third has removed it, and everything is stored."""
    three = up(Three, drain__delay_ms=0, drain__spread_ms=0)
    leaving, paused, third = three.nodes
    alice, bob = await third.connect("alice"), await paused.connect("bob")
    groups = [await alice.create("group", bob.hello["user"]) for _ in range(24)]
    began = time.monotonic()
    paused.process.send_signal(signal.SIGSTOP)
    try:
        # Acknowledged or not: those of the gateway that leaves are stored, and wait for the one that is paused.
        sent = [asyncio.create_task(alice.send(group, "hello")) for group in groups]
        await asyncio.wait(sent, timeout=1)
        code = await asyncio.to_thread(leaving.stop)
        took = time.monotonic() - began
        assert code == 0, "\n".join(str(line) for line in leaving.log()[-12:])
    finally:
        paused.process.send_signal(signal.SIGCONT)
    print(f"drained {took:.1f} s after another gateway was paused", flush=True)
    await hello_arrives(groups, sent, third)


async def hello_arrives(groups, sent, gateway):
    """Waits until bob finds each acknowledged message, and it counts as unread."""
    await asyncio.gather(*sent, return_exceptions=True)
    groups = [group for group, task in zip(groups, sent) if not task.exception()]
    assert groups
    client = await gateway.connect("bob")

    async def have():
        logs = [await client.history(group) for group in groups]
        said = [[entry["body"] for entry in log["messages"] if entry["kind"] == "text"] for log in logs]
        inbox = {item["conversation"]: item["unread"] for item in (await client.ask("inbox", limit=100))["items"]}
        return said == [["hello"]] * len(groups) and [inbox.get(group) for group in groups] == [1] * len(groups)

    await eventually(have)


async def test_a_drain_says_if_nobody_was_there_to_take_over(up):
    """The two others have died, and are not removed yet. The next start repairs what they did not take over."""
    # Requests wait for conversations of the dead, and the gateway is to leave before it can remove those.
    three = up(Three, drain__delay_ms=0, drain__spread_ms=0, drain__grace_ms=2000)
    leaving, *dead = three.nodes
    alice, bob, carol = await leaving.connect("alice"), await dead[0].connect("bob"), await dead[1].connect("carol")
    groups = [await alice.create("group", bob.hello["user"], carol.hello["user"]) for _ in range(12)]
    for node in dead:
        node.kill()
    sent = [asyncio.create_task(alice.send(group, "hello")) for group in groups]
    await asyncio.wait(sent, return_when=asyncio.FIRST_COMPLETED)
    code = await asyncio.to_thread(leaving.stop)
    rings = [line for line in leaving.log() if line.get("message") == "ring version adopted"]
    after = itertools.dropwhile(lambda ring: ring["members"].count(",") < 2, rings)
    if any(ring["gateway"] in ring["members"] and ring["members"].count(",") < 2 for ring in after):
        print("the machine was so slow that the dead were removed first", flush=True)
    else:
        assert code == 1
        said = {line.get("message") for line in leaving.log()}
        assert "no other gateway took over some conversations; the next one that starts repairs them" in said, said
    await asyncio.to_thread(leaving.start)
    await hello_arrives(groups, sent, leaving)


async def test_a_gateway_without_the_cluster_secret_is_refused(three):
    stranger = Gateway(three.directory, **member(**QUICK))
    stranger.settings["cluster__secret"] = "something else, that is also long enough"
    try:
        await asyncio.to_thread(stranger.start)

        async def refused():
            return any("does not know the cluster's secret" in str(line) for n in [*three.nodes, stranger] for line in n.log())

        assert await eventually(refused)
    finally:
        stranger.close()


def test_a_cluster_needs_a_shared_store_and_a_secret(tmp_path):
    settings = member(store__kind="embedded")
    refused = Gateway(str(tmp_path), **settings).command("config", "check", check=False)
    assert refused.returncode != 0 and "belongs to one gateway alone" in refused.stderr, refused.stderr
    for key in ("cluster__secret", "cluster__advertise"):
        less = {k: v for k, v in member().items() if k != key}
        refused = Gateway(str(tmp_path), **less).command("config", "check", check=False)
        assert refused.returncode != 0 and key.replace("__", ".") in refused.stderr, refused.stderr


async def test_metrics_and_status_of_the_cluster(gateway, people):
    alice, bob = await people("alice", "bob")
    dm = await alice.create("dm", bob.hello["user"])
    await alice.send(dm, "hello")

    async def told():
        metrics = gateway.metrics()
        links = metrics['chat_peer_links{state="up"}'], metrics['chat_peer_links{state="down"}']
        all_arrived = metrics["chat_publications_in_hand"] == 0
        return links == (6, 0) and all_arrived and metrics["chat_ring_lease_seconds"] > 0 and metrics

    metrics = await eventually(told)
    assert metrics["chat_ring_members"] == 9, "each of three gateways reports three members"
    assert metrics["chat_peer_frames_sent_total"] > 0 and metrics["chat_takeovers_total"] > 0
    shown = gateway.nodes[0].command("cluster", "status").stdout
    assert shown.count("alive") == 3, shown
    assert "level 1 (this build supports 1)" in shown and shown.count("supports level 1\n") == 3, shown


def ring_of(cluster, change=None):
    """Changes the ring's row by hand, if `change` says how. Returns the row."""
    table = f"{keyspace_of(cluster.directory)}.ring"
    if change:
        assert cql().execute(f"UPDATE {table} SET {change} WHERE name = 'ring' IF EXISTS").one()["[applied]"]
    return cql().execute(f"SELECT * FROM {table} WHERE name = 'ring'").one()


async def test_an_upgrade_is_finalized_while_gateways_run(three):
    """No build had level 0. It stands for the level of an earlier build, until there is one."""
    for node in three.nodes:
        assert node.stop() == 0
    assert not ring_of(three, "level = 0")["members"]
    three.start()
    row = ring_of(three)
    assert (row["level"], len(row["members"])) == (0, 3)
    assert three.metrics()["chat_cluster_level"] == 0
    alice, bob = await three.connect("alice"), await three.connect("bob")
    dm = await alice.create("dm", "bob")
    people = [Person(name, three, [dm]) for name in ("alice", "bob")]
    for person in people:
        person.task = asyncio.create_task(person.run())
    await asyncio.sleep(1)
    said = await asyncio.to_thread(three.nodes[0].command, "cluster", "finalize")
    assert "the level rose from 0 to 1: all 3 gateways" in said.stdout, said

    async def risen():
        return three.metrics()["chat_cluster_level"] == 3

    assert await eventually(risen)
    said = await asyncio.to_thread(three.nodes[0].command, "cluster", "finalize")
    assert "has level 1 already" in said.stdout, said
    after = ring_of(three)
    assert (after["level"], after["version"]) == (1, row["version"] + 1) and after["change"] != row["change"]
    assert after["members"] == row["members"], "nobody left the ring"
    await settle(people)
    # Changes of the members keep the level.
    assert three.nodes[2].stop() == 0
    three.nodes[2].start()
    assert ring_of(three)["level"] == 1
    for client in (alice, bob):
        await client.close()


async def test_a_gateway_does_not_start_above_its_level(three):
    before = ring_of(three, "level = 99")
    refused = "the store has level 99, and this build supports levels up to 1"
    for node in three.nodes:
        assert await asyncio.to_thread(node.process.wait, 60) == 1
        assert refused in open(node.log_path).read()
    said = three.nodes[0].command("cluster", "finalize", check=False)
    assert said.returncode == 1 and "the ring has level 99" in said.stderr, said
    with pytest.raises(AssertionError, match="level 99"):
        three.nodes[0].start()
    assert ring_of(three) == before, "nothing was written"
