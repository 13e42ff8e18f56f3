"""What model_consumers.py checks, and the receivers of its consumers."""
from changes_store import Future
from consumers_owner import MINUTES, SHARDS
from consumers_store import ROW

class Receiver:
    """The endpoint of a consumer. It fails, is down for long, and takes requests whose answers get lost."""
    def __init__(self, world, consumer): self.world, self.sim, self.consumer, self.down_until = world, world.sim, consumer, 0.0
    def take(self, events):
        """-> a future: whether the sender learns that the events were taken"""
        answer, rng, fate = Future(), self.sim.rng, self.sim.rng.random()
        def arrive(answered):
            if self.sim.now < self.down_until: return
            for event in events: self.world.check.arrived(self.consumer, event)
            if answered: self.sim.at(rng.choice((0.2, 1, 3)), lambda: answer.set(True))
        if fate < 0.75: self.sim.at(rng.choice((0.2, 1, 1, 3)), lambda: arrive(True))
        elif fate < 0.9: self.sim.at(rng.choice((0.2, 1, 5, 40)), lambda: arrive(False))   # The answer is lost, or the request comes late.
        self.sim.at(8, lambda: answer.set(False))
        return answer

class Check:
    def __init__(self, world):
        self.world, self.truth, self.taken, self.missing = world, {}, {}, {}
        self.acknowledged, self.offsets, self.deletions, self.states = {}, {}, {}, {}
        self.events, self.repeats, self.named_by_row = 0, 0, 0
    # -- the log
    def committed(self, owner, kind, number, row):
        """An owner committed an entry or a change. Each consumer that its gateway knows has to get it."""
        place = (owner.conversation, kind, number)
        if self.truth.setdefault(place, row.id) != row.id: return self.world.found(f"{place} was {self.truth[place]}, now it is {row.id}")
        for consumer in owner.gateway.consumers:
            new = place not in self.taken.setdefault(consumer, set()) and (consumer == 0 or self.world.configured)
            if new and place not in self.world.committed_before: self.missing.setdefault((consumer, owner.conversation), set()).add((kind, number))
        self.world.committed_before.add(place)
    def acknowledged_change(self, conversation, seq, rev):
        self.acknowledged[(conversation, seq)] = max(rev, self.acknowledged.get((conversation, seq), 0))
    # -- delivery
    def read(self, follower, events):
        owner = follower.owner
        for kind, number, _, seq in events:
            least = max(self.acknowledged.get((owner.conversation, seq), 0), number if kind == "r" else 0)
            if owner.shown.get(seq, 0) < least: self.world.found(f"consumer {follower.consumer} gets {seq} of {owner.conversation} without the change {least}")
    def arrived(self, consumer, event):
        place = (event.conversation, event.kind, event.number); taken = self.taken.setdefault(consumer, set())
        if self.truth.get(place) != event.id: self.world.found(f"consumer {consumer} gets {place}, which is not committed")
        self.events += 1
        if place in taken: self.repeats += 1; return
        if (event.conversation, event.kind, event.number + 1) in taken: self.world.found(f"consumer {consumer} gets {place} after its successor")
        before = self.missing.get((consumer, event.conversation), set())
        for kind, number in before:
            if kind == event.kind and number < event.number: self.world.found(f"consumer {consumer} gets {place} before {number}")
            if event.kind == "r" and (kind, number) == ("s", event.seq): self.world.found(f"consumer {consumer} gets {place} before its entry {number}")
        taken.add(place); before.discard((event.kind, event.number))
    # -- rows
    def stored(self, consumer, conversation, offset):
        old = self.offsets.get((consumer, conversation), (0, 0))
        self.offsets[(consumer, conversation)] = (max(old[0], offset[0]), max(old[1], offset[1]))
    def loaded(self, consumer, conversation, offset, stored):
        if any(a < b for a, b in zip(offset, stored)): self.world.found(f"the offset of consumer {consumer} in {conversation} fell from {stored} to {offset}")
    def deleted(self, consumer, conversation, at):
        old = self.deletions.get((consumer, conversation), (0, 0))
        self.deletions[(consumer, conversation)] = (max(old[0], at[0]), max(old[1], at[1]))
    def has_row(self, consumer, conversation):
        """Whether each quorum returns a lagging row."""
        views = self.world.store.views(("lagging", consumer, conversation % SHARDS))
        return all(any(view.get((conversation, column), (0, None))[1] == ROW for column in "sr") for view in views)
    def has_activity(self, gateway, conversation):
        """Whether crash repair would read an activity row of the conversation."""
        for view in self.world.store.views(("activity", gateway.id)):
            listed = [key for key, (_, value) in view.items() if value == ROW]
            newest = sorted({minute for minute, _ in listed})[-MINUTES:]
            if not any(minute in newest and at == conversation for minute, at in listed): return False
        return True
    def named(self):
        """[found] If all gateways died now, each undelivered event would be found."""
        for (consumer, conversation), places in self.missing.items():
            if not places: continue
            if self.has_row(consumer, conversation): self.named_by_row += 1; continue
            if not any(self.has_activity(g, conversation) for g in self.world.gateways if not g.forgotten):
                self.world.found(f"nothing names {conversation}, of which consumer {consumer} has not got {sorted(places)[:3]}")
    def gone(self):
        """Rows of finished work stay deleted. In the embedded store nothing lands late."""
        for (consumer, conversation), at in self.deletions.items() if not self.world.embedded else ():
            rows = self.world.store.all(("lagging", consumer, conversation % SHARDS))
            for column, limit in zip("sr", at):
                stamp, value = rows.get((conversation, column), (0, None))
                if value == ROW and stamp <= limit: self.world.found(f"the lagging row of consumer {consumer} in {conversation} at {stamp} is back, after a deletion at {limit}")
    # -- states
    def state(self, consumer, value, since):
        """A quorum returned `value` to a read that began at `since`."""
        requests = self.states[consumer]
        begun = requests[value][0] if value is not None else -1
        for later, (begin, end) in requests.items():
            if end is not None and end < since and begin > begun:
                return self.world.found(f"consumer {consumer} has the state {value}, although {later} was requested after it and is ok")
