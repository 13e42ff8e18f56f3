"""This build opens the data of an earlier build, serves the same content, and continues from there."""
import json
import pathlib
import tarfile

import pytest

from changes import all_ok, delete, edit, entry, react, sends
from support import UNLIMITED
from test_messages import refused

ARCHIVE = pathlib.Path(__file__).parent / "old_directory.tar.xz"


@pytest.mark.embedded
async def test_a_directory_of_the_first_build_opens_and_works(start, tmp_path):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    found = json.loads((tmp_path / "found.json").read_text())
    gateway = start(str(tmp_path), **UNLIMITED)
    assert gateway.metrics()["chat_cluster_level"] == 4, "the level rises by itself"
    for restarts in range(2):
        alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
        if restarts == 0:
            assert {"alice": await alice.inbox(), "bob": await bob.inbox()} == found["inboxes"]
            assert [i["unread"] for i in await bob.inbox() if i["conversation"] == found["dm"]] == [10]
        for conversation, messages in found["logs"].items():
            assert (await alice.history(conversation, limit=100))["messages"][: len(messages)] == messages
        for number, client_id in zip((0, 39), found["client_ids"]):
            again = await alice.send(found["dm"], f"message {number}", client_id, retry=True)
            assert (again["seq"], again["duplicate"]) == (number + 1, True)
        assert (await bob.send(found["dm"], "goes on"))["seq"] == 41 + restarts
        carol = await gateway.connect("carol")
        await refused(carol.history(found["group"]), "forbidden")
        if restarts == 0:
            await bob.ask("add", conversation=found["group"], user="carol")  # Bob is an admin.
            await bob.ask("remove", conversation=found["group"], user="carol")
            assert gateway.stop() == 0
            gateway = start(str(tmp_path), **UNLIMITED)
        for client in (alice, bob, carol):
            await client.close()


@pytest.mark.embedded
async def test_messages_of_the_first_build_can_change(start, tmp_path):
    """Its rows do not say how many messages of people are before them: each entry counts as one."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    found = json.loads((tmp_path / "found.json").read_text())
    gateway = start(str(tmp_path), **UNLIMITED)
    dm, group = found["dm"], found["group"]
    alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
    assert await edit(alice, dm, 1, "edited after the upgrade") == 1
    assert await react(bob, dm, 40, "👍") == 2
    assert (await entry(bob, dm, 1))["body"] == "edited after the upgrade"
    assert (await bob.inbox(dm))["unread"] == 10
    assert await delete(alice, dm, 40, 35, 2) == 3
    item = await bob.inbox(dm)
    assert (item["unread"], item["last_message"]["preview"], item["last_message"]["deleted"]) == (8, "", True)
    assert await edit(alice, group, 2, "a dog") == 1
    [kept] = (await entry(bob, group, 2))["attachments"]
    assert kept["name"] == "cat.png"
    for kill in (False, True):
        for client in (alice, bob):
            await client.close()
        gateway.kill() if kill else gateway.stop()
        gateway = start(str(tmp_path), **UNLIMITED)
        alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
        details = await bob.ask("conversation", conversation=dm)
        assert (details["message_count"], details["head"], details["rev"]) == (37, 40, 3)
        assert (await bob.inbox(dm))["unread"] == 8
        assert [("deleted" in await entry(bob, dm, seq)) for seq in (2, 35, 40, 1)] == [True, True, True, False]
    await bob.ask("read", conversation=dm, seq=40)
    await all_ok(alice, sends(dm, "one more"))
    assert (await bob.inbox(dm))["unread"] == 1
    for client in (alice, bob):
        await client.close()
