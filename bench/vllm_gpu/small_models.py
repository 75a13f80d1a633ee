# SPDX-License-Identifier: Apache-2.0
"""Small random models that differ in what they cache: bytes behind a load against bytes stored, and tokens.

The same prompt thrice: computed; behind vLLM's own prefix hit; and, when its cache is reset, behind a load. Every page of
the load must be what a store took of the blocks (recorder.py), and the tokens those behind vLLM's own hit. The models
are those of tests/vllm/families.py and some more, eager, one after the other in one process, those first that start
soon; where one fails or is late, the others go on in another. tp2, pp2 and dp2 want two GPUs; tp2to1 and tp1to2 store
with one number of ranks and load with the other, in canonical rows. Of dp2 and dp2_experts, data parallel ranks, each loads
what the other stored (replicas.py); of dp2_experts each has half of the experts.
"""

from __future__ import annotations

import json
import os
import pathlib
import select
import subprocess
import sys
from typing import Any

from launch import ENVIRONMENT, HERE, OUT, Launcher

sys.path.append(str(HERE.parents[1] / "tests" / "vllm"))

DEFAULT = ("llama", "fp8", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_next", "jamba", "n_gram", "lora", "llava", "eagle",
           "tp2", "tp2to1", "tp1to2", "pp2", "dp2", "dp2_experts", "granite")
_HEADS = "2"  # that rows of `divisible` have
_RANKS: dict[str, tuple[dict[str, Any], ...]] = {
    "tp2": ({"tensor_parallel_size": 2},), "pp2": ({"pipeline_parallel_size": 2},),
    "tp2to1": ({"tensor_parallel_size": 2}, {}), "tp1to2": ({}, {"tensor_parallel_size": 2}),
    "dp2": ({"data_parallel_size": 2},), "dp2_experts": ({"data_parallel_size": 2, "enable_expert_parallel": True},)}
# Seconds that a process may take to begin, and each family then; some have kernels that Triton compiles for longer.
_BEGINS, _PATIENCE, _COMPILES = 90.0, 60.0, {"granite": 150.0, "qwen3_next": 150.0}


def run(launcher: Launcher) -> None:
    records = launcher.folder / "records"
    records.mkdir()
    launcher.daemon("2GiB")
    names = [name for name in launcher.given.families.split(",") if name]
    alone = [name for name in names if name not in _RANKS]
    left = [_spec(launcher, name) for name in alone]
    gpus = _gpus(launcher)
    while left and launcher.left > 0:
        left = left[_child(launcher, left, records):]
    if left:
        launcher.failed = True
        launcher.say(f"no time is left for {', '.join(name for name, _, _ in left)}")
    for name in names:
        if name in _RANKS and launcher.left <= 0:
            launcher.failed = True
            launcher.say(f"no time is left for {name}")
        elif name in _RANKS and gpus < 2:
            launcher.row("ours", "family", family=name, skipped=f"it takes two GPUs, and there are {gpus}")
            launcher.say(f"{name}: skipped, it takes two GPUs, and there are {gpus}")
        elif name in _RANKS:
            for number, ranks in enumerate(_RANKS[name]):
                _child(launcher, [_of_ranks(launcher, name, number, ranks)], records)


def _gpus(launcher: Launcher) -> int:
    """How many GPUs; on a CPU its cores, of which vLLM takes one a rank."""
    import torch
    return len(os.sched_getaffinity(0)) if launcher.given.cpu else torch.cuda.device_count()


def _child(launcher: Launcher, specs: list[list[Any]], records: pathlib.Path) -> int:
    """How many of them are done with."""
    path = launcher.folder / "families.json"
    path.write_text(json.dumps(specs))
    environment = os.environ | ENVIRONMENT | {"KVSTRATA_RECORDS": str(records), "KVSTRATA_RECORDS_HEADS": _HEADS}
    if launcher.given.cpu:  # a core a rank; vLLM divides by NUMA nodes otherwise
        several = any("distributed_executor_backend" in arguments for _, arguments, _ in specs)
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1" if several else "nobind"
    lines: list[dict[str, Any]] = []
    with open(OUT / "engines.txt", "a") as log:
        replicas = any("data_parallel_size" in arguments for _, arguments, _ in specs)
        program = HERE / ("replicas.py" if replicas else "family.py")
        child = subprocess.Popen([sys.executable, program, path], stdout=subprocess.PIPE, stderr=log, text=True,
                                 env=environment)
        assert child.stdout is not None
        began, patience = launcher.left, _BEGINS
        while len(lines) < len(specs):
            patience += _COMPILES.get(specs[len(lines)][0], _PATIENCE)
            if not select.select([child.stdout], [], [], max(1.0, min(patience, launcher.left)))[0] or not (
                    line := child.stdout.readline()):
                break
            lines.append(json.loads(line))
            _tell(launcher, lines[-1], began - launcher.left)
            began, patience = launcher.left, 0.0
        child.kill()
        child.wait()
    if len(lines) < len(specs) and not (lines and "error" in lines[-1]):
        launcher.failed = True
        late = {"family": specs[len(lines)][0], "error": f"the process has ended, or it is late; see {OUT / 'engines.txt'}"}
        _tell(launcher, late, began - launcher.left)
        return len(lines) + 1
    return len(lines)


def _tell(launcher: Launcher, found: dict[str, Any], seconds: float) -> None:
    """seconds: since the family before it, the start of a process included."""
    launcher.row("ours", "family", **found, seconds_in_all=seconds)
    if "error" in found:
        launcher.failed = True
        launcher.say(f"{found['family']}: {found['error']}; {seconds:.1f} s")
        return
    launcher.failed = launcher.failed or found["wrong"] > 0 or not all(found["equal_to_hit"])
    launcher.say(f"{found['family']}: held {found['held']}, tokens equal to a hit's {found['equal_to_hit']}, of "
                 f"{found['pages']} pages loaded {found['wrong']} wrong, {found['unknown']} unknown; {seconds:.1f} s, "
                 f"{found['start_s']:.1f} of them to start the engine")


def _spec(launcher: Launcher, name: str, base: str | None = None, extra: dict[str, Any] | None = None,
          **llm: Any) -> list[Any]:
    """base: the family of tests/vllm, where it has another name."""
    import families  # a module of tests/vllm
    folder = launcher.folder / "models"
    folder.mkdir(exist_ok=True)
    more: dict[str, Any] = {}
    if name == "lora":
        llm |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    if name == "eagle":
        llm["speculative_config"] = {"method": "eagle", "model": families.draft(folder / "draft"),
                                     "num_speculative_tokens": 2}
    if name == "qwen3_next":  # what vLLM takes on this GPU otherwise is of a package that is not packed
        llm["additional_config"] = {"gdn_prefill_backend": "triton"}
    base = base or {"lora": "llama", "eagle": "llama"}.get(name, name)
    made = families.multimodal(folder / name) if name == "llava" else families.made(base, folder)
    if name == "llava":
        more["image"] = families.IMAGE
    if name == "lora":
        more["adapters"] = [families.adapter(folder / letter, made["model"], seed) for seed, letter in enumerate("ab")]
    room = launcher.memory(1) or {"gpu_memory_utilization": 0.25}
    transfer = {"kv_connector": "KvstrataConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": {"socket": launcher.socket, **(extra or {})}}
    return [name, {"dtype": "bfloat16", "seed": 0, "enforce_eager": True, "max_num_batched_tokens": 1024,
                   "max_num_seqs": 8, "disable_log_stats": True, "worker_extension_cls": "recorder.Recorder",
                   "kv_transfer_config": transfer, **room, **made, **llm}, more]


def _of_ranks(launcher: Launcher, name: str, number: int, ranks: dict[str, Any]) -> list[Any]:
    """The number-th engine of a name of _RANKS."""
    if ranks:
        ranks = {**ranks, "distributed_executor_backend": "mp", "disable_custom_all_reduce": True}
    extra = {"canonical_layout": True, "digest": f"of whole heads, {name}"} if "to" in name else {}
    base = "deepseek_v3" if name == "dp2_experts" else "divisible"
    return _spec(launcher, f"{name} {number + 1}", base, extra, **ranks)
