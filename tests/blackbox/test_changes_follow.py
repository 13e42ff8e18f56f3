"""Following changes: `changes` over a gap, with more, and with a reset; resuming with [seq, rev] on the same or another gateway."""
import asyncio
import random

from changes import INVALID, RESET_AFTER, Follower, all_ok, changed, delete, edit, entry, pages, react, sends, toggles, visible
from support import UNLIMITED, Refused, uuid4
from test_messages import refused


async def every_change(client, conversation, after=0, **fields):
    """Reads `changes` until there are no more. Returns the items, newest per entry, and the pages."""
    items, replies = {}, []
    while True:
        page = await client.ask("changes", conversation=conversation, after=after, **fields)
        replies.append(page)
        assert page["after"] == after and "reset" not in page
        assert len({i["seq"] for i in page["items"]}) == len(page["items"]), "an entry is twice on a page"
        for item in page["items"]:
            assert after < item["rev"] <= page["rev"]
            items[item["seq"]] = {**items.get(item["seq"], {}), **item}
        if not page.get("more"):
            return items, replies
        assert page["rev"] > after, "a page with more makes no progress"
        after = page["rev"]


async def test_changes_has_the_fields_that_changed(people):
    alice, bob = await people("alice", "bob")
    at = await alice.create("group", bob.user)
    await all_ok(alice, sends(at, "one", "two", "three", "four"))
    await edit(alice, at, 2, "one, edited")
    await react(bob, at, 3, "👍")
    await react(alice, at, 3, "🎉")
    await delete(alice, at, 4)
    await react(bob, at, 2, "👍")
    page = await bob.ask("changes", conversation=at, after=0)
    assert (page["after"], page["rev"]) == (0, 5) and not page.get("more")
    items = {i["seq"]: i for i in page["items"]}
    edited_at, deleted = items[2].get("edited_at"), items[4].get("deleted")
    assert items[2] == {"seq": 2, "rev": 5, "body": "one, edited", "attachments": [], "edited_at": edited_at, "reactions": {"👍": 1},
                        "by": {"user": bob.user, "emoji": "👍", "on": True}, "mine": ["👍"]}
    assert {k: v for k, v in items[3].items() if k != "mine"} == {"seq": 3, "rev": 3, "reactions": {"👍": 1, "🎉": 1}}
    assert items[3]["mine"] == ["👍"]
    assert items[4] == {"seq": 4, "rev": 4, "deleted": {"by": alice.user, "at": deleted["at"]}}
    page = await bob.ask("changes", conversation=at, after=3)
    assert {i["seq"]: i["rev"] for i in page["items"]} == {2: 5, 4: 4}
    assert "body" not in next(i for i in page["items"] if i["seq"] == 2), "a field is sent that did not change"
    page = await bob.ask("changes", conversation=at, after=5)
    assert (page["after"], page["rev"], page["items"]) == (5, 5, [])


async def test_an_edit_that_was_erased_has_no_content_in_changes(people):
    alice, bob = await people("alice", "bob")
    dm = await alice.create("dm", bob.user)
    await all_ok(alice, sends(dm, "one"))
    await edit(alice, dm, 1, "a slip of the pen")
    await delete(alice, dm, 1)
    page = await bob.ask("changes", conversation=dm, after=0, limit=1)
    assert (page["rev"], page["more"]) == (1, True) and "a slip" not in str(page)
    assert all("body" not in item for item in page["items"])
    page = await bob.ask("changes", conversation=dm, after=1, limit=1)
    assert [i["seq"] for i in page["items"] if "deleted" in i] == [1] and not page.get("more")


async def test_changes_come_in_pages(people):
    alice, bob = await people("alice", "bob")
    at = await alice.create("group", bob.user)
    await all_ok(alice, sends(at, *map(str, range(20))))
    requests = []
    for n in range(600):
        seq = 2 + n % 19
        # Six emoji are added to each message, then removed, and so on.
        react_or_not = "react" if n // 19 // 6 % 2 == 0 else "unreact"
        requests.append(("edit", {"conversation": at, "seq": seq, "body": f"edit {n}"}) if n % 3 == 0 else
                        (react_or_not, {"conversation": at, "seq": seq, "emoji": f":e{n // 19 % 6}:"}))
    await all_ok(alice, requests)
    stored, rev = await pages(bob, at)
    assert rev == 600
    for fields, most in (({}, 256), ({"limit": 100}, 100), ({"limit": 7}, 7), ({"limit": 100_000}, 256)):
        items, replies = await every_change(bob, at, **fields)
        assert replies[-1]["rev"] == 600 and all(page["rev"] - page["after"] <= most for page in replies)
        for seq, item in items.items():
            assert (item.get("body", stored[seq]["body"]), item.get("reactions", {})) == (stored[seq]["body"], stored[seq].get("reactions", {}))
            assert item["rev"] == stored[seq]["rev"]
    items, _ = await every_change(bob, at, after=590, limit=3)
    assert len(items) == 10


async def test_beyond_5000_changes_the_answer_is_a_reset(start):
    gateway = start(**UNLIMITED)
    alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
    at = await alice.create("group", "bob")
    await all_ok(alice, sends(at, "one", "two"))
    follower = Follower(at)
    await follower.read(bob)
    await edit(alice, at, 2, "edited")
    await follower.agrees(bob)
    await bob.close()
    replies = await all_ok(alice, toggles(at, 3, RESET_AFTER + 1))
    last = replies[-1]["rev"]
    assert last == RESET_AFTER + 2
    page = await alice.ask("changes", conversation=at, after=0)
    assert (page["reset"], page["rev"], page["items"]) == (True, last, [])
    page = await alice.ask("changes", conversation=at, after=last - RESET_AFTER)
    assert not page.get("reset") and page["more"] is True
    bob = await gateway.connect("bob", cursors=follower.cursors())
    await follower.agrees(bob)
    assert follower.cursor == last
    # A client that comes with a very old cursor and asks gets the reset, reads again, and goes on.
    old = Follower(at)
    await old.read(bob)
    old.cursor = 1
    await old.ask()
    assert old.resets == 1 and old.cursor == last
    await react(alice, at, 2, "🎉")
    await old.agrees(bob)
    for client in (alice, bob):
        await client.close()


async def test_changes_missed_while_away_arrive_after_resuming(people, gateway, codec):
    alice, bob = await people("alice", "bob")
    conversations = [await alice.create("dm", bob.user), await alice.create("group", bob.user), await alice.create("channel", bob.user)]
    followers = []
    for at in conversations:
        await all_ok(alice, sends(at, "one", "two", "three"))
        first = 1 if at == conversations[0] else 2
        await react(bob, at, first, "👍")
        follower = Follower(at)
        await follower.read(bob)
        followers.append((follower, first))
    await bob.close()
    for follower, first in followers:
        at = follower.conversation
        await edit(alice, at, first, "edited while bob was away")
        await delete(alice, at, first + 1)
        await react(alice, at, first + 2, "🎉")
        await all_ok(alice, sends(at, "sent while bob was away"))
        await edit(alice, at, first + 3, "sent and edited")
    for _ in range(3):  # Over Cassandra each connection goes to another gateway.
        cursors = {}
        for follower, _ in followers:
            cursors |= follower.cursors()
        back = await gateway.connect(bob.user, codec, cursors=cursors)
        for follower, first in followers:
            await follower.agrees(back)
            assert follower.states[first]["body"] == "edited while bob was away" and "deleted" in follower.states[first + 1]
            assert follower.states[first + 3]["body"] == "sent and edited"
        await back.close()
        for follower, first in followers:
            await react(alice, follower.conversation, first, f":{uuid4()[:8]}:")


async def test_a_resume_without_missed_changes_brings_none(people, gateway, codec):
    alice, bob = await people("alice", "bob")
    at = await alice.create("group", bob.user)
    await all_ok(alice, sends(at, "one"))
    await edit(alice, at, 2, "two")
    follower = Follower(at)
    await follower.read(bob)
    await changed(bob, at, 2)
    await bob.close()
    back = await gateway.connect(bob.user, codec, cursors=follower.cursors())
    late = [e for e in await back.quiet() if e["type"] == "changed" and e["rev"] > follower.cursor]
    assert not late and not [e for e in back.events if e["type"] == "message"]
    await react(alice, at, 2, "👍")
    await follower.agrees(back)
    await back.close()


async def test_a_message_that_is_pushed_at_resume_has_its_newest_state(people, gateway, codec):
    alice, bob = await people("alice", "bob")
    at = await alice.create("group", bob.user)
    await bob.close()
    await all_ok(alice, sends(at, "one", "two", "three"))
    await edit(alice, at, 2, "one, edited")
    await react(alice, at, 3, "👍")
    await delete(alice, at, 4)
    back = await gateway.connect(bob.user, codec, cursors={at: [1, 0]})
    follower = Follower(at)
    follower.client = back
    follower.upto = 1
    follower.states[1] = await entry(back, at, 1)
    await follower.agrees(back)
    assert [visible(follower.states[seq]) for seq in (2, 3, 4)] == [visible(await entry(alice, at, seq)) for seq in (2, 3, 4)]
    assert "three" not in str(follower.states[4])
    await back.close()


async def test_subscribing_with_a_rev_brings_the_missed_changes_before_the_reply(people):
    alice, bob = await people("alice", "bob")
    channel = await alice.create("channel", name="open", public=True)
    await all_ok(alice, sends(channel, "one", "two"))
    reply = await bob.ask("subscribe", conversation=channel, after=3, rev=0)
    assert (reply["head"], reply.get("rev", 0)) == (3, 0)
    follower = Follower(channel)
    await follower.read(bob)
    await edit(alice, channel, 2, "one, edited")
    await react(alice, channel, 3, "👍")
    await follower.agrees(bob)
    await bob.ask("unsubscribe", conversation=channel)
    await delete(alice, channel, 2)
    await all_ok(alice, sends(channel, "three"))
    reply = await bob.ask("subscribe", conversation=channel, after=follower.upto, rev=follower.cursor)
    assert (reply["head"], reply["rev"]) == (4, 3)
    events = [e for e in bob.events if e["type"] == "changed" and e["rev"] > follower.cursor]
    assert events, "the missed changes come before the reply"
    await follower.agrees(bob)
    assert "deleted" in follower.states[2]
    await react(alice, channel, 4, "🎉")
    await changed(bob, channel, 4)


async def test_a_page_is_at_least_as_new_as_every_acknowledged_change(people):
    alice, bob = await people("alice", "bob")
    at = await alice.create("group", bob.user)
    await all_ok(alice, sends(at, *map(str, range(70))))
    for n in range(40):
        seq = random.randint(2, 71)
        rev = await edit(alice, at, seq, f"edit {n}")
        page = await bob.history(at, around=seq, limit=10)
        assert page["rev"] >= rev
        assert next(m for m in page["messages"] if m["seq"] == seq)["body"] == f"edit {n}"
        assert (await bob.ask("changes", conversation=at, after=rev - 1))["rev"] >= rev


async def churn(client, at, seqs, count):
    """Edits, deletes and reacts. A deletion by the other user makes some of it a conflict."""
    for n in range(count):
        seq = random.choice(seqs)
        try:
            what = random.random()
            if what < 0.3:
                await edit(client, at, seq, uuid4())
            elif what < 0.33:
                await delete(client, at, seq)
            else:
                await react(client, at, seq, random.choice((":a:", ":b:", ":c:", ":d:", ":e:")), on=random.random() < 0.6)
        except Refused as refusal:
            assert refusal.code in ("conflict", "forbidden"), refusal
        if n % 10 == 0:
            await client.send(at, f"message {n}")


async def test_nothing_is_missed_between_resume_and_live(people, gateway, codec):
    """Clients reconnect while changes flow. In the end each shows what is stored."""
    alice, bob, carol = await people("alice", "bob", "carol")
    conversations = [await alice.create("group", bob.user, carol.user), await alice.create("channel", bob.user, carol.user)]
    for at in conversations:
        await all_ok(alice, sends(at, *map(str, range(20))))
    await carol.close()
    followers = {at: Follower(at) for at in conversations}
    running = asyncio.gather(*(churn(c, at, range(2, 22), 120) for c in (alice, bob) for at in conversations))
    connections = 0
    while True:
        finished = running.done()
        cursors = {}
        for follower in followers.values():
            cursors |= follower.cursors()
        client = await gateway.connect(carol.user, codec, cursors=cursors if connections else None)
        connections += 1
        for follower in followers.values():
            if not follower.states:
                await follower.read(client)
        await asyncio.sleep(random.random() * 0.02)  # connections of random length: the point of the test
        for follower in followers.values():
            await follower.follow(client)
        if finished:
            break
        await client.close()
    await running
    for follower in followers.values():
        await follower.agrees(client, alice)
    assert connections > 1
    await client.close()


async def test_one_who_left_and_joined_again_learns_what_changed_meanwhile(people, gateway, codec):
    alice, bob = await people("alice", "bob")
    at = await alice.create("group", bob.user)
    await all_ok(alice, sends(at, "one", "two"))
    await react(alice, at, 2, "👍")
    follower = Follower(at)
    await follower.read(bob)
    await bob.close()
    await alice.ask("remove", conversation=at, user=bob.user)
    await edit(alice, at, 2, "edited without bob")
    await delete(alice, at, 3)
    await alice.ask("add", conversation=at, user=bob.user)
    back = await gateway.connect(bob.user, codec, cursors=follower.cursors())
    await follower.agrees(back)
    assert follower.states[2]["body"] == "edited without bob" and "deleted" in follower.states[3]
    await back.close()


async def test_changes_refuses_nonsense_and_answers_a_cursor_from_the_future(people):
    alice, bob = await people("alice", "bob")
    dm = await alice.create("dm", bob.user)
    await all_ok(alice, sends(dm, "one"))
    await edit(alice, dm, 1, "two")
    page = await bob.ask("changes", conversation=dm, after=1_000_000)
    assert page["items"] == [] and not page.get("more")
    for after in (-1, "x", None, 1.5):
        await refused(bob.ask("changes", conversation=dm, after=after), INVALID)
