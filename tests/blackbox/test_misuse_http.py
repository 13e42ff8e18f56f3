"""Misuse of HTTP, tokens and sockets."""
import asyncio
import json
import os
import socket
import struct
import time
import urllib.parse

import httpx
import jwt
import pytest
import websockets

from support import PATIENCE, Gateway, eventually, uuid4, within

SECRET = "a secret of more than thirty-two bytes"
KEYS = json.dumps([{"algorithm": "HS256", "secret": SECRET}]).replace('":', '"=')
EVERY_SCOPE = "messages:read messages:write conversations:read conversations:write presence:read devices:read devices:write consumers:read consumers:write sessions:close"
pytestmark = pytest.mark.embedded


def token(sub="alice", key=SECRET, kid=None, **claims):
    headers = {"kid": kid} if kid else None
    return jwt.encode({"sub": sub, "exp": time.time() + 600, **claims}, key, algorithm="HS256", headers=headers)


def service(gateway, scope=EVERY_SCOPE, user=None, sub="backend", **claims):
    headers = {"authorization": f"Bearer {token(sub, role='service', scope=scope, **claims)}"}
    if user:
        headers["chat-user"] = user
    return httpx.AsyncClient(base_url=f"http://{gateway.client}", headers=headers, timeout=PATIENCE)


def with_keys(start, **settings):
    """Starts a gateway with a real key. Its clients get tokens signed with that key."""
    gateway = start(auth__keys=KEYS, **settings)
    gateway.dev_token = token
    return gateway


async def raw(gateway, said=b"", source=None):
    """Opens a TCP connection and sends these bytes."""
    host, port = gateway.client.rsplit(":", 1)
    local = (source, 0) if source else None
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=local)
    writer.write(said)
    await writer.drain()
    return reader, writer


async def everything(reader):
    """Reads until the connection ends. Returns None if it stays open."""
    try:
        return await within(reader.read(), PATIENCE)
    except ConnectionError:
        return b""
    except TimeoutError:
        return None


def status(answer):
    return int(answer.split(b" ", 2)[1])


def code(answer):
    return json.loads(answer.split(b"\r\n\r\n", 1)[1])["code"]


# Development tokens.


async def test_development_tokens_are_given_to_direct_local_requests_only(start):
    gateway = start()
    port = gateway.client.rsplit(":", 1)[1]

    async def asked(**headers):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        async with httpx.AsyncClient(timeout=PATIENCE) as http:
            answer = await http.post(f"http://{gateway.client}/v1/tokens", json={"user": "alice"}, headers=headers)
            return answer.status_code

    for host in ("localhost", f"localhost:{port}", "127.0.0.1", "127.9.9.9:1", "[::1]", f"[::1]:{port}"):
        assert await asked(host=host) == 200, host
    for host in ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1", ""):
        assert await asked(host=host) == 404, host
    for name in ("forwarded", "x_forwarded_for", "x_forwarded_host", "x_forwarded_proto", "x_real_ip", "via"):
        assert await asked(**{name: "127.0.0.1"}) == 404, name
    body = b'{"user":"alice"}'
    rest = b"content-type: application/json\r\ncontent-length: 16\r\nconnection: close\r\n\r\n" + body
    for head in (
        b"POST http://evil.example/v1/tokens HTTP/1.1\r\nhost: localhost\r\n",
        b"POST /v1/tokens HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n",
        b"POST /v1/tokens HTTP/1.0\r\n",
    ):
        reader, writer = await raw(gateway, head + rest)
        assert status(await everything(reader)) in (400, 404), head
        writer.close()


async def test_trusted_proxies_do_not_open_development_tokens(start):
    gateway = start(client__trusted_proxies='["127.0.0.0/8"]')
    async with httpx.AsyncClient(base_url=f"http://{gateway.client}", timeout=PATIENCE) as http:
        answer = await http.post("/v1/tokens", json={"user": "alice"}, headers={"x-forwarded-for": "127.0.0.1"})
        assert answer.status_code == 404


def test_development_is_an_explicit_choice(start, tmp_path):
    gateway = Gateway(str(tmp_path))
    file = tmp_path / "gateway.toml"

    def check(text, **settings):
        file.write_text(text)
        gateway.settings = {"store__embedded__path": str(tmp_path), **settings}
        return gateway.command("--config", str(file), "config", "check", check=False)

    no_keys = check('[limits]\nconnections = 10\n')
    assert no_keys.returncode != 0
    assert "auth.keys" in no_keys.stderr and "auth.development = true" in no_keys.stderr
    assert check("[auth]\ndevelopment = true\n").returncode == 0
    both = check(f'[auth]\ndevelopment = true\nkeys = [{{ algorithm = "HS256", secret = "{SECRET}" }}]\n')
    assert both.returncode != 0 and "auth.development" in both.stderr and "gateway.toml" in both.stderr
    outside = check('[auth]\ndevelopment = true\n[client]\nlisten = "0.0.0.0:0"\n')
    assert outside.returncode != 0 and "client.listen" in outside.stderr
    gateway.settings = {"auth__development": "false"}
    assert gateway.command("config", "check", check=False).returncode != 0
    implied = start()
    [line] = [line for line in implied.log() if "development tokens" in line["message"]]
    assert line["implied"] is True


def test_a_health_check_needs_no_keys(start):
    """The health check of the container image has the environment variables, but not the configuration file."""
    gateway = start()
    gateway.settings = {"client__listen": "0.0.0.0:8080", "internal__listen": gateway.internal}
    assert gateway.command("health").stdout.strip() == '{"status":"ready"}'


# Sockets.


async def test_a_body_that_never_comes_ends_with_408(start):
    gateway, development = with_keys(start), start()
    bearer = f"authorization: Bearer {token(role='service', scope=EVERY_SCOPE)}\r\n".encode()
    heads = [
        b"POST /v1/tokens HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 16\r\n\r\n{",
        b"POST /v1/tokens HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n",
        b"POST /v1/conversations HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" + bearer
        + b"content-length: 100\r\n\r\n{",
    ]
    # The gateway does not wait for the body of a request that it refuses anyway.
    for request in (b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{", heads[0]):
        unwanted, _ = await raw(gateway, request)
        assert status(await everything(unwanted)) == 404
    open_ones = [await raw(gateway if bearer in head else development, head) for head in heads]
    for answer in await asyncio.gather(*(everything(reader) for reader, _ in open_ones)):
        assert answer is not None, "the connection stays open"
        assert status(answer) == 408 and code(answer) == "bad_request"


def open_files(gateway):
    return len(os.listdir(f"/proc/{gateway.process.pid}/fd"))


async def test_a_client_that_reads_no_response_is_closed(start):
    gateway = start()
    before = open_files(gateway)
    host, port = gateway.client.rsplit(":", 1)
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect((host, int(port)))
    deaf.setblocking(False)
    request = b"GET /page.js HTTP/1.1\r\nhost: localhost\r\n\r\n" * 100
    # Sends until all buffers are full in both directions.
    full = 0
    while full < 20:
        try:
            deaf.send(request)
            full = 0
        except BlockingIOError:
            full += 1
            await asyncio.sleep(0.05)
        except ConnectionError:
            break

    async def closed():
        return open_files(gateway) <= before

    await eventually(closed)
    deaf.close()


async def test_every_socket_counts_before_its_first_byte(start):
    gateway = start(limits__connections=3)
    silent = [await raw(gateway) for _ in range(3)]
    reader, writer = await raw(gateway)
    answer = await everything(reader)
    assert answer and status(answer) == 503 and code(answer) == "unavailable"
    assert b"\r\nretry-after: 1\r\n" in answer
    silent.pop()[1].close()

    async def free():
        with_room = None
        try:
            with_room = await gateway.open()
            return True
        except (websockets.InvalidHandshake, OSError):
            return False
        finally:
            if with_room:
                await with_room.close()

    await eventually(free)
    for _, writer in silent:
        writer.close()


async def test_sockets_of_an_address_are_limited(start):
    gateway = start(limits__connections_per_address=2)
    mine = [await raw(gateway) for _ in range(2)]
    reader, _ = await raw(gateway)
    answer = await everything(reader)
    assert answer and status(answer) == 429 and code(answer) == "rate_limited"
    reader, other = await raw(gateway, b"GET /openapi.json HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", "127.0.0.2")
    assert status(await everything(reader)) == 200
    for _, writer in mine:
        writer.close()


async def test_unauthenticated_sockets_have_a_lower_limit(start):
    gateway = with_keys(start, limits__unauthenticated_connections=8)
    # A socket with a valid `connect` or a valid token does not count as unauthenticated.
    clients = [await gateway.connect(f"user{n}") for n in range(5)]
    backend = service(gateway)
    assert (await backend.get("/v1/public")).status_code == 200
    mine = [await raw(gateway) for _ in range(2)]
    reader, _ = await raw(gateway)
    answer = await everything(reader)
    assert answer and status(answer) == 429, "one address has more than a quarter of them"
    others = [await raw(gateway, source=f"127.0.0.{n}") for n in (2, 2, 3, 3, 4, 4)]
    reader, _ = await raw(gateway, source="127.0.0.5")
    answer = await everything(reader)
    assert answer and status(answer) == 503, "all addresses together exceed the limit"
    assert (await backend.get("/v1/public")).status_code == 200
    for client in clients:
        assert (await client.ask("ping"))["type"] == "pong"
        await client.close()
    for _, writer in mine + others:
        writer.close()
    await backend.aclose()


async def test_sockets_leave_open_files_to_the_store(start, tmp_path):
    gateway = Gateway(str(tmp_path / "data"))
    gateway.prefix = ["prlimit", "--nofile=1000:1000"]
    try:
        gateway.start()
        alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
        dm = await alice.create("dm", "bob")
        crowd = []
        for n in range(1_200):
            try:
                crowd.append(await within(raw(gateway), 5))
            except (OSError, TimeoutError):
                break
        for n in range(200):
            await alice.send(dm, "x" * 10_000)
            await bob.message(dm)
        assert open_files(gateway) < 500
        async with httpx.AsyncClient(timeout=PATIENCE) as http:
            assert (await http.get(f"http://{gateway.internal}/health/ready")).status_code == 200
        assert any("limit of open files" in line["message"] for line in gateway.log())
        for _, writer in crowd:
            writer.close()
        await alice.close()
        await bob.close()
    finally:
        gateway.close()


def test_too_low_a_limit_of_open_files_is_an_error(tmp_path):
    gateway = Gateway(str(tmp_path))
    gateway.prefix = ["prlimit", "--nofile=500:500"]
    with pytest.raises(AssertionError, match="limit of open files is 500"):
        gateway.start()


# Addresses.


async def opens(gateway, forwarded_for, header="x-forwarded-for"):
    """Tries to connect through a proxy and returns the HTTP status."""
    try:
        client = await gateway.open(additional_headers={header: forwarded_for})
    except websockets.InvalidStatus as refusal:
        return refusal.response.status_code
    await client.close()
    return 101


async def until_refused(attempt):
    """Attempts 0, 1, … until the first 429; returns all statuses. A slow machine may be allowed more than the burst."""
    statuses = []
    while 429 not in statuses and len(statuses) < 50:
        statuses.append(await attempt(len(statuses)))
    assert statuses[-1] == 429, statuses
    return statuses


async def test_a_trusted_proxy_names_the_address_of_a_client(start):
    limits = {"limits__connects_per_second_per_address": 1, "limits__connects_burst_per_address": 3}
    gateway = start(client__trusted_proxies='["127.0.0.0/8", "10.0.0.0/8"]', **limits)

    async def refused(*ways):
        """Attempts with any of these headers count for one address."""
        for n, way in enumerate(ways):
            statuses = await until_refused(lambda attempt: opens(gateway, way.format(attempt)))
            assert n > 0 or statuses[:3] == [101] * 3

    # Left of the address that the proxy saw are entries of the client, right of it are further proxies.
    await refused("203.0.113.1", "198.51.100.{}, 203.0.113.1", "203.0.113.1, 10.2.3.{}")
    assert await opens(gateway, "203.0.113.2") == 101
    assert await opens(gateway, "for=203.0.113.3;proto=https", "forwarded") == 101
    # An IPv6 /64 network counts as one address.
    await refused("2001:db8:1:2::{}")
    assert await opens(gateway, "2001:db8:1:3::1") == 101


async def test_forwarding_headers_of_untrusted_clients_are_ignored(start):
    gateway = start(limits__connects_per_second_per_address=1, limits__connects_burst_per_address=3)
    statuses = await until_refused(lambda n: opens(gateway, f"203.0.113.{n}"))
    assert statuses[:3] == [101] * 3


def proxied(source, command=1, rest=b""):
    """A PROXY protocol header, version 2."""
    addresses = socket.inet_aton(source) + socket.inet_aton("127.0.0.1") + struct.pack("!HH", 1234, 80) + rest
    return b"\r\n\r\n\0\r\nQUIT\n" + struct.pack("!BBH", 0x20 | command, 0x11, len(addresses)) + addresses


GET = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
TOKEN = (b"POST /v1/tokens HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 16\r\n"
         b'connection: close\r\n\r\n{"user":"alice"}')


async def test_the_proxy_protocol(start):
    gateway = start(
        client__proxy_protocol="true", limits__connects_per_second_per_address=1, limits__connects_burst_per_address=3)

    async def answer(said):
        reader, writer = await raw(gateway, said)
        came = await everything(reader)
        writer.close()
        return came

    async def got(_):
        return status(await answer(proxied("203.0.113.1") + GET))

    assert (await until_refused(got))[:3] == [200] * 3
    assert status(await answer(proxied("203.0.113.2", rest=b"\x04\0\x01x") + GET)) == 200
    # A proxy sends its own health checks without an address.
    assert status(await answer(proxied("203.0.113.1", command=0) + GET)) == 200
    assert status(await answer(proxied("203.0.113.3") + TOKEN)) == 404
    for said in (
        GET + b"\r\n",  # no header
        b"PROXY TCP4 203.0.113.1 127.0.0.1 1234 80\r\n" + GET,  # version 1
        b"\r\n\r\n\0\r\nQUIT\n" + struct.pack("!BBH", 0x21, 0x11, 60_000) + GET,  # too long
        b"\r\n\r\n\0\r\nQUIT\n" + struct.pack("!BBH", 0x21, 0x11, 4) + b"1234" + GET,  # cut short
        proxied("203.0.113.4")[:20],  # incomplete: times out
    ):
        assert await answer(said) == b"", said


async def test_the_proxy_protocol_from_an_untrusted_address(start):
    gateway = start(client__proxy_protocol="true", client__trusted_proxies='["10.0.0.0/8"]')
    reader, _ = await raw(gateway, proxied("203.0.113.1") + GET)
    assert await everything(reader) == b""


# Rates of services.


async def test_a_service_has_a_rate(start):
    gateway = with_keys(start, limits__service_requests_per_second=1, limits__service_requests_burst=5)
    async with service(gateway) as http, service(gateway, sub="other") as other:
        answers = []

        async def asked(_):
            answers.append(await http.get("/v1/public"))
            return answers[-1].status_code

        assert (await until_refused(asked))[:5] == [200] * 5
        assert answers[-1].json()["code"] == "rate_limited"
        assert int(answers[-1].headers["retry-after"]) >= 1
        assert (await other.get("/v1/public")).status_code == 200


async def test_guessing_tokens_has_a_rate(start):
    gateway = with_keys(start, limits__connects_per_second_per_address=1, limits__connects_burst_per_address=5)
    async with service(gateway) as http:
        wrong = {"authorization": f"Bearer {token(key='x' * 40, role='service')}"}
        answers = []

        async def guessed(_):
            answers.append(await http.get("/v1/public", headers=wrong))
            return answers[-1].status_code

        assert (await until_refused(guessed))[:3] == [401] * 3
        assert answers[-1].json()["code"] == "rate_limited" and "retry-after" in answers[-1].headers


# Logs and errors.


async def test_strangers_do_not_fill_the_log(start):
    gateway = start()
    for n in range(60):
        with pytest.raises(websockets.InvalidStatus):
            await gateway.open(origin=f"https://evil{n}.example")

    async def told():
        return [line for line in gateway.log() if line.get("left_out")]

    [line, *_] = await eventually(told)
    written = [line for line in gateway.log() if line["message"] == "a page's origin is not in client.origins"]
    assert line["line"] == "a page's origin is not in client.origins"
    assert len(written) <= 15 and line["left_out"] >= 40


async def test_a_service_can_act_for_a_user_with_any_valid_id(start):
    gateway = with_keys(start)
    user = "Åsa·日本"
    asa = await gateway.connect(user)
    async with service(gateway) as http:
        named = {"chat-user": urllib.parse.quote(user)}
        created = await http.post("/v1/conversations", json={"kind": "group", "participants": []}, headers=named)
        assert created.status_code == 201
        assert (await asa.message(created.json()["conversation"]))["sender"] == user
        for wrong in ("%", "%zz", "%C3", "a%2", "%ff%fe", "a%20b"):
            answer = await http.get("/v1/inbox", headers={"chat-user": wrong})
            assert (answer.status_code, answer.json()["code"]) == (400, "bad_request"), wrong
    await asa.close()


async def test_every_error_has_the_same_body(start):
    gateway = with_keys(start)
    async with service(gateway) as http:
        at = f"/v1/conversations/{uuid4()}"
        plain = {"content-type": "text/plain"}
        for answer, wanted in (
            (await http.get("/v1/conversations/nonsense"), 400),
            (await http.get("/v1/users/%ff/presence"), 400),
            (await http.get("/v1/users/a%20b/presence"), 400),
            (await http.get("/v1/inbox", params={"limit": "many"}), 400),
            (await http.get(f"{at}/messages", params={"before": "-1"}), 400),
            (await http.get("/v1/public", params={"after": "x"}), 400),
            (await http.put("/v1/inbox"), 405),
            (await http.post("/page.js"), 405),
            (await http.post(f"{at}/messages", content="{}", headers=plain), 415),
            (await http.post(f"{at}/messages", content="{", headers={"content-type": "application/json"}), 400),
            (await http.get("/v1/ws"), 400),
            (await http.get("/nowhere"), 404),
        ):
            assert answer.status_code == wanted, (answer.request.url, answer.text)
            body = answer.json()
            assert body["type"] == "error" and body["message"], body
            assert body["code"] == ("not_found" if wanted == 404 else "bad_request")
        assert "GET" in (await http.put("/v1/inbox")).headers["allow"]
    with pytest.raises(websockets.InvalidStatus) as refusal:
        await gateway.open(origin="https://evil.example")
    assert json.loads(refusal.value.response.body)["code"] == "forbidden"


# Scopes.


def operations(document):
    """Yields every operation for services with its required scopes: method, path, scopes."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            for requirement in operation.get("security", []):
                if "service" in requirement:
                    yield method, path, requirement["service"]


def is_let_in(answer):
    """Whether the scopes of a request were enough. It may be refused for another reason, but not fail."""
    text = answer.text
    return answer.status_code < 500 and answer.status_code != 401 and (answer.status_code != 403 or text and "scope" not in text)


async def test_a_service_may_do_what_its_scopes_allow(start):
    gateway = with_keys(start)
    user, group = "alice", uuid4()

    http = service(gateway, "")

    async def asked(scope, method, path):
        path = path.replace("{conversation}", group).replace("{user}", user).replace("{seq}", "1").replace("{emoji}", "x").replace("{file}", group)
        bearer = token("backend", role="service", **({} if scope is None else {"scope": scope}))
        return await http.request(method, path, headers={"chat-user": user, "authorization": f"Bearer {bearer}"})

    document = (await http.get("/openapi.json")).json()
    # A moderator may delete with `messages:moderate` instead: see test_changes_http.py.
    every = [operation for operation in operations(document) if operation[2] != ["messages:moderate"]]
    assert len(every) == 40
    for method, path, scopes in every:
        assert len(scopes) == 1, f"{method} {path} must name one scope, not {scopes}"
        [scope] = scopes
        other = " ".join(s for s in EVERY_SCOPE.split() if s != scope)
        for lacking in (None, "", other, f"{scope}x", scope.upper()):
            answer = await asked(lacking, method, path)
            assert answer.status_code == 403, (method, path, lacking)
            if method != "head":  # its answer has no body
                assert answer.json()["code"] == "forbidden" and scope in answer.json()["message"], (method, path, lacking)
        answer = await asked(f"{other} {scope}", method, path)
        assert is_let_in(answer), (method, path, answer.status_code, answer.text)
    assert {scope for _, _, [scope] in every} == set(EVERY_SCOPE.split())
    await http.aclose()


async def test_only_named_keys_sign_for_services(start, tmp_path):
    keys = {"users": "the secret of whoever signs in users", "backend": "the secret of whoever may do all that"}
    file = tmp_path / "gateway.toml"
    text = "".join(f'[[auth.keys]]\nalgorithm = "HS256"\nkid = "{k}"\nsecret = "{s}"\n' for k, s in keys.items())
    file.write_text(text + '[auth]\nservice_keys = ["backend"]\n')
    gateway = start(config=file)

    async def asked(kid, key):
        bearer = token("backend", key=key, kid=kid, role="service", scope=EVERY_SCOPE)
        async with httpx.AsyncClient(base_url=f"http://{gateway.client}", timeout=PATIENCE) as http:
            return await http.get("/v1/public", headers={"authorization": f"Bearer {bearer}"})

    assert (await asked("backend", keys["backend"])).status_code == 200
    assert (await asked(None, keys["backend"])).status_code == 200
    for kid in ("users", None):
        refused = await asked(kid, keys["users"])
        assert refused.status_code == 403 and "auth.service_keys" in refused.json()["message"]
    assert (await asked("backend", keys["users"])).status_code == 401
    # The command line signs with a key that may sign for services.
    gateway.arguments = []
    made = gateway.command("--config", str(file), "token", "x", "--role", "service", "--scope", "presence:read").stdout
    assert jwt.get_unverified_header(made.strip())["kid"] == "backend"
    file.write_text(text + '[auth]\nservice_keys = ["nobody"]\n')
    wrong = gateway.command("--config", str(file), "config", "check", check=False)
    assert wrong.returncode != 0 and "auth.service_keys[0]" in wrong.stderr and "nobody" not in wrong.stderr


async def test_the_command_line_makes_tokens_with_scopes(start):
    gateway = start()
    made = gateway.token("backend", "--role", "service", "--scope", "messages:read presence:read")
    claims = jwt.decode(made, options={"verify_signature": False})
    assert (claims["role"], claims["scope"]) == ("service", "messages:read presence:read") and claims["jti"]
    for wrong in (["--scope", "messages:everything"], [], ["--scope", ""]):
        done = gateway.command("token", "backend", "--role", "service", *wrong, check=False)
        assert (done.returncode == 0) == (wrong == ["--scope", ""]), done.stderr


async def test_each_request_of_a_service_is_in_the_audit_log(start):
    gateway = with_keys(start)
    secret_text = "what nobody else may read"
    async with service(gateway, user="alice", jti="token-7") as http, service(gateway, "presence:read") as weak:
        group = (await http.post("/v1/conversations", json={"kind": "group", "participants": []})).json()["conversation"]
        at = f"/v1/conversations/{group}"
        send = {"client_id": uuid4(), "body": secret_text}
        assert (await http.post(f"{at}/messages", json=send)).status_code == 200
        assert (await http.post(f"{at}/messages", json={"body": secret_text})).status_code == 400
        assert (await http.get(f"/v1/conversations/{uuid4()}")).status_code == 404
        assert (await weak.delete("/v1/users/alice/sessions")).status_code == 403
        assert (await weak.get("/v1/users/alice/presence")).status_code == 200
        used = http.headers["authorization"].split()[1]
    audit = [line for line in gateway.log() if line.get("target") == "audit"]
    messages = "POST /v1/conversations/{conversation}/messages"
    assert [(line["request"], line["result"]) for line in audit] == [
        ("POST /v1/conversations", "ok"),
        (messages, "ok"),
        (messages, "bad_request"),
        ("GET /v1/conversations/{conversation}", "not_found"),
        ("DELETE /v1/users/{user}/sessions", "forbidden"),
        ("GET /v1/users/{user}/presence", "ok"),
    ]
    first = audit[0]
    assert (first["service"], first["user"], first["token"], first["conversation"]) == ("backend", "alice", "token-7", group)
    assert audit[1]["conversation"] == group
    assert [line.get("about") for line in audit] == [None] * 4 + ["alice"] * 2
    text = open(gateway.log_path).read()
    assert secret_text not in text and used not in text
