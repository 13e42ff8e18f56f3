"""A deleted text is nowhere any more: in no reply, in no log output, in no file of the data directory, in no cell of Cassandra."""
import asyncio
import pathlib

import pytest

from changes import all_ok, changed, delete, edit, files_with, holds, marker, pages, pieces, react, rows_with, sends
from support import UNLIMITED, eventually, uuid4

LINK = {"mime": "image/png", "size": 5}


class Story:
    """Conversations in which marker texts are sent, edited, quoted by reply, previewed and deleted, and one text that stays."""

    def __init__(self):
        self.gone = {name: marker() for name in ("sent", "edited", "newest", "attached", "named", "group", "channel", "retried", "left")}
        self.kept, self.client_id = marker(), uuid4()

    async def tell(self, gateway, codec="json"):
        """Sends and edits, but deletes nothing yet. Carol leaves while a text is her preview."""
        alice, bob, carol = [await gateway.connect(user, codec) for user in ("alice", "bob", "carol")]
        gone = self.gone
        self.dm = await alice.create("dm", "bob")
        self.group = await alice.create("group", "bob", "carol", name="G")
        self.channel = await alice.create("channel", "bob", name="C", public=True)
        await alice.send(self.dm, gone["sent"])  # 1
        await edit(alice, self.dm, 1, gone["edited"])
        await edit(alice, self.dm, 1, "harmless")
        await bob.send(self.dm, "what do you mean?", reply_to=1)  # 2
        await alice.send(self.dm, "see", attachments=[{**LINK, "url": f"https://example.org/{gone['attached']}", "name": gone["named"]}])  # 3
        await alice.send(self.dm, gone["retried"], self.client_id)  # 4
        assert (await alice.send(self.dm, gone["retried"], self.client_id, retry=True))["duplicate"]
        await alice.send(self.dm, self.kept)  # 5
        await alice.send(self.dm, gone["newest"])  # 6
        await alice.send(self.channel, gone["channel"])  # 2
        await alice.send(self.group, gone["group"])  # 2
        await alice.send(self.group, gone["left"])  # 3
        assert (await carol.inbox(self.group))["last_message"]["preview"] == gone["left"]
        await carol.ask("leave", conversation=self.group)  # 4
        await react(bob, self.dm, 1, "👍")
        for client in (alice, bob, carol):
            await client.close()

    async def erase(self, gateway, codec="json"):
        alice = await gateway.connect("alice", codec)
        await delete(alice, self.dm, 1, 3, 4)
        await delete(alice, self.dm, 6)
        await delete(alice, self.group, 2, 3)
        await delete(alice, self.channel, 2)
        await alice.close()

    async def ask_everything(self, gateway, codec="json"):
        """Asks for everything that could have a text. Returns all replies and events as one text, which must have no marker but the kept one."""
        said = []
        for user in ("alice", "bob", "carol"):
            cursors = {self.dm: [0, 0], self.group: [0, 0], self.channel: [0, 0]}
            client = await gateway.connect(user, codec, cursors=cursors)
            said += [client.hello, await client.inbox()]
            for conversation in (self.dm, self.group, self.channel):
                if user != "carol":
                    said.append(await client.ask("conversation", conversation=conversation))
                    said.append(await pages(client, conversation))
                    for after in range(0, 12):
                        said.append(await client.ask("changes", conversation=conversation, after=after, limit=1))
                        said.append(await client.ask("changes", conversation=conversation, after=after))
            if user != "carol":
                said.append(await client.ask("reactions", conversation=self.dm, seq=1))
            if user == "alice":
                said.append(await client.send(self.dm, self.gone["retried"], self.client_id, retry=True))
            said += await client.quiet()
            await client.close()
        text = repr(said).encode()
        assert holds(text, self.kept), "the search does not find what is there"
        for name, secret in self.gone.items():
            assert not holds(text, secret), f"the {name} text is in a reply or an event: {snippet(text, secret)}"

    def search(self, look):
        """Asserts that a search finds the kept text, and none that is gone. `look` returns the places of a text."""
        assert look(self.kept), "the search does not find what is there"
        for name, secret in self.gone.items():
            assert not look(secret), f"the {name} text is left: {look(secret)}"


def snippet(text, secret):
    at = min(text.find(piece.encode()) for piece in pieces(secret) if piece.encode() in text)
    return text[max(0, at - 200) : at + 200]


def no_text_in_logs(story, directory):
    for log in pathlib.Path(directory).glob("gateway-*.log"):
        for name, secret in (*story.gone.items(), ("kept", story.kept)):
            assert not holds(log.read_bytes(), secret), f"the {name} text is in {log}"


async def test_no_reply_and_no_log_line_has_a_deleted_text(start, codec):
    gateway = start(**UNLIMITED)
    story = Story()
    await story.tell(gateway, codec)
    await story.erase(gateway, codec)
    await story.ask_everything(gateway, codec)
    # The same from the store, when nothing is in memory.
    assert gateway.stop() == 0
    gateway = start(gateway.directory, **UNLIMITED)
    await story.ask_everything(gateway, codec)
    no_text_in_logs(story, gateway.directory)


@pytest.mark.embedded
@pytest.mark.parametrize("killed", [False, True])
async def test_after_a_compaction_no_file_has_a_deleted_text(start, killed):
    """Searches the files byte by byte. The gateway is stopped or killed, and `compact` rewrites what is left of deleted texts."""
    gateway = start(**UNLIMITED)
    story = Story()
    await story.tell(gateway)
    gateway.kill()
    for name, secret in (*story.gone.items(), ("kept", story.kept)):
        assert files_with(gateway.directory, secret), f"the search would not find the {name} text"
    gateway = start(gateway.directory, **UNLIMITED)
    await story.erase(gateway)
    if killed:
        gateway.kill()
        gateway = start(gateway.directory, **UNLIMITED)
        await story.ask_everything(gateway)
    assert gateway.stop() == 0
    gateway.command("compact")
    story.search(lambda text: files_with(gateway.directory, text))
    no_text_in_logs(story, gateway.directory)
    gateway = start(gateway.directory, **UNLIMITED)
    await story.ask_everything(gateway)
    alice = await gateway.connect("alice")
    assert (await alice.send(story.dm, "goes on"))["seq"] == 7
    await alice.close()


@pytest.mark.embedded
async def test_deletions_are_followed_by_a_compaction_of_their_own(start):
    """No command is run. A restart is allowed to finish it."""
    gateway = start(**UNLIMITED)
    story = Story()
    await story.tell(gateway)
    await story.erase(gateway)
    assert gateway.stop() == 0
    gateway = start(gateway.directory, **UNLIMITED)
    left = {}

    async def gone():
        left.clear()
        for name, secret in story.gone.items():
            try:
                found = files_with(gateway.directory, secret)
            except FileNotFoundError:  # A file was replaced meanwhile.
                return False
            if found:
                left[name] = found
        return not left

    try:
        await eventually(gone)
    except AssertionError:
        raise AssertionError(f"deleted texts are left: {left}") from None
    await story.ask_everything(gateway)


@pytest.mark.cassandra
async def test_no_cell_of_cassandra_has_a_deleted_text(start):
    from support import cql, keyspace_of

    gateway = start(**UNLIMITED)
    story = Story()
    await story.tell(gateway)
    keyspace = keyspace_of(gateway.directory)

    async def stored():  # Inbox rows are written behind.
        return all(rows_with(cql(), keyspace, secret) for name, secret in story.gone.items())

    assert await eventually(stored), "the search would not find the texts"
    await story.erase(gateway)
    story.search(lambda text: [table for table, _ in rows_with(cql(), keyspace, text)])
    gateway.kill()
    gateway = start(gateway.directory, **UNLIMITED)
    await story.ask_everything(gateway)
    story.search(lambda text: [table for table, _ in rows_with(cql(), keyspace, text)])


async def test_a_preview_never_shows_a_deleted_text_again(people):
    """Deletes each newest message while the next ones are sent, and looks at the inbox after each acknowledgement."""
    alice, bob = await people("alice", "bob")
    at = await alice.create("group", bob.user)
    gone, done = set(), asyncio.Event()

    async def look():
        while not done.is_set():
            known = set(gone)
            last = (await bob.inbox(at))["last_message"]
            assert last["preview"] not in known, "a deleted text is a preview again"

    looking = asyncio.create_task(look())
    for n in range(60):
        text = marker()
        seq = (await alice.send(at, text))["seq"]
        if n % 3 == 0:
            await edit(alice, at, seq, text + "!")
        if n % 2 == 0:
            await all_ok(alice, sends(at, f"and {n}"))
        await delete(alice, at, seq)
        gone |= {text, text + "!"}
    done.set()
    await looking
    await changed(bob, at, seq, lambda i: "deleted" in i)
    shown = repr(await pages(bob, at)).encode()
    assert not any(holds(shown, text) for text in gone if len(text) == 40)
