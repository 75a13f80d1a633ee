#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.26 decodes from a daemon on a GPU, and is compared with itself.

    check.py [--seconds 280] [--device cuda|cpu] [--only NAME,...] [--together 9] [--prompts 20] [--longest 3000]

Goes to $OUT: vllm26.json, and engines.txt, what they said.

Engines are processes of their own, up to `--together` side by side: their times say nothing, but those of `decode`,
which run alone. The model is random, a Llama of four layers with sharp attention, so that wrong keys or values change
tokens.
Plain vLLM attends by Triton (TRITON_ATTN), as its FlashAttention was not brought along (pack.py).

A row passes if its tokens are plain vLLM's up to a place where plain's margin between the two is at most MARGIN, what
16 bits leave open; `noise` is plain against itself in another order of the prompts. The table is printed as far as it
came when the time is over; an engine that fails shows the end of its log, and the others go on.

In a process of its own, for one engine: check.py --engine SPEC.json RESULT.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WORDS = 4, 1024, 16, 4, 64, 32000
NEW, TOP, SEED, MOST_TOKENS = 24, 4, 20261124, 3200
MARGIN = {"float16": 2e-2, "bfloat16": 1.5e-1, "float32": 3e-4}
BLOCK = 16
ALONE_SECONDS = 40  # kept for each engine that runs alone
OUT = pathlib.Path(os.environ.get("OUT", "."))
STRATA = "strata{budget = 512, min_tokens = 512}"  # shorter prompts are read whole


def make_model(folder: pathlib.Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=WORDS, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=8192))
    # Logits of attention get a deviation of about 3, and attention adds as much to a token as it was.
    spread = {"embed_tokens": 1.0, "q_proj": 0.055, "k_proj": 0.055, "v_proj": 0.04, "o_proj": 0.04}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if deviation := next((d for part, d in spread.items() if part in name), None):
                weight.normal_(0, deviation)
    model.half().save_pretrained(folder)


def make_prompts(count: int, longest: int) -> list[list[int]]:
    """10 to `longest` tokens, evenly on a logarithmic scale."""
    source = random.Random(SEED)
    lengths = [round(10 * (longest / 10) ** (i / (count - 1))) for i in range(count)]
    return [[source.randrange(WORDS) for _ in range(n)] for n in lengths]


# One engine


class Killer:
    """Kills the daemon before the number-th attention call from now on."""

    def __init__(self) -> None:
        from kvstrata_vllm.worker import WorkerHalf
        self.daemon: Any = None
        self.left = -1
        attend = WorkerHalf.attend

        def counted(half: Any, *args: Any) -> None:
            if self.left == 0:
                self.daemon.process.kill()
                self.daemon.process.wait()
            self.left -= 1
            attend(half, *args)

        WorkerHalf.attend = counted


def daemon_at(socket: str, device: str) -> Any:
    from kvstrata.daemon import Daemon
    pool = () if device == "cpu" else ("pool.device=cuda", "pool.device_bytes=1GiB", "pool.arena_bytes=64MiB",
                                       "pool.host_bytes=16MiB")
    return Daemon(*(word for setting in pool for word in ("--set", setting)), socket=socket)


def arguments_of(spec: dict[str, Any], socket: str) -> dict[str, Any]:
    """Of vllm.LLM. Memory is given, so that no engine measures what the others leave free."""
    given = {"model": spec["model"], "dtype": spec["dtype"], "seed": 0, "skip_tokenizer_init": True,
             "enforce_eager": spec["eager"], "max_model_len": MOST_TOKENS, "max_num_batched_tokens": 512,
             "max_num_seqs": 8, "async_scheduling": False, "block_size": BLOCK if spec["device"] == "cuda" else None,
             "kv_cache_memory_bytes": 512 << 20, "gpu_memory_utilization": 0.06, "disable_log_stats": True}
    if spec["plan"] is None:
        return given | ({"attention_backend": "TRITON_ATTN"} if spec["device"] == "cuda" else {})
    return given | {"attention_backend": "CUSTOM", "num_gpu_blocks_override": spec["blocks"],
                    "kv_transfer_config": {"kv_connector": "KvstrataConnector", "kv_role": "kv_both",
                                           "kv_connector_extra_config": {"plan": spec["plan"], "socket": socket}}}


def generate(llm: Any, rows: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    from vllm import SamplingParams
    wanted = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=TOP, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in rows], wanted, use_tqdm=False)
    return [{"tokens": list(o.outputs[0].token_ids), "held": o.num_cached_tokens, "reason": o.outputs[0].finish_reason,
             "top": [{str(i): p.logprob for i, p in at.items()} for at in o.outputs[0].logprobs or []]}
            for o in outputs]


def run_engine(spec: dict[str, Any], result: pathlib.Path) -> None:
    """Writes RESULT after each batch: what came before a crash counts."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING=str(int(spec["processes"])), VLLM_NO_USAGE_STATS="1",
                      DO_NOT_TRACK="1", HF_HUB_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0")
    if spec["device"] == "cpu":
        os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_CI_ENV="1")
    else:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(spec["runner"] == "v2"))
    with contextlib.ExitStack() as stack:
        socket = os.path.join(stack.enter_context(tempfile.TemporaryDirectory()), "kvstratad.sock")
        daemon = stack.enter_context(daemon_at(socket, spec["device"])) if spec["plan"] else None
        import vllm
        began = time.perf_counter()
        llm = vllm.LLM(**arguments_of(spec, socket))
        done: dict[str, Any] = {"vllm": vllm.__version__, "start_s": time.perf_counter() - began, "batches": [],
                                "seconds": []}
        killer = Killer() if any("kill_at" in batch for batch in spec["batches"]) else None
        for batch in spec["batches"]:
            if killer is not None:
                killer.daemon, killer.left = daemon, batch.get("kill_at", -1)
            began = time.perf_counter()
            done["batches"].append(generate(llm, batch["prompts"], batch.get("tokens", NEW)))
            done["seconds"].append(time.perf_counter() - began)
            result.write_text(json.dumps(done))
            if daemon is not None and daemon.process.poll() is not None:
                daemon = stack.enter_context(daemon_at(socket, spec["device"]))


# All of them


def engines(device: str, model: str, rows: list[list[int]]) -> dict[str, dict[str, Any]]:
    """By name: specs of processes. runner: vLLM 0.26 has two; v2 is what it takes for such a model on a GPU."""
    every, dtype = {"prompts": rows}, "float16" if device == "cuda" else "float32"
    plain = {"plan": None, "device": device, "model": model, "dtype": dtype, "runner": "v2", "eager": True,
             "blocks": None, "processes": False, "batches": [every, {"prompts": rows[::-1]}]}
    full = plain | {"plan": "full", "batches": [every, every]}
    few = -(-MOST_TOKENS // (BLOCK if device == "cuda" else 128)) + 4
    # The daemon dies in the 10th forward pass; then it is started again.
    deaths = [{"prompts": rows, "kill_at": 9 * LAYERS + 1}, {"prompts": rows}]
    long = [{"prompts": [rows[-1]], "tokens": 8}, {"prompts": [rows[-1]], "tokens": 200}]
    found = {"plain": plain, "full": full | {"batches": [every, every, *deaths]},
             "strata": full | {"plan": STRATA},
             "preempted": full | {"blocks": few, "batches": [{"prompts": rows + rows}]},
             "processes": full | {"processes": True, "batches": [every]},
             "compiled": full | {"eager": False, "batches": [every]},
             "decode plain": plain | {"batches": long}, "decode full": full | {"batches": long}}
    if device == "cuda":
        found |= {"full v1": full | {"runner": "v1", "blocks": 4096}, "plain bf16": plain | {"dtype": "bfloat16"},
                  "full bf16": full | {"dtype": "bfloat16", "batches": [every]}}
    return found


class Running:
    def __init__(self, name: str, spec: dict[str, Any], folder: pathlib.Path) -> None:
        at = folder / name.replace(" ", "-")
        self.name, self.result, self.log = name, at.with_suffix(".result.json"), at.with_suffix(".log")
        at.with_suffix(".spec.json").write_text(json.dumps(spec))
        with self.log.open("w") as log:
            self.process = subprocess.Popen([sys.executable, __file__, "--engine", str(at.with_suffix(".spec.json")),
                                             str(self.result)], stdout=log, stderr=log, start_new_session=True)

    def finish(self, deadline: float) -> dict[str, Any]:
        """What it wrote; {} if nothing."""
        try:
            code = self.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, 9)
            code = self.process.wait()
        if code:
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if "INFO " not in line[:50]]
            print(f"--- {self.name} ended with {code}:", *lines[-40:], sep="\n", flush=True)
        return json.loads(self.result.read_text()) if self.result.exists() else {}


def run_all(specs: dict[str, dict[str, Any]], together: int, deadline: float) -> dict[str, dict[str, Any]]:
    alone = [name for name in specs if name.startswith("decode")]
    side_by_side = [name for name in specs if name not in alone]
    groups = [side_by_side[i:i + together] for i in range(0, len(side_by_side), together)] + [[name] for name in alone]
    done, logs = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for names in groups:
            kept = 0 if names[0] in alone else ALONE_SECONDS * len(alone)
            running = [Running(name, specs[name], pathlib.Path(folder)) for name in names]
            done |= {one.name: one.finish(deadline - kept) for one in running}
            logs += [f"--- {one.name}\n{one.log.read_text(errors='replace')[-100_000:]}" for one in running]
    (OUT / "engines.txt").write_text("\n".join(logs))
    return done


# What came of it


def compare(want: list[dict[str, Any]], got: list[dict[str, Any]], allowed: float) -> dict[str, Any]:
    """margin: plain's largest where tokens differ; apart: the largest distance of two logprobs before that."""
    found = {"rows": len(want), "same": 0, "ties": 0, "wrong": 0, "ended": 0, "margin": 0.0, "apart": 0.0}
    for a, b in zip(want, got):
        at = next((i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"])) if x != y), None)
        for x, y, token in list(zip(a["top"], b["top"], a["tokens"]))[:at]:
            found["apart"] = max(found["apart"], abs(x[str(token)] - y[str(token)]))
        if at is None:
            found["same" if len(a["tokens"]) == len(b["tokens"]) and b["reason"] == "length" else "ended"] += 1
            continue
        top = a["top"][at]
        margin = top[str(a["tokens"][at])] - top.get(str(b["tokens"][at]), min(top.values()))
        seen = str(b["tokens"][at]) in top
        found["margin"] = max(found["margin"], margin)
        found["ties" if seen and margin <= allowed else "wrong"] += 1
    return found


def short(rows: list[dict[str, Any]], prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Those that a plan of 512 tokens reads whole."""
    return [row for row, ids in zip(rows, prompts) if len(ids) + NEW <= 512]


def table(specs: dict[str, dict[str, Any]], done: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    plain = {"float16": done.get("plain", {}), "float32": done.get("plain", {}), "bfloat16": done.get("plain bf16", {})}

    def row(name: str, dtype: str, got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
        rows.append({"name": name, "dtype": dtype, **compare(want, got, MARGIN[dtype])})

    for name, spec in specs.items():
        batches, base = done.get(name, {}).get("batches", []), plain[spec["dtype"]].get("batches", [])
        if name.startswith("decode") or not batches or not base:
            continue
        if spec["plan"] is None:
            row(f"{name}: noise", spec["dtype"], batches[1][::-1] if len(batches) > 1 else [], base[0])
            continue
        for label, batch, given in zip(("", " again", " killed", " after"), batches, spec["batches"]):
            less = ", reads less" if spec["plan"] == STRATA else ""
            row(name + label + less, spec["dtype"], batch, base[0] * (len(batch) // len(base[0])))
            if spec["plan"] == STRATA:
                row(f"{name}{label}, up to 512", spec["dtype"], short(batch, given["prompts"]),
                    short(base[0], given["prompts"]))
            rows[-1] |= {"held": sum(b["held"] or 0 for b in batch),
                         "holdable": sum((len(ids) - 1) // 32 * 32 for ids in given["prompts"])}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs=2, type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=280)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="")
    parser.add_argument("--together", type=int, default=9)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--longest", type=int, default=3000, help="tokens")
    options = parser.parse_args()
    if options.engine:
        run_engine(json.loads(options.engine[0].read_text()), options.engine[1])
        return
    deadline = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        make_model(pathlib.Path(folder))
        specs = engines(options.device, folder, make_prompts(options.prompts, options.longest))
        if options.only:
            specs = {name: spec for name, spec in specs.items() if name in options.only.split(",")}
        done = run_all(specs, options.together, deadline)
    rows = table(specs, done)
    print(f"vLLM {next((d['vllm'] for d in done.values() if d), 'none')}, seed {SEED}, margins {MARGIN}")
    for name, result in done.items():
        print(f"{name:14} start {result.get('start_s', -1):5.1f} s, batches",
              *(f"{s:.2f}" for s in result.get("seconds", [])), f"of {len(specs[name]['batches'])}")
    for r in rows:
        print(f"{r['name']:26} {r['dtype']:9} rows {r['rows']:3} same {r['same']:3} ties {r['ties']:3} "
              f"wrong {r['wrong']:3} ended {r['ended']:3} margin {r['margin']:.1e} apart {r['apart']:.1e} "
              f"held {r.get('held', '')} of {r.get('holdable', '')}")
    failed = [name for name in specs if len(done[name].get("batches", [])) < len(specs[name]["batches"])]
    failed += [r["name"] for r in rows if (r["wrong"] and "reads less" not in r["name"])
               or (r["ended"] and "killed" not in r["name"])]
    print("failed:", ", ".join(failed) or "none")
    (OUT / "vllm26.json").write_text(json.dumps({"rows": rows, "engines": {
        name: {k: v for k, v in d.items() if k != "batches"} for name, d in done.items()}}, indent=1))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
