"""Authentication, limits, draining, and the HTTP interface for services."""
import asyncio
import json
import signal
import socket
import struct
import time

import httpx
import jwt
import msgpack
import pytest
import websockets
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from support import PATIENCE, UNLIMITED, Gateway, Refused, eventually, uuid4, within
from test_messages import refused

SECRET = "a secret of more than thirty-two bytes"


async def turned_away(gateway, token, codec="json"):
    """Connects with a token that must be refused. Returns the error code and the close code."""
    client = await gateway.open(codec)
    with pytest.raises(Refused) as refusal:
        await client.ask("connect", token=token)
    return refusal.value.code, await client.closed()


def token(key=SECRET, algorithm="HS256", headers=None, **claims):
    return jwt.encode({"sub": "alice", "exp": time.time() + 600, **claims}, key, algorithm=algorithm, headers=headers)


@pytest.mark.embedded
async def test_only_valid_tokens_of_known_algorithms_are_accepted(start, tmp_path, codec):
    keys = {
        "RS256": rsa.generate_private_key(public_exponent=65537, key_size=2048),
        "ES256": ec.generate_private_key(ec.SECP256R1()),
        "EdDSA": ed25519.Ed25519PrivateKey.generate(),
    }
    config = f'[auth]\nkeys = [{{ algorithm = "HS256", secret = "{SECRET}" }}'
    for name, key in keys.items():
        pem = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / name).write_bytes(pem)
        config += f', {{ algorithm = "{name}", kid = "{name}", public_key_file = "{tmp_path / name}" }}'
    config += ']\nissuer = "https://login.example.org"\naudience = "chat"\n'
    file = tmp_path / "gateway.toml"
    file.write_text(config)
    gateway = start(config=file)
    good = {"iss": "https://login.example.org", "aud": "chat"}
    for name, key in {"HS256": SECRET, **keys}.items():
        client = await gateway.open(codec)
        assert (await client.connect("alice", token(key, name, **good)))["user"] == "alice"
        await client.close()
    wrong = {
        "expired": (token(exp=time.time() - 60, **good), 4002),
        "another secret": (token("x" * 40, **good), 4501),
        "no issuer": (token(aud="chat"), 4501),
        "another issuer": (token(**{**good, "iss": "https://evil.example.org"}), 4501),
        "another audience": (token(**{**good, "aud": "shop"}), 4501),
        "no audience": (token(iss=good["iss"]), 4501),
        "not yet": (token(nbf=time.time() + 600, **good), 4501),
        "HS384": (token(algorithm="HS384", **good), 4501),
        "an unknown kid": (token(keys["ES256"], "ES256", headers={"kid": "old"}, **good), 4501),
        "the public key as a secret": (forged((tmp_path / "RS256").read_bytes(), good), 4501),
        "none": (unsigned(good), 4501),
        "no exp": (jwt.encode({"sub": "alice", **good}, SECRET), 4501),
        "no sub": (jwt.encode({"exp": time.time() + 600, **good}, SECRET), 4501),
        "a strange sub": (token(sub="a b", **good), 4501),
        "noise": ("nonsense", 4501),
    }
    for what, (bad, close) in wrong.items():
        assert await turned_away(gateway, bad, codec) == ("unauthorized", close), what
    async with httpx.AsyncClient(timeout=PATIENCE) as http:
        response = await http.post(f"http://{gateway.client}/v1/tokens", json={"user": "alice"})
        assert response.status_code == 404, "development tokens exist beside real keys"


def forged(public_pem, claims):
    """A token signed with a public key as its HMAC secret, the well-known attack on JWT."""
    import base64
    import hashlib
    import hmac

    def part(value):
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=")

    signed = part({"alg": "HS256", "typ": "JWT"}) + b"." + part({"sub": "alice", "exp": time.time() + 600, **claims})
    mac = base64.urlsafe_b64encode(hmac.new(public_pem, signed, hashlib.sha256).digest()).rstrip(b"=")
    return (signed + b"." + mac).decode()


def unsigned(claims):
    return jwt.encode({"sub": "alice", "exp": time.time() + 600, **claims}, None, algorithm="none")


@pytest.mark.embedded
async def test_an_expired_token_closes_and_a_refreshed_one_does_not(start, codec):
    gateway = start(auth__leeway_s=0)

    def lasting(user, seconds):
        return gateway.token(user, "--ttl", f"{seconds}s")

    # Each takes a process to make; the short ones come last, so that they last for all requests.
    of_alice, longer = lasting("alice", 60), lasting("bob", 600)
    short = {user: lasting(user, 5) for user in ("alice", "bob")}
    alice, bob = await gateway.open(codec), await gateway.open(codec)
    await alice.connect("alice", short["alice"])
    await bob.connect("bob", short["bob"])
    await refused(bob.ask("refresh", token=of_alice), "unauthorized")
    await refused(bob.ask("refresh", token="nonsense"), "unauthorized")
    refreshed = await bob.ask("refresh", token=longer)
    assert refreshed["expires_at"] > bob.hello["expires_at"]
    assert await alice.closed() == 4002
    # Bob's first token has expired for certain.
    await asyncio.sleep(max(0, bob.hello["expires_at"] / 1000 - time.time()) + 0.5)
    assert (await bob.ask("ping"))["type"] == "pong"
    await bob.close()


@pytest.mark.embedded
async def test_the_first_frame_must_be_connect_and_in_time(start, codec):
    gateway, impatient = start(), start(session__connect_timeout_ms=300)
    hasty = await gateway.open(codec)
    await refused(hasty.ask("ping"), "unauthorized")
    assert await hasty.closed() == 4501
    # Before `connect` the gateway looks only at the type of a frame.
    for type, fields in {"watch": {"users": "nonsense"}, "nonsense": {}}.items():
        hasty = await gateway.open(codec)
        await refused(hasty.ask(type, **fields), "unauthorized")
        assert await hasty.closed() == 4501
    wrong = await gateway.open(codec)
    await refused(wrong.ask("connect", token=1), "bad_request")
    assert await wrong.closed() == 4500
    silent = await impatient.open(codec)
    assert await silent.closed() == 4006


@pytest.mark.embedded
async def test_no_subprotocol_means_json_and_an_unknown_one_is_refused(gateway, names):
    plain = await gateway.open(subprotocols=None)
    assert plain.socket.subprotocol is None
    await plain.connect(*names("alice"))
    await plain.close()
    with pytest.raises(websockets.InvalidStatus) as refusal:
        await gateway.open(subprotocols=["chat.v9.xml"])
    assert refusal.value.response.status_code == 400


@pytest.mark.embedded
async def test_origins(start):
    gateway = start(client__origins='["https://chat.example.org"]')
    for origin in ("https://chat.example.org", f"http://{gateway.client}"):
        client = await gateway.open(origin=origin)
        await client.close()
    for origin in ("https://evil.example.org", "null", "https://chat.example.org.evil.example"):
        with pytest.raises(websockets.InvalidStatus) as refusal:
            await gateway.open(origin=origin)
        assert refusal.value.response.status_code == 403


@pytest.mark.embedded
async def test_bad_frames_close_with_4500_and_affect_no_other_session(people, gateway, names, codec):
    bystander = await people("bystander")
    binary = codec == "msgpack"
    frames = [None, [], {}, "text", {"type": 7}, {"type": "ping", "id": -1}, {"type": "ping", "id": 2**53}]
    encoded = [msgpack.packb(frame) for frame in frames] if binary else [json.dumps(frame) for frame in frames]
    for raw in [b"", b"\xff\xff", b"\x81", *encoded] if binary else ["", "\xff\xff", "{", *encoded]:
        client = await gateway.connect(*names("noisy"), codec)
        await client.send_raw(raw)
        assert await client.closed() == 4500, raw
    wrong_kind = await gateway.connect(*names("noisy"), codec)
    await wrong_kind.send_raw("{}" if binary else b"\x80")
    assert await wrong_kind.closed() == 4500
    large = await gateway.connect(*names("noisy"), codec)
    await large.send_raw(b"x" * 70_000 if binary else "x" * 70_000)
    assert await large.closed() == 4500
    assert (await bystander.ask("ping"))["type"] == "pong"


@pytest.mark.embedded
async def test_rate_limits_refuse_and_then_close(start, codec):
    gateway = start(limits__requests_per_second=1, limits__requests_burst=20)
    alice = await gateway.connect("alice", codec)
    replies = [await alice.begin("ping") for _ in range(30)]
    kinds = [(await reply)["type"] for reply in replies]
    assert kinds[:20] == ["pong"] * 20 and "error" in kinds[20:]
    error = next(r for r in [await reply for reply in replies] if r["type"] == "error")
    assert error["code"] == "rate_limited" and 0 < error["retry_after_ms"] <= 1001
    try:
        for _ in range(200):
            await alice.begin("ping")
    except (websockets.ConnectionClosed, ConnectionError):
        pass
    assert await alice.closed() == 4004


@pytest.mark.embedded
async def test_connections_of_a_user_are_limited(start, codec):
    gateway = start(limits__connections_per_user=2)
    first = [await gateway.connect("alice", codec) for _ in range(2)]
    client = await gateway.open(codec)
    await refused(client.ask("connect", token=gateway.dev_token("alice")), "rate_limited")
    assert await client.closed() == 4005
    await first[0].close()

    async def free():
        client = await gateway.open(codec)
        try:
            await client.connect("alice")
        except Refused:
            return None
        return client

    client = await eventually(free)
    for client in (client, first[1]):
        await client.close()


@pytest.mark.embedded
async def test_connections_still_sending_cursors_count_too(start, codec):
    gateway = start(limits__connections_per_user=2)
    token = gateway.dev_token("alice")
    connected = await gateway.connect("alice", codec)
    others = [await gateway.open(codec) for _ in range(2)]
    replies = [await other.begin("connect", token=token, cursors={}, more=True) for other in others]
    # The later one is closed; the other one may still send.
    ends = [asyncio.ensure_future(other.closed()) for other in others]
    ended, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    assert [end.result() for end in ended] == [4005]
    left = ends.index(next(end for end in ends if end not in ended))
    await others[left].post(type="cursors", cursors={})
    assert (await within(replies[left], PATIENCE))["type"] == "connected"
    assert (await within(replies[1 - left], PATIENCE))["code"] == "rate_limited"
    sending = others[left]
    for client in (connected, sending):
        await client.close()


@pytest.mark.embedded
async def test_connections_of_a_gateway_are_limited(start):
    gateway = start(limits__connections=2)
    clients = [await gateway.open() for _ in range(2)]
    with pytest.raises(websockets.InvalidStatus) as refusal:
        await gateway.open()
    assert refusal.value.response.status_code == 503
    for client in clients:
        await client.close()


@pytest.mark.embedded
async def test_an_address_has_a_connect_rate(start):
    gateway = start(limits__connects_per_second_per_address=1, limits__connects_burst_per_address=3)
    clients, begun = [], time.monotonic()
    with pytest.raises(websockets.InvalidStatus) as refusal:
        while len(clients) < 50:
            clients.append(await gateway.open())
    # A slow machine may be allowed more than the burst.
    assert 3 <= len(clients) <= 3 + time.monotonic() - begun
    assert refusal.value.response.status_code == 429
    assert refusal.value.response.headers["retry-after"] == "1"
    for client in clients:
        await client.close()


def slow_socket(gateway, user):
    """A raw socket with a tiny receive buffer that connects as a user and then reads nothing."""
    host, port = gateway.client.rsplit(":", 1)
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect((host, int(port)))
    raw.sendall(
        f"GET /v1/ws HTTP/1.1\r\nhost: {gateway.client}\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        "sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode())
    body = json.dumps({"type": "connect", "id": 1, "token": gateway.dev_token(user)}).encode()
    header = struct.pack("!BBH", 0x81, 0x80 | 126, len(body)) + b"\0\0\0\0"
    raw.sendall(header + body)
    seen = b""
    while b'"connected"' not in seen:
        seen += raw.recv(1024)
    return raw


@pytest.mark.embedded
async def test_a_slow_reader_is_closed_with_4003_and_the_others_do_not_notice(start):
    gateway = start(limits__outbox_bytes=2_000_000, **UNLIMITED)
    alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
    slow = slow_socket(gateway, "carol")
    group = await alice.create("group", "bob", "carol")
    body, sent = "x" * 15_000, 0

    async def flood():
        nonlocal sent
        for reply in [await alice.begin("send", conversation=group, client_id=uuid4(), body=body) for _ in range(20)]:
            await reply
            sent += 1
        return gateway.metrics().get('chat_sessions_closed_total{reason="too slow"}')

    assert await eventually(flood) == 1
    seqs = [(await bob.message(group))["seq"] for _ in range(sent + 1)]
    assert seqs == list(range(1, sent + 2))
    slow.settimeout(20)
    tail = b""
    while chunk := slow.recv(65536):
        tail = (tail + chunk)[-200:]
    assert struct.pack("!H", 4003) in tail, "the close code does not follow the queued frames"
    slow.close()
    for client in (alice, bob):
        await client.close()


@pytest.mark.embedded
async def test_a_client_that_answers_no_ping_is_offline(start):
    gateway = start(session__ping_interval_ms=1000)
    bob = await gateway.connect("bob")
    [item] = (await bob.ask("watch", users=["alice"]))["items"]
    assert item["online"] is False
    # In a thread, so that Bob answers his pings meanwhile.
    raw = await asyncio.to_thread(slow_socket, gateway, "alice")
    assert [(await bob.event("presence"))["online"] for _ in range(2)] == [True, False]
    raw.settimeout(PATIENCE)
    sent = b""
    while chunk := await asyncio.to_thread(raw.recv, 65536):
        sent += chunk
    assert struct.pack("!H", 4007) + b"no sign of life" in sent
    assert 'chat_sessions_closed_total{reason="no sign of life"}' in gateway.metrics()
    raw.close()
    await bob.close()


async def test_an_administrator_disconnects_a_user(gateway, people):
    alice, bob = await people("alice", "bob")
    async with service(gateway) as http:
        response = await http.delete(f"/v1/users/{alice.user}/sessions")
        assert (response.status_code, response.json()) == (200, {"closed": 1})
    assert await alice.closed() == 4502
    assert (await bob.ask("ping"))["type"] == "pong"


async def test_a_drain_loses_nothing(start, codec):
    gateway = start(drain__spread_ms=500, **UNLIMITED)
    alice, bob = await gateway.connect("alice", codec), await gateway.connect("bob", codec)
    dm = await alice.create("dm", "bob")
    ids = [uuid4() for _ in range(200)]
    replies = [await alice.begin("send", conversation=dm, client_id=id, body=id) for id in ids]
    await replies[20]
    stopping = asyncio.to_thread(gateway.stop)
    stopping = asyncio.create_task(stopping)
    for client in (alice, bob):
        assert 0 <= (await client.event("reconnect"))["after_ms"] <= 500
    with pytest.raises((websockets.InvalidHandshake, OSError)):
        await gateway.open()
    assert [await client.closed() for client in (alice, bob)] == [1012, 1012]
    assert await stopping == 0
    assert all(isinstance(r.exception(), ConnectionError | None) for r in replies)
    answered = {r.result()["seq"]: id for id, r in zip(ids, replies) if not r.exception()}
    assert len(answered) > 20
    again = start(gateway.directory)
    back = await again.connect("bob", codec)
    log = await back.everything(dm)
    assert [m["seq"] for m in log] == list(range(1, len(log) + 1)) and len({m["client_id"] for m in log}) == len(log)
    assert answered.items() <= {m["seq"]: m["client_id"] for m in log if m["body"] == m["client_id"]}.items()
    assert (await back.inbox(dm))["unread"] == len(log)
    await back.close()


@pytest.mark.embedded
async def test_connections_made_before_a_drain_are_answered(start):
    gateway = start(limits__connects_burst_per_address=1000)
    # The kernel accepts the connections and their bytes; the gateway finds them together with the signal.
    gateway.process.send_signal(signal.SIGSTOP)
    host, port = gateway.client.split(":")
    sockets = [await asyncio.open_connection(host, port) for _ in range(50)]
    head = f"GET /v1/ws HTTP/1.1\r\nHost: {gateway.client}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    head += "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    for _, writer in sockets:
        writer.write(head.encode())
        await writer.drain()
    gateway.process.send_signal(signal.SIGTERM)
    gateway.process.send_signal(signal.SIGCONT)
    async with asyncio.timeout(PATIENCE):
        answers = [await reader.readline() for reader, _ in sockets]
    assert {answer.split(b" ", 2)[1] for answer in answers} <= {b"101", b"503"}
    for _, writer in sockets:
        writer.close()
    assert await asyncio.to_thread(gateway.process.wait) == 0


@pytest.mark.embedded
async def test_a_client_that_reads_nothing_does_not_hold_up_a_drain(start):
    gateway = start(limits__outbox_bytes=50_000_000, drain__grace_ms=15000)
    alice, stuck = await gateway.connect("alice"), slow_socket(gateway, "carol")
    dm = await alice.create("dm", "carol")
    for _ in range(4):
        for reply in [await alice.begin("send", conversation=dm, client_id=uuid4(), body="x" * 15_000) for _ in range(100)]:
            await reply
    assert await asyncio.to_thread(gateway.stop) == 0
    assert await alice.closed() == 1012
    stuck.close()


async def test_health_and_metrics(start):
    gateway = start(drain__delay_ms=5000, drain__spread_ms=0)
    alice = await gateway.connect("alice")
    async with httpx.AsyncClient(base_url=f"http://{gateway.internal}", timeout=PATIENCE) as http:
        assert (await http.get("/health/live")).status_code == 200
        assert (await http.get("/health/ready")).json() == {"status": "ready"}
        text = (await http.get("/metrics")).text
        assert "chat_sessions 1" in text and "# HELP chat_entries_committed_total" in text
        stopping = asyncio.create_task(asyncio.to_thread(gateway.stop))
        await alice.event("reconnect")
        ready = await http.get("/health/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
    assert await alice.closed() == 1012
    assert await stopping == 0


EVERY_SCOPE = "messages:read messages:write conversations:read conversations:write presence:read sessions:close"


def service(gateway, user=None):
    token = gateway.token("backend", "--role", "service", "--scope", EVERY_SCOPE)
    headers = {"authorization": f"Bearer {token}"}
    if user:
        headers["chat-user"] = user
    return httpx.AsyncClient(base_url=f"http://{gateway.client}", headers=headers, timeout=20, event_hooks={"response": [tell_refusal]})


async def tell_refusal(response):
    """Prints why a request was refused. A test that expected another answer shows it."""
    if response.status_code >= 400:
        await response.aread()
        print(response.request.method, response.request.url.path, response.status_code, response.text)


async def test_services_can_do_the_same_over_http(gateway, people):
    alice, bob = await people("alice", "bob")
    async with service(gateway, alice.user) as http:
        created = await http.post("/v1/conversations", json={"kind": "group", "participants": [bob.user], "name": "Ops"})
        assert created.status_code == 201
        group = created.json()["conversation"]
        assert (await bob.message(group))["system"]["name"] == "Ops"
        at = f"/v1/conversations/{group}"
        send = {"client_id": uuid4(), "body": "deployed"}
        sent = (await http.post(f"{at}/messages", json=send)).json()
        assert (sent["type"], sent["seq"], sent["duplicate"]) == ("sent", 2, False)
        assert (await http.post(f"{at}/messages", json=send)).json()["duplicate"] is True
        assert (await bob.message(group))["body"] == "deployed"
        page = (await http.get(f"{at}/messages", params={"limit": 1})).json()
        assert [m["body"] for m in page["messages"]] == ["deployed"]
        assert (await http.patch(at, json={"name": "Ops 2"})).json()["seq"] == 3
        assert (await http.get(at)).json()["name"] == "Ops 2"
        assert (await http.post(f"{at}/participants", json={"user": "zoe"})).json()["seq"] == 4
        assert (await http.put(f"{at}/participants/zoe/role", json={"role": "admin"})).json()["seq"] == 5
        people_there = (await http.get(f"{at}/participants")).json()["items"]
        assert {p["user"]: p["role"] for p in people_there}["zoe"] == "admin"
        assert (await http.delete(f"{at}/participants/zoe")).json()["seq"] == 6
        assert (await http.post(f"{at}/read", json={"seq": 6})).status_code == 200
        item = next(i for i in (await http.get("/v1/inbox")).json()["items"] if i["conversation"] == group)
        assert (item["last_seq"], item["unread"]) == (6, 0)
        assert (await http.get(f"/v1/users/{bob.user}/presence")).json() == {"user": bob.user, "online": True}
        assert (await http.get("/v1/public")).status_code == 200
        for path in (f"{at}x", "/v1/conversations/nonsense"):
            assert (await http.get(path)).status_code in (400, 404)
        missing = await http.get(f"/v1/conversations/{uuid4()}")
        assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
        bad = await http.post(f"{at}/messages", json={"body": "x"})
        assert (bad.status_code, bad.json()["code"]) == (400, "bad_request")
        huge = await http.post(f"{at}/messages", json={"client_id": uuid4(), "body": "x" * 80_000})
        assert (huge.status_code, huge.json()["code"]) == (413, "too_large")
    async with httpx.AsyncClient(base_url=f"http://{gateway.client}", timeout=PATIENCE) as http:
        assert (await http.get("/v1/inbox")).status_code == 401
        ordinary = {"authorization": f"Bearer {gateway.dev_token('alice')}"}
        assert (await http.get("/v1/inbox", headers=ordinary)).status_code == 403
        document = (await http.get("/openapi.json")).json()
        assert "/v1/conversations/{conversation}/messages" in document["paths"]
        assert document["paths"]["/v1/inbox"]["get"]["security"] == [{"service": ["messages:read"]}]


@pytest.mark.embedded
def test_invalid_settings_are_named_with_their_source(tmp_path):
    gateway = Gateway(str(tmp_path))

    def refused_with(*texts, file=None, **settings):
        gateway.settings = settings
        arguments = ["config", "check"]
        if file is not None:
            (tmp_path / "wrong.toml").write_text(file)
            arguments = ["--config", str(tmp_path / "wrong.toml"), *arguments]
        done = gateway.command(*arguments, check=False)
        assert done.returncode != 0
        for text in texts:
            assert text in done.stderr, done.stderr

    refused_with("client.listen", "wrong.toml", file='auth.development = true\n[client]\nlisten = "0.0.0.0:8080"\n')
    refused_with("limits.colour", "wrong.toml", file="[limits]\ncolour = 7\n")
    refused_with("limits.body_bytes", "wrong.toml", file='[limits]\nbody_bytes = "big"\n')
    refused_with("limits.frame_bytes", "CHAT__LIMITS__FRAME_BYTES", limits__frame_bytes="10")
    refused_with("auth.keys[0]", file='[[auth.keys]]\nalgorithm = "HS256"\nsecret = "short"\n')
    refused_with("auth.keys[0].algorithm", "must be one of HS256, RS256", file='[[auth.keys]]\nalgorithm = "none"\nsecret = "short"\n')
    refused_with("nowhere.pem", file='[[auth.keys]]\nalgorithm = "RS256"\npublic_key_file = "nowhere.pem"\n')
    done = gateway.command("--config", str(tmp_path / "missing.toml"), "config", "check", check=False)
    assert done.returncode != 0 and "missing.toml" in done.stderr
    gateway.settings = {"limits__body_bytes": "1000"}
    shown = gateway.command("config", "show").stdout
    assert "limits.body_bytes = 1000    # environment CHAT__LIMITS__BODY_BYTES" in shown
    assert 'client.listen = "127.0.0.1:8080"    # default' in shown


@pytest.mark.embedded
def test_two_gateways_do_not_share_a_directory(start):
    gateway = start()
    second = Gateway(gateway.directory)
    done = second.command(check=False)
    assert done.returncode != 0 and "in use by another process" in done.stderr, done.stderr
