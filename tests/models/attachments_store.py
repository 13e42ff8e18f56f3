"""The store of model_attachments.py, and how an owner reads a log from it."""
from changes_store import Future

LATE = 2                       # cut off: each write is late

class Store:
    """Three replicas with a quorum of two and blocking read repair: partition -> key -> (timestamp, value).
    A write is {partition: {key: cell}}. Each partition is atomic on each replica, and is lost, late or in time by itself."""
    def __init__(self, sim, broken):
        self.sim, self.broken, self.replicas, self.slow_until, self.stuck = sim, broken, [{}, {}, {}], 0.0, None
        self.lossy = sim.rng.random() < 0.3                                    # No write is late: it is in time or lost.
    def hop(self): return self.sim.rng.choice((0.5, 1, 1, 2, 4))
    def land(self, replica, partition, cells):
        have = self.replicas[replica].setdefault(partition, {})
        for key, cell in cells.items():
            if key not in have or have[key] < cell or self.broken == "state-rises" and key == "state": have[key] = cell
    def write_one(self, partition, cells, replicas=(0, 1, 2), cut_off=False):
        """If the gateway is cut off, most of its writes are lost or late; if the store is slow, half of all. A stuck partition takes no write in time."""
        future, acknowledged, rng = Future(), [0], self.sim.rng
        def in_time(replica):
            self.land(replica, partition, cells); acknowledged[0] += 1
            if acknowledged[0] == 2: self.sim.at(self.hop(), lambda: future.set(True))
        slow = self.sim.now < self.slow_until
        least = 0.9 if cut_off == LATE or slow and partition == self.stuck else 0.7 if cut_off else 0.6 if slow else 0
        for replica in replicas:
            fate = rng.uniform(least, 1)
            if fate < 0.8: self.sim.at(self.hop(), lambda r=replica: in_time(r))
            elif fate < 0.95 and not self.lossy: self.sim.at(rng.uniform(5, 150), lambda r=replica: self.land(r, partition, cells))
        self.sim.at(8, lambda: future.set(False)); return future
    def write(self, rows, cut_off=False):
        """-> a future of the set of partitions whose write has an unknown outcome"""
        result, left, unknown = Future(), [len(rows)], set()
        for partition, cells in rows.items():
            one = self.write_one(partition, cells, cut_off=cut_off)
            def end(partition=partition, one=one):
                if not one.value: unknown.add(partition)
                left[0] -= 1
                if not left[0]: result.set(unknown)
            one.waiters.append(end)
        if not rows: result.set(unknown)
        return result
    def read(self, partition):
        """-> a future of {key: cell} of two replicas, repaired on both before it returns; None after a time-out"""
        def steps():
            two = self.sim.rng.sample((0, 1, 2), 2)
            for _ in range(6):
                yield self.hop()
                one, other = (dict(self.replicas[r].get(partition, {})) for r in two)
                yield self.hop()
                merged = dict(one)
                for key, cell in other.items():
                    if key not in merged or merged[key] < cell: merged[key] = cell
                if (one != merged or other != merged) and not (yield self.write_one(partition, merged, two)): continue
                return None if self.sim.rng.random() < 0.04 else merged
            return None
        return self.sim.spawn(steps())

def adopt(cells, mark=0):
    """Finds the valid log: [prefix], [chain], [repeat] of docs/storage.md. -> (its rows by position, the highest certain position)"""
    best, writers = {}, {}
    for (position, epoch), (_, row) in cells.items():
        writers.setdefault((position, row.id, row.origin), set()).add(epoch)
        if position not in best or epoch > best[position][0]: best[position] = (epoch, row)
    known = max([mark, *(row.claim for _, row in best.values())])
    rows, ids, last, before = {}, set(), 0, None
    while len(rows) + 1 in best:
        position = len(rows) + 1; epoch, row = best[position]
        wrote = writers[(position, row.id, row.origin)]
        if position > known and (epoch < last or row.id in ids or position > known + 1 and not before & wrote): break
        rows[position] = row; ids.add(row.id); last, before = epoch, wrote
    return rows, known
