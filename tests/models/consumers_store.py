"""The stores of model_consumers.py: several replicas, or the embedded store. Both hold rows that can be deleted."""
from attachments_store import LATE, Store
from changes_store import Future

ROW, DELETED = (0,), (1,)      # the values of a row and of its deletion. At equal timestamps the deletion wins.

def offset_row(consumer, offset): return {(consumer, "s"): (offset[0], ""), (consumer, "r"): (offset[1], "")}

def lagging_row(conversation, at, value): return {(conversation, "s"): (at[0], value), (conversation, "r"): (at[1], value)}

class Replicas(Store):
    """Three replicas. A deletion is a row too, with its timestamp. While a partition is stuck, the others are not slow."""
    stuck_until = 0.0
    def write_one(self, partition, cells, replicas=(0, 1, 2), cut_off=False):
        is_stuck = self.sim.now < self.stuck_until and partition == self.stuck
        return super().write_one(partition, cells, replicas, LATE if is_stuck else cut_off)
    def views(self, partition):
        """What each pair of replicas answers."""
        for one, other in ((0, 1), (0, 2), (1, 2)):
            merged = dict(self.replicas[one].get(partition, {}))
            for key, cell in self.replicas[other].get(partition, {}).items(): merged[key] = max(cell, merged.get(key, cell))
            yield merged
    def all(self, partition):
        """What the replicas converge to."""
        out = {}
        for replica in self.replicas:
            for key, cell in replica.get(partition, {}).items(): out[key] = max(cell, out.get(key, cell))
        return out

class Embedded(Store):
    """One replica that loses nothing. A deletion removes the row, so nothing is left of it."""
    def write_one(self, partition, cells, replicas=(0,), cut_off=False):
        future = Future()
        def land():
            have = self.replicas[0].setdefault(partition, {})
            for key, cell in cells.items():
                if cell[1] == DELETED:
                    if key in have and (have[key][0] <= cell[0] or self.broken == "lagging-embedded"): del have[key]
                elif key not in have or have[key] < cell: have[key] = cell
            self.sim.at(self.hop(), lambda: future.set(True))
        self.sim.at(self.hop(), land)
        return future
    def read(self, partition):
        def steps():
            yield self.hop()
            return dict(self.replicas[0].get(partition, {}))
        return self.sim.spawn(steps())
    def views(self, partition): yield self.replicas[0].get(partition, {})
