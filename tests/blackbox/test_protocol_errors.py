"""What clients are told about mistakes: the field and what it must be, over WebSocket and over HTTP."""
import asyncio
import json
import re
import unicodedata
from collections import Counter

import httpx
import jwt
import msgpack
import pytest

from support import PATIENCE, ROOT, Gateway, Refused, within

SECRET = "a secret of a test that has more than 32 bytes"
KEYS = f'[{{ algorithm = "HS256", secret = "{SECRET}" }}]'
ID_MAX = 2**53 - 1
GROUP = "0199c0de-0000-4000-8000-000000000001"
# Words of the gateway's language, or positions, which help nobody who writes a client.
INTERNAL = re.compile(r"struct|integer|usize|\bu64\b|\bi64\b|\bu32\b|sequence|expected|invalid type|line 1 column|deserialize|string `|target type|serde|UUID parsing", re.I)


@pytest.mark.parametrize("id", [0, 2**32 - 1, 2**32, 1795000000123, ID_MAX])
async def test_an_id_may_be_the_time_in_milliseconds(people, id):
    alice = await people("alice")
    for type, fields in [("ping", {}), ("history", {"conversation": GROUP}), ("nonsense", {})]:
        answer = alice.replies[id] = asyncio.get_running_loop().create_future()
        await alice.post(type=type, id=id, **fields)
        assert (await answer)["id"] == id


async def test_a_connect_may_have_a_large_id(gateway, names, codec):
    [user] = names("alice")
    client = await gateway.open(codec)
    answer = client.replies[ID_MAX] = asyncio.get_running_loop().create_future()
    await client.post(id=ID_MAX, type="connect", token=gateway.dev_token(user))
    assert (await answer)["type"] == "connected"
    await client.close()


@pytest.mark.parametrize("id", [ID_MAX + 1, -1, 1.5, "1", [1], {}, True])
async def test_a_wrong_id_is_named_when_the_connection_closes(gateway, names, codec, id):
    [user] = names("alice")
    for first in [{"type": "ping", "id": id}, {"id": id, "type": "ping"}]:
        client = await gateway.connect(user, codec)
        await client.post(**first)
        assert await client.closed() == 4500
        assert client.socket.close_reason == f"bad frame: id: must be a whole number from 0 to {ID_MAX}"
    for order in [("type", "id"), ("id", "type")]:
        frame = {"type": "connect", "id": id, "token": gateway.dev_token(user)}
        client = await gateway.open(codec)
        await client.post(**{name: frame[name] for name in (*order, "token")})
        assert await client.closed() == 4500
        assert client.socket.close_reason == f"bad frame: id: must be a whole number from 0 to {ID_MAX}"


async def test_what_is_no_frame_is_described(gateway, names):
    for raw, why in [("{", "it is not JSON: EOF while parsing an object, at line 1, column 1"), ("[]", "must be an object"), ("7", "must be an object"),
                     ("{}", "type: is missing"), ('{"type": 1}', "type: must be a text"), ('{"type": "ping", "type": "ping"}', "type: is given twice")]:
        client = await gateway.connect(*names("alice"))
        await client.send_raw(raw)
        assert await client.closed() == 4500
        assert client.socket.close_reason == f"bad frame: {why}", raw
    client = await gateway.connect(*names("alice"), codec="msgpack")
    await client.send_raw(msgpack.packb({"type": "ping"}) + b"x")
    assert await client.closed() == 4500 and "bytes after the frame" in client.socket.close_reason
    client = await gateway.connect(*names("alice"))
    await client.send_raw('{"type": "' + "é" * 200)
    assert await client.closed() == 4500 and client.socket.close_reason.startswith("bad frame: it is not JSON")


# type, fields, the beginning of the message
WRONG = [
    ("send", {}, "conversation: is missing"),
    ("send", {"conversation": 1}, "conversation: must be "),
    ("send", {"conversation": "x"}, "conversation: "),
    ("send", {"conversation": GROUP, "client_id": GROUP, "body": 1}, "body: must be a text"),
    ("send", {"conversation": GROUP, "client_id": GROUP, "body": "x", "attachments": 1}, "attachments: must be a list"),
    ("send", {"conversation": GROUP, "client_id": GROUP, "body": "x", "attachments": [1]}, "attachments[0]: must be an object"),
    ("send", {"conversation": GROUP, "client_id": GROUP, "body": "x", "attachments": [{"url": "https://a"}, {"url": 7}]}, "attachments[1].url: must be a text"),
    ("send", {"conversation": GROUP, "client_id": GROUP, "body": "x", "reply_to": "4"}, "reply_to: must be a whole number"),
    ("create", {"kind": "team", "participants": []}, "kind: must be one of dm, group, channel"),
    ("create", {"kind": "group", "participants": ["bob", 1]}, "participants[1]: must be a user id"),
    ("create", {"kind": "group", "participants": ["a b"]}, "participants[0]: "),
    ("create", {"kind": "group", "participants": {}}, "participants: must be a list"),
    ("create", {"kind": "group", "participants": [], "public": 1}, "public: must be true or false"),
    ("history", {"conversation": GROUP, "limit": -1}, "limit: must be a whole number, at least 0"),
    ("history", {"conversation": GROUP, "limit": 1.5}, "limit: must be a whole number, at least 0"),
    ("read", {"conversation": GROUP, "seq": "7"}, "seq: must be a whole number, at least 0"),
    ("watch", {"users": "bob"}, "users: must be a list"),
    ("device_set", {"device": "phone", "provider": 1}, "provider: must be one of "),
    ("device_set", {"device": "phone"}, "provider: is missing"),
    ("delete", {"conversation": GROUP, "seqs": [1, "2"]}, "seqs[1]: must be a whole number, at least 0"),
]


async def test_a_wrong_field_is_named(people):
    alice = await people("alice")
    for type, fields, message in WRONG:
        with pytest.raises(Refused) as refused:
            await alice.ask(type, **fields)
        assert refused.value.code == "bad_request", (type, fields, refused.value)
        said = refused.value.error["message"]
        assert said.startswith(message) and not INTERNAL.search(said), (type, fields, said)


def deep(levels):
    value = None
    for _ in range(levels):
        value = [value]
    return value


async def test_a_list_is_no_frame(gateway, names, codec):
    for frame in [["ping", 77], ["ping", None], ["ping"], [], [["ping", 77]], ["send", 1, GROUP, GROUP, "x"]]:
        client = await gateway.connect(*names("alice"), codec=codec)
        await client.send_raw(json.dumps(frame) if codec == "json" else msgpack.packb(frame))
        assert await client.closed() == 4500
        assert client.socket.close_reason == "bad frame: must be an object", frame
    client = await gateway.open(codec)
    await client.send_raw(json.dumps(["connect", 1]) if codec == "json" else msgpack.packb(["connect", 1]))
    assert await client.closed() == 4500


async def test_what_is_in_an_unknown_field_does_not_matter(gateway, names, codec):
    alice = await gateway.connect(*names("alice"), codec=codec)
    more = [] if codec == "json" else [msgpack.ExtType(5, b"x" * 9), b"bytes", {1: {b"k": None}}, {"x": [msgpack.Timestamp(1)]}]
    for unknown in [deep(40), deep(100), {"a": deep(40)}, *more]:
        await alice.ask("ping", later=unknown)
        group = await alice.create("group", later=unknown)
        with pytest.raises(Refused) as refused:
            await alice.ask("device_set", device="phone", provider="fcm", token="", later=unknown)
        assert "token" in str(refused.value), refused.value
        # A mistake beside it is still named.
        for type, fields, message in [("history", {"conversation": group, "limit": "x"}, "limit: must be a whole number, at least 0"),
                                      ("device_set", {"device": "phone"}, "provider: is missing")]:
            with pytest.raises(Refused) as refused:
                await alice.ask(type, later=unknown, **fields)
            assert refused.value.error["message"] == message, (unknown, refused.value)
    await alice.close()


async def test_thousands_of_levels_are_ignored(gateway, names, codec):
    levels = 30_000
    alice = await gateway.connect(*names("alice"), codec=codec)
    for id in [7, 8]:
        answer = alice.replies[id] = asyncio.get_running_loop().create_future()
        if codec == "json":
            await alice.send_raw('{"later": %s%s, "id": %d, "type": "ping"}' % ("[" * levels, "]" * levels, id))
        else:
            await alice.send_raw(b"\x83\xa5later" + b"\x91" * levels + b"\xc0" + b"\xa2id" + bytes([id]) + b"\xa4type\xa4ping")
        assert (await answer)["type"] == "pong"
    await alice.close()


async def test_a_value_that_only_messagepack_has_is_named(gateway, names):
    alice = await gateway.connect(*names("alice"), codec="msgpack")
    extension = msgpack.ExtType(5, b"x" * 9)
    send = {"conversation": GROUP, "client_id": GROUP}
    for type, fields, message in [
        ("send", {**send, "body": b"hi"}, "body: must be a text"),
        ("send", {**send, "body": extension}, "body: must be a text"),
        ("send", {**send, "body": "x", "attachments": [{"url": b"https://a"}]}, "attachments[0].url: must be a text"),
        ("send", {**send, "body": "x", "attachments": extension}, "attachments: must be a list"),
        ("send", {**send, "body": "x", "reply_to": b"1"}, "reply_to: must be a whole number, at least 0"),
        ("send", {**send, "body": b"hi", "later": extension}, "body: must be a text"),
        ("create", {"kind": b"group", "participants": []}, "kind: must be one of dm, group, channel"),
        ("create", {"kind": extension, "participants": []}, "kind: must be one of dm, group, channel"),
        ("watch", {"users": [b"bob"]}, "users[0]: must be a user id"),
    ]:
        with pytest.raises(Refused) as refused:
            await alice.ask(type, **fields)
        said = refused.value.error["message"]
        assert refused.value.code == "bad_request" and said.startswith(message) and not INTERNAL.search(said), (type, fields, said)
    for frame, why in [({"type": b"ping", "id": 1}, "type: must be a text"), ({"type": extension}, "type: must be a text"), ({"type": "ping", "id": extension}, "id: must be a whole number"),
                       ({7: 1, "type": "ping", "id": 1}, "(key): must be a text")]:
        client = await gateway.connect(*names("alice"), codec="msgpack")
        await client.send_raw(msgpack.packb(frame))
        assert await client.closed() == 4500 and client.socket.close_reason.startswith(f"bad frame: {why}"), (frame, client.socket.close_reason)
    await alice.close()


def packed_map(*entries):
    """A MessagePack map with these keys in this order, also the same one twice. Bytes are values that are encoded already."""
    packed = [(msgpack.packb(key), value if isinstance(value, bytes) else msgpack.packb(value)) for key, value in entries]
    return bytes([0x80 + len(entries)]) + b"".join(key + value for key, value in packed)


# A length of 4 GiB, or as many elements, with two of them: a list, a map, a text, bytes, an extension.
HUGE = [bytes([marker]) + b"\xff\xff\xff\xff" + b"\xa1a" * 2 for marker in (0xdd, 0xdf, 0xdb, 0xc6, 0xc9)]
PING = [("type", "ping"), ("id", 7)]
# Lists in lists and maps in maps, without the value inside.
NESTED = [b"\x91" * 30_000, b"\x81\xa1x" * 15_000]


def no_messagepack_frames():
    """What is no frame, with the beginning of the reason."""
    whole = msgpack.packb({"type": "send", "id": 7, "conversation": GROUP, "client_id": GROUP, "body": "x", "attachments": [{"url": "https://a"}]})
    for end in range(len(whole)):
        yield whole[:end], "it is not MessagePack"
    no_values = [b"\xc1", b"\xa2\xc3\x28", *NESTED, *HUGE]
    for raw in no_values:
        yield raw, "it is not MessagePack"
        yield packed_map(*PING, ("later", raw)), "it is not MessagePack"
        yield packed_map(("later", raw), *PING), "it is not MessagePack"
    for value in [None, True, 7, -1, 1.5, "ping", b"ping", [], msgpack.ExtType(5, b"ping"), msgpack.Timestamp(1)]:
        yield msgpack.packb(value), "must be an object"
    for value in [None, True, 7, 1.5, [], {}, b"ping", msgpack.ExtType(5, b"ping")]:
        yield packed_map(("type", msgpack.packb(value)), ("id", 7)), "type: must be a text"
    for value in [-1, 1.5, True, "7", [], {}, msgpack.packb(b"7"), msgpack.packb(msgpack.ExtType(5, b"7")), ID_MAX + 1]:
        yield packed_map(("type", "ping"), ("id", value)), "id: must be a whole number"
    for key in [None, True, 7, -1, 1.5, b"type", (), msgpack.ExtType(5, b"type")]:
        yield packed_map((key, 1), *PING), "(key): must be a text"
        yield packed_map(("type", "read"), ("id", 7), ("conversation", GROUP), (key, 1), ("seq", 1)), "(key): must be a text"
    for twice in PING:
        yield packed_map(twice, twice, *PING), f"{twice[0]}: is given twice"
    yield packed_map(*PING) + b"\xc0", "bytes after the frame"


@pytest.mark.embedded
async def test_what_is_no_messagepack_frame_closes_its_connection_alone(gateway, names):
    bystander = await gateway.connect(*names("bystander"), codec="msgpack")
    for raw, why in no_messagepack_frames():
        client = await gateway.connect(*names("noisy"), codec="msgpack")
        await client.send_raw(raw)
        assert await client.closed() == 4500, raw[:80]
        assert client.socket.close_reason.startswith(f"bad frame: {why}"), (raw[:80], client.socket.close_reason)
        # Without `connect` it gets an answer at most, for which nobody waits, and no session.
        stranger = await gateway.open("msgpack")
        stranger.replies[7] = asyncio.get_running_loop().create_future()
        stranger.replies[7].cancel()
        await stranger.send_raw(raw)
        assert await stranger.closed() in (4500, 4501), raw[:80]
    assert (await bystander.ask("ping"))["type"] == "pong"
    await bystander.close()


@pytest.mark.embedded
async def test_wrong_fields_in_messagepack_are_answered_and_unknown_ones_ignored(gateway, names):
    alice = await gateway.connect(*names("alice"), codec="msgpack")
    ids = [("conversation", GROUP), ("client_id", GROUP)]
    nested = [levels + b"\xc0" for levels in NESTED]
    extension = msgpack.packb(msgpack.ExtType(5, b"x" * 9))
    no_text = msgpack.packb({None: 1, 7: [b"x"], b"k": msgpack.Timestamp(1)})

    async def answer(type, *fields):
        answer = alice.replies[7] = asyncio.get_running_loop().create_future()
        await alice.send_raw(packed_map(("type", type), ("id", 7), *fields))
        return await within(answer, PATIENCE)

    for wrong in [None, True, 7, -1, 1.5, [], {}, msgpack.packb(b"x"), extension, *nested, no_text]:
        said = await answer("send", *ids, ("body", wrong))
        assert (said["type"], said["code"], said["message"]) == ("error", "bad_request", "body: must be a text"), (wrong, said)
    for field in [*ids, ("body", "x"), ("reply_to", 1)]:
        said = await answer("send", *ids, ("body", "x"), ("reply_to", 1), field)
        assert (said["type"], said["code"], said["message"]) == ("error", "bad_request", f"{field[0]}: is given twice"), (field, said)
    for unknown in [extension, *nested, no_text, msgpack.packb(b"x")]:
        assert (await answer("ping", ("later", unknown)))["type"] == "pong", unknown[:80]
    assert (await answer("ping", ("later", 1), ("later", 2)))["type"] == "pong"
    assert (await alice.ask("ping"))["type"] == "pong"
    await alice.close()


@pytest.mark.parametrize("cursors", [7, {"x": [1, 2]}, {GROUP: 7}, {GROUP: [1]}, {GROUP: ["a", 2]}])
async def test_wrong_cursors_are_named(gateway, names, codec, cursors):
    client = await gateway.open(codec)
    with pytest.raises(Refused) as refused:
        await client.connect(*names("alice"), cursors=cursors)
    said = refused.value.error["message"]
    assert said.startswith("cursors") and not INTERNAL.search(said), said


def service(gateway):
    token = jwt.encode({"sub": "shop", "exp": 4e9, "role": "service", "scope": "messages:write messages:read conversations:write conversations:read"}, SECRET, algorithm="HS256")
    return httpx.AsyncClient(base_url=f"http://{gateway.client}", timeout=PATIENCE, headers={"authorization": f"Bearer {token}", "chat-user": "alice"})


async def test_a_wrong_field_is_named_over_http(start):
    gateway = start(auth__keys=KEYS)
    async with service(gateway) as http:
        for body, message in [
            ({}, "kind: is missing"),
            ({"kind": 1}, "kind: must be one of dm, group, channel"),
            ({"kind": "group", "participants": ["bob", 1]}, "participants[1]: must be a user id"),
            ([], "must be an object"),
            (["group"], "must be an object"),
            (["group", "a list", ["bob"]], "must be an object"),
            (1, "must be an object"),
        ]:
            answer = await http.post("/v1/conversations", json=body)
            said = answer.json()["message"]
            assert answer.status_code == 400 and said.startswith(message) and not INTERNAL.search(said), (body, said)
        for content, message in [(b"{", "it is not JSON: EOF while parsing an object, at line 1, column 1"), (b"", "it is not JSON: EOF"), (b"{'a': 1}", "it is not JSON: key must be a string")]:
            answer = await http.post("/v1/conversations", content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 400 and answer.json()["message"].startswith(message), answer.text
        answer = await http.post("/v1/conversations", content=b"{}", headers={"content-type": "text/plain"})
        assert answer.status_code == 415 and "application/json" in answer.json()["message"]
        for path, message in [
            ("/v1/inbox?limit=many", "limit: must be a whole number"),
            ("/v1/inbox?limit=", "limit: must be a whole number"),
            ("/v1/conversations/x/messages", "a part of the path is not what it must be: conversations"),
            (f"/v1/conversations/{GROUP}/messages/x/reactions", "a part of the path is not"),
        ]:
            answer = await http.get(path)
            said = answer.json()["message"]
            assert answer.status_code == 400 and said.startswith(message) and not INTERNAL.search(said), (path, said)


async def test_a_path_has_no_slash_at_the_end(start):
    gateway = start(auth__keys=KEYS)
    async with service(gateway) as http:
        assert (await http.get("/v1/inbox")).status_code == 200
        for path in ["/v1/inbox/", f"/v1/conversations/{GROUP}/", "/v1/nothing/", "/openapi.json/", "/v1/ws/"]:
            answer = await http.get(path)
            assert answer.status_code == 404 and "no path ends with /" in answer.json()["message"], (path, answer.text)
        answer = await http.get("/v1/nothing")
        assert answer.status_code == 404 and answer.json()["message"] == "no such route: see /openapi.json"


async def test_ids_are_compared_byte_by_byte(gateway, names, codec):
    [base] = names("Zoe")
    users = [unicodedata.normalize("NFC", f"é{base}"), unicodedata.normalize("NFD", f"é{base}"), f"é{base.lower()}"]
    assert len(set(users)) == 3
    clients = [await gateway.connect(user, codec) for user in users]
    for client, user in zip(clients, users):
        assert client.hello["user"] == user
    nfc, nfd, lower = clients
    dm = await nfc.create("dm", nfd.user)
    await nfc.send(dm, "to the other form")
    assert (await nfd.message(dm))["sender"] == nfc.user
    assert await lower.inbox() == [] and await nfc.create("dm", lower.user) != dm
    # A channel of one form cannot be read by the other.
    group = await lower.create("group")
    with pytest.raises(Refused) as refused:
        await nfc.history(group)
    assert refused.value.code == "not_found"
    for client in clients:
        await client.close()


@pytest.mark.embedded
def test_an_import_ignores_a_byte_order_mark(tmp_path):
    gateway = Gateway(str(tmp_path / "data"))
    file = tmp_path / "sample.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + (ROOT / "config/sample.jsonl").read_bytes())
    assert gateway.command("import", str(file)).stdout == "2 conversations and 9 messages imported, 0 messages were there already\n"
    file.write_bytes((ROOT / "config/sample.jsonl").read_bytes() + b'\xef\xbb\xbf{"type": "message"}\n')
    done = gateway.command("import", str(file), check=False)
    assert done.returncode == 1 and "it is not JSON" in done.stderr, done.stderr


@pytest.mark.embedded
def test_the_openapi_document_is_valid(gateway):
    from openapi_spec_validator import validate

    document = json.loads(httpx.get(f"http://{gateway.client}/openapi.json", timeout=PATIENCE).text)
    validate(document)
    operations = [(path, method, operation) for path, item in document["paths"].items() for method, operation in item.items()]
    doubled = [id for id, count in Counter(operation["operationId"] for _, _, operation in operations).items() if count > 1]
    assert not doubled and len(operations) > 35
    for path, method, operation in operations:
        assert operation["summary"], (path, method)
        for status, response in operation["responses"].items():
            assert response["description"], (path, method, status)
    uploads = document["paths"]["/v1/attachments/{file}/upload"]
    assert set(uploads) == {"head", "patch", "delete"} and set(document["paths"]["/v1/attachments"]) == {"post", "options"}
