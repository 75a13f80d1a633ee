#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs test vectors through a running kvstratad: every .npz of a folder, by kvs_* calls alone.

Usage: golden_runner.py DIR [--backend ref|simd|cuda] [--plan NAME ...] [--transport linked|remote]
                        [--socket PATH]

The daemon is started by the runner, with a folder for SeKV's trained parameters (a safetensors file a case);
with --socket cases that need one are not run, loudly. Each compared array is one check, at the tolerance of the
folder's README.md; with backend cuda, whose daemon has the GPU's memory as its pool, outputs within 5e-3. Plans
that the daemon does not implement, and arrays that it does not read from a GPU, are listed, not run; asking for
such a plan by --plan is a failure. Last line: `N passed, N failed`.
Exit codes: 0 all passed, 1 a check failed or nothing ran, 2 usage, 77 backend cuda without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "integrations" / "kvstrata" / "src"))

import kvstrata  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402
from kvstrata.daemon import Daemon  # noqa: E402

PLANS = ("full", "window", "quest", "chess", "chess_lists", "tokenselect", "sentencekv", "sekv", "mosaickv", "rawblocks",
         "bits", "missed", "deviation", "deviation_softmax", "runs", "runs_missed", "planes", "planes_above", "planes_runs")
# rawblocks is no preset but the block selector over raw pages; missed is bits with max_missed, runs and runs_missed
# the same with run; chess_lists is chess with lists by layer or KV head; deviation is quest by score = "deviation";
# planes is preset strata with a share, planes_above the same with fine_above, planes_runs with run.
CUSTOM = {"rawblocks": 'segmenter = "page", selector = "block", codec = "raw"'}
PRESETS = {"missed": "bits", "runs": "bits", "runs_missed": "bits", "chess_lists": "chess", "deviation": "quest",
           "deviation_softmax": "quest", "planes": "strata", "planes_above": "strata", "planes_runs": "strata"}
# Plans that attend everything, whose vectors' `tokens` and `units` are what they read finely, and at all.
WHOLE = ("planes", "planes_above", "planes_runs")
MISSED = ("missed", "runs_missed")  # whose lists are as long as max_missed asks
# Options that the vectors spell as the reference's arguments, and what they leave unsaid.
SPELLED = {("rawblocks", "block"): "page", ("sekv", "budget"): "rows"} | {
    (plan, theirs): ours for plan in ("bits", "runs", *MISSED, *WHOLE)
    for theirs, ours in (("group", "unit"), ("n_sink", "sinks"), ("n_recent", "recent"))}
# Raw pages stay, so that "rotated_rows" can be looked at. What a codec loses is what the vectors are of.
IMPLIED = {"mosaickv": {"strategy": "search", "keep_raw": "host", "max_loss": 1}, "sekv": {"max_loss": 1}}
PAGE_TOKENS = 16
OUT_TOLERANCE = {"ref": 1e-5, "simd": 1e-5, "cuda": 5e-3}  # cuda multiplies in bf16
OUT_TOLERANCE_OF = {"sekv": 1e-2, "mosaickv": 1e-2}        # stored bf16 may round the other way
OUT_TOLERANCE_OF_SIMD = dict.fromkeys(WHOLE, 2e-2)          # queries and weights are rounded to 8 bits there
SCORE_TOLERANCE = 1e-4  # relative to the largest
# cuda counts votes by fp16 weights and ranks buckets by bf16 means (docs/cuda.md): where that turns a near-tie, a
# row that fp32 noise would leave alone is another one. One row in so many may be, of a plan over a case.
TURNED = {"cuda": {"tokenselect": 20, "sentencekv": 20, "bits": 20, "missed": 20, "runs": 20, "runs_missed": 20}}

# simd rounds a query to 8 bits where it scores keys in few (docs/spec/bits.md, "Precision"): so many tokens, or runs,
# of a row may be others. On cuda a list as long as max_missed asks ends a little earlier or later.
OTHERS = {"simd": {"bits": 2, "missed": 3, "runs": 1, "runs_missed": 1}, "cuda": {"missed": 2, "runs_missed": 1}}

Arrays = dict[str, np.ndarray]


@dataclass
class Outcome:
    """What a plan answered over a case; rows run over (step, layer, group), last fastest."""

    out: np.ndarray                                   # [T, L, Hq, d]
    tokens: list[list[list[np.ndarray]]] = field(default_factory=list)  # [step][layer][group]
    units: list[list[list[np.ndarray]]] = field(default_factory=list)
    per_step: dict[str, list[np.ndarray]] = field(default_factory=dict)  # inspected after each step
    read: list[int] = field(default_factory=list)  # bytes of (step, layer)
    inspected: Arrays = field(default_factory=dict)


@dataclass
class Tally:
    passed: int = 0
    failures: list[str] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        return len(self.failures)

    def check(self, case: str, name: str, problem: str) -> None:
        """An empty problem is a pass."""
        if problem:
            self.failures.append(f"FAIL {case} {name}: {problem}")
        else:
            self.passed += 1

    def take(self, other: Tally) -> None:
        """Takes over what another one counted."""
        self.passed += other.passed
        self.failures += other.failures
        self.not_run.update(other.not_run)

    def add(self, other: Tally) -> None:
        """Takes it over, and prints its failures."""
        self.take(other)
        for failure in other.failures:
            print(failure, flush=True)


# ---- inputs ----

def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    return json.dumps(value)


def plan_text(name: str, options: dict[str, Any] | None, parameters: str | None = None) -> str:
    """The plan's text form: preset{options}."""
    given = dict(IMPLIED.get(name, {}))
    for key, value in (options or {}).items():
        if (name, key) == ("sekv", "untrained"):
            continue
        if (name, key) == ("sekv", "budget") and value is None:
            value = 0
        if value is not None:
            given[SPELLED.get((name, key), key)] = value
    if "fine_above" in given:
        del given["share"], given["run"]
    if parameters is not None:
        given["parameters"] = parameters
    text = ", ".join(f"{k} = {toml_value(v)}" for k, v in given.items())
    if name in CUSTOM:
        return "{" + ", ".join(filter(None, [CUSTOM[name], text])) + "}"
    preset = PRESETS.get(name, name)
    return preset if not text else f"{preset}{{{text}}}"


def write_parameters(folder: pathlib.Path, case: str, arrays: Arrays) -> str:
    """SeKV's trained parameters of a case as the file that the daemon loads; its name."""
    layers = range(len(arrays["keys_bf16"]))
    tensors = {"W": np.stack([arrays[f"sekv.w_layer{i}"] for i in layers]),
               "tau": np.stack([arrays[f"sekv.tau_layer{i}"] for i in layers])}
    tensors |= {name.removeprefix("sekv."): x for name, x in arrays.items() if name.startswith("sekv.g_phi.")}
    name = f"{case.replace(chr(32), chr(95))}.safetensors"
    save_file({k: np.ascontiguousarray(v, np.float32) for k, v in tensors.items()}, folder / name)
    return name


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


def chunk_of(session: kvstrata.Session, sequence: kvstrata.Sequence, arrays: Arrays) -> Outcome:
    """The last `tail` prompt tokens as one chunk: what it attends before itself, and its output."""
    keys, values, queries = arrays["keys_bf16"], arrays["values_bf16"], arrays["queries_bf16"]
    steps, prompt, heads = shape_of(arrays)
    tail = len(queries) - steps
    outcome = Outcome(np.empty((len(keys), tail, heads, keys.shape[3]), np.float32))
    for first, end in ((0, prompt - tail), (prompt - tail, prompt)):
        with session.step([(sequence, range(first, end))]) as step:
            for layer in range(len(keys)):
                step.append(layer, keys[layer, first:end], values[layer, first:end])
                if first:
                    step.attend(layer, queries[:tail, layer], out=outcome.out[layer])
                    outcome.tokens.append([[t[t < first] for t in step.selected_tokens()]])
    return outcome


def inspected(sequence: kvstrata.Sequence, plan: str, name: str, not_run: dict[str, str]) -> np.ndarray | None:
    """An array that the plan keeps; None, and noted, where the backend keeps it out of reach."""
    try:
        return sequence.inspect(name)
    except kvstrata.Unimplemented as error:
        not_run[f"{plan}.{name}"] = error.message
        return None


def decode(session: kvstrata.Session, sequence: kvstrata.Sequence, arrays: Arrays, plan: str,
           not_run: dict[str, str]) -> Outcome:
    keys, values, queries = arrays["keys_bf16"], arrays["values_bf16"], arrays["queries_bf16"]
    steps, prompt, heads = shape_of(arrays)
    outcome = Outcome(np.empty((steps, len(keys), heads, keys.shape[3]), np.float32))
    there = lambda name: f"{plan}.{name}" in arrays and not np.isnan(np.sum(arrays[f"{plan}.{name}"]))
    look = lambda names: {name: array for name in names if there(name)
                          if (array := inspected(sequence, plan, name, not_run)) is not None}
    sequence.settle()
    outcome.inspected |= look(AFTER_PROMPT.get(plan, ()))
    for t in range(steps):
        at = prompt + t
        sequence.settle()
        tokens, units = [], []
        with session.step([(sequence, [at])]) as step:
            for name, array in look(BEFORE_STEP.get(plan, ())).items():
                outcome.per_step.setdefault(name, []).append(array)
            for layer in range(len(keys)):
                row = slice(at, at + 1)
                step.append(layer, keys[layer, row], values[layer, row])
                step.attend(layer, queries[None, len(queries) - steps + t, layer],
                            out=outcome.out[t, layer][None])
                tokens.append(step.selected_tokens())
                units.append(step.selected_units())
                outcome.read.append(step.cost(0).attend_bytes)
        outcome.tokens.append(tokens)
        outcome.units.append(units)
        for name, array in look(AFTER_STEP.get(plan, ())).items():
            outcome.per_step.setdefault(name, []).append(array)
        if t == 0:
            outcome.inspected |= look([n for n in FIRST_STEP.get(plan, ()) if "*" not in n])
            outcome.inspected |= look([f"votes_layer{i}" for i in range(len(keys))])
        sequence.report(at, entropy=arrays["entropy"][t:t + 1], boundary=arrays["boundary"][at:at + 1])
    sequence.settle()
    step = session.step([(sequence, [prompt + steps])])  # a GPU's last index rows come with a begin
    outcome.inspected |= look(AT_END.get(plan, ()))
    step.abort()
    return outcome


# ---- comparing ----

def rows_of(arrays: Arrays, name: str) -> list[np.ndarray]:
    flat, offsets = arrays[name], arrays[f"{name}_offsets"]
    return [flat[a:b] for a, b in zip(offsets[:-1], offsets[1:])]


def walk(arrays: Arrays, plan: str) -> Iterator[tuple[int, int, int, int]]:
    """(step, layer, group, groups) of every expected row, in their order; chess has one row a step.

    A decision to attend everything has one row for all heads, another one a row for each group of heads.
    """
    steps, prompt, heads = shape_of(arrays)
    layers, _, kv_heads, _ = arrays["keys_bf16"].shape
    options = json.loads(bytes(arrays["params"]))["plans"].get(plan) or {}
    lists = {"full": 1, "window": 1, "chess": 1, "tokenselect": 1, "sekv": heads}.get(plan, kv_heads)
    if options.get("per_query_head"):
        lists = heads
    if options.get("lists") == "layer":
        lists = 1
    tokens = rows_of(arrays, f"{plan}.tokens") if f"{plan}.tokens" in arrays else None
    units = rows_of(arrays, f"{plan}.units")
    row = 0
    for t in range(steps):
        n = prompt + t + 1
        for layer in range(1 if plan == "chess" else layers):
            if plan in MISSED:  # which may also choose every token
                run = options.get("run", 1)
                full = (n - options["n_recent"]) // run <= -(-options["n_sink"] // run)
            elif tokens is not None:
                full = len(tokens[row]) == n and not len(units[row])
            else:
                full = n <= (options.get("budget") or 0)
            groups = 1 if full else lists
            for group in range(groups):
                yield t, layer, group, groups
            row += groups


def answered(lists: list[np.ndarray], group: int, groups: int) -> np.ndarray:
    return lists[group * len(lists) // groups]


def is_near(got: np.ndarray, expected: np.ndarray, others: int, sized: bool) -> bool:
    """Whether at most `others` tokens are others than expected, and where the plan is `sized`, no more or fewer."""
    return (len(got) == len(expected) or not sized) and len(np.setxor1d(got, expected)) <= 2 * others


def compare_rows(arrays: Arrays, plan: str, outcome: Outcome, what: str,
                 backend: str) -> tuple[str, np.ndarray]:
    """The problem, if any, and [T, L, Hq]: whether what a head attends agrees."""
    steps, _, heads = shape_of(arrays)
    layers = len(arrays["keys_bf16"])
    agrees = np.ones((steps, layers, heads), bool)
    if f"{plan}.{what}" not in arrays:
        return "", agrees
    expected, stable = rows_of(arrays, f"{plan}.{what}"), arrays[f"{plan}.stable"]
    mine = outcome.tokens if what == "tokens" else outcome.units
    problems = []
    run = (json.loads(bytes(arrays["params"]))["plans"].get(plan) or {}).get("run", 1)
    others = OTHERS.get(backend, {}).get(plan, 0) * run
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
            if stable[row] and not is_near(got, expected[row], others, plan not in MISSED):
                problems.append(f"step {t} layer {at} group {group}: {len(got)} instead of "
                                f"{len(expected[row])}, differing {np.setxor1d(got, expected[row])[:8]}")
    turned = TURNED.get(backend, {}).get(plan)
    if turned is not None and len(problems) * turned <= len(rows):
        problems = []
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


def compare_within(got: np.ndarray, expected: np.ndarray, limit: np.ndarray | float) -> str:
    if got.shape != expected.shape:
        return f"shape {got.shape}, expected {expected.shape}"
    error = np.abs(got.astype(np.float64) - expected)
    beyond = ~(error <= limit)
    if not beyond.any():
        return ""
    return f"{int(beyond.sum())} of {expected.size} off, the worst by {error.max():.3g}"


def compare_scores(got: np.ndarray, expected: np.ndarray) -> str:
    """Within 1e-4 of the largest."""
    return compare_within(got, expected, SCORE_TOLERANCE * np.abs(expected).max(initial=0))


def compare_relative(got: np.ndarray, expected: np.ndarray) -> str:
    """Within 1e-4 of each; what fp32 may flush to 0 may be 0."""
    return compare_within(got, expected, SCORE_TOLERANCE * np.abs(expected) + 1e-36)


def compare_bf16(got: np.ndarray, expected: np.ndarray) -> str:
    """Within one step of bf16."""
    return compare_within(got, expected, np.abs(expected) * 2.0**-7 + 1e-38)


def compare_packed(got: np.ndarray, expected: np.ndarray, strategy: np.ndarray) -> str:
    """The same elements chosen but for near ties, each within one step of bf16 and 1e-4 of the largest.

    (That equal rows give equal bytes is tests/kernels/ops_rotate_pack_test.cc.)
    """
    keep = int(strategy[0])
    if got.shape != expected.shape:
        return f"shape {got.shape}, expected {expected.shape}"
    head = expected.shape[1] - (-(-2 * keep // 16) * 16)
    chosen = (got[:, :head] == expected[:, :head]).all(axis=1)
    bits = [np.ascontiguousarray(x[:, head:]).view("<u2").astype(np.uint32) << 16 for x in (got, expected)]
    mine, theirs = (x.astype(np.uint32).view(np.float32) for x in bits)
    limit = np.abs(theirs) * 2.0**-7 + SCORE_TOLERANCE * np.abs(theirs).max(initial=0)
    beyond = (np.abs(mine - theirs) > limit) & chosen[:, None]
    # Where two groups are as large as each other within that, either may be kept: the same norms, sorted.
    near, group = ~chosen, int(strategy[1])
    norms = [np.sort(np.abs(x[:, :keep]).reshape(len(x), -1, group).sum(axis=2), axis=1) for x in (mine, theirs)]
    slack = norms[1] * 2.0**-7 + group * SCORE_TOLERANCE * np.abs(theirs).max(initial=0)
    off = (np.abs(norms[0] - norms[1]) > slack) & near[:, None]
    if near.mean() > 0.1:
        return f"{int(near.sum())} of {len(near)} rows choose other elements"
    wrong = int(beyond.sum() + off.sum())
    return f"{wrong} values are off" if wrong else ""


def compare_signless(got: np.ndarray, expected: np.ndarray) -> str:
    """Columns may have the other sign; within 1e-4 of the largest."""
    if got.shape != expected.shape:
        return f"shape {got.shape}, expected {expected.shape}"
    flip = np.where((got.astype(np.float64) * expected).sum(axis=0) < 0, -1.0, 1.0)
    return compare_scores(got * flip, expected)


def compare_exact(got: np.ndarray, expected: np.ndarray) -> str:
    if got.shape != expected.shape:
        return f"shape {got.shape}, expected {expected.shape}"
    wrong = int((got != expected).sum())
    return "" if not wrong else f"{wrong} of {expected.size} differ"


AFTER_PROMPT = {
    "sentencekv": ("importance", "kept", "kept_offsets", "bucket_sizes", "bucket_sizes_offsets",
                   "bucket_means"),
    "sekv": ("anchors", "raw", "spans", "k_mean", "v_mean", "k_rank", "v_rank", "k_longest", "v_longest"),
    "mosaickv": ("eigenvalues", "rotated_rows", "packed_rows"),
}
BEFORE_STEP = {"chess": ("selections",), "mosaickv": ("segments",)}
AFTER_STEP = {"tokenselect": ("hits",)}
FIRST_STEP = {"tokenselect": ("votes_layer*",), "sekv": ("relevance_logits",)}
AT_END = {"chess": ("page_vectors_bf16", "grid_scores", "chunk_scores", "page_scores"),
          "mosaickv": ("strategies",), "planes": ("upper", "lower")}
within = lambda limit: lambda got, expected: compare_within(got, expected, limit)
COMPARE = {
    "page_vectors_bf16": compare_exact, "importance": compare_relative, "kept": compare_exact,
    "kept_offsets": compare_exact, "bucket_sizes": compare_exact, "bucket_sizes_offsets": compare_exact,
    "bucket_means": within(1e-5), "anchors": compare_exact, "raw": compare_exact, "spans": compare_exact,
    "k_mean": compare_bf16, "v_mean": compare_bf16, "k_rank": compare_exact, "v_rank": compare_exact,
    "k_longest": within(1e-2), "v_longest": within(1e-2), "relevance_logits": within(1e-2),
    "eigenvalues": compare_scores, "rotated_rows": compare_signless,
    "strategies": compare_exact, "upper": compare_exact, "lower": compare_exact,
}


def compare_of(name: str) -> Callable[[np.ndarray, np.ndarray], str]:
    return COMPARE.get(name, compare_relative if name.startswith("votes") else compare_scores)


def check_per_step(case: str, arrays: Arrays, plan: str, outcome: Outcome, tally: Tally) -> None:
    steps, _, _ = shape_of(arrays)
    for name, seen in outcome.per_step.items():
        if name == "selections":
            problem = compare_exact(np.array([int(x.reshape(-1)[0]) for x in seen], np.int32),
                                    arrays[f"{plan}.{name}"])
        elif name == "hits":
            # A choice that rounding may turn is not held against us.
            safe = arrays[f"{plan}.stable"].reshape(steps, -1).all(axis=1)
            expected = arrays[f"{plan}.{name}"].reshape(steps, -1)
            problem = compare_exact(np.stack([x.reshape(-1) for x in seen])[safe], expected[safe])
        else:
            rows = rows_of(arrays, f"{plan}.{name}")
            wrong = [t for t in range(steps) if not np.array_equal(seen[t].reshape(-1), rows[t])]
            problem = f"steps {wrong[:5]}: {seen[wrong[0]].reshape(-1)[-9:]} instead of {rows[wrong[0]][-9:]}" \
                if wrong else ""
        tally.check(case, f"{plan}.{name}", problem)


def check_plan(case: str, arrays: Arrays, plan: str, outcome: Outcome, backend: str, tally: Tally) -> None:
    agrees = np.ones(outcome.out.shape[:3], bool)
    for what in ("tokens", "units"):
        if f"{plan}.{what}" in arrays and plan not in WHOLE:
            problem, same = compare_rows(arrays, plan, outcome, what, backend)
            tally.check(case, f"{plan}.{what}", problem)
            agrees &= same
    limit = max(OUT_TOLERANCE[backend], OUT_TOLERANCE_OF.get(plan, 0),
                OUT_TOLERANCE_OF_SIMD.get(plan, 0) if backend == "simd" else 0)
    if plan in WHOLE and backend == "ref":
        read = arrays[f"{plan}.bytes_read"].sum(axis=1)
        tally.check(case, f"{plan}.bytes_read", compare_exact(np.array(outcome.read), read))
    # Where every row may have another token and has, there is no output to compare.
    if agrees.any() or plan not in OTHERS.get(backend, {}):
        tally.check(case, f"{plan}.out", compare_out(arrays, plan, outcome, agrees, limit))
    check_per_step(case, arrays, plan, outcome, tally)
    for name, got in outcome.inspected.items():
        if name == "packed_rows":
            strategy = arrays[f"{plan}.strategies"][0, 0]
            tally.check(case, f"{plan}.{name}", compare_packed(got, arrays[f"{plan}.{name}"], strategy))
            continue
        tally.check(case, f"{plan}.{name}", compare_of(name)(got, arrays[f"{plan}.{name}"]))


def check_chunk(session: kvstrata.Session, model: kvstrata.Model, case: str, arrays: Arrays, backend: str,
                tally: Tally) -> None:
    """TokenSelect's prompt chunk: one selection a layer from the mean query, then causal."""
    options = json.loads(bytes(arrays["params"]))["plans"]["tokenselect"]
    prompt = shape_of(arrays)[1]
    with session.open(model, plan_text("tokenselect", {**options, "chunk": max(prompt, 512)})) as sequence:
        outcome = chunk_of(session, sequence, arrays)
    expected = rows_of(arrays, "tokenselect.chunk_tokens")
    wrong = [layer for layer, rows in enumerate(expected)
             if not np.array_equal(outcome.tokens[layer][0][0], rows)]
    tally.check(case, "tokenselect.chunk_tokens", f"layers {wrong}" if wrong else "")
    truth = arrays["tokenselect.chunk_out"].astype(np.float64)
    error = np.linalg.norm(outcome.out - truth, axis=-1) / np.maximum(np.linalg.norm(truth, axis=-1), 1e-30)
    worst = float(np.where(np.isnan(error), np.inf, error).max())
    tally.check(case, "tokenselect.chunk_out", "" if worst <= OUT_TOLERANCE[backend] else f"relative error {worst:.3g}")


def run_plan(session: kvstrata.Session, model: kvstrata.Model, case: str, arrays: Arrays, plan: str,
             backend: str, folder: pathlib.Path | None, tally: Tally) -> None:
    options = json.loads(bytes(arrays["params"]))["plans"].get(plan)
    if plan == "full":
        options = None
    parameters = None
    if f"{plan}.w_layer0" in arrays:
        if folder is None:
            tally.not_run[plan] = f"{case} needs a parameters folder: run without --socket"
            return
        parameters = write_parameters(folder, case, arrays)
    try:
        sequence = session.open(model, plan_text(plan, options, parameters))
    except kvstrata.Unimplemented as error:
        tally.not_run[plan] = error.message
        return
    with sequence:
        prefill(session, sequence, arrays)
        outcome = decode(session, sequence, arrays, plan, tally.not_run)
    check_plan(case, arrays, plan, outcome, backend, tally)
    if "tokenselect.chunk_out" in arrays and plan == "tokenselect":
        check_chunk(session, model, case, arrays, backend, tally)


def run_arrays(session: kvstrata.Session, case: str, arrays: Arrays, plans: list[str], backend: str,
               folder: pathlib.Path | None, tally: Tally) -> None:
    model = register(session, arrays, f"golden:{case}")
    for plan in plans:
        if f"{plan}.out" not in arrays:
            continue
        try:
            run_plan(session, model, case, arrays, plan, backend, folder, tally)
        except kvstrata.KvstrataError as error:
            tally.check(case, plan, f"the daemon answered {error}")


def run_case(session: kvstrata.Session, path: pathlib.Path, plans: list[str], backend: str,
             folder: pathlib.Path | None, tally: Tally) -> None:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    run_arrays(session, path.stem, arrays, plans, backend, folder, tally)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs test vectors through a running kvstratad.")
    parser.add_argument("folder", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--backend", choices=("ref", "simd", "cuda"), default="simd")
    parser.add_argument("--plan", nargs="+", action="extend", choices=PLANS, metavar="NAME",
                        help="only these: " + ", ".join(PLANS))
    parser.add_argument("--transport", choices=("linked", "remote"), default="linked")
    parser.add_argument("--socket", help="of a running daemon; without it one is started")
    options = parser.parse_args(arguments)
    if not sorted(options.folder.glob("*.npz")):
        parser.error(f"{options.folder} holds no .npz")
    return options


@contextlib.contextmanager
def daemon_with_parameters(backend: str) -> Iterator[tuple[str, pathlib.Path]]:
    """A daemon of our own and the folder that its plans' `parameters` name files of."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-golden-") as name:
        folder = pathlib.Path(name)
        config = folder / "kvstratad.toml"
        config.write_text(f'[parameters]\ndirectory = "{folder}"\n')
        pool = ("--set", "pool.device=cuda", "--set", "pool.device_bytes=1GiB") if backend == "cuda" else ()
        with Daemon("--config", str(config), *pool) as daemon:
            yield daemon.socket, folder


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.backend == "cuda" and not pathlib.Path("/dev/nvidiactl").exists():
        print("SKIPPED: no GPU is visible; no vector was run")
        return 77
    tally = Tally()
    with contextlib.ExitStack() as stack:
        socket, folder = (options.socket, None) if options.socket else \
            stack.enter_context(daemon_with_parameters(options.backend))
        session = stack.enter_context(kvstrata.attach(socket, transport=options.transport, backend=options.backend,
                                                      client_name="golden_runner", timeout_ms=30000))
        for path in sorted(options.folder.glob("*.npz")):
            case = Tally()
            run_case(session, path, options.plan or list(PLANS), options.backend, folder, case)
            tally.add(case)
    for plan, why in tally.not_run.items():
        print(f"NOT RUN: {'array' if '.' in plan else 'plan'} {plan}: {why}")
    missing = [plan for plan in options.plan or () if plan in tally.not_run]
    if not tally.passed + tally.failed or missing:
        print(f"nothing to show for {', '.join(missing) or 'this folder'}")
    print(f"{tally.passed} passed, {tally.failed} failed")
    return 1 if tally.failed or missing or not tally.passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
