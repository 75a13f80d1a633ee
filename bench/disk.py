#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The disk tier against fio on the same file system: same block size, same depth, alternating in one run.

    disk.py --json-out FILE [--rounds N] [--entries N] [--folder DIR] [--commit HASH] [--date DATE]

disk/WHAT/SIZE   MB/s of slots of SIZE, a header of 4 KiB and the payload; baseline: fio, io_uring, O_DIRECT,
                 depth 64, blocks of SIZE: the same bytes of the device.
disk/start/...   seconds until a tier of so many entries of 8 KiB is ready, from a checkpoint and without.
fio: apt-get install fio. Medians of rounds.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "integrations" / "kvstrata" / "src")]

from kvstrata.machine import device_name  # noqa: E402

BENCH = str(ROOT / "build" / "bin" / "disk_bench")
BLOCK, DEPTH, BYTES = 4096, 64, 1 << 30  # BYTES: of a measurement's slots
ENTRY = 8192
KINDS = [("write", "fill", 256), ("read", "read", 256), ("write", "fill", 16), ("randread", "reads", 16)]


def tier(what, folder, size, values):
    run = subprocess.run([BENCH, what, str(folder), str(size), str(values)], capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr)
    return json.loads(run.stdout)


def fio(kind, folder, size):
    if kind == "write":  # into a file as new as the tier's
        (folder / "fio").unlink(missing_ok=True)
    run = subprocess.run(
        ["fio", "--name=x", f"--filename={folder}/fio", f"--rw={kind}", f"--bs={size}", f"--size={BYTES}",
         "--ioengine=io_uring", "--direct=1", f"--iodepth={DEPTH}", "--fixedbufs=1", "--registerfiles=1",
         "--randrepeat=0", "--end_fsync=1", "--output-format=json"], capture_output=True, text=True, check=True)
    job = json.loads(run.stdout)["jobs"][0]
    return job["write" if kind == "write" else "read"]["bw_bytes"] / 1e6


def one_round(folder, rows):
    for kind, what, kib in KINDS:
        size, values = kib << 10, BYTES // (kib << 10)
        directory = folder / f"tier{kib}"
        if what == "fill":
            subprocess.run(["rm", "-rf", str(directory)], check=True)
        base = fio(kind, folder, size)
        said = tier(what, directory, size - BLOCK, values)
        assert said["values"] == values and said["direct"], said
        mine = values * size / said["seconds"] / 1e6
        print(f"{kind} {kib}K: {mine:.0f} MB/s, fio {base:.0f} ({said['queue']})", flush=True)
        rows.setdefault((kind, kib), []).append((mine, base))


def row(kind, kib, pairs):
    mine, base = (statistics.median(x) for x in zip(*pairs))
    ratio = statistics.median(a / b for a, b in pairs)
    return {"id": f"disk/{kind}/{kib}K", "value": mine, "unit": "MB/s", "n": len(pairs),
            "baseline": {"name": "fio io_uring", "value": base}, "ratio": ratio, "must": 0.85}


def starts(folder, entries):
    directory = folder / "many"
    tier("fill", directory, ENTRY, entries)
    with_checkpoint = tier("start", directory, ENTRY, entries)
    for checkpoint in directory.glob("checkpoint.*"):
        with open(checkpoint, "r+b") as file:
            file.write(bytes(BLOCK))
    without = tier("start", directory, ENTRY, entries)
    rows = []
    for name, said, must in (("checkpoint", with_checkpoint, 10), ("scan", without, 60)):
        assert said["values"] == entries, said
        rows.append({"id": f"disk/start/{entries}/{name}", "value": said["seconds"], "unit": "s", "must": must,
                     "better": "smaller"})
        print(f"{rows[-1]['id']}: {said['seconds']:.2f} s", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json-out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--folder", default=str(ROOT / "build"))
    parser.add_argument("--commit", default="uncommitted")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder, pairs = pathlib.Path(name), {}
        for _ in range(args.rounds):
            one_round(folder, pairs)
        rows = [row(kind, kib, p) for (kind, kib), p in pairs.items()]
        rows += starts(folder, args.entries)
    for r in rows:
        print(json.dumps(r))
    if args.json_out:
        result = {"suite": "disk", "device": device_name(), "commit": args.commit, "date": args.date,
                  "command": "bench/disk.py", "context": {"notes": f"depth {DEPTH}, {BYTES >> 20} MiB a measurement"},
                  "ceilings": {}, "rows": rows}
        pathlib.Path(args.json_out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
