"""Edits, deletions and reactions over real WebSockets, in both encodings: requests, rights, refusals, and what others see."""
import asyncio

import pytest

from changes import INVALID, all_ok, changed, counted, delete, edit, entry, react, reactors, sends
from support import UNLIMITED, Refused, eventually, uuid4
from test_messages import refused

LINK = {"url": "https://files.example.org/a.png", "name": "a.png", "mime": "image/png", "size": 5}


@pytest.fixture
async def group(people):
    """Returns a function that connects users and creates a group of them, in which the first one has sent messages with seqs from 2."""

    async def create(*who, messages=("hello",), kind="group"):
        clients = await people(*who)
        conversation = await clients[0].create(kind, *[c.user for c in clients[1:]], name="G")
        for body in messages:
            await clients[0].send(conversation, body)
        return conversation, *clients

    return create


async def test_the_limits_of_changes_are_announced(people):
    alice = await people("alice")
    limits = alice.hello["limits"]
    assert (limits["edit_window_s"], limits["reactions"], limits["delete_seqs"]) == (0, 32, 256)


async def test_an_edit_is_seen_live_in_history_and_in_the_inbox(group, gateway, codec):
    conversation, alice, bob = await group("alice", "bob")
    phone = await gateway.connect(alice.user, codec)
    before = await entry(bob, conversation, 2)
    assert "edited_at" not in before and "rev" not in before
    reply = await alice.ask("edit", conversation=conversation, seq=2, body="hello, world")
    assert (reply["type"], reply["rev"]) == ("ok", 1)
    for client in (alice, phone, bob):
        item = await changed(client, conversation, 2)
        assert item == {"seq": 2, "rev": 1, "body": "hello, world", "attachments": [], "edited_at": item["edited_at"]}
        assert item["edited_at"] >= before["at"]
    for client in (bob, phone):
        after = await entry(client, conversation, 2)
        assert after == {**before, "body": "hello, world", "edited_at": item["edited_at"], "rev": 1}
    assert (await bob.history(conversation))["rev"] == 1
    inbox = await bob.inbox(conversation)
    assert (inbox["last_message"]["preview"], inbox["rev"], inbox["unread"]) == ("hello, world", 1, 1)
    assert inbox["last_message"]["message_id"] == before["message_id"] and "deleted" not in inbox["last_message"]
    details = await bob.ask("conversation", conversation=conversation)
    assert (details["message_count"], details["head"], details["rev"]) == (1, 2, 1)
    await phone.close()


async def test_an_edit_of_an_older_message_does_not_change_the_preview(group):
    conversation, alice, bob = await group("alice", "bob", messages=("one", "two"))
    await edit(alice, conversation, 2, "one, edited")
    last = (await bob.inbox(conversation))["last_message"]
    assert (last["seq"], last["preview"]) == (3, "two")
    assert [m["body"] for m in (await bob.history(conversation, after=1))["messages"]] == ["one, edited", "two"]


async def test_an_edit_that_names_no_attachments_keeps_them(group):
    """In both encodings: a field that is missing, or null, is not named."""
    conversation, alice, bob = await group("alice", "bob", messages=())
    await alice.send(conversation, "look", attachments=[LINK])
    for rev, (body, fields) in enumerate([("look again", {}), ("and again", {"attachments": None}), ("", {})], 1):
        assert await edit(alice, conversation, 2, body, **fields) == rev
        assert (await changed(bob, conversation, 2, lambda i: i["rev"] == rev))["attachments"] == [LINK]
        message = await entry(bob, conversation, 2)
        assert (message["body"], message["attachments"]) == (body, [LINK])
    assert await edit(alice, conversation, 2, "", base_rev=3) == 3, "the same content is no change"
    await edit(alice, conversation, 2, "bare", attachments=[])
    assert (await changed(bob, conversation, 2, lambda i: i["rev"] == 4))["attachments"] == []
    await refused(alice.ask("edit", conversation=conversation, seq=2, body=""), INVALID)


async def test_an_edit_replaces_the_attachments(group):
    conversation, alice, bob = await group("alice", "bob", messages=())
    await alice.send(conversation, "look", attachments=[LINK])
    other = {**LINK, "name": "b.png", "url": "https://files.example.org/b.png"}
    await edit(alice, conversation, 2, "", attachments=[LINK, other])
    assert (await changed(bob, conversation, 2))["attachments"] == [LINK, other]
    message = await entry(bob, conversation, 2)
    assert (message["body"], message["attachments"]) == ("", [LINK, other])
    await edit(alice, conversation, 2, "no more pictures", attachments=[])
    assert (await changed(bob, conversation, 2, lambda i: i["rev"] == 2))["attachments"] == []
    assert not (await entry(bob, conversation, 2)).get("attachments")
    await refused(alice.ask("edit", conversation=conversation, seq=2, body=""), INVALID)
    await refused(alice.ask("edit", conversation=conversation, seq=2, body="x", attachments=[{"url": "javascript:alert(1)"}]), INVALID)
    await refused(alice.ask("edit", conversation=conversation, seq=2, body="x", attachments=[LINK] * 11), "too_large")


async def test_a_deletion_is_seen_live_in_history_and_in_the_inbox(group, gateway, codec):
    conversation, alice, bob = await group("alice", "bob", messages=())
    phone = await gateway.connect(alice.user, codec)
    await alice.send(conversation, "look", attachments=[LINK])
    await bob.send(conversation, "an answer", reply_to=2)
    await react(bob, conversation, 2, "👀")
    await edit(alice, conversation, 2, "look again", attachments=[LINK])
    before = await entry(bob, conversation, 2)
    reply = await alice.ask("delete", conversation=conversation, seqs=[2])
    assert (reply["type"], reply["rev"]) == ("ok", 3)
    for client in (alice, phone, bob):
        item = await changed(client, conversation, 2, lambda i: "deleted" in i)
        assert item["rev"] == 3 and "body" not in item and "attachments" not in item
        assert item["deleted"]["by"] == alice.user and item["deleted"]["at"] >= before["at"]
    message = await entry(bob, conversation, 2)
    assert (message["body"], message["kind"], message["deleted"], message["rev"]) == ("", "text", item["deleted"], 3)
    assert not message.get("attachments") and "look" not in str(message)
    same = ("seq", "message_id", "client_id", "sender", "at")
    assert [message[key] for key in same] == [before[key] for key in same]
    assert (await entry(alice, conversation, 3))["reply_to"] == 2, "a reply keeps its target"
    assert (await bob.inbox(conversation))["last_message"]["preview"] == "an answer"
    await delete(bob, conversation, 3)
    last = (await alice.inbox(conversation))["last_message"]
    assert (last["seq"], last["preview"], last["deleted"]) == (3, "", True)
    assert (await alice.send(conversation, "a reply to nothing", reply_to=2))["seq"] == 4
    last = (await bob.inbox(conversation))["last_message"]
    assert last["preview"] == "a reply to nothing" and "deleted" not in last
    await phone.close()


async def test_reactions_are_seen_by_everyone_and_mine_on_ones_own_devices(group, gateway, codec):
    conversation, alice, bob, carol = await group("alice", "bob", "carol")
    tablet = await gateway.connect(bob.user, codec)
    assert await react(bob, conversation, 2, "👍") == 1
    for client in (alice, bob, tablet, carol):
        item = await changed(client, conversation, 2)
        assert item == {"seq": 2, "rev": 1, "reactions": {"👍": 1}, "by": {"user": bob.user, "emoji": "👍", "on": True}}
    for client in (bob, tablet):
        mine = await client.event("reacted")
        assert mine == {"type": "reacted", "conversation": conversation, "seq": 2, "emoji": "👍", "on": True, "rev": 1}
    await react(alice, conversation, 2, "👍")
    await react(alice, conversation, 2, "🎉")
    for client, own in ((alice, ["🎉", "👍"]), (bob, ["👍"]), (tablet, ["👍"]), (carol, [])):
        message = await entry(client, conversation, 2)
        assert (message["reactions"], message["rev"]) == ({"👍": 2, "🎉": 1}, 3)
        assert sorted(message.get("mine", [])) == sorted(own)
        assert message["body"] == "hello" and "edited_at" not in message
    for emoji in ("👍", "🎉"):
        await react(alice, conversation, 2, emoji, on=False)
    others = [e for e in await tablet.quiet() if e["type"] == "reacted" and e["rev"] != 1]
    assert not others, "a reaction of another user is reported as one's own"
    item = await changed(carol, conversation, 2, lambda i: i["rev"] == 5)
    assert (item["reactions"], item["by"]) == ({"👍": 1}, {"user": alice.user, "emoji": "🎉", "on": False})
    await react(bob, conversation, 2, "👍", on=False)
    assert (await changed(carol, conversation, 2, lambda i: i["rev"] == 6))["reactions"] == {}
    message = await entry(bob, conversation, 2)
    assert not message.get("reactions") and not message.get("mine")
    await changed(alice, conversation, 2, lambda i: i["rev"] == 6)
    item = await alice.inbox(conversation)
    assert (item["last_message"]["preview"], item["rev"]) == ("hello", 6)
    assert not [e for e in await carol.quiet() if e["type"] == "reacted"]
    await tablet.close()


async def test_repeating_a_change_changes_nothing(group):
    conversation, alice, bob = await group("alice", "bob", messages=("one", "two"))
    assert await react(bob, conversation, 2, ":x:", on=False) == 0, "removing a reaction that is not there is no change"
    assert await edit(alice, conversation, 2, "one") == 0, "an edit to the same body is no change"
    assert await edit(alice, conversation, 2, "new") == 1
    assert await edit(alice, conversation, 2, "new") == 1
    assert await edit(alice, conversation, 2, "new", base_rev=0) == 1, "the same body is checked before base_rev"
    assert await react(bob, conversation, 2, "👍") == 2
    assert await react(bob, conversation, 2, "👍") == 2
    assert await delete(alice, conversation, 3) == 3
    assert await delete(alice, conversation, 3) == 3
    assert await delete(alice, conversation, 3, 3) == 3
    assert await react(bob, conversation, 2, "👍") == 3, "a repeat is answered with the newest applied rev"
    assert await react(bob, conversation, 2, "👍", on=False) == 4
    assert await delete(alice, conversation, 2, 3) == 5, "of two messages one was deleted already"
    page = await bob.ask("changes", conversation=conversation, after=0)
    assert {i["seq"]: i["rev"] for i in page["items"]} == {2: 5, 3: 3}
    assert "edited_at" not in await entry(bob, conversation, 3)


async def test_an_edit_with_an_old_base_is_a_conflict(group):
    conversation, alice, bob = await group("alice", "bob")
    assert await edit(alice, conversation, 2, "a", base_rev=0) == 1
    await refused(alice.ask("edit", conversation=conversation, seq=2, body="b", base_rev=0), "conflict")
    assert await react(bob, conversation, 2, "👍") == 2
    assert await edit(alice, conversation, 2, "b", base_rev=1) == 3, "a reaction is no change of the content"
    await refused(alice.ask("edit", conversation=conversation, seq=2, body="c", base_rev=2), "conflict")
    await refused(alice.ask("edit", conversation=conversation, seq=2, body="c", base_rev=4), "bad_request")
    assert await edit(alice, conversation, 2, "c", base_rev=3) == 4
    assert await edit(alice, conversation, 2, "d") == 5
    assert (await entry(bob, conversation, 2))["body"] == "d"


async def test_who_may_change_what_in_a_group(group):
    conversation, alice, bob, carol, dave = await group("alice", "bob", "carol", "dave")
    await bob.send(conversation, "bob's")
    await carol.send(conversation, "carol's")
    for request in (
        bob.ask("edit", conversation=conversation, seq=2, body="x"),
        bob.ask("delete", conversation=conversation, seqs=[2]),
        bob.ask("delete", conversation=conversation, seqs=[3, 2]),
        alice.ask("edit", conversation=conversation, seq=3, body="an owner does not edit"),
    ):
        await refused(request, "forbidden")
    assert "deleted" not in await entry(alice, conversation, 3), "a refused deletion has deleted a part"
    await alice.ask("set_role", conversation=conversation, user=bob.user, role="admin")
    assert await delete(bob, conversation, 2) == 1, "an admin deletes what an owner wrote"
    item = await changed(carol, conversation, 2)
    assert item["deleted"]["by"] == bob.user
    assert await delete(alice, conversation, 3, 4) == 2
    assert [(await entry(carol, conversation, seq))["deleted"]["by"] for seq in (2, 3, 4)] == [bob.user, alice.user, alice.user]
    own = (await dave.send(conversation, "mine"))["seq"]
    await dave.ask("leave", conversation=conversation)
    for request in (
        dave.ask("edit", conversation=conversation, seq=own, body="x"), dave.ask("delete", conversation=conversation, seqs=[own]),
        dave.ask("react", conversation=conversation, seq=own, emoji=":x:"), dave.ask("unreact", conversation=conversation, seq=own, emoji=":x:"),
        dave.ask("reactions", conversation=conversation, seq=own), dave.ask("changes", conversation=conversation, after=0),
    ):
        await refused(request, "forbidden")


async def test_who_may_change_what_in_a_dm(people):
    alice, bob = await people("alice", "bob")
    dm = await alice.create("dm", bob.user)
    await alice.send(dm, "one")
    await refused(bob.ask("edit", conversation=dm, seq=1, body="x"), "forbidden")
    await refused(bob.ask("delete", conversation=dm, seqs=[1]), "forbidden")
    assert await react(bob, dm, 1, "👍") == 1
    assert await react(alice, dm, 1, "👍") == 2, "one may react to one's own message"
    assert await edit(alice, dm, 1, "two") == 3
    assert await delete(alice, dm, 1) == 4


async def test_who_may_change_what_in_a_public_channel(people):
    alice, bob = await people("alice", "bob")
    channel = await alice.create("channel", name="open", public=True, posting="admins")
    await alice.send(channel, "news")
    await react(alice, channel, 2, "👍")
    # Bob may read without joining.
    assert await reactors(bob, channel, 2) == {(alice.user, "👍")}
    page = await bob.ask("changes", conversation=channel, after=0)
    assert [(i["seq"], i["reactions"]) for i in page["items"]] == [(2, {"👍": 1})]
    for request in (
        bob.ask("react", conversation=channel, seq=2, emoji=":x:"), bob.ask("unreact", conversation=channel, seq=2, emoji=":x:"),
        bob.ask("edit", conversation=channel, seq=2, body="x"), bob.ask("delete", conversation=channel, seqs=[2]),
    ):
        await refused(request, "forbidden")
    await bob.ask("join", conversation=channel)
    assert await react(bob, channel, 2, "👍") == 2, "one who may not post may react"
    assert (await changed(alice, channel, 2, lambda i: i["rev"] >= 2))["reactions"] == {"👍": 2}
    await refused(bob.ask("delete", conversation=channel, seqs=[2]), "forbidden")
    await alice.ask("set_role", conversation=channel, user=bob.user, role="admin")
    assert await delete(bob, channel, 2) == 3


async def test_strangers_learn_nothing_of_changes(people):
    alice, bob, mallory = await people("alice", "bob", "mallory")
    dm = await alice.create("dm", bob.user)
    await alice.send(dm, "secret")
    for conversation in (dm, uuid4()):
        for request in (
            mallory.ask("edit", conversation=conversation, seq=1, body="x"), mallory.ask("delete", conversation=conversation, seqs=[1]),
            mallory.ask("react", conversation=conversation, seq=1, emoji=":x:"), mallory.ask("unreact", conversation=conversation, seq=1, emoji=":x:"),
            mallory.ask("reactions", conversation=conversation, seq=1), mallory.ask("changes", conversation=conversation, after=0),
        ):
            await refused(request, "not_found")
    await edit(alice, dm, 1, "another secret")
    await changed(bob, dm, 1)
    assert await mallory.quiet() == []


async def test_invalid_and_oversized_changes_are_refused(group):
    at, alice, bob = await group("alice", "bob")
    of = {"conversation": at}
    for seq in (1, 3, 0, 1 << 40):  # The first entry is the creation of the group.
        for request in (
            alice.ask("edit", **of, seq=seq, body="x"), alice.ask("delete", **of, seqs=[seq]), alice.ask("delete", **of, seqs=[2, seq]),
            alice.ask("react", **of, seq=seq, emoji=":x:"), alice.ask("unreact", **of, seq=seq, emoji=":x:"),
        ):
            await refused(request, INVALID)
    assert "deleted" not in await entry(alice, at, 2), "a refused deletion has deleted a part"
    for emoji in ("", " ", "a b", "a\n", "\u00a0x", "\x00", "x" * 65, "é" * 33, "x", "ok", "👍👍", 7, None):
        for type in ("react", "unreact"):
            await refused(bob.ask(type, **of, seq=2, emoji=emoji), INVALID)
    assert await react(bob, at, 2, f":{'x' * 62}:") == 1
    assert await react(bob, at, 2, "👩‍👩‍👧‍👦") == 2
    for fields in (
        {"seqs": []}, {"seqs": 2}, {"seqs": ["2"]}, {"seqs": [-1]}, {},
    ):
        await refused(alice.ask("delete", **of, **fields), INVALID)
    await refused(alice.ask("delete", **of, seqs=[2] * 257), "too_large")
    for fields in ({"seq": 2}, {"seq": 2, "body": 7}, {"body": "x"}, {"seq": -1, "body": "x"}, {"seq": 2, "body": "x", "base_rev": -1}):
        await refused(alice.ask("edit", **of, **fields), INVALID)
    await refused(alice.ask("edit", **of, seq=2, body="x" * 16385), "too_large")
    assert await edit(alice, at, 2, "x" * 16384) == 3
    await refused(alice.ask("changes", **of), INVALID)
    await refused(alice.ask("changes", **of, after=-1), INVALID)
    await refused(alice.ask("changes", **of, after=0, limit=0), INVALID)
    await refused(alice.ask("reactions", **of, seq=2, limit=0), INVALID)
    assert (await alice.ask("ping"))["type"] == "pong"


async def test_a_deleted_message_cannot_be_changed(group):
    at, alice, bob = await group("alice", "bob")
    await react(bob, at, 2, "👍")
    rev = await delete(alice, at, 2)
    for request in (
        alice.ask("edit", conversation=at, seq=2, body="back again"), bob.ask("react", conversation=at, seq=2, emoji="🎉"),
        bob.ask("react", conversation=at, seq=2, emoji="👎"),
    ):
        await refused(request, "conflict")
    assert await delete(alice, at, 2) == rev
    assert (await bob.ask("changes", conversation=at, after=0))["rev"] == rev


async def test_a_message_has_at_most_32_different_emoji(group, gateway, names, codec):
    at, alice, bob = await group("alice", "bob")
    others = [await gateway.connect(user, codec) for user in names("carol", "dave", "erin")]
    for client in others:
        await alice.ask("add", conversation=at, user=client.user)
    for number, client in enumerate([alice, *others]):
        await all_ok(client, [("react", {"conversation": at, "seq": 2, "emoji": f":e{n}:"}) for n in range(8 * number, 8 * number + 8)])
    await refused(bob.ask("react", conversation=at, seq=2, emoji="👍"), "too_large")
    await refused(alice.ask("react", conversation=at, seq=2, emoji="👍"), "too_large")
    await react(bob, at, 2, ":e5:")
    await react(alice, at, 2, ":e7:", on=False)
    await react(bob, at, 2, "👍")
    for client in others:
        await client.close()
    reactions = (await entry(alice, at, 2))["reactions"]
    assert reactions == {**{f":e{n}:": 1 for n in range(32) if n not in (5, 7)}, ":e5:": 2, "👍": 1}


async def test_a_message_has_at_most_1000_edits(gateway, names):
    alice_name, bob_name = names("alice", "bob")
    alice, bob = await gateway.connect(alice_name), await gateway.connect(bob_name)
    dm = await alice.create("dm", bob_name)
    await all_ok(alice, sends(dm, "one"))
    replies = await all_ok(alice, [("edit", {"conversation": dm, "seq": 1, "body": f"number {n}"}) for n in range(1000)])
    assert [reply["rev"] for reply in replies] == list(range(1, 1001)), "changes have another order than their requests"
    await refused(alice.ask("edit", conversation=dm, seq=1, body="one more"), "too_large")
    assert (await entry(bob, dm, 1))["body"] == "number 999"
    await changed(bob, dm, 1, lambda i: i["rev"] == 1000)
    assert (await bob.inbox(dm))["last_message"]["preview"] == "number 999"
    assert await delete(alice, dm, 1) == 1001
    assert (await bob.inbox(dm))["last_message"]["preview"] == ""
    for client in (alice, bob):
        await client.close()


async def test_one_request_deletes_up_to_256_messages(group):
    at, alice, bob = await group("alice", "bob", messages=())
    await all_ok(alice, sends(at, *map(str, range(300))))
    assert await delete(alice, at, *range(2, 258)) == 1
    page = await bob.ask("changes", conversation=at, after=0)
    assert sorted(i["seq"] for i in page["items"]) == list(range(2, 258)) and all(i["rev"] == 1 for i in page["items"])
    log = await bob.everything(at)
    assert [m["seq"] for m in log if "deleted" in m] == list(range(2, 258))
    details = await bob.ask("conversation", conversation=at)
    assert (details["message_count"], details["head"], details["rev"]) == (44, 301, 1)


async def test_live_events_have_the_order_of_revs_and_no_gaps(group):
    at, alice, bob = await group("alice", "bob", messages=("one", "two", "three"))
    requests = []
    for n in range(60):
        requests.append(("edit", {"conversation": at, "seq": 2, "body": f"edit {n}"}))
        requests.append(("react" if n % 2 == 0 else "unreact", {"conversation": at, "seq": 3, "emoji": "👍"}))
    requests.append(("delete", {"conversation": at, "seqs": [4]}))
    assert [r["rev"] for r in await all_ok(alice, requests)] == list(range(1, 122))
    bob.events.append(await bob.event("changed", lambda e: e["rev"] == 121))
    cursor = 0
    for event in [e for e in bob.events if e["type"] == "changed"]:
        assert event["after"] <= cursor, "a connected client has a gap"
        assert all(event["after"] < i["rev"] <= event["rev"] for i in event["items"])
        cursor = max(cursor, event["rev"])
    assert cursor == 121
    assert (await entry(bob, at, 2))["body"] == "edit 59"


async def test_reactions_are_listed_in_pages(gateway, names, codec):
    users = names(*[f"user{n}" for n in range(9)])
    clients = [await gateway.connect(user, codec) for user in users]
    for kind in ("group", "channel"):
        at = await clients[0].create(kind, *users[1:])
        await clients[0].send(at, "hello")
        expected = set()
        for client in clients:
            for emoji in ("👍", "🎉", ":x:")[: 1 + len(expected) % 3]:
                await react(client, at, 2, emoji)
                expected.add((client.user, emoji))
        for limit in (1, 3, 500, 100_000):
            assert await reactors(clients[1], at, 2, limit) == expected
        assert await reactors(clients[1], at, 2, 2, emoji="👍") == {pair for pair in expected if pair[1] == "👍"}
        assert await reactors(clients[1], at, 2, emoji=":nobody:") == set()
        items = (await clients[1].ask("reactions", conversation=at, seq=2))["items"]
        assert all(item["at"] >= clients[0].hello["time"] for item in items)
        assert (await entry(clients[1], at, 2))["reactions"] == counted(expected)
        await react(clients[3], at, 2, "👍", on=False)
        assert await reactors(clients[1], at, 2, 3) == expected - {(clients[3].user, "👍")}
    for client in clients:
        await client.close()


async def test_reactions_of_a_channel_are_coalesced(start, codec):
    gateway = start(messages__reactions_coalesce_ms=2_000, **UNLIMITED)
    alice, bob = await gateway.connect("alice", codec), await gateway.connect("bob", codec)
    channel = await alice.create("channel", "bob")
    await alice.send(channel, "hello")
    replies = await all_ok(alice, [("react", {"conversation": channel, "seq": 2, "emoji": f":e{n % 8}:"}) if n < 8 else
                                   ("react" if n % 2 else "unreact", {"conversation": channel, "seq": 2, "emoji": ":e0:"}) for n in range(150)])
    last = replies[-1]["rev"]
    item = await changed(bob, channel, 2, lambda i: i["rev"] == last)
    assert item["reactions"] == (await entry(bob, channel, 2))["reactions"]
    events = [e for e in await bob.quiet() if e["type"] == "changed"]
    assert len(events) < 75, "reactions are not coalesced"
    mine = [e["rev"] for e in await alice.quiet() if e["type"] == "reacted"]
    assert len(set(mine)) == last, "the user's own sessions get each reaction"
    await alice.ask("edit", conversation=channel, seq=2, body="edited")
    assert (await changed(bob, channel, 2, lambda i: "body" in i))["body"] == "edited"
    for client in (alice, bob):
        await client.close()


@pytest.mark.embedded
async def test_the_time_to_edit_is_limited_by_a_setting(start, codec):
    gateway = start(messages__edit_window_s=1)
    alice, bob = await gateway.connect("alice", codec), await gateway.connect("bob", codec)
    assert alice.hello["limits"]["edit_window_s"] == 1
    dm = await alice.create("dm", "bob")
    await alice.send(dm, "one")

    async def too_late():
        try:
            await edit(alice, dm, 1, uuid4())
        except Refused as refusal:
            return refusal.code

    assert await eventually(too_late) == "forbidden"
    await react(bob, dm, 1, "👍")
    await delete(alice, dm, 1)
    assert "deleted" in await entry(bob, dm, 1)
    for client in (alice, bob):
        await client.close()


async def test_many_users_react_at_once(gateway, names, codec):
    users = names(*[f"user{n}" for n in range(12)])
    clients = [await gateway.connect(user, codec) for user in users]
    at = await clients[0].create("group", *users[1:])
    await clients[0].send(at, "vote")

    async def votes(client, number):
        for n in range(10):
            await react(client, at, 2, f":e{(n + number) % 4}:", on=n % 3 != 2)

    await asyncio.gather(*(votes(client, number) for number, client in enumerate(clients)))
    listed = await reactors(clients[0], at, 2, 5)
    assert (await entry(clients[0], at, 2))["reactions"] == counted(listed)
    for client in clients:
        mine = (await entry(client, at, 2)).get("mine", [])
        assert sorted(mine) == sorted(emoji for user, emoji in listed if user == client.user)
        await client.close()
