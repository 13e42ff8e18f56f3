#!/usr/bin/env python3
"""Executable model of attachments: uploads, references, the sweep, erasing.

    model_attachments.py [SEEDS] [--from N] [--break RULE]
    model_attachments.py --rules

One conversation with two logs (entries and changes) and the rows of its files, over three replicas that lose, delay and resurrect writes.
Owners crash, pause and are deposed without knowing it. Uploads crash and pause too. Users upload files, send some of them (some twice), edit
and delete messages, and download. The model checks that no message that is there names a file without bytes; that a file which no entry names
has no bytes after the sweep; that a refused send takes no seq; that nothing is served once it was erased, and that no state falls.
In a third of the seeds the bytes are in a bucket: several inspections copy a file, and copies arrive late, even from a crashed one.
Without --break no seed may fail. With a broken rule some seeds must fail.
"""
import sys
from collections import Counter, namedtuple
from random import Random

from attachments_store import LATE, Store, adopt
from changes_store import Future, Simulation

RULES = {
    "refs-log":       "a file is attached only if the entry at the seq of a reference that is on names it in the log, as the entry is now",
    "refs-append":    "an entry commits when its references are stored, not only its log row",
    "refs-settle":    "a takeover writes the references of unsettled entries again",
    "refs-off":       "references are off, and work rows are written, before a deletion or edit is acknowledged or settled",
    "off-settle":     "a takeover switches off the references of unsettled changes again, and writes their work rows again",
    "off-work":       "a reference is switched off together with a work row for its file",
    "applied":        "a deletion or edit counts when it is committed and applied, not when it is appended",
    "edit-adds":      "an edit names no file that its entry does not name now",
    "work-day":       "each attempt to write a work row takes the day of the attempt, also after a takeover",
    "upload-work":    "the facts and the work row of a file are stored before the answer to `POST`, and so before its first byte",
    "incoming-once":  "only `POST` creates a file in incoming/, empty and before the facts; neither a later part nor the completion creates it again",
    "incoming-age":   "the sweep removes what is older than two days in incoming/, whatever the rows say",
    "sweep-owner":    "the sweep erases nothing itself, it asks the owner",
    "naming":         "the owner judges no file that a send in progress names, from before that send reads the file's state until its outcome is known",
    "busy-later":     "a work row whose file a send in progress names stays in the sweep",
    "refuse-erasing": "a send refuses a file whose state is not ready, such as erasing",
    "erase-twice":    "bytes go only after a check that began when the file was erasing",
    "erase-durable":  "that check begins with a read of the state by a quorum that returns erasing",
    "erase-lease":    "the owner has its lease when that read has returned, and whenever it answers the sweep",
    "fence":          "before that check the log has a row of the owner's epoch, so that no takeover adopts a late row of an earlier epoch",
    "refuse-fence":   "a send that is repeated is refused only when the log has a row of the owner's epoch",
    "incoming-first": "erasing removes the bytes in incoming/ before those in files/",
    "bytes-first":    "the state becomes erased after the bytes are gone",
    "write-window":   "in a bucket an inspection writes only for a while after it began: the storage refuses what arrives later",
    "erase-again":    "erasing in a bucket writes a work row first, and the sweep of its day removes the bytes again",
    "state-rises":    "a state is written with itself as timestamp, and the highest timestamp wins",
}

PENDING, SCANNING, READY, ERASING, ERASED = 1, 2, 3, 4, 6
WINDOW = 3                     # the entries and the changes that may be uncertain at once
DAY, SHARDS = 50, 2            # a day of the sweep, in units of time; a write takes at most 8 of them
ORPHAN = 30                    # the sweep of a day begins so long after its end
COPY = 20                      # the time from the begin of an inspection in which a bucket takes what it writes; shorter than ORPHAN
LEASE = 20                     # the time that a file is erasing before the second check, see `World.wait`

# Rows of the logs. `claim`: everything up to there is settled. `origin` is the epoch that appended the row; settled again, it keeps that.
Entry = namedtuple("Entry", "id claim user files origin")
Change = namedtuple("Change", "id claim seq files origin day")     # `files`: what the entry names after the change

def reference(file): return ("refs", file)

class Owner:
    """The owner of the conversation under one epoch."""
    def __init__(self, world, epoch):
        self.world, self.sim, self.store, self.broken, self.epoch = world, world.sim, world.store, world.broken, epoch
        self.lease_end, self.paused_until, self.cut_off, self.serving, self.fenced = 1e9, 0.0, False, False, False
        self.skew = world.sim.rng.uniform(-4, 4)                               # Clocks differ; only the day of a work row depends on them.
        self.entries, self.head, self.next_seq, self.stored, self.ids = {}, 0, 1, set(), {}
        self.changes, self.change_head, self.next_rev, self.stored_revs, self.change_ids = {}, 0, 1, set(), {}
        self.applied, self.settled_rev, self.applying = 0, 0, False
        self.now, self.newest = {}, {}                                         # seq -> the files it names: applied, appended
        self.asked, self.naming, self.erasing_since = set(), Counter(), {}     # the ids of sends in progress, and the files that they name
        self.sim.spawn(self.load(), self)
    def leased(self): return self.sim.now < self.lease_end
    def work(self, files, day=None):
        """The work rows of files, for the sweep of the day that this gateway's clock shows."""
        if day is None: day = self.world.day(self.skew)
        return {("work", day, shard): {f: (0, True) for f in files if f % SHARDS == shard} for shard in sorted({f % SHARDS for f in files})}
    def durable(self, rows, work=(), day=None):
        """Writes rows until all are stored. -> whether the owner has its lease"""
        left = dict(rows)
        while self.leased():
            todo = self.work(work, day)                                        # [work-day] The day is that of the attempt.
            unknown = yield self.store.write({**left, **todo}, self.cut_off)
            if not unknown: return self.leased()
            left = {p: c for p, c in left.items() if p in unknown}
            work = [f for p, files in todo.items() if p in unknown for f in files]
        return False
    # -- takeover
    def load(self):
        while self.leased():
            cells = yield self.store.read("entries"); change_cells = yield self.store.read("changes")
            marks = yield self.store.read("marks")
            if None not in (cells, change_cells, marks): break
        else: return
        rows, known = adopt(cells, marks.get("entries", (0,))[0]); changes, known_rev = adopt(change_cells, marks.get("changes", (0,))[0])
        unsettled, settle = range(known + 1, len(rows) + 1), {}
        for seq in unsettled:
            settle.setdefault("entries", {})[(seq, self.epoch)] = (0, rows[seq]._replace(claim=known))
            if self.broken != "refs-settle": self.add_references(settle, seq, rows[seq])
        for rev in range(known_rev + 1, len(changes) + 1):
            settle.setdefault("changes", {})[(rev, self.epoch)] = (0, changes[rev]._replace(claim=known_rev))
        if not (yield from self.durable(settle)): return
        self.entries, self.changes, self.fenced = rows, changes, bool(unsettled)
        for seq in rows: self.commit()
        self.change_head, self.next_seq, self.next_rev = len(changes), self.head + 1, len(changes) + 1
        self.change_ids = {change.id: rev for rev, change in changes.items()}
        for rev, change in changes.items(): self.newest[change.seq] = change.files
        for rev in range(1, known_rev + 1): self.now[changes[rev].seq] = changes[rev].files
        self.applied = self.settled_rev = known_rev
        if self.broken == "off-settle": self.now.update(self.newest); self.applied = self.settled_rev = self.change_head
        yield from self.rounds()
        self.serving = self.leased() and self.applied == self.change_head
    def retire(self):
        """An orderly stop: its mark says that everything is settled, so the next owner has nothing to settle."""
        self.serving = False
        while self.leased() and (self.asked or self.head + 1 < self.next_seq or self.applied + 1 < self.next_rev): yield 1
        if self.leased() and (yield from self.durable({"marks": {"entries": (self.head, ""), "changes": (self.applied, "")}})):
            self.lease_end = self.sim.now
    def add_references(self, rows, seq, entry):
        for f in entry.files: rows.setdefault(reference(f), {})[seq] = (0, True)
    def fence(self):
        """Settles the newest entry again under this epoch, unless the log has a row of this epoch. From then on no takeover adopts a row that a
        previous owner appended, however late it lands: its epoch is lower than the one before it ([prefix]). -> whether the owner has its lease"""
        if not self.fenced and self.broken != "fence":
            seq = self.head
            if (yield from self.durable({"entries": {(seq, self.epoch): (0, self.entries[seq]._replace(claim=seq))}})): self.fenced = True
        return self.leased()
    # -- entries
    def commit(self):
        self.head += 1; entry = self.entries[self.head]
        self.ids[entry.id] = self.head; self.now[self.head] = self.newest[self.head] = entry.files
        if entry.origin == self.epoch: self.fenced = True
    def send(self, user, client_id, files, again):
        """-> the seq | "refused" | None = outcome unknown"""
        if not self.serving or not self.leased(): return None
        if client_id in self.ids: return self.ids[client_id]
        if client_id in self.asked: return None
        self.asked.add(client_id); self.naming.update(files if self.broken != "naming" else ())
        result = yield from self.place(user, client_id, files, again)
        self.asked.discard(client_id); self.naming.subtract(files if self.broken != "naming" else ())
        return result
    def place(self, user, client_id, files, again):
        for f in files:
            facts = yield from self.world.read_facts(f)
            if facts is None or not self.leased(): return None
            uploader, state = facts
            if (state != READY or uploader != user) and not (state == ERASING and self.broken == "refuse-erasing"):
                if again and self.broken != "refuse-fence" and not (yield from self.fence()): return None
                return "refused"
        if self.next_seq - 1 - self.head >= WINDOW: return None
        seq = self.next_seq; self.next_seq += 1
        entry = self.entries[seq] = Entry(client_id, self.head, user, files, self.epoch)
        self.world.trouble(self)
        rows, references = {"entries": {(seq, self.epoch): (0, entry)}}, {}
        self.add_references(references, seq, entry)
        if self.broken == "refs-append": self.sim.at(self.sim.rng.uniform(0, 5), lambda: self.sim.spawn(self.durable(references), self))
        else: rows.update(references)
        if not (yield from self.durable(rows)): return None
        self.stored.add(seq)
        while self.head + 1 in self.stored: self.commit()
        while seq > self.head and self.leased(): yield 1
        return seq if seq <= self.head and self.leased() else None
    # -- changes
    def change(self, change_id, seq, files):
        """Deletes the message (it names no file then) or edits it. -> "ok" | "refused" | None = outcome unknown"""
        if not self.serving or not self.leased(): return None
        if seq > self.head: return "refused"
        rev = self.change_ids.get(change_id)
        if rev is None:
            if not set(files) <= set(self.newest[seq] if self.broken != "edit-adds" else self.entries[seq].files): return "refused"
            if self.next_rev - 1 - self.settled_rev >= WINDOW: return None
            rev = self.next_rev; self.next_rev += 1
            change = Change(change_id, self.settled_rev, seq, files, self.epoch, self.world.day(self.skew))
            self.changes[rev] = change; self.change_ids[change_id] = rev; self.newest[seq] = files
            self.world.trouble(self)
            if not (yield from self.durable({"changes": {(rev, self.epoch): (0, change)}})): return None
            self.stored_revs.add(rev)
            while self.change_head + 1 in self.stored_revs: self.change_head += 1
            while self.change_head < rev and self.leased(): yield 1
        self.sim.spawn(self.rounds(), self)
        while self.applied < rev and self.leased(): yield 1
        self.world.trouble(self)
        return "ok" if self.leased() else None
    def rounds(self):
        """Stores the effects of committed changes, one round at a time."""
        if self.applying: return
        self.applying = True
        while self.applied < self.change_head and self.leased():
            revs = range(self.applied + 1, self.change_head + 1)
            rows, work, days = {}, set(), set()
            for rev in revs:
                change = self.changes[rev]; days.add(change.day)
                for f in self.entries[change.seq].files:
                    if f not in change.files: rows.setdefault(reference(f), {})[change.seq] = (rev, False); work.add(f)
            self.world.trouble(self)
            writing = self.durable(rows, sorted(work) if self.broken != "off-work" else (), min(days) if self.broken == "work-day" else None)
            if self.broken == "refs-off": self.sim.at(self.sim.rng.uniform(0, 20), lambda w=writing: self.sim.spawn(w, self))
            elif not (yield from writing): break
            self.world.trouble(self)
            for rev in revs: self.now[self.changes[rev].seq] = self.changes[rev].files
            self.applied = self.settled_rev = revs[-1]
            for f in sorted(work): self.sim.at(self.sim.rng.choice((0, 1, 5, 30)), lambda f=f: self.sim.spawn(self.erase(f), self))
        self.applying = False
    # -- erasing
    def attached(self, f):
        """-> whether the file is attached, by its references checked against the log alone; None = not known now"""
        if self.naming[f]: return None
        rows = yield self.store.read(reference(f))
        if rows is None or not self.leased() and self.broken != "erase-lease": return None
        named = self.now if self.broken != "applied" else self.newest
        return any(on and (self.broken == "refs-log" or seq <= self.head and f in named[seq]) for seq, (_, on) in rows.items())
    def erase(self, f):
        """Does the next step of erasing a file, if it is not attached. -> whether its work row is done: it is attached, erased, or has a newer work row"""
        held = lambda: self.leased() or self.broken == "erase-lease"
        if not self.serving or not held(): return False
        facts = yield from self.world.read_facts(f)
        if facts is None or not held(): return False
        if self.naming[f] and self.broken == "busy-later": return True
        state = facts[1]
        if not state: return True                                              # The upload was never answered. It has a newer work row if it goes on.
        if state < ERASING:
            attached = yield from self.attached(f)
            if attached is not False: return attached is True and held()
            self.world.trouble(self)
            rows, stored = {("file", f): {"state": (ERASING, "")}}, False
            if self.broken == "erase-durable": yield self.store.write({**rows, **self.work([f])}, self.cut_off)
            else: stored = yield from self.durable(rows, [f])
            if not held(): return False
            self.erasing_since.setdefault(f, self.sim.now)
            self.sim.at(self.world.wait + 0.01, lambda: self.sim.spawn(self.erase(f) if self.broken != "erase-durable" else self.erase_bytes(f), self))
            return stored
        if state == ERASED:
            if self.world.bucket and self.broken != "erase-again": yield from self.world.remove_bytes(f)
            return True
        if self.sim.now < self.erasing_since.setdefault(f, self.sim.now) + self.world.wait: return False
        return (yield from self.erase_bytes(f))
    def erase_bytes(self, f):
        """The second step: checks again, and erases the bytes. -> whether the work row is done"""
        if self.broken != "erase-twice":
            if not self.fenced and not (yield from self.fence()): return False
            attached = yield from self.attached(f)
            if attached is not False: return attached is True and (self.leased() or self.broken == "erase-lease")
        self.world.trouble(self)
        # The lease may end from here on: later sends refuse the file, because a quorum has the state erasing.
        erased = {("file", f): {"state": (ERASED, "")}}
        if self.broken == "bytes-first" and not (yield from self.durable(erased)): return False
        if self.world.bucket and self.broken != "erase-again" and not (yield from self.durable({}, [f])): return False
        yield self.store.hop()
        yield from self.world.remove_bytes(f)
        return self.broken == "bytes-first" or (yield from self.durable(erased))
    def download(self, f):
        """-> whether there is a message that names the file, for a signed URL; None = not known"""
        if not self.serving or not self.leased(): return None
        rows = yield self.store.read(reference(f))
        if rows is None or not self.leased(): return None
        return any(on and seq <= self.head and f in self.now[seq] for seq, (_, on) in rows.items())

class Upload:
    """One upload, in some gateway. It may pause or crash, also between any two steps."""
    def __init__(self, world, user, f):
        rng = world.sim.rng; fate = rng.random()
        self.world, self.sim, self.user, self.f, self.paused_until, self.skew = world, world.sim, user, f, 0.0, rng.uniform(-4, 4)
        self.slow = rng.choice((1, 3, 10, rng.uniform(40, 95)))
        if fate < 0.15: world.sim.at(rng.uniform(0, 2 * self.slow + 20), lambda: setattr(self, "paused_until", 1e9))
        elif fate < 0.3: world.sim.at(rng.uniform(0, self.slow + 20), lambda: setattr(self, "paused_until", world.sim.now + rng.uniform(5, 90)))
        self.result = world.sim.spawn(self.run(), self)
    def stored(self, rows, work=False):
        """Writes rows until they are stored. A work row is of the day of the attempt."""
        unknown = True
        while unknown:
            unknown = yield self.world.store.write({**rows, **(Owner.work(self, [self.f]) if work else {})})
    def run(self):
        """-> whether the file became ready"""
        world, f, late = self.world, self.f, self.world.broken == "upload-work"
        # If the file was created after its rows, the sweep could erase it first, and its bytes would come afterwards, with no work row left.
        if world.broken != "incoming-once": world.incoming[f] = self.sim.now
        yield world.store.hop()
        yield from self.stored({("file", f): {"facts": (0, self.user), "state": (PENDING, "")}}, not late)
        if world.broken == "incoming-once": world.incoming[f] = self.sim.now
        if late: self.sim.at(3, lambda: self.sim.spawn(self.stored({}, True), self))
        yield self.slow
        world.store.write({("file", f): {"state": (SCANNING, "")}})
        yield world.store.hop()
        if world.bucket:
            inspections = [self.sim.spawn(self.inspect(), self) for _ in range(world.other.choice((1, 1, 2)))]
            for inspection in inspections:
                if not (yield inspection): return False
        elif world.incoming.pop(f, None) is None: return False                 # The move renames: without its source it does nothing.
        else: world.files.add(f)
        yield self.sim.rng.choice((0.5, 2, 2, 10))
        yield from self.stored({("file", f): {"state": (READY, "")}})
        return True

    def inspect(self):
        """Reads the file in incoming/ of a bucket, and writes it to files/. Of a picture it writes what it has in memory. -> whether that is stored"""
        world, f, rng = self.world, self.f, self.world.other
        if f not in world.incoming and f not in world.files: return False
        begun, stored = self.sim.now, Future()
        yield rng.choice((0.5, 1, 5))
        def land():
            in_time = self.sim.now <= begun + COPY or world.broken == "write-window"
            if in_time: world.files.add(f)
            stored.set(in_time)
        # A connection may hold what it was given for long, also when the gateway is gone.
        self.sim.at(rng.choice((0.5, 1, 2, 5, rng.uniform(5, 30), rng.uniform(5, 300))), land)
        done = yield world.timed(stored, 8)
        if done: world.incoming.pop(f, None)
        return done

class World:
    def __init__(self, seed, broken):
        self.sim, self.broken, self.findings, self.active = Simulation(seed), broken, [], True
        rng = self.sim.rng
        # The second check is safe at any time, because of the rules `naming`, `erase-durable`, `erase-lease` and `fence`. The wait adds nothing.
        self.wait = rng.choice((0, 3, LEASE))
        self.store, self.troubles, self.storm, self.slow = Store(self.sim, broken), rng.choice((0.02, 0.05, 0.1)), rng.random() < 0.25, rng.random() < 0.5
        self.lonely = rng.random() < 0.4                                       # One user, who often gives up, and much trouble.
        if self.lonely: self.troubles, self.storm = 0.25, False
        self.incoming, self.files, self.gone = {}, set(), set()                # file -> since when, files with bytes, files whose bytes were removed
        self.uploader, self.states, self.altered = [], {}, []
        self.bucket, self.other = seed % 3 == 2, Random(seed)                  # Its own numbers, so that directories are not affected.
        self.sent = {}                                                         # client id -> its files
        self.acknowledged = {}                                                 # client id -> its seq
        self.required = {}                                                     # client id -> the files that the message has to have
        self.dropped = {}                                                      # client id -> the files that an acknowledged change took from it
        self.refused, self.erased, self.finished, self.done = set(), 0, set(), set()
        self.begin(range(1 if self.lonely else 3), late=seed % 4 == 0)
        self.owners = [Owner(self, 3)]
        for user in range(1 if self.lonely else 3): self.sim.spawn(self.client(user))
        for steps in (self.ring(), self.reader(), self.sweep(), self.asker()): self.sim.spawn(steps)
    def found(self, what): self.findings.append(f"at {self.sim.now:.1f} {what}")
    def day(self, skew): return int((self.sim.now + skew + 10) // DAY)
    def pick(self): return self.sim.rng.choice(self.owners[-3:]) if self.active and self.sim.rng.random() < 0.25 else self.owners[-1]
    def timed(self, future, limit):
        """-> a future of the result, or of None after a time"""
        timed = Future(); future.waiters.append(lambda: timed.set(future.value)); self.sim.at(limit, lambda: timed.set(None))
        return timed
    def begin(self, users, late):
        """Begins with what two owners left: old messages, whose uploads were swept long ago, and perhaps the send of an owner that crashed, which lands late."""
        rows = {"entries": {(1, 1): (0, Entry("created", 0, None, (), 1))}, "marks": {"entries": (5, "")}}
        for seq in range(2, 7):
            user = seq % len(users); client_id = f"{user}.old.{seq}"
            files = (len(self.uploader),) if self.sim.rng.random() < 0.5 else (len(self.uploader), len(self.uploader) + 1)
            if seq == 6 and not late: break
            for f in files:
                self.uploader.append(user); self.files.add(f)
                rows[("file", f)] = {"facts": (0, user), "state": (READY, "")}
            row = {"entries": {(seq, 1 if seq < 6 else 2): (0, Entry(client_id, seq - 1, user, files, 1 if seq < 6 else 2))}}
            for f in files: row[reference(f)] = {seq: (0, True)}
            self.sent[client_id] = files
            if seq < 6:
                self.acknowledged[client_id], self.required[client_id], self.dropped[client_id] = seq, set(files), set()
                for partition, cells in row.items(): rows.setdefault(partition, {}).update(cells)
                continue
            rows.update(Owner.work(self, files, 0))
            for partition, cells in row.items(): self.store.write_one(partition, cells, cut_off=LATE)
            if self.sim.rng.random() < 0.6: self.sim.at(self.sim.rng.uniform(5, 80), lambda: self.sim.spawn(self.post(0, client_id, files, [], True)))
        for replica in self.store.replicas: replica.update({partition: dict(cells) for partition, cells in rows.items()})
    # -- files
    def remove_bytes(self, f):
        if self.broken != "incoming-first": self.incoming.pop(f, None); yield self.store.hop()
        self.files.discard(f)
        if self.broken == "incoming-first": yield self.store.hop(); self.incoming.pop(f, None)
        self.gone.add(f); self.erased += 1
        for client_id, files in self.required.items():
            if f in files: self.found(f"bytes of file {f} are erased, which the acknowledged message {client_id} names")
    def read_facts(self, f):
        """-> (the uploader, the state) by a quorum; the state is 0 if there are no facts; None after a time-out"""
        least = self.states.get(f, 0)
        cells = yield self.store.read(("file", f))
        if cells is None: return None
        state = cells.get("state", (0,))[0]
        if state < least: self.found(f"the state of file {f} fell from {least} to {state}")
        self.states[f] = max(state, self.states.get(f, 0))
        return cells.get("facts", (0, None))[1], state
    # -- ownership
    def depose(self, owner):
        """Ends the owner's lease soon, mostly while it is paused, crashed or cut off."""
        rng = self.sim.rng; fate = rng.random()
        if fate < 0.3: owner.paused_until = self.sim.now + rng.uniform(5, 80)
        elif fate < 0.5: owner.paused_until = 1e9                              # a crash
        elif fate < 0.9: owner.cut_off = LATE if self.lonely and rng.random() < 0.6 else True
        owner.lease_end = self.sim.now + rng.uniform(0, rng.choice((5, 12, 12, 50)))
    def trouble(self, owner):
        """Perhaps ends the owner between two of its steps."""
        rng = self.sim.rng
        if not self.active or owner.lease_end != 1e9 or rng.random() >= self.troubles: return
        if rng.random() < 0.3 and owner.serving: self.sim.spawn(owner.retire(), owner)
        else: self.depose(owner)
    def appoint(self):
        self.owners[-1].lease_end = min(self.owners[-1].lease_end, self.sim.now)
        self.owners.append(Owner(self, self.owners[-1].epoch + 1))
    def ring(self):
        rng = self.sim.rng; soon = 0
        while self.active:
            owner = self.owners[-1]
            if not owner.leased():
                if rng.random() < (0.25 if self.lonely else 0.15): yield rng.uniform(50, 160)  # Nobody asks for the conversation: nobody takes it over.
                if self.active: self.appoint()
                soon = self.sim.now + (rng.uniform(4, 30) if self.storm else rng.uniform(5, 150))
            elif self.sim.now > soon and owner.lease_end == 1e9 and owner.serving:
                if rng.random() < (0.6 if self.lonely else 0.2): self.sim.spawn(owner.retire(), owner)
                else: self.depose(owner)
            elif self.sim.now > soon + 40 and owner.lease_end == 1e9: self.depose(owner)
            if self.slow and rng.random() < 0.03:
                self.store.slow_until, self.store.stuck = self.sim.now + rng.uniform(20, 60), rng.choice((None, "entries", "changes"))
            yield rng.uniform(0.1, 3)
    # -- the sweep
    def sweep(self):
        day, rng = 0, self.sim.rng
        while True:
            while (day + 1) * DAY + ORPHAN <= self.sim.now + 10 and all((day, shard) in self.finished for shard in range(SHARDS)): day += 1
            due = [(d, shard) for d in range(day, int((self.sim.now + 10 - ORPHAN) // DAY)) for shard in range(SHARDS)]
            for swept in [self.sim.spawn(self.sweep_shard(d, shard)) for d, shard in due if (d, shard) not in self.finished]: yield swept
            if self.broken != "incoming-age":
                for f in [f for f, since in self.incoming.items() if since < self.sim.now - 2 * DAY]: del self.incoming[f]
            yield rng.choice((2, 10, 20))
    def sweep_shard(self, day, shard):
        rows = yield self.store.read(("work", day, shard))
        if rows is None: return
        asked = {}
        for f in sorted(rows):
            if (day, f) in self.done: continue
            if self.broken == "sweep-owner": asked[f] = self.sim.spawn(self.erase_alone(f))
            else: owner = self.pick(); asked[f] = self.timed(self.sim.spawn(owner.erase(f), owner), 60)
        for f, answer in asked.items():
            if (yield answer) is True: self.done.add((day, f))
        if all((day, f) in self.done for f in rows): self.finished.add((day, shard))   # the shard's mark
    def erase_alone(self, f):
        """[sweep-owner] broken: the sweep reads the references and the log, and erases in two steps."""
        for _ in range(2):
            facts = yield from self.read_facts(f); references = yield self.store.read(reference(f))
            cells = yield self.store.read("entries"); change_cells = yield self.store.read("changes")
            if None in (facts, references, cells, change_cells): return False
            now = {seq: entry.files for seq, entry in adopt(cells)[0].items()}
            now.update({change.seq: change.files for change in adopt(change_cells)[0].values()})
            if any(on and f in now.get(seq, ()) for seq, (_, on) in references.items()) or facts[1] in (0, ERASED): return True
            if (yield self.store.write({("file", f): {"state": (ERASING, "")}})): return False
            yield self.wait
        yield from self.remove_bytes(f)
        yield self.store.write({("file", f): {"state": (ERASED, "")}})
        return True
    def asker(self):
        """Asks owners to erase files which were sent, as a second sweep, or one of a later day, may do at any time."""
        rng = self.sim.rng
        while self.active:
            yield rng.uniform(1, 10)
            if not self.sent: continue
            recent = self.altered[-3:] if self.altered and rng.random() < 0.4 else list(self.sent)[-2 if self.lonely else -4:]
            f = rng.choice(self.sent[rng.choice(recent)]); owner = self.pick()
            self.sim.spawn(owner.erase(f), owner)
    # -- users
    def upload(self, user, ready):
        f = len(self.uploader); self.uploader.append(user)
        result = Upload(self, user, f).result
        if self.sim.rng.random() < 0.1: ready.append(f)                        # sent too early
        else: result.waiters.append(lambda: ready.append(f) if result.value else None)
    def client(self, user):
        rng, ready, number = self.sim.rng, [], 0
        mine = [client_id for client_id in self.acknowledged if client_id.startswith(f"{user}.")]
        while self.active:
            if len(ready) < 4 or rng.random() < 0.3: self.upload(user, ready)
            yield rng.choice((1, 5, 15, rng.uniform(5, 40), rng.uniform(0, 200) if self.lonely else 0))
            number += 1
            if ready and rng.random() < 0.8:
                # Many send when the sweep asks for the file.
                if rng.random() < 0.3: yield max(0, (self.day(0) + 1) * DAY - 10 + ORPHAN - self.sim.now + rng.uniform(-15, 20)) % DAY
                files = {ready[-1], rng.choice(ready[-4:])} if rng.random() < 0.5 else {rng.choice(ready[-6:])}
                if self.active: yield from self.post(user, f"{user}.{number}", tuple(sorted(files)), mine)
            if mine and rng.random() < 0.5:
                yield rng.choice((0, 1, rng.uniform(0, 20)))
                if self.active: yield from self.alter(rng.choice(mine[-3:] if rng.random() < 0.5 else mine), f"{user}.{number}")
    def post(self, user, client_id, files, mine, again=False):
        rng = self.sim.rng
        self.sent[client_id] = files
        while self.active or rng.random() < 0.9:
            owner = self.pick()
            result = yield self.timed(self.sim.spawn(owner.send(user, client_id, files, again), owner), 20)
            again = True
            if result == "refused": self.refused.add(client_id); return
            if result is not None:
                self.acknowledged[client_id] = result; self.required[client_id] = set(files); self.dropped[client_id] = set(); mine.append(client_id)
                for f in files:
                    if f in self.gone: self.found(f"the message {client_id} is acknowledged, and the bytes of its file {f} are gone")
                return
            yield rng.uniform(0.5, 40 if self.lonely else 4)
            if rng.random() < (0.6 if self.lonely else 0.03): return        # The user gives up.
    def alter(self, client_id, change_id):
        """Deletes a message, or edits it: it keeps some of its files. An edit may come from a device that does not know the last one."""
        rng, files = self.sim.rng, self.sent[client_id]
        keep = tuple(f for f in files if rng.random() < 0.5) if rng.random() < 0.5 else ()
        drop = set(files) - set(keep)
        self.required[client_id] -= drop; self.altered.append(client_id)
        while self.active or rng.random() < 0.9:
            owner = self.pick()
            result = yield self.timed(self.sim.spawn(owner.change(change_id, self.acknowledged[client_id], keep), owner), 20)
            if result == "ok": self.dropped[client_id] |= drop
            if result is not None: return
            yield rng.uniform(0.5, 40 if self.lonely else 4)
            if rng.random() < (0.6 if self.lonely else 0.03): return
    def reader(self):
        rng = self.sim.rng
        while True:
            yield rng.uniform(2, 15)
            if not self.acknowledged: continue
            client_id = rng.choice(list(self.acknowledged)); f = rng.choice(self.sent[client_id])
            erased, dropped = f in self.gone, f in self.dropped[client_id]
            owner = self.pick(); url = yield self.timed(self.sim.spawn(owner.download(f), owner), 20)
            if url is None: continue
            if url: yield self.store.hop()
            served = url and f in self.files
            alone = not any(f in files for other, files in self.sent.items() if other != client_id)
            if served and (erased or dropped and alone): self.found(f"file {f} is served, and was erased, or no message names it")
            if not served and f in self.required[client_id]: self.found(f"file {f} of the message {client_id} is not served")
    # -- the end
    def finish(self):
        self.sim.run(450); self.active = False; self.sim.run(490)
        self.appoint(); owner = self.owners[-1]
        for _ in range(30):
            self.sim.run(self.sim.now + 50)
            if owner.serving and self.sim.now > 600 and self.is_swept() or self.findings: break
        if self.findings: return self.findings
        if not owner.serving: self.found("the last owner never serves")
        elif not self.is_swept(): self.found("the sweep never ends")
        else: self.check(owner)
        return self.findings
    def is_swept(self):
        return all(partition[1:] in self.finished for replica in self.store.replicas for partition in replica if partition[0] == "work")
    def check(self, owner):
        for client_id, seq in self.acknowledged.items():
            if owner.ids.get(client_id) != seq: self.found(f"{client_id} is acknowledged at {seq}, and is at {owner.ids.get(client_id)}"); continue
            if not self.required[client_id] <= set(owner.now[seq]): self.found(f"{client_id} lost a file that nobody took from it")
            if self.dropped[client_id] & set(owner.now[seq]): self.found(f"{client_id} names a file, which an acknowledged change took from it")
        for client_id in self.refused & set(owner.ids): self.found(f"{client_id} was refused, and is in the log at {owner.ids[client_id]}")
        named = {f for files in owner.now.values() for f in files}
        for f in range(len(self.uploader)):
            if f in named and f not in self.files: self.found(f"an entry names file {f}, which has no bytes")
            if f not in named and f in self.files | self.incoming.keys(): self.found(f"no entry names file {f}, which has bytes")
            states = [r.get(("file", f), {}).get("state", (0,))[0] for r in self.store.replicas]
            if f in named and not READY <= max(states) <= ERASING: self.found(f"an entry names file {f}, whose state is {max(states)}")

def main(args):
    if "--rules" in args: return print("\n".join(f"{rule:14} {text}" for rule, text in RULES.items()))
    broken = args[args.index("--break") + 1] if "--break" in args else None
    if broken and broken not in RULES: sys.exit(f"no such rule: {broken}; one of {' '.join(RULES)}")
    seeds = int(args[0]) if args and args[0].isdigit() else 200
    first = int(args[args.index("--from") + 1]) if "--from" in args else 0
    messages = uploads = erased = refused = owners = 0
    for seed in range(first, first + seeds):
        world = World(seed, broken); findings = world.finish()
        messages += len(world.acknowledged); uploads += len(world.uploader); erased += world.erased; refused += len(world.refused); owners += len(world.owners)
        if findings:
            print(f"seed {seed} fails, rule broken: {broken} (after {seed - first + 1} seeds)\n  " + "\n  ".join(findings[:4]))
            sys.exit(0 if broken else 1)
    print(f"{seeds} seeds passed, {messages} acknowledged messages, {refused} refused, {uploads} uploads, {erased} files erased, {owners} owners; broken rule: {broken}")
    sys.exit(1 if broken else 0)

if __name__ == "__main__":
    main(sys.argv[1:])
