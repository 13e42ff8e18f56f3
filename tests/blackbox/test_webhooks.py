"""Webhooks: signed events of real chats, in their order, through failures of the receiver and of the gateway."""
import asyncio
import base64
import json
import os
import pathlib
import secrets
import time
import urllib.error
import urllib.request

import pytest
from aiohttp import web
from standardwebhooks import Webhook

from clock import Clock, noticed
from ports import free_port
from support import PATIENCE, STORE, Three, clean, eventually, uuid4, within

SECRET = "whsec_" + base64.b64encode(b"a secret of 32 bytes for testing").decode()


class Receiver:
    """A receiver on a port of its own. It verifies every request with the official library."""

    def __init__(self):
        self.port = free_port()
        self.requests, self.events, self.attempts = [], [], []
        self.status, self.rejects, self.runner, self.delay = 200, lambda event: None, None, 0
        self.verify = Webhook(SECRET).verify
        self.wake = asyncio.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/hooks/chat?key=hidden"

    async def start(self):
        app = web.Application(client_max_size=1 << 20)
        app.router.add_post("/hooks/chat", self.take)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True).start()
        return self

    async def stop(self):
        if self.runner:
            await self.runner.cleanup()
            self.runner = None

    async def take(self, request):
        body = await request.read()
        whole = self.verify(body, dict(request.headers))
        events = whole["data"]["events"] if whole["type"] == "batch" else [whole | {"id": request.headers["webhook-id"]}]
        self.attempts.append(events)
        if self.delay:
            await asyncio.sleep(self.delay)
        status = next(filter(None, map(self.rejects, events)), self.status)
        if status == 200:
            self.requests.append(whole | {"headers": dict(request.headers)})
            self.events.extend(events)
        self.wake.set()
        return web.Response(status=status)

    async def until(self, enough):
        """Waits until `enough(events)`."""

        async def wait():
            while not enough(self.events):
                self.wake.clear()
                await self.wake.wait()

        await within(wait(), PATIENCE)

    def of(self, conversation, kind=None):
        found = [e for e in self.events if e["data"].get("conversation") == conversation]
        return [e for e in found if kind is None or e["type"] == kind]

    def firsts(self, conversation):
        """The events of a conversation at their first arrival."""
        seen, found = set(), []
        for event in self.of(conversation):
            if event["id"] not in seen:
                seen.add(event["id"])
                found.append(event)
        return found


@pytest.fixture
async def receiver():
    receiver = await Receiver().start()
    yield receiver
    await receiver.stop()


def settings(directory, receiver, **hook):
    """Writes a configuration with a webhook, and returns its path."""
    lines = {"name": '"app"', "url": f'"{receiver.url}"', "secrets": f'["{SECRET}"]'} | hook
    text = "[consumers]\noffset_flush_s = 1\nlagging_after_s = 5\n[auth]\ndevelopment = true\n"
    text += "[[webhooks]]\n" + "".join(f"{name} = {value}\n" for name, value in lines.items())
    path = pathlib.Path(directory, "gateway.toml")
    path.write_text(text)
    return path


@pytest.fixture
def hooked(start, tmp_path, receiver):
    """Starts a gateway with a webhook."""
    return lambda **hook: start(config=settings(tmp_path, receiver, **hook))


async def test_each_event_of_a_chat_arrives_signed_and_once(hooked, receiver, codec, names):
    gateway = hooked(events='["message.created", "message.updated", "message.deleted", "message.reacted", '
                            '"conversation.created", "conversation.updated", "member.added", "member.removed", "member.left", '
                            '"member.joined", "member.role_set"]')
    alice, bob = names("alice", "bob")
    a, b = await gateway.connect(alice, codec), await gateway.connect(bob, codec)
    group = await a.create("group", bob, name="plans")
    sent = await a.send(group, "hello")
    await b.ask("react", conversation=group, seq=sent["seq"], emoji="👍", on=True)
    await a.ask("edit", conversation=group, seq=sent["seq"], body="hello!")
    await a.ask("delete", conversation=group, seqs=[sent["seq"]])
    await a.ask("update", conversation=group, name="better plans")
    await a.ask("remove", conversation=group, user=bob)
    await receiver.until(lambda _: len(receiver.of(group)) >= 7)
    events = receiver.of(group)
    assert [e["type"] for e in events if ":" not in e["id"]] == [
        "conversation.created", "message.created", "conversation.updated", "member.removed"]
    assert [e["type"] for e in events if ":" in e["id"]] == ["message.reacted", "message.updated", "message.deleted"]
    created = next(e for e in events if e["type"] == "message.created")
    assert created["id"] == sent["message_id"] and created["data"]["seq"] == sent["seq"]
    assert created["data"]["conversation_kind"] == "group" and created["data"]["sender"] == alice
    deleted = next(e for e in events if e["type"] == "message.deleted")
    assert deleted["data"]["seqs"] == [sent["seq"]] and deleted["id"] == f"{group}:{deleted['data']['rev']}"
    assert len({e["id"] for e in events}) == len(events), "nothing is repeated without a failure"
    await a.close(), await b.close()


async def test_no_text_of_a_deleted_message_is_sent_later(hooked, receiver, names):
    gateway = hooked()
    alice, bob = names("alice", "bob")
    a = await gateway.connect(alice)
    dm = await a.create("dm", bob)
    await a.send(dm, "hello")
    await receiver.until(lambda _: len(receiver.of(dm)) == 1)
    await receiver.stop()
    secret = secrets.token_hex(8)
    sent = await a.send(dm, f"my password is {secret}")
    await a.ask("edit", conversation=dm, seq=sent["seq"], body=f"it is {secret}")
    await a.ask("delete", conversation=dm, seqs=[sent["seq"]])
    await receiver.start()
    await receiver.until(lambda _: receiver.of(dm, "message.deleted"))
    assert secret not in json.dumps(receiver.attempts), "content is read when it is delivered"
    await a.close()


async def test_nothing_is_lost_while_the_receiver_is_away_and_the_gateway_is_killed(hooked, receiver, names):
    gateway = hooked()
    alice, bob = names("alice", "bob")
    a = await gateway.connect(alice)
    conversations = [await a.create("dm", bob), await a.create("group", bob), await a.create("channel", bob)]
    await receiver.stop()
    for number in range(40):
        for conversation in conversations:
            await a.send(conversation, f"message {number}")
    gateway.kill()
    gateway.start()
    a = await gateway.connect(alice)
    last = [(await a.send(conversation, "the last"))["seq"] for conversation in conversations]
    await receiver.start()
    await receiver.until(lambda _: all(len(receiver.firsts(c)) >= seq for c, seq in zip(conversations, last)))
    gateway.kill()
    gateway.start()
    a = await gateway.connect(alice)
    last = [(await a.send(conversation, "after the second kill"))["seq"] for conversation in conversations]
    await receiver.until(lambda _: all(len(receiver.firsts(c)) >= seq for c, seq in zip(conversations, last)))
    for conversation, seq in zip(conversations, last):
        assert [e["data"]["seq"] for e in receiver.firsts(conversation)] == list(range(1, seq + 1))
    assert any(r["type"] == "batch" for r in receiver.requests), "what waited came in batches"
    await a.close()


async def test_after_an_orderly_stop_nothing_is_repeated(hooked, receiver, names):
    gateway = hooked()
    alice, bob = names("alice", "bob")
    a = await gateway.connect(alice)
    dm = await a.create("dm", bob)
    for number in range(10):
        last = await a.send(dm, f"message {number}")
    await receiver.until(lambda _: len(receiver.of(dm)) == last["seq"])
    assert await asyncio.to_thread(gateway.stop) == 0
    gateway.start()
    a = await gateway.connect(alice)
    last = await a.send(dm, "after the restart")
    await receiver.until(lambda _: receiver.events[-1]["data"]["seq"] == last["seq"])
    assert [e["data"]["seq"] for e in receiver.of(dm)] == list(range(1, last["seq"] + 1))
    await a.close()


async def test_what_lags_is_found_again_without_a_new_message(hooked, receiver, names):
    """The conversation is closed with its lagging row, and nobody opens it but the scan."""
    gateway = hooked()
    alice, bob = names("alice", "bob")
    a = await gateway.connect(alice)
    dm = await a.create("dm", bob)
    await a.send(dm, "hello")
    await receiver.until(lambda _: len(receiver.of(dm)) == 1)
    await receiver.stop()
    last = await a.send(dm, "while the receiver is away")
    await a.close()
    assert await asyncio.to_thread(gateway.stop) == 0
    await receiver.start()
    gateway.start()
    await receiver.until(lambda _: len(receiver.firsts(dm)) == last["seq"])


async def test_a_quiet_gateway_finds_what_it_closed_while_the_receiver_was_away(start, receiver, tmp_path, names):
    """Nobody writes, and all conversations are closed: only the scan can find what was not delivered."""
    gateway = start(config=settings(tmp_path, receiver), conversation__idle_s=1)
    alice, bob = names("alice", "bob")
    a = await gateway.connect(alice)
    groups = [await a.create("group", bob) for _ in range(5)]
    await receiver.stop()
    last = {group: (await a.send(group, "while the receiver is away"))["seq"] for group in groups}
    await a.close()

    async def are_closed():
        return gateway.metrics()["chat_conversations_open"] == 0

    assert await eventually(are_closed)
    await receiver.start()
    await receiver.until(lambda _: all(len(receiver.firsts(group)) == last[group] for group in groups))


async def test_a_webhook_begins_with_what_happens_after_it_was_added(start, receiver, tmp_path, names):
    alice, bob = names("alice", "bob")
    gateway = start(data=str(tmp_path / "data"))
    a = await gateway.connect(alice)
    dm = await a.create("dm", bob)
    before = await a.send(dm, "before the webhook")
    assert await asyncio.to_thread(gateway.stop) == 0
    gateway = start(data=str(tmp_path / "data"), config=settings(tmp_path, receiver))
    a = await gateway.connect(alice)
    after = await a.send(dm, "with the webhook")
    await receiver.until(lambda _: receiver.of(dm))
    assert [e["data"]["seq"] for e in receiver.of(dm)] == [after["seq"]] == [before["seq"] + 1]
    await a.close()


@pytest.mark.embedded
async def test_a_bad_event_holds_up_its_own_conversation_only(hooked, receiver, names):
    gateway = hooked(batch="10")
    alice, bob = names("alice", "bob")
    a = await gateway.connect(alice)
    bad, good = await a.create("group", bob), await a.create("group", bob)
    receiver.rejects = lambda e: 400 if e["data"].get("body") == "poison" else None
    await a.send(bad, "poison")
    for number in range(30):
        last = await a.send(good, f"message {number}")
        behind = await a.send(bad, f"behind {number}")
    await receiver.until(lambda _: len(receiver.of(good)) == last["seq"])
    assert [e["data"]["seq"] for e in receiver.of(bad)] == [1]
    receiver.rejects = lambda e: None
    await receiver.until(lambda _: len(receiver.firsts(bad)) == behind["seq"])
    assert [e["data"]["seq"] for e in receiver.firsts(bad)] == list(range(1, behind["seq"] + 1))
    await a.close()


PAUSES_S = [5, 5 * 60, 30 * 60, *(hours * 3_600 for hours in (2, 5, 10, 14, 20, 24))]  # between ten attempts
DAY_S = 86_400


@pytest.mark.embedded
async def test_an_event_that_fails_ten_times_is_skipped_and_listed(start, receiver, tmp_path, names):
    clock = Clock(tmp_path)
    receiver.verify = lambda body, headers: json.loads(body)  # The library refuses times that are not now.
    receiver.rejects = lambda e: 422 if e["data"].get("body") == "poison" else None
    # The conversation stays open: else the attempts would begin again.
    gateway = start(config=settings(tmp_path, receiver, batch="1"), prefix=clock.prefix, conversation__idle_s=30 * DAY_S)
    alice, bob = names("alice", "bob")
    a = await gateway.connect(alice)
    bad, good = await a.create("group", bob), await a.create("group", bob)
    poison = await a.send(bad, "poison")
    behind = [await a.send(bad, f"behind {number}") for number in range(2)]
    await a.close()

    def attempts():
        return len([events for events in receiver.attempts if events[0]["id"] == poison["message_id"]])

    def skipped():
        return service(gateway, "/v1/consumers/app/skipped", "consumers:read", ttl="2000h")

    async def others_are_accepted():
        client = await gateway.connect(alice)  # The token of before may have expired.
        sent = await client.send(good, "fine")
        await receiver.until(lambda events: events and events[-1]["id"] == sent["message_id"])
        await client.close()

    for number, pause in enumerate(PAUSES_S, start=1):
        await noticed(gateway, lambda: attempts() >= number)
        await others_are_accepted()
        assert attempts() == number and [e["data"]["seq"] for e in receiver.of(bad)] == [1]
        clock.forward(pause)
    # The tenth: the events behind it go on.
    await noticed(gateway, lambda: len(receiver.of(bad)) == 3)
    assert [e["id"] for e in receiver.of(bad)][1:] == [sent["message_id"] for sent in behind] and attempts() == 10
    status, listed = await asyncio.to_thread(skipped)
    today = int((time.time() + clock.ahead) // DAY_S)
    [item] = listed["items"]
    assert (status, item | {"day": None}) == (200, {"conversation": bad, "seq": poison["seq"], "status": 422, "day": None})
    assert today - 1 <= item["day"] <= today
    assert gateway.metrics()['chat_consumer_events_total{consumer="webhook:app",result="skipped"}'] == 1
    # It is listed for 30 days, also after a restart.
    for days, count in ((29, 1), (3, 0)):
        assert gateway.stop() == 0
        clock.forward(days * DAY_S)
        gateway.start()
        assert len((await asyncio.to_thread(skipped))[1]["items"]) == count


@pytest.mark.embedded
@pytest.mark.parametrize("status", [429, 503])
async def test_a_failing_receiver_is_asked_again(hooked, receiver, names, status):
    gateway = hooked()
    alice, bob = names("alice", "bob")
    a = await gateway.connect(alice)
    receiver.status = status
    dm = await a.create("dm", bob)
    await a.send(dm, "hello")
    await eventually(lambda: asyncio.sleep(0, len(receiver.attempts) >= 2))
    receiver.status = 200
    last = await a.send(dm, "again")
    await receiver.until(lambda _: len(receiver.firsts(dm)) == last["seq"])
    await a.close()


@pytest.mark.embedded
async def test_only_listed_events_and_kinds_are_sent(hooked, receiver, names):
    gateway = hooked(events='["message.created"]', kinds='["channel"]')
    alice, bob = names("alice", "bob")
    a = await gateway.connect(alice)
    dm, channel = await a.create("dm", bob), await a.create("channel", bob)
    await a.send(dm, "private")
    await a.send(channel, "public")
    await receiver.until(lambda _: receiver.of(channel))
    assert not receiver.of(dm) and [e["type"] for e in receiver.of(channel)] == ["message.created"]
    await a.close()


def service(gateway, path, scope, method="GET", body=None, ttl="1h"):
    token = gateway.token("operator", "--role", "service", "--scope", scope, "--ttl", ttl)
    request = urllib.request.Request(f"http://{gateway.client}{path}", method=method,
        headers={"authorization": f"Bearer {token}", "content-type": "application/json"},
        data=json.dumps(body).encode() if body else b"" if method == "POST" else None)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if text else None
    except urllib.error.HTTPError as refused:
        return refused.code, json.loads(refused.read())


async def is_owed(gateway):
    """Waits until the gateway has owed the webhook an event for seconds. Without a reason, it sends them at once."""

    async def waits():
        metrics = gateway.metrics()
        return metrics['chat_consumer_lagging{consumer="webhook:app"}'] > 0 and metrics['chat_consumer_oldest_seconds{consumer="webhook:app"}'] > 2

    assert await eventually(waits)


async def test_operators_see_test_disable_and_enable_a_webhook(hooked, receiver, names):
    gateway = hooked()
    ask = lambda *a: asyncio.to_thread(service, gateway, *a)
    status, listed = await ask("/v1/consumers", "consumers:read")
    assert status == 200 and [(c["name"], c["enabled"], c["paused"]) for c in listed["items"]] == [("app", True, False)]
    assert (await ask("/v1/consumers", "messages:read"))[0] == 403
    assert await ask("/v1/consumers/app/test", "consumers:write", "POST") == (200, {"accepted": True})
    assert receiver.events[-1]["type"] == "webhook.test"
    assert (await ask("/v1/consumers/none/test", "consumers:write", "POST"))[0] == 404
    assert (await ask("/v1/consumers/app/disable", "consumers:write", "POST"))[0] == 204

    async def is_enabled(wanted):
        return (await ask("/v1/consumers", "consumers:read"))[1]["items"][0]["enabled"] == wanted

    assert await eventually(lambda: is_enabled(False))
    await asyncio.sleep(6)  # All gateways have read the state by then.
    alice, bob = names("alice", "bob")
    a = await gateway.connect(alice)
    dm = await a.create("dm", bob)
    last = await a.send(dm, "while it is disabled")
    attempts = len(receiver.attempts)
    await is_owed(gateway)
    assert not receiver.of(dm) and len(receiver.attempts) == attempts
    assert (await ask("/v1/consumers/app/enable", "consumers:write", "POST"))[0] == 204
    await receiver.until(lambda _: len(receiver.firsts(dm)) == last["seq"])
    assert await ask("/v1/consumers/app/skipped", "consumers:read") == (200, {"items": []})
    await a.close()


async def test_a_replay_sends_entries_again_as_they_are_now(start, tmp_path, receiver, names):
    gateway = start(config=settings(tmp_path, receiver, events='["message.created", "message.deleted"]'))
    alice, bob = names("alice", "bob")
    a = await gateway.connect(alice)
    group, dm = await a.create("group", bob), await a.create("dm", bob)
    sent = [await a.send(group, f"message {number}") for number in range(300)]
    other = await a.send(dm, "elsewhere")
    await a.ask("edit", conversation=group, seq=sent[7]["seq"], body="edited")
    await a.ask("delete", conversation=group, seqs=[sent[9]["seq"]])
    await receiver.until(lambda _: receiver.of(group, "message.deleted") and len(receiver.of(group)) >= 301 and receiver.of(dm))
    receiver.events.clear()

    async def replay(*conversations, expect=202):
        body = {"conversations": [{"conversation": c, "seq": seq} for c, seq in conversations]}
        status, answer = await asyncio.to_thread(service, gateway, "/v1/consumers/app/replay", "consumers:write", "POST", body)
        assert status == expect, answer
        return answer

    await replay((uuid4(), 1), expect=404)
    await replay(expect=400)
    await replay(*[(group, 1)] * 1001, expect=400)
    answer = await replay((group, sent[5]["seq"]), (dm, other["seq"] + 1))
    assert answer["conversations"] == 1, "the other one has nothing from there on"
    # It goes on where it was after a crash, and new events do not wait for it.
    gateway.kill()
    gateway.start()
    a = await gateway.connect(alice)
    new = await a.send(group, "new")
    await receiver.until(lambda events: {e["data"].get("seq") for e in events if e["data"].get("replayed")} >= {s["seq"] for s in sent[5:]})
    again = list({e["id"]: e for e in reversed(receiver.of(group)) if e["data"].get("replayed")}.values())[::-1]
    assert [e["id"] for e in again] == [s["message_id"] for s in sent[5:]]
    assert {e["type"] for e in again} == {"message.created"}
    assert again[2]["data"]["body"] == "edited" and again[4]["data"]["body"] == "" and again[4]["data"]["deleted"]["by"] == alice
    await receiver.until(lambda events: any(e["id"] == new["message_id"] for e in events))

    async def has_ended():
        return not (await asyncio.to_thread(service, gateway, "/v1/consumers", "consumers:read"))[1]["items"][0].get("replays")

    await eventually(has_ended)
    await a.close()


async def test_a_receiver_that_is_gone_gets_no_more_until_it_is_enabled(hooked, receiver, names):
    gateway = hooked()
    receiver.status = 410
    alice, bob = names("alice", "bob")
    a = await gateway.connect(alice)
    dm = await a.create("dm", bob)
    await a.send(dm, "hello")
    ask = lambda *a: asyncio.to_thread(service, gateway, *a)

    async def is_disabled():
        item = (await ask("/v1/consumers", "consumers:read"))[1]["items"][0]
        return not item["enabled"] and "410" in item["reason"]

    assert await eventually(is_disabled)
    attempts = len(receiver.attempts)
    last = await a.send(dm, "nobody asks for it")
    receiver.status = 200
    gateway.kill()
    gateway.start()
    a = await gateway.connect(alice)
    last = await a.send(dm, "nor for this")
    await is_owed(gateway)
    assert len(receiver.attempts) == attempts and not receiver.events
    assert (await ask("/v1/consumers/app/enable", "consumers:write", "POST"))[0] == 204
    await receiver.until(lambda _: len(receiver.firsts(dm)) == last["seq"])
    await a.close()


@pytest.mark.embedded
async def test_metrics_tell_what_was_delivered(hooked, receiver, names):
    gateway = hooked()
    alice, bob = names("alice", "bob")
    a = await gateway.connect(alice)
    group = await a.create("group", bob)
    await a.send(group, "hello")

    async def counted():
        return gateway.metrics().get('chat_consumer_events_total{consumer="webhook:app",result="delivered"}') == 2

    assert await eventually(counted)
    assert "hidden" not in open(gateway.log_path).read(), "the address may contain a secret"
    await a.close()


@pytest.mark.cassandra
async def test_three_gateways_share_a_webhook_and_lose_nothing_when_killed(receiver, tmp_path, names):
    cluster = Three(config=settings(tmp_path, receiver, kinds='["group"]'))
    await asyncio.to_thread(cluster.start)
    try:
        alice, bob = names("alice", "bob")
        a = await cluster.nodes[0].connect(alice)
        groups = [await a.create("group", bob) for _ in range(12)]
        for number in range(5):
            for group in groups:
                await a.send(group, f"message {number}")
        await receiver.stop()
        for group in groups:
            await a.send(group, "while the receiver is away")
        cluster.nodes[2].kill()
        await asyncio.to_thread(cluster.nodes[2].start)
        # A conversation that did not close in time is finished by its next owner, so the exit code does not matter here.
        await asyncio.to_thread(cluster.nodes[1].stop)
        await receiver.start()
        last = {}
        for group in groups:
            client_id = uuid4()

            async def sent():
                return await a.send(group, "the last", client_id, retry=True)

            last[group] = (await eventually(sent))["seq"]
        await receiver.until(lambda _: all(len(receiver.firsts(g)) == last[g] for g in groups))
        for group in groups:
            assert [e["data"]["seq"] for e in receiver.firsts(group)] == list(range(1, last[group] + 1))
        await a.close()
    finally:
        cluster.close()
        clean(cluster.directory)
