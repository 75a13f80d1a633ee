# SPDX-License-Identifier: Apache-2.0
"""Starts kvstratad and engines (engine.py), for every trial. Logs go to $OUT/daemon.txt and $OUT/engines-*.txt."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import model

HERE = pathlib.Path(__file__).resolve().parent
OUT = pathlib.Path(os.environ.get("OUT") or ".")
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
               "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONHASHSEED": "0"}
_WRITE = 60  # seconds that a daemon's stop may write
_START, _END = 60, _WRITE + 15  # seconds that a daemon may take


class Daemon:
    """kvstratad of the bundle, with an engines' region of `memory`, as "40GiB"."""

    def __init__(self, folder: pathlib.Path, memory: str, disk: pathlib.Path | None = None) -> None:
        self.path = str(folder / "kvstratad.sock")
        settings = [f"chunks.bytes={memory}", "pool.device_bytes=64MiB", "pool.host_bytes=64MiB",
                    f"shutdown.write_timeout={_WRITE}s"]
        if disk is not None:  # trial.py's 28 GiB take 33: seven chunks of 32 MiB a segment, and a 64th
            settings += [f"disk.path={disk}", f"disk.budget_bytes={memory}"]
        words = [word for setting in settings for word in ("--set", setting)]
        self._log = open(OUT / "daemon.txt", "a")
        self._process = subprocess.Popen([os.environ["KVSTRATAD"], "--socket", self.path, *words],
                                         stdout=self._log, stderr=self._log,
                                         env=os.environ | {"LD_LIBRARY_PATH": os.environ.get("BUNDLE_LIB", "")})
        self.pid = self._process.pid
        end = time.monotonic() + _START
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

    def says(self, *verb: str) -> Any:
        """By the CLI beside it."""
        cli = pathlib.Path(os.environ["KVSTRATAD"]).with_name("kvstrata")
        said = subprocess.run([cli, "--socket", self.path, *verb, "-o", "json"], capture_output=True, text=True,
                              timeout=_END, env=os.environ | {"LD_LIBRARY_PATH": os.environ.get("BUNDLE_LIB", "")})
        if said.returncode != 0:
            raise RuntimeError(f"kvstrata {' '.join(verb)}: {said.stderr}{said.stdout}")
        return json.loads(said.stdout)

    def stop(self, by: signal.Signals = signal.SIGTERM) -> str:
        """What its log says of the end. Once it has ended, harmless."""
        log = OUT / "daemon.txt"
        before = log.stat().st_size
        self._process.send_signal(by)
        self._process.send_signal(signal.SIGCONT)  # it may be stopped
        self._process.wait(_END)
        return log.read_bytes()[before:].decode(errors="replace")


class Engine:
    """A process of engine.py. A deadline is seconds from the call; TimeoutError, RuntimeError: it has ended."""

    def __init__(self, spec: dict[str, Any], folder: pathlib.Path) -> None:
        self.name = spec["engine"]
        path = folder / f"{spec['engine'].replace(' ', '-').replace(':', '-')}.json"
        path.write_text(json.dumps(spec))
        self._log = open(OUT / "engines.txt", "a")
        self._log.write(f"\n===== {self.name}\n")
        self._log.flush()
        self.process = subprocess.Popen([sys.executable, HERE / "engine.py", path], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=self._log, text=True,
                                        env=os.environ | ENVIRONMENT | spec["environment"])

    def say(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)

    def hear(self, seconds: float) -> Any:
        """Its next line."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            self.kill()
            raise TimeoutError(f"{self.name} says nothing within {seconds:.0f} s; see {OUT / 'engines.txt'}")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended with {self.process.wait(_END)}; see {OUT / 'engines.txt'}")
        return json.loads(line)

    def ask(self, seconds: float, do: str, **arguments: Any) -> Any:
        self.say(do, **arguments)
        return self.hear(seconds)

    def end(self, seconds: float) -> int:
        """Its exit code, when it has done what it was told; -9: it was not over within so many seconds."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            return self.process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            self.kill()
            return -9

    def kill(self) -> None:
        """Once it has ended, harmless."""
        self.process.kill()
        self.process.wait(_END)


class Launcher:
    """What all engines of one call have in common. given: trial.py's arguments."""

    def __init__(self, given: argparse.Namespace, folder: pathlib.Path) -> None:
        self.given, self.folder, self.rows = given, folder, OUT / "vllm-gpu.jsonl"
        self._end = time.monotonic() + given.seconds
        self.socket = str(folder / "kvstratad.sock")
        self.failed = False  # whether an engine ended otherwise than it should
        self._running: list[Daemon | Engine] = []

    @property
    def left(self) -> float:
        """Seconds of the call."""
        return self._end - time.monotonic()

    def say(self, text: str) -> None:
        print(f"{self.given.seconds - self.left:5.0f} s: {text}", flush=True)

    def row(self, engine: str, part: str, **fields: Any) -> None:
        with open(self.rows, "a") as file:
            file.write(json.dumps({"engine": engine, "part": part, **fields}) + "\n")

    def daemon(self, memory: str | None = None, disk: pathlib.Path | None = None) -> Daemon:
        self._running.append(Daemon(self.folder, memory or f"{self.given.gib}GiB", disk))
        return self._running[-1]

    def close(self) -> None:
        """Ends what was started and still runs; engines first."""
        for running in reversed(self._running):
            running.kill() if isinstance(running, Engine) else running.stop()

    def spec(self, kind: str, name: str, *, shape: str = "llama", gib: float | None = None,
             extra: dict[str, Any] | None = None, llm: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        """kind: plain, native:N (blocks a chunk), ours, or plan:TEXT (attention over vLLM's blocks); shape: of the model,
        unless all are tiny; gib: native's memory; extra: of kv_connector_extra_config; llm: arguments of vllm.LLM; more: of the spec."""
        shape = "tiny" if self.given.tiny else shape
        arguments = self._arguments(shape) | self._of_family() | (llm or {})
        if kind.startswith("native"):
            extra = {"cpu_bytes_to_use": int((gib or self.given.gib) * 2**30),
                     "blocks_per_chunk": int(kind.partition(":")[2] or 1), **(extra or {})}
            arguments["kv_transfer_config"] = transfer("OffloadingConnector", extra)
        elif kind.startswith("plan:"):
            arguments.pop("block_size", None)  # the plan says which
            arguments |= {"attention_backend": "CUSTOM",
                          "additional_config": {"kvstrata": {"plan": kind.removeprefix("plan:")}}}
        elif kind == "ours":
            extra = {"socket": self.socket, **(extra or {})}
            if self.given.digest:
                extra["digest"] = self.given.digest
            arguments["kv_transfer_config"] = transfer("KvstrataConnector", extra)
        return {"engine": name, "rows": str(self.rows), "environment": ENVIRONMENT, "settle": 1.0, "parts": [],
                "words": 500 if self.given.family else model.SHAPES[shape]["words"],
                "warm": 300 if self.given.tiny or self.given.family else 9000,
                "arguments": arguments, **more}

    @property
    def invariant(self) -> dict[str, str]:
        """The environment of engines in which a request's tokens do not depend on what else is in a batch, nor on how
        much of it was held: vLLM has that for GPUs."""
        return ENVIRONMENT if self.given.cpu else ENVIRONMENT | {"VLLM_BATCH_INVARIANT": "1"}

    def _arguments(self, shape: str) -> dict[str, Any]:
        weights = "" if self.given.family else str(self._model(shape))
        given: dict[str, Any] = {"model": weights, "dtype": "bfloat16", "seed": 0,
                                 "skip_tokenizer_init": True, "max_model_len": 4096 if shape == "tiny" else 131072,
                                 "max_num_batched_tokens": 8192, "max_num_seqs": 16, "disable_log_stats": True,
                                 "generation_config": "vllm"}
        if self.given.eager or (shape != "llama" and not self.given.plans):
            given["enforce_eager"] = True
        return given | ({"gpu_memory_utilization": 0.25} if self.given.cpu else {"block_size": 16})

    def _of_family(self) -> dict[str, Any]:
        """Arguments of vllm.LLM for --family's model in place of the shape's, and for --ranks."""
        found: dict[str, Any] = {}
        if self.given.family:
            import families
            found |= families.made(self.given.family, self.folder)
        if self.given.ranks > 1:
            found |= {"tensor_parallel_size": self.given.ranks, "distributed_executor_backend": "mp"}
        return found

    def _model(self, shape: str) -> pathlib.Path:
        """The folder of the weights, which are made once."""
        at = self.folder / shape
        if not at.exists():
            subprocess.run([sys.executable, HERE / "model.py", at, "--shape", shape,
                            "--deviation", str(self.given.deviation)], check=True)
        return at

    def memory(self, gib: float, longest: int | None = None) -> dict[str, Any]:
        """Arguments of vllm.LLM for a cache of so many GiB on the GPU, also where other engines have the rest; a CPU's is
        VLLM_CPU_KVCACHE_SPACE's. longest: tokens of the longest request, where a cache has no room for the 128K that vLLM
        asks room for otherwise, 16 GiB of the large model."""
        given = {} if longest is None else {"max_model_len": 2 * longest}
        if self.given.cpu:
            return given
        return {"kv_cache_memory_bytes": int(gib * 2**30), "gpu_memory_utilization": 0.1, **given}

    def start(self, spec: dict[str, Any]) -> Engine:
        """One that serves; it is ready when it has said so."""
        return self._engine({**spec, "serve": True})

    def _engine(self, spec: dict[str, Any]) -> Engine:
        self._running.append(Engine(spec, self.folder))
        return self._running[-1]

    def run(self, spec: dict[str, Any]) -> None:
        """One that does its parts and ends."""
        if self.left <= 0:
            self.say(f"{spec['engine']}: no time is left")
            return
        code = self._engine(spec).end(max(30.0, self.left))
        self.failed = self.failed or code != 0
        self.say(f"{spec['engine']}: exit code {code}")


def transfer(connector: str, extra: dict[str, Any]) -> dict[str, Any]:
    """vLLM's kv_transfer_config."""
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}
