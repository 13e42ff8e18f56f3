"""A client of model_changes.py. It follows the protocol and records what it asked and what it was told."""
from changes_owner import BLOCK
from changes_store import Future

class Client:
    """Holds states of the entries whose pages it has read, and drops items of others."""
    def __init__(self, world, user):
        self.world, self.sim, self.rng, self.user = world, world.sim, world.sim.rng, user
        self.cursor, self.held, self.blocks, self.count = 0, {}, set(), 0
        self.session, self.online, self.member, self.member_since = 0, False, True, 0.0
        for steps in (self.connection(), self.work(True), self.work(False), self.reading()): self.sim.spawn(steps)
    def call(self, request):
        """Asks an owner. -> its answer | None = none in time"""
        owner = self.world.pick(); asked, answer = self.sim.spawn(request(owner), owner), Future()
        asked.waiters.append(lambda: self.sim.at(self.rng.choice([0.2, 1, 6]), lambda: answer.set(asked.value)))
        self.sim.at(self.rng.choice([25, 60]), lambda: answer.set(None))
        return (yield answer)
    # -- following
    def connection(self):
        while True:
            self.session += 1; self.online = True
            if self.member: self.sim.spawn(self.resume(self.session))
            while True:
                yield self.rng.uniform(10, 80)
                if self.world.active: break
            self.online = False; self.session += 1
            yield self.rng.uniform(0.5, 30) if self.rng.random() < 0.8 else self.rng.uniform(60, 150)
    def resume(self, session):
        """The home answers a returning cursor from the inbox row and the publications that it knows. In a channel the owner answers."""
        newest = None if not self.world.channel else self.cursor + 1
        while newest is None: newest = yield from self.world.newest_rev(self.user)
        if newest > self.cursor and session == self.session: yield from self.ask(self.cursor, session)
    def ask(self, after, session):
        while session == self.session and self.member:
            started, floor = self.sim.now, self.world.record.acknowledged_rev
            answer = yield from self.call(lambda o: o.changes_after(self.user, after))
            if answer is None: yield self.rng.uniform(1, 5); continue
            self.world.record.told(f"changes after {after} asked at {started:.1f}", answer, floor)
            if session != self.session: return
            if answer[0] != "reset": return self.receive(*answer)
            self.held, self.cursor = {}, max(self.cursor, answer[1])
            for block in self.blocks: self.sim.spawn(self.page(block))
            return
    def receive(self, after, rev, items, more=False):
        if not self.member: return
        if self.cursor < after and self.world.broken != "gap": self.sim.spawn(self.ask(self.cursor, self.session)); return
        for seq, (item_rev, text, reactions) in items.items():
            if text == ("edit", None): self.world.found(f"an event has the erased edit of {seq}")
            known, view = self.held.get(seq, (item_rev, None))
            if item_rev > known: self.held[seq] = (item_rev, (view[0] if text is None else text, view[1] if reactions is None else reactions))
        self.cursor = max(self.cursor, rev)
        if more and self.world.broken != "more": self.sim.spawn(self.ask(rev, self.session))
    def page(self, block):
        session, started, record, answer = self.session, self.sim.now, self.world.record, None
        while answer is None:
            if session != self.session or not self.member: return
            started, floor, floors = self.sim.now, record.acknowledged_rev, dict(record.acknowledged)
            answer = yield from self.call(lambda o: o.history(self.user, block))
            if answer is None: yield self.rng.uniform(1, 5)
        rev, states, mine = answer
        record.page(self.user, started, floor, floors, rev, states, mine)
        if session != self.session or not self.member: return
        self.blocks.add(block)
        for seq, state in states.items():
            known = max(rev, state.rev())
            if seq not in self.held or self.held[seq][0] <= known: self.held[seq] = (known, state.view())
        # The cursor is set back: if the connection is lost now, the next one asks from there.
        if rev < self.cursor and self.world.broken != "page-rev": self.cursor = rev; self.sim.spawn(self.ask(rev, self.session))
    def reading(self):
        while True:
            yield self.rng.uniform(3, 25)
            record = self.world.record
            if not self.world.active or not record.sent: continue
            top = max(record.sent.values())
            if self.online and self.member:
                block = self.rng.randrange(0, top // BLOCK + 1)
                for delay in self.rng.choice([(), (), (1, 2, 4, 9)]): self.sim.at(delay, lambda block=block: self.sim.spawn(self.page(block)))      # several at once
                yield from self.page(block)
            if self.rng.random() < 0.4: seq = self.rng.randint(1, top); yield from self.call(lambda o: o.read(self.user, seq))
            if self.rng.random() < 0.3:
                seq, started = self.rng.randint(1, top), self.sim.now
                cells = yield from self.call(lambda o: o.reactors(self.user, seq))
                if cells is not None: record.reactors(started, seq, cells)
            if not self.world.channel: yield from self.look_at_inbox()
    def look_at_inbox(self):
        record, since = self.world.record, self.member_since
        banned, deleted = set(record.banned), max((rev for started, rev in record.deletions if started > since), default=0)
        corrected = max((max(seqs) for started, seqs in record.corrections if started > since), default=0)
        row = yield self.world.store.read(("i", self.user))
        if row and corrected and since == self.member_since and row.get(("face",), ((0, 0),))[0] < (corrected, 1):
            self.world.found(f"the preview of user {self.user} is {row.get(('face',))}, although a change of {corrected} was acknowledged")
        if row and since == self.member_since and row.get(("x",), (0,))[0] < deleted:
            self.world.found(f"the row of user {self.user} lacks the deletion {deleted}: unread is too high")
        if row and ("face",) in row and row[("face",)][1][2] in banned: self.world.found(f"preview of user {self.user} shows a deleted text {row[('face',)][1]}")
    # -- acting
    def work(self, first):
        """What one of the user's two devices does. Only the first one leaves and joins."""
        while True:
            yield self.rng.uniform(0.3, 6 if not self.world.storm else 2)
            if not self.world.active or not first and not self.member: continue
            self.count += 1; opid = f"{self.user}.{self.count}"; top = max(self.world.record.sent.values(), default=0)
            if not self.member:
                if self.rng.random() < 0.15: yield from self.change_membership(opid, "join")
            elif first and not self.world.channel and self.user and self.rng.random() < 0.05: yield from self.change_membership(opid, "leave")
            elif self.rng.random() < 0.3 and top < 24 or not top: yield from self.send(opid, "system" if self.rng.random() < 0.2 else "text")
            else:
                for _ in range(self.rng.choice([0, 0, 0, 0, 3])): self.count += 1; self.sim.spawn(self.change(f"{self.user}.{self.count}", top))     # at once
                yield from self.change(opid, top)
    def change_membership(self, opid, what):
        self.member_since = 1e9
        while (yield from self.call(lambda o: o.send(self.user, opid, (what, self.user)))) is None: yield self.rng.uniform(1, 5)
        self.member = what == "join"
        if self.member: self.member_since = self.sim.now
        self.session += 1
        if self.member and self.online: self.sim.spawn(self.resume(self.session))
    def send(self, opid, kind):
        for _ in range(6):
            seq = yield from self.call(lambda o: o.send(self.user, opid, kind))
            if seq is not None: return self.world.record.message(opid, seq)
            yield self.rng.uniform(1, 5)
    def change(self, opid, top):
        """Edits, deletes or reacts, mostly to one of the newest entries."""
        rng = self.rng
        seqs = (rng.choice([top, rng.randint(max(1, top - 6), top)]),); op = rng.choice(["edit", "react", "react", "react", "delete" if rng.random() < 0.6 else "react"])
        if op == "delete": seqs = tuple(sorted(set(seqs) | {rng.randint(max(1, top - 8), top) for _ in range(rng.choice([0, 0, 1, 2]))}))
        arg = (rng.choice("ab"), rng.random() < 0.6) if op == "react" else None
        base = self.cursor if op == "edit" and self.world.broken != "base-rev" else None
        yield from self.perform(opid, op, seqs, arg, base)
    def perform(self, opid, op, seqs, arg=None, base=None):
        record, asked = self.world.record, self.world.record.ask(opid, op, seqs)
        for _ in range(4):
            answer = yield from self.call(lambda o: o.change(self.user, op, seqs, arg, opid, base))
            if answer: break
            yield self.rng.uniform(1, 5)
        if not answer or answer[0] == "no": return
        record.acknowledge(asked, self.user, arg, *answer)
        for client in self.world.clients if op != "react" and not self.world.channel else (): self.sim.spawn(client.look_at_inbox())
