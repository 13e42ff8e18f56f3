"""Edits, deletions and reactions over HTTP, for back ends: each route with its scopes and refusals."""
import urllib.parse

import httpx
import pytest

from changes import INVALID, changed, entry
from files import Uploader
from support import PATIENCE, eventually, uuid4
from test_misuse_http import is_let_in, service, with_keys

pytestmark = pytest.mark.embedded

LINK = {"url": "https://files.example.org/a.png", "name": "a.png", "mime": "image/png", "size": 5}
STATUS = {"bad_request": 400, "unauthorized": 401, "forbidden": 403, "not_found": 404, "conflict": 409, "too_large": 413}


def of(emoji):
    return urllib.parse.quote(emoji, safe="")


def is_refused(answer, code):
    assert (answer.status_code, answer.json()["code"]) == (STATUS[code], code), (answer.request.method, answer.request.url, answer.text)
    return answer.json()["message"]


def rev_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.json().get("rev", 0)


@pytest.fixture
async def house(start):
    """A gateway, its users alice, bob and carol over WebSockets, and a group of them with messages 2 (alice) and 3 (bob)."""

    class House:
        pass

    house = House()
    house.gateway = with_keys(start)
    house.alice, house.bob, house.carol = [await house.gateway.connect(user) for user in ("alice", "bob", "carol")]
    house.group = await house.alice.create("group", "bob", "carol", name="G")
    await house.alice.send(house.group, "from alice")
    await house.bob.send(house.group, "from bob")
    house.at = f"/v1/conversations/{house.group}"
    yield house
    for client in (house.alice, house.bob, house.carol):
        await client.close()


async def test_a_back_end_edits_for_a_user(house):
    message = f"{house.at}/messages/2"
    async with service(house.gateway, "messages:write messages:read", "alice") as http:
        assert rev_of(await http.patch(message, json={"body": "edited"})) == 1
        item = await changed(house.bob, house.group, 2)
        assert (item["body"], item["attachments"]) == ("edited", [])
        assert rev_of(await http.patch(message, json={"body": "edited"})) == 1
        assert rev_of(await http.patch(message, json={"body": "see", "attachments": [LINK], "base_rev": 1})) == 2
        assert (await entry(house.bob, house.group, 2))["attachments"] == [LINK]
        is_refused(await http.patch(message, json={"body": "again", "base_rev": 1}), "conflict")
        for wrong in ({}, {"body": 7}, {"body": "", "attachments": []}, {"body": "x", "attachments": [{"url": "javascript:alert(1)"}]}):
            is_refused(await http.patch(message, json=wrong), INVALID)
        is_refused(await http.patch(message, json={"body": "x" * 16_385}), "too_large")
        is_refused(await http.patch(f"{house.at}/messages/3", json={"body": "not mine"}), "forbidden")
        for seq in ("1", "4", "0"):
            is_refused(await http.patch(f"{house.at}/messages/{seq}", json={"body": "x"}), INVALID)
        is_refused(await http.patch(f"/v1/conversations/{uuid4()}/messages/2", json={"body": "x"}), "not_found")
        page = (await http.get(f"{house.at}/messages", params={"after": 1, "limit": 1})).json()
        assert page["messages"][0]["body"] == "see" and page["messages"][0]["edited_at"] and page["rev"] == 2
    async with service(house.gateway, "messages:write", "alice") as http:
        # The gateway does not read the body of such a request, and may close the connection after its answer.
        assert (await http.patch(f"{house.at}/messages/x", json={"body": "x"})).status_code == 400
    async with service(house.gateway, "messages:write", "mallory") as http:
        is_refused(await http.patch(message, json={"body": "x"}), "not_found")


async def test_an_edit_of_a_back_end_keeps_what_it_does_not_name(house):
    up = Uploader(house.gateway, "alice")
    file = await up.upload(house.group, b"irreplaceable", "plan.txt")
    sent = await house.alice.send(house.group, "the plan", attachments=[{"id": file}, LINK])
    before = (await entry(house.bob, house.group, sent["seq"]))["attachments"]
    assert [a.get("id") for a in before] == [file, None]
    message = f"{house.at}/messages/{sent['seq']}"
    async with service(house.gateway, "messages:write messages:read", "alice") as http:
        # As docs/application.md shows it.
        assert rev_of(await http.patch(message, json={"body": "the new plan", "base_rev": 0})) == 1
        item = await changed(house.bob, house.group, sent["seq"])
        assert (item["body"], item["attachments"]) == ("the new plan", before)
        assert rev_of(await http.patch(message, json={"body": "the same plan", "attachments": None})) == 2
        assert (await entry(house.bob, house.group, sent["seq"]))["attachments"] == before
        assert rev_of(await http.patch(message, json={"body": ""})) == 3, "the files are content enough"
        assert (await up.download(file)).content == b"irreplaceable"
        assert rev_of(await http.patch(message, json={"body": "no plan", "attachments": []})) == 4
        assert not (await entry(house.bob, house.group, sent["seq"])).get("attachments")

        async def is_erased():
            return (await up.find(file)).status_code == 404

        await eventually(is_erased)
        is_refused(await http.patch(message, json={"body": ""}), INVALID)


async def test_a_back_end_deletes_for_a_user(house):
    await house.alice.send(house.group, "four")
    await house.alice.send(house.group, "five")
    async with service(house.gateway, "messages:write messages:read", "alice") as http:
        assert rev_of(await http.delete(f"{house.at}/messages/2")) == 1
        assert (await changed(house.bob, house.group, 2))["deleted"]["by"] == "alice"
        assert rev_of(await http.delete(f"{house.at}/messages/2")) == 1
        is_refused(await http.patch(f"{house.at}/messages/2", json={"body": "x"}), "conflict")
        assert rev_of(await http.post(f"{house.at}/messages/delete", json={"seqs": [4, 5]})) == 2
        # Alice owns the group, so she may delete what bob wrote, without being a moderator.
        assert rev_of(await http.delete(f"{house.at}/messages/3")) == 3
        for wrong in ({}, {"seqs": []}, {"seqs": [1]}, {"seqs": [99]}, {"seqs": "2"}):
            is_refused(await http.post(f"{house.at}/messages/delete", json=wrong), INVALID)
        is_refused(await http.post(f"{house.at}/messages/delete", json={"seqs": [2] * 257}), "too_large")
        is_refused(await http.delete(f"{house.at}/messages/1"), INVALID)
        is_refused(await http.delete(f"/v1/conversations/{uuid4()}/messages/2"), "not_found")
        log = (await http.get(f"{house.at}/messages", params={"after": 1})).json()["messages"]
        assert all(m["body"] == "" and m["deleted"] for m in log)
    async with service(house.gateway, "messages:write", "bob") as http:
        seq = (await house.alice.send(house.group, "six"))["seq"]
        is_refused(await http.delete(f"{house.at}/messages/{seq}"), "forbidden")
        is_refused(await http.post(f"{house.at}/messages/delete", json={"seqs": [seq]}), "forbidden")


async def test_a_moderator_deletes_what_others_wrote(house):
    async with service(house.gateway, "messages:write", "carol") as http:
        for query in ({}, {"moderator": "true"}):
            is_refused(await http.delete(f"{house.at}/messages/2", params=query), "forbidden")
            is_refused(await http.post(f"{house.at}/messages/delete", params=query, json={"seqs": [2]}), "forbidden")
    assert "deleted" not in await entry(house.carol, house.group, 2)
    async with service(house.gateway, "messages:write messages:moderate", "carol") as http:
        is_refused(await http.delete(f"{house.at}/messages/2"), "forbidden")
        assert rev_of(await http.delete(f"{house.at}/messages/2", params={"moderator": "true"})) == 1
        assert (await changed(house.bob, house.group, 2))["deleted"]["by"] == "carol"
        assert rev_of(await http.post(f"{house.at}/messages/delete", params={"moderator": "true"}, json={"seqs": [2, 3]})) == 2
        is_refused(await http.delete(f"{house.at}/messages/1", params={"moderator": "true"}), INVALID)
    dm = await house.alice.create("dm", "bob")
    await house.alice.send(dm, "between two")
    async with service(house.gateway, "messages:write messages:moderate", "bob") as http:
        at = f"/v1/conversations/{dm}/messages/1"
        is_refused(await http.delete(at), "forbidden")
        assert rev_of(await http.delete(at, params={"moderator": "true"})) == 1, "a moderator's right is not bound to the kind of conversation"
    assert "deleted" in await entry(house.alice, dm, 1)


async def test_a_back_end_reacts_for_a_user(house):
    message = f"{house.at}/messages/2"
    async with service(house.gateway, "messages:write messages:read", "bob") as http:
        for number, emoji in enumerate(("👍", "👩‍👩‍👧‍👦", "#️⃣", ":+1:", "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f"), 1):
            assert rev_of(await http.put(f"{message}/reactions/{of(emoji)}")) == number
            assert rev_of(await http.put(f"{message}/reactions/{of(emoji)}")) == number
            assert (await entry(house.alice, house.group, 2))["reactions"][emoji] == 1
            assert (await house.bob.event("reacted", lambda e: e["emoji"] == emoji))["on"] is True
        assert rev_of(await http.delete(f"{message}/reactions/{of('👍')}")) == 6
        assert rev_of(await http.delete(f"{message}/reactions/{of('👍')}")) == 6
        assert "👍" not in (await entry(house.alice, house.group, 2))["reactions"]
        for emoji in (" ", "a b", "\n", "x" * 65, "a/b", "50%", "?#"):
            is_refused(await http.put(f"{message}/reactions/{of(emoji)}"), INVALID)
            is_refused(await http.delete(f"{message}/reactions/{of(emoji)}"), INVALID)
        is_refused(await http.put(f"{house.at}/messages/1/reactions/:x:"), INVALID)
        is_refused(await http.put(f"{house.at}/messages/99/reactions/:x:"), INVALID)
        await house.alice.ask("react", conversation=house.group, seq=2, emoji="👍")
        await house.alice.ask("react", conversation=house.group, seq=2, emoji=":+1:")
        items, after = [], None
        while True:
            page = (await http.get(f"{message}/reactions", params={"limit": 2, **({"after": after} if after else {})})).json()
            items += [(i["user"], i["emoji"]) for i in page["items"]]
            assert all(i["at"] for i in page["items"])
            after = page.get("next")
            if not after:
                break
        assert sorted(items) == sorted([("alice", "👍"), ("alice", ":+1:"), *(("bob", e) for e in ("👩‍👩‍👧‍👦", "#️⃣", ":+1:", "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f"))])
        page = (await http.get(f"{message}/reactions", params={"emoji": ":+1:"})).json()
        assert sorted(i["user"] for i in page["items"]) == ["alice", "bob"]
        is_refused(await http.get(f"{message}/reactions", params={"limit": "many"}), INVALID)
        await house.alice.ask("delete", conversation=house.group, seqs=[2])
        is_refused(await http.put(f"{message}/reactions/:x:"), "conflict")


async def test_a_back_end_reads_changes(house):
    changes = f"{house.at}/changes"
    async with service(house.gateway, "messages:read", "bob") as http:
        page = (await http.get(changes, params={"after": 0})).json()
        assert (page["after"], page["rev"], page["items"]) == (0, 0, [])
        await house.alice.ask("edit", conversation=house.group, seq=2, body="edited")
        await house.bob.ask("react", conversation=house.group, seq=3, emoji="👍")
        await house.alice.ask("delete", conversation=house.group, seqs=[2])
        page = (await http.get(changes, params={"after": 0, "limit": 2})).json()
        assert (page["after"], page["rev"], page["more"]) == (0, 2, True)
        page = (await http.get(changes, params={"after": 2})).json()
        assert page["rev"] == 3 and not page.get("more") and [i["seq"] for i in page["items"]] == [2]
        page = (await http.get(changes, params={"after": 1, "limit": 1})).json()
        assert [(i["seq"], i["reactions"], i["mine"]) for i in page["items"]] == [(3, {"👍": 1}, ["👍"])]
        for wrong in ({}, {"after": "x"}, {"after": -1}, {"after": 0, "limit": 0}):
            is_refused(await http.get(changes, params=wrong), INVALID)
        is_refused(await http.get(f"/v1/conversations/{uuid4()}/changes", params={"after": 0}), "not_found")
    async with service(house.gateway, "messages:read", "mallory") as http:
        is_refused(await http.get(changes, params={"after": 0}), "not_found")


async def test_each_route_needs_its_scope(house):
    message = f"{house.at}/messages/2"
    routes = [
        ("PATCH", message, "messages:write"), ("DELETE", message, "messages:write"), ("POST", f"{house.at}/messages/delete", "messages:write"),
        ("PUT", f"{message}/reactions/:x:", "messages:write"), ("DELETE", f"{message}/reactions/:x:", "messages:write"),
        ("GET", f"{message}/reactions", "messages:read"), ("GET", f"{house.at}/changes?after=0", "messages:read"),
    ]
    every = {"messages:read", "messages:write", "messages:moderate", "conversations:read", "conversations:write", "presence:read", "sessions:close"}
    for method, path, scope in routes:
        body = {"json": {"body": "x", "seqs": [2]}} if method in ("PATCH", "POST") else {}
        for lacking in ("", " ".join(every - {scope, "messages:moderate"})):
            async with service(house.gateway, lacking, "alice") as http:
                assert scope in is_refused(await http.request(method, path, **body), "forbidden")
        async with httpx.AsyncClient(base_url=f"http://{house.gateway.client}", timeout=PATIENCE) as http:
            is_refused(await http.request(method, path, **body), "unauthorized")
    assert "deleted" not in await entry(house.bob, house.group, 2) and (await house.bob.history(house.group))["rev"] == 0
    for method, path, scope in routes:
        body = {"json": {"body": "x", "seqs": [2]}} if method in ("PATCH", "POST") else {}
        async with service(house.gateway, scope, "alice") as http:
            answer = await http.request(method, path, **body)
            assert is_let_in(answer), (method, path, answer.status_code, answer.text)
    made = house.gateway.token  # The command line knows the new scope.
    assert made("backend", "--role", "service", "--scope", "messages:moderate")


async def test_the_description_has_the_new_routes(house):
    async with service(house.gateway) as http:
        paths = (await http.get("/openapi.json")).json()["paths"]
    at = "/v1/conversations/{conversation}"
    for path, methods in (
        (f"{at}/messages/{{seq}}", ("patch", "delete")), (f"{at}/messages/delete", ("post",)),
        (f"{at}/messages/{{seq}}/reactions/{{emoji}}", ("put", "delete")), (f"{at}/messages/{{seq}}/reactions", ("get",)), (f"{at}/changes", ("get",)),
    ):
        for method in methods:
            assert method in paths[path], (method, path)


async def test_changes_are_in_the_audit_log_without_texts(house):
    secret = "what nobody else may read"
    async with service(house.gateway, "messages:write", "alice") as http:
        assert rev_of(await http.patch(f"{house.at}/messages/2", json={"body": secret})) == 1
        assert rev_of(await http.delete(f"{house.at}/messages/2")) == 2
    audit = [line for line in house.gateway.log() if line.get("target") == "audit"]
    assert [(line["request"], line["result"], line["conversation"]) for line in audit] == [
        ("PATCH /v1/conversations/{conversation}/messages/{seq}", "ok", house.group),
        ("DELETE /v1/conversations/{conversation}/messages/{seq}", "ok", house.group),
    ]
    assert secret not in open(house.gateway.log_path).read()
