"""The guarantees over three Cassandra nodes, which the tests kill, pause and revive."""
import asyncio
import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import time
import urllib.error
import urllib.request
import uuid

import pytest

from support import (CASSANDRA_NODES, PATIENCE, ROOT, UNLIMITED, Gateway, Refused, abandon_keyspaces, cql, eventually, keyspace_of,
                     new_keyspace, uuid4, within)
from test_durability import Writer
from test_messages import refused

pytestmark = pytest.mark.cassandra


def nodes(command, *which):
    if command in ("kill", "pause"):
        abandon_keyspaces()
    subprocess.run([str(ROOT / "tests/cassandra/cassandra"), command, *map(str, which)], check=True, timeout=300, stdout=subprocess.DEVNULL)


async def in_thread(*command):
    await asyncio.to_thread(nodes, *command)


@pytest.fixture
def cluster():
    """Brings all three nodes up again after the test."""
    yield
    nodes("resume", 1, 2, 3)
    nodes("revive", 1, 2, 3)


def ready(gateway):
    try:
        return urllib.request.urlopen(f"http://{gateway.internal}/health/ready", timeout=PATIENCE).status
    except urllib.error.HTTPError as error:
        return error.code


class Stubborn(Writer):
    """A writer that repeats each message with the same client id until it is acknowledged."""

    def __init__(self, user, conversation):
        super().__init__(user, conversation)
        self.refusals, self.stop = 0, False

    async def run(self, gateway):
        client = await gateway.connect(self.user)
        while not self.stop:
            id, retry = uuid4(), {}
            while True:
                try:
                    reply = await client.send(self.conversation, id, id, **retry)
                except Refused as refusal:
                    assert refusal.code == "unavailable", refusal
                    self.refusals += 1
                    retry = {"retry": True}
                    await asyncio.sleep(random.random() / 5)
                    continue
                self.acknowledged[id] = reply["seq"]
                # A pause leaves a starting node some CPU.
                await asyncio.sleep(random.random() / 10)
                break
        await client.close()


async def sent(client, conversation, body, id=None):
    """Sends a message again with the same client id until it is acknowledged, and returns its seq."""
    id = id or uuid4()

    async def once():
        try:
            return await client.send(conversation, body, id, retry=True)
        except Refused as refusal:
            assert refusal.code == "unavailable", refusal

    return (await eventually(once))["seq"]


async def check(gateway, conversations, writers, reads):
    """Checks that acknowledged messages are at their seqs, once, without gaps, and that inbox and unread are exact."""
    users = sorted({w.user for w in writers})
    clients = {user: await gateway.connect(user) for user in users}
    for conversation in conversations:
        log = await clients[users[0]].everything(conversation)
        assert [m["seq"] for m in log] == list(range(1, len(log) + 1)), "the log has gaps"
        places = {m["client_id"]: m["seq"] for m in log}
        assert len(places) == len(log), "a message is in the log twice"
        for writer in writers:
            if writer.conversation == conversation:
                for id, seq in writer.acknowledged.items():
                    assert places.get(id) == seq, "an acknowledged message is not at its seq"
        for user, client in clients.items():
            mine = [m["seq"] for m in log if m["sender"] == user]

            async def exact():
                item = await client.inbox(conversation)
                read = max([item["joined_seq"], reads.get((user, conversation), 0), *mine])
                return (item["last_seq"], item["read_seq"], item["unread"]) == (len(log), read, len(log) - read)

            assert await eventually(exact)
    for client in clients.values():
        await client.close()


@pytest.mark.alone
async def test_nodes_die_pause_and_come_back_under_load(start, cluster):
    gateway = start(**UNLIMITED)
    alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
    conversations = [await alice.create("dm", "bob"), await alice.create("group", "bob", "carol"),
                     await alice.create("channel", "bob", "carol")]
    writers = [Stubborn(u, c) for c in conversations for u in ("alice", "bob")]
    running = [asyncio.create_task(w.run(gateway)) for w in writers]
    reads = {}

    async def reading():
        while True:
            conversation = random.choice(conversations[1:])
            try:
                head = (await bob.history(conversation, limit=1))["head"]
                seq = random.randint(1, head)
                await bob.ask("read", conversation=conversation, seq=seq)
                reads["bob", conversation] = max(reads.get(("bob", conversation), 0), seq)
            except Refused as refusal:
                assert refusal.code == "unavailable", refusal
            await asyncio.sleep(0.05)

    reader = asyncio.create_task(reading())

    async def progress(messages=100):
        """Waits until that many more messages are acknowledged."""
        target = sum(len(w.acknowledged) for w in writers) + messages

        async def there():
            assert not any(t.done() for t in running), "a writer gave up"
            return sum(len(w.acknowledged) for w in writers) >= target

        await eventually(there)

    await progress()
    await in_thread("kill", 3)
    await progress()
    await in_thread("revive", 3)
    await progress()
    paused = time.monotonic()
    await in_thread("pause", 2)
    while time.monotonic() < paused + 20:
        await progress(20)
    await in_thread("resume", 2)
    await progress()
    await in_thread("kill", 1)
    await progress()
    await in_thread("revive", 1)
    await progress()
    for writer in writers:
        writer.stop = True
    await asyncio.gather(*running)
    reader.cancel()
    for client in (alice, bob):
        await client.close()
    assert ready(gateway) == 200
    await check(gateway, conversations, writers, reads)
    # A new gateway has nothing in memory and must read the same from the store.
    assert gateway.stop() == 0
    gateway = start(gateway.directory, **UNLIMITED)
    await check(gateway, conversations, writers, reads)


@pytest.mark.alone
async def test_without_a_quorum_sends_are_refused_in_time_until_it_is_back(start, cluster):
    gateway = start(session__request_timeout_ms=3000, store__cassandra__timeout_ms=1000, **UNLIMITED)
    alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
    dm = await alice.create("dm", "bob")
    await alice.send(dm, "before")
    await in_thread("kill", 2, 3)
    id = uuid4()
    error = await refused(within(alice.send(dm, "meanwhile", id), 10), "unavailable")
    assert error["retry_after_ms"] > 0

    async def not_ready():
        return ready(gateway) == 503

    await eventually(not_ready)
    assert (await alice.ask("ping"))["type"] == "pong", "the gateway is down"
    await refused(within(bob.send(dm, "no"), 10), "unavailable")
    await in_thread("revive", 2, 3)

    seq = await sent(alice, dm, "meanwhile", id)
    assert ready(gateway) == 200
    log = await bob.everything(dm)
    assert [m["client_id"] for m in log].count(id) == 1 and log[seq - 1]["client_id"] == id
    assert (await bob.inbox(dm))["last_seq"] == len(log)
    await alice.close()
    await bob.close()


async def test_unread_is_exact_at_every_quiet_point(gateway, names):
    users = names("alice", "bob", "carol", "dave")
    clients = {u: await gateway.connect(u) for u in users}
    group = await clients[users[0]].create("group", *users[1:])
    read = dict.fromkeys(users, 1)
    for _ in range(8):
        sends, reads = [], []
        for user, client in clients.items():
            for _ in range(random.randint(0, 20)):
                sends.append((user, await client.begin("send", conversation=group, client_id=uuid4(), body="x")))
                if random.random() < 0.3:
                    seq = random.randint(1, max(read.values()))
                    reads.append((user, seq, await client.begin("read", conversation=group, seq=seq)))
        for user, reply in sends:
            reply = await reply
            assert reply["type"] == "sent", reply
            read[user] = max(read[user], reply["seq"])
        for user, seq, reply in reads:
            assert (await reply)["type"] == "ok"
            read[user] = max(read[user], seq)
        head = (await clients[users[0]].history(group, limit=1))["head"]
        for user, client in clients.items():
            item = await client.inbox(group)
            assert (item["last_seq"], item["read_seq"], item["unread"]) == (head, read[user], head - read[user])
    for client in clients.values():
        await client.close()


async def test_late_and_repeated_writes_of_old_rows_change_nothing(start):
    """Repeats old writes with an independent driver, like hints that a node replays days later."""
    gateway = start(**UNLIMITED)
    alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
    group = await alice.create("group", "bob", name="first")
    for n in range(10):
        await alice.send(group, f"message {n}")
    await bob.ask("read", conversation=group, seq=6)
    await alice.ask("update", conversation=group, name="second")
    await alice.ask("set_role", conversation=group, user="bob", role="admin")
    session, keyspace = cql(), keyspace_of(gateway.directory)
    written_at = session.execute(f"SELECT WRITETIME(seq) AS at FROM {keyspace}.sends").one()["at"]
    assert abs(written_at / 1e6 - time.time()) < PATIENCE, "time windows need the time"

    def rows(table):
        found = session.execute(f"SELECT * FROM {keyspace}.{table}")
        return sorted((dict(row) for row in found), key=str)

    async def written():
        # Inbox rows are written in the background.
        return all(json.loads(row["summary"] or "{}").get("seq") == 13 for row in rows("user_conversations"))

    tables = ["messages", "sends", "conversations", "participants", "user_conversations"]
    assert await eventually(written)
    before = {table: rows(table) for table in tables}
    id = group
    for statement in [
        f"UPDATE user_conversations USING TIMESTAMP 6144 SET summary = 'late' WHERE user_id = 'bob' AND conversation_id = {id}",
        f"UPDATE user_conversations USING TIMESTAMP 2 SET read_seq = 2 WHERE user_id = 'bob' AND conversation_id = {id}",
        f"UPDATE participants USING TIMESTAMP 2 SET read_seq = 2 WHERE conversation_id = {id} AND shard = 0 AND user_id = 'bob'",
        f"UPDATE participants USING TIMESTAMP 1 SET role = 'member', joined_seq = 1, seq = 1 WHERE conversation_id = {id} AND shard = 0 AND user_id = 'bob'",
        f"UPDATE conversations USING TIMESTAMP 1 SET name = 'first', seq = 1 WHERE conversation_id = {id}",
        f"UPDATE conversations USING TIMESTAMP 0 SET head_bucket = 0 WHERE conversation_id = {id}",
    ]:
        for _ in range(2):
            session.execute(statement.replace("UPDATE ", f"UPDATE {keyspace}."))
    [row] = [r for r in before["messages"] if r["seq"] == 5]
    again = session.prepare(
        f"INSERT INTO {keyspace}.messages ({', '.join(row)}) VALUES ({', '.join('?' * len(row))}) USING TIMESTAMP 0")
    session.execute(again, [row[column] for column in row])
    for table in tables:
        after = rows(table)
        for row in after:
            if table == "conversations" and row.get("head_bucket") == 0:
                row["head_bucket"] = None  # 0 means the same as no value
        assert after == before[table], table
    gateway.kill()
    gateway = start(gateway.directory, **UNLIMITED)
    bob = await gateway.connect("bob")
    item = await bob.inbox(group)
    assert (item["name"], item["last_seq"], item["read_seq"], item["unread"]) == ("second", 13, 6, 5)
    details = await bob.ask("conversation", conversation=group)
    assert (details["role"], details["name"]) == ("admin", "second")
    assert [m["seq"] for m in await bob.everything(group)] == list(range(1, 14))
    await bob.close()


def virtual(table, keyspace, column):
    """Reads a virtual table of each node (the numbers of `nodetool tablestats`). Returns each table's maximum."""
    from cassandra.policies import WhiteListRoundRobinPolicy
    from cassandra.cluster import Cluster, ExecutionProfile, EXEC_PROFILE_DEFAULT

    found = {}
    for node in CASSANDRA_NODES:
        host = node.split(":")[0]
        profile = ExecutionProfile(load_balancing_policy=WhiteListRoundRobinPolicy([host]), consistency_level=1)
        with Cluster([host], execution_profiles={EXEC_PROFILE_DEFAULT: profile}) as cluster:
            rows = cluster.connect().execute(f"SELECT * FROM system_views.{table}")
            for row in rows:
                if row.keyspace_name == keyspace:
                    value = getattr(row, column)
                    found[row.table_name] = max(found.get(row.table_name, 0), value or 0)
    return found


async def test_partitions_are_bounded_and_no_message_leaves_a_tombstone(start):
    keyspace = new_keyspace()  # The counters of a new keyspace begin at 0.
    settings = {"store__cassandra__keyspace": keyspace, **UNLIMITED}
    gateway = start(**settings)
    alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
    dm = await alice.create("dm", "bob")
    last = 2 * 4096 + 100
    window = []
    for n in range(1, last + 1):
        window.append(await alice.begin("send", conversation=dm, client_id=uuid4(), body=f"message {n}"))
        if len(window) == 64 or n == last:
            for reply in window:
                assert (await reply)["type"] == "sent"
            window = []
    for before in (last + 1, 4100, 60):
        page = await bob.history(dm, before=before, limit=50)
        assert [m["seq"] for m in page["messages"]] == list(range(before - 50, before))
    assert (await bob.inbox(dm))["unread"] == last
    assert gateway.stop() == 0
    gateway = start(gateway.directory, **settings)
    bob = await gateway.connect("bob")
    assert (await bob.history(dm, limit=1))["head"] == last
    session = cql()
    rows = virtual("rows_per_read", keyspace, "max")
    assert 50 <= rows["messages"] <= 200, "a page or a takeover reads too many or too few rows"
    from cassandra.query import TraceUnavailable

    counts = {row["bucket"]: row["count"] for row in session.execute(
        f"SELECT bucket, count(*) AS count FROM {keyspace}.messages WHERE conversation_id = {dm} GROUP BY conversation_id, bucket ALLOW FILTERING")}
    assert counts == {0: 4095, 1: 4096, 2: 101}
    # The trace of a read says how many tombstones it met.
    for query in [
        f"SELECT * FROM {keyspace}.messages WHERE conversation_id = {dm} AND bucket = 1",
        f"SELECT * FROM {keyspace}.user_conversations WHERE user_id = 'bob'",
        f"SELECT * FROM {keyspace}.participants WHERE conversation_id = {dm} AND shard = 0",
        f"SELECT * FROM {keyspace}.conversations WHERE conversation_id = {dm}",
    ]:

        async def told(query=query):
            # A node writes its trace after its answer, and sometimes only a part of it.
            try:
                trace = session.execute(query, trace=True).get_query_trace(5)
            except TraceUnavailable:
                return []
            return [e.description for e in trace.events if "live rows and" in e.description]

        reads = await eventually(told)
        assert all(" 0 tombstone" in read for read in reads), reads
    tombstones = virtual("tombstones_per_read", keyspace, "max")
    # The lowest bucket of this histogram is 1; the traces above distinguish 0 from 1.
    assert all(tombstones[t] <= 1 for t in ("messages", "user_conversations", "participants", "conversations")), tombstones
    await bob.close()
    gateway.close()


def bytes_on_disk(home, keyspace):
    """All bytes of the tables of a keyspace, on all nodes."""
    found = []
    for file in pathlib.Path(home).glob(f"node*/data/sstables/{keyspace}/**/*"):
        # A compaction may remove a file meanwhile.
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            found.append(file.read_bytes())
    return b"".join(found)


async def test_deleted_texts_are_off_the_disk_after_garbagecollect(start):
    """As docs/cassandra.md says. The files are compressed, but random letters stay as they are."""
    home = os.environ.get("CASSANDRA_HOME_DIR", os.path.expanduser("~/.cache/local-cassandra"))
    keyspace = new_keyspace()
    gateway = start(store__cassandra__keyspace=keyspace, **UNLIMITED)
    alice = await gateway.connect("alice")
    group = await alice.create("group", "bob", "carol", name="G")
    first, edited, kept = (uuid.uuid4().hex for _ in range(3))

    async def flushed():
        for node in (1, 2, 3):
            await in_thread("nodetool", node, "flush", keyspace)
        return bytes_on_disk(home, keyspace)

    async def previewed(text):
        rows = cql().execute(f"SELECT summary FROM {keyspace}.user_conversations")
        return all(text in (row["summary"] or "") for row in rows)

    await alice.send(group, kept)
    seq = (await alice.send(group, first))["seq"]
    assert await eventually(lambda: previewed(first))
    stored = await flushed()
    assert all(text.encode() in stored for text in (first, kept))
    await alice.ask("edit", conversation=group, seq=seq, body=edited)
    assert await eventually(lambda: previewed(edited))
    assert edited.encode() in await flushed()
    await alice.ask("delete", conversation=group, seqs=[seq])

    async def forgotten():
        return not await previewed(edited)

    assert await eventually(forgotten)
    stored = await flushed()
    assert all(text.encode() in stored for text in (first, edited)), "it would be gone anyway"
    for node in (1, 2, 3):
        await in_thread("nodetool", node, "garbagecollect", "-g", "CELL", keyspace, "messages", "changes", "user_conversations")

    async def gone():
        # A node removes the old files after its answer.
        left = bytes_on_disk(home, keyspace)
        return kept.encode() in left and not any(text.encode() in left for text in (first, edited))

    assert await eventually(gone)
    assert [m.get("body") for m in await alice.everything(group)][-2:] == [kept, ""]


async def test_a_second_gateway_is_refused_and_a_paused_one_is_replaced(start):
    gateway = start(**UNLIMITED)
    alice = await gateway.connect("alice")
    dm = await alice.create("dm", "bob")
    await alice.send(dm, "first")
    second = Gateway(gateway.directory)
    done = second.command(check=False)
    assert done.returncode != 0 and "is running on this store" in done.stderr, done.stderr
    gateway.process.send_signal(signal.SIGSTOP)
    successor = start(gateway.directory, **UNLIMITED)
    bob = await successor.connect("bob")
    assert (await bob.send(dm, "second"))["seq"] == 2
    # The paused gateway must refuse the request it had received, and exit.
    pending = await alice.begin("send", conversation=dm, client_id=uuid4(), body="from the past")
    gateway.process.send_signal(signal.SIGCONT)
    with pytest.raises((Refused, ConnectionError)):
        reply = await within(pending, PATIENCE)
        if reply["type"] == "error":
            raise Refused(reply)
    assert await asyncio.to_thread(gateway.process.wait, PATIENCE) != 0
    assert any("another gateway has taken over" in str(line) for line in gateway.log())
    assert [m["body"] for m in await bob.everything(dm)] == ["first", "second"]
    assert (await bob.send(dm, "third"))["seq"] == 3
    await bob.close()


async def test_of_two_gateways_that_start_at_once_one_serves(start):
    """Neither has seen a heartbeat of the other yet: both wait until the lease of a killed gateway has ended."""
    killed = start(**UNLIMITED)
    alice = await killed.connect("alice")
    dm = await alice.create("dm", "bob")
    await alice.send(dm, "before")
    killed.kill()
    two = [Gateway(killed.directory, **UNLIMITED) for _ in range(2)]
    try:
        outcomes = await asyncio.gather(*(asyncio.to_thread(g.start) for g in two), return_exceptions=True)
        [serving] = [o for o in outcomes if isinstance(o, Gateway)]
        [refused_to] = [o for o in outcomes if not isinstance(o, Gateway)]
        assert "took this store" in str(refused_to) or "is running on this store" in str(refused_to), refused_to
        bob = await serving.connect("bob")
        assert (await bob.send(dm, "after"))["seq"] == 2
        await bob.close()
    finally:
        for gateway in two:
            gateway.close()


async def test_a_restored_ring_rises_above_what_is_stored(start):
    """Only the ring is older, as after a restore or in another datacenter. What is acknowledged under it must stay."""
    gateway = start(**UNLIMITED)
    for _ in range(3):
        gateway.kill()
        gateway.start()
    alice = await gateway.connect("alice")
    dms = [await alice.create("dm", f"bob{number}") for number in range(4)]
    for dm in dms:
        await alice.send(dm, "before")
    gateway.kill()
    table = f"{keyspace_of(gateway.directory)}.ring"
    newest = cql().execute(f"SELECT version FROM {table}").one()["version"]
    assert cql().execute(f"UPDATE {table} SET version = 1, members = [] WHERE name = 'ring' IF EXISTS").one()["[applied]"]
    gateway.start()
    alice = await gateway.connect("alice")
    for dm in dms:
        assert await sent(alice, dm, "after") == 2
    assert cql().execute(f"SELECT version FROM {table}").one()["version"] > newest
    assert any("the ring is older than what is stored" in str(line) for line in gateway.log())
    gateway.kill()
    before = cql().execute(f"SELECT version FROM {table}").one()["version"]
    said = gateway.command("cluster", "raise-ring").stdout
    assert said == f"the ring rose from version {before} to {before + (1 << 14)}\n"
    gateway.start()
    alice = await gateway.connect("alice")
    for dm in dms:
        assert [m["body"] for m in await alice.everything(dm)] == ["before", "after"]
        assert (await alice.send(dm, "again"))["seq"] == 3
    await alice.close()


async def test_metrics_of_the_driver(gateway, people):
    [alice] = [await people("alice")]
    dm = await alice.create("dm", "bob")
    await alice.send(dm, "hello")

    async def counted():
        metrics = gateway.metrics()
        # The driver drops a node that is slow to answer, for a moment.
        nodes = [metrics.get(f'chat_store_nodes{{state="{state}"}}') for state in ("up", "down")]
        return metrics.get("chat_store_driver_requests_total", 0) > 0 and nodes == [9, 0] and metrics

    metrics = await eventually(counted)
    assert metrics["chat_store_driver_connections"] >= 3
    assert metrics['chat_store_rows_written_total{table="messages"}'] > 0
    assert metrics['chat_store_request_seconds_count{kind="write"}'] > 0
    assert metrics["chat_store_batch_rows_count"] > 0
