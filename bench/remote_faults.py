#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a remote tier does to prompts while its servers and daemons fail, and what is left in stolen memory.

    remote_faults.py [ROW ...] [--json-out FILE] [--seed N] [--commit HASH] [--date DATE]

Nodes are daemons with a disk of their own. Between them are three masters of Redis Cluster on loopback, with a replica
each where the row says so. An engine in numpy appends random rows of a small model (a page of 16 tokens has 4 KiB), in
`prompts` that one node computes and another one opens. Behind each open it appends what is not held, decodes a token and
compares with attention in numpy: an error, or a wrong output, ends the program. It prints its seed and takes some minutes.

replicas      kill -9 of a master with a replica, then 200 opens: tokens held (must: 99 %)
alone         the same without replicas, 200 prompts of 475 pages (must: half of the tokens)
stopped       SIGSTOP of one of three: milliseconds of an open beyond its deadline, 99th percentile (must: 50), and once it
              is left alone, beyond that of opens before (must: 5)
writer        kill -9 of the daemon that writes: misses only
restarted     all servers killed and started empty: misses only, and what is put afterwards is held again
full          five times of what the servers may keep, and a hot set: its tokens held in the last round (must: 90 %)
stolen        remote.seal = gcm: servers' dumps and memory are searched for a known prompt's ids, keys and values. With
              `none` keys and values are found, which shows that the search works
"""
import argparse
import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "integrations" / "kvstrata" / "src")]

import numpy as np  # noqa: E402
from redis_cluster import RedisCluster  # noqa: E402

import kvstrata  # noqa: E402
from kvstrata.daemon import Daemon  # noqa: E402
from kvstrata.machine import device_name  # noqa: E402

PAGE, DIM = 16, 64
WITHIN = 120  # seconds, until all is written
MIB = 1 << 20


class Prompt:
    """Token ids [tokens], and the rows that an engine has of all but the last, [tokens - 1][heads][DIM] each."""

    def __init__(self, seed, number, pages, heads=1):
        rng = np.random.default_rng((seed, number))
        self.usable = pages * PAGE
        self.ids = rng.integers(0, 50_000, self.usable + 2).astype(np.int32)
        self.k, self.v, self.q = rng.standard_normal((3, self.usable + 1, heads, DIM)).astype(np.float16)

    def last_output(self):
        """Full attention of the last token that has rows, [heads][DIM]."""
        k, v = self.k.astype(np.float64), self.v.astype(np.float64)
        scores = np.einsum("thd,hd->ht", k, self.q[-1].astype(np.float64)) / DIM ** 0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.einsum("ht,thd->hd", weights, v) / weights.sum(axis=1, keepdims=True)


class Node:
    """A daemon, and an engine's session of it. From node()."""

    def __init__(self, daemon, session, heads=1):
        self.daemon, self.session, self.heads = daemon, session, heads
        self.model = session.register_model("random rows", "1", layers=1, query_heads=heads, kv_heads=heads, head_dim=DIM,
                                            page_tokens=PAGE, dtype=kvstrata.DType.F16)

    @contextlib.contextmanager
    def another(self):
        """An engine more at the same daemon, for a thread of its own."""
        with kvstrata.attach(self.daemon.socket, threads=1) as session:
            yield Node(self.daemon, session, self.heads)

    def open(self, prompt):
        """(tokens held, milliseconds of the open); raises where the engine sees an error or a wrong output.

        It ends before the prompt's last token: so the daemon learns of no rate at which this engine computes, which is
        far above a model's, and asks the servers always.
        """
        begin = time.perf_counter()
        sequence = self.session.open(self.model, "full", prompt.ids)
        elapsed = (time.perf_counter() - begin) * 1e3
        with sequence:
            for part in (slice(sequence.held, prompt.usable), slice(prompt.usable, prompt.usable + 1)):
                if part.start == part.stop:
                    continue
                with self.session.step([(sequence, prompt.ids[part])]) as step:
                    step.append(0, prompt.k[part], prompt.v[part])
                    if part.start == prompt.usable:
                        out = step.attend(0, prompt.q[part])
            sequence.settle()
            held = sequence.held
        if not np.allclose(np.asarray(out, np.float64)[0], prompt.last_output(), atol=5e-3):
            raise AssertionError(f"wrong output behind {held} held tokens")
        return held, elapsed

    def open_all(self, prompts):
        """(share of the usable tokens that was held, milliseconds of each open)"""
        opened = [self.open(prompt) for prompt in prompts]
        return sum(held for held, _ in opened) / sum(p.usable for p in prompts), [ms for _, ms in opened]

    def remote(self):
        text = subprocess.run([os.environ.get("KVSTRATA_CLI", ROOT / "build/bin/kvstrata"), "--socket", self.daemon.socket,
                               "tier", "ls", "-o", "json"], check=True, stdout=subprocess.PIPE, text=True).stdout
        return json.loads(text)["remotes"][0]

    def await_written(self):
        """Until nothing waits to go to the servers."""
        deadline = time.monotonic() + WITHIN
        while (remote := self.remote())["waiting"]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all is written after {WITHIN} s: {remote}")
            time.sleep(0.05)
        return remote


class Bench:
    """A folder, a seed, and what nodes have in common."""

    suite, command, heads = "remote-faults", "bench/remote_faults.py", 1

    def __init__(self, folder, seed):
        self.folder, self.seed, self.rows = pathlib.Path(folder), seed, []
        self.random = random.Random(seed)
        secret = self.folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(os.urandom(32).hex() + "\n")

    def prompts(self, n, pages):
        """New ones each time."""
        return [Prompt(self.seed, self.random.getrandbits(62), pages, self.heads) for _ in range(n)]

    @contextlib.contextmanager
    def cluster(self, **options):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, RedisCluster(folder, **options) as cluster:
            yield cluster

    def servers_of(self, cluster):
        """Settings that tell a node where its servers are."""
        return {"remote.redis": cluster.address}

    @contextlib.contextmanager
    def node(self, cluster, **settings):
        """With an empty disk. settings: of the daemon, `_` for the dot behind the section."""
        with tempfile.TemporaryDirectory(dir=self.folder) as disk:
            given = {"pool.device_bytes": "1GiB", "pool.host_bytes": "64MiB", "disk.path": disk,
                     "disk.budget_bytes": "2GiB", **self.servers_of(cluster),
                     "remote.secret_file": self.folder / "secret", "remote.write": "all",
                     **{name.replace("_", ".", 1): value for name, value in settings.items()}}
            words = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
            with Daemon(*words) as daemon, kvstrata.attach(daemon.socket, threads=1) as session:
                yield Node(daemon, session, self.heads)

    def compute(self, cluster, prompts, **settings):
        """In a node of their own, until the servers have all of them, and their replicas, too."""
        with self.node(cluster, **settings) as node:
            node.open_all(prompts)
            written = node.await_written()
        for i in range(cluster.masters):
            cluster.ask(i, "WAIT", str(len(cluster.ports) // cluster.masters - 1), "60000")
        print(f"  {written['written']} values, {written['written_bytes'] / 1e6:.0f} MB written, {written['failed']} failed",
              flush=True)

    def row(self, name, value, unit, must, n, smaller=False):
        met = value <= must if smaller else value >= must
        print(f"{name:34} {value:8.3f} {unit:16} {'met' if met else 'MISSED'} ({'<=' if smaller else '>='} {must})", flush=True)
        self.rows.append({"id": f"{self.suite.replace('-', '_')}/{name}", "value": value, "unit": unit, "n": n, "must": must,
                          **({"better": "smaller"} if smaller else {})})


def percentile(values, p):
    return float(np.percentile(values, p, method="inverted_cdf"))


def replicas(bench):
    prompts = bench.prompts(200, 48)
    with bench.cluster(replicas=1) as cluster:
        bench.compute(cluster, prompts)
        with bench.node(cluster) as node:
            node.open_all(bench.prompts(3, 20))  # knows its servers
            victim = bench.random.randrange(3)
            cluster.kill(victim)
            held, times = node.open_all(prompts)
    print(f"  server {victim}; an open took {percentile(times, 50):.0f} ms, at most {max(times):.0f} ms")
    bench.row("kill/replicas/held", held, "of the tokens", 0.99, len(prompts))


def alone(bench):
    prompts = bench.prompts(200, 475)
    with bench.cluster() as cluster:
        bench.compute(cluster, prompts)
        with bench.node(cluster) as node:
            victim = bench.random.randrange(3)
            cluster.kill(victim)
            held, times = node.open_all(prompts)
    print(f"  server {victim}; an open took {percentile(times, 50):.0f} ms, at most {max(times):.0f} ms")
    bench.row("kill/alone/held", held, "of the tokens", 0.5, len(prompts))


def stopped(bench, deadline=300, n=200):
    """Each open is of a prompt that the servers have; none was opened by this node before."""
    before, under, left_alone = (bench.prompts(n, 32) for _ in range(3))
    with bench.cluster() as cluster:
        bench.compute(cluster, before + under + left_alone)
        with bench.node(cluster, remote_deadline=f"{deadline}ms", remote_deadline_most=f"{deadline}ms") as node:
            all_held, well = node.open_all(before)
            victim = bench.random.randrange(3)
            cluster.stop(victim)
            held, times = node.open_all(under)
            give_up = time.monotonic() + WITHIN
            port = f":{cluster.ports[victim]}"
            while not any(shard["breaker_open"] and shard["address"].endswith(port) for shard in node.remote()["shards"]):
                node.open(bench.prompts(1, 32)[0])
                assert time.monotonic() < give_up, "its breaker does not open"
            held_then, times_then = node.open_all(left_alone)
            cluster.go_on(victim)
    print(f"  server {victim}; held {all_held:.2f}, {held:.2f} while it is stopped, {held_then:.2f} once it is left alone; "
          f"an open took {percentile(well, 50):.1f}, {percentile(times, 50):.1f}, {percentile(times_then, 50):.1f} ms, "
          f"99th percentile {percentile(well, 99):.1f}, {percentile(times, 99):.1f}, {percentile(times_then, 99):.1f} ms; "
          f"the slowest of the last: {', '.join(f'{x:.0f}' for x in sorted(times_then)[-5:])} ms; the first in halves: "
          f"{percentile(well[:n // 2], 99):.1f} and {percentile(well[n // 2:], 99):.1f} ms")
    bench.row("stop/beyond_deadline", percentile(times, 99) - deadline, "ms", 50, n, smaller=True)
    bench.row("stop/left_alone", percentile(times_then, 99) - percentile(well, 99), "ms", 5, n, smaller=True)


def writer(bench, rounds=5):
    """What the killed daemon had put is held by another, and nothing is wrong."""
    shares = []
    with bench.cluster() as cluster:
        for _ in range(rounds):
            prompts = bench.prompts(40, 60)
            with bench.node(cluster) as node:
                killer = threading.Timer(bench.random.uniform(0.05, 0.6), node.daemon.process.send_signal, [signal.SIGKILL])
                killer.start()
                with contextlib.suppress(kvstrata.KvstrataError):  # it is dead
                    node.open_all(prompts)
                killer.join()
                node.daemon.process.wait()
            with bench.node(cluster) as node:
                shares.append(node.open_all(prompts)[0])
    print("  held of what it computed: " + ", ".join(f"{share:.2f}" for share in shares))
    bench.row("writer_killed/errors", 0, "errors", 0, rounds * 40, smaller=True)


def restarted(bench):
    prompts = bench.prompts(60, 48)
    with bench.cluster() as cluster:
        bench.compute(cluster, prompts)
        with bench.node(cluster, remote_miss_ttl="0s") as node:
            assert node.open_all(prompts[:20])[0] == 1
            for i in range(3):
                cluster.kill(i)
            gone, times = node.open_all(prompts[20:30])
            for i in range(3):
                cluster.start(i)
            cluster.await_well()
            empty, _ = node.open_all(prompts[30:])
        assert gone == empty == 0, f"held {gone}, then {empty} of what no server has"
        again = bench.prompts(20, 48)
        bench.compute(cluster, again)
        with bench.node(cluster) as node:
            held, _ = node.open_all(again)
    print(f"  without servers an open took {percentile(times, 50):.1f} ms, at most {max(times):.0f} ms")
    bench.row("restarted/held_again", held, "of the tokens", 0.99, len(again))


def full(bench, rounds=10, max_memory=64 * MIB):
    """Between two rounds of the hot set half of what the servers may keep is put, and in all five times. A round takes
    seconds: that is how exactly Redis knows when a key was used."""
    hot = bench.prompts(20, 32)
    page = 2 * PAGE * DIM * 2 + 512
    cold = int(5 * 3 * max_memory / rounds / (32 * page))
    shares = []
    with bench.cluster(max_memory=max_memory) as cluster:
        bench.compute(cluster, hot)
        for _ in range(rounds):
            bench.compute(cluster, bench.prompts(cold, 32))
            with bench.node(cluster) as node:
                shares.append(node.open_all(hot)[0])
                node.await_written()  # what was evicted comes back
        evicted = sum(int(cluster.info(i, "evicted_keys")) for i in range(3))
    print(f"  {evicted} values evicted; held of the hot set: " + ", ".join(f"{share:.2f}" for share in shares))
    assert evicted, "nothing was evicted"
    bench.row("full/hot_set_held", shares[-1], "of the tokens", 0.9, len(hot))


def memory_of(pid):
    """All of a process that can be written, as parts."""
    parts = []
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            where, rights, *_ = line.split()
            if not rights.startswith("rw"):
                continue
            first, end = (int(x, 16) for x in where.split("-"))
            memory.seek(first)
            with contextlib.suppress(OSError):
                parts.append(memory.read(end - first))
    return parts


def found_in(parts, needles):
    """How many of these strings of 16 bytes are in the parts, at whatever offset."""
    heads = np.unique(np.frombuffer(b"".join(needle[:8] for needle in needles), np.uint64))
    wanted, found = set(needles), set()
    few = np.zeros(1 << 20, bool)  # most words are told by 20 bits of a hash
    hashed = lambda words: (words * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(44)
    few[hashed(heads)] = True
    for part in parts:
        for offset in range(min(8, len(part))):
            words = np.frombuffer(part, np.uint64, (len(part) - offset) // 8, offset)
            at = np.flatnonzero(few[hashed(words)])
            at = at[np.isin(words[at], heads)] * 8 + offset
            found.update(wanted.intersection(part[i:i + 16] for i in at))
    return len(found)


def searched(bench, seal):
    """How many of a prompt's (runs of ids, rows of keys and values) are in what somebody could steal."""
    prompt = bench.prompts(1, 64)[0]
    with bench.cluster(replicas=1) as cluster:
        bench.compute(cluster, [prompt], remote_seal=seal)
        loot = [cluster.dump(i) for i in range(6)]
        assert any(b"kv1:{" in dump for dump in loot), "nothing was put"
        for server in cluster.servers:
            loot += memory_of(server.pid)
    runs = [prompt.ids[i:i + 8] for i in range(prompt.ids.size - 8)]
    codes = {run.astype(kind).tobytes()[:16] for run in runs for kind in ("<i4", ">i4", "<i8", "<u2")}
    codes |= {joint.join(map(str, run)).encode()[:16] for run in runs for joint in (",", ", ", " ")}
    rows = {part.tobytes() for row in (*prompt.k[:, 0], *prompt.v[:, 0]) for part in (row[:8], row[-8:])}
    found = found_in(loot, codes), found_in(loot, rows)
    print(f"  {seal}: {sum(map(len, loot)) / 1e6:.0f} MB searched; {found[0]} of {len(codes)} runs of ids found, "
          f"{found[1]} of {len(rows)} parts of rows", flush=True)
    return found


def stolen(bench):
    ids, rows = searched(bench, "none")
    assert ids == 0 and rows > 1000, "the search does not find what is there in clear"
    bench.row("stolen/found", sum(searched(bench, "gcm")), "places", 0, 1, smaller=True)


ROWS = {f.__name__: f for f in (replicas, alone, stopped, writer, restarted, full, stolen)}


def main(bench_of=Bench, rows=ROWS, doc=__doc__):
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("row", nargs="*", help="all by default: " + ", ".join(rows))
    parser.add_argument("--json-out")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--commit", default="uncommitted")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    loads = []
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        bench = bench_of(folder, args.seed)
        for name in args.row or rows:
            begin = time.monotonic()
            rows[name](bench)
            loads.append(os.getloadavg()[0])
            print(f"  {name}: {time.monotonic() - begin:.0f} s, load {loads[-1]:.1f}", flush=True)
    if args.json_out:
        notes = f"seed {args.seed}; load at most {max(loads):.1f}"
        result = {"suite": bench.suite, "device": device_name(), "commit": args.commit, "date": args.date,
                  "command": bench.command, "context": {"notes": notes}, "ceilings": {}, "rows": bench.rows}
        pathlib.Path(args.json_out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
