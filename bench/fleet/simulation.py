# SPDX-License-Identifier: Apache-2.0
"""A fleet of nodes, each an engine with kvstrata's memory and disk, over shards of one remote tier.

A request takes what it can of its prompt from memory, then disk, then remote, in whole groups that follow one another,
and computes the rest when the engine is free: first come, first served. Transfers of a shard and of a node's network
queue in each direction. As in the daemon, remote is asked only for 256 tokens or more, and not at all where the bytes at
the rate that was last seen take more than half of what computing them takes.
"""
import dataclasses
import heapq
import itertools
import random

from .tiers import Link, Lru

QUEUE_SECONDS = 2  # time of writes that wait, at most
RATE_SECONDS = 10  # for which a rate that was seen is believed


@dataclasses.dataclass(frozen=True)
class Fleet:
    """Sizes in bytes, rates in bytes a second, times in seconds."""
    nodes: int = 64
    token_bytes: int = 128 * 1024       # Llama-3.1-8B, bf16
    prefill: float = 15_000             # tokens a second of an engine
    memory: float = 64e9                # bytes of a node
    disk: float = 1e12
    disk_rate: float = 5e9
    shards: int = 64                    # 0: no remote tier
    shard_memory: float = 256e9
    shard_rate: float = 2.4e9           # each way; what one thread of Redis gives at best, or a 25 Gb/s link
    node_rate: float = 12e9             # each way; a 100 Gb/s link
    round_trip: float = 0.0005
    write: str = "reused"               # or all
    affinity: float = 0.5               # chance that a turn goes to the node of the turn before
    min_tokens: int = 256


class Node:
    def __init__(self, fleet):
        self.memory = Lru(fleet.memory / fleet.token_bytes)
        self.disk = Lru(fleet.disk / fleet.token_bytes)
        self.disk_link = Link(fleet.disk_rate)
        self.into, self.out = Link(fleet.node_rate), Link(fleet.node_rate)
        self.engine_free = 0.0
        self.backlog = 0.0  # seconds of computing that wait
        self.rate, self.rate_seen = 0.0, float("-inf")  # rate of remote, as last seen


class Shard:
    def __init__(self, fleet):
        self.held = Lru(fleet.shard_memory / fleet.token_bytes)
        self.into, self.out = Link(fleet.shard_rate), Link(fleet.shard_rate)


class Simulation:
    """Runs requests; what arrives before `warm_up` counts in no figure."""

    def __init__(self, fleet, warm_up, seed):
        self.fleet, self.warm_up = fleet, warm_up
        self.rng = random.Random(seed)
        self.nodes = [Node(fleet) for _ in range(fleet.nodes)]
        self.shards = [Shard(fleet) for _ in range(fleet.shards)]
        self.homes = {}
        self.first_tokens = []
        self.tokens = dict.fromkeys(("memory", "disk", "remote", "computed"), 0)
        self.dropped_bytes = 0
        self.refused = 0  # requests for which remote would have been too slow
        self.warm_bytes = [(0, 0)] * fleet.shards
        self.end = 0.0
        self._events, self._numbers = [], itertools.count()

    def run(self, requests):
        warm = False
        for request in requests:
            self._compute_until(request.time)
            if not warm and request.time >= self.warm_up:
                warm = True
                self.warm_bytes = [(s.into.bytes, s.out.bytes) for s in self.shards]
            self._arrive(request)
            self.end = request.time
        self._compute_until(float("inf"))

    def _arrive(self, request):
        index = self._route(request)
        node = self.nodes[index]
        held, ready = self._take(node, request)
        rest = request.tokens - held
        node.backlog += rest / self.fleet.prefill
        self._add_event(ready, index, rest, request)

    def _route(self, request):
        """The node of the turn before, or the better of two at random."""
        home = self.homes.get(request.conversation)
        if home is None or self.rng.random() >= self.fleet.affinity:
            two = self.rng.randrange(len(self.nodes)), self.rng.randrange(len(self.nodes))
            home = min(two, key=lambda i: self.nodes[i].backlog)
        self.homes[request.conversation] = home
        return home

    def _take(self, node, request):
        """Tokens that need no computing, and when all of them are in memory."""
        counts = request.time >= self.warm_up
        found = {"memory": [], "disk": [], "remote": []}
        walk = list(self._walk(node, request))
        remote = sum(tokens for name, _, tokens in walk if name == "remote")
        if remote and not self._pays(node, remote, request.time):
            self.refused += counts
            walk = list(itertools.takewhile(lambda found: found[0] != "remote", walk))
        for name, key, tokens in walk:
            found[name].append((key, tokens))
            if counts:
                self.tokens[name] += tokens
        taken = sum(tokens for _, _, tokens in walk)
        if counts:
            self.tokens["computed"] += request.tokens - taken
        ready = max([self._fetch(node, name, got, request.time) for name, got in found.items() if got],
                    default=request.time)
        return taken, ready

    def _walk(self, node, request):
        """(tier, key, tokens) of the prompt's groups that are held, up to the first that is not held whole."""
        for key, wanted in request.groups():
            tiers = [("memory", node.memory), ("disk", node.disk)]
            if self.shards:
                tiers.append(("remote", self._shard(key).held))
            name, tokens = max(((name, min(held.has(key), wanted)) for name, held in tiers), key=lambda x: x[1])
            if tokens:
                yield name, key, tokens
            if tokens < wanted:
                return

    def _shard(self, key):
        return self.shards[hash(key) % len(self.shards)]

    def _pays(self, node, tokens, now):
        """Whether a look-up of remote may fetch: a rate is forgotten after RATE_SECONDS."""
        if now - node.rate_seen > RATE_SECONDS:
            node.rate = min(self.fleet.node_rate, self.fleet.shard_rate * self.fleet.shards)
        fetching, computing = tokens * self.fleet.token_bytes / node.rate, tokens / self.fleet.prefill
        return tokens >= self.fleet.min_tokens and fetching <= computing / 2

    def _fetch(self, node, name, got, now):
        """When the groups are in memory; those of a slower tier are offered to the ones above it."""
        done, size = now, sum(tokens for _, tokens in got) * self.fleet.token_bytes
        if name == "disk":
            done = node.disk_link.done(now, size)
        if name == "remote":
            for key, tokens in got:
                done = max(done, self._shard(key).out.done(now, tokens * self.fleet.token_bytes))
                self._shard(key).held.get(key)
            done = max(done, node.into.done(now, size)) + 2 * self.fleet.round_trip
            node.rate += 0.2 * (size / (done - now) - node.rate)
            node.rate_seen = now
        for key, tokens in got:
            node.memory.put(key, tokens)
            node.disk.put(key, tokens)
        return done

    def _compute_until(self, time):
        """What happens by then, in the order of time: prompts that are ready are computed, and what was is stored."""
        while self._events and self._events[0][0] <= time:
            now, _, index, rest, request = heapq.heappop(self._events)
            node = self.nodes[index]
            if rest is None:
                self._store(node, request, now)
                continue
            node.engine_free = max(node.engine_free, now) + rest / self.fleet.prefill
            node.backlog -= rest / self.fleet.prefill
            if request.time >= self.warm_up:
                self.first_tokens.append(node.engine_free - request.time)
            self._add_event(node.engine_free, index, None, request)

    def _add_event(self, time, index, rest, request):
        """`rest`: tokens to compute; None: they are computed."""
        heapq.heappush(self._events, (time, next(self._numbers), index, rest, request))

    def _store(self, node, request, now):
        reused = request.turn > 0 or request.document >= 0
        for key, tokens in request.groups():
            node.memory.put(key, tokens)
            node.disk.put(key, tokens)
            if not self.shards or (self.fleet.write == "reused" and not reused):
                continue
            self._write(node, key, tokens, now)

    def _write(self, node, key, tokens, now):
        """To remote, unless it is there; dropped where QUEUE_SECONDS of writes wait already."""
        shard = self._shard(key)
        size = (tokens - shard.held.has(key)) * self.fleet.token_bytes
        if size <= 0:
            return
        if max(node.out.wait(now), shard.into.wait(now)) > QUEUE_SECONDS:
            self.dropped_bytes += size
            return
        shard.held.put(key, tokens)
        shard.into.done(now, size)
        node.out.done(now, size)
