"""Simulated time and a simulated store for model_changes.py, and the values that its rows hold."""
import heapq, random
from collections import namedtuple

# `origin` is the epoch that a row of either log was first written under. Settled again, it keeps that.
# An entry of the log. `kind` is "text", "system", ("join", user) or ("leave", user). `texts` counts the texts up to it.
Entry = namedtuple("Entry", "client_id kind texts body origin")
# A change: `after` is the state after it. An edit: the revs of the entry's edits. A reaction: the summary. A deletion: the revs of the edits
# of each of its entries, the highest deleted seqs of the conversation, and how many are deleted in all. The body of an edit is in another cell.
Change = namedtuple("Change", "op seqs by opid arg after origin")

class Future:
    def __init__(self): self.done, self.value, self.waiters = False, None, []
    def set(self, value=None):
        if not self.done:
            self.done, self.value = True, value
            for wake in self.waiters: wake()

class Simulation:
    def __init__(self, seed): self.rng, self.now, self.heap, self.number = random.Random(seed), 0.0, [], 0
    def at(self, delay, act): self.number += 1; heapq.heappush(self.heap, (self.now + delay, self.number, act))
    def spawn(self, steps, actor=None):
        """Runs a generator, which yields futures and delays. -> a future of its result"""
        result = Future()
        def step(value=None):
            if actor is not None and actor.paused_until > self.now:            # A paused process runs no step.
                if actor.paused_until < 1e8: self.at(actor.paused_until - self.now, lambda: step(value))
                return                                                         # A crashed one never runs again.
            try: wanted = steps.send(value)
            except StopIteration as end: return result.set(end.value)
            if not isinstance(wanted, Future): self.at(wanted, step)
            elif wanted.done: self.at(0, lambda: step(wanted.value))
            else: wanted.waiters.append(lambda: self.at(0, lambda: step(wanted.value)))
        self.at(0, step); return result
    def run(self, until):
        while self.heap and self.heap[0][0] <= until: self.now, _, act = heapq.heappop(self.heap); act()
        self.now = until

def newer(a, b):
    """The cell that wins: the one with the higher timestamp, then with the larger value."""
    return b if a is None or a[0] < b[0] or (a[0] == b[0] and repr(a[1]) < repr(b[1])) else a

class Store:
    """Three replicas with a quorum of two and blocking read repair: partition -> key -> (timestamp, value).
    A write is {partition: {key: cell}}. Within a partition it is atomic on each replica. Each partition is lost, late or in time by itself."""
    def __init__(self, sim, found): self.sim, self.found, self.replicas, self.seen = sim, found, [{}, {}, {}], {}
    def hop(self): return self.sim.rng.choice([0.5, 1, 1, 2, 4])
    def write_one(self, partition, cells, replicas, cut_off=False):
        future, acks, rng = Future(), [0], self.sim.rng
        for replica in replicas:
            def land(replica=replica, acknowledge=True):
                have = self.replicas[replica].setdefault(partition, {})
                for key, cell in cells.items(): have[key] = newer(have.get(key), cell)
                if acknowledge:
                    acks[0] += 1
                    if acks[0] == 2: self.sim.at(self.hop(), lambda: future.set(True))
            fate = rng.random() if not cut_off else rng.uniform(0.7, 1)         # Cut off: nearly every write is lost or late.
            if fate < 0.75: self.sim.at(self.hop(), land)
            elif fate < 0.95: self.sim.at(rng.uniform(5, 150), lambda land=land: land(acknowledge=False))   # a hint, much later
        self.sim.at(8, lambda: future.set(False)); return future
    def write(self, rows, cut_off=False):
        """-> a future of the set of partitions whose write has an unknown outcome"""
        for partition, cells in rows.items():
            for key, (timestamp, value) in cells.items():
                if (other := self.seen.setdefault((partition, key, timestamp), value)) != value:
                    self.found(f"two values at one timestamp: {partition} {key} at {timestamp}: {other} and {value}")
        result, left, unknown = Future(), [len(rows)], set()
        for partition, cells in rows.items():
            one = self.write_one(partition, cells, (0, 1, 2), cut_off)
            def end(partition=partition, one=one):
                if not one.value: unknown.add(partition)
                left[0] -= 1
                if not left[0]: result.set(unknown)
            one.waiters.append(end)
        if not rows: result.set(unknown)
        return result
    def read(self, partition, want=lambda key: True):
        """-> a future of {key: cell} of two replicas, repaired on both before it returns; None after a time-out"""
        def steps():
            two = self.sim.rng.sample([0, 1, 2], 2)
            for _ in range(6):
                yield self.hop()
                seen = [{k: c for k, c in self.replicas[r].get(partition, {}).items() if want(k)} for r in two]
                yield self.hop()
                merged = dict(seen[0])
                for key, cell in seen[1].items(): merged[key] = newer(merged.get(key), cell)
                if any(s != merged for s in seen) and not (yield self.write_one(partition, merged, two)): continue
                return None if self.sim.rng.random() < 0.04 else merged
            return None
        return self.sim.spawn(steps())
    def all(self, partition):
        """What the replicas converge to."""
        out = {}
        for replica in self.replicas:
            for key, cell in replica.get(partition, {}).items(): out[key] = newer(out.get(key), cell)
        return out

def best_rows(cells, column):
    """position -> (epoch, meta) of the highest epoch. A row of content alone, which erasing leaves, is no row."""
    best = {}
    for key, (_, value) in cells.items():
        if key[0] == column and (key[1] not in best or key[2] > best[key[1]][0]): best[key[1]] = (key[2], value)
    return best

def writers(cells, column, position, same):
    """The epochs whose owners wrote the row that `same` recognizes at a position: the one that appended it, and those that settled it again."""
    return {key[2] for key, (_, value) in cells.items() if key[:2] == (column, position) and same(value)}

def content(cells, column, position, epoch): return cells.get((column, position, epoch), (0, None))[1]

class State:
    """The state of an entry: its content and its reactions, each with the rev that wrote it."""
    def __init__(self, content=(0, None), reactions=(0, ()), reactors=None):
        self.content, self.reactions, self.reactors = content, reactions, dict(reactors or {})
    def rev(self): return max(self.content[0], self.reactions[0])
    def is_deleted(self): return self.content[1] is not None and self.content[1][0] == "delete"
    def edits(self): return self.content[1][2] if self.content[1] else ()
    def version(self): return len(self.edits()) + self.is_deleted()
    def view(self): return (self.content[1] and self.content[1][:2], self.reactions[1])
    def copy(self): return State(self.content, self.reactions, self.reactors)
    def reaction(self, emoji, user): return self.reactors.get((emoji, user), (0, False))
    def apply(self, seq, rev, change, body):
        if change.op == "react": self.reactions = (rev, change.after); self.reactors[(change.arg[0], change.by)] = (rev, change.arg[1])
        else: self.content = (rev, content_of(seq, change, body))
    def catch_up(self, seq, rev, change, body):
        """Applies a change unless it is applied. A summary may be stored and its reactor's row not: then only the second is missing."""
        if change.op != "react": newest = self.content[0]
        else: newest = self.reactions[0]
        if newest < rev: self.apply(seq, rev, change, body)
        elif change.op == "react" and self.reaction(change.arg[0], change.by)[0] < rev:
            self.reactors[(change.arg[0], change.by)] = (rev, change.arg[1])

def content_of(seq, change, body):
    """The content of an entry after an edit or a deletion."""
    if change.op == "edit": return ("edit", body, change.after)
    return ("delete", change.by, change.after[0][change.seqs.index(seq)])

def react(summary, emoji, on):
    """The summary of reactions after one more."""
    counts = dict(summary); counts[emoji] = counts.get(emoji, 0) + (1 if on else -1)
    return tuple(sorted((e, n) for e, n in counts.items() if n))

def items_of(changes, after, rev):
    """The items of an event or a page of `changes`, from the change rows in (after, rev] alone: seq -> (rev, content, reactions).
    Content and reactions are None if they did not change. An edit whose content was erased has no content: its deletion follows."""
    items = {}
    for number in range(after + 1, rev + 1):
        change, body = changes[number]
        for seq in change.seqs:
            _, text, reactions = items.get(seq, (0, None, None))
            if change.op == "react": reactions = change.after
            elif change.op == "delete": text = ("delete", change.by)
            elif body is not None: text = ("edit", body)
            items[seq] = (number, text, reactions)
    return items
