"""Pushing: who is notified of which message, through the push services of `push_fakes.py`."""
import asyncio
import json
import os
import tempfile

import pytest

from clock import Clock, noticed
from push_fakes import APNS, FCM, WEB, PushFakes
from support import PATIENCE, STORE, UNLIMITED, Gateway, Refused, Three, clean, eventually, uuid4

FAMILY = "👨\u200d👩\u200d👧\u200d👦"


def settings(fakes):
    lists = {"push.allow", "push.web.hosts"}
    values = {name: json.dumps(value) if name in lists else value for name, value in fakes.settings().items()}
    return {name.replace(".", "__"): value for name, value in values.items()} | {"push__grace_s": "1"}


class Pushing:
    """Gateways that push to fakes."""

    def __init__(self):
        self.fakes = PushFakes(tempfile.mkdtemp(prefix="chat-push-")).start()
        os.environ["SSL_CERT_FILE"] = str(self.fakes.root / "tls.pem")
        kind = Three if STORE == "cassandra" else Gateway
        self.gateway = kind(**UNLIMITED, **settings(self.fakes)).start()
        del os.environ["SSL_CERT_FILE"]

    def close(self):
        self.gateway.close()
        self.fakes.stop()
        clean(self.gateway.directory)

    def phone(self):
        """A token of a new phone."""
        token = (uuid4() + uuid4()).replace("-", "")
        self.fakes.devices.add(token)
        return token

    def at(self, token):
        """What a phone or browser got, the oldest first. It may be pushed twice, so repeats are left out."""
        notes = self.fakes.received[FCM] + self.fakes.received[APNS] + self.fakes.received[WEB]
        got = []
        for note in notes:
            if not note.get("ok"):
                continue
            message = note.get("message")
            if message and message["token"] == token:
                got.append(json.loads(message["data"]["chat"]))
            elif note["path"].endswith(f"/{token}"):
                payload = note["payload"]
                got.append(payload.get("chat", payload))
        assert all(got.count(note) <= 2 for note in got), got
        return [note for number, note in enumerate(got) if note not in got[:number]]

    async def gets(self, token, **fields):
        """Waits until a phone got a notification with these fields."""
        async def fits():
            return next((note for note in self.at(token) if fields.items() <= note.items()), None)

        return await eventually(fits)


@pytest.fixture(scope="module")
def pushing():
    pushing = Pushing()
    yield pushing
    pushing.close()


@pytest.fixture
def gateway(pushing):
    return pushing.gateway


@pytest.fixture
def codec():
    return "json"


async def registered(pushing, client, device="phone", **fields):
    token = pushing.phone()
    await client.ask("device_set", device=device, provider="fcm", token=token, **fields)
    return token


async def group(people, *who):
    """Connected users in a group with the first."""
    clients = await people(*who)
    conversation = await clients[0].create("group", *(client.user for client in clients[1:]), name="Lunch")
    return *clients, conversation


async def test_whoever_is_not_there_is_notified_on_all_devices(pushing, people):
    alice, bob, conversation = await group(people, "alice", "bob")
    browser = bob.user
    subscription = pushing.fakes.subscribe(browser)
    await bob.ask("device_set", device="browser", provider="web", subscription=subscription)
    android, apple = await registered(pushing, bob), pushing.phone()
    # Digits in capitals are the same token.
    await bob.ask("device_set", device="apple", provider="apns", token=apple.upper())
    assert (await bob.ask("devices"))["web_key"]
    await bob.close()
    sent = await alice.send(conversation, "See you")
    expected = {"conversation": conversation, "kind": "group", "name": "Lunch", "seq": sent["seq"], "sender": alice.user, "body": "See you", "badge": 1}
    for device in (browser, android, apple):
        note = await pushing.gets(device, seq=sent["seq"])
        assert {**note, "message_id": None} == {**expected, "message_id": None}
    dm = await alice.create("dm", bob.user)
    sent = await alice.send(dm, "x" * 300)
    note = await pushing.gets(android, conversation=dm)
    assert note["body"] == "x" * 99 + "…" and "name" not in note and note["badge"] == 2
    # A long character is left out as a whole. What is not cut has no dots.
    for body, shown in (("y" * 97 + FAMILY + " and more", "y" * 97 + "…"), ("z" * 97, "z" * 97)):
        sent = await alice.send(dm, body)
        assert (await pushing.gets(android, conversation=dm, seq=sent["seq"]))["body"] == shown


async def test_nobody_is_notified_who_looks_or_has_read(pushing, people):
    alice, bob, carol, dave, conversation = await group(people, "alice", "bob", "carol", "dave")
    phones = [await registered(pushing, who) for who in (alice, bob, carol, dave)]
    # Carol's page is hidden. Dave has two, of which he sees one.
    await carol.ask("away", away=True)
    hidden = await pushing.gateway.connect(dave.user)
    await hidden.ask("away", away=True)
    sent = await alice.send(conversation, "hello")
    # The hidden page says it first.
    await hidden.ask("delivered", conversation=conversation, seq=sent["seq"])
    for client in (bob, dave):
        await client.ask("delivered", conversation=conversation, seq=sent["seq"])
    # What a hidden page gets, nobody has seen.
    await carol.ask("delivered", conversation=conversation, seq=sent["seq"])
    await pushing.gets(phones[2], seq=sent["seq"])
    # Carol reads in time, and dave is gone.
    await carol.ask("away", away=False)
    await dave.close()
    await hidden.close()
    sent = await alice.send(conversation, "again")
    await carol.ask("read", conversation=conversation, seq=sent["seq"])
    await bob.ask("delivered", conversation=conversation, seq=sent["seq"])
    note = await pushing.gets(phones[3], body="again")
    assert note["badge"] == 2
    assert pushing.at(phones[0]) == pushing.at(phones[1]) == []
    assert [note["body"] for note in pushing.at(phones[2]) if "body" in note] == ["hello"]
    await hidden.close()


async def test_what_is_muted_turned_off_or_deleted_is_not_pushed(pushing, people):
    alice, bob, muted = await group(people, "alice", "bob")
    off, loud = [await alice.create("group", bob.user, name=name) for name in ("off", "loud")]
    phone = await registered(pushing, bob)
    await bob.ask("settings_set", conversation=muted, muted_until=4_000_000_000_000)
    await bob.ask("settings_set", conversation=off, push="off")
    for conversation in (muted, off):
        await alice.send(conversation, "not pushed")
    gone = await alice.send(loud, "deleted in time")
    edited = await alice.send(loud, "before")
    await alice.ask("delete", conversation=loud, seqs=[gone["seq"]])
    await alice.ask("edit", conversation=loud, seq=edited["seq"], body="after")
    await bob.close()
    note = await pushing.gets(phone, conversation=loud)
    # The muted conversation does not count, the one without pushes does.
    assert (note["body"], note["badge"]) == ("after", 2)
    assert {note["conversation"] for note in pushing.at(phone)} == {loud}


async def test_a_device_without_content_learns_ids_only(pushing, people):
    alice, bob, conversation = await group(people, "alice", "bob")
    phone = await registered(pushing, bob, content="none")
    await bob.close()
    sent = await alice.send(conversation, "a secret")
    note = await pushing.gets(phone, seq=sent["seq"])
    assert set(note) == {"conversation", "seq", "message_id", "badge"}
    assert "a secret" not in json.dumps([note for note in pushing.fakes.received[FCM] if note.get("message", {}).get("token") == phone])


async def test_a_shared_phone_gets_only_what_its_last_user_gets(pushing, people):
    alice, bob, carol, conversation = await group(people, "alice", "bob", "carol")
    shared = await registered(pushing, bob)
    own = await registered(pushing, bob, device="own")
    await carol.ask("device_set", device="phone", provider="fcm", token=shared)
    await bob.close()
    sent = await alice.send(conversation, "for bob only")
    await carol.ask("read", conversation=conversation, seq=sent["seq"])
    await pushing.gets(own, seq=sent["seq"])
    await carol.close()
    sent = await alice.send(conversation, "for both")
    await pushing.gets(shared, seq=sent["seq"])
    assert [note["body"] for note in pushing.at(shared) if "body" in note] == ["for both"]
    # Bob's list no longer has it.
    bob = await pushing.gateway.connect(bob.user)
    assert [item["device"] for item in (await bob.ask("devices"))["items"]] == ["own"]
    await bob.close()


async def test_reading_elsewhere_clears_the_notification(pushing, people):
    alice, bob, conversation = await group(people, "alice", "bob")
    phone = await registered(pushing, bob)
    await bob.close()
    sent = await alice.send(conversation, "hello")
    assert (await pushing.gets(phone, seq=sent["seq"]))["badge"] == 1
    elsewhere = await pushing.gateway.connect(bob.user)
    await elsewhere.ask("read", conversation=conversation, seq=sent["seq"])
    await pushing.gets(phone, conversation=conversation, badge=0, clear=True)
    await elsewhere.close()


async def test_a_device_that_is_gone_is_removed_and_others_are_tried_again(pushing, people):
    alice, bob, conversation = await group(people, "alice", "bob")
    gone, phone = await registered(pushing, bob, device="gone"), await registered(pushing, bob)
    pushing.fakes.devices.remove(gone)
    await bob.close()
    for status in (503, 429):
        pushing.fakes.answer(FCM, status, {}, retry_after="1")
    sent = await alice.send(conversation, "hello")
    await pushing.gets(phone, seq=sent["seq"])
    bob = await pushing.gateway.connect(bob.user)

    async def is_removed():
        return [item["device"] for item in (await bob.ask("devices"))["items"]] == ["phone"]

    await eventually(is_removed)
    await bob.close()


async def test_messages_in_a_row_do_not_postpone_a_notification(pushing, people):
    alice, bob, conversation = await group(people, "alice", "bob")
    phone = await registered(pushing, bob)
    # While Bob is there, they wait; so the first notification is about several of them, however slow all this is.
    sent = [(await alice.send(conversation, "one"))["seq"] for _ in range(10)]
    await bob.close()
    async with asyncio.timeout(PATIENCE):
        while not pushing.at(phone):
            sent.append((await alice.send(conversation, "and again"))["seq"])
            await asyncio.sleep(0.1)
    await pushing.gets(phone, seq=sent[-1], badge=len(sent))
    first, *later = pushing.at(phone)
    assert first["badge"] >= 10 and len(later) <= len(sent) - 10, "the messages from when Bob was there are one notification"


async def test_a_newer_message_reaches_a_device_that_has_the_older_one(pushing, people):
    alice, bob, conversation = await group(people, "alice", "bob")
    phone, tablet = await registered(pushing, bob), pushing.phone()
    await bob.ask("device_set", device="tablet", provider="apns", token=tablet)
    await bob.close()
    pushing.fakes.answer(APNS, 503, retry_after="1")
    first = await alice.send(conversation, "first")
    await pushing.gets(phone, seq=first["seq"])
    second = await alice.send(conversation, "second")
    for device in (phone, tablet):
        await pushing.gets(device, seq=second["seq"])


async def test_whoever_answers_has_read(pushing, people):
    alice, bob, conversation = await group(people, "alice", "bob")
    phone = await registered(pushing, bob)
    await bob.ask("away", away=True)
    sent = await alice.send(conversation, "hello")
    await pushing.gets(phone, seq=sent["seq"])
    await bob.send(conversation, "hi")
    await pushing.gets(phone, conversation=conversation, badge=0, clear=True)


async def test_an_address_of_nobody_is_refused(pushing, people):
    alice = await people("alice")
    endpoint = pushing.fakes.subscribe(alice.user)
    for fields in [
        {"provider": "web", "subscription": endpoint | {"endpoint": "https://localhost:1/web/x"}},
        {"provider": "web", "subscription": endpoint | {"endpoint": "https://127.0.0.1/web/x"}},
        {"provider": "web", "subscription": endpoint | {"endpoint": "https://push.example.com/web/x"}},
        {"provider": "apns", "token": "not hexadecimal"},
        {"provider": "fcm", "token": "a b"},
    ]:
        with pytest.raises(Refused) as refused:
            await alice.ask("device_set", device="d", **fields)
        assert refused.value.code == "bad_request", fields


@pytest.mark.embedded
async def test_a_crash_loses_no_notification(start, tmp_path, monkeypatch):
    fakes = PushFakes(tmp_path).start()
    monkeypatch.setenv("SSL_CERT_FILE", str(fakes.root / "tls.pem"))
    gateway = start(**UNLIMITED, **settings(fakes))
    alice, bob = [await gateway.connect(user) for user in ("alice", "bob")]
    conversation = await alice.create("group", "bob")
    token = "a" * 64
    await bob.ask("device_set", device="phone", provider="apns", token=token)
    await bob.close()
    # The phone is known at the service only after the crash.
    for _ in range(20):
        fakes.answer(APNS, 503)
    sent = await alice.send(conversation, "hello")

    async def is_refused():
        return fakes.received[APNS]

    async def arrived():
        return next((note for note in fakes.received[APNS] if note.get("ok")), None)

    await eventually(is_refused)
    gateway.kill()
    fakes.answers[APNS].clear()
    fakes.devices.add(token)
    gateway = start(gateway.directory, **UNLIMITED, **settings(fakes))
    note = await eventually(arrived)
    assert note["payload"]["chat"]["seq"] == sent["seq"] and note["payload"]["chat"]["body"] == "hello"
    gateway.close()
    fakes.stop()


@pytest.mark.embedded
async def test_a_message_older_than_the_ttl_is_not_pushed(start, tmp_path, monkeypatch):
    fakes, clock = PushFakes(tmp_path).start(), Clock(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(fakes.root / "tls.pem"))
    # For five minutes it is not decided who is notified.
    gateway = start(prefix=clock.prefix, **UNLIMITED, **settings(fakes) | {"push__grace_s": "300", "push__ttl_s": "60"})
    alice, bob = [await gateway.connect(user) for user in ("alice", "bob")]
    groups = [await alice.create("group", "bob") for _ in range(3)]
    await bob.ask("device_set", device="browser", provider="web", subscription=fakes.subscribe("bob"))
    await bob.close()

    def notes():
        return [(note["payload"]["conversation"], int(note["headers"]["ttl"])) for note in fakes.received[WEB] if note.get("ok")]

    await alice.send(groups[0], "old")
    clock.forward(280)
    await alice.send(groups[1], "in time")
    clock.forward(20)
    [(conversation, ttl)] = await noticed(gateway, notes)
    assert conversation == groups[1] and 0 < ttl <= 40, "the push service keeps it for the rest of the time"
    clock.forward(3)  # the shortest time between two rounds of notifications
    await alice.send(groups[2], "new")
    await noticed(gateway, lambda: len(notes()) > 1)
    assert [conversation for conversation, _ in notes()] == groups[1:]
    await alice.close()
    fakes.stop()
