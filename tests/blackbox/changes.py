"""Helpers of the tests of messages that change: markers, waiting for changes, and a client that follows them by the rules of the protocol."""
import os
import secrets
import string

from support import PATIENCE, Refused, eventually, uuid4, within

# An edit of a message that does not exist, of a system entry, or with a wrong emoji gets this code, like other invalid requests.
INVALID = "bad_request"
RESET_AFTER = 5_000  # changes


def marker():
    """A text that occurs nowhere else. It is random, so a compressed block has its first copy verbatim."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(40))


def pieces(text):
    """Parts of a marker, each of which gives it away. A part is long enough to be unique."""
    return [text[n : n + 13] for n in (0, 13, 26)]


def holds(data, text):
    """Whether bytes have a part of a marker."""
    return any(piece.encode() in data for piece in pieces(text))


def files_with(directory, text):
    """Files below a directory that have a part of a marker, without the gateway's own log output."""
    found = []
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            if not (name.startswith("gateway-") and name.endswith(".log")):
                with open(path, "rb") as file:
                    if holds(file.read(), text):
                        found.append(path)
    return found


def rows_with(session, keyspace, text):
    """Rows of all tables of a Cassandra keyspace that have a part of a marker: (table, row)."""
    found = []
    tables = session.execute("SELECT table_name FROM system_schema.tables WHERE keyspace_name = %s", [keyspace])
    for table in [row["table_name"] for row in tables]:
        for row in session.execute(f"SELECT * FROM {keyspace}.{table}"):
            values = [bytes(v) if isinstance(v, (bytes, bytearray, memoryview)) else repr(v).encode() for v in row.values()]
            if any(holds(value, text) for value in values):
                found.append((table, row))
    return found


async def changed(client, conversation, seq, which=lambda item: True):
    """Waits for a `changed` event with an item of this entry that fits. Returns the item."""

    def fits(event):
        return event["conversation"] == conversation and any(i["seq"] == seq and which(i) for i in event["items"])

    event = await client.event("changed", fits)
    assert event["after"] < event["rev"] or not event["items"], event
    return next(i for i in event["items"] if i["seq"] == seq and which(i))


async def entry(client, conversation, seq):
    """The entry at this seq, from `history`."""
    page = await client.history(conversation, around=seq, limit=1)
    [message] = page["messages"]
    assert message["seq"] == seq
    return message


async def edit(client, conversation, seq, body, **fields):
    return (await client.ask("edit", conversation=conversation, seq=seq, body=body, **fields)).get("rev", 0)


async def delete(client, conversation, *seqs):
    return (await client.ask("delete", conversation=conversation, seqs=list(seqs))).get("rev", 0)


async def react(client, conversation, seq, emoji, on=True):
    return (await client.ask("react" if on else "unreact", conversation=conversation, seq=seq, emoji=emoji)).get("rev", 0)


async def all_ok(client, requests, at_once=60):
    """Sends many requests, at most so many in progress at once. Every one must be answered `ok`. Returns the replies in order."""
    replies, window = [], []
    for type, fields in requests:
        if len(window) == at_once:
            replies.append(await within(window.pop(0), PATIENCE))
        window.append(await client.begin(type, **fields))
    replies += [await within(reply, PATIENCE) for reply in window]
    for reply in replies:
        assert reply["type"] in ("ok", "sent"), reply
    return replies


def sends(conversation, *bodies):
    return [("send", {"conversation": conversation, "client_id": uuid4(), "body": body}) for body in bodies]


def toggles(conversation, seq, count, emoji="👍"):
    """So many requests that add and remove one reaction in turn: each is a change."""
    return [("react" if n % 2 == 0 else "unreact", {"conversation": conversation, "seq": seq, "emoji": emoji}) for n in range(count)]


async def asked(client, type, **fields):
    """Asks again while the store does not answer, as clients do: over Cassandra on busy processors it may not."""
    for _ in range(5):
        try:
            return await client.ask(type, **fields)
        except Refused as refused:
            if refused.code != "unavailable":
                raise
    return await client.ask(type, **fields)


async def reactors(client, conversation, seq, limit=50, **fields):
    """All reactions of an entry, read page by page: a set of (user, emoji)."""
    found, after = [], None
    while True:
        page = await asked(client, "reactions", conversation=conversation, seq=seq, limit=limit, **fields, **({"after": after} if after else {}))
        assert len(page["items"]) <= limit
        found += [(item["user"], item["emoji"]) for item in page["items"]]
        after = page.get("next")
        if not after:
            assert len(set(found)) == len(found), "a reaction is listed twice"
            return set(found)


def counted(pairs):
    """The summary of reactions of pairs (user, emoji)."""
    counts = {}
    for _, emoji in pairs:
        counts[emoji] = counts.get(emoji, 0) + 1
    return counts


def visible(message):
    """What a user sees of the state of an entry. A deleted message shows no content, and no reactions need be shown."""
    deleted = "deleted" in message
    content = None if deleted else (message.get("body"), message.get("attachments") or [], message.get("edited_at"))
    return (message["deleted"] if deleted else None, content, None if deleted else message.get("reactions") or {})


async def pages(client, conversation):
    """Reads all pages. Returns {seq: entry} and the lowest `rev` of the pages."""
    entries, after, rev = {}, 0, None
    while True:
        page = await client.history(conversation, after=after, limit=200)
        rev = page["rev"] if rev is None else min(rev, page["rev"])
        entries |= {m["seq"]: m for m in page["messages"]}
        after = max(entries, default=0)
        if not page["messages"] or after >= page["head"]:
            return entries, rev


class Follower:
    """Keeps the states of a conversation's entries like a client: from pages, from events and from `changes`."""

    def __init__(self, conversation):
        self.conversation = conversation
        self.states, self.known, self.cursor, self.upto = {}, {}, 0, 0
        self.early = {}  # items of entries that have not arrived yet
        self.client, self.gaps, self.resets = None, 0, 0

    def cursors(self):
        return {self.conversation: [self.upto, self.cursor]}

    async def read(self, client):
        """Reads all pages again. [page-rev] A page that is older than the cursor sets it back."""
        self.client = client
        entries, rev = await pages(client, self.conversation)
        for seq, message in entries.items():
            newest = max(rev, message.get("rev", 0))
            if self.known.get(seq, 0) <= newest:
                self.states[seq], self.known[seq] = message, newest
        self.upto = max(entries, default=0)
        if not self.cursor:
            self.cursor = rev
        if rev < self.cursor:
            self.cursor = rev
            await self.ask()

    async def ask(self):
        """Asks `changes` from the cursor until there are no more."""
        while True:
            page = await self.client.ask("changes", conversation=self.conversation, after=self.cursor)
            if page.get("reset"):
                assert page["items"] == []
                self.resets += 1
                self.states, self.known, self.cursor = {}, {}, page["rev"]
                return await self.read(self.client)
            assert page["after"] == self.cursor and page["rev"] >= self.cursor
            self.take(page)
            if not page.get("more"):
                return

    def take(self, page):
        for item in page["items"]:
            assert page["after"] < item["rev"] <= page["rev"], page
            if item["seq"] in self.states:
                self.change(item)
            else:
                self.early.setdefault(item["seq"], []).append(item)
        self.cursor = max(self.cursor, page["rev"])

    def change(self, item):
        seq = item["seq"]
        if item["rev"] > self.known[seq]:
            self.states[seq], self.known[seq] = self.applied(self.states[seq], item), item["rev"]

    @staticmethod
    def applied(state, item):
        state = dict(state)
        if "body" in item:
            assert "deleted" not in item and "edited_at" in item, item
            state |= {"body": item["body"], "attachments": item["attachments"], "edited_at": item["edited_at"]}
        if "deleted" in item:
            state |= {"body": "", "attachments": [], "deleted": item["deleted"]}
        if "reactions" in item:
            assert all(count > 0 for count in item["reactions"].values()), item
            state["reactions"] = item["reactions"]
        return state

    async def follow(self, client):
        """Handles the events of this conversation received so far, in order."""
        self.client = client
        await client.quiet()
        events = [e for e in client.events if e.get("conversation") == self.conversation]
        client.events = [e for e in client.events if e.get("conversation") != self.conversation]
        for event in events:
            if event["type"] == "message":
                seq = event["seq"]
                if seq not in self.states:
                    self.states[seq], self.known[seq] = event, event.get("rev", 0)
                    for item in self.early.pop(seq, []):
                        self.change(item)
                while self.upto + 1 in self.states:
                    self.upto += 1
            elif event["type"] == "changed":
                if event["after"] > self.cursor:
                    self.gaps += 1
                    await self.ask()
                else:
                    self.take(event)
            elif event["type"] == "resync":
                await self.read(client)

    async def agrees(self, client, with_client=None):
        """Waits until the followed states equal those of `history`."""
        last = {}

        async def equal():
            await self.follow(client)
            if max(self.states, default=0) > self.upto:
                await self.read(client)
            entries, _ = await pages(with_client or client, self.conversation)
            stored, shown = ({s: visible(m) for s, m in them.items()} for them in (entries, self.states))
            last["difference"] = {s: (shown.get(s), stored.get(s)) for s in stored.keys() | shown.keys() if shown.get(s) != stored.get(s)}
            return not last["difference"]

        try:
            await eventually(equal)
        except AssertionError:
            raise AssertionError(f"shown and stored differ, cursor {self.cursor}: {list(last['difference'].items())[:3]}") from None


async def unread_by_hand(client, conversation, read_seq):
    """The messages of people after this seq that are not deleted, counted from the log."""
    log = await client.everything(conversation)
    return sum(1 for m in log if m["seq"] > read_seq and m["kind"] == "text" and "deleted" not in m)
