"""Groups and channels: participants, permissions, and the events that participants get."""
import asyncio
import json

from support import UNLIMITED, eventually, uuid4
from test_messages import refused


def system(event):
    return event["system"]


async def test_a_group_begins_with_its_creation(people):
    alice, bob, carol = await people("alice", "bob", "carol")
    group = await alice.create("group", bob.user, carol.user, bob.user, name="Project")
    for client in (alice, bob, carol):
        added = await client.event("conversation")
        assert (added["change"], added["name"], added["kind"]) == ("added", "Project", "group")
        first = await client.message(group)
        assert (first["seq"], first["kind"], first["sender"], first["body"]) == (1, "system", alice.user, "")
        assert system(first) == {
            "change": "created", "kind": "group", "name": "Project", "posting": "everyone", "public": False,
            "participants": [alice.user, bob.user, carol.user],
        }
        item = await client.inbox(group)
        assert (item["joined_seq"], item["read_seq"], item["unread"], item["last_seq"]) == (1, 1, 0, 1)
    details = await bob.ask("conversation", conversation=group)
    assert (details["participant_count"], details["message_count"], details["head"], details["role"], details["created_by"]) == (
        3, 0, 1, "member", alice.user)


async def test_creating_twice_with_one_id_makes_one_group(people):
    alice, bob, mallory = await people("alice", "bob", "mallory")
    mine = uuid4()
    replies = await asyncio.gather(*(
        alice.ask("create", kind="group", participants=[bob.user], conversation=mine) for _ in range(5)))
    assert {r["conversation"] for r in replies} == {mine}
    assert sorted(r["existed"] for r in replies) == [False, True, True, True, True]
    assert (await alice.history(mine))["head"] == 1
    await refused(mallory.create("group", conversation=mine), "conflict")
    dm = await alice.create("dm", bob.user)
    await refused(mallory.create("group", conversation=dm), "bad_request")
    await refused(alice.create("channel", conversation=mine), "conflict")


async def test_members_come_and_go(people):
    alice, bob, carol = await people("alice", "bob", "carol")
    group = await alice.create("group", bob.user, name="G")
    await alice.send(group, "before carol")
    assert (await alice.ask("add", conversation=group, user=carol.user))["seq"] == 3
    added = await carol.event("conversation")
    assert added["change"] == "added"
    entry = await carol.message(group)
    assert (entry["seq"], system(entry)) == (3, {"change": "added", "user": carol.user})
    item = await carol.inbox(group)
    assert (item["joined_seq"], item["unread"]) == (3, 0), "a new participant has unread messages"
    assert len((await carol.history(group))["messages"]) == 3, "a new participant lacks earlier messages"
    assert (await alice.ask("add", conversation=group, user=carol.user))["seq"] == 3, "the second add has an effect"

    await alice.ask("remove", conversation=group, user=carol.user)
    assert system(await carol.event("message", lambda e: e["seq"] == 4)) == {"change": "removed", "user": carol.user}
    assert (await carol.event("conversation"))["change"] == "removed"
    await alice.send(group, "without carol")
    await refused(carol.history(group), "forbidden")
    await refused(carol.send(group, "let me in"), "forbidden")
    assert await carol.inbox(group) is None
    assert not [e for e in await carol.quiet() if e.get("body") == "without carol"]
    assert (await alice.ask("remove", conversation=group, user=carol.user))["seq"] == 4

    await alice.ask("add", conversation=group, user=carol.user)
    item = await carol.inbox(group)
    assert (item["joined_seq"], item["read_seq"], item["unread"]) == (6, 6, 0)
    await carol.ask("leave", conversation=group)
    assert await carol.inbox(group) is None
    items = (await bob.ask("participants", conversation=group))["items"]
    assert [i["user"] for i in items] == sorted([alice.user, bob.user])
    assert (await bob.ask("conversation", conversation=group))["participant_count"] == 2


async def test_roles_decide_who_may_do_what(people):
    alice, bob, carol = await people("alice", "bob", "carol")
    group = await alice.create("group", bob.user, carol.user)
    for request in (
        bob.ask("add", conversation=group, user="dave"), bob.ask("remove", conversation=group, user=carol.user),
        bob.ask("update", conversation=group, name="mine"),
        bob.ask("set_role", conversation=group, user=bob.user, role="admin"),
    ):
        await refused(request, "forbidden")
    await alice.ask("set_role", conversation=group, user=bob.user, role="admin")
    assert system(await carol.event("message", lambda e: e["seq"] == 2)) == {
        "change": "role_set", "user": bob.user, "role": "admin"}
    await bob.ask("remove", conversation=group, user=carol.user)
    await refused(bob.ask("remove", conversation=group, user=alice.user), "forbidden")
    await refused(bob.ask("set_role", conversation=group, user=bob.user, role="owner"), "forbidden")
    await refused(alice.ask("leave", conversation=group), "conflict")
    await alice.ask("set_role", conversation=group, user=bob.user, role="owner")
    await alice.ask("leave", conversation=group)
    roles = {i["user"]: i["role"] for i in (await bob.ask("participants", conversation=group))["items"]}
    assert roles == {bob.user: "owner"}
    # Nobody else could give the role back.
    await refused(bob.ask("set_role", conversation=group, user=bob.user, role="member"), "conflict")
    await bob.ask("leave", conversation=group)


async def test_update_renames_everywhere_and_closes_posting(people):
    alice, bob = await people("alice", "bob")
    group = await alice.create("group", bob.user, name="Old")
    await alice.ask("update", conversation=group, name="New", posting="admins")
    change = await bob.event("conversation", lambda e: e["change"] == "updated")
    assert (change["name"], change["posting"]) == ("New", "admins")
    entry = await bob.event("message", lambda e: e["seq"] == 2)
    assert system(entry) == {"change": "updated", "name": "New", "posting": "admins"}
    assert (await bob.inbox(group))["name"] == "New"
    await refused(bob.send(group, "may I?"), "forbidden")
    assert (await alice.send(group, "I may"))["seq"] == 3
    await refused(alice.ask("update", conversation=group, name="  "), "bad_request")
    await refused(alice.ask("update", conversation=group, name="x" * 300), "too_large")
    await refused(alice.ask("update", conversation=group), "bad_request")


async def test_a_dm_cannot_be_changed(people):
    alice, bob = await people("alice", "bob")
    dm = await alice.create("dm", bob.user)
    for request in (
        alice.ask("add", conversation=dm, user="carol"), alice.ask("leave", conversation=dm),
        alice.ask("update", conversation=dm, name="x"), alice.ask("remove", conversation=dm, user=bob.user),
    ):
        await refused(request, "forbidden")
    await refused(alice.create("dm", bob.user, "carol"), "bad_request")
    await refused(alice.create("dm"), "bad_request")


async def test_the_size_of_a_group_is_limited(start, codec):
    gateway = start(limits__group_participants=5)
    alice = await gateway.connect("alice", codec)
    await refused(alice.create("group", *[f"u{i}" for i in range(5)]), "too_large")
    group = await alice.create("group", *[f"u{i}" for i in range(4)])
    await refused(alice.ask("add", conversation=group, user="one-more"), "too_large")
    await alice.close()


async def test_the_conversations_of_a_user_are_limited(start, codec):
    gateway = start(limits__conversations_per_user=3)
    alice, bob = [await gateway.connect(user, codec) for user in ("alice", "bob")]
    public = await alice.create("channel", public=True, name="news")
    later = await alice.create("channel", public=True, name="later")
    of_bob = [await bob.create("group", name=f"group {n}") for n in range(2)]
    await bob.ask("join", conversation=public)
    carol = await gateway.connect("carol", codec)
    of_carol = await carol.create("group", "dave", name="of carol")

    # Nothing brings bob into a fourth one, whoever asks for it.
    for asked in (
        bob.create("group", name="one more"),
        bob.create("channel", name="one more"),
        bob.ask("join", conversation=later),
        carol.ask("add", conversation=of_carol, user="bob"),
        carol.create("group", "dave", "bob"),
    ):
        error = await refused(asked, "too_large")
        assert error["message"] == "too large: conversations of bob: at most 3"
    # A dm counts from its first message, in both directions.
    dm = await carol.create("dm", "bob")
    await refused(carol.send(dm, "hi"), "too_large")
    await refused(bob.send(dm, "hi"), "too_large")
    assert [item["conversation"] for item in (await carol.ask("inbox"))["items"]] == [of_carol]

    # In the conversations that bob is in he goes on, and other users are not affected.
    await bob.send(of_bob[0], "still here")
    assert (await bob.ask("create", kind="group", conversation=of_bob[0]))["existed"]
    await bob.ask("add", conversation=of_bob[0], user="carol")
    dave = await carol.create("dm", "dave")
    await carol.send(dave, "hi")

    # A conversation that was left still counts, and may be joined again.
    await bob.ask("leave", conversation=public)
    await refused(bob.ask("join", conversation=later), "too_large")
    await bob.ask("join", conversation=public)
    assert len((await bob.ask("inbox"))["items"]) == 3
    for client in (alice, bob, carol):
        await client.close()


async def test_an_import_has_no_limit_of_conversations(start, tmp_path):
    file = tmp_path / "import.jsonl"
    ids = [uuid4() for _ in range(3)]
    file.write_text("".join(json.dumps({"type": "conversation", "kind": "group", "id": id, "participants": ["alice", "bob"]}) + "\n" for id in ids))
    gateway = start(limits__conversations_per_user=2)
    assert gateway.stop() == 0
    gateway.command("import", str(file))
    gateway.start()
    alice = await gateway.connect("alice")
    assert {item["conversation"] for item in (await alice.ask("inbox"))["items"]} == set(ids)
    await refused(alice.create("group"), "too_large")
    await alice.close()


async def test_participants_come_in_pages(people):
    alice = await people("alice")
    users = sorted(f"user-{i:03}" for i in range(120))
    for kind in ("group", "channel"):
        conversation = await alice.create(kind, *users)
        seen, after = [], None
        while True:
            page = await alice.ask("participants", conversation=conversation, limit=50, **({"after": after} if after else {}))
            seen += [i["user"] for i in page["items"]]
            after = page.get("next")
            if not after:
                break
        assert sorted(seen) == sorted([alice.user, *users])


async def test_a_busy_channel_keeps_its_order_and_reaches_only_participants(start, codec):
    gateway = start(**UNLIMITED)
    alice, bob, carol, *others = [await gateway.connect(user, codec) for user in ("alice", "bob", "carol", "dave", "erin", "frank")]
    channel = await alice.create("channel", "bob", "carol", "dave", "erin", "frank")
    sent = [str(n) for n in range(200)]
    await asyncio.gather(*(alice.send(channel, body) for body in sent))
    assert gateway.metrics()["chat_events_held_total"] > 0
    removed = (await alice.ask("remove", conversation=channel, user="carol"))["seq"]
    assert [(await carol.message(channel))["seq"] for _ in range(1, removed)] == list(range(1, removed))
    assert (await carol.event("conversation", lambda e: e["change"] == "removed"))["conversation"] == channel
    await alice.send(channel, "without carol")
    for client in (alice, bob):
        heard = [await client.message(channel) for _ in range(1, removed + 2)]
        assert [m["seq"] for m in heard] == list(range(1, removed + 2))
        assert [m["body"] for m in heard if m["body"] in sent] == sent
    assert not [e for e in await carol.quiet() if e.get("body") == "without carol"]
    for client in (alice, bob, carol, *others):
        await client.close()


async def test_a_public_channel_is_listed_joined_and_left(people, gateway, codec):
    alice, bob = await people("alice", "bob")
    channel = await alice.create("channel", name="news", public=True, posting="admins")
    listed = await find_public(bob, channel)
    assert (listed["name"], listed["kind"]) == ("news", "channel")
    await refused(bob.ask("read", conversation=channel, seq=1), "forbidden")

    tablet = await gateway.connect(bob.user, codec)
    assert (await bob.ask("join", conversation=channel))["seq"] == 2
    for session in (bob, tablet):
        assert (await session.event("conversation"))["change"] == "added"
        assert system(await session.message(channel)) == {"change": "joined"}
    await refused(bob.send(channel, "hello"), "forbidden")
    await alice.send(channel, "news!")
    for session in (bob, tablet):
        assert (await session.message(channel))["body"] == "news!"
    item = await bob.inbox(channel)
    assert (item["kind"], item["name"], item["last_seq"], item["unread"], item["joined_seq"]) == ("channel", "news", 3, 1, 2)
    assert item["last_message"]["preview"] == "news!"
    assert (await bob.ask("join", conversation=channel))["seq"] == 2, "the second join has an effect"
    await bob.ask("read", conversation=channel, seq=3)
    assert (await bob.inbox(channel))["unread"] == 0
    await bob.ask("leave", conversation=channel)
    assert (await tablet.event("conversation"))["change"] == "removed"
    await alice.send(channel, "more news")
    assert not [e for e in await tablet.quiet() if e.get("body") == "more news"]
    assert await bob.inbox(channel) is None
    assert (await alice.ask("conversation", conversation=channel))["participant_count"] == 1
    await alice.ask("update", conversation=channel, public=False)
    assert await find_public(bob, channel) is None
    await refused(bob.ask("join", conversation=channel), "forbidden")
    await tablet.close()


async def test_an_inbox_follows_its_channels(people):
    alice, bob = await people("alice", "bob")
    channel = await alice.create("channel", bob.user, name="news")
    for seq in range(2, 5):
        await alice.send(channel, f"number {seq}")
        await bob.message(channel, f"number {seq}")
        item = await bob.inbox(channel)
        assert (item["name"], item["last_seq"], item["unread"]) == ("news", seq, seq - 1)
        assert item["last_message"]["preview"] == f"number {seq}"
    await alice.ask("update", conversation=channel, name="olds")
    await bob.event("message", lambda e: e["seq"] == 5)
    item = await bob.inbox(channel)
    assert (item["name"], item["last_seq"], item["unread"]) == ("olds", 5, 3), "a new name counts as unread"
    await bob.ask("read", conversation=channel, seq=5)
    assert (await bob.inbox(channel))["unread"] == 0


async def find_public(client, conversation):
    after = None
    while True:
        page = await client.ask("public", limit=50, **({"after": after} if after else {}))
        for item in page["items"]:
            if item["conversation"] == conversation:
                return item
        after = page.get("next")
        if not after:
            return None


async def test_subscribing_to_a_public_channel_without_joining(people):
    alice, bob = await people("alice", "bob")
    channel = await alice.create("channel", name="open", public=True)
    for i in range(5):
        await alice.send(channel, f"m{i}")
    reply = await bob.ask("subscribe", conversation=channel, after=3)
    assert reply["head"] == 6
    await alice.send(channel, "live")
    assert [(await bob.message(channel))["body"] for _ in range(4)] == ["m2", "m3", "m4", "live"]
    assert len((await bob.history(channel))["messages"]) == 7
    assert await bob.inbox(channel) is None
    await bob.ask("unsubscribe", conversation=channel)
    await alice.send(channel, "unseen")
    assert await bob.quiet() == []
    await bob.ask("join", conversation=channel)
    await bob.ask("subscribe", conversation=channel)
    await bob.ask("unsubscribe", conversation=channel)
    await alice.send(channel, "for members")
    assert (await bob.message(channel, "for members"))["seq"] == 10, "unsubscribing stops the messages of a channel that the user has joined"
    group = await alice.create("group", bob.user)
    await refused(bob.ask("subscribe", conversation=group), "bad_request")
    private = await alice.create("channel", name="closed")
    await refused(bob.ask("subscribe", conversation=private), "not_found")


async def test_a_channel_grows_past_the_group_limit(start):
    gateway = start(limits__group_participants=3, limits__requests_per_second=10000, limits__requests_burst=10000)
    alice = await gateway.connect("alice")
    channel = await alice.create("channel", public=True, name="big")
    for i in range(12):
        user = await gateway.connect(f"u{i}")
        await user.ask("join", conversation=channel)
        await user.close()

    async def all_in():
        return (await alice.ask("conversation", conversation=channel))["participant_count"] == 13

    assert await eventually(all_in)
    await alice.close()
