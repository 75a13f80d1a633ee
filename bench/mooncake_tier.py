#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Mooncake Store through the daemon's agent against Mooncake's own Python client in this process: the same sizes and
batches over loopback TCP, one store, batch by batch in turns, so that both have the machine as it is. Medians of rounds; the
ratio is the median of those of the rounds.

Usage: bench/mooncake_tier.py [--rounds N] [--out FILE], with a Python that has Mooncake (make test-mooncake makes one)
"""
import argparse
import ctypes
import datetime
import json
import mmap
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/mooncake"))
import cluster  # noqa: E402
from agent_link import EXIST, GET, PUT, REMOVE, AgentLink  # noqa: E402

MIB = 1 << 20
BATCHES = {64 << 10: 128, MIB: 12, 4 * MIB: 3}  # values of a batch by their bytes; as the tier's, of about 12 MiB
PER_ROUND = 96 * MIB
MEMORY = 64 * MIB
KINDS = {"put": PUT, "get": GET}


class OwnClient:
    """Mooncake's client here, over a buffer that is registered as the agent's is."""

    def __init__(self):
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        self.store, self.config = MooncakeDistributedStore(), ReplicateConfig()
        self.config.replica_num = 1
        assert self.store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", cluster.MASTER) == 0
        self.memory = self.map()
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        assert self.store.register_buffer(self.base, MEMORY) == 0

    @staticmethod
    def map():
        fd = os.memfd_create("own")
        os.ftruncate(fd, MEMORY)
        return mmap.mmap(fd, MEMORY)

    def call(self, kind, entries):
        names = [name for name, _, _ in entries]
        places, sizes = [self.base + offset for _, offset, _ in entries], [size for _, _, size in entries]
        if kind == EXIST:
            return self.store.batch_is_exist(names)
        if kind == REMOVE:
            return self.store.batch_remove(names, True)
        if kind == PUT:
            return self.store.batch_put_from(names, places, sizes, self.config)
        return self.store.batch_get_into(names, places, sizes)


def batches_of(size, prefix):
    many = BATCHES[size]
    for first in range(0, PER_ROUND // size, many):
        yield [(f"{prefix}{first + i:060}", i * size, size) for i in range(min(many, PER_ROUND // size - first))]


def seconds_of(client, kind, size, entries):
    begin = time.perf_counter()
    results = client.call(KINDS[kind], entries)
    seconds = time.perf_counter() - begin
    assert all(r == (0 if kind == "put" else size) for r in results), (kind, size, set(results))
    return seconds


def run_round(clients, size, number, rates):
    """Bytes a second, of calls alone: puts, then gets, of clients in turns, and who begins changes. Then all leaves."""
    for kind in KINDS:
        seconds = dict.fromkeys(clients, 0.0)
        for turn, batches in enumerate(zip(*(batches_of(size, name[0]) for name in clients)), number):
            who = list(zip(clients, batches))
            for name, entries in who if turn % 2 == 0 else who[::-1]:
                seconds[name] += seconds_of(clients[name], kind, size, entries)
        for name in clients:
            rates[name, kind].append(PER_ROUND / seconds[name])
    for name in clients:
        for entries in batches_of(size, name[0]):
            assert not any(clients[name].call(REMOVE, entries))


def questions(clients, rounds):
    """Milliseconds for 512 questions of what is there, half of which is not; by client."""
    entries = [(f"{'p' if i % 2 else 'q'}{i:060}", 0, 64) for i in range(512)]
    assert not any(clients["own"].call(PUT, [e for e in entries if e[0][0] == "p"]))
    times = {name: [] for name in clients}
    for _ in range(rounds):
        for name, client in clients.items():
            begin = time.perf_counter()
            assert sum(client.call(EXIST, entries)) == 256
            times[name].append(1e3 * (time.perf_counter() - begin))
    return times


def row(name, unit, agent, own, better_is_larger):
    ratios = [a / o if better_is_larger else o / a for a, o in zip(agent, own)]
    deciles = statistics.quantiles(agent, n=10)
    must = {"must": 0.9} if better_is_larger else {}
    return {"id": f"mooncake_tier/{name}", "value": round(statistics.median(agent), 3), "unit": unit,
            "p10": round(deciles[0], 3), "p90": round(deciles[-1], 3), "n": len(agent),
            "baseline": {"name": "own Python client", "value": round(statistics.median(own), 3)},
            "ratio": round(statistics.median(ratios), 3), **must}


def measure(rounds):
    rows = []
    with cluster.Cluster(), AgentLink(sys.executable, cluster.MASTER, MEMORY) as agent:
        assert agent.ready()
        clients = {"agent": agent, "own": OwnClient()}
        for client in clients.values():
            client.memory[:] = os.urandom(MIB) * (MEMORY // MIB)
        for size in BATCHES:
            rates = {(name, kind): [] for name in clients for kind in KINDS}
            run_round(clients, size, 0, {key: [] for key in rates})  # warm
            for number in range(rounds):
                run_round(clients, size, number, rates)
            for kind in KINDS:
                agents, owns = ([r / 1e9 for r in rates[name, kind]] for name in ("agent", "own"))
                rows.append(row(f"{size >> 10}K/{kind}", "GB/s", agents, owns, True))
                print(rows[-1], flush=True)
        times = questions(clients, 10 * rounds)
        rows.append(row("512_questions", "ms", times["agent"], times["own"], False))
        print(rows[-1], flush=True)
    return rows


def word_of(command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    cluster.enter_namespace()
    rows = measure(args.rounds)
    cpu = next(line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
    load = os.getloadavg()[0]
    result = {"suite": "mooncake-tier", "device": f"{os.cpu_count()}-core CPU ({cpu})",
              "commit": word_of(["git", "rev-parse", "--short=10", "HEAD"]), "date": f"{datetime.date.today()}",
              "command": "build/venv-mooncake/bin/python bench/mooncake_tier.py",
              "context": {"cpu": cpu, "notes": f"TCP over loopback, one store; load of the machine {load:.1f}"},
              "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    sys.stdout.flush()
    os._exit(0)  # threads of Mooncake's client do not end


if __name__ == "__main__":
    main()
