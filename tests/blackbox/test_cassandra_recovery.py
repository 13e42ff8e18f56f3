"""What docs/cassandra.md tells operators to do when a node, a cluster or a datacenter is lost, on nodes of the tests' own."""
import asyncio
import functools
import json
import shutil

import pytest
from cassandra.protocol import ConfigurationException

from support import UNLIMITED, Gateway, OwnNodes, eventually, new_keyspace, uuid4
from test_cassandra import bytes_on_disk, sent
from test_changes_cluster import connected
from test_messages import refused, send_all

# One process at a time has nodes of its own, which need much memory and time to start.
pytestmark = [pytest.mark.cassandra, pytest.mark.xdist_group("own nodes")]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Three nodes that keep no hints, so that what a node missed stays missing."""
    with OwnNodes(tmp_path_factory.mktemp("three"), 3, CASSANDRA_HINTS="false") as nodes:
        yield nodes


def over(nodes, node=1):
    """Settings of a gateway that asks this node first."""
    return {"store__cassandra__nodes": json.dumps([nodes.host(node) + ":9042"]), "store__cassandra__keyspace": nodes.keyspace}


async def bodies(client, conversation):
    return [message.get("body") for message in await client.everything(conversation)]


async def test_a_replaced_node_brings_no_row_out_of_a_majority(nodes, start):
    """Node 2 misses messages, then node 3, which has them, is lost. What streams from node 2 lacks them too."""
    gateway = start(**over(nodes))
    alice = await gateway.connect("alice")
    dms = [await alice.create("dm", f"bob{number}") for number in range(24)]
    await asyncio.to_thread(nodes.run, "kill", 2)
    for dm in dms:
        assert await sent(alice, dm, "before") == 1
    await asyncio.to_thread(nodes.run, "revive", 2)
    await asyncio.to_thread(nodes.lose, 3)
    # A running gateway reads conversations, and the read repair of that would mend what the test leaves to `nodetool`.
    gateway.kill()
    # Without -force a repair refuses while a node is down.
    await asyncio.to_thread(nodes.tool, 1, "repair", "-full", "-force", nodes.keyspace)
    await asyncio.to_thread(nodes.replace, 3, 4)
    # Takeovers, before the new node is repaired.
    gateway.start()
    alice = await gateway.connect("alice")
    for dm in dms:
        assert await sent(alice, dm, "after") == 2
    await asyncio.to_thread(nodes.tool, 4, "repair", "-full", nodes.keyspace)
    for dm in dms:
        assert await bodies(alice, dm) == ["before", "after"]
    await alice.close()


async def test_a_snapshot_of_one_moment_is_restored(nodes, start):
    nodes.keyspace = new_keyspace()
    gateway = start(**over(nodes))
    alice = await gateway.connect("alice")
    dm = await alice.create("dm", "bob")
    for number in range(1, 4):
        assert await sent(alice, dm, f"m{number}") == number
    await alice.ask("edit", conversation=dm, seq=2, body="edited")
    assert gateway.stop() == 0
    for node in nodes.members:
        await asyncio.to_thread(nodes.tool, node, "snapshot", "-t", "one", nodes.keyspace)
    gateway.start()
    alice = await gateway.connect("alice")
    assert await sent(alice, dm, "later") == 4
    await alice.ask("delete", conversation=dm, seqs=[1])
    assert gateway.stop() == 0
    for node in nodes.members:
        # What is left in a commit log would be replayed into the restored tables.
        await asyncio.to_thread(nodes.tool, node, "drain")
    await asyncio.to_thread(nodes.run, "stop")
    for node in nodes.members:
        nodes.restore(node, "one")
    await asyncio.to_thread(nodes.run, "revive", *nodes.members)
    await asyncio.to_thread(nodes.tool, 1, "repair", "-full", nodes.keyspace)
    assert "the ring rose from version" in gateway.command("cluster", "raise-ring").stdout
    gateway.start()
    alice = await gateway.connect("alice")
    assert await bodies(alice, dm) == ["m1", "edited", "m3"]
    assert await sent(alice, dm, "again") == 4
    assert await bodies(alice, dm) == ["m1", "edited", "m3", "again"]
    await alice.close()
    assert gateway.stop() == 0


async def test_the_other_datacenter_takes_over_and_gives_back(tmp_path):
    """The west gets a copy of each write later. It loses what had not come, and what is written there comes back to the east."""
    with OwnNodes(tmp_path / "nodes", 2, CASSANDRA_HINTS="false", CASSANDRA_DATACENTERS="east west") as nodes:
        both = "{east=1,west=1}"
        east, west = (
            Gateway(str(tmp_path / "data"), store__cassandra__datacenter=name, store__cassandra__replication=both, **over(nodes, node))
            for node, name in ((1, "east"), (2, "west")))
        try:
            conversations = await fill_the_east(nodes, east)
            east.kill()
            await asyncio.to_thread(nodes.run, "kill", 1)
            await continue_in_the_west(west, *conversations)
            await give_back(nodes, west, east, *conversations)
        finally:
            east.close()
            west.close()


def connections(host):
    """How many connections this machine has to the CQL port of a node."""
    address = "".join(f"{int(part):02X}" for part in reversed(host.split("."))) + ":2352"
    with open("/proc/net/tcp") as sockets:
        return [(remote, state) for _, _, remote, state, *_ in map(str.split, sockets)].count((address, "01"))


async def test_nodes_of_a_datacenter_that_comes_later_are_not_asked(tmp_path):
    """The west joins while a gateway runs that names no datacenter. It has no copy of what was written before."""
    with OwnNodes(tmp_path / "nodes", 1, CASSANDRA_DATACENTERS="east west") as nodes:
        gateway = Gateway(str(tmp_path / "data"), store__cassandra__replication="{east=1}", **UNLIMITED, **over(nodes))
        try:
            gateway.start()
            alice = await gateway.connect("alice")
            dm = await alice.create("dm", "bob")
            await send_all(alice, dm, [uuid4() for _ in range(1_000)])
            await alice.close()
            await asyncio.to_thread(nodes.run, "revive", 2)
            both = "{'class': 'NetworkTopologyStrategy', 'east': 1, 'west': 1}"

            async def is_altered():
                try:
                    nodes.execute(1, f"ALTER KEYSPACE {nodes.keyspace} WITH replication = {both}")
                except ConfigurationException:  # The first node does not know yet that the second one has joined.
                    return False
                return True

            assert await eventually(is_altered)
            # The driver asks where the copies are when it loses the connection over which it asked last.
            west = nodes.host(2)
            before = connections(west)

            async def is_asked():
                return connections(west) > before

            await asyncio.to_thread(nodes.run, "pause", 1)
            assert await eventually(is_asked)
            await asyncio.to_thread(nodes.run, "resume", 1)
            alice = await connected(gateway, "alice")
            assert await sent(alice, dm, "later") == 1_001
            # Pages that the gateway does not have in memory.
            for after in range(0, 500, 25):
                page = await alice.history(dm, after=after, limit=25)
                assert [message["seq"] for message in page["messages"]] == [*range(after + 1, after + 26)]
            await alice.close()
        finally:
            gateway.close()


LOST = "e2b1c0ffee5ca1ab1edec0de5eed5afe"  # a text that no compression hides


async def fill_the_east(nodes, gateway):
    """Returns three conversations: the west misses nothing of one, the end of another, and a message within the third."""
    gateway.start()
    alice = await gateway.connect("alice")
    whole, short, hole = [await alice.create("dm", f"bob{number}") for number in range(3)]
    for dm in (whole, short, hole):
        assert await sent(alice, dm, "first") == 1
    in_the_west = functools.partial(stored, nodes, 2)
    assert await eventually(lambda: in_the_west(3))
    await asyncio.to_thread(nodes.run, "kill", 2)
    for dm in (short, hole):
        assert await sent(alice, dm, LOST) == 2
    # A gateway starts while the other datacenter is away.
    gateway.kill()
    gateway.start()
    await asyncio.to_thread(nodes.run, "revive", 2)
    alice = await gateway.connect("alice")
    assert await sent(alice, whole, "second") == 2
    assert await sent(alice, hole, "third") == 3
    assert await eventually(lambda: in_the_west(5))
    await alice.close()
    return whole, short, hole


async def stored(nodes, node, count):
    return len(nodes.execute(node, f"SELECT seq FROM {nodes.keyspace}.messages")) == count


async def continue_in_the_west(gateway, whole, short, hole):
    """Follows the steps of the documents, and mends the conversation that has a hole."""
    assert "the ring rose from version" in gateway.command("cluster", "raise-ring").stdout
    gateway.start()
    alice = await gateway.connect("alice")
    assert await bodies(alice, whole) == ["first", "second"]
    assert await sent(alice, whole, "west") == 3
    assert await bodies(alice, short) == ["first"]
    assert await sent(alice, short, "west") == 2
    await refused(alice.send(hole, "west"), "unavailable")
    checked = gateway.command("store", "check", hole, check=False)
    assert checked.returncode == 1 and "missing: 2 to 2" in checked.stdout, checked
    assert gateway.stop() == 0
    gateway.command("store", "mend", hole)
    gateway.start()
    alice = await gateway.connect("alice")
    assert await bodies(alice, hole) == ["first", "", "third"]
    assert await sent(alice, hole, "west") == 4
    assert gateway.stop() == 0


async def give_back(nodes, west, east, whole, short, hole):
    """The east comes back without what it had, and then gets all of the west."""
    keyspace, home = nodes.keyspace, nodes.home / "node1"
    replicated = f"ALTER KEYSPACE {keyspace} WITH replication = {{'class': 'NetworkTopologyStrategy', %s}}"
    nodes.execute(2, replicated % "'west': 1")
    shutil.rmtree(home / "data/hints")
    await asyncio.to_thread(nodes.run, "revive", 1)

    async def told():
        known = nodes.execute(1, f"SELECT replication FROM system_schema.keyspaces WHERE keyspace_name = '{keyspace}'")
        return "east" not in str(known)

    # A node that does not know it yet takes its copy for its own, and cleans nothing up.
    assert await eventually(told)
    await asyncio.to_thread(nodes.tool, 1, "flush", keyspace)
    assert LOST.encode() in bytes_on_disk(nodes.home, keyspace)
    await asyncio.to_thread(nodes.tool, 1, "cleanup", keyspace)

    async def forgotten():
        return LOST.encode() not in bytes_on_disk(nodes.home, keyspace)

    assert await eventually(forgotten)
    nodes.execute(2, replicated % "'east': 1, 'west': 1")
    await asyncio.to_thread(nodes.tool, 1, "rebuild", "--keyspace", keyspace, "--", "west")
    assert "the ring rose from version" in east.command("cluster", "raise-ring").stdout
    east.start()
    alice = await east.connect("alice")
    assert await bodies(alice, whole) == ["first", "second", "west"]
    assert await bodies(alice, short) == ["first", "west"]
    assert await bodies(alice, hole) == ["first", "", "third", "west"]
    for dm, seq in ((whole, 4), (short, 3), (hole, 5)):
        assert await sent(alice, dm, "east") == seq
    await alice.close()
    assert east.stop() == 0
