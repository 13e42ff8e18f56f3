"""Conversations and messages over real WebSockets, in both encodings."""
import asyncio
import uuid

import pytest

from clock import time_shift
from support import UNLIMITED, Refused, uuid4


async def refused(awaitable, code):
    with pytest.raises(Refused) as refusal:
        await awaitable
    assert refusal.value.code == code, refusal.value
    return refusal.value.error


async def test_connected_has_the_user_and_the_limits(people):
    alice = await people("alice")
    hello = alice.hello
    assert hello["user"] == alice.user
    assert hello["ping_interval_ms"] == 25000
    assert hello["limits"]["body_bytes"] == 16384
    assert hello["limits"]["group_participants"] == 1000
    assert abs(hello["expires_at"] - hello["time"] - 3_600_000) < 60_000
    assert hello["session"] and uuid.UUID(hello["gateway"])


async def test_a_dm_is_the_same_conversation_for_both(people):
    alice, bob = await people("alice", "bob")
    ids = await asyncio.gather(alice.create("dm", bob.user), bob.create("dm", alice.user))
    assert ids[0] == ids[1]
    again = await alice.ask("create", kind="dm", participants=[bob.user])
    assert again == {"id": again["id"], "type": "created", "conversation": ids[0], "existed": True}
    assert (await alice.history(ids[0]))["messages"] == [], "a new dm is not empty"
    details = await bob.ask("conversation", conversation=ids[0])
    assert (details["kind"], details["participant_count"], details["message_count"]) == ("dm", 2, 0)


async def test_a_dm_with_oneself_is_a_notebook(people):
    alice = await people("alice")
    note = await alice.create("dm", alice.user)
    await alice.send(note, "remember the milk")
    item = await alice.inbox(note)
    assert (item["name"], item["unread"], item["last_message"]["preview"]) == (alice.user, 0, "remember the milk")


async def test_a_message_is_stored_and_reaches_every_session_of_every_participant(people, gateway, codec):
    alice, bob = await people("alice", "bob")
    phone = await gateway.connect(bob.user, codec)
    dm = await alice.create("dm", bob.user)
    client_id = uuid4()
    sent = await alice.send(dm, "hello", client_id)
    assert sent["seq"] == 1 and sent["duplicate"] is False
    for client in (alice, bob, phone):
        event = await client.message(dm)
        expected = {
            "type": "message", "conversation": dm, "seq": 1, "message_id": sent["message_id"],
            "client_id": client_id, "sender": alice.user, "kind": "text", "body": "hello", "at": sent["at"],
        }
        assert event == expected
    page = await bob.history(dm)
    assert page["messages"] == [{k: v for k, v in expected.items() if k != "type"}]
    assert (page["head"], page["rev"]) == (1, 0)
    await phone.close()


async def test_the_first_message_announces_the_dm(people):
    alice, bob = await people("alice", "bob")
    dm = await alice.create("dm", bob.user)
    await alice.send(dm, "hi")
    added = await bob.event("conversation")
    assert (added["conversation"], added["change"], added["kind"]) == (dm, "added", "dm")
    await bob.message(dm)


async def test_attachments_and_replies_come_back_as_sent(people):
    alice, bob = await people("alice", "bob")
    dm = await alice.create("dm", bob.user)
    await alice.send(dm, "one")
    link = {"url": "https://files.example.org/a.png", "name": "a.png", "mime": "image/png", "size": 5}
    await alice.send(dm, "", attachments=[link], reply_to=1)
    event = await bob.event("message", lambda e: e["seq"] == 2)
    assert (event["attachments"], event["reply_to"], event["body"]) == ([link], 1, "")
    assert (await bob.history(dm))["messages"][1]["attachments"] == [link]
    assert (await bob.inbox(dm))["last_message"]["preview"] == "a.png"
    await refused(alice.send(dm, "x", reply_to=99), "bad_request")
    await refused(alice.send(dm, "x", attachments=[{"url": "javascript:alert(1)"}]), "bad_request")
    await refused(alice.send(dm, "x", attachments=[link] * 11), "too_large")


async def test_hundreds_of_messages_at_once_have_one_order(people):
    alice, bob, carol = await people("alice", "bob", "carol")
    group = await alice.create("group", bob.user, carol.user, name="race")
    replies = []
    for i in range(100):
        for client in (alice, bob, carol):
            replies.append(await client.begin(
                "send", conversation=group, client_id=uuid4(), body=f"{client.user} {i}"))
    seqs = [(await reply)["seq"] for reply in replies]
    assert sorted(seqs) == list(range(2, 302)), "a seq is missing or used twice"
    for client in (alice, bob, carol):
        got = [(await client.event("message", lambda e: e["conversation"] == group))["seq"] for _ in range(301)]
        assert got == list(range(1, 302)), "a client sees another order"
    log = await bob.everything(group)
    for client in (alice, bob, carol):
        mine = [m["body"] for m in log if m["sender"] == client.user and m["kind"] == "text"]
        assert mine == [f"{client.user} {i}" for i in range(100)], "the order of one sender changed"


async def test_a_repeated_client_id_is_one_message(people):
    alice, bob = await people("alice", "bob")
    dm = await alice.create("dm", bob.user)
    client_id = uuid4()
    first = await alice.send(dm, "once", client_id)
    for retry in (False, True):
        again = await alice.send(dm, "once", client_id, retry=retry)
        assert (again["seq"], again["message_id"], again["at"], again["duplicate"]) == (
            first["seq"], first["message_id"], first["at"], True)
    twice = uuid4()
    both = [await alice.begin("send", conversation=dm, client_id=twice, body="x") for _ in range(2)]
    assert [(await r)["seq"] for r in both] == [2, 2], "a repeat while the first is in flight is another message"
    assert (await bob.send(dm, "mine", client_id))["seq"] == 3, "the id of another sender is taken for a repeat"
    assert len((await bob.history(dm))["messages"]) == 3


async def send_all(client, conversation, client_ids, **fields):
    """Sends a message for each client id. Returns the replies."""
    replies = [await client.begin("send", conversation=conversation, client_id=id, body="hi", **fields) for id in client_ids]
    return await asyncio.gather(*replies)


@pytest.mark.embedded
@pytest.mark.parametrize("ends", ["stop", "kill"])
async def test_client_ids_are_known_to_the_next_owner(start, codec, ends):
    gateway = start(**UNLIMITED)
    alice = await gateway.connect("alice", codec)
    dm = await alice.create("dm", "bob")
    ids = [uuid4() for _ in range(1_100)]
    first = await send_all(alice, dm, ids)
    assert [(sent["seq"], sent["duplicate"]) for sent in first] == [(seq, False) for seq in range(1, 1_101)]
    # The owner knows the 1,024 most recent as long as it stays, and the next one the newest 128.
    for recent in (1_024, 128):
        again = await send_all(alice, dm, ids[-recent:])
        assert [(sent["seq"], sent["duplicate"]) for sent in again] == [(sent["seq"], True) for sent in first[-recent:]]
        if recent == 1_024:
            getattr(gateway, ends)()
            gateway.start()
            alice = await gateway.connect("alice", codec)
    # With `retry` all are known.
    again = await send_all(alice, dm, ids, retry=True)
    assert again == [{**sent, "duplicate": True, "id": reply["id"]} for sent, reply in zip(first, again)]
    assert (await alice.history(dm, limit=1))["head"] == 1_100
    await alice.close()


@pytest.mark.embedded
async def test_a_retry_is_known_for_seven_days(start, codec):
    gateway = start(**UNLIMITED)
    alice = await gateway.connect("alice", codec)
    dm = await alice.create("dm", "bob")
    ids = [uuid4() for _ in range(200)]
    first = await send_all(alice, dm, ids)
    # Almost seven days later, and after more than eight: client ids are kept by days.
    for later, is_known in (("+167h", True), ("+193h", False)):
        gateway.kill()
        gateway.prefix = time_shift(later)
        gateway.start()
        alice = await gateway.connect("alice", codec)
        again = await alice.send(dm, "hi", ids[0], retry=True)
        assert (again["seq"], again["duplicate"]) == ((first[0]["seq"], True) if is_known else (201, False))
    await alice.close()


async def test_history_pages(people):
    alice, bob = await people("alice", "bob")
    dm = await alice.create("dm", bob.user)
    for reply in [await alice.begin("send", conversation=dm, client_id=uuid4(), body=str(i)) for i in range(1, 251)]:
        await reply

    async def seqs(**fields):
        page = await bob.history(dm, **fields)
        assert page["head"] == 250
        return [m["seq"] for m in page["messages"]]

    assert await seqs() == list(range(201, 251))
    assert await seqs(limit=3) == [248, 249, 250]
    assert await seqs(before=201) == list(range(151, 201))
    assert await seqs(before=11, limit=10) == list(range(1, 11))
    assert await seqs(before=1) == []
    assert await seqs(after=0, limit=5) == [1, 2, 3, 4, 5]
    assert await seqs(after=245) == [246, 247, 248, 249, 250]
    assert await seqs(after=250) == []
    assert await seqs(around=100, limit=5) == [98, 99, 100, 101, 102]
    assert await seqs(around=1, limit=5) == [1, 2, 3, 4, 5]
    assert len(await seqs(limit=100_000)) == 200, "a page is longer than its limit"
    await refused(bob.history(dm, limit=0), "bad_request")
    await refused(bob.history(dm, before=1, after=1), "bad_request")


async def test_strangers_learn_nothing(people):
    alice, bob, mallory = await people("alice", "bob", "mallory")
    dm = await alice.create("dm", bob.user)
    await alice.send(dm, "secret")
    ids = {"conversation": dm}
    for request in (
        mallory.history(dm), mallory.send(dm, "x"), mallory.ask("conversation", **ids),
        mallory.ask("participants", **ids), mallory.ask("read", **ids, seq=1), mallory.ask("join", **ids),
        mallory.ask("add", **ids, user=mallory.user), mallory.ask("typing", **ids),
        mallory.ask("subscribe", **ids), mallory.ask("leave", **ids),
        mallory.ask("update", **ids, name="mine"), mallory.ask("delivered", **ids, seq=1),
    ):
        error = await refused(request, "not_found")
        assert error["message"] == "no such conversation"
    await refused(mallory.history(uuid4()), "not_found")
    assert await mallory.quiet() == []


async def test_oversized_and_invalid_requests_are_refused(people):
    alice, bob = await people("alice", "bob")
    dm = await alice.create("dm", bob.user)
    await alice.send(dm, "x" * 16384)
    await refused(alice.send(dm, "x" * 16385), "too_large")
    await refused(alice.send(dm, ""), "bad_request")
    await refused(alice.ask("send", conversation=dm, body="x"), "bad_request")
    await refused(alice.ask("send", conversation="nonsense", client_id=uuid4(), body="x"), "bad_request")
    await refused(alice.ask("send", conversation=dm, client_id=uuid4(), body=7), "bad_request")
    await refused(alice.ask("nonsense"), "bad_request")
    await refused(alice.ask("connect", token="x"), "bad_request")
    await refused(alice.ask("read", conversation=dm, seq=2), "bad_request")
    await refused(alice.ask("read", conversation=dm, seq=-1), "bad_request")
    assert (await alice.ask("ping"))["type"] == "pong"


async def test_unknown_fields_are_ignored(people):
    alice, bob = await people("alice", "bob")
    dm = await alice.create("dm", bob.user, later={"deep": [1, {"x": None}]})
    assert (await alice.send(dm, "hi", color="red"))["seq"] == 1


async def test_pages_of_large_messages_are_shorter_and_have_no_gaps(people, gateway, codec):
    alice, bob = await people("alice", "bob")
    dm = await alice.create("dm", bob.user)
    await bob.close()
    # Each control character becomes six bytes in JSON. A JSON client cannot send so many: its frame would be too long.
    long = '"' if codec == "json" else "\x01"
    bodies = ["x" + long * 16_383 if i % 3 == 0 else "y" * 16_384 for i in range(120)]
    for i in range(0, 120, 20):
        for reply in [await alice.begin("send", conversation=dm, client_id=uuid4(), body=b) for b in bodies[i:i + 20]]:
            await reply
    back = await gateway.connect(bob.user, codec, cursors={dm: [0, 0]})
    assert [(await back.message(dm))["body"] for _ in range(120)] == bodies, "the resume is not complete"
    assert [m["body"] for m in await back.everything(dm)] == bodies
    for ask, near in (({"before": 60}, 59), ({"after": 60}, 61), ({"around": 60}, 60), ({}, 120)):
        seqs = [m["seq"] for m in (await back.history(dm, limit=100, **ask))["messages"]]
        assert near in (seqs[0], seqs[-1]) or "around" in ask and near in seqs
        assert 1 < len(seqs) < 30 and seqs == list(range(seqs[0], seqs[-1] + 1))
    await back.close()
