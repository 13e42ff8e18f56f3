#!/usr/bin/env python3
"""Executable model of consumers: followers beside the owners, offsets, lagging rows, activity, and the state of a consumer.

    model_consumers.py [SEEDS] [--from N] [--break RULE]
    model_consumers.py --rules

Three conversations, each with two logs (entries and changes), on up to three gateways over replicas that lose, delay and resurrect writes, or on
one gateway over the embedded store. Gateways crash, pause, stop and start, also all at once, and are deposed without knowing it. Receivers fail,
are down for long, and take requests whose answers get lost. A second consumer is configured while all this happens. The model checks that each
committed entry and change arrives, for the first time in order; that nothing uncommitted arrives; that at each moment undelivered events are
named by a row; that rows of finished work stay deleted; that no offset falls; and that the last state of a consumer counts.
Without --break no seed may fail. With a broken rule some seeds must fail.
"""
import sys
from zlib import crc32

from changes_store import Future, Simulation
from consumers_check import Check, Receiver
from consumers_owner import MINUTE, MINUTES, SHARDS, Owner
from consumers_store import DELETED, ROW, Embedded, Replicas

RULES = {
    "committed":         "only committed entries and changes are delivered",
    "committed-applied": "a change is delivered when its effects are stored, because content is read at delivery",
    "lease":             "content is read for delivery under the lease",
    "order":             "one request per conversation and consumer is in flight",
    "order-change":      "a change is delivered after its entry",
    "offset":            "the offset advances after success only",
    "offset-max":        "a stored offset has itself as timestamp, so a late write does not lower it",
    "first":             "the first append to a conversation without an offset row commits when that row is stored too",
    "first-certain":     "without an offset row a takeover begins at the certain seq and rev, not at the heads",
    "first-mark":        "an orderly stop stores the offset row before its mark, which makes everything certain",
    "found-close":       "an owner that closes while behind stores the lagging row first",
    "found-end":         "so does one whose lease has ended",
    "found-applied":     "a change is undelivered from its commit, not from when its effects are stored",
    "found-settle":      "a takeover that finds uncertain rows stores its activity before it settles them, and so before crash repair ends",
    "found-repeat":      "until a lagging row is stored, the activity is repeated each minute",
    "found-minute":      "each attempt to append writes the activity of the minute of the attempt",
    "found-durable":     "an append leaves out the activity only if that of this minute is stored, not when another append is writing it",
    "lagging-heads":     "a lagging row has the heads as timestamps, its deletion the offset",
    "lagging-embedded":  "in the embedded store too, a deletion removes no row with a higher timestamp",
    "lagging-caught":    "a lagging row goes when the owner has caught up, not when it has passed the heads of the row",
    "lagging-offset":    "before that the offset is stored, and then the lease is checked",
    "lagging-count":     "an owner that begins to delete a lagging row no longer counts on it: if it closes while behind, it stores the row again",
    "lagging-turn":      "an owner that is storing a lagging row begins no deletion",
    "lagging-scan":      "an owner that the scan asks, and that has caught up, deletes the row",
    "version":           "a state has the ring version and a counter as timestamp",
    "version-lease":     "the lease is checked after the write of a state, before ok",
}

CONVERSATIONS, CONSUMERS, SCAN = range(3), range(2), 20

class Grant:
    """The right of a gateway to act for a key under a ring version. `end` is when its lease ends."""
    def __init__(self, gateway, version, begin): self.gateway, self.version, self.begin, self.end = gateway, version, begin, 1e9

class Gateway:
    def __init__(self, world, number):
        self.world, self.sim, self.id, self.paused_until, self.cut_off = world, world.sim, number, 0.0, False
        self.skew, self.consumers = world.sim.rng.uniform(-30, 30), CONSUMERS if world.offered else CONSUMERS[:1]
        self.open, self.owners, self.endpoint_down, self.grants = {}, [], {}, {}
        self.counter, self.stopping, self.forgotten = 0, False, False
        self.sim.spawn(self.scan(), self)
    def is_up(self): return self.paused_until <= self.sim.now
    def minute(self): return int((self.sim.now + self.skew + 100) // MINUTE)
    def owner(self, conversation):
        """-> the owner of a conversation, loaded if it is not open; None if this gateway has no lease for it"""
        grant, owner = self.world.grants[conversation], self.open.get(conversation)
        if grant.gateway is not self or not grant.begin <= self.sim.now < grant.end: return None
        if owner is None or owner.gone or owner.grant is not grant:
            if self.stopping: return None
            owner = self.open[conversation] = Owner(self, conversation, grant); self.owners.append(owner)
        return owner
    # -- finding work
    def scan(self):
        while True:
            yield self.sim.rng.uniform(0.5, 1) * SCAN
            for consumer in self.consumers:
                for shard in range(SHARDS):
                    grant = self.world.grants[("shard", consumer, shard)]
                    if grant.gateway is self and self.sim.now < grant.end and self.sim.now >= self.endpoint_down.get(consumer, 0):
                        yield from self.scan_shard(consumer, shard)
    def scan_shard(self, consumer, shard):
        rows = yield self.world.store.read(("lagging", consumer, shard))
        for conversation in sorted({key[0] for key, (_, value) in (rows or {}).items() if value == ROW}):
            for _ in range(20):
                owner = self.world.current(conversation)
                if owner and owner.serving and owner.followers.get(consumer):
                    if self.world.broken != "lagging-scan": owner.followers[consumer].may_lag = True
                    break
                yield 1
    def repair(self, gone):
        """Crash repair. -> whether it ended"""
        rows = yield self.world.store.read(("activity", gone.id))
        if rows is None: return False
        listed = {key for key, (_, value) in rows.items() if value == ROW}
        newest = sorted({minute for minute, _ in listed})[-MINUTES:]
        for conversation in sorted({at for minute, at in listed if minute in newest}):
            while True:
                owner = self.world.current(conversation)
                if owner and owner.serving and owner.leased(): break
                yield 1
        return (yield from gone.forget(listed, self))
    def forget(self, listed, by):
        self.forgotten = True; self.world.check.named()
        while (yield self.world.store.write({("activity", self.id): {key: (1, DELETED) for key in listed}}, by.cut_off)): pass
        return True
    def stop(self):
        """An orderly stop. -> whether it ended"""
        self.stopping = True
        for owner in self.owners: self.sim.spawn(owner.close(), self)
        for _ in range(60):
            if all(owner.gone for owner in self.owners): break
            yield 1
        else: return False
        rows = yield self.world.store.read(("activity", self.id))
        return rows is not None and (yield from self.forget(set(rows), self))
    # -- the state of a consumer
    def set_state(self, consumer, value):
        """-> whether it is stored: ok"""
        grant = self.grants[("state", consumer)]; self.counter += 1
        stamp = (grant.version << 32) + self.counter if self.world.broken != "version" else int((self.sim.now + self.skew + 100) * 1000)
        while (yield self.world.store.write({("state", consumer): {"value": (stamp, value)}}, self.cut_off)):
            if self.sim.now >= grant.end: return False
        return self.sim.now < grant.end or self.world.broken == "version-lease"

class World:
    def __init__(self, seed, broken):
        self.sim, self.broken, self.findings, self.active, self.embedded = Simulation(seed), broken, [], True, seed % 4 == 3
        rng = self.sim.rng
        self.store = (Embedded if self.embedded else Replicas)(self.sim, broken)
        self.check, self.committed_before = Check(self), set()
        self.troubles, self.restless = rng.choice((0, 0.01, 0.03)), rng.choice((8, 15, 40, 100))
        self.outages, self.pace = rng.choice((0.01, 0.05, 0.15)), rng.choice((2, 6, 15))
        self.hush = seed % 8 == 5
        if self.hush: self.begin_hush()
        self.storm = seed % 8 in (1, 3)                                        # Much fails, shortly.
        if self.storm: self.troubles, self.restless, self.outages, self.pace = 0.03, 12, rng.choice((0.02, 0.1, 0.3)), 2
        self.offered = self.configured = False                                 # the second consumer: by new gateways, by all of them
        self.version, self.gateways, self.members, self.broken_down, self.grants, self.sent = 0, [], [], [], {}, 0
        self.receivers = [Receiver(self, consumer) for consumer in CONSUMERS]
        self.keys = [*CONVERSATIONS, *(("shard", c, s) for c in CONSUMERS for s in range(SHARDS)), *(("state", c) for c in CONSUMERS)]
        for key in self.keys: self.grants[key] = Grant(None, 0, 0); self.grants[key].end = 0
        for _ in range(1 if self.embedded else rng.choice((1, 2, 3))): self.join()
        for conversation in CONVERSATIONS: self.sim.spawn(self.client(conversation))
        for consumer in CONSUMERS: self.sim.spawn(self.admin(consumer))
        for steps in (self.ring(), self.repairs(), self.weather(), self.watch()): self.sim.spawn(steps)
    def begin_hush(self):
        """A seldom schedule: the receiver is down, no lagging row gets stored, and little else happens in one conversation."""
        self.store.lossy, self.troubles, self.restless, self.outages, self.pace = True, 0, 600, 0, 6
        def begin(): self.receivers[0].down_until, self.store.stuck_until, self.store.stuck = 300, 250, ("lagging", 0, 0)
        self.sim.at(self.sim.rng.uniform(20, 80), begin)
    def found(self, what): self.findings.append(f"at {self.sim.now:.1f} {what}")
    def timed(self, future, limit):
        timed = Future(); future.waiters.append(lambda: timed.set(future.value)); self.sim.at(limit, lambda: timed.set(None))
        return timed
    def current(self, conversation):
        gateway = self.grants[conversation].gateway
        return gateway.owner(conversation) if gateway and gateway.is_up() else None
    # -- the ring
    def join(self):
        gateway = Gateway(self, len(self.gateways)); self.gateways.append(gateway); self.members.append(gateway)
        self.place()
    def place(self, lapsed=None):
        """A new ring version. A gateway that keeps a key keeps its grant, unless its lease lapsed."""
        self.version += 1
        if self.offered and self.members and all(len(g.consumers) == 2 for g in self.gateways if g.paused_until < 1e9 or g in self.members): self.configured = True
        for key in self.keys:
            old = self.grants[key]
            best = max(self.members, key=lambda g: crc32(f"{key}/{g.id}".encode()), default=None)
            if old.gateway is best is not lapsed and old.end == 1e9: continue
            dead = old.gateway is None or old.gateway.paused_until >= 1e9 or self.embedded or old.gateway.forgotten
            old.end = min(old.end, self.sim.now + (0 if dead else self.sim.rng.uniform(0, 12)))
            if best: self.grants[key] = best.grants[key] = Grant(best, self.version, max(old.begin, old.end, self.sim.now) + 0.01)
    def remove(self, gateway):
        if gateway not in self.members: return
        self.members.remove(gateway)
        if not gateway.forgotten: self.broken_down.append(gateway)
        self.place()
    def fail(self, gateway):
        """A crash; in a cluster also a pause or a cut connection to the store, after which the others remove the gateway."""
        rng = self.sim.rng; fate = rng.random() if not self.embedded else 0
        if fate < 0.5: gateway.paused_until = 1e9
        elif fate < 0.8: gateway.paused_until = self.sim.now + rng.uniform(5, 80)
        else: gateway.cut_off = True
        self.sim.at(rng.uniform(1, 10), lambda: self.remove(gateway))
    def trouble(self, gateway):
        """Perhaps a gateway fails between two of its steps."""
        if self.active and gateway.is_up() and gateway in self.members and self.sim.rng.random() < self.troubles: self.fail(gateway)
    def ring(self):
        rng = self.sim.rng
        while self.active:
            yield rng.uniform(0.2, 1) * self.restless
            up, fate = [g for g in self.members if g.is_up() and not g.stopping], rng.random()
            if not self.active: return
            if self.members and not self.offered and self.sim.now > 120: self.offered = True
            if self.offered and not self.configured and up:
                # Gateways start again one by one, with the new configuration.
                old = [g for g in up if len(g.consumers) == 1]
                if old: yield from self.stop(rng.choice(old))
                elif fate < 0.5: self.place()
            elif up and fate < 0.3: self.fail(rng.choice(up))
            elif up and fate < 0.4:
                for gateway in up: self.fail(gateway)
            elif up and fate < 0.6: yield from self.stop(rng.choice(up))
            elif up and fate < 0.75 and not self.embedded: self.place(rng.choice(up))
            if len(self.members) < (1 if self.embedded else rng.choice((1, 2, 3))):
                if not self.members: yield rng.choice((1, 10, 60, 100))
                self.join()
    def stop(self, gateway):
        ended = yield self.timed(self.sim.spawn(gateway.stop(), gateway), 90)
        if not ended: gateway.paused_until = 1e9; yield self.sim.rng.uniform(1, 10)
        self.remove(gateway)
    def repairs(self):
        while True:
            yield 1
            up = [g for g in self.members if g.is_up()]
            for gateway in list(self.broken_down):
                if up:
                    by = self.sim.rng.choice(up)
                    if (yield self.timed(self.sim.spawn(by.repair(gateway), by), 100)): self.broken_down.remove(gateway)
    # -- what happens
    def weather(self):
        """Outages of receivers, slow parts of the store, evictions."""
        rng = self.sim.rng
        while True:
            yield rng.uniform(1, 8)
            if self.active and rng.random() < self.outages: rng.choice(self.receivers).down_until = self.sim.now + rng.choice((10, 40, 150) if not self.storm else (5, 12, 60))
            if self.sim.now > 700: return
            if self.active and rng.random() < 0.04 and not self.hush:
                tables = [("lagging", c, s) for c in CONSUMERS for s in range(SHARDS)] + [("entries", c) for c in CONVERSATIONS]
                self.store.stuck_until, self.store.stuck = self.sim.now + rng.uniform(40, 150), rng.choice(tables)
            owners = [o for g in self.members if g.is_up() for o in g.open.values() if o.serving and not o.closing]
            if owners and rng.random() < (0.02 if self.hush else 0.6 if self.storm else 0.25): owner = rng.choice(owners); self.sim.spawn(owner.close(), owner.gateway)
    def watch(self):
        while True:
            yield 1
            self.check.named(); self.check.gone()
    def ask(self, conversation, request, limit=20):
        """-> the answer of the owner, or of one that was deposed; None = none in time"""
        owner, rng = self.current(conversation), self.sim.rng
        if rng.random() < 0.2:
            others = [g.open[conversation] for g in self.gateways if conversation in g.open and g.paused_until < 1e9]
            if others: owner = rng.choice(others)
        for _ in range(10):
            if owner and owner.serving: break
            yield 1
        else: return None
        return (yield self.timed(self.sim.spawn(request(owner), owner.gateway), limit))
    def client(self, conversation):
        rng, seqs, number = self.sim.rng, [], 0
        while self.active:
            if self.hush and conversation == 0 and 80 < self.sim.now < 250: yield 250 - self.sim.now
            yield rng.uniform(0.1, 1) * self.pace if rng.random() < 0.9 else rng.uniform(30, 100)
            for _ in range(rng.choice((1, 1, 1, 3))):
                number += 1; name = f"{conversation}.{number}"
                if seqs and rng.random() < 0.35: self.sim.spawn(self.repeat(conversation, lambda o, n=name, s=rng.choice(seqs[-3:]): o.change(n, s)))
                else: self.sim.spawn(self.repeat(conversation, lambda o, n=name: o.send(n), seqs))
    def repeat(self, conversation, request, seqs=None):
        for _ in range(self.sim.rng.choice((1, 3, 6))):
            if not self.active: return
            answer = yield from self.ask(conversation, request)
            if answer is None: yield self.sim.rng.uniform(0.5, 6); continue
            if seqs is not None: seqs.append(answer); self.sent += 1
            return
    def admin(self, consumer):
        """Enables and disables a consumer, one request after the other, and reads what it is."""
        rng, states, number = self.sim.rng, self.check.states.setdefault(consumer, {}), 0
        while True:
            yield rng.uniform(1, 15)
            if self.active:
                grant = self.grants[("state", consumer)]; number += 1
                old = [g for g in self.gateways if ("state", consumer) in g.grants and g.paused_until < 1e9]
                gateway = rng.choice(old) if old and rng.random() < 0.3 else grant.gateway
                if gateway is None or gateway.grants[("state", consumer)].begin > self.sim.now: continue
                states[number] = (self.sim.now, None)
                if (yield self.timed(self.sim.spawn(gateway.set_state(consumer, number), gateway), 20)): states[number] = (states[number][0], self.sim.now)
            since = self.sim.now; rows = yield self.store.read(("state", consumer))
            if rows is not None: self.check.state(consumer, rows.get("value", (0, None))[1], since)
    # -- the end
    def finish(self):
        self.sim.run(400); self.active = False
        for receiver in self.receivers: receiver.down_until = 0
        self.abandon()
        self.sim.run(410); self.offered = True
        while len(self.members) < (1 if self.embedded else 2) or not any(g.is_up() for g in self.members): self.join()
        for _ in range(20):
            self.sim.run(self.sim.now + 50)
            if self.findings or self.is_quiet() and self.sim.now > 600: return self.findings
        for (consumer, conversation), places in self.check.missing.items():
            if places: self.found(f"consumer {consumer} never gets {sorted(places)[:3]} of {conversation}")
        self.found(f"not everything ends: {len(self.broken_down)} gateways to repair, lagging rows {self.rows()}")
        return self.findings
    def abandon(self):
        """Nobody asks for the conversations any more. The lease of a gateway lapses, and then it stops."""
        up = [g for g in self.members if g.is_up() and not g.stopping]
        if not up or self.embedded: return
        gateway = self.sim.rng.choice(up)
        self.place(gateway)
        self.sim.at(self.sim.rng.uniform(0, 20), lambda: self.sim.spawn(self.stop(gateway)))
    def rows(self):
        return [(c, n) for c in CONSUMERS for n in CONVERSATIONS if self.check.has_row(c, n)]
    def is_quiet(self): return not self.broken_down and not self.rows() and not any(self.check.missing.values())

def main(args):
    if "--rules" in args: return print("\n".join(f"{rule:18} {text}" for rule, text in RULES.items()))
    broken = args[args.index("--break") + 1] if "--break" in args else None
    if broken and broken not in RULES: sys.exit(f"no such rule: {broken}; one of {' '.join(RULES)}")
    seeds = int(args[0]) if args and args[0].isdigit() else 200
    first = int(args[args.index("--from") + 1]) if "--from" in args else 0
    sent = events = repeats = gateways = named = 0
    for seed in range(first, first + seeds):
        world = World(seed, broken); findings = world.finish(); check = world.check
        sent += world.sent; events += check.events; repeats += check.repeats; gateways += len(world.gateways); named += check.named_by_row
        if findings:
            print(f"seed {seed} fails, rule broken: {broken} (after {seed - first + 1} seeds)\n  " + "\n  ".join(findings[:4]))
            sys.exit(0 if broken else 1)
    print(f"{seeds} seeds passed, {sent} acknowledged messages, {events} events arrived, {repeats} of them again, {gateways} gateways; broken rule: {broken}")
    sys.exit(1 if broken else 0)

if __name__ == "__main__":
    main(sys.argv[1:])
