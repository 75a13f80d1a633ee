#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the benchmarks and writes bench/results and the tables made from them. `make bench`.

    bench/run.py --out FOLDER [--only SUITE,...]
Wants an idle machine: figures are ratios in one run, but a busy neighbour bends even those. About 6 minutes.
"""
import argparse
import datetime
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BIN = ROOT / "build" / "bin"
DEVICE = "cpu2"  # in file names; the files say what the machine was


def commands(out, commit, date):
    file = lambda suite: str(out / f"{suite}-{DEVICE}.json")
    common = ["--commit", commit, "--date", date]
    return {
        "ops-cpu": [str(BIN / "ops_bench"), "--json-out", file("ops-cpu")],
        "recompress": [str(BIN / "build_bench"), "--json-out", file("recompress")],
        "ring": [str(BIN / "ring_bench"), "--json-out", file("ring"), *common],
        "remote-format": [str(BIN / "remote_format_bench"), "--json-out", file("remote-format"), *common],
        "plans": [str(BIN / "plans_bench"), "--json-out", file("plans"), *common],
        "engine": [sys.executable, str(ROOT / "bench" / "engine_bench.py"), "--json-out", file("engine"),
                   *common],
        "reuse": [sys.executable, str(ROOT / "bench" / "reuse.py"), "--json-out", file("reuse"), *common],
        "stored-planes": [sys.executable, str(ROOT / "bench" / "stored_planes.py"), "--json-out", file("stored-planes"),
                          *common],
        "remote": [sys.executable, str(ROOT / "bench" / "remote.py"), "--json-out", file("remote"), *common],
        "work": [str(BIN / "work_bench"), "--json-out", file("work"), *common],
        "build": [sys.executable, str(ROOT / "bench" / "build_ahead.py"), "--json-out", file("build"), *common],
        "scrape": [sys.executable, str(ROOT / "bench" / "scrape.py"), "--json-out", file("scrape"), *common],
        "memory": [sys.executable, str(ROOT / "bench" / "memory.py"), "--json-out", file("memory"), *common],
        "fidelity": [sys.executable, str(ROOT / "bench" / "fidelity.py"), "--json-out", file("fidelity"),
                     *common],
        **{f"{document}-fidelity": [sys.executable, str(ROOT / "bench" / "fidelity.py"), "--document", document,
                                    "--json-out", file(f"{document}-fidelity"), *common]
           for document in ("pydoc", "code", "licence", "table", "docstrings")},
        "missed": [sys.executable, str(ROOT / "bench" / "missed.py"), "--json-out", file("missed"), *common],
        "options": [sys.executable, str(ROOT / "bench" / "options.py"), "--json-out", file("options"), *common],
        "demo": [sys.executable, str(ROOT / "integrations" / "demo.py"), "--json-out",
                     file("demo"), *common],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    git = lambda *a: subprocess.run(["git", "-C", str(ROOT), *a], capture_output=True, text=True).stdout.strip()
    commit = git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    date = datetime.date.today().isoformat()
    wanted = set(filter(None, args.only.split(",")))
    for suite, command in commands(args.out.resolve(), commit, date).items():
        if wanted and suite not in wanted:
            continue
        print(f"== {suite}", flush=True)
        subprocess.run(command, check=True, env={**os.environ, "KVSTRATA_COMMIT": commit,
                                                 "KVSTRATA_DATE": date})
    return subprocess.run([sys.executable, str(ROOT / "bench" / "report.py")]).returncode


if __name__ == "__main__":
    sys.exit(main())
