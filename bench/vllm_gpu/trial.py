#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plain vLLM, vLLM's own offloading and kvstrata below it, one engine after the other on one GPU, in one run.

    trial.py [--engines plain,native:16,ours,ours] [--disk] [--quick] [--trace] [--tiny] [--seconds 540] [--gib 40]

plain: vLLM alone. native:N: OffloadingConnector with N blocks a chunk, in host memory. ours: KvstrataConnector; the
second "ours" is another process behind the same daemon: nothing of what it loads was computed by it. --disk: behind
all others the daemon is started anew over its disk, and one more "ours" loads from there. --trace: conversations
(conversations.py) on a cache of 12 GiB instead, answers stored below too.

Rows go to $OUT/vllm-gpu.jsonl as they come (engine.py says what is measured), logs to $OUT/engines.txt, and a table to
stdout: medians, and ratios over plain's or native's of the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import model

HERE = pathlib.Path(__file__).resolve().parent
OUT = pathlib.Path(os.environ.get("OUT") or ".")
K32, K128 = 32768 - 256, 131072 - 256
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
               "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONHASHSEED": "0"}


class Daemon:
    """kvstratad of the bundle, with an engines' region of `gib`."""

    def __init__(self, folder: pathlib.Path, gib: int, disk: pathlib.Path | None) -> None:
        self.path = str(folder / "kvstratad.sock")
        settings = [f"chunks.bytes={gib}GiB", "pool.device_bytes=64MiB", "pool.host_bytes=64MiB"]
        if disk is not None:
            settings += [f"disk.path={disk}", f"disk.budget_bytes={gib}GiB"]
        words = [word for setting in settings for word in ("--set", setting)]
        self._log = open(OUT / "daemon.txt", "a")
        self._process = subprocess.Popen([os.environ["KVSTRATAD"], "--socket", self.path, *words],
                                         stdout=self._log, stderr=self._log,
                                         env=os.environ | {"LD_LIBRARY_PATH": os.environ.get("BUNDLE_LIB", "")})
        end = time.monotonic() + 60
        while not self._serves():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"kvstratad does not serve; see {OUT / 'daemon.txt'}")
            time.sleep(0.05)

    def _serves(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as tried:
            try:
                tried.connect(self.path + ".chunks")
                return True
            except OSError:
                return False

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)


class Trial:
    def __init__(self, arguments: argparse.Namespace, folder: pathlib.Path) -> None:
        self._given, self._folder = arguments, folder
        self._rows = OUT / "vllm-gpu.jsonl"
        self._model, self._daemon = folder / "model", None
        self._end = time.monotonic() + arguments.seconds
        self.failed = False  # whether an engine ended otherwise than it should
        tiny = ["--tiny"] if arguments.tiny else []
        subprocess.run([sys.executable, HERE / "model.py", self._model, *tiny], check=True)

    def run(self) -> None:
        engines = self._given.engines.split(",")
        disk = self._folder / "disk" if self._given.disk else None
        if disk is not None:
            disk.mkdir()
        if any(engine == "ours" for engine in engines):
            self._daemon = Daemon(self._folder, self._given.gib, disk)
        seen: dict[str, int] = {}
        for engine in engines:
            seen[engine] = seen.get(engine, 0) + 1
            self._engine(engine, engine if seen[engine] == 1 else f"{engine}, another process",
                         again=seen[engine] > 1)
        if disk is not None and self._daemon is not None:
            self._daemon.stop()
            self._rate(disk)
            self._daemon = Daemon(self._folder, self._given.gib, disk)
            self._engine("ours", "ours, from disk", again=True, settle=3.0)
        if self._daemon is not None:
            self._daemon.stop()

    def _rate(self, disk: pathlib.Path) -> None:
        """Of reading the largest of the disk's files without the page cache, by dd."""
        largest = max((path for path in disk.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        began = time.perf_counter()
        subprocess.run(["dd", f"if={largest}", "of=/dev/null", "bs=4M", "iflag=direct"], stderr=subprocess.DEVNULL)
        seconds = time.perf_counter() - began
        with open(self._rows, "a") as file:
            file.write(json.dumps({"engine": "disk", "part": "dd", "bytes": largest.stat().st_size,
                                   "seconds": [seconds]}) + "\n")

    def _engine(self, kind: str, name: str, again: bool, settle: float = 1.0) -> None:
        if time.monotonic() > self._end:
            print(f"{name}: no time is left")
            return
        spec = self._sizes() | {"engine": name, "rows": str(self._rows), "environment": ENVIRONMENT, "settle": settle,
                                "arguments": self._arguments(kind)}
        if self._given.parts:
            spec["parts"] = [part for part in self._given.parts.split(",") if part != "identity" or kind == "ours"]
        elif self._given.trace:
            spec["parts"] = ["trace"]
        elif kind == "plain":
            spec |= {"parts": ["fresh", "hits", "decode", "arrive"], "arrive_kinds": ["stored"]}
        elif again:
            spec["parts"] = ["load"]
        else:
            spec["parts"] = ["fresh", "load", "decode", "arrive", "tokens"]
        path = self._folder / "spec.json"
        path.write_text(json.dumps(spec))
        with open(OUT / "engines.txt", "a") as log:
            log.write(f"\n===== {name}\n")
            log.flush()
            left = max(30.0, self._end - time.monotonic())
            try:
                code = subprocess.run([sys.executable, HERE / "engine.py", path], stdout=log, stderr=log,
                                      env=os.environ | ENVIRONMENT, timeout=left).returncode
            except subprocess.TimeoutExpired:
                code = -1
        self.failed = self.failed or code != 0
        print(f"{name}: exit code {code} at {time.monotonic() - self._end + self._given.seconds:.0f} s", flush=True)

    def _sizes(self) -> dict[str, Any]:
        if self._given.tiny:
            return {"words": model.TINY["words"], "warm": 300, "fresh": [(600, 2)], "load": [(600, 4)],
                    "load_prompts": 2, "decode": [(600, 1), (600, 2)], "decode_tokens": 8, "arrive": (600, 2),
                    "arrive_kinds": ["stored", "loaded"],
                    "tokens": [(500, 2)],
                    "trace": {"conversations": 6, "system": 128, "document": 500, "answer": 8, "at_once": 2}}
        few = self._given.quick
        return {"words": model.LLAMA["words"], "warm": 9000, "fresh": [(K32, 3 if few else 9), (K128, 1 if few else 3)],
                "load": [(K32, 9), (K128, 3 if few else 9)], "load_prompts": 1 if few else 3,
                "decode": [(K32, 1), (K32, 8), (K128, 1)], "decode_tokens": 64, "arrive": (K32, 8),
                "arrive_kinds": ["stored", "loaded"],
                "tokens": [(2000, 8), (K32, 2)], "trace": {}}

    def _arguments(self, kind: str) -> dict[str, Any]:
        given: dict[str, Any] = {"model": str(self._model), "dtype": "bfloat16", "seed": 0, "skip_tokenizer_init": True,
                                 "max_model_len": 4096 if self._given.tiny else 131072, "max_num_batched_tokens": 8192,
                                 "max_num_seqs": 16, "disable_log_stats": True, "generation_config": "vllm"}
        if self._given.tiny or self._given.eager:
            given["enforce_eager"] = True
        if self._given.cpu:
            given |= {"gpu_memory_utilization": 0.25}
        else:
            given |= {"block_size": 16} | ({"kv_cache_memory_bytes": 12 << 30} if self._given.trace else {})
        digest = {"digest": self._given.digest} if self._given.digest else {}
        answers = {"offload_prompt_only": False} if self._given.trace else {}
        if kind.startswith("native"):
            chunk = int(kind.partition(":")[2] or 1)
            extra = {"cpu_bytes_to_use": self._given.gib << 30, "blocks_per_chunk": chunk, **answers}
            given["kv_transfer_config"] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
                                           "kv_connector_extra_config": extra}
        elif kind == "ours":
            assert self._daemon is not None
            given["kv_transfer_config"] = {"kv_connector": "KvstrataConnector", "kv_role": "kv_both",
                                           "kv_connector_extra_config": {"socket": self._daemon.path, **answers, **digest}}
        return given


def table(rows: list[dict[str, Any]]) -> str:
    """A line a part and case: the median of each engine in milliseconds, and over the first that has it."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        times = row.get("seconds") or (row.get("steps") or [])[60:260]
        if times and row["part"] not in ("start", "end", "dd"):
            case = (row["part"], row.get("kind", ""), row.get("tokens", 0), row.get("batch", 1))
            found.setdefault(case, {})[row["engine"]] = 1e3 * statistics.median(times)
    lines = []
    for (part, kind, tokens, batch), medians in found.items():
        first = next(iter(medians.values()))
        lines.append(f"{part} {kind} {tokens} x {batch}: " +
                     ", ".join(f"{engine} {ms:.3f} ({ms / first:.3f})" for engine, ms in medians.items()))
    for row in rows:
        if row["part"] == "trace":
            later = sorted(row["seconds"])
            lines.append(f"trace, {row['engine']}: all of it in {row['total_s']:.2f} s, first tokens behind the first turn: "
                         f"median {1e3 * statistics.median(later):.1f} ms, 99 % {1e3 * later[-1 - len(later) // 100]:.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="plain,native:16,ours,ours")
    parser.add_argument("--disk", action="store_true")
    parser.add_argument("--quick", action="store_true", help="few repeats, for a first look")
    parser.add_argument("--trace", action="store_true", help="conversations on a cache of 12 GiB")
    parser.add_argument("--parts", help="of engine.py, for all engines")
    parser.add_argument("--eager", action="store_true", help="without graphs, which start a minute later")
    parser.add_argument("--digest", help="of ours: a name for the model, in place of its identity")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the programs with")
    parser.add_argument("--cpu", action="store_true", help="vLLM's CPU build")
    parser.add_argument("--seconds", type=float, default=540, help="no engine starts after that")
    parser.add_argument("--gib", type=int, default=40, help="host memory of native's and ours")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp/vllm-gpu"))
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(arguments.folder, ignore_errors=True)
    arguments.folder.mkdir(parents=True)
    trial = Trial(arguments, arguments.folder)
    try:
        trial.run()
    finally:
        rows = OUT / "vllm-gpu.jsonl"
        print(table([json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []))
    sys.exit(int(trial.failed))


if __name__ == "__main__":
    main()
