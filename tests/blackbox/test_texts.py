"""Texts that people see: what shows nothing, looks like another, or points elsewhere is refused; what languages need is kept.

`tests/golden/texts.json` says of each text what happens with it as a body, a name, a description, a file's name, an emoji and the name of a link to LINK.
"""
import json

import pytest

from changes import INVALID, all_ok, delete, entry, react, reactors
from files import Uploader
from support import ROOT, UNLIMITED, Gateway, Refused, uuid4
from test_changes_http import is_refused, of, rev_of
from test_files import two
from test_messages import refused
from test_misuse_http import service, with_keys

pytestmark = pytest.mark.embedded
TEXTS = json.loads((ROOT / "tests/golden/texts.json").read_text())
LINK = "https://example.org/cat.png"
FAMILY = "👨\u200d👩\u200d👧\u200d👦"


async def allowed(request, about):
    """Whether a request is allowed. A refusal has the code of an invalid request and a reason."""
    try:
        await request
        return True
    except Refused as error:
        assert error.code == INVALID and len(error.error["message"]) > 10, (about, error)
        return False


def test_the_table_has_many_texts_and_scripts():
    assert len(TEXTS) >= 60 and len({row["about"] for row in TEXTS}) == len(TEXTS)
    assert all(set(row) == {"about", "text", "body", "name", "alt", "file", "emoji", "link"} for row in TEXTS)


async def test_each_text_in_frames(start, codec):
    gateway = start(**UNLIMITED)
    alice, bob = await gateway.connect("alice", codec), await gateway.connect("bob", codec)
    at = await alice.create("group", "bob", name="G")
    await alice.send(at, "hello")
    unread = 1
    for row in TEXTS:
        about, text = row["about"], row["text"]
        # A message has a body or an attachment.
        may = await allowed(alice.send(at, text), about)
        assert may == (row["body"] and text != ""), about
        unread += may
        if may:
            seq = (await bob.message(at, text))["seq"]
            assert (await entry(bob, at, seq))["body"] == text, about
        assert await allowed(alice.ask("edit", conversation=at, seq=2, body=text, attachments=[]), about) == (row["body"] and text != ""), about
        assert await allowed(alice.ask("update", conversation=at, name=text), about) == (row["name"] is not None), about
        if row["name"] is not None:
            assert (await bob.ask("conversation", conversation=at))["name"] == row["name"], about
        assert await allowed(alice.ask("create", kind="group", name=text), about) == (row["name"] is not None), about
        links = [({"url": LINK, "alt": text}, row["alt"]), ({"url": LINK, "name": text}, row["link"] or text == "")]
        for link, may in links:
            assert await allowed(alice.send(at, "", attachments=[link]), about) == may, (about, link)
            unread += may
            assert await allowed(alice.ask("edit", conversation=at, seq=2, body="see", attachments=[link]), about) == may, (about, link)
        assert await allowed(react(alice, at, 2, text), about) == (row["emoji"] is not None), about
        if row["emoji"] is not None:
            assert (await entry(bob, at, 2))["reactions"] == {row["emoji"]: 1}, about
            await react(alice, at, 2, text, on=False)
            assert "reactions" not in await entry(bob, at, 2), about
    assert (await bob.inbox(at))["unread"] == unread, "what was refused does not count"
    await alice.close()
    await bob.close()


async def test_each_text_over_http(start):
    gateway = with_keys(start, limits__service_requests_per_second=1 << 20, limits__service_requests_burst=1 << 20, **UNLIMITED)
    bob = await gateway.connect("bob")
    async with service(gateway, user="alice") as http:
        at = (await http.post("/v1/conversations", json={"kind": "group", "participants": ["bob"], "name": "G"})).json()["conversation"]
        path = f"/v1/conversations/{at}"

        def is_allowed(answer, about):
            if answer.status_code >= 400:
                assert len(is_refused(answer, INVALID)) > 10, about
            return answer.status_code < 400

        async def sent(**fields):
            return await http.post(f"{path}/messages", json={"client_id": uuid4(), **fields})

        assert (await sent(body="hello")).status_code < 300
        for row in TEXTS:
            about, text = row["about"], row["text"]
            assert is_allowed(await sent(body=text), about) == (row["body"] and text != ""), about
            assert is_allowed(await http.patch(f"{path}/messages/2", json={"body": text}), about) == (row["body"] and text != ""), about
            assert is_allowed(await http.patch(path, json={"name": text}), about) == (row["name"] is not None), about
            assert is_allowed(await sent(body="", attachments=[{"url": LINK, "alt": text}]), about) == row["alt"], about
            assert is_allowed(await sent(body="", attachments=[{"url": LINK, "name": text}]), about) == (row["link"] or text == ""), about
            if text not in ("", "\0"):
                reaction = f"{path}/messages/2/reactions/{of(text)}"
                assert is_allowed(await http.put(reaction), about) == (row["emoji"] is not None), about
                if row["emoji"] is not None:
                    assert (await entry(bob, at, 2))["reactions"] == {row["emoji"]: 1}, about
                    rev_of(await http.delete(reaction))
    await bob.close()


async def test_each_text_as_the_name_of_a_file(start):
    gateway, alice, bob, dm = await two(start, attachments__uploads_per_minute=1_000)
    uploader = Uploader(gateway, "alice")
    for row in TEXTS:
        begun = await uploader.begin(dm, 5, "a.txt", alt=row["text"])
        assert (begun.status_code == 201) == row["alt"], (row["about"], begun.text)
        file = await uploader.upload(dm, b"hello", row["text"])
        await alice.send(dm, "", attachments=[{"id": file}])
        message = await bob.event("message")
        assert message["attachments"][0]["name"] == row["file"], row["about"]
    await uploader.http.aclose()
    await alice.close()
    await bob.close()


@pytest.mark.parametrize("line, why", [
    ({"body": "\u200b"}, "shows nothing"), ({"body": "x", "attachments": [{"url": "https://example.org/a cat.png"}]}, "no address"),
    ({"body": "x", "attachments": [{"url": LINK, "alt": "a\u202eb"}]}, "direction"), ({"body": "x", "reactions": [{"user": "bob", "emoji": "https://evil.example"}]}, "emoji"),
    ({"body": "x", "files": [{"path": "a.txt", "alt": "\u2800"}]}, "shows nothing"),
])
def test_an_import_refuses_what_the_gateway_refuses(tmp_path, line, why):
    (tmp_path / "a.txt").write_text("hello")
    lines = [{"type": "conversation", "kind": "dm", "participants": ["alice", "bob"]}, {"type": "message", "dm": ["alice", "bob"], "sender": "alice", **line}]
    file = tmp_path / "wrong.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = Gateway(str(tmp_path / "data"), attachments__store="local").command("import", str(file), check=False)
    assert done.returncode == 1 and "wrong.jsonl:2" in done.stderr and why in done.stderr, done.stderr


async def test_an_import_takes_what_was_valid_elsewhere(tmp_path, start):
    links = [{"url": LINK, "name": "bank.example"}, {"url": LINK, "name": "example.org"}, {"url": LINK}]
    emoji = [f":e{n}:" for n in range(32)]
    lines = [{"type": "conversation", "kind": "dm", "participants": ["alice", "bob"]},
             {"type": "message", "dm": ["alice", "bob"], "sender": "alice", "body": "x", "attachments": links, "edited_at": 1795000000000,
              "at": 1795000000000, "reactions": [{"user": "bob", "emoji": one} for one in emoji]}]
    file = tmp_path / "valid.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    directory = tmp_path / "data"
    done = Gateway(str(directory)).command("import", str(file))
    assert "1 names of links left out" in done.stdout + done.stderr
    gateway = start(str(directory))
    bob = await gateway.connect("bob")
    at = await bob.create("dm", "alice")
    [message] = [m for m in (await bob.ask("history", conversation=at))["messages"] if m.get("body") == "x"]
    assert [link.get("name") for link in message["attachments"]] == [None, "example.org", None]
    assert message["reactions"] == {one: 1 for one in emoji}
    await refused(bob.ask("react", conversation=at, seq=message["seq"], emoji=":e32:"), "too_large")
    await bob.close()


async def test_the_path_of_a_link_says_nothing_of_its_name(people):
    alice, bob = await people("alice", "bob")
    at = await alice.create("dm", bob.user)
    for name, url in (("paypal.com", "https://evil.example/paypal.com"), ("bank.de", "https://evil.example/x.de"), ("see:paypal.com", "https://evil.example/x")):
        await refused(alice.send(at, "", attachments=[{"url": url, "name": name}]), INVALID)
    await alice.send(at, "", attachments=[{"url": "https://evil.example/paypal.com", "name": "https://evil.example/paypal.com"}])


async def test_the_address_of_a_link_shows_where_it_leads(people):
    alice, bob = await people("alice", "bob")
    at = await alice.create("dm", bob.user)
    for url in ("https://example.org", "http://example.org:8080/a?b=c#d", "https://пример.рф/ё"):
        await alice.send(at, "", attachments=[{"url": url}])
    for url in ("https://bank.example@evil.example/", "https://bank.example\\@evil.example", "https://evil.example/\u202egpj.exe",
                "https://evil.example/ a", "https://", "https:evil.example", "ftp://evil.example", "https://evil.example/\n"):
        await refused(alice.send(at, "", attachments=[{"url": url}]), INVALID)
    await refused(alice.send(at, "", attachments=[{"url": LINK, "mime": "image/png\u202e"}]), INVALID)


async def test_a_user_id_has_nothing_hidden(people):
    alice, bob = await people("alice", "bob")
    at = await alice.create("group", bob.user)
    for user in ("ali\u200bce", "\u202eecila", "alice\u00ad", "\u2800", "a\ufe0f"):
        await refused(alice.ask("add", conversation=at, user=user), INVALID)
    await alice.ask("add", conversation=at, user="zoë@example.org")


async def test_one_reaction_in_all_its_forms(people):
    alice, bob = await people("alice", "bob")
    at = await alice.create("group", bob.user)
    await alice.send(at, "hello")
    assert [await react(alice, at, 2, emoji) for emoji in ("👍", "👍\ufe0f", "👍\ufe0e")] == [1, 1, 1]
    await react(bob, at, 2, "👍\ufe0f")
    assert (await bob.event("reacted"))["emoji"] == "👍"
    assert (await entry(bob, at, 2))["reactions"] == {"👍": 2} and (await entry(bob, at, 2))["mine"] == ["👍"]
    assert await reactors(bob, at, 2, emoji="👍\ufe0f") == {(alice.user, "👍"), (bob.user, "👍")}
    await react(bob, at, 2, "👍\ufe0e", on=False)
    assert (await entry(bob, at, 2))["reactions"] == {"👍": 1}
    for other in ("https://evil.example", "evil.example", "ok", "👍👍", "__proto__", ":https://evil.example:", ":Party:"):
        for type in ("react", "unreact"):
            await refused(alice.ask(type, conversation=at, seq=2, emoji=other), INVALID)


async def test_one_participant_leaves_room_for_the_reactions_of_others(people):
    alice, bob = await people("alice", "bob")
    at = await alice.create("group", bob.user)
    await alice.send(at, "hello")
    await all_ok(alice, [("react", {"conversation": at, "seq": 2, "emoji": f":e{n}:"}) for n in range(8)])
    await refused(alice.ask("react", conversation=at, seq=2, emoji="👍"), "too_large")
    assert await react(alice, at, 2, ":e3:") == 8, "a repetition is no further one"
    await react(bob, at, 2, "👍")
    await refused(alice.ask("react", conversation=at, seq=2, emoji="👍"), "too_large")
    await react(alice, at, 2, ":e3:", on=False)
    await react(alice, at, 2, "👍")
    assert (await entry(bob, at, 2))["reactions"]["👍"] == 2


async def test_who_reacted_to_a_deleted_message_is_not_told(start, codec):
    gateway = with_keys(start, **UNLIMITED)
    alice, bob = await gateway.connect("alice", codec), await gateway.connect("bob", codec)
    at = {kind: await alice.create(kind, "bob") for kind in ("group", "channel")}

    async def check(gateway, client):
        for conversation in at.values():
            for fields in ({}, {"emoji": "👍"}, {"after": "👍 alice"}):
                page = await client.ask("reactions", conversation=conversation, seq=2, **fields)
                assert page["items"] == [] and "next" not in page
            assert await reactors(client, conversation, 3) == {("bob", "🎉")}, "another message keeps its reactions"
            async with service(gateway, "messages:read", "bob") as http:
                page = (await http.get(f"/v1/conversations/{conversation}/messages/2/reactions")).json()
                assert page["items"] == []

    for conversation in at.values():
        await all_ok(alice, [("send", {"conversation": conversation, "client_id": f"0199c0de-0000-4000-8000-{n:012}", "body": f"{n}"}) for n in range(200)])
        await react(bob, conversation, 2, "👍")
        await react(bob, conversation, 3, "🎉")
        assert await reactors(alice, conversation, 2) == {("bob", "👍")}
        await delete(alice, conversation, 2)
    await check(gateway, bob)
    await alice.close()
    await bob.close()
    gateway.stop()
    # The owner does not have the messages in memory.
    gateway = with_keys(lambda **settings: start(gateway.directory, **settings), **UNLIMITED)
    bob = await gateway.connect("bob", codec)
    await check(gateway, bob)
    await bob.close()


async def test_a_preview_ends_with_a_whole_character(people):
    alice, bob = await people("alice", "bob")
    at = await alice.create("dm", bob.user)
    for body, preview in (
        ("a" * 99 + FAMILY, "a" * 99), ("a" * 93 + FAMILY + "b", "a" * 93 + FAMILY), ("é" * 120, "é" * 100), ("a" * 99 + "e\u0301x", "a" * 99),
        ("🇺🇦" * 60, "🇺🇦" * 50), ("a" + "🇺🇦" * 60, "a" + "🇺🇦" * 49), ("नमस्ते" * 30, ("नमस्ते" * 17)[:100].removesuffix("स्")), ("a\u0301" * 120, "a\u0301" * 50),
    ):
        await alice.send(at, body)
        assert (await bob.inbox(at))["last_message"]["preview"] == preview
