"""Fills a data directory with an earlier build, for test_upgrade.py. To create the archive again:

    CHAT_GATEWAY=PROGRAM tests/.venv/bin/python tests/blackbox/old_directory.py tests/blackbox/old_directory.tar.xz
"""
import asyncio
import json
import sys
import tarfile
import tempfile

from support import Gateway, uuid4


async def fill(gateway):
    """Creates conversations of each kind, whose rows use every column. Returns what a later build must find."""
    alice, bob = await gateway.connect("alice"), await gateway.connect("bob")
    dm = await alice.create("dm", "bob")
    group = await alice.create("group", "bob", "carol", name="Lunch")
    channel = await alice.create("channel", "bob", name="News", public=True)
    ids = [uuid4() for _ in range(40)]
    for number, id in enumerate(ids):
        await alice.send(dm, f"message {number}", id)
    link = {"url": "https://example.org/cat.png", "mime": "image/png", "name": "cat.png", "size": 12_345}
    await alice.ask("send", conversation=group, client_id=uuid4(), body="a cat", attachments=[link])
    await bob.ask("send", conversation=group, client_id=uuid4(), body="nice", reply_to=2)
    await alice.ask("remove", conversation=group, user="carol")
    await alice.ask("set_role", conversation=group, user="bob", role="admin")
    for number in range(5):
        await alice.send(channel, f"news {number}")
    await bob.ask("read", conversation=dm, seq=30)
    return {
        "inboxes": {"alice": await alice.inbox(), "bob": await bob.inbox()},
        "logs": {id: (await alice.history(id, limit=100))["messages"] for id in (dm, group, channel)},
        "dm": dm,
        "group": group,
        "client_ids": [ids[0], ids[-1]],
    }


def main(archive):
    directory = tempfile.mkdtemp()
    gateway = Gateway(directory).start()
    found = asyncio.run(fill(gateway))
    gateway.kill()  # Acknowledged messages are stored without a shutdown.
    with open(f"{directory}/found.json", "w") as file:
        json.dump(found, file)
    with tarfile.open(archive, "w:xz") as tar:
        left_out = (".log", ".key")
        tar.add(directory, arcname=".", filter=lambda entry: None if entry.name.endswith(left_out) else entry)


if __name__ == "__main__":
    main(sys.argv[1])
