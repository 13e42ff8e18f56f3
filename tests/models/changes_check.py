"""What the clients of model_changes.py asked and were told, and the checks of it: real-time order, registers, the final state."""
import heapq
from collections import namedtuple

from changes_owner import DELETED_KEPT, partition
from changes_store import State, best_rows

Asked = namedtuple("Asked", "opid op seqs started floor landed")
# A change that was acknowledged: `rev` is the applied rev of the reply, `own` the rev of the change that did it.
Acknowledged = namedtuple("Acknowledged", "opid op seqs user arg started ended floor rev own")

class Record:
    """Collects requests and replies. `floor` is the highest rev that was acknowledged before a request."""
    def __init__(self, world):
        self.world, self.sim, self.found = world, world.sim, world.found
        self.sent, self.started, self.seqs_of_edit, self.changes = {}, {}, {}, []
        self.acknowledged, self.acknowledged_rev = {}, 0                       # (column, seq) -> rev, and the highest of all
        self.banned, self.must_be_erased, self.deletions, self.corrections, self.reads = set(), set(), [], [], []        # reads: register, started, ended, version, value
    def message(self, client_id, seq):
        if seq > 0 and self.sent.setdefault(client_id, seq) != seq: self.found(f"{client_id} at {self.sent[client_id]} and {seq}")
    def sent_at(self, seq): return next((c for c, s in self.sent.items() if s == seq), None)
    def ask(self, opid, op, seqs):
        self.started[opid] = self.sim.now
        if op == "edit": self.seqs_of_edit[opid] = seqs[0]
        landed = set().union(*(self.landed(s) for s in seqs)) if op == "delete" else set()
        return Asked(opid, op, seqs, self.sim.now, self.acknowledged_rev, landed)
    def landed(self, seq):
        """Rows with a text of this entry, or of a copy that a `sends` row names, that are on every replica when its deletion is asked for."""
        client_id, out, replicas = self.sent_at(seq), set(), self.world.store.replicas
        def on_all(part): return [(k, c) for k, c in replicas[0].get(part, {}).items() if all(k in r.get(part, {}) for r in replicas)]
        copies = {(s, k[0]) for k, (_, s) in on_all(("s", client_id))}
        for k, (_, v) in on_all("m"):
            if k[0] == "mc" and v == f"<{client_id}>" and (k[1] == seq or k[1:] in copies): out.add(("m", k, seq))
        for k, (_, v) in [cell for part in list(replicas[0]) if part[0] == "c" for cell in on_all(part)]:
            if k[0] == "cc" and v and self.seqs_of_edit.get(v[1:-1]) == seq: out.add(("c", k, seq))
        return out
    def acknowledge(self, asked, user, arg, answer, rev, own):
        self.changes.append(Acknowledged(asked.opid, asked.op, asked.seqs, user, arg, asked.started, self.sim.now, asked.floor, rev, own))
        if rev < max(asked.floor, own): self.found(f"{asked.opid} is answered with rev {rev}, own {own}, after {asked.floor} was acknowledged")
        if asked.op != "delete" or len(asked.seqs) == 1:
            column = ("reactions" if asked.op == "react" else "content", asked.seqs[0])
            self.acknowledged[column] = max(own, self.acknowledged.get(column, 0))
        self.acknowledged_rev = max(self.acknowledged_rev, own)
        if asked.op != "react" and answer == "ok": self.corrections.append((asked.started, asked.seqs))
        if asked.op == "delete" and answer == "ok": self.deletions.append((asked.started, own))
        if asked.op == "delete": self.banned |= {f"<{self.sent_at(s)}>" for s in asked.seqs}; self.must_be_erased |= asked.landed
    def told(self, what, answer, floor):
        if answer[0] == "reset": rev, more = answer[1], False
        else: _, rev, _, more = answer
        if rev < floor and not more: self.found(f"{what}: rev {rev}, although {floor} was acknowledged")
    def page(self, user, started, floor, floors, rev, states, mine):
        if rev < floor: self.found(f"a page asked at {started:.1f} has rev {rev}, although {floor} was acknowledged")
        for seq, state in states.items():
            for column, (has, value) in (("content", state.content), ("reactions", state.reactions)):
                if has < floors.get((column, seq), 0): self.found(f"a page asked at {started:.1f} has {column} {has} of {seq}, acknowledged {floors[(column, seq)]}")
            self.reads.append((("content", seq), started, self.sim.now, state.content[0], state.content[1] and state.content[1][:2]))
            if not any(s.reactions[1] for s in states.values()): continue     # Then the page has no `mine`.
            for emoji in "ab": self.reads.append((("reaction", seq, emoji, user), started, self.sim.now, *mine.get((seq, emoji), (0, False))))
    def reactors(self, started, seq, cells):
        for emoji in "ab":
            for user in self.world.users: self.reads.append((("reaction", seq, emoji, user), started, self.sim.now, *cells.get((seq, emoji, user), (0, False))))

class Check:
    """Compares what was acknowledged and what is stored with the log of the last owner, at a quiet point."""
    def __init__(self, world, owner):
        self.world, self.owner, self.record, self.found = world, owner, world.record, world.found
        self.messages, self.changes = world.store.all("m"), {}
        for part in {p for replica in world.store.replicas for p in replica if p[0] == "c"}: self.changes.update(world.store.all(part))
        self.log = {r: owner.changes[r][0] for r in range(1, owner.change_head + 1)}
        self.entries = {s: owner.entries[s] for s in range(1, owner.head + 1)}
        self.states, self.after, self.revs = {s: State() for s in self.entries}, {}, {}       # after: (rev, seq) -> the state after that rev
    def run(self):
        self.replay()
        if self.world.findings: return                                         # The rest compares with what replaying made.
        for check in (self.acknowledged, self.order, self.registers, self.stored_states, self.clients, self.counts, self.inboxes, self.erased): check()
    def replay(self):
        for client_id, seq in self.record.sent.items():
            if seq not in self.entries or self.entries[seq].client_id != client_id: self.found(f"message {client_id} acknowledged at {seq} is not there")
        for rev, change in self.log.items():
            if change.op in ("edit", "delete") and change.opid in self.revs: self.found(f"{change.op} {change.opid} is applied at {self.revs[change.opid]} and {rev}")
            self.revs.setdefault(change.opid, rev)
            missing = [s for s in change.seqs if s not in self.states]
            if missing: self.found(f"rev {rev} changes {missing}, which are not in the log"); continue
            for s in change.seqs:
                if self.states[s].is_deleted(): self.found(f"rev {rev} changes a deleted entry")
                self.states[s].apply(s, rev, change, f"<{change.opid}>"); self.after[(rev, s)] = self.states[s].copy()
    def acknowledged(self):
        for a in self.record.changes:
            if a.opid in self.revs and self.revs[a.opid] <= a.rev and (a.op == "react" or self.revs[a.opid] == a.own): continue
            for s in a.seqs:
                past = max((r for r, seq in self.after if seq == s and r <= a.own), default=0); state = self.after[(past, s)] if past else State()
                done = state.is_deleted() if a.op == "delete" else a.op == "react" and state.reaction(a.arg[0], a.user)[1] == a.arg[1]
                if not done: self.found(f"acknowledged {a.op} {a.opid} of {s} at rev {a.rev}, done by {a.own}, is not in the log")
    def order(self):
        """A change that was acknowledged before another one was asked for has the lower rev."""
        for a in self.record.changes:
            if a.own in self.log and self.log[a.own].opid == a.opid and a.own <= a.floor: self.found(f"{a.opid} has rev {a.own}, although {a.floor} was acknowledged before it was asked for")
    def operations(self):
        """register -> its operations (started, ended, version, whether it is a write). Versions are revs, and so have one order."""
        out, values, ends = {}, {}, {(a.opid, a.own): a.ended for a in self.record.changes}
        for rev, change in self.log.items():
            for s in change.seqs:
                if change.op == "react": register, value = ("reaction", s, change.arg[0], change.by), change.arg[1]
                else: register, value = ("content", s), (change.op, f"<{change.opid}>" if change.op == "edit" else change.by)
                values[(register, rev)] = value
                out.setdefault(register, []).append((self.record.started[change.opid], ends.get((change.opid, rev), 1e9), rev, True))
        for register, started, ended, version, value in self.record.reads:
            if version and values.get((register, version)) != value: self.found(f"{register} read at {ended:.1f} as {value} of rev {version}, the log has {values.get((register, version))}")
            out.setdefault(register, []).append((started, ended, version, False))
        for a in self.record.changes:                                          # A change that was made already is a read.
            if len(a.seqs) > 1 or a.own in self.log and self.log[a.own].opid == a.opid: continue
            register, value = (("reaction", a.seqs[0], a.arg[0], a.user), a.arg[1]) if a.op == "react" else (("content", a.seqs[0]), None)
            if value is not None and values.get((register, a.own), False) != value: self.found(f"{a.opid} says that {register} is {value} since {a.own}")
            out.setdefault(register, []).append((a.started, a.ended, a.own, False))
        return out
    def registers(self):
        """Each entry's content, and each reaction of a user, is a linearizable register: no operation sees a version older than one that
        an operation saw which had ended before, and a version is seen only after its write was asked for."""
        for register, operations in self.operations().items():
            ended, seen = [], 0
            for started, end, version, writes in sorted(operations):
                while ended and ended[0][0] < started: seen = max(seen, heapq.heappop(ended)[1])
                if version < seen or writes and version == seen: self.found(f"{register}: version {version} asked at {started:.1f}, although {seen} was seen before; {'write' if writes else 'read'}")
                heapq.heappush(ended, (end, version))
    def stored_states(self):
        who, mine = self.world.store.all("r"), {}
        for u in self.world.users: mine.update({(s, e, u): c for (s, e), c in self.world.store.all(("y", u)).items()})
        if who != mine: self.found(f"reactors and what users reacted to differ: {set(who.items()) ^ set(mine.items())}")
        for s, state in self.states.items():
            cell, reactions = self.messages.get(("state", s), (0, None)), self.messages.get(("reactions", s), (0, ()))[1]
            if cell[1] != state.content[1]: self.found(f"state of {s}: {cell}, log {state.content}")
            if reactions != state.reactions[1]: self.found(f"reactions of {s}: {reactions}, log {state.reactions}")
            for name, toggles in (("store", {k[1:]: v for k, v in who.items() if k[0] == s}), ("log", state.reactors)):
                counts = {}
                for (emoji, _), (_, on) in toggles.items():
                    if on: counts[emoji] = counts.get(emoji, 0) + 1
                if tuple(sorted(counts.items())) != reactions: self.found(f"reactors of {s} in the {name}: {counts}, summary {reactions}")
    def clients(self):
        for c in self.world.clients:
            for s, (rev, view) in c.held.items() if c.online and c.member and c.user in self.owner.members else ():
                stored = self.states[s].view() if s in self.states else "not in the log"
                if view != stored: self.found(f"client {c.user} with cursor {c.cursor} of {self.owner.applied} shows {s} as {view} (rev {rev}), is {stored}")
    def gone(self): return {s for s, state in self.states.items() if state.is_deleted()}
    def counts(self):
        highest, count = self.owner.deleted[1]; gone = sorted(self.gone())
        if count != len(gone) or list(highest) != gone[-DELETED_KEPT:]: self.found(f"the owner knows {count} deleted messages, the highest {highest}; the log has {gone}")
    def inboxes(self):
        owner, gone = self.owner, self.gone()
        for u in owner.members if not self.world.channel and owner.head else ():
            row = self.world.store.all(("i", u)); face = row.get(("face",)); read = row.get(("read",), (0, (0, 0)))[1]
            highest = row.get(("x",), (0, ()))[1]
            if not row.get(("in",), (0, True))[1]: self.found(f"the row of {u} says that the user has left")
            if face is None: self.found(f"no face for {u}"); continue
            state = self.states[owner.head]
            preview = "(deleted)" if state.is_deleted() else state.content[1][1] if state.content[1] else self.entries[owner.head].body
            if face[1][0] != owner.head or face[1][2] != preview: self.found(f"preview of {u}: {face}, newest {owner.head} {preview}")
            unread = face[1][3] - read[1] - len([s for s in highest if read[0] < s <= face[1][0]])
            by_hand = len([s for s in self.entries if s > read[0] and self.entries[s].kind == "text" and s not in gone])
            exact = len([s for s in gone if s > read[0]]) <= DELETED_KEPT
            if unread < by_hand or exact and unread != by_hand: self.found(f"unread of {u}: {unread}, by hand {by_hand}; x {highest} read {read} deleted {sorted(gone)}")
            if max(row.get(("rev",), (0, 0))[1], self.world.home.get(u, 0)) < owner.applied: self.found(f"rev in the row of {u} {row.get(('rev',))}, applied {owner.applied}")
    def erased(self):
        record, owner = self.record, self.owner
        deleted = {s for a in record.changes if a.op == "delete" for s in a.seqs if s in self.entries}
        revs = {r for r, change in self.log.items() if change.op == "edit" and change.seqs[0] in deleted}
        for part, key, seq in record.must_be_erased:
            if part == "c" and (key[1] not in revs or self.log[key[1]].seqs[0] != seq): continue     # An edit that was never committed is for the sweep.
            if (self.messages if part == "m" else self.changes)[key][1] is not None: self.found(f"not erased with {seq}: {part} {key}")
        texts = {f"<{i}>" for i, s in record.seqs_of_edit.items() if s in deleted} | {f"<{self.entries[s].client_id}>" for s in deleted}
        for part, cells, column, head, erased in (("m", self.messages, "mc", owner.head, deleted), ("c", self.changes, "cc", owner.change_head, revs)):
            self.sweep(part, cells, column, head, erased, texts)
        for part in {p for replica in self.world.store.replicas for p in replica}:
            for key, (_, value) in self.world.store.all(part).items():
                # An edit that was lost with its owner stays beyond the head, where nobody reads it, until the log reaches its rev.
                if key[0] == "cc" and key[1] > owner.change_head: continue
                held = [t for t in texts if t in repr(value)]
                if held: self.found(f"deleted text {held[0]} in {part} {key}")
    def sweep(self, part, cells, column, head, erased, texts):
        """The pass after the hint window. It never erases beyond the head: a successor may still adopt what is there."""
        best = best_rows(cells, column[0])
        for key, (_, value) in cells.items():
            if key[0] != column or value is None or key[1] > head or key[2] == best[key[1]][0] and key[1] not in erased: continue
            self.world.late += value in texts
            if part == "c": place = partition(key[1])
            else: place = part
            for replica in self.world.store.replicas if self.world.broken != "sweep" else ():
                cells_there = replica.setdefault(place, {}); cells_there[key] = max(cells_there.get(key, (0, "")), (1, None), key=lambda cell: cell[0])
