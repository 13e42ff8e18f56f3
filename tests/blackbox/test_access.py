"""Who may do what: which tokens are accepted where, who may post, and headers that occur twice."""
import re
import time

import httpx
import jwt
import pytest

from files import Uploader
from support import PATIENCE, ROOT, Refused, uuid4
from test_messages import refused
from test_misuse_http import EVERY_SCOPE, SECRET, code, everything, operations, raw, service, status, token, with_keys

pytestmark = pytest.mark.embedded
SCOPES = f"{EVERY_SCOPE} messages:moderate"


def audit(gateway):
    return [line for line in gateway.log() if line.get("target") == "audit"]


# Tokens.


@pytest.mark.parametrize("scope", ["presence:read", SCOPES, None])
async def test_a_session_takes_no_token_of_a_back_end(start, codec, scope):
    gateway = with_keys(start)
    bearer = token("alice", role="service", **({"scope": scope} if scope else {}))
    client = await gateway.open(codec)
    with pytest.raises(Refused) as refusal:
        await client.ask("connect", token=bearer)
    assert refusal.value.code == "unauthorized" and "service" in str(refusal.value)
    assert await client.closed() == 4501
    # Neither does a session that goes on: it keeps its own token.
    alice = await gateway.connect("alice", codec)
    with pytest.raises(Refused) as refusal:
        await alice.ask("refresh", token=bearer)
    assert refusal.value.code == "unauthorized" and "service" in str(refusal.value)
    later = token("alice", exp=time.time() + 1200)
    assert (await alice.ask("refresh", token=later))["expires_at"] > alice.hello["expires_at"]
    await alice.close()


@pytest.mark.parametrize(
    "bearer, why",
    [
        ("abc", "it is no JSON Web Token"),
        ("a.b.c", "its parts are not base64url of JSON"),
        (lambda: jwt.encode({"sub": "alice", "exp": time.time() + 60}, "another secret of 32 bytes ......"), "its signature does not fit the key"),
        (lambda: jwt.encode({"sub": "alice"}, SECRET), "it has no exp"),
        (lambda: jwt.encode({"exp": time.time() + 60}, SECRET), "it has no sub"),
        (lambda: token(5), "its header or a claim cannot be read"),
        (lambda: token("alice", nbf=time.time() + 600), "its nbf is in the future"),
        (lambda: jwt.encode({"sub": "alice", "exp": time.time() + 60}, SECRET, algorithm="HS384"), "no key fits its algorithm and kid"),
    ],
)
async def test_a_refused_token_is_told_why_in_plain_words(start, codec, bearer, why):
    assert await why_refused(with_keys(start), codec, bearer if isinstance(bearer, str) else bearer()) == why


async def test_a_token_of_another_issuer_or_audience_is_told_so(start, codec):
    gateway = with_keys(start, auth__issuer="us", auth__audience="chat")
    for claims, why in (
        ({"aud": "chat"}, "it has no iss"),
        ({"iss": "others", "aud": "chat"}, "its iss is not that of auth.issuer"),
        ({"iss": "us", "aud": "others"}, "its aud is not that of auth.audience"),
    ):
        assert await why_refused(gateway, codec, token("alice", **claims)) == why


async def why_refused(gateway, codec, bearer):
    client = await gateway.open(codec)
    with pytest.raises(Refused) as refusal:
        await client.ask("connect", token=bearer)
    await client.closed()
    said, why = str(refusal.value).split("the token is not accepted: ")
    assert said == "unauthorized: "
    return why


def documented():
    """The rows of the table in docs/deployment.md: routes, and what it says of a user's token, a back end's, the audit line."""
    text = (ROOT / "docs/deployment.md").read_text().split("### Which token is accepted where", 1)[1]
    rows = [row.strip("|").split("|") for row in text.split("###", 1)[0].splitlines() if row.startswith("|")]
    for routes, *said in rows[2:]:
        yield re.findall(r"`([A-Z]+) (/[^`]*)`", routes), [cell.strip() for cell in said]


async def test_every_route_takes_the_tokens_that_the_docs_name(start):
    gateway = with_keys(start)
    file = uuid4()
    filled = {"conversation": file, "file": file, "user": "alice", "seq": "1", "emoji": "x", "device": "d", "name": "n", "variant": "original"}
    http = httpx.AsyncClient(base_url=f"http://{gateway.client}", timeout=PATIENCE)

    async def asked(method, path, bearer):
        """Returns the answer, and how many lines it wrote to the audit log."""
        before = len(audit(gateway))
        headers = {"authorization": f"Bearer {bearer}"} if bearer else {}
        answer = await http.request(method, path.format(**filled), headers=headers)
        return answer, audit(gateway)[before:]

    def said(answer):
        """The text of an error. That of HEAD has none, but the challenge."""
        return answer.text or answer.headers.get("www-authenticate", "")

    def accepted(answer):
        """Whether the token was accepted, whatever became of the request."""
        if answer.status_code not in (401, 403):
            return True
        return not re.search(r"token|scope", said(answer))

    document = (await http.get("/openapi.json")).json()
    scopes = {}
    for method, path, [scope] in operations(document):
        scopes.setdefault((method.upper(), path), scope)
    with_user = {
        (method.upper(), path) for path, methods in document["paths"].items()
        for method, operation in methods.items() if any("user" in r for r in operation.get("security", []))
    }
    named, seen = set(), set()
    rows = list(documented())
    assert len(rows) == 8
    for routes, (by_user, by_service, line) in rows:
        named.update(routes)
        if not routes:
            routes = [route for route in scopes if route not in {r for others, _ in rows for r in others}]
            assert len(routes) > 20
        for method, path in routes:
            if path == "/v1/ws":
                continue  # see above
            where = f"{method} {path}"
            seen.add((method, path))
            if by_user.startswith("none is read"):
                answers = [await asked(method, path, bearer) for bearer in (None, "nonsense", token("alice", role="service", scope=SCOPES))]
                # The page is compressed, and a development token is 404: all that counts is that they are the same.
                assert len({(answer.status_code, answer.content) for answer, _ in answers}) == 1, where
                assert not any(lines for _, lines in answers) and line == "no", where
                continue
            for wrong in (None, "nonsense", token("alice", key="x" * 40)):
                answer, lines = await asked(method, path, wrong)
                assert answer.status_code == 401 and not lines, where
            answer, lines = await asked(method, path, token("alice"))
            assert accepted(answer) == by_user.startswith("yes") and not lines, (where, answer.text)
            assert answer.status_code == 403 or by_user.startswith("yes"), where
            if (method, path) in scopes:
                assert ((method, path) in with_user) == by_user.startswith("yes"), where
            scope = (re.findall(r"`([a-z]+:[a-z]+)`", by_service) or [scopes.get((method, path))])[0]
            assert scopes.get((method, path), scope) == scope, where
            others = " ".join(other for other in SCOPES.split() if other not in (scope, "messages:moderate"))
            answer, [entry] = await asked(method, path, token("backend", role="service", scope=others))
            assert answer.status_code == 403 and scope in said(answer), where
            assert (entry["result"], entry["service"], entry["scope"]) == ("forbidden", "backend", scope), where
            answer, [entry] = await asked(method, path, token("backend", role="service", scope=scope))
            assert accepted(answer) and entry["request"] == where and line == "yes", (where, answer.text)
            # The line has everything that the path names.
            for field, place in (("conversation", "conversation"), ("about", "user"), ("file", "file")):
                assert entry.get(field) == (filled[place] if f"{{{place}}}" in path else None), where
    assert set(scopes) <= seen, "an operation is in no row"
    assert {route for route in named if route[1].startswith("/v1/attachments")} > {("PATCH", "/v1/attachments/{file}/upload")}
    await http.aclose()


# Posting.


@pytest.mark.parametrize("kind", ["group", "channel"])
async def test_where_only_admins_post_nobody_else_edits_or_uploads(people, gateway, kind):
    alice, bob = await people("alice", "bob")
    conversation = await alice.create(kind, bob.user)
    own = (await bob.send(conversation, "from the time when all might post"))["seq"]
    second = (await bob.send(conversation, "another one"))["seq"]
    await alice.ask("update", conversation=conversation, posting="admins")
    posts = [
        ("send", {"client_id": uuid4(), "body": "now"}),
        ("edit", {"seq": own, "body": "new text by another way"}),
        ("edit", {"seq": own, "body": "from the time when all might post"}),
        ("edit", {"seq": own, "body": "", "attachments": [{"url": "https://example.org/advertisement"}]}),
        ("typing", {}),
    ]
    for type, fields in posts:
        with pytest.raises(Refused) as refusal:
            # A `typing` is answered only if it is refused.
            await bob.ask(type, conversation=conversation, **fields)
        assert refusal.value.code == "forbidden" and "only admins may post" in str(refusal.value)
    up = Uploader(gateway, bob.user)
    begun = await up.begin(conversation, 100)
    assert (begun.status_code, begun.json()["code"]) == (403, "forbidden"), begun.text
    # What puts no text before readers is for every participant.
    await bob.ask("react", conversation=conversation, seq=own, emoji="👍")
    await bob.ask("unreact", conversation=conversation, seq=own, emoji="👍")
    await bob.ask("read", conversation=conversation, seq=own)
    await bob.ask("delete", conversation=conversation, seqs=[second])
    await refused(bob.ask("delete", conversation=conversation, seqs=[1]), "bad_request")
    shown = {m["seq"]: m for m in (await alice.history(conversation))["messages"]}
    assert shown[own]["body"] == "from the time when all might post" and shown[second]["deleted"]["by"] == bob.user
    # The role counts at the time of the request.
    await alice.ask("set_role", conversation=conversation, user=bob.user, role="admin")
    await bob.ask("edit", conversation=conversation, seq=own, body="an admin's text")
    assert (await up.begin(conversation, 100)).status_code == 201
    await alice.ask("set_role", conversation=conversation, user=bob.user, role="member")
    await refused(bob.ask("edit", conversation=conversation, seq=own, body="again"), "forbidden")
    await alice.ask("update", conversation=conversation, posting="everyone")
    await bob.ask("edit", conversation=conversation, seq=own, body="once more")


# Headers.


async def test_a_header_of_which_one_value_is_read_does_not_occur_twice(start):
    gateway = with_keys(start)
    bearer = f"Bearer {token('backend', role='service', scope=SCOPES)}"
    other = f"Bearer {token('other', role='service', scope=SCOPES)}"
    tus = [("tus-resumable", "1.0.0"), ("upload-length", "9"), ("upload-metadata", "filename YQ=="), ("upload-offset", "0")]
    upgrade = [("connection", "upgrade"), ("upgrade", "websocket"), ("sec-websocket-version", "13"),
               ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="), ("origin", f"http://{gateway.client}")]
    routes = [
        ("GET /v1/inbox", [("host", "localhost"), ("authorization", bearer), ("chat-user", "alice")]),
        ("POST /v1/conversations", [("host", "localhost"), ("authorization", bearer), ("content-type", "application/json")]),
        ("POST /v1/attachments", [("host", "localhost"), ("authorization", bearer), *tus]),
        (f"PATCH /v1/attachments/{uuid4()}/upload", [("host", "localhost"), ("authorization", bearer), *tus]),
        (f"GET /v1/files/{uuid4()}/original?e=1&s=00", [("host", "localhost"), ("range", "bytes=0-1"), ("if-range", '"x"')]),
        ("OPTIONS /v1/devices", [("host", "localhost"), ("origin", "https://a.example"), ("access-control-request-method", "PUT")]),
        ("POST /v1/tokens", [("host", "localhost"), ("sec-fetch-site", "same-origin")]),
        ("GET /v1/ws", [("host", gateway.client), *upgrade]),
        ("GET /", [("host", "localhost")]),
        ("GET /nowhere", [("host", "localhost"), ("authorization", bearer)]),
    ]
    instead = {"authorization": other, "chat-user": "bob", "host": "evil.example", "origin": "https://evil.example", "upload-offset": "1"}
    single = set()

    async def answer_to(request, headers):
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        reader, writer = await raw(gateway, f"{request} HTTP/1.1\r\n{lines}content-length: 0\r\nconnection: close\r\n\r\n".encode())
        answer = await everything(reader) if "/v1/ws" not in request else await reader.readuntil(b"\r\n\r\n") + await reader.read(4096)
        writer.close()
        return answer

    for request, headers in routes:
        for name, value in headers:
            if name in ("connection", "upgrade"):
                continue
            single.add(name)
            # In both orders, in any case of letters, and also if both say the same.
            for twice in ([(name, instead.get(name, value)), *headers], [*headers, (name.upper(), instead.get(name, value))], [*headers, (name, value)]):
                answer = await answer_to(request, twice)
                assert (status(answer), code(answer)) == (400, "bad_request"), (request, name, answer)
                assert name in answer.decode().lower().rsplit("\r\n\r\n", 1)[1], (request, name)
    assert not audit(gateway), "none of these tokens was looked at"
    assert single == {
        "authorization", "chat-user", "content-type", "host", "origin", "range", "if-range", "access-control-request-method", "sec-fetch-site",
        "sec-websocket-key", "sec-websocket-version", "tus-resumable", "upload-length", "upload-metadata", "upload-offset",
    }
    # Once is fine, and lists may come in lines.
    for headers in ([], [("accept", "a/b"), ("accept", "c/d"), ("x-forwarded-for", "1.2.3.4"), ("x-forwarded-for", "5.6.7.8")]):
        assert status(await answer_to(*[(request, [*h, *headers]) for request, h in routes][0])) == 200
    # The library refuses bodies of two lengths.
    for lengths in (["3", "4"], ["4", "3"]):
        head = "".join(f"content-length: {n}\r\n" for n in lengths)
        reader, writer = await raw(gateway, f"POST /v1/tokens HTTP/1.1\r\nhost: localhost\r\n{head}\r\n{{}}  ".encode())
        assert status(await everything(reader)) == 400
        writer.close()


async def test_two_names_of_users_in_one_request_act_for_nobody(start):
    gateway = with_keys(start)
    async with service(gateway) as http:
        two = [("authorization", http.headers["authorization"]), ("chat-user", "alice"), ("chat-user", "bob")]
        del http.headers["authorization"]
        made = await http.post("/v1/conversations", json={"kind": "group", "participants": []}, headers=two)
        assert (made.status_code, made.json()["code"]) == (400, "bad_request") and "chat-user" in made.json()["message"]
        for user in ("alice", "bob"):
            assert (await http.get("/v1/inbox", headers=[two[0], ("chat-user", user)])).json()["items"] == []
