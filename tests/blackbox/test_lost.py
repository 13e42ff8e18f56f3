"""Conversations whose log has lost entries or changes, and the way out: `chat-gateway store check` and `store mend`."""
import asyncio
import signal
import subprocess
import uuid

import pytest

from support import BINARY, UNLIMITED, Three, clean, cql, eventually, keyspace_of, uuid4
from test_messages import refused

pytestmark = pytest.mark.cassandra

BUCKET = 4096


def delete(gateway, table, conversation, positions, whole=False):
    """Deletes rows of a log by hand, each of the epoch that wrote it. So the deletion hides nothing that is written with another
    epoch. With `whole` it is the position with all epochs, and hides everything that is written there later."""
    session, table = cql(), f"{keyspace_of(gateway.directory)}.{table}"
    name = "seq" if table.endswith("messages") else "rev"
    for position in positions:
        place = f"conversation_id = {conversation} AND bucket = {position // BUCKET} AND {name} = {position}"
        epochs = [row["epoch"] for row in session.execute(f"SELECT epoch FROM {table} WHERE {place}")]
        assert any(epochs), f"nothing is at {position}"
        for epoch in filter(None, epochs):
            session.execute(f"DELETE FROM {table} WHERE {place}" + ("" if whole else f" AND epoch = {epoch}"))


def store(gateway, *arguments):
    done = gateway.command("store", *arguments, check=False)
    return done.returncode, done.stdout + done.stderr


async def group(gateway, messages=12):
    """A group of alice and bob: entry 1 creates it, and the others are messages of alice, of which bob read the first three."""
    alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
    group = await alice.create("group", "bob")
    for n in range(2, messages + 2):
        assert (await alice.send(group, f"message {n}"))["seq"] == n
    await bob.ask("read", conversation=group, seq=4)
    for seq in (2, 3):
        await alice.ask("edit", conversation=group, seq=seq, body=f"edited {seq}")
    await alice.ask("react", conversation=group, seq=12, emoji="👍")
    for client in (alice, bob):
        await client.close()
    return group


async def test_a_conversation_that_lost_entries_goes_on_after_it_is_mended(start):
    gateway = start(**UNLIMITED)
    id = await group(gateway)
    assert gateway.stop() == 0
    lost = [5, 6, 9, 13]
    delete(gateway, "messages", id, lost)
    delete(gateway, "changes", id, [2])

    gateway.start()
    bob = await gateway.connect("bob")
    await refused(bob.history(id), "unavailable")
    await refused(bob.send(id, "no"), "unavailable")
    # A gateway is running, so nothing may be changed.
    code, said = store(gateway, "mend", id)
    assert code == 1 and "is running on this store" in said, said
    await bob.close()
    assert gateway.stop() == 0
    told = [line for line in gateway.log() if "the log is damaged" in line.get("message", "")]
    assert told and "store mend" in told[0]["message"], told

    code, said = store(gateway, "check", id)
    assert code == 1, said
    for part in ("1 to 13 must be there; whole up to 4, and 4 missing after that", "missing: 5 to 6", "missing: 9 to 9",
                 "missing: 13 to 13", "missing: 2 to 2", f"store mend {id}"):
        assert part in said, said
    code, said = store(gateway, "mend", id)
    assert code == 0 and "mended" in said, said
    code, said = store(gateway, "mend", id)
    assert code == 0 and "nothing was changed" in said, said
    code, said = store(gateway, "check", id)
    assert code == 0 and "lost before and filled: 4" in said, said

    gateway.start()
    alice, bob = await gateway.connect("alice"), await gateway.connect("bob", cursors={id: [4, 1]})
    item = await bob.inbox(id)
    # 5 to 13 without the four that are lost.
    assert (item["last_seq"], item["read_seq"], item["unread"]) == (13, 4, 5), item
    log = await alice.everything(id)
    assert [m["seq"] for m in log] == list(range(1, 14))
    for message in log[1:]:
        assert bool(message.get("deleted")) == (message["seq"] in lost), message
    bodies = {m["seq"]: m["body"] for m in log[1:] if not m.get("deleted")}
    assert bodies == {n: f"edited {n}" if n < 4 else f"message {n}" for n in range(2, 14) if n not in lost}
    # A client with a cursor from before gets what it lacks.
    assert [(await bob.message(id))["seq"] for _ in range(9)] == list(range(5, 14))
    changes = await bob.ask("changes", conversation=id, after=1)
    assert changes["reset"], changes
    changes = await bob.ask("changes", conversation=id, after=3)
    assert not changes.get("reset") and {i["seq"] for i in changes["items"]} == set(lost), changes
    assert (await alice.send(id, "after it"))["seq"] == 14
    assert (await bob.message(id, "after it"))["seq"] == 14

    async def counted():
        return (await bob.inbox(id))["unread"] == 6

    assert await eventually(counted)
    for client in (alice, bob):
        await client.close()


async def test_crash_repair_leaves_out_what_is_damaged(start):
    """A conversation that nobody can load keeps a gateway neither from its start nor from the others that it repairs."""
    gateway = start(**UNLIMITED)
    damaged, others = await group(gateway), [await group(gateway) for _ in range(3)]
    gateway.kill()
    delete(gateway, "messages", damaged, [5])
    for _ in range(2):
        gateway.start()
        left_out = [line["conversation"] for line in gateway.log() if "crash repair leaves out" in line["message"]]
        # It is tried again, because what is lost may have come back.
        assert left_out == [damaged]
        bob = await gateway.connect("bob")
        for other in others:
            item = await bob.inbox(other)
            assert (item["last_seq"], item["read_seq"], item["unread"]) == (13, 4, 9), item
        await refused(bob.history(damaged), "unavailable")
        await bob.close()
        gateway.kill()
    gateway.start()
    assert gateway.stop() == 0
    assert store(gateway, "mend", damaged)[0] == 0
    gateway.start()
    assert not any("crash repair leaves out" in line["message"] for line in gateway.log())
    bob = await gateway.connect("bob")
    item = await bob.inbox(damaged)
    assert (item["last_seq"], item["read_seq"], item["unread"]) == (13, 4, 8), item
    await bob.close()


async def test_crash_repair_of_a_cluster_leaves_out_what_is_damaged():
    """The gateway that repairs asks the owners of the conversations, and the damaged ones are with each of them."""
    cluster = Three(**UNLIMITED)
    try:
        cluster.start()
        groups = [await group(cluster) for _ in range(12)]
        damaged, others = groups[::2], groups[1::2]
        for node in cluster.nodes:
            node.kill()
        for conversation in damaged:
            delete(cluster, "messages", conversation, [5])
        cluster.start()

        def told():
            lines = [line for node in cluster.nodes for line in node.log() if "crash repair leaves out" in line["message"]]
            return sorted(line["conversation"] for line in lines)

        async def left_out():
            return told() == sorted(damaged)

        async def repaired():
            rows = [await bob.inbox(other) for other in others]
            return all((row["last_seq"], row["read_seq"], row["unread"]) == (13, 4, 9) for row in rows)

        assert await eventually(left_out), (told(), damaged)
        bob = await cluster.connect("bob")
        assert await eventually(repaired)
        await bob.close()
    finally:
        cluster.close()
        clean(cluster.directory)


async def test_an_older_part_of_the_log_may_be_lost(start):
    """The conversation is served then, but nobody can read the pages there."""
    gateway = start(**UNLIMITED)
    alice = await gateway.connect("alice")
    dm = await alice.create("dm", "bob")
    window = []
    for n in range(400):
        window.append(await alice.begin("send", conversation=dm, client_id=uuid4(), body=f"message {n + 1}"))
        if len(window) == 50:
            for reply in window:
                assert (await reply)["type"] == "sent"
            window = []
    assert gateway.stop() == 0
    delete(gateway, "messages", dm, range(20, 150))
    gateway.start()
    alice = await gateway.connect("alice")
    assert (await alice.history(dm))["head"] == 400
    await refused(alice.history(dm, after=0), "unavailable")
    # It reads only, so a gateway may be running.
    code, said = store(gateway, "check", dm)
    assert code == 1 and "missing: 20 to 149" in said, said
    assert gateway.stop() == 0
    code, said = store(gateway, "mend", dm)
    assert code == 0, said
    gateway.start()
    alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
    log = await alice.everything(dm)
    assert [m["seq"] for m in log if m.get("deleted")] == list(range(20, 150)) and len(log) == 400
    item = await bob.inbox(dm)
    # Inbox rows know the 64 highest deleted seqs. A count is too high with more of them, and right after reading.
    assert item["unread"] == 400 - 64
    await bob.ask("read", conversation=dm, seq=200)
    assert (await bob.inbox(dm))["unread"] == 200
    for client in (alice, bob):
        await client.close()


async def mend_with_a_pause(gateway, conversation, filled_last):
    """Mends a conversation, and pauses the command for longer than a lease when it has filled the last place."""
    keyspace, session = keyspace_of(gateway.directory), cql()
    last = f"{keyspace}.messages WHERE conversation_id = {conversation} AND bucket = {filled_last // BUCKET} AND seq = {filled_last}"

    async def is_filled():
        return session.execute(f"SELECT seq FROM {last}").one()

    command = [BINARY, "store", "mend", conversation]
    with subprocess.Popen(command, env=gateway.env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as mending:
        try:
            assert await eventually(is_filled)
            mending.send_signal(signal.SIGSTOP)
            await asyncio.sleep(3)
        finally:
            mending.send_signal(signal.SIGCONT)
        said, _ = await asyncio.to_thread(mending.communicate)
    assert "the lease had ended" in said, said
    return mending.returncode, said


async def test_the_end_of_a_log_is_found_when_its_record_is_older(start):
    """As after a restore of tables that are of different moments: the newest partition of the log is there, but the record of it and
    the end of the partition before it are not. It is mended although the lease of the command ends meanwhile."""
    gateway = start(**UNLIMITED)
    alice = await gateway.connect("alice")
    dm = await alice.create("dm", "bob")
    for n in range(10):
        await alice.send(dm, f"message {n + 1}")
    await alice.close()
    assert gateway.stop() == 0
    session, messages = cql(), f"{keyspace_of(gateway.directory)}.messages"
    row = dict(session.execute(f"SELECT * FROM {messages} WHERE conversation_id = {dm} AND bucket = 0 AND seq = 10").one())
    columns = [column for column, value in row.items() if value is not None]
    insert = session.prepare(f"INSERT INTO {messages} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))}) USING TIMESTAMP 0")
    for seq in range(BUCKET, BUCKET + 3):
        row |= {"bucket": 1, "seq": seq, "texts": seq, "settled": seq - 1, "body": f"message {seq}", "client_id": uuid.uuid4()}
        session.execute(insert, [row[column] for column in columns])
    code, said = store(gateway, "check", dm)
    assert code == 1 and "rows beyond the recorded end" in said, said
    code, said = await mend_with_a_pause(gateway, dm, BUCKET - 1)
    assert code == 0 and f"missing: 11 to {BUCKET - 1}" in said, said
    assert store(gateway, "check", dm)[0] == 0
    gateway.start()
    alice = await gateway.connect("alice")
    assert (await alice.send(dm, "after it"))["seq"] == BUCKET + 3
    log = await alice.everything(dm)
    left = [m["body"] for m in log if not m.get("deleted")]
    assert left == [f"message {n}" for n in [*range(1, 11), *range(BUCKET, BUCKET + 3)]] + ["after it"]
    await alice.close()


async def test_a_place_that_was_deleted_by_hand_with_a_time_is_named(start):
    gateway = start(**UNLIMITED)
    id = await group(gateway)
    assert gateway.stop() == 0
    delete(gateway, "messages", id, [6], whole=True)
    code, said = store(gateway, "mend", id)
    assert code == 1 and "deleted by hand" in said, said
    assert store(gateway, "check", id)[0] == 1
