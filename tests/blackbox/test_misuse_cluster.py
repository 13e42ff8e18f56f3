"""Answers between gateways that exceed one frame (16 MiB), or would without a bound."""
import json
import uuid

import pytest

from support import UNLIMITED, Three, clean, cql, keyspace_of, uuid4

pytestmark = pytest.mark.cassandra

ROWS = 30_000


@pytest.fixture
def three():
    cluster = Three(session__request_timeout_ms=20_000, limits__frame_bytes=128 << 10, limits__outbox_bytes=64 << 20, **UNLIMITED)
    try:
        yield cluster.start()
    finally:
        cluster.close()
        clean(cluster.directory)


def connections(cluster):
    """Number of connections that the gateways have made to each other."""
    return cluster.metrics()["chat_peer_connections_total"]


def fill_inbox(cluster, user):
    """Writes inbox rows that make the user a participant of ROWS groups with long names."""
    from cassandra.concurrent import execute_concurrent_with_args

    table = f"{keyspace_of(cluster.directory)}.user_conversations"
    insert = cql().prepare(f"INSERT INTO {table} (user_id, conversation_id, summary) VALUES (?, ?, ?) USING TIMESTAMP 2048")

    def summary():
        last = {"seq": 1, "message_id": str(uuid.uuid1()), "at": 1000, "sender": "somebody", "kind": "text", "preview": "😀" * 100}
        return json.dumps({"seq": 1, "kind": "group", "name": "n" * 256, "joined_seq": 1, "last": last, "changes": 0, "texts": 1})

    rows = ((user, uuid.uuid4(), summary()) for _ in range(ROWS))
    execute_concurrent_with_args(cql(), insert, rows, concurrency=64)


async def test_an_inbox_longer_than_a_frame_is_served_by_every_gateway(three):
    before = connections(three)
    user = f"popular-{uuid4()}"
    fill_inbox(three, user)
    # One of the three is the user's home. The others ask it for the user's conversations, and then for the inbox.
    for node in three.nodes:
        client = await node.connect(user)
        items = await client.inbox()
        assert items and all(item["name"] == "n" * 256 for item in items)
        await client.close()
    assert connections(three) == before, "a link between gateways broke"


async def test_a_resume_of_very_large_messages_is_a_resync_on_every_gateway(three):
    before = connections(three)
    writer = await three.nodes[0].connect("writer")
    group = await writer.create("group", "reader", name="links")
    link = {"url": "https://example.org/" + "u" * 2_000, "name": "n" * 2_000}
    for _ in range(500):
        await writer.send(group, "ten links", attachments=[link] * 10)
    for node in three.nodes:
        reader = await node.connect("reader", cursors={group: [1, 0]})
        # A resume may have as many messages, but not as many bytes: the first are pushed, a `resync` announces the rest.
        await reader.event("resync", lambda e: e["conversation"] == group)
        pushed = [e["seq"] for e in await reader.quiet() if e["type"] == "message" and e["conversation"] == group]
        # The last message was acknowledged before every gateway had it, so it may also arrive as an ordinary event.
        live = pushed[-1:] == [501]
        pushed = pushed[:-1] if live else pushed
        assert pushed == list(range(2, 2 + len(pushed))) and len(pushed) < 499
        assert [m["seq"] for m in await reader.everything(group)] == list(range(1, 502))
        await reader.close()
    assert connections(three) == before, "a link between gateways broke"
