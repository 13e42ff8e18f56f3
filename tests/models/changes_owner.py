"""The owner of model_changes.py: its two logs, its takeover, and the rows that a change writes."""
from changes_store import Change, Entry, State, best_rows, content, content_of, items_of, react, writers

WINDOW, BLOCK, DELETED_KEPT, RESET, PAGE, BUCKET = 4, 4, 4, 6, 3, 8

def changes_of(cells): return [cell for cell in cells.items() if cell[0][0] == "c"]

def partition(rev): return ("c", rev // BUCKET)

def membership(kind): return kind if isinstance(kind, tuple) else None

class Messages:
    """The log of messages with membership entries, as in model.py, and the faces of inbox rows."""
    def message_row(self, seq, claim, entry):
        return {("m", seq, self.epoch): (0, (entry.client_id, claim, *entry[1:3], entry.origin)), ("mc", seq, self.epoch): (0, entry.body)}
    def sends_row(self, client_id, seq): return {("s", client_id): {(self.epoch,): (0, seq)}}
    def adopt_messages(self, cells):
        """Finds the valid log and writes what is not certain again. -> whether it has the lease"""
        best = best_rows(cells, "m"); known = max([meta[1] for _, meta in best.values()], default=0)
        head, ids = 0, set()
        while self.extends(cells, "m", best, head + 1, known, lambda meta: (meta[0], meta[4])) and best[head + 1][1][0] not in ids:
            head += 1; ids.add(best[head][1][0])
        for s in range(1, head + 1):
            epoch, (client_id, _, kind, texts, origin) = best[s]
            self.entries[s] = Entry(client_id, kind, texts, content(cells, "mc", s, epoch), origin)
        rows = {}
        for s in range(known + 1, head + 1):
            rows.setdefault("m", {}).update(self.message_row(s, known, self.entries[s])); rows.update(self.sends_row(self.entries[s].client_id, s))
        if not (yield from self.durable(rows)): return False
        self.known_ids = {e.client_id: s for s, e in self.entries.items()}
        self.settled_seq = known
        while self.head < head: self.commit()
        self.next_seq = head + 1
        return True
    def commit(self):
        self.head += 1; what = membership(self.entries[self.head].kind)
        if what and what[0] == "join": self.members.add(what[1])
        elif what: self.members.discard(what[1])
        if what and self.head > self.settled_seq: self.changing[what[1]] = self.head
        self.note_settled()
    def note_settled(self):
        while self.settled_seq < self.head and self.settled_seq + 1 not in self.changing.values(): self.settled_seq += 1
    def membership_row(self, seq):
        """The cells that a membership entry writes to its user's inbox row."""
        what, user = self.entries[seq].kind; texts = self.entries[seq].texts
        row = {("in",): (seq, what == "join")}
        if what == "join":
            if self.broken != "join-texts": row[("read",)] = (seq, (seq, texts))
            if self.broken != "join-rev": row[("rev",)] = (self.applied, self.applied)
        elif self.broken != "leave-face": row.update(self.face(seq, State()))
        return row
    def settle_membership(self, seqs):
        """Stores the effects of membership entries: after their commit, before they are acknowledged."""
        rows = {}
        for seq in seqs: rows.setdefault(("i", self.entries[seq].kind[1]), {}).update(self.membership_row(seq))
        if not (yield from self.durable(rows)): return False
        for seq in seqs:
            user = self.entries[seq].kind[1]
            if self.changing.get(user) == seq: del self.changing[user]
        self.note_settled()
        return True
    def send(self, user, client_id, kind):
        """-> the seq | -1 = refused | None = outcome unknown"""
        if not self.serving or self.retiring or not self.leased(): return None
        what = membership(kind)
        if client_id in self.known_ids: return self.known_ids[client_id] if self.known_ids[client_id] <= (self.settled_seq if what else self.head) else None
        if (user in self.members) == bool(what and what[0] == "join"): return -1
        if client_id in self.in_flight.values() or len(self.in_flight) >= WINDOW or what and (user in self.changing or user in self.asked): return None
        seq = self.next_seq; self.next_seq += 1; self.in_flight[seq] = client_id
        if what: self.asked.add(user)
        texts = self.entries[seq - 1].texts if seq > 1 else 0
        entry = self.entries[seq] = Entry(client_id, kind, texts + (kind == "text"), f"<{client_id}>" if kind == "text" else None, self.epoch)
        if not (yield from self.durable({"m": self.message_row(seq, self.settled_seq, entry), **self.sends_row(client_id, seq)})): return None
        self.stored.add(seq)
        while self.head + 1 in self.stored:
            self.commit(); self.known_ids[self.in_flight.pop(self.head)] = self.head
            self.sim.at(self.sim.rng.choice([0.5, 3, 20]), lambda s=self.head, face=self.face(self.head, State()), to=set(self.members): self.sim.spawn(self.flush(s, face, to), self))
        while seq > self.head and self.leased(): yield 0.5
        if what and seq <= self.head:
            self.asked.discard(user)
            if not (yield from self.settle_membership([seq])): return None
        return seq if seq <= self.head and self.leased() else None
    def face(self, seq, state):
        entry = self.entries[seq]; version = state.version()
        text = "(deleted)" if state.is_deleted() else state.content[1][1] if state.content[1] else entry.body
        return {("face",): ((seq, version if self.broken != "face-k" else 0), (seq, version, text, entry.texts))}
    def flush(self, seq, face, users):
        """Writes an inbox row behind, with the text of the commit. A correction has a higher version and wins, whenever it lands."""
        if self.leased() and not self.world.channel and seq == self.head: yield from self.durable({("i", u): face for u in users})
    def repair(self):
        """Writes faces and revs again, and publishes the newest change again: the previous owner may not have done it."""
        while self.leased() and self.head and not self.world.channel:
            head = yield from self.know_newest()
            if head is None: return
            face = self.face(head, self.applied_states[head])
            if (yield from self.durable({("i", u): {**face, ("rev",): (self.applied, self.applied)} for u in self.members})): break
        if self.leased() and self.applied: self.event(self.applied - 1, self.applied)
    def read(self, user, seq):
        if not self.serving or not self.leased() or seq > self.head or user not in self.members: return None
        texts = self.entries[seq if self.broken != "read-texts" else self.head].texts
        return (yield from self.durable({("i", user): {("read",): (seq, (seq, texts))}}))

class Changes:
    """The log of changes: appending, committing, adopting."""
    def change_row(self, rev, change, body, settle_end=0):
        epoch = 0 if self.broken == "epoch" else self.epoch
        return {("c", rev, epoch): (0, (self.settled_rev, change, settle_end)), ("cc", rev, epoch): (0, body)}
    def served(self, cells):
        """Without the rows of an owner whose settle is not whole: it never served anything."""
        settles = {(epoch, settled, end) for (column, *_, epoch), (_, (settled, _, end)) in changes_of(cells) if end}
        never = {epoch for epoch, settled, end in settles if any(("c", rev, epoch) not in cells for rev in range(settled + 1, end + 1))}
        return cells if self.broken == "settle-whole" else {k: c for k, c in cells.items() if k[2] not in never}
    def adopt_changes(self, cells, kept):
        known = max([settled for _, (_, (settled, _, _)) in changes_of(cells)] + [kept.get(("settled",), (0,))[0]]); head = 0
        cells = self.served(cells); best = best_rows(cells, "c")
        while self.extends(cells, "c", best, head + 1, known, lambda meta: (meta[1].opid, meta[1].origin)): head += 1
        self.changes = {r: (best[r][1][1], content(cells, "cc", r, best[r][0])) for r in range(1, head + 1)}
        rows, self.settled_rev = {}, known
        for r in range(known + 1, head + 1): rows.setdefault(partition(r), {}).update(self.change_row(r, *self.changes[r], head))
        if self.broken != "settle" and not (yield from self.durable(rows)): return False
        if self.broken != "x-kept": self.deleted = kept.get(("x",), (0, ((), 0)))
        self.change_head, self.next_rev = head, head + 1
        self.applied = self.published = known if self.broken != "reapply" else head
        if self.broken == "reapply": self.settled_rev = head
        elif head > known and not (yield from self.apply_round(head)): return False
        return True
    def know(self, seq):
        """Reads an entry's state if it is cold. -> whether it has the lease"""
        while seq not in self.memory or self.broken == "cold" and self.sim.rng.random() < 0.3:
            cells = yield self.store.read("m", lambda k: k[0] in ("state", "reactions") and k[1] == seq)
            who = yield self.store.read("r", lambda k: k[0] == seq)
            if not self.leased(): return False
            if cells is None or who is None: continue
            state = State(cells.get(("state", seq), (0, None)), cells.get(("reactions", seq), (0, ())), {k[1:]: c for k, c in who.items()})
            if seq not in self.memory or self.broken == "cold": self.memory[seq] = state; self.applied_states[seq] = state.copy()
            break
        return self.leased()
    def know_newest(self):
        """-> the newest entry, whose state is known; None without the lease"""
        while True:
            head = self.head
            if head and not (yield from self.know(head)): return None
            if head == self.head: return head
    def judge(self, user, op, seqs, arg, base):
        """-> (seqs that change, None) | (_, the rev that did it already) | None = refused"""
        states = [self.memory[s] for s in seqs]
        if op == "delete":
            fresh = tuple(s for s in seqs if not self.memory[s].is_deleted())
            return fresh, None if fresh else max(state.content[0] for state in states)
        [state] = states
        if state.is_deleted() or op == "edit" and base is not None and state.content[0] > base: return None
        rev, on = state.reaction(arg[0], user) if op == "react" else (0, None)
        return seqs, rev if op == "react" and on == arg[1] else None
    def change_after(self, op, seqs, user, opid, arg, rev):
        """The change with the state after it, as the newest appended changes left it."""
        if op == "react": after = react(self.memory[seqs[0]].reactions[1], *arg)
        elif op == "edit": after = self.memory[seqs[0]].edits() + (rev,)
        else:
            _, (highest, count) = self.deleted
            highest = tuple(sorted(set(highest) | set(seqs))[-DELETED_KEPT:])
            self.deleted = (rev, (highest, count + len(seqs)))
            after = (tuple(self.memory[s].edits() for s in seqs), highest, count + len(seqs))
        return Change(op, seqs, user, opid, arg, after, self.epoch)
    def change(self, user, op, seqs, arg, opid, base):
        """-> ("ok", applied rev, its rev) | ("same", applied rev, the rev that did it already) | ("no",) | None = outcome unknown"""
        if not self.serving or self.retiring or not self.leased(): return None
        if any(s > self.head or self.entries[s].kind != "text" for s in seqs): return ("no",)
        for s in seqs:
            if not (yield from self.know(s)): return None
        if user not in self.members: return ("no",)
        verdict = self.judge(user, op, seqs, arg, base)
        if verdict is None: return ("no",)
        seqs, done = verdict
        if done is not None:
            while self.applied < done and self.leased(): yield 0.5
            return ("same", self.applied, done) if self.leased() else None
        if self.next_rev - 1 - self.settled_rev >= WINDOW * 2: return None
        rev = self.next_rev; self.next_rev += 1
        change, body = self.change_after(op, seqs, user, opid, arg, rev), f"<{opid}>" if op == "edit" else None
        self.changes[rev] = (change, body)
        for s in seqs: self.memory[s].apply(s, rev, change, body)
        if rev // BUCKET > self.bucket:
            if not (yield from self.durable({"k": {("bucket",): (rev // BUCKET, rev // BUCKET)}})): return None
            self.bucket = max(self.bucket, rev // BUCKET)
        if not (yield from self.durable({partition(rev): self.change_row(rev, change, body)})): return None
        self.stored_revs.add(rev)
        if self.broken == "order": self.change_head = max(self.change_head, rev)
        while self.change_head + 1 in self.stored_revs: self.change_head += 1
        while self.change_head < rev and self.leased(): yield 0.5
        return (yield from self.acknowledged(rev))
    def acknowledged(self, rev):
        """Waits for the effects of a committed change. -> its reply"""
        if not self.leased(): return None
        if self.broken == "cache-late": self.touch([rev])
        if self.broken == "effects": self.sim.at(self.sim.rng.uniform(0, 5), lambda: self.sim.spawn(self.rounds(), self)); return ("ok", rev, rev)
        self.sim.spawn(self.rounds(), self)
        while self.applied < rev and (self.leased() or self.broken == "ack-lease"): yield 0.5
        return ("ok", self.applied, rev) if self.leased() or self.broken == "ack-lease" else None

class Effects:
    """The rows that committed changes write, before they are acknowledged."""
    def touch(self, revs):
        for r in revs:
            for s in self.changes[r][0].seqs: self.touched[s // BLOCK] = max(r, self.touched.get(s // BLOCK, 0))
    def rounds(self):
        if self.applying and self.broken != "rounds": return
        self.applying = True
        while self.applied < self.change_head and self.leased():
            if not (yield from self.apply_round(self.change_head)): break
        self.applying = False
    def apply_round(self, upto):
        """Stores the effects of (applied, upto], merged: the last state of an entry wins. Then publishes them."""
        since = self.applied
        if self.broken == "rounds": since = max(since, self.begun); self.begun = upto
        revs = range(since + 1, upto + 1)
        for r in revs:
            for s in self.changes[r][0].seqs:
                if not (yield from self.know(s)): return False
        if (yield from self.know_newest()) is None: return False
        rows = self.effects(revs)
        for r in revs:
            for s in self.changes[r][0].seqs if self.changes[r][0].op == "delete" else ():
                if not (yield from self.erase(s, rows)): return False
        self.storing = {s // BLOCK for r in revs for s in self.changes[r][0].seqs}
        if not (yield from self.durable({p: c for p, c in rows.items() if c})) and self.broken != "ack-lease": return False
        if self.broken != "cache-late": self.touch(revs)
        self.storing = set()
        self.applied = max(self.applied, upto)
        if self.world.channel:
            self.settled_rev = self.applied                                   # The event is coalesced and best effort.
            if not self.event_pending: self.event_pending = True; self.sim.at(self.sim.rng.choice([0, 6]), lambda: self.sim.spawn(self.coalesced(), self))
        else:
            if self.broken == "publish": self.settled_rev = self.applied
            after, self.published = self.published, self.applied
            self.sim.at(self.sim.rng.choice([0, 0, 2, 15]), lambda upto=self.applied: self.sim.spawn(self.publish(after, upto), self))
        return True
    def recomputed(self, change, rev):
        """[complete] broken: the state after a change is computed from what is there."""
        states = [self.applied_states[s] for s in change.seqs]
        if change.op == "react": return change._replace(after=react(states[0].reactions[1], *change.arg))
        if change.op == "edit": return change._replace(after=states[0].edits() + (rev,))
        return change._replace(after=(tuple(s.edits() for s in states),) + change.after[1:])
    def effects(self, revs):
        """The rows of these changes, except the erased ones."""
        rows, previews = {"m": {}, "r": {}, "k": {}}, set()
        for r in revs:
            change, body = self.changes[r]
            if self.broken == "complete": change = self.recomputed(change, r)
            timestamp = r if self.broken != "state-ts" else int(self.sim.now + self.skew) * 1000 + r % 1000
            for s in change.seqs:
                for state in (self.applied_states[s], self.memory[s]): state.catch_up(s, r, change, body)
                if change.op == "react":
                    emoji, on = change.arg
                    rows["m"][("reactions", s)] = (timestamp, change.after)
                    rows["r"][(s, emoji, change.by)] = rows.setdefault(("y", change.by), {})[(s, emoji)] = (r, on)
                elif change.op == "delete" or body is not None:               # An erased edit writes nothing: its deletion follows.
                    rows["m"][("state", s)] = (timestamp, content_of(s, change, body))
            if change.op == "delete":
                cell = (r, change.after[1:]); rows["k"][("x",)] = cell; self.deleted = max(self.deleted, cell)
                for u in self.members if not self.world.channel and self.broken != "x" else ():
                    rows.setdefault(("i", u), {})[("x",)] = (r, change.after[1])
            if change.op != "react": previews.update(change.seqs)
        if previews and not self.world.channel and (self.broken != "face-newest" or self.head in previews): self.correct_faces(rows)
        return rows
    def correct_faces(self, rows):
        """Writes the newest face to every participant. A user who leaves at this moment gets the face of the leaving instead."""
        for u in self.members: rows.setdefault(("i", u), {}).update(self.face(self.head, self.applied_states[self.head]))
    def erase(self, seq, rows):
        """Overwrites the content of every row that holds, or may come to hold, a text of this entry."""
        client_id, edits = self.entries[seq].client_id, self.memory[seq].edits()
        while True:
            cells = yield self.store.read("m", lambda k: k[0] in ("m", "mc") and k[1] == seq)
            sends = yield self.store.read(("s", client_id))
            log = yield from self.read_changes({r // BUCKET for r in edits}, lambda k: k[1] in edits)
            if not self.leased(): return False
            if None not in (cells, sends, log): break
        def epochs(seen): return seen if self.broken != "epochs" else {max(seen)} if seen else set()
        rows["m"].update({("mc", seq, e): (1, None) for e in epochs({k[2] for k in cells})})
        if self.broken != "edits":
            for r in edits: rows.setdefault(partition(r), {}).update({("cc", r, e): (1, None) for e in epochs({k[2] for k in log if k[1] == r})})
        if self.broken != "sends": rows["m"].update({("mc", s, k[0]): (1, None) for k, (_, s) in sends.items()})
        self.entries[seq] = self.entries[seq]._replace(body=None)
        for r in edits:
            if r in self.changes: self.changes[r] = (self.changes[r][0], None)
        return True

class Telling:
    """Events and replies. They have applied changes only."""
    def event(self, after, rev):
        items = items_of(self.changes, after, rev)
        if self.broken == "item-rev": items = {s: (self.memory[s].rev(), *fields) for s, (_, *fields) in items.items() if s in self.memory}
        too_large = self.sim.rng.random() < 0.05
        self.world.deliver(self.members, *((rev, rev, {}) if too_large else (after, rev, items)))
    def publish(self, after, rev):
        if not self.leased(): return
        self.event(after, rev)
        yield self.sim.rng.choice([1, 3, 10])                                 # Acknowledged end to end.
        if self.leased() and after <= self.settled_rev: self.settled_rev = max(self.settled_rev, rev)
        elif self.leased(): self.sim.at(2, lambda: self.sim.spawn(self.publish(after, rev), self)); return
        yield self.sim.rng.choice([0.5, 3, 20])
        if self.leased() and rev == self.applied and self.broken != "row-rev": yield from self.durable({("i", u): {("rev",): (rev, rev)} for u in self.members})
    def coalesced(self):
        yield 0
        if not self.leased(): return
        self.event_pending = False
        after, self.published = self.published, self.applied
        if self.published > after: self.event(after, self.published)
    def told_rev(self): return self.applied if self.broken != "applied" else self.next_rev - 1
    def answers(self, user): return self.serving and self.leased() and user in self.members
    def history(self, user, block):
        """-> (rev, {seq: State}, {(seq, emoji): (rev, on)} of the user): the states are at least as new as rev"""
        if not self.answers(user): return None
        low, high = max(1, block * BLOCK), min(self.head, block * BLOCK + BLOCK - 1)
        key = (block, high, self.touched.get(block, 0) if self.broken != "cache" else 0); rev = self.told_rev()
        cached = block not in self.storing or self.broken == "cache-busy"
        if cached and key in self.pages: page = self.pages[key]; rev = page[0] if self.broken == "cache" else max(page[0], rev)
        else:
            cells = yield self.store.read("m", lambda k: k[0] in ("state", "reactions") and low <= k[1] <= high)
            if cells is None or not self.leased(): return None
            page = (rev, {s: State(cells.get(("state", s), (0, None)), cells.get(("reactions", s), (0, ()))) for s in range(low, high + 1)})
            if cached and len(self.pages) < 6: self.pages.setdefault(key, page)
        mine = {}
        if any(state.reactions[1] for state in page[1].values()):
            mine = yield self.store.read(("y", user), lambda k: low <= k[0] <= high)
        return (rev, page[1], mine) if mine is not None and self.answers(user) else None
    def reactors(self, user, seq):
        """-> {(seq, emoji, user): (rev, on)}"""
        if not self.answers(user): return None
        cells = yield self.store.read("r", lambda k: k[0] == seq)
        return cells if self.answers(user) else None
    def changes_after(self, user, after):
        """-> (after, rev, items, whether there are more) or ("reset", rev). The change rows come from the store."""
        if not self.answers(user): return None
        newest = self.told_rev(); rev = min(newest, after + PAGE)
        if newest - after > RESET: return ("reset", newest) if self.broken != "reset" else (after, newest, {}, False)
        cells = yield from self.read_changes(range((after + 1) // BUCKET, rev // BUCKET + 1), lambda k: after < k[1] <= rev)
        if cells is None or not self.answers(user): return None
        rows = {r: (meta[1], content(cells, "cc", r, epoch)) for r, (epoch, meta) in best_rows(cells, "c").items()}
        if any(r not in rows for r in range(after + 1, rev + 1)):
            if self.broken is None: self.world.found(f"no row of a change in ({after}, {rev}]")
            return None
        return (after, rev, items_of(rows, after, rev), rev < newest)

class Owner(Messages, Changes, Effects, Telling):
    def __init__(self, world, epoch, after_crash=True):
        self.world, self.sim, self.store, self.broken = world, world.sim, world.store, world.broken
        self.epoch, self.lease_end, self.paused_until, self.cut_off = epoch, 1e12, 0.0, False
        self.after_crash, self.retiring, self.retired = after_crash, False, False
        self.skew, self.serving = world.sim.rng.uniform(-60, 60), False
        self.head, self.next_seq, self.settled_seq, self.entries, self.in_flight, self.known_ids, self.stored = 0, 1, 0, {}, {}, {}, set()
        self.members, self.changing, self.asked = set(world.users), {}, set()    # changing: user -> a membership entry whose effects are not stored
        self.change_head, self.next_rev, self.settled_rev, self.changes, self.stored_revs = 0, 1, 0, {}, set()
        self.applied, self.published, self.applying, self.begun, self.event_pending, self.bucket = 0, 0, False, 0, False, 0
        self.memory, self.applied_states, self.deleted = {}, {}, (0, ((), 0))   # memory: as the newest appended change left it
        self.touched, self.storing, self.pages = {}, set(), {}                   # storing: the blocks that a round of effects is writing
        self.sim.spawn(self.take_over(), self)
    def leased(self): return self.sim.now < self.lease_end or self.broken == "lease"
    def durable(self, rows):
        """Repeats a write while its outcome is unknown. -> whether it has the lease"""
        while self.leased() and rows:
            unknown = yield self.store.write(rows, self.cut_off)
            rows = {p: c for p, c in rows.items() if p in unknown}
        return self.leased()
    def extends(self, cells, column, best, position, known, identity):
        """Whether the row at a position belongs to the valid log. An uncertain row does if its epoch is not lower than that of the row
        before it, and one owner wrote both, or that one is certain: a row carries counts and summaries that follow from the row before it."""
        if position not in best: return False
        if position <= known or position == 1 or column == "c" and self.broken == "prefix": return True
        epoch, before = best[position][0], best[position - 1][0]
        both = [writers(cells, column, p, lambda meta, p=p: identity(meta) == identity(best[p][1])) for p in (position - 1, position)]
        return epoch >= before and (position - 1 <= known or self.broken == "chain" or bool(both[0] & both[1]))
    def read_changes(self, buckets, want=lambda key: True):
        """-> the cells of the change log in these buckets | None after a time-out"""
        cells = {}
        for bucket in buckets:
            part = yield self.store.read(("c", bucket), want)
            if part is None: return None
            cells.update(part)
        return cells
    def take_over(self):
        while self.leased():
            messages, kept = (yield self.store.read("m")), (yield self.store.read("k"))
            if messages is None or kept is None: continue
            self.bucket = kept.get(("bucket",), (0,))[0]
            changes = yield from self.read_changes(range(self.bucket + 1))
            if changes is None: continue
            if not (yield from self.adopt_messages(messages)) or not (yield from self.adopt_changes(changes, kept)): return
            unsettled = [s for s in range(self.settled_seq + 1, self.head + 1) if membership(self.entries[s].kind)]
            if not (yield from self.settle_membership(unsettled)): return
            self.serving = True
            if self.broken != "repair" and self.after_crash: self.sim.at(self.sim.rng.uniform(0, 30), lambda: self.sim.spawn(self.repair(), self))
            return
    def is_settled(self):
        messages = self.next_seq - 1 == self.head == self.settled_seq
        return messages and self.next_rev - 1 == self.change_head == self.applied == self.settled_rev and not self.event_pending
    def retire(self):
        """An orderly stop: everything is settled and the inbox rows are written, so the next owner has nothing to repair."""
        self.retiring = True
        while self.leased() and not (self.serving and self.is_settled()): yield 1
        if not self.leased(): return
        rows = {"k": {("settled",): (self.applied, self.applied)}}
        if self.head and not self.world.channel:
            if (yield from self.know_newest()) is None: return
            rev = {("rev",): (self.applied, self.applied)} if self.broken != "row-rev" else {}
            for u in self.members: rows[("i", u)] = {**self.face(self.head, self.applied_states[self.head]), **rev}
        if (yield from self.durable(rows)): self.retired = True; self.lease_end = self.sim.now
