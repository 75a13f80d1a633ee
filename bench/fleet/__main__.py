# SPDX-License-Identifier: Apache-2.0
"""What a remote tier brings to a fleet: `python3 -m fleet [--shape | --json-out FILE] [--seed N] [--seconds N]`, in bench/.

Prints a table of scenarios: shares of the prompts' tokens by tier, the first token's median and 99th percentile, bytes
a second of the shards, and the same without a remote tier. Times come from a model, not from a clock: see simulation.py.
"""
import argparse
import dataclasses
import json
import multiprocessing
import statistics
import sys

from .simulation import Fleet, Simulation
from .workload import Shape, requests

LOAD = 0.7     # part of what engines can do, if each prompt were computed whole
WARM_UP = 0.5  # part of the time


def mean_tokens(shape, seed):
    return statistics.fmean(r.tokens for r in requests(shape, 10, 1500, seed))


def measure(fleet, shape, seconds, seed, tokens):
    """Figures of a fleet under LOAD."""
    rate = LOAD * fleet.prefill * fleet.nodes / tokens
    simulation = Simulation(fleet, WARM_UP * seconds, seed)
    simulation.run(requests(shape, rate, seconds, seed))
    all_tokens = sum(simulation.tokens.values())
    times = statistics.quantiles(simulation.first_tokens, n=100)
    measured = seconds * (1 - WARM_UP)
    read = [(s.out.bytes - b[1]) / measured for s, b in zip(simulation.shards, simulation.warm_bytes)]
    written = [(s.into.bytes - b[0]) / measured for s, b in zip(simulation.shards, simulation.warm_bytes)]
    return {
        "requests_per_second": rate,
        **{name: simulation.tokens[name] / all_tokens for name in simulation.tokens},
        "refused": simulation.refused / len(simulation.first_tokens),
        "dropped_bytes": simulation.dropped_bytes,
        "first_token_p50": times[49], "first_token_p99": times[98],
        "shard_read_mean": statistics.fmean(read or [0]), "shard_read_most": max(read, default=0),
        "shard_write_mean": statistics.fmean(written or [0]), "shard_write_most": max(written, default=0),
        "evicted": sum(s.held.evicted for s in simulation.shards),
    }


def scenarios():
    """(name, Fleet): one thing changes at a time, from 64 nodes that lend 256 GB each to a shard of their own."""
    base, change = Fleet(), dataclasses.replace
    for nodes in (4, 16, 64, 250, 1000):
        yield f"nodes/{nodes}", change(base, nodes=nodes, shards=nodes)
    for shards in (16, 32, 128):
        yield f"shards/{shards}", change(base, shards=shards)
    yield "write/all", change(base, write="all")
    for affinity in (0.0, 0.9, 1.0):
        for write in ("reused", "all"):
            yield f"affinity/{affinity:g} {write}", change(base, affinity=affinity, write=write)
    yield "shard memory/64G reused", change(base, shard_memory=64e9)
    for gigabytes in (64, 1000):
        yield f"shard memory/{gigabytes}G all", change(base, shard_memory=gigabytes * 1e9, write="all")
    yield "no disk", change(base, disk=0.0)
    yield "no disk, write all", change(base, disk=0.0, write="all")
    yield "network/node 25G", change(base, node_rate=3e9)
    yield "network/shard 10G", change(base, shard_rate=1.2e9)
    yield "network/shard 100G", change(base, shard_rate=12e9)
    yield "engine/30K tokens a second", change(base, prefill=30_000)
    yield "engine/5K tokens a second", change(base, prefill=5_000)
    yield "model/56K a token", change(base, token_bytes=56 * 1024)
    yield "model/320K a token, 6K tokens a second", change(base, token_bytes=320 * 1024, prefill=6_000)


def compare(scenario):
    """A row: the figures of a scenario, and of the same fleet without a remote tier."""
    name, fleet, *arguments = scenario
    return {"id": "fleet/" + name, **dataclasses.asdict(fleet), "with": measure(fleet, *arguments),
            "without": measure(dataclasses.replace(fleet, shards=0), *arguments)}


HEADING = (f"{'scenario':38} {'memory':>7} {'disk':>7} {'remote':>7} {'refused':>7}  {'p50 s':>7} {'p99 s':>7}  "
           f"{'without':>8} {'p99':>7}  {'read GB/s':>9} {'written':>8}")


def line(row):
    """A row in the columns of HEADING."""
    figures, without = row["with"], row["without"]
    return (f"{row['id'].removeprefix('fleet/'):38} {figures['memory']:7.3f} {figures['disk']:7.3f} "
            f"{figures['remote']:7.3f} {figures['refused']:7.3f}  {figures['first_token_p50']:7.2f} "
            f"{figures['first_token_p99']:7.2f}  {without['first_token_p50']:8.2f} {without['first_token_p99']:7.2f}  "
            f"{figures['shard_read_most'] / 1e9:9.2f} {figures['shard_write_most'] / 1e9:8.2f}")


def print_shape(shape, seed):
    all_requests = list(requests(shape, 12_031 / 3600, 3600, seed))
    held = {}
    hit = 0
    for request in all_requests:
        walk = 0
        for key, tokens in request.groups():
            got = min(held.get(key, 0), tokens)
            walk += got
            if got < tokens:
                break
        hit += walk
        held.update((key, max(tokens, held.get(key, 0))) for key, tokens in request.groups())
    tokens = sum(r.tokens for r in all_requests)
    print(f"seed {seed}: {len(all_requests)} requests an hour, prompts of {tokens / len(all_requests):.0f} tokens, "
          f"{hit / tokens:.2f} of them in an earlier request")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="store_true", help="print what the workload comes to, and end")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=1200, help="simulated; half of them warm up")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--only", default="", help="scenarios whose names begin so")
    parser.add_argument("--json-out")
    parser.add_argument("--commit", default="")
    parser.add_argument("--date", default="")
    arguments = parser.parse_args()
    shape = Shape()
    if arguments.shape:
        return print_shape(shape, arguments.seed)
    tokens = mean_tokens(shape, arguments.seed)
    print(f"seed {arguments.seed}, prompts of {tokens:.0f} tokens, engines at {LOAD:.0%} if all were computed")
    print(HEADING, flush=True)
    chosen = [(name, fleet, shape, arguments.seconds, arguments.seed, tokens)
              for name, fleet in scenarios() if name.startswith(arguments.only)]
    rows = []
    with multiprocessing.Pool(arguments.jobs) as pool:
        for row in pool.imap(compare, chosen):
            rows.append(row)
            print(line(row), flush=True)
    if arguments.json_out:
        with open(arguments.json_out, "w") as file:
            json.dump({"suite": "fleet", "device": "a model (bench/fleet), not a machine", "commit": arguments.commit,
                       "date": arguments.date, "command": "cd bench && python3 -m fleet",
                       "context": {"seed": arguments.seed, "seconds": arguments.seconds, "load": LOAD,
                                   "shape": dataclasses.asdict(shape), "prompt_tokens": tokens},
                       "rows": rows}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    sys.exit(main())
