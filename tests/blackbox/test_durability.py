"""Acknowledged messages survive restarts, kill -9, a full disk, and imports."""
import asyncio
import json
import random
import shutil
import subprocess
import time

import pytest
import websockets

from support import PATIENCE, ROOT, STORE, UNLIMITED, Gateway, Refused, uuid4
from test_messages import refused


async def test_a_restart_loses_nothing(start, codec):
    gateway = start(**UNLIMITED)
    alice, bob = await gateway.connect("alice", codec), await gateway.connect("bob", codec)
    dm = await alice.create("dm", "bob")
    group = await alice.create("group", "bob", "carol", name="G")
    channel = await alice.create("channel", "bob", name="C", public=True)
    ids = [uuid4() for _ in range(200)]
    for reply in [await alice.begin("send", conversation=dm, client_id=i, body="x") for i in ids]:
        await reply
    await alice.send(group, "in the group")
    await alice.send(channel, "in the channel")
    await alice.ask("remove", conversation=group, user="carol")
    await bob.ask("read", conversation=dm, seq=150)
    await bob.close()
    dave = await gateway.connect("dave", codec)
    await dave.close()
    before = await alice.inbox()
    assert gateway.stop() == 0
    gateway = start(gateway.directory, **UNLIMITED)
    alice, bob = await gateway.connect("alice", codec), await gateway.connect("bob", codec)
    assert await alice.inbox() == before
    assert {c["name"]: c["unread"] for c in await bob.inbox()} == {"alice": 50, "G": 1, "C": 1}, "a removal counts as unread"
    again = await alice.send(dm, "x", ids[0], retry=True)
    assert (again["seq"], again["duplicate"]) == (1, True), "the duplicate was not found in the store"
    again = await alice.send(dm, "x", ids[-1])
    assert (again["seq"], again["duplicate"]) == (200, True), "the duplicate was not found in memory"
    assert (await alice.send(dm, "next"))["seq"] == 201
    carol = await gateway.connect("carol", codec)
    await refused(carol.history(group), "forbidden")
    await refused(alice.create("channel", conversation=group), "conflict")
    [item, other] = (await alice.ask("watch", users=["carol", "dave"]))["items"]
    assert item["online"] is True
    assert other["online"] is False and other["last_seen"] >= dave.hello["time"]
    for client in (alice, bob, carol):
        await client.close()


class Writer:
    """Sends to one conversation. After a kill it repeats the messages that were not answered."""

    def __init__(self, user, conversation):
        self.user, self.conversation, self.acknowledged, self.unknown = user, conversation, {}, []

    async def run(self, gateway):
        try:
            client = await gateway.connect(self.user)
            again, self.unknown = self.unknown, []
            window = [(id, await client.begin("send", conversation=self.conversation, client_id=id, body=id, retry=True)) for id in again]
            while True:
                while len(window) < 20:
                    id = uuid4()
                    window.append((id, await client.begin("send", conversation=self.conversation, client_id=id, body=id)))
                id, reply = window[0]
                answer = await reply
                window.pop(0)
                if answer["type"] == "sent":
                    assert self.acknowledged.setdefault(id, answer["seq"]) == answer["seq"]
                else:
                    assert answer["code"] == "unavailable", answer
                    self.unknown.append(id)
        except (ConnectionError, OSError, websockets.WebSocketException):
            pass
        finally:
            self.unknown += [id for id, _ in locals().get("window", [])]
            for id in locals().get("again", []):
                if id not in self.acknowledged and id not in self.unknown:
                    self.unknown.append(id)


async def test_repeated_kills_under_load_lose_and_duplicate_nothing(start):
    gateway = start(**UNLIMITED)
    alice, bob, carol = [await gateway.connect(u) for u in ("alice", "bob", "carol")]
    conversations = [await alice.create("dm", "bob"), await alice.create("group", "bob", "carol"),
                     await bob.create("channel", "alice", "carol")]
    writers = [Writer(u, c) for c in conversations for u in ("alice", "bob")]
    reads = {}
    # Over Cassandra each start waits until the lease of the killed process has ended.
    for round in range(20 if STORE == "embedded" else 5):
        running = [asyncio.create_task(w.run(gateway)) for w in writers]
        reader = await gateway.connect("carol" if round % 2 else "bob")
        target = sum(len(w.acknowledged) for w in writers) + random.randint(20, 400)
        while sum(len(w.acknowledged) for w in writers) < target:
            conversation = random.choice(conversations[1:])
            head = (await reader.history(conversation, limit=1))["head"]
            seq = random.randint(1, head)
            await reader.ask("read", conversation=conversation, seq=seq)
            key = (reader.user, conversation)
            reads[key] = max(reads.get(key, 0), seq)
        gateway.kill()
        await asyncio.gather(*running)
        gateway = start(gateway.directory, **UNLIMITED)
    alice, bob, carol = [await gateway.connect(u) for u in ("alice", "bob", "carol")]
    total = 0
    for conversation in conversations:
        log = await alice.everything(conversation)
        assert [m["seq"] for m in log] == list(range(1, len(log) + 1)), "the log has gaps"
        ids = [m["client_id"] for m in log]
        assert len(set(ids)) == len(ids), "a message is in the log twice"
        places = {m["client_id"]: m["seq"] for m in log}
        for writer in writers:
            if writer.conversation == conversation:
                total += len(writer.acknowledged)
                for id, seq in writer.acknowledged.items():
                    assert places.get(id) == seq, "an acknowledged message is not at its seq"
        for client in (alice, bob, carol):
            item = await client.inbox(conversation)
            if item is None:
                assert client is carol and conversation == conversations[0]
                continue
            mine = [m["seq"] for m in log if m["sender"] == client.user]
            read = max([item["joined_seq"], reads.get((client.user, conversation), 0), *mine])
            assert item["last_seq"] == len(log)
            assert item["last_message"]["message_id"] == log[-1]["message_id"]
            assert (item["read_seq"], item["unread"]) == (read, len(log) - read), "unread is wrong"
    assert total > 100
    for client in (alice, bob, carol):
        await client.close()


@pytest.mark.embedded
async def test_a_full_disk_refuses_writes_and_keeps_acknowledged_messages(start, tmp_path):
    """Fills a small file system that holds only the store's directory."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], check=True)
    try:
        data = disk / "data"
        gateway = Gateway(str(data), **UNLIMITED)
        gateway.directory = str(tmp_path)  # the logs must not need the full disk
        gateway.start()
        alice = await gateway.connect("alice")
        dm = await alice.create("dm", "bob")
        acknowledged = []
        with pytest.raises(Refused) as refusal:
            while True:
                acknowledged.append((await alice.send(dm, str(random.random()) * 600))["seq"])
        assert refusal.value.code == "unavailable"
        await refused(alice.send(dm, "and no more"), "unavailable")
        assert (await alice.ask("ping"))["type"] == "pong", "the gateway is down"
        import httpx

        ready = httpx.get(f"http://{gateway.internal}/health/ready", timeout=PATIENCE)
        assert ready.status_code == 503 and "refuses writes" in ready.json()["reason"]
        gateway.close()
        roomy = tmp_path / "roomy"
        shutil.copytree(data, roomy)
        again = start(str(roomy), **UNLIMITED)
        bob = await again.connect("bob")
        log = await bob.everything(dm)
        assert [m["seq"] for m in log][: len(acknowledged)] == acknowledged
        assert (await bob.inbox(dm))["unread"] == len(log)
        assert (await bob.send(dm, "there is room again"))["seq"] == len(log) + 1
        await bob.close()
    finally:
        gateway.close()
        subprocess.run(["umount", "-l", str(disk)], check=True)


async def test_import_is_idempotent_and_names_bad_lines(start, tmp_path, names):
    gateway = Gateway(str(tmp_path / "data"))
    sample = ROOT / "config/sample.jsonl"
    first = gateway.command("import", str(sample)).stdout
    assert first == "2 conversations and 9 messages imported, 0 messages were there already\n"
    second = gateway.command("import", str(sample)).stdout
    assert second == "0 conversations and 0 messages imported, 9 messages were there already\n"
    longer = tmp_path / "longer.jsonl"
    longer.write_text(sample.read_text() + json.dumps(
        {"type": "message", "dm": ["alice", "bob"], "sender": "bob", "body": "Gladly.", "at": 1790000180000}) + "\n")
    third = gateway.command("import", str(longer)).stdout
    assert third == "0 conversations and 1 messages imported, 9 messages were there already\n"
    for bad, why in (
        ("{", "EOF"), ('{"type":"message","sender":"alice","body":"x"}', "either a conversation or a dm"),
        ('{"type":"message","dm":["alice","bob"],"sender":"eve","body":"x"}', "no such conversation"),
        ('{"type":"conversation","kind":"group","participants":["alice"]}', "has an id"),
    ):
        wrong = tmp_path / "wrong.jsonl"
        wrong.write_text(sample.read_text() + bad + "\n")
        done = gateway.command("import", str(wrong), check=False)
        assert done.returncode == 1 and "wrong.jsonl:12" in done.stderr and why in done.stderr, done.stderr
    now = int(time.time() * 1000)
    message = {"type": "message", "dm": ["alice", "bob"], "sender": "alice", "body": "when?"}
    for field, at, why in (
        ("at", -1, "before 1980"), ("at", now // 1000, "looks like seconds"), ("at", now * 1000, "looks like microseconds"),
        ("at", 4102444800000, "more than a day after now"), ("at", now + 2 * 86_400_000, "more than a day after now"), ("at", 1.5, "must be a whole number"),
        ("edited_at", -(1 << 63), "before 1980"), ("deleted", {"by": "bob", "at": (1 << 63) - 1}, "deleted.at"), ("deleted", {"by": "bob", "at": 1 << 63}, ""),
        ("reactions", [{"user": "bob", "emoji": "x", "at": now}, {"user": "bob", "emoji": "y", "at": now * 1000}], "reactions.at"),
    ):
        wrong.write_text(sample.read_text() + json.dumps({**message, field: at}) + "\n")
        done = gateway.command("import", str(wrong), check=False)
        assert done.returncode == 1 and "wrong.jsonl:12" in done.stderr and why in done.stderr, (field, at, done.stderr)
    wrong.write_text(json.dumps({"type": "conversation", "kind": "dm", "participants": ["eve", "bob"], "at": now * 1000}) + "\n")
    done = gateway.command("import", str(wrong), check=False)
    assert done.returncode == 1 and "wrong.jsonl:1" in done.stderr and "at: " in done.stderr, done.stderr
    running = start(str(tmp_path / "data"))
    alice = await running.connect("alice")
    group = "0199c0de-0000-7000-8000-00000000cafe"
    assert {i["name"]: i["last_seq"] for i in await alice.inbox()} == {"bob": 5, "Project Lighthouse": 6}
    log = await alice.everything(group)
    assert [m["sender"] for m in log] == ["carol", "carol", "dave", "alice", "bob", "carol"]
    assert (log[1]["at"], log[1]["attachments"][0]["name"]) == (1790003700000, "plan.pdf")
    assert (await alice.inbox(group))["unread"] == 2, "alice wrote the fourth entry, so two are unread"
    done = running.command("import", str(sample), check=False)
    assert done.returncode == 1 and ("in use by another process" in done.stderr or "is running on this store" in done.stderr)
    await alice.close()
