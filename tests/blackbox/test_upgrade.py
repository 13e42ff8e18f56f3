"""This build opens the data of an earlier build, serves the same content, and continues from there."""
import json
import pathlib
import tarfile

import pytest

from support import UNLIMITED
from test_messages import refused

ARCHIVE = pathlib.Path(__file__).parent / "old_directory.tar.xz"


@pytest.mark.embedded
async def test_a_directory_of_the_first_build_opens_and_works(start, tmp_path):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    found = json.loads((tmp_path / "found.json").read_text())
    gateway = start(str(tmp_path), **UNLIMITED)
    assert gateway.metrics()["chat_cluster_level"] == 1, "the level rises by itself"
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
