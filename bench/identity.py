#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the identity of a loaded model costs, on a CPU or a GPU.

    identity.py [--device cpu|cuda] [--gigabytes N] [--rounds N] [--json-out FILE] [--commit HASH] [--date DATE]

A Llama of 8B's layers, as many as fill N GB in bf16, with random bytes in place of weights: what the bytes are does not
matter here. Needs torch, transformers, numpy and xxhash, no daemon and no library; wants an idle machine.

first       s: the identity in a new process: every tensor is summed
sums        s: of that, the sums alone; cpu: seconds of all cores that they took
again       ms: what enable() asks of a model that had an identity before
check       us a tensor and module: what each generate() asks
walk        ms: what a change costs beside the sums of the tensors that changed
background  ms a generate that starts the background's sums, above one that does not
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import time
import types
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "integrations" / name / "src") for name in ("kvstrata", "kvstrata_transformers")]
os.environ["HF_HUB_OFFLINE"] = "1"

try:
    import xxhash
except ImportError:
    sys.exit("identity: there is no package xxhash here: pip install xxhash, or carry its wheel and name it in PYTHONPATH")

import torch  # noqa: E402
import transformers  # noqa: E402
from kvstrata.machine import device_name  # noqa: E402
from kvstrata.torch_tree_hash import tensor_sums  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

# The adapter's module alone, since the package wants libkvstrata.so.
package = types.ModuleType("kvstrata_transformers")
package.__path__ = [str(ROOT / "integrations/kvstrata_transformers/src/kvstrata_transformers")]
sys.modules["kvstrata_transformers"] = package
from kvstrata_transformers.identity import ModelIdentity, identity_of  # noqa: E402

GB = 1e9
# Limits at 16 GB: seconds by device; and of the others, which do not grow with it.
MUST_SUM = {"cpu": 3.0, "cuda": 0.3}
MUST = {"again": 5.0, "check": 0.5}


def model_of(gigabytes: float, device: str) -> Any:
    """A model of about that size. Buffers of the rotary embedding are as transformers makes them."""
    ends, layer = 2 * 32000 * 4096 * 2, (4 * 4096 + 2 * 1024 + 3 * 14336 - 2 * 4096) * 4096 * 2 + 4 * 4096
    config = LlamaConfig(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
                         num_key_value_heads=8, num_hidden_layers=max(1, round((gigabytes * GB - ends) / layer)))
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device=device).eval()
    rotary = type(model.model.rotary_emb)(config)
    model.model.rotary_emb = rotary.to(device)
    for parameter in model.parameters():
        parameter.data.view(torch.int16).random_()
    return model


def seconds(run: Callable[[], Any], device: str) -> float:
    begin = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def row(name: str, unit: str, values: list[float], must: float | None = None) -> dict[str, Any]:
    values = sorted(values)
    made = {"id": name, "value": statistics.median(values), "unit": unit, "n": len(values), "p10": values[len(values) // 10],
            "p90": values[len(values) * 9 // 10]}
    return {**made, "must": must} if must is not None else made


def rows_of(model: Any, device: str, rounds: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    tensors = list(model.parameters()) + list(model.buffers())
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / GB
    limit = MUST_SUM[device] * size / 16
    first = seconds(lambda: identity_of(model), device)
    sums, cpu = [], []
    for _ in range(rounds):
        begin = time.process_time()
        sums.append(seconds(lambda: tensor_sums(tensors), device))
        cpu.append(time.process_time() - begin)
    live = identity_of(model)
    things = sum(1 for _ in model.modules()) + len(tensors)
    check = [seconds(live.holds, device) * 1e6 / things for _ in range(50 * rounds)]
    walk = [seconds(live._look, device) * 1e3 for _ in range(rounds)]
    again = [seconds(lambda: identity_of(model).now(), device) * 1e3 for _ in range(10 * rounds)]
    eager = ModelIdentity(model, "given", resum_every=1)
    background = []
    for _ in range(rounds):
        background.append((seconds(eager.now, device) - seconds(eager.holds, device)) * 1e3)
        eager._background.wait()
    rows = [row(f"first/{device}", "s", [first], limit), row(f"sums/{device}", "s", sums, limit),
            row(f"sums-cpu/{device}", "s", cpu), row(f"again/{device}", "ms", again, MUST["again"]),
            row(f"check/{device}", "us", check, MUST["check"]), row(f"walk/{device}", "ms", walk),
            row(f"background/{device}", "ms", background)]
    return rows, {"gigabytes": size, "tensors": len(tensors), "modules": things - len(tensors)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gigabytes", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json-out", type=pathlib.Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    model = model_of(args.gigabytes, args.device)
    rows, context = rows_of(model, args.device, args.rounds)
    device = torch.cuda.get_device_name() if args.device == "cuda" else device_name()
    print(f"{device}: {context['gigabytes']:.2f} GB, {context['tensors']} tensors, {context['modules']} modules")
    for one in rows:
        must = f"  (must {one['must']:.3g})" if "must" in one else ""
        print(f"{one['id']:18} {one['value']:10.4g} {one['unit']}  p10 {one['p10']:.4g}  p90 {one['p90']:.4g}{must}")
    if args.json_out is not None:
        args.json_out.write_text(json.dumps({
            "suite": f"identity-{args.device}", "device": device, "commit": args.commit, "date": args.date,
            "command": f"bench/identity.py --device {args.device} --gigabytes {args.gigabytes:g}", "ceilings": {},
            "context": {"torch": torch.__version__, "transformers": transformers.__version__, "xxhash": xxhash.VERSION,
                        "cores": len(os.sched_getaffinity(0)), **context}, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
