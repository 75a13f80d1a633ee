#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The remote tier's client beside bare sockets to the same servers: three masters of Redis Cluster on loopback, with a
replica each.

    remote_tier.py [--json-out FILE] [--rounds N] [--replicas N] [--suite NAME] [--commit HASH] [--date DATE]

remote_tier/put/SIZE, get/SIZE  MB/s of values of SIZE with checksums; baseline: SET by writev and GET by read, without
                                (must: 0.7 of it, of 64 KiB a half)
remote_tier/cpu/...             CPU seconds of the client per GB, 1 MiB, checksums and the kernel's part included (must:
                                0.35); baseline: the bare sockets'
remote_tier/probe/...           milliseconds of a probe of so many keys; baseline: EXISTS by bare sockets (must of 512: 10)
remote_tier/probe/requests      of a probe of 65,536 keys
remote_tier/probe/65536/trips   round trips of it (must: 2): what it takes longer where proxies hold back all that passes
                                them, over the time that they hold it back there and back
"""
import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "integrations" / "kvstrata" / "src")]

from kvstrata.machine import device_name  # noqa: E402
from delay_line import DelayLine  # noqa: E402
from redis_cluster import RedisCluster  # noqa: E402

FAR = 0.25  # seconds, each way

BENCH = os.environ.get("REDIS_TIER_BENCH", ROOT / "build/bin/redis_tier_bench")


def rows_of(report, rounds):
    rows = []
    for sizes in report["values"]:
        size = f"{sizes['bytes'] >> 10}K"
        for what in ("put", "get"):
            rows.append({"id": f"remote_tier/{what}/{size}", "value": sizes[f"{what}_mb_s"], "unit": "MB/s", "n": rounds,
                         "baseline": {"name": "bare sockets", "value": sizes[f"bare_{what}_mb_s"]},
                         "ratio": sizes[f"{what}_ratio"], "must": 0.5 if size == "64K" else 0.7})
        if size != "1024K":
            continue
        for what in ("put", "get"):
            rows.append({"id": f"remote_tier/cpu/{what}/{size}", "value": sizes[f"{what}_cpu_s_gb"], "unit": "s/GB",
                         "n": rounds, "better": "smaller", "must": 0.35,
                         "baseline": {"name": "bare sockets", "value": sizes[f"bare_{what}_cpu_s_gb"]}})
    for keys in (512, 65536):
        rows.append({"id": f"remote_tier/probe/{keys}", "value": report[f"probe_{keys}_ms"], "unit": "ms", "n": 5,
                     "baseline": {"name": "bare EXISTS", "value": report[f"bare_probe_{keys}_ms"]},
                     **({"must": 10, "better": "smaller"} if keys == 512 else {})})
    rows.append({"id": "remote_tier/probe/requests", "value": report["probe_65536_requests"], "unit": "requests", "n": 5})
    return rows


def ping_ms(cluster):
    """Milliseconds of one server's PING, as clients reach it; by a connection that is there already."""
    with socket.create_connection(("127.0.0.1", cluster.told_ports[cluster.ports[0]])) as link:
        for _ in range(2):
            begin = time.perf_counter()
            link.sendall(b"PING\r\n")
            link.recv(7)
    return (time.perf_counter() - begin) * 1e3


def trips_row(turns=3):
    """Near and far take turns, by the same proxies."""
    near, far, pings = [], [], {0: [], FAR: []}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, DelayLine() as line, \
            RedisCluster(folder, front=line.before) as cluster:
        with subprocess.Popen([BENCH, cluster.address, "probe"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              text=True) as bench:
            for _ in range(turns):
                for line.seconds, times in ((0, near), (FAR, far)):
                    bench.stdin.write("\n")
                    bench.stdin.flush()
                    times += json.loads(bench.stdout.readline())
                    pings[line.seconds].append(ping_ms(cluster))
            line.seconds = 0
            bench.stdin.close()
        assert bench.returncode == 0, bench.returncode
    near_ms, far_ms = statistics.median(near), statistics.median(far)
    print(f"  near {near_ms:.0f} ms ({min(near):.0f} to {max(near):.0f}), {FAR * 1e3:.0f} ms away {far_ms:.0f} ms "
          f"({min(far):.0f} to {max(far):.0f})", flush=True)
    trips_of = lambda here, there: round((there - here) / (2e3 * FAR), 2)
    return {"id": "remote_tier/probe/65536/trips", "value": trips_of(near_ms, far_ms), "unit": "round trips", "n": len(far),
            "must": 2, "better": "smaller", "baseline": {"name": "a PING", "value": trips_of(
                *(statistics.median(times) for times in pings.values()))}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json-out")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--suite", default="remote-tier", help="what results of another machine are kept as")
    parser.add_argument("--commit", default="uncommitted")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, RedisCluster(folder, replicas=args.replicas) as cluster:
        load = os.getloadavg()[0]
        text = subprocess.run([BENCH, cluster.address, str(args.rounds)], check=True, stdout=subprocess.PIPE, text=True).stdout
    rows = rows_of(json.loads(text), args.rounds)
    rows.append(trips_row())
    for row in rows:
        base, ratio = row.get("baseline", {"name": "", "value": 0}), row.get("ratio", 0)
        print(f"{row['id']:28} {row['value']:9.2f} {row['unit']:8} {base['name']} {base['value']:.2f}  {ratio:.2f}", flush=True)
    if args.json_out:
        result = {"suite": args.suite, "device": device_name(), "commit": args.commit, "date": args.date,
                  "command": "bench/remote_tier.py", "context": {"notes": f"{args.replicas} replicas of each of three "
                                                                 f"masters; load {load:.1f} before"}, "ceilings": {},
                  "rows": rows}
        pathlib.Path(args.json_out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
