# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of kvstrata_transformers share: SmolLM2 plain and enabled, a text, attention's time, result files.

They run in build/venv-transformers, and want an idle machine. Everything is fp32, page rows too.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Behind PYTHONPATH, so that a run can name another build's binding.
sys.path += [str(ROOT / "integrations" / name / "src")
             for name in ("kvstrata", "kvstrata_numpy", "kvstrata_transformers")]
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from kvstrata.machine import device_name  # noqa: E402
from kvstrata_numpy import hugging_face  # noqa: E402
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

import kvstrata  # noqa: E402
import kvstrata_transformers  # noqa: E402

LICENSES = pathlib.Path("/usr/share/common-licenses")
TEXT = ("GPL-3", "LGPL-2.1", "MPL-2.0", "Apache-2.0")
PLAIN = "plain sdpa"


def load() -> Any:
    return AutoModelForCausalLM.from_pretrained(hugging_face.cached(), dtype=torch.float32).eval()


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(hugging_face.cached())


def text_ids(tokens: int) -> list[int]:
    """The beginning of licence texts, one behind the other."""
    ids = tokenizer()("\n\n".join((LICENSES / name).read_text() for name in TEXT)).input_ids
    if len(ids) < tokens:
        raise ValueError(f"{tokens} tokens are asked for; the texts have {len(ids)}")
    return ids[:tokens]


class Stopwatch:
    """Adds up the seconds of the calls that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin
        return timed


def attention_calls() -> Stopwatch:
    """Times this process's from now on: kvstrata's append and attend, and plain transformers' sdpa."""
    watch = Stopwatch()
    kvstrata.Step.append = watch.wrap(kvstrata.Step.append)  # type: ignore[method-assign]
    kvstrata.Step.attend = watch.wrap(kvstrata.Step.attend)  # type: ignore[method-assign]
    AttentionInterface.register("sdpa", watch.wrap(sdpa_attention_forward))
    return watch


@dataclass
class Way:
    """One way to decode: plain transformers, or a plan. Times of its decode steps, ms: of the whole step, and of
    attention's calls in it."""

    name: str
    model: Any
    cache: Any
    attention: Stopwatch
    step_ms: list[float] = field(default_factory=list)
    attention_ms: list[float] = field(default_factory=list)

    def forward(self, ids: list[int]) -> torch.Tensor:
        """Logits of the last id."""
        with torch.no_grad():
            return self.model(input_ids=torch.tensor([ids]), past_key_values=self.cache, use_cache=True,
                              logits_to_keep=1).logits[0, -1]

    def decode(self, token: int) -> torch.Tensor:
        """A timed step; its logits."""
        before, begin = self.attention.seconds, time.perf_counter()
        logits = self.forward([token])
        self.step_ms.append((time.perf_counter() - begin) * 1e3)
        self.attention_ms.append((self.attention.seconds - before) * 1e3)
        return logits

    def bytes_read(self, token: int) -> int:
        """Bytes of keys, values and what is chosen by, in one step more, which is not timed."""
        if self.name == PLAIN:
            return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)
        read = 0

        def add(layer: int, step: kvstrata.Step) -> None:
            nonlocal read
            cost = step.cost()
            read += cost.attend_bytes + cost.select_bytes

        self.cache.watch = add
        self.forward([token])
        self.cache.watch = None
        return read


def ways_of(names: list[str], plain: Any, enabled: Any, attention: Stopwatch) -> list[Way]:
    return [Way(name, plain, DynamicCache(), attention) if name == PLAIN
            else Way(name, enabled, kvstrata_transformers.cache(enabled, name), attention) for name in names]


def row(name: str, unit: str, values: list[float], base: tuple[str, float] | None = None, must: float | None = None
        ) -> dict[str, Any]:
    """base: name and value; the ratio is the base's over this one's, at least `must`."""
    made: dict[str, Any] = {"id": name, "value": statistics.median(values), "unit": unit, "n": len(values)}
    if len(values) > 1:
        made |= {"p10": float(np.percentile(values, 10)), "p90": float(np.percentile(values, 90))}
    if base is not None:
        made |= {"baseline": {"name": base[0], "value": base[1]}, "ratio": base[1] / made["value"]}
    return made if must is None else {**made, "must": must}


def arguments(about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("--json-out", type=pathlib.Path)
    parser.add_argument("--commit", default="uncommitted")
    parser.add_argument("--date", default="")
    return parser


def write_result(options: argparse.Namespace, suite: str, notes: str, rows: list[dict[str, Any]]) -> None:
    """Prints rows; keeps them where options.json_out says (docs/results.md)."""
    for r in rows:
        against = f"  {r['ratio']:.3f}x {r['baseline']['name']}" if "ratio" in r else ""
        print(f"{r['id']:60} {r['value']:8.2f} {r['unit']}{against}", flush=True)
    if options.json_out:
        options.json_out.write_text(json.dumps(
            {"suite": suite, "device": device_name(), "commit": options.commit, "date": options.date,
             "command": f"build/venv-transformers/bin/python bench/{pathlib.Path(sys.argv[0]).name}", "ceilings": {},
             "context": {"torch": torch.__version__, "transformers": transformers.__version__,
                         "threads": torch.get_num_threads(), "notes": notes}, "rows": rows}, indent=1) + "\n")
