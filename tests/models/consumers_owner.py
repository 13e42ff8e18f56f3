"""The owner of a conversation in model_consumers.py, and the followers beside it."""
from collections import namedtuple

from attachments_store import adopt
from consumers_store import DELETED, ROW, lagging_row, offset_row

WINDOW = 3                     # the entries and the changes that may be uncertain at once
MINUTE, MINUTES = 20, 3        # a minute of activity in units of time, and how many minutes crash repair reads
LAGGING_AFTER, FLUSH = 10, 10  # half a minute each
SHARDS = 2

# Rows of the logs. `claim`: everything up to there is settled. `origin` is the epoch that appended the row; settled again, it keeps that.
Entry = namedtuple("Entry", "id claim origin")
Change = namedtuple("Change", "id claim origin seq")
# An event as a consumer gets it: `number` is the seq of an entry or the rev of a change, `shown` the rev of the content that it shows.
Event = namedtuple("Event", "conversation kind number id seq shown")

class Owner:
    """The owner of a conversation in one gateway, from its load until it is closed."""
    def __init__(self, gateway, conversation, grant):
        self.gateway, self.world, self.sim, self.conversation, self.grant = gateway, gateway.world, gateway.sim, conversation, grant
        self.store, self.broken, self.epoch = self.world.store, self.world.broken, grant.version
        self.serving, self.closing, self.gone, self.active_minute = False, False, False, -1
        self.entries, self.head, self.next_seq, self.stored, self.ids = {}, 0, 1, set(), {}
        self.changes, self.change_head, self.next_rev, self.stored_revs, self.change_ids = {}, 0, 1, set(), {}
        self.applied, self.applying, self.shown, self.since = 0, False, {}, {}
        self.followers = {}
        self.sim.spawn(self.load(), gateway); self.sim.spawn(self.watch(), gateway)
    def leased(self): return self.sim.now < self.grant.end
    def heads(self): return self.head, self.change_head if self.broken != "found-applied" else self.applied
    # -- writing
    def durable(self, rows, active=False, anyway=False):
        """Writes rows until all are stored, with the activity of the minute of the attempt. -> whether the owner has its lease"""
        left, activity, minute, owed = dict(rows), ("activity", self.gateway.id), None, False
        while self.leased() or anyway:
            if minute is None or self.broken != "found-minute": minute = self.gateway.minute()
            todo = dict(left)
            if active and (owed or self.active_minute != minute) and not (anyway and self.broken == "found-repeat"):
                todo[activity], owed = {(minute, self.conversation): (0, ROW)}, True
                if self.broken == "found-durable": self.active_minute = minute
            unknown = yield self.store.write(todo, self.gateway.cut_off)
            if activity in todo and activity not in unknown: self.active_minute, owed = max(self.active_minute, minute), False
            if not unknown: return self.leased()
            left = {p: c for p, c in left.items() if p in unknown}
        return False
    # -- takeover
    def load(self):
        while self.leased():
            parts, self.least = [], dict(self.world.check.offsets)
            for table in ("entries", "changes", "marks", "offset"): parts.append((yield self.store.read((table, self.conversation))))
            if None not in parts: break
        else: self.gone = True; return
        cells, change_cells, marks, offsets = parts
        rows, known = adopt(cells, marks.get("s", (0,))[0]); changes, known_rev = adopt(change_cells, marks.get("r", (0,))[0])
        settle = {}
        for seq in range(known + 1, len(rows) + 1): settle.setdefault(("entries", self.conversation), {})[(seq, self.epoch)] = (0, rows[seq]._replace(claim=known))
        for rev in range(known_rev + 1, len(changes) + 1):
            settle.setdefault(("changes", self.conversation), {})[(rev, self.epoch)] = (0, changes[rev]._replace(claim=known_rev))
        active = self.broken != "found-settle"
        if settle and not ((yield from self.durable({}, active)) and (yield from self.durable(settle, active))): self.gone = True; return
        if not self.leased(): self.gone = True; return
        self.entries, self.changes = rows, changes
        for consumer in self.gateway.consumers: self.begin(consumer, offsets, (known, known_rev), (len(rows), len(changes)))
        for seq in rows: self.commit()
        self.change_ids = {change.id: rev for rev, change in changes.items()}
        for rev in changes: self.commit_change(); self.apply(rev)
        self.next_seq, self.next_rev = self.head + 1, self.change_head + 1
        for follower in self.followers.values(): follower.start()
        self.serving = True
    def begin(self, consumer, offsets, certain, heads):
        stored = tuple(offsets.get((consumer, column), (None,))[0 if self.broken != "offset-max" else -1] for column in "sr")
        has_row = stored[0] is not None
        # Without a row the owner begins at what is certain: what it settles now is committed under this owner.
        start = stored if has_row else certain if self.broken != "first-certain" else heads
        if has_row: self.world.check.loaded(consumer, self.conversation, start, self.least.get((consumer, self.conversation), (0, 0)))
        self.followers[consumer] = Follower(self, consumer, start, has_row)
    def watch(self):
        """An owner whose lease has ended serves nothing, and names what is undelivered."""
        while self.leased() and not self.gone: yield 1
        if self.gone: return
        self.serving = False
        yield from self.leave()
        self.gone = True
    def leave(self):
        for follower in self.followers.values():
            follower.stopped = self.broken != "lease"
            if follower.is_behind() and self.broken != ("found-close" if self.closing else "found-end"): yield from follower.name()
    def close(self):
        """Closes the conversation: an eviction, or an orderly stop."""
        if not self.serving or self.closing: return
        self.closing = True
        while self.leased() and (self.head + 1 < self.next_seq or self.applied + 1 < self.next_rev): yield 1
        if not self.leased(): return
        yield from self.leave()
        for follower in self.followers.values():
            if self.leased() and (follower.has_row or self.broken != "first-mark"): yield from follower.flush(always=True)
        if self.leased() and (yield from self.durable({("marks", self.conversation): {"s": (self.head, ""), "r": (self.applied, "")}})):
            self.serving, self.gone = False, True
    # -- requests
    def first_offsets(self, rows):
        """[first] The offset rows of consumers that have none are stored with the append, which commits when all of it is stored."""
        missing = [f for f in self.followers.values() if not f.has_row]
        for f in missing if self.broken != "first" else (): rows.setdefault(("offset", self.conversation), {}).update(f.row(f.start_at))
        return missing
    def send(self, entry_id):
        """-> the seq | None = outcome unknown"""
        if not self.serving or self.closing or not self.leased(): return None
        if entry_id in self.ids: return self.ids[entry_id]
        if any(e.id == entry_id for e in self.entries.values()) or self.next_seq - 1 - self.head >= WINDOW: return None
        seq = self.next_seq; self.next_seq += 1
        self.entries[seq] = Entry(entry_id, self.head, self.epoch)
        self.world.trouble(self.gateway)
        rows = {("entries", self.conversation): {(seq, self.epoch): (0, self.entries[seq])}}
        missing = self.first_offsets(rows)
        if not (yield from self.durable(rows, True)): return None
        if self.broken != "first":
            for follower in missing: follower.has_row = True
        self.stored.add(seq)
        while self.head + 1 in self.stored: self.commit()
        while seq > self.head and self.leased(): yield 1
        self.world.trouble(self.gateway)
        return seq if self.leased() else None
    def commit(self):
        self.head += 1; entry = self.entries[self.head]; self.ids[entry.id] = self.head; self.since[("s", self.head)] = self.sim.now
        self.world.check.committed(self, "s", self.head, entry)
    def commit_change(self):
        self.change_head += 1; self.since[("r", self.change_head)] = self.sim.now
        self.world.check.committed(self, "r", self.change_head, self.changes[self.change_head])
    def apply(self, rev): self.applied = rev; self.shown[self.changes[rev].seq] = rev
    def rounds(self):
        """Stores the effects of committed changes, one after the other."""
        if self.applying: return
        self.applying = True
        while self.applied < self.change_head and self.leased():
            yield self.sim.rng.choice((1, 2, 6))
            if self.leased(): self.apply(self.applied + 1)
        self.applying = False
    def change(self, change_id, seq):
        """Edits or deletes an entry. -> "ok" | None = outcome unknown"""
        if not self.serving or self.closing or not self.leased() or seq > self.head: return None
        rev = self.change_ids.get(change_id)
        if rev is None:
            if self.next_rev - 1 - self.applied >= WINDOW: return None
            rev = self.next_rev; self.next_rev += 1
            self.changes[rev] = Change(change_id, self.applied, self.epoch, seq); self.change_ids[change_id] = rev
            rows = {("changes", self.conversation): {(rev, self.epoch): (0, self.changes[rev])}}
            missing = self.first_offsets(rows)
            if not (yield from self.durable(rows, True)): return None
            if self.broken != "first":
                for follower in missing: follower.has_row = True
            self.stored_revs.add(rev)
            while self.change_head + 1 in self.stored_revs: self.commit_change()
            self.world.trouble(self.gateway)
            self.sim.spawn(self.rounds(), self.gateway)
        while self.applied < rev and self.leased(): yield 1
        if not self.leased(): return None
        self.world.check.acknowledged_change(self.conversation, seq, rev)
        return "ok"

class Follower:
    """Reads the committed log of one conversation for one consumer."""
    def __init__(self, owner, consumer, start, has_row):
        self.owner, self.consumer, self.sim, self.world, self.broken = owner, consumer, owner.sim, owner.world, owner.broken
        self.offset, self.start_at, self.flushed, self.has_row, self.stopped = start, start, start if has_row else None, has_row, False
        self.lagging, self.naming, self.may_lag = None, False, False
        self.partition = ("lagging", consumer, owner.conversation % SHARDS)
    def start(self):
        for steps in (self.follow(), self.keep()): self.sim.spawn(steps, self.owner.gateway)
        if self.is_behind(): self.sim.spawn(self.name(), self.owner.gateway)
    def is_behind(self): return self.offset != self.owner.heads()
    def row(self, offset):
        if self.broken != "offset-max": return offset_row(self.consumer, offset)
        now = self.sim.now + self.owner.gateway.skew
        return {(self.consumer, "s"): (now, offset[0]), (self.consumer, "r"): (now, offset[1])}
    # -- delivering
    def next_events(self):
        """The next events in order: entries by seq, changes by rev, a change after its entry."""
        owner, (seq, rev), events = self.owner, self.offset, []
        head = owner.head if self.broken != "committed" else owner.next_seq - 1
        last_rev = owner.applied if self.broken != "committed-applied" else owner.change_head
        for _ in range(self.sim.rng.choice((1, 1, 3))):
            change = owner.changes[rev + 1] if rev < last_rev else None
            if change and (change.seq <= seq or self.broken == "order-change") and (seq == head or self.sim.rng.random() < 0.5):
                rev += 1; events.append(("r", rev, change.id, change.seq))
            elif seq < head: seq += 1; events.append(("s", seq, owner.entries[seq].id, seq))
            else: break
        # [lease] The content is read under the lease: a deposed owner does not know of later edits and deletions.
        if not owner.leased() and self.broken != "lease": return [], self.offset
        self.world.check.read(self, events)
        return [Event(owner.conversation, kind, number, what, at, owner.shown.get(at, 0)) for kind, number, what, at in events], (seq, rev)
    def follow(self):
        gateway, rng = self.owner.gateway, self.sim.rng
        while not self.stopped and not self.owner.gone:
            yield 0.5
            if self.sim.now < gateway.endpoint_down.get(self.consumer, 0): continue
            events, after = self.next_events()
            if not events: continue
            sent = self.world.receivers[self.consumer].take(events)
            if self.broken == "order" and rng.random() < 0.5: self.offset = after; continue
            if self.broken == "offset": self.offset = after
            if (yield sent): self.offset = after
            elif rng.random() < 0.3: gateway.endpoint_down[self.consumer] = self.sim.now + rng.choice((2, 10, 30))
            else: yield rng.choice((1, 3, 8))
    # -- rows
    def keep(self):
        """Writes the offset and the lagging row behind."""
        flush_at = self.sim.now + self.sim.rng.uniform(0, FLUSH)
        while not self.stopped and not self.owner.gone and self.owner.leased():
            yield 1
            if self.sim.now >= flush_at: flush_at = self.sim.now + FLUSH; yield from self.flush()
            if self.stopped: return
            if not self.is_behind():
                if self.lagging or self.may_lag: yield from self.catch_up()
            elif self.lagging:
                if self.broken == "lagging-caught" and self.offset >= self.lagging: yield from self.delete(self.lagging)
            elif self.sim.now - self.oldest() >= LAGGING_AFTER: yield from self.name()
    def oldest(self):
        seq, rev = self.offset
        return min(self.owner.since.get(("s", seq + 1), self.sim.now), self.owner.since.get(("r", rev + 1), self.sim.now))
    def flush(self, always=False):
        """Stores the offset. While it is at the begin, and there is no row, only with `always`."""
        offset = self.offset
        if offset == self.flushed or self.flushed is None and offset == self.start_at and not always: return
        if (yield from self.owner.durable({("offset", self.owner.conversation): self.row(offset)})):
            self.flushed, self.has_row = offset, True
            self.world.check.stored(self.consumer, self.owner.conversation, offset)
    def name(self):
        """Writes the lagging row until it is stored, also when the lease has ended, and the activity once a minute until then."""
        while self.naming: yield 1
        self.naming, at = True, self.owner.heads()
        if not self.lagging:
            stamp = self.stamp(at)
            yield from self.owner.durable({self.partition: lagging_row(self.owner.conversation, stamp, ROW)}, True, anyway=True)
            self.lagging = at
        self.naming = False
    def stamp(self, at): return at if self.broken != "lagging-heads" else (self.sim.now + self.owner.gateway.skew,) * 2
    def catch_up(self):
        """Deletes the lagging row of finished work."""
        if self.naming and self.broken != "lagging-turn": return
        at, self.may_lag = self.offset, True
        if self.broken != "lagging-count": self.lagging = None
        if self.broken != "lagging-offset":
            # The next owner begins at this offset or later, so what it appends is beyond the deletion.
            yield from self.flush(always=True)
            if self.flushed is None or self.flushed < at or not self.owner.leased(): return
        yield from self.delete(at)
    def delete(self, at):
        self.lagging, self.may_lag = None, False
        row = lagging_row(self.owner.conversation, self.stamp(at), DELETED)
        if not (yield self.world.store.write({self.partition: row}, self.owner.gateway.cut_off)):
            self.world.check.deleted(self.consumer, self.owner.conversation, at)
        else: self.may_lag = True
