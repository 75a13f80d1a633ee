#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Property test: random small cases, answered by the reference (tests/reference) and by a running kvstratad.

Usage: property_runner.py [--cases N] [--seed S] [--seconds T] [--backend ref|simd] [--plan NAME ...]

A case is a random shape with random options of every plan; it goes through golden_runner's comparison, so
selections must be equal where they are stable and outputs within its tolerances. The seed is printed;
--seed S --cases 1 repeats one case.

Some cases are decided by rounding where rows are stored in another form: MosaicKV's axes are eigenvectors and its
choices go by sizes, SeKV cuts singular values and stores bf16. A failed check of those two is judged by the
reference itself: if its own answer, with rounding of fp32 size added to its covariances and matrices, fails the
same check against its answer without, the case says nothing about us. It is printed as ILL-CONDITIONED and counts
as not run.

Stops after T seconds if that comes first, and says how many cases that
were. Last line: `N passed, N failed`. Exit codes: 0 all passed, 1 a check failed or nothing ran.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import secrets
import sys
import time
from collections.abc import Iterator

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import golden_runner  # noqa: E402
import kvstrata  # noqa: E402
from reference import golden, mosaickv, sekv  # noqa: E402

TRIALS, NOISE = 64, 2.0**-23
ROWS = ("tokens", "units")  # that may differ where a choice is not stable
CHOICES = ("tokens", "units", "segments", "strategies", "packed_rows")  # exact, but where a size decides


def pick(rng: np.random.Generator, *choices):
    return choices[int(rng.integers(len(choices)))]


def random_case(seed: int) -> dict:
    """Arguments of synth.sample and of the plans; small, so that a run has hundreds of them."""
    rng = np.random.default_rng(seed)
    tail = pick(rng, 16, 24)
    prompt = int(rng.integers(tail + 40, 200))
    shape = {"seed": seed, "layers": pick(rng, 1, 2), "prompt": prompt, "steps": pick(rng, 2, 3, 20),
             "kv_heads": pick(rng, 1, 2), "group": pick(rng, 1, 2, 3), "dim": 64, "tail": tail}
    segment = pick(rng, 48, 96, 64)
    plans = {
        "window": {"n_sink": int(rng.integers(0, 9)), "n_recent": int(rng.integers(1, 80))},
        "quest": {"page": pick(rng, 4, 8, 16), "budget": int(rng.integers(16, 100))},
        "chess": {"page": pick(rng, 4, 8), "pages_per_chunk": pick(rng, 2, 3), "chunks_per_grid": pick(rng, 2, 3),
                  "window": pick(rng, 1, 3), "sinks": pick(rng, 0, 1),
                  "rho": [round(float(rng.uniform(0.2, 1)), 3) for _ in range(3)]},
        "chess_lists": {"page": pick(rng, 4, 8), "pages_per_chunk": pick(rng, 2, 3), "chunks_per_grid": pick(rng, 2, 3),
                        "window": pick(rng, 1, 3), "sinks": pick(rng, 0, 1), "lists": pick(rng, "layer", "head"),
                        "anchor": pick(rng, "keys", "query"), "trigger": pick(rng, "always", "every"), "every": pick(rng, 1, 2),
                        "rho": [round(float(rng.uniform(0.2, 1)), 3) for _ in range(3)]},
        "tokenselect": {"k": int(rng.integers(8, 60)), "n_init": int(rng.integers(0, 16)),
                        "n_local": int(rng.integers(1, 32)), "theta": pick(rng, 0.5, 0.9, 1.0),
                        "append_departed": bool(rng.integers(2)), "max_pool": pick(rng, 1, 4, 5)},
        "sentencekv": {"tau": int(rng.integers(16, 64)), "r": pick(rng, 1, 1.5, 2), "n_obs": pick(rng, 8, 16),
                       "start": int(rng.integers(0, 9)), "recent": int(rng.integers(1, 16)),
                       "pool": pick(rng, 1, 7), "keep_rest": bool(rng.integers(2)),
                       "per_query_head": bool(rng.integers(2)), "max_length": pick(rng, 12, 40)},
        "sekv": {"alpha": pick(rng, 1.0, 1.5, 2.0), "l_min": pick(rng, 2, 4), "r_max": pick(rng, 4, 8),
                 "local": pick(rng, 8, 32), "untrained": bool(rng.integers(2))},
        "mosaickv": {"share": round(float(rng.uniform(0.1, 0.6)), 3), "segment": segment,
                     "max_channel_loss": pick(rng, 0.2, 0.35), "close_loss": pick(rng, 2.0, 6.0)},
        "rawblocks": {"block": pick(rng, 4, 8, 16), "share": round(float(rng.uniform(0.1, 0.6)), 3),
                      "n_recent": int(rng.integers(1, 40))},
        "bits": {"bits": pick(rng, 2, 3, 4), "group": pick(rng, 16, 32, 48), "budget": int(rng.integers(8, 80)),
                 "n_sink": int(rng.integers(0, 40)), "n_recent": int(rng.integers(1, 40))},
        "missed": {"bits": pick(rng, 2, 3, 4), "group": pick(rng, 16, 32, 48), "budget": pick(rng, None, 60),
                   "max_missed": round(float(10 ** rng.uniform(-3, -0.5)), 4), "n_sink": int(rng.integers(0, 40)),
                   "n_recent": int(rng.integers(1, 40))},
    }
    plans["deviation"] = plans["deviation_softmax"] = {**plans["quest"], "n_sink": int(rng.integers(0, 20)),
                                                       "n_recent": int(rng.integers(1, 30))}
    for runs, single in (("runs", "bits"), ("runs_missed", "missed")):
        plans[runs] = {**plans[single], "run": pick(rng, 4, 8, 16)}
    return {**shape, "plans": plans, "only": [*golden.RUNNERS, *golden.RUNNERS_OF_OPTIONS]}


@contextlib.contextmanager
def rounding(rng: np.random.Generator) -> Iterator[None]:
    """The reference with noise: of NOISE times a covariance's largest element, and times each element of what SeKV
    factors."""
    rotation, compress = mosaickv.rotation, sekv.compress

    def noisy_rotation(covariance: np.ndarray) -> np.ndarray:
        noise = rng.normal(size=covariance.shape) * NOISE * np.abs(covariance).max()
        return rotation(covariance + (noise + noise.T) / 2)

    def noisy_compress(matrix: np.ndarray, *more: object) -> object:
        return compress(matrix * (1 + rng.normal(size=matrix.shape) * NOISE), *more)

    mosaickv.rotation, sekv.compress = noisy_rotation, noisy_compress
    try:
        yield
    finally:
        mosaickv.rotation, sekv.compress = rotation, compress


def fails(name: str, noisy: np.ndarray, exact: np.ndarray, limit: float) -> bool:
    """Whether an array PLAN.NAME of the noisy reference fails the check that ours failed."""
    plan, _, array = name.partition(".")
    if noisy.shape != exact.shape or array in CHOICES:
        return not np.array_equal(noisy, exact)
    if array == "out":
        error = np.linalg.norm(noisy.astype(np.float64) - exact, axis=-1)
        limit = max(limit, golden_runner.OUT_TOLERANCE_OF[plan])
        return bool((error > limit * np.maximum(np.linalg.norm(exact, axis=-1), 1e-30)).any())
    return bool(golden_runner.compare_of(array)(noisy, exact))


def ill_conditioned(names: set[str], case: dict, arrays: golden_runner.Arrays, limit: float) -> set[str]:
    """Those of the checks `names` that rounding alone can fail."""
    found: set[str] = set()
    case = case | {"only": sorted({name.partition(".")[0] for name in names})}
    for trial in range(TRIALS):
        if names == found:
            break
        with rounding(np.random.default_rng(case["seed"] * TRIALS + trial)):
            noisy = golden.vectors(case)
        found |= {name for name in names - found if fails(name, noisy[name], arrays[name], limit)}
    return found


@contextlib.contextmanager
def all_stable() -> Iterator[None]:
    """The reference without what takes a third of its time: whether a choice is stable, which is asked of rows that
    differ alone."""
    stable = golden.stable
    golden.stable = lambda *_, **__: True
    try:
        yield
    finally:
        golden.stable = stable


def check_of(failure: str) -> str:
    return failure.split(": ")[0].split()[-1]


def run_case(session: kvstrata.Session, seed: int, plans: list[str], backend: str, folder: pathlib.Path,
             tally: golden_runner.Tally) -> None:
    case, limit, first = random_case(seed), golden_runner.OUT_TOLERANCE[backend], golden_runner.Tally()
    with all_stable():
        arrays = golden.vectors(case)
    for plan in plans:
        of_plan = golden_runner.Tally()
        golden_runner.run_arrays(session, f"seed {seed}", arrays, [plan], backend, folder, of_plan)
        if any(check_of(f).endswith(ROWS) for f in of_plan.failures):
            of_plan = golden_runner.Tally()
            exact = golden.vectors(case | {"only": [plan]})
            golden_runner.run_arrays(session, f"seed {seed}", exact, [plan], backend, folder, of_plan)
        first.take(of_plan)
    stored = {check_of(f) for f in first.failures} & {n for n in arrays if n.startswith(("mosaickv.", "sekv."))}
    excused = ill_conditioned(stored, case, arrays, limit)
    for failure in first.failures:
        if check_of(failure) in excused:
            print(f"ILL-CONDITIONED {failure.removeprefix('FAIL ')}", flush=True)
    first.failures = [f for f in first.failures if check_of(f) not in excused]
    tally.add(first)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Random cases: the reference against a running kvstratad.")
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=None, help="of the first case; default: random")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--backend", choices=("ref", "simd"), default="simd")
    parser.add_argument("--plan", nargs="+", choices=golden_runner.PLANS, metavar="NAME")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    tally, ran, end = golden_runner.Tally(), 0, time.monotonic() + options.seconds
    plans = options.plan or list(golden_runner.PLANS)
    with contextlib.ExitStack() as stack:
        socket, folder = stack.enter_context(golden_runner.daemon_with_parameters(options.backend))
        session = stack.enter_context(kvstrata.attach(socket, backend=options.backend,
                                                      client_name="property_runner", timeout_ms=30000))
        while ran < options.cases and time.monotonic() < end and tally.failed < 20:
            run_case(session, seed + ran, plans, options.backend, folder, tally)
            ran += 1
    for plan, why in tally.not_run.items():
        print(f"NOT RUN: plan {plan}: {why}")
    print(f"{ran} cases of {len(plans)} plans, seeds {seed} to {seed + ran - 1}")
    print(f"{tally.passed} passed, {tally.failed} failed")
    return 1 if tally.failed or not tally.passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
