"""What the owner of a conversation reveals about other users, and what one request may cost."""
from support import uuid4
from test_messages import refused


async def test_in_a_channel_a_user_sees_only_their_own_watermarks(people):
    alice, bob, mallory = await people("alice", "bob", "mallory")
    channel = await alice.create("channel", bob.user, public=True)
    seq = (await alice.send(channel, "who reads this?"))["seq"]
    await bob.ask("read", conversation=channel, seq=seq)
    for asker in (alice, bob, mallory):
        items = (await asker.ask("participants", conversation=channel))["items"]
        assert {i["user"] for i in items} == {alice.user, bob.user}
        for item in items:
            own = item["user"] == asker.user
            assert ("read_seq" in item, "delivered_seq" in item) == (own, own), item
            if own and asker is bob:
                assert (item["read_seq"], item["delivered_seq"]) == (seq, seq)
    group = await alice.create("group", bob.user)
    items = (await alice.ask("participants", conversation=group))["items"]
    assert all("read_seq" in item and "delivered_seq" in item for item in items)


async def test_the_public_list_skips_private_conversations_and_ends(people):
    alice, bob = await people("alice", "bob")
    shown = [await alice.create("channel", public=True) for _ in range(5)]
    hidden = [await alice.create("channel") for _ in range(5)]
    seen, after = [], None
    while True:
        page = await bob.ask("public", limit=2, **({"after": after} if after else {}))
        assert len(page["items"]) <= 2
        seen += [item["conversation"] for item in page["items"]]
        after = page.get("next")
        if not after:
            break
    assert len(seen) == len(set(seen)) and set(shown) <= set(seen) and not set(hidden) & set(seen)


async def test_a_list_of_too_many_is_refused_before_it_is_walked(people):
    alice = await people("alice")
    many = [f"u{n}" for n in range(6000)]
    frame = {"kind": "channel", "participants": many, "conversation": uuid4()}
    await refused(alice.ask("create", **frame), "too_large")
    # The same user counts once.
    group = await alice.create("group", *["bob"] * 200)
    assert (await alice.ask("conversation", conversation=group))["participant_count"] == 2
