#!/usr/bin/env python3
"""Runs test vectors through a running kvstratad: every .npz of a folder, by kvs_* calls alone.

Usage: golden_runner.py DIR [--backend ref|simd|cuda] [--plan NAME ...] [--road linked|remote]
                        [--socket PATH]

Each compared array is one check, at the tolerance of the folder's README.md. Plans that the daemon does
not implement are listed, not run; asking for one by --plan is a failure. Last line: `N passed, N failed`.
Exit codes: 0 all passed, 1 a check failed or nothing ran, 2 usage.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "integrations" / "kvstrata" / "src"))

import kvstrata  # noqa: E402
from kvstrata.daemon import Daemon  # noqa: E402

PLANS = ("full", "window", "quest", "chess", "tokenselect", "sentencekv", "sekv", "mosaickv", "rawblocks")
# rawblocks is no preset but the block selector over raw pages.
CUSTOM = {"rawblocks": 'segmenter = "page", selector = "block", codec = "raw"'}
PAGE_TOKENS = 16
OUT_TOLERANCE = {"ref": 1e-5, "simd": 1e-5, "cuda": 2e-2}  # cuda multiplies in bf16
SCORE_TOLERANCE = 1e-4  # of the largest

Arrays = dict[str, np.ndarray]


@dataclass
class Outcome:
    """What a plan answered over a case; rows run over (step, layer, group), last fastest."""

    out: np.ndarray                                   # [T, L, Hq, d]
    tokens: list[list[list[np.ndarray]]] = field(default_factory=list)  # [step][layer][group]
    units: list[list[list[np.ndarray]]] = field(default_factory=list)
    selections: list[int] = field(default_factory=list)
    inspected: Arrays = field(default_factory=dict)


@dataclass
class Tally:
    passed: int = 0
    failed: int = 0
    not_run: dict[str, str] = field(default_factory=dict)

    def check(self, case: str, name: str, problem: str) -> None:
        """An empty problem is a pass."""
        if problem:
            self.failed += 1
            print(f"FAIL {case} {name}: {problem}", flush=True)
        else:
            self.passed += 1


# ---- inputs ----

def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    return json.dumps(value)


def plan_text(name: str, options: dict[str, Any] | None) -> str:
    """The plan's text form: preset{options}; options that are null are left out."""
    given = ", ".join(f"{k} = {toml_value(v)}" for k, v in (options or {}).items() if v is not None)
    if name in CUSTOM:
        return "{" + ", ".join(filter(None, [CUSTOM[name], given])) + "}"
    return name if not given else f"{name}{{{given}}}"


def shape_of(arrays: Arrays) -> tuple[int, int, int]:
    """T, N0, Hq"""
    steps, prompt = len(arrays["entropy"]), len(arrays["surprisal"])
    return steps, prompt, arrays["queries_bf16"].shape[2]


# ---- driving the daemon ----

def register(session: kvstrata.Session, arrays: Arrays, digest: str) -> kvstrata.Model:
    layers, _, kv_heads, dim = arrays["keys_bf16"].shape
    return session.register_model(name="golden", digest=digest, layers=layers,
                                  query_heads=shape_of(arrays)[2], kv_heads=kv_heads, head_dim=dim,
                                  page_tokens=PAGE_TOKENS)


def prefill(session: kvstrata.Session, sequence: kvstrata.Sequence, arrays: Arrays) -> None:
    """Appends the prompt and attends its last `tail` queries, as an engine does."""
    keys, values, queries = arrays["keys_bf16"], arrays["values_bf16"], arrays["queries_bf16"]
    steps, prompt, _ = shape_of(arrays)
    tail = len(queries) - steps
    for first, end in ((0, prompt - tail), (prompt - tail, prompt)):
        with session.step([(sequence, range(first, end))]) as step:
            for layer in range(len(keys)):
                step.append(layer, keys[layer, first:end], values[layer, first:end])
                if first:
                    step.attend(layer, queries[:tail, layer])
    sequence.report(0, surprisal=arrays["surprisal"], boundary=arrays["boundary"][:prompt])
    sequence.prefill_done()


def decode(session: kvstrata.Session, sequence: kvstrata.Sequence, arrays: Arrays,
           inspect: tuple[str, ...]) -> Outcome:
    keys, values, queries = arrays["keys_bf16"], arrays["values_bf16"], arrays["queries_bf16"]
    steps, prompt, heads = shape_of(arrays)
    outcome = Outcome(np.empty((steps, len(keys), heads, keys.shape[3]), np.float32))
    for t in range(steps):
        at = prompt + t
        sequence.settle()
        if "selections" in inspect:
            outcome.selections.append(int(sequence.inspect("selections").reshape(-1)[0]))
        tokens, units = [], []
        with session.step([(sequence, [at])]) as step:
            for layer in range(len(keys)):
                row = slice(at, at + 1)
                step.append(layer, keys[layer, row], values[layer, row])
                step.attend(layer, queries[None, len(queries) - steps + t, layer],
                            out=outcome.out[t, layer][None])
                tokens.append(step.selected_tokens())
                units.append(step.selected_units())
        outcome.tokens.append(tokens)
        outcome.units.append(units)
        sequence.report(at, entropy=arrays["entropy"][t:t + 1], boundary=arrays["boundary"][at:at + 1])
    sequence.settle()
    outcome.inspected = {name: sequence.inspect(name) for name in inspect if name != "selections"}
    return outcome


# ---- comparing ----

def rows_of(arrays: Arrays, name: str) -> list[np.ndarray]:
    flat, offsets = arrays[name], arrays[f"{name}_offsets"]
    return [flat[a:b] for a, b in zip(offsets[:-1], offsets[1:])]


def walk(arrays: Arrays, plan: str) -> Iterator[tuple[int, int, int, int]]:
    """(step, layer, group, groups) of every expected row, in their order; chess has one row a step.

    A decision to attend everything has one row for all heads, another one row a KV head.
    """
    steps, prompt, _ = shape_of(arrays)
    layers, _, kv_heads, _ = arrays["keys_bf16"].shape
    one_list = plan in ("full", "window", "chess", "tokenselect")
    expected = [] if one_list else rows_of(arrays, f"{plan}.tokens")
    row = 0
    for t in range(steps):
        for layer in range(1 if plan == "chess" else layers):
            groups = 1 if one_list or len(expected[row]) == prompt + t + 1 else kv_heads
            for group in range(groups):
                yield t, layer, group, groups
            row += groups


def answered(lists: list[np.ndarray], group: int, groups: int) -> np.ndarray:
    return lists[group * len(lists) // groups]


def compare_rows(arrays: Arrays, plan: str, outcome: Outcome, what: str) -> tuple[str, np.ndarray]:
    """The problem, if any, and [T, L, Hq]: whether what a head attends agrees."""
    steps, _, heads = shape_of(arrays)
    layers = len(arrays["keys_bf16"])
    agrees = np.ones((steps, layers, heads), bool)
    if f"{plan}.{what}" not in arrays:
        return "", agrees
    expected, stable = rows_of(arrays, f"{plan}.{what}"), arrays[f"{plan}.stable"]
    mine = outcome.tokens if what == "tokens" else outcome.units
    problems = []
    rows = list(walk(arrays, plan))
    if len(rows) != len(expected):
        return f"{len(rows)} rows, {len(expected)} expected", agrees
    for row, (t, layer, group, groups) in enumerate(rows):
        for at in range(layers) if plan == "chess" else (layer,):
            got = answered(mine[t][at], group, groups)
            if np.array_equal(got, expected[row]):
                continue
            width = heads // groups
            agrees[t, at, group * width:(group + 1) * width] = False
            if stable[row]:
                problems.append(f"step {t} layer {at} group {group}: {len(got)} instead of "
                                f"{len(expected[row])}, differing {np.setxor1d(got, expected[row])[:8]}")
    return (f"{len(problems)} rows; {problems[0]}" if problems else ""), agrees


def compare_out(arrays: Arrays, plan: str, outcome: Outcome, agrees: np.ndarray, limit: float) -> str:
    expected = arrays[f"{plan}.out"].astype(np.float64)
    if expected.shape != outcome.out.shape:
        return f"shape {outcome.out.shape}, expected {expected.shape}"
    norms = np.maximum(np.linalg.norm(expected, axis=-1), 1e-30)
    error = np.linalg.norm(outcome.out - expected, axis=-1) / norms
    if not agrees.any():
        return "no row's choice agrees: nothing to compare"
    worst = np.where(agrees, np.where(np.isnan(error), np.inf, error), 0)
    if worst.max() > limit:
        where = tuple(int(i) for i in np.unravel_index(worst.argmax(), worst.shape))
        return f"relative error {worst.max():.3g} > {limit:g} at (step, layer, head) {where}"
    return ""


def compare_scores(got: np.ndarray, expected: np.ndarray) -> str:
    if got.shape != expected.shape:
        return f"shape {got.shape}, expected {expected.shape}"
    error = np.abs(got.astype(np.float64) - expected).max(initial=0)
    limit = SCORE_TOLERANCE * np.abs(expected).max(initial=0)
    return "" if error <= limit else f"error {error:.3g} > {limit:.3g}"


def compare_exact(got: np.ndarray, expected: np.ndarray) -> str:
    if got.shape != expected.shape:
        return f"shape {got.shape}, expected {expected.shape}"
    wrong = int((got != expected).sum())
    return "" if not wrong else f"{wrong} of {expected.size} differ"


def check_plan(case: str, arrays: Arrays, plan: str, outcome: Outcome, limit: float, tally: Tally) -> None:
    agrees = np.ones(outcome.out.shape[:3], bool)
    for what in ("tokens", "units"):
        if f"{plan}.{what}" in arrays:
            problem, same = compare_rows(arrays, plan, outcome, what)
            tally.check(case, f"{plan}.{what}", problem)
            agrees &= same
    tally.check(case, f"{plan}.out", compare_out(arrays, plan, outcome, agrees, limit))
    if plan != "chess":
        return
    tally.check(case, "chess.selections",
                compare_exact(np.array(outcome.selections, np.int32), arrays["chess.selections"]))
    for name, got in outcome.inspected.items():
        compare = compare_exact if name == "page_vectors_bf16" else compare_scores
        tally.check(case, f"chess.{name}", compare(got, arrays[f"chess.{name}"]))


INSPECT = {"chess": ("selections", "page_vectors_bf16", "grid_scores", "chunk_scores", "page_scores")}


def run_plan(session: kvstrata.Session, model: kvstrata.Model, case: str, arrays: Arrays, plan: str,
             limit: float, tally: Tally) -> None:
    options = json.loads(bytes(arrays["params"]))["plans"].get(plan)
    if plan == "full":
        options = None
    try:
        sequence = session.open(model, plan_text(plan, options))
    except kvstrata.Unimplemented as error:
        tally.not_run[plan] = error.message
        return
    with sequence:
        prefill(session, sequence, arrays)
        outcome = decode(session, sequence, arrays, INSPECT.get(plan, ()))
    check_plan(case, arrays, plan, outcome, limit, tally)


def run_case(session: kvstrata.Session, path: pathlib.Path, plans: list[str], limit: float,
             tally: Tally) -> None:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    model = register(session, arrays, f"golden:{path.name}")
    for plan in plans:
        if f"{plan}.out" not in arrays:
            continue
        try:
            run_plan(session, model, path.stem, arrays, plan, limit, tally)
        except kvstrata.KvstrataError as error:
            tally.check(path.stem, plan, f"the daemon answered {error}")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs test vectors through a running kvstratad.")
    parser.add_argument("folder", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--backend", choices=("ref", "simd", "cuda"), default="simd")
    parser.add_argument("--plan", nargs="+", action="extend", choices=PLANS, metavar="NAME",
                        help="only these: " + ", ".join(PLANS))
    parser.add_argument("--road", choices=("linked", "remote"), default="linked")
    parser.add_argument("--socket", help="of a running daemon; without it one is started")
    options = parser.parse_args(arguments)
    if not sorted(options.folder.glob("*.npz")):
        parser.error(f"{options.folder} holds no .npz")
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    tally = Tally()
    with contextlib.ExitStack() as stack:
        socket = options.socket or stack.enter_context(Daemon()).socket
        session = stack.enter_context(kvstrata.attach(socket, road=options.road, backend=options.backend,
                                                      client_name="golden_runner", timeout_ms=30000))
        for path in sorted(options.folder.glob("*.npz")):
            run_case(session, path, options.plan or list(PLANS), OUT_TOLERANCE[options.backend], tally)
    for plan, why in tally.not_run.items():
        print(f"NOT RUN: plan {plan} is not implemented by this daemon: {why}")
    missing = [plan for plan in options.plan or () if plan in tally.not_run]
    if not tally.passed + tally.failed or missing:
        print(f"nothing to show for {', '.join(missing) or 'this folder'}")
    print(f"{tally.passed} passed, {tally.failed} failed")
    return 1 if tally.failed or missing or not tally.passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
