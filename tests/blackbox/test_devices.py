"""Devices, `away`, and the settings of conversations."""
import asyncio
import base64
import json
import os
import time

import httpx
import jwt
import pytest

from support import PATIENCE, UNLIMITED, Client, Refused, Three, clean, eventually, uuid4

SECRET = "a secret of more than thirty-two bytes"
KEYS = json.dumps([{"algorithm": "HS256", "secret": SECRET}]).replace('":', '"=')
FAR = 4_000_000_000_000


def b64(raw):
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def subscription(name=None, **fields):
    keys = {"p256dh": b64(b"\4" + os.urandom(64)), "auth": b64(os.urandom(16))}
    return {"endpoint": f"https://push.example.com/{name or uuid4()}", "keys": keys, **fields}


def phone(token=None, **fields):
    return {"provider": "apns", "token": token or uuid4().replace("-", ""), **fields}


async def set_device(client, device, **fields):
    return await client.ask("device_set", device=device, **fields)


async def listed(client):
    return {item["device"]: (item["provider"], item["content"]) for item in (await client.ask("devices"))["items"]}


async def refused(code, asked):
    with pytest.raises(Refused) as error:
        await asked
    assert error.value.code == code, error.value
    return error.value.error["message"]


async def set_settings(client, conversation, **fields):
    return (await client.ask("settings_set", conversation=conversation, **fields))["version"]


def shown(item):
    return item.get("muted_until"), item.get("push")


# Devices.


async def test_devices_are_set_replaced_removed_and_listed(people):
    alice = await people("alice")
    assert await listed(alice) == {}
    await set_device(alice, "browser", provider="web", subscription=subscription(expirationTime=None))
    await set_device(alice, "phone", **phone(content="none"))
    assert await listed(alice) == {"browser": ("web", "full"), "phone": ("apns", "none")}
    await set_device(alice, "phone", provider="fcm", token="f:1")
    assert await listed(alice) == {"browser": ("web", "full"), "phone": ("fcm", "full")}
    reply = await alice.ask("devices")
    assert "f:1" not in json.dumps(reply) and "push.example.com" not in json.dumps(reply)
    await alice.ask("device_remove", device="browser")
    await alice.ask("device_remove", device="browser")
    await alice.ask("device_remove", device="never-there")
    assert await listed(alice) == {"phone": ("fcm", "full")}


@pytest.mark.embedded
async def test_the_eleventh_device_is_refused(people):
    alice = await people("alice")
    for number in range(10):
        await set_device(alice, f"phone-{number}", **phone())
    assert "at most 10" in await refused("too_large", set_device(alice, "phone-10", **phone()))
    await set_device(alice, "phone-3", **phone(content="none"))
    assert len(await listed(alice)) == 10
    await alice.ask("device_remove", device="phone-0")
    await set_device(alice, "phone-10", **phone())
    assert len(await listed(alice)) == 10


async def test_of_many_at_once_none_is_lost(people):
    alice = await people("alice")
    await asyncio.gather(*(set_device(alice, f"phone-{number}", **phone()) for number in range(10)))
    assert len(await listed(alice)) == 10
    results = await asyncio.gather(*(set_device(alice, f"more-{n}", **phone()) for n in range(5)), return_exceptions=True)
    assert all(isinstance(result, Refused) for result in results)


async def test_the_same_token_under_another_id_is_the_same_device(people):
    alice = await people("alice")
    token = uuid4()
    await set_device(alice, "before", **phone(token))
    await set_device(alice, "after", **phone(token))
    assert await listed(alice) == {"after": ("apns", "full")}


async def test_a_token_may_go_from_user_to_user(people):
    alice, bob = await people("alice", "bob")
    shared = subscription()
    for user in (alice, bob, alice, bob):
        await set_device(user, "browser", provider="web", subscription=shared)
    # The earlier user still has the device, but is not pushed there: see the tests of pushing.
    await alice.ask("device_remove", device="browser")
    assert await listed(alice) == {} and await listed(bob) == {"browser": ("web", "full")}


@pytest.mark.embedded
async def test_hostile_registrations_are_refused(people):
    alice = await people("alice")
    web = {"provider": "web"}
    keys = subscription()["keys"]
    for code, fields in [
        ("bad_request", {"device": "", **phone()}),
        ("bad_request", {"device": "d" * 65, **phone()}),
        ("bad_request", {"device": "a\nb", **phone()}),
        ("bad_request", {"device": 7, **phone()}),
        ("bad_request", {**phone()}),
        ("bad_request", {"device": "d", "provider": "carrier-pigeon", "token": "t"}),
        ("bad_request", {"device": "d", **phone(content="everything")}),
        ("bad_request", {"device": "d", "provider": "fcm"}),
        ("bad_request", {"device": "d", "provider": "fcm", "token": ""}),
        ("bad_request", {"device": "d", "provider": "fcm", "token": "a b"}),
        ("bad_request", {"device": "d", "provider": "fcm", "token": "t", "subscription": subscription()}),
        ("bad_request", {"device": "d", **web, "token": "t"}),
        ("bad_request", {"device": "d", **web}),
        ("too_large", {"device": "d", **phone("t" * 4097)}),
        ("too_large", {"device": "d", **phone("t" * 30_000)}),
        ("too_large", {"device": "d", **web, "subscription": subscription("a" * 5000)}),
        ("bad_request", {"device": "d", **web, "subscription": {"endpoint": "https://push.example.com/a"}}),
        ("bad_request", {"device": "d", **web, "subscription": subscription(keys={**keys, "auth": "???"})}),
        ("bad_request", {"device": "d", **web, "subscription": subscription(keys={**keys, "auth": b64(b"x" * 15)})}),
        ("bad_request", {"device": "d", **web, "subscription": subscription(keys={**keys, "p256dh": b64(b"\4" * 64)})}),
        ("bad_request", {"device": "d", **web, "subscription": subscription(keys={**keys, "p256dh": b64(b"\2" * 65)})}),
        *(
            ("bad_request", {"device": "d", **web, "subscription": subscription(endpoint=endpoint)})
            for endpoint in [
                "http://push.example.com/a",
                "https://127.0.0.1/a",
                "https://[::1]/a",
                "https://[::ffff:10.0.0.1]/a",
                "https://2130706433/a",
                "https://localhost/a",
                "https://metadata.google.internal/computeMetadata/v1/",
                "https://gateway/a",
                "https://push.example.com:9042/a",
                "https://push.example.com@10.0.0.1/a",
                "ftp://push.example.com/a",
                "file:///etc/passwd",
                "//push.example.com/a",
                "",
            ]
        ),
    ]:
        await refused(code, alice.ask("device_set", **fields))
    for id in ("", "d" * 65):
        await refused("bad_request", alice.ask("device_remove", device=id))
    assert await listed(alice) == {}
    await set_device(alice, "d" * 64, **phone("t" * 4096))
    assert await listed(alice) == {"d" * 64: ("apns", "full")}


@pytest.mark.embedded
@pytest.mark.parametrize("ending", ["stop", "kill"])
async def test_what_was_acknowledged_survives(start, codec, ending):
    gateway = start()
    alice, bob = await gateway.connect("alice", codec), await gateway.connect("bob", codec)
    dm = await alice.create("dm", "bob")
    await bob.send(dm, "hi")
    await alice.message(dm)
    await set_device(alice, "gone", **phone())
    await set_device(alice, "phone", **phone())
    await alice.ask("device_remove", device="gone")
    version = await set_settings(alice, dm, muted_until=FAR, push="off")
    getattr(gateway, ending)()
    gateway.start()
    alice = await gateway.connect("alice", codec)
    assert await listed(alice) == {"phone": ("apns", "full")}
    assert shown(await alice.inbox(dm)) == (FAR, "off")
    # The ring has another version now, so the counter begins again but versions rise.
    assert await set_settings(alice, dm, push="on") > version
    assert shown(await alice.inbox(dm)) == (FAR, "on")
    await set_device(alice, "phone", **phone(content="none"))
    assert await listed(alice) == {"phone": ("apns", "none")}


# HTTP.


def token(sub, **claims):
    return jwt.encode({"sub": sub, "exp": time.time() + 600, **claims}, SECRET, algorithm="HS256")


def http(gateway, bearer, **headers):
    headers = {"authorization": f"Bearer {bearer}", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return httpx.AsyncClient(base_url=f"http://{gateway.client}", headers=headers, timeout=PATIENCE)


@pytest.mark.embedded
async def test_users_and_back_ends_have_the_same_over_http(start):
    gateway = start(auth__keys=KEYS, client__origins='["https://app.example.org"]')
    async with http(gateway, token("alice")) as alice:
        put = await alice.put("/v1/devices/my%20phone", json=phone())
        assert (put.status_code, put.json()) == (200, {"type": "ok"}), put.text
        assert (await alice.put("/v1/devices/browser", json={"provider": "web", "subscription": subscription()})).status_code == 200
        answer = (await alice.get("/v1/devices")).json()
        assert sorted(item["device"] for item in answer["items"]) == ["browser", "my phone"]
        assert (await alice.delete("/v1/devices/browser")).status_code == 200
        for path, body, status in [
            ("d" * 65, phone(), 400),
            ("d", {"provider": "fcm"}, 400),
            ("d", {"provider": "web", "subscription": subscription(endpoint="http://push.example.com")}, 400),
            ("d", phone("t" * 5000), 413),
            ("d", phone("t" * 500_000), 413),
        ]:
            assert (await alice.put(f"/v1/devices/{path}", json=body)).status_code == status, (path, body)
        # A user's own token acts for nobody else.
        as_bob = await alice.get("/v1/devices", headers={"chat-user": "bob"})
        assert [item["device"] for item in as_bob.json()["items"]] == ["my phone"]
        asks = {"origin": "https://app.example.org", "access-control-request-method": "PUT"}
        preflight = await alice.options("/v1/devices/d", headers=asks)
        assert preflight.headers["access-control-allow-origin"] == "https://app.example.org"
        assert "PUT" in preflight.headers["access-control-allow-methods"]
        asked = await alice.get("/v1/devices", headers={"origin": asks["origin"]})
        assert "retry-after" in asked.headers["access-control-expose-headers"].split(", ")
    service = token("backend", role="service", scope="devices:read")
    async with http(gateway, service, chat_user="alice") as reader:
        assert [item["device"] for item in (await reader.get("/v1/devices")).json()["items"]] == ["my phone"]
        assert (await reader.delete("/v1/devices/my%20phone")).status_code == 403
    service = token("backend", role="service", scope="devices:write")
    async with http(gateway, service, chat_user="alice") as writer:
        assert (await writer.delete("/v1/devices/my%20phone")).status_code == 200
        assert (await writer.get("/v1/devices")).status_code == 403
    async with http(gateway, "nonsense") as stranger:
        for method in ("GET", "PUT", "DELETE"):
            path = "/v1/devices" if method == "GET" else "/v1/devices/d"
            assert (await stranger.request(method, path)).status_code == 401
    paths = httpx.get(f"http://{gateway.client}/openapi.json", timeout=PATIENCE).json()["paths"]
    assert set(paths["/v1/devices"]) == {"get"} and set(paths["/v1/devices/{device}"]) == {"put", "delete"}


# Settings.


async def test_settings_are_told_to_all_sessions_and_shown_in_the_inbox(gateway, people, codec):
    alice, bob = await people("alice", "bob")
    laptop = await gateway.connect(alice.user, codec)
    dm = await bob.create("dm", alice.user)
    await bob.send(dm, "hi")
    await alice.message(dm)
    item = await alice.inbox(dm)
    assert shown(item) == (None, None) and "settings_version" not in item
    version = await set_settings(alice, dm, muted_until=FAR)
    for session in (alice, laptop):
        event = await session.event("settings")
        assert event == {"type": "settings", "conversation": dm, "version": version, "muted_until": FAR, "push": "on"}
    for session in (laptop, alice):
        item = await session.inbox(dm)
        assert shown(item) == (FAR, "on") and item["settings_version"] == version
        assert item["unread"] == 1
    off = await set_settings(laptop, dm, push="off")
    assert off > version
    assert shown(await alice.event("settings")) == (FAR, "off")
    assert shown(await alice.inbox(dm)) == (FAR, "off")
    # Other users neither see nor hear of it.
    assert shown(await bob.inbox(dm)) == (None, None)
    assert not [e for e in await bob.quiet() if e["type"] == "settings"]
    await laptop.close()


@pytest.mark.parametrize("kind", ["group", "channel"])
async def test_settings_may_follow_a_creation_at_once(people, kind):
    alice, bob = await people("alice", "bob")
    for number in range(5):
        id = await alice.create(kind, bob.user, name=f"{kind} {number}")
        await set_settings(alice, id, push="off")
        assert shown(await alice.inbox(id)) == (None, "off")


async def test_a_time_that_has_passed_ends_the_muting(people):
    alice, bob = await people("alice", "bob")
    dm = await bob.create("dm", alice.user)
    await bob.send(dm, "hi")
    await alice.message(dm)
    for past in (0, -5, int(time.time() * 1000) - 60_000):
        await set_settings(alice, dm, muted_until=FAR)
        await set_settings(alice, dm, muted_until=past)
        events = [await alice.event("settings") for _ in range(2)]
        assert [event["muted_until"] for event in events] == [FAR, None]
        assert shown(await alice.inbox(dm)) == (None, "on")


async def test_settings_of_what_a_user_is_not_in_are_refused(people):
    alice, bob, carol = await people("alice", "bob", "carol")
    group = await bob.create("group", carol.user, name="without alice")
    await refused("not_found", alice.ask("settings_set", conversation=uuid4(), push="off"))
    await refused("not_found", alice.ask("settings_set", conversation=group, push="off"))
    await carol.ask("leave", conversation=group)
    await eventually(lambda: gone(carol, group))
    await refused("not_found", carol.ask("settings_set", conversation=group, push="off"))
    for fields in ({}, {"push": "maybe"}, {"push": True}, {"muted_until": "tomorrow"}, {"muted_until": 1 << 60}):
        await refused("bad_request", bob.ask("settings_set", conversation=group, **fields))
    assert shown(await bob.inbox(group)) == (None, None)


async def gone(client, conversation):
    return await client.inbox(conversation) is None


# Away.


async def test_away_is_acknowledged_and_not_shown_to_others(people):
    alice, bob = await people("alice", "bob")
    [item] = (await bob.ask("watch", users=[alice.user]))["items"]
    assert item["online"]
    for away in (True, True, False, True):
        await alice.ask("away", away=away)
    [item] = (await bob.ask("watch", users=[alice.user]))["items"]
    assert item["online"]
    assert not [e for e in await bob.quiet() if e["type"] == "presence"]
    for wrong in ({}, {"away": "yes"}, {"away": None}):
        await refused("bad_request", alice.ask("away", **wrong))
    # Marks of a session that is away count for others as before.
    dm = await bob.create("dm", alice.user)
    sent = await bob.send(dm, "hi")
    await alice.message(dm)
    await alice.ask("delivered", conversation=dm, seq=sent["seq"])
    assert (await bob.event("receipt"))["delivered_seq"] == sent["seq"]


# Three gateways.


@pytest.mark.cassandra
async def test_three_gateways_agree_also_after_one_is_killed(codec):
    three = Three(**UNLIMITED)
    try:
        three.start()
        await agree(three, codec)
    finally:
        three.close()
        clean(three.directory)


async def agree(three, codec):
    users = [f"user-{number}" for number in range(12)]
    at = [[await node.connect(user, codec) for node in three.nodes] for user in users]
    token, versions, dms = uuid4(), {}, {}
    for sessions in at:
        one, two, other = sessions
        # The home is any of the three, and each of them answers for it.
        await asyncio.gather(*(set_device(s, f"phone-{n}", **phone()) for n, s in enumerate(sessions)))
        await set_device(two, "shared", **phone(token))
        for session in sessions:
            assert len(await listed(session)) == 4
        dm = dms[one.user] = await one.create("dm", "friend")
        await one.send(dm, "hi")
        await other.message(dm)
        versions[one.user] = await set_settings(two, dm, muted_until=FAR)
        for session in sessions:
            assert (await session.event("settings"))["version"] == versions[one.user]
            assert shown(await session.inbox(dm)) == (FAR, "on")
    for one, two, other in at:
        await one.ask("away", away=True)
    three.nodes[2].kill()
    for one, two, _ in at:
        await acknowledged(one, "device_set", device="after", **phone())
        for session in (one, two):
            assert len(await eventually(lambda session=session: has(session, "after"))) == 5
        reply = await acknowledged(two, "settings_set", conversation=dms[one.user], push="off")
        assert reply["version"] > versions[one.user]
        event = await one.event("settings", lambda e, v=reply["version"]: e["version"] == v)
        assert shown(event) == (FAR, "off")
    third = three.nodes[2].start()
    for (one, _, _), user in zip(at, users):
        session = await third.connect(user, codec)
        await acknowledged(session, "device_remove", device="phone-0")
        assert set(await listed(one)) == {"phone-1", "phone-2", "shared", "after"}
        assert shown(await session.inbox(dms[user])) == (FAR, "off")


async def has(session, device):
    devices = await listed(session)
    return devices if device in devices else None


async def acknowledged(client: Client, type, **fields):
    """Repeats a request while its outcome is unknown."""

    async def asked():
        try:
            return await client.ask(type, **fields)
        except Refused as error:
            assert error.code == "unavailable", error
            return None

    return await eventually(asked)
