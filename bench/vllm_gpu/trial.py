#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plain vLLM, vLLM's own offloading and kvstrata below it, one engine after the other on one GPU, in one run.

    trial.py [--engines plain,native:16,ours,ours] [--disk] [--quick] [--trace] [--tiny] [--seconds 540] [--gib 40]
    trial.py --plans [--engines "plain,plan:full,plan:quest,plan:bits{run = 8}"] [--cases 130816x4] [--ranks 2]
    trial.py --capacity [--engines plain,plan:strata] [--share 0.6]
    trial.py --tax | --shared | --stopped | --families [NAMES] | --kills N | --arrivals | --reused SECONDS
                                                                         each explained in its own file

plain: vLLM alone. native:N: OffloadingConnector with N blocks a chunk, in host memory. ours: KvstrataConnector; the
second "ours" is another process behind the same daemon: nothing of what it loads was computed by it. --disk: behind
all others the daemon is started anew over its disk, and one more "ours" loads from there. --trace: conversations
(conversations.py) on a cache of 12 GiB instead, answers stored below too. plan:TEXT: decode steps attend by that plan
over vLLM's own blocks; --plans: prompts and steps for comparing these with plain, and no daemon. --capacity: how many
sequences of 32K one GPU holds, and their tokens a second, where vLLM has --share of its memory, and lower planes at most
--gib of the host's.

Rows go to $OUT/vllm-gpu.jsonl as they come (parts.py says what is measured), logs to $OUT/engines.txt, and a table to
stdout: medians, and ratios over plain's or native's of the same run.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time
from typing import Any

import arrivals
import kills
import model
import reused
import shared
import small_models
import stopped
import tax
from conversations import Shape
from launch import ENVIRONMENT, OUT, Daemon, Launcher

_RATED = 5  # files that dd reads
K32, K128 = 32768 - 256, 131072 - 256
# Batches of --plans; short ones are where choosing cannot pay, single ones show a step over the length.
PLANS = [(1000, 8), (4000, 16), (8000, 1), (16000, 1), (K32, 1), (65536 - 256, 1), (K32, 8), (K128, 1), (K128, 2)]
SHORT = [(300, 2), (600, 1)]


class Trial:
    """Runs plain, native and ours in turn."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher, self._given = launcher, launcher.given

    def run(self) -> None:
        engines = re.split(r",(?![^{]*\})", self._given.engines)  # a plan may have commas in its braces
        disk = self._launcher.folder / "disk" if self._given.disk else None
        if disk is not None:
            disk.mkdir()
        daemon = self._launcher.daemon(disk=disk) if "ours" in engines else None
        seen: dict[str, int] = {}
        for engine in engines:
            seen[engine] = seen.get(engine, 0) + 1
            self._engine(engine, engine if seen[engine] == 1 else f"{engine}, another process",
                         again=seen[engine] > 1)
            if engine == "ours" and daemon is not None:
                self._tell_room(daemon, seen[engine])
        if disk is not None and daemon is not None:
            self._stop(daemon)
            self._rate(disk)
            daemon = self._launcher.daemon(disk=disk)
            self._launcher.say(f"started anew, the disk has {daemon.says('tier', 'ls')['tiers'][0]['entries']} values")
            self._engine("ours", "ours, from disk", again=True, settle=3.0)
            self._tell_rate()

    def _stop(self, daemon: Daemon) -> None:
        """Tells what the disk had before, how long the stop took, and what it wrote and dropped."""
        listed = daemon.says("tier", "ls")
        for room in listed["rooms"]:
            self._launcher.say(f"of {room['stored']} chunks that were stored {room['written']} are written and "
                               f"{room['unwritten']} never will be; {room['shown_bytes'] / 2**30:.3f} GiB are shown")
        disk = listed["tiers"][0]
        self._launcher.say(f"the disk has {disk['entries']} values, {disk['evicted']} had to leave")
        began = time.monotonic()
        log = daemon.stop()
        self._launcher.say(f"the stop took {time.monotonic() - began:.2f} s")
        for line in log.splitlines():
            if "event=stop" in line:
                self._launcher.say(line)

    def _tell_room(self, daemon: Daemon, engines: int) -> None:
        """What the daemon has behind so many engines: the same for a second one that computed nothing."""
        rooms = daemon.says("tier", "ls")["rooms"]
        if not rooms:
            self._launcher.say("the daemon has no room: no engine of ours has come as far as that")
            return
        room = rooms[0]
        self._launcher.row("ours", "room", engines=engines, room=room)
        self._launcher.say(f"behind {engines} of ours the daemon has {room['shown_bytes'] / 2**30:.3f} GiB in "
                           f"{room['shown']} chunks; {room['stored']} were stored, {room['duplicates']} twice")

    def _rate(self, disk: pathlib.Path) -> None:
        """Times dd on some of the disk's files, one after the other without the page cache. It takes files that are
        written, since what is only reserved is read without the device."""
        written = sorted(path for path in disk.rglob("*") if path.is_file() and _middle(path).strip(b"\0"))
        for path in written[:_RATED]:
            began = time.perf_counter()
            subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=4M", "iflag=direct"], stderr=subprocess.DEVNULL)
            self._launcher.row("disk", "dd", bytes=path.stat().st_size, seconds=[time.perf_counter() - began])

    def _tell_rate(self) -> None:
        """Rate of the daemon's disk in first loads from it, over dd's."""
        shape = model.TINY if self._given.tiny else model.LLAMA
        token = 4 * shape["layers"] * shape["kv_heads"] * shape["head_dim"]  # bytes: bf16 keys and values
        rows = [json.loads(line) for line in self._launcher.rows.read_text().splitlines()]
        rates = [row["bytes"] / row["seconds"][0] for row in rows if row["part"] == "dd"]
        if not rates:
            self._launcher.say("no file of the disk is full, so dd has read none, and there is no rate")
            return
        disk = statistics.median(rates)
        for row in rows:
            if row["engine"] == "ours, from disk" and row["part"] == "first":
                for held, seconds in zip(row["held"], row["seconds"]):
                    self._launcher.say(f"{held} tokens from the disk: {held * token / seconds / 1e9:.2f} GB/s, "
                                       f"{held * token / seconds / disk:.2f} of dd's {disk / 1e9:.2f}")

    def _engine(self, kind: str, name: str, again: bool, settle: float = 1.0) -> None:
        more: dict[str, Any] = self._sizes() | {"settle": settle}
        llm: dict[str, Any] = {}
        if self._given.capacity:
            more["parts"] = ["capacity"]
            more["environment"] = ENVIRONMENT | {"KVSTRATA_LOWER_PLANES_BYTES": str(self._given.gib << 30)}
            llm = {"max_num_seqs": 64} | ({} if self._given.cpu else {"gpu_memory_utilization": self._given.share})
        elif self._given.parts:
            more["parts"] = [part for part in self._given.parts.split(",") if part != "identity" or kind == "ours"]
        elif self._given.trace:
            more["parts"] = ["trace"]
        elif self._given.plans:
            more |= {"parts": ["fresh", "decode"], "decode": SHORT if self._given.tiny or self._given.family else PLANS}
            if self._given.cases:
                more |= {"parts": ["decode"], "decode": [tuple(map(int, case.split("x")))
                                                         for case in self._given.cases.split(",")]}
        elif kind == "plain":
            more |= {"parts": ["fresh", "hits", "decode", "arrive"], "arrive_kinds": ["stored"]}
        elif again:
            more["parts"] = ["load"]
        else:
            more["parts"] = ["fresh", "load", "decode", "arrive", "tokens"]
        trace = self._given.trace
        self._launcher.run(self._launcher.spec(
            kind, name, llm=self._launcher.memory(12, Shape(**more["trace"]).longest) if trace else llm,
            extra={"offload_prompt_only": False} if trace else {}, **more))

    def _sizes(self) -> dict[str, Any]:
        if self._given.tiny:
            return {"fresh": [(600, 2)], "load": [(600, 4, 2)], "decode": [(600, 1), (600, 2)], "decode_tokens": 8,
                    "capacity": (600, 8, 8),
                    "arrive": (600, 2), "arrive_kinds": ["stored", "loaded"], "tokens": [(500, 2)],
                    "trace": {"conversations": 6, "system": 128, "document": 500, "answer": 8, "at_once": 2}}
        if self._given.family:
            return {"fresh": [(600, 2)], "decode_tokens": 24}
        few = self._given.quick
        return {"fresh": [(K32, 3 if few else 9), (K128, 1 if few else 3)],
                "load": [(K32, 9, 3), (K128, 3 if few else 9, 1)],  # 28 GiB of keys and values
                "decode": [(K32, 1), (K32, 8), (K128, 1)], "decode_tokens": 64, "capacity": (K32, 64, 64),
                "arrive": (K32, 8),
                "arrive_kinds": ["stored", "loaded"],
                "tokens": [(2000, 8), (K32, 2)], "trace": {}}


def _middle(path: pathlib.Path) -> bytes:
    with open(path, "rb") as file:
        file.seek(path.stat().st_size // 2)
        return file.read(4096)


def table(rows: list[dict[str, Any]]) -> str:
    """A line a part and case: the median of each engine in milliseconds, and over the first that has it."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        times = row.get("seconds") or (row.get("steps") or [])[60:260]
        if times and row["part"] not in ("start", "end", "dd", "capacity"):
            case = (row["part"], row.get("kind", ""), row.get("tokens", 0), row.get("batch", 1))
            found.setdefault(case, {})[row["engine"]] = 1e3 * statistics.median(times)
    lines = []
    for (part, kind, tokens, batch), medians in found.items():
        first = next(iter(medians.values()))
        lines.append(f"{part} {kind} {tokens} x {batch}: " +
                     ", ".join(f"{engine} {ms:.3f} ({ms / first:.3f})" for engine, ms in medians.items()))
    lines += _tokens_alike(rows)
    lines += [f"capacity, {row['engine']}: {row['sequences']} sequences of {row['tokens']} tokens at once, "
              f"{row['sequences'] / statistics.median(row['seconds']):.1f} tokens a second"
              for row in rows if row["part"] == "capacity"]
    for row in rows:
        if row["part"] == "kernels":
            lines += [f"kernels {row['tokens']} x {row['batch']}, {row['engine']}: {us / row['counted']:9.1f} us a step, "
                      f"{us / count:7.1f} each, {name[:80]}" for name, count, us in row["kernels"]]
        if row["part"] == "trace":
            later = sorted(row["seconds"])
            lines.append(f"trace, {row['engine']}: all of it in {row['total_s']:.2f} s, first tokens behind the first turn: "
                         f"median {1e3 * statistics.median(later):.1f} ms, 99 % {1e3 * later[-1 - len(later) // 100]:.1f}")
    return "\n".join(lines)


def _tokens_alike(rows: list[dict[str, Any]]) -> list[str]:
    """How many sequences of each batch have the first engine's tokens, and on how many tokens they agree."""
    lines, first = [], {}
    for row in rows:
        if "output" not in row:
            continue
        case = row["tokens"], row["batch"]
        ours, theirs = row["output"], first.setdefault(case, row["output"])
        agree = [next((i for i, (a, b) in enumerate(zip(x, y)) if a != b), len(x)) for x, y in zip(ours, theirs)]
        if ours is not theirs:
            lines.append(f"tokens {case[0]} x {case[1]}: {row['engine']} {sum(x == y for x, y in zip(ours, theirs))} of "
                         f"{len(ours)} sequences as the first engine, median agreement {statistics.median(agree)} tokens")
    return lines


def arguments_of(line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="plain,native:16,ours,ours")
    parser.add_argument("--disk", action="store_true")
    parser.add_argument("--quick", action="store_true", help="few repeats, for a first look")
    parser.add_argument("--trace", action="store_true", help="conversations on a cache of 12 GiB")
    parser.add_argument("--plans", action="store_true", help="steps of plan:TEXT and plain")
    parser.add_argument("--capacity", action="store_true", help="sequences of 32K that one GPU holds")
    parser.add_argument("--share", type=float, default=0.6, help="of --capacity: vLLM's part of the GPU's memory")
    parser.add_argument("--cases", help="of --plans: LENGTHxBATCH, between commas, and nothing else")
    parser.add_argument("--family", help="of --plans: a small model of tests/vllm/families.py in place of the large one")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of an engine, with tensor parallelism")
    parser.add_argument("--arrivals", action="store_true", help=arrivals.__doc__.splitlines()[0])
    parser.add_argument("--reused", type=float, help=reused.__doc__.splitlines()[0])
    parser.add_argument("--tax", action="store_true", help=tax.__doc__.splitlines()[0])
    parser.add_argument("--shared", action="store_true", help=shared.__doc__.splitlines()[0])
    parser.add_argument("--stopped", action="store_true", help=stopped.__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="?", const=",".join(small_models.DEFAULT),
                        help=small_models.__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, help=kills.__doc__.splitlines()[0])
    parser.add_argument("--daemon-kills", type=int, help="of --kills; a fifth of them unless it is given")
    parser.add_argument("--seed", type=int, help="of --kills and --reused; one is drawn, and printed")
    parser.add_argument("--parts", help="of parts.py, for all engines")
    parser.add_argument("--eager", action="store_true", help="without graphs, which start a minute later")
    parser.add_argument("--digest", help="of ours: a name for the model, in place of its identity")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the programs with")
    parser.add_argument("--cpu", action="store_true", help="vLLM's CPU build")
    parser.add_argument("--seconds", type=float, default=540, help="no engine starts after that")
    parser.add_argument("--deviation", type=float, default=3, help="of attention's logits (model.py)")
    parser.add_argument("--gib", type=int, default=40,
                        help="host memory of native's, ours and lower planes; half of ours may be leased, so that 128K "
                             "takes 33")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp/vllm-gpu"))
    return parser.parse_args(line)


def main() -> None:
    given = arguments_of()
    OUT.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(given.folder, ignore_errors=True)
    given.folder.mkdir(parents=True)
    launcher = Launcher(given, given.folder)
    try:
        for wanted, part in ((given.tax, tax), (given.shared, shared), (given.stopped, stopped),
                             (given.families, small_models), (given.kills, kills), (given.arrivals, arrivals),
                             (given.reused, reused)):
            if wanted:
                part.run(launcher)
                break
        else:
            Trial(launcher).run()
    finally:
        launcher.close()
        rows = launcher.rows
        print(table([json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []))
    sys.exit(int(launcher.failed))


if __name__ == "__main__":
    main()
