#!/usr/bin/env python3
"""Property test: random small cases, answered by the reference (tests/reference) and by a running kvstratad.

Usage: property_runner.py [--cases N] [--seed S] [--seconds T] [--backend ref|simd] [--plan NAME ...]

A case is a random shape with random options of every plan; it goes through golden_runner's comparison, so
selections must be equal where they are stable and outputs within its tolerances. The seed is printed;
--seed S --cases 1 repeats one case. MosaicKV's axes are eigenvectors, and which elements are kept goes by
their sizes: where eigenvalues or sizes lie close together, rounding decides. A case that fails there is held to
its tolerances plus three times what the reference itself moves when rounding of fp32 size is added to its
covariances, and the run says which cases those were. What is left of that kind (a block chosen for another, a
span cut at another rank) may fail one check in at most 1 % of the cases of a run, for the plans whose rows are
stored in another form (mosaickv, sekv); all other plans never. Stops after T seconds if that comes first, and says how many cases that
were. Last line: `N passed, N failed`. Exit codes: 0 all passed, 1 a check failed or nothing ran.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import secrets
import sys
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import golden_runner  # noqa: E402
import kvstrata  # noqa: E402
from reference import golden, mosaickv  # noqa: E402

TRIALS, NOISE = 6, 2.0**-23
STORED, SHARE = ("mosaickv.", "sekv."), 0.01


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
    }
    return {**shape, "plans": plans}


def noisy_rotation(rng: np.random.Generator):
    """mosaickv.rotation of covariances with symmetric noise of NOISE times their largest element."""
    exact = mosaickv.rotation

    def rotation(covariance: np.ndarray) -> np.ndarray:
        noise = rng.normal(size=covariance.shape) * NOISE * np.abs(covariance).max()
        return exact(covariance + (noise + noise.T) / 2)
    return rotation


def spreads(case: dict, arrays: golden_runner.Arrays) -> golden_runner.Arrays:
    """How far noise moves the reference's outputs, relatively, and its rotated rows; three times the most."""
    out, rows = (arrays[f"mosaickv.{name}"].astype(np.float64) for name in ("out", "rotated_rows"))
    norms = np.maximum(np.linalg.norm(out, axis=-1), 1e-30)
    moved, turned = np.zeros(out.shape[:-1]), np.zeros(rows.shape)
    exact = mosaickv.rotation
    for trial in range(TRIALS):
        try:
            mosaickv.rotation = noisy_rotation(np.random.default_rng(case["seed"] * TRIALS + trial))
            other = golden.vectors(case)
        finally:
            mosaickv.rotation = exact
        moved = np.maximum(moved, np.linalg.norm(other["mosaickv.out"] - out, axis=-1) / norms)
        turned = np.maximum(turned, np.abs(golden_runner.aligned(other["mosaickv.rotated_rows"], rows) - rows))
    return {"mosaickv.out_spread": 3 * moved, "mosaickv.rotated_rows_spread": 3 * turned}


def run_case(session: kvstrata.Session, seed: int, plans: list[str], backend: str, folder: pathlib.Path,
             tally: golden_runner.Tally) -> None:
    case, limit = random_case(seed), golden_runner.OUT_TOLERANCE[backend]
    arrays, first = golden.vectors(case), golden_runner.Tally()
    golden_runner.run_arrays(session, f"seed {seed}", arrays, plans, limit, folder, first)
    ours = [f for f in first.failures if " mosaickv.out:" in f or " mosaickv.rotated_rows:" in f]
    if ours:
        again = golden_runner.Tally()
        golden_runner.run_arrays(session, f"seed {seed}", {**arrays, **spreads(case, arrays)}, ["mosaickv"], limit,
                                 folder, again)
        still = [f.split(":")[0] for f in again.failures]
        excused = [f for f in ours if f.split(":")[0] not in still]
        for failure in excused:
            print(f"ILL-CONDITIONED {failure.removeprefix('FAIL ')}", flush=True)
        first.failures = [f for f in first.failures if f not in excused]
        first.passed += len(excused)
    tally.add(first)


def inexcusable(failures: list[str], cases: int) -> int:
    """Failures that rounding does not explain; a failure reads `FAIL seed S PLAN.ARRAY: why`."""
    names = [failure.split(": ")[0].split()[-1] for failure in failures]
    allowed = int(cases * SHARE)
    return sum(not name.startswith(STORED) or names.count(name) > allowed for name in names)


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
        socket, folder = stack.enter_context(golden_runner.daemon_with_parameters())
        session = stack.enter_context(kvstrata.attach(socket, backend=options.backend,
                                                      client_name="property_runner", timeout_ms=30000))
        while ran < options.cases and time.monotonic() < end and tally.failed < 20:
            run_case(session, seed + ran, plans, options.backend, folder, tally)
            ran += 1
    for plan, why in tally.not_run.items():
        print(f"NOT RUN: plan {plan}: {why}")
    print(f"{ran} cases of {len(plans)} plans, seeds {seed} to {seed + ran - 1}")
    wrong = inexcusable(tally.failures, ran)
    if tally.failed > wrong:
        print(f"{tally.failed - wrong} failures of stored forms, each check in at most {SHARE:.0%} of {ran} cases: rounding")
    print(f"{tally.passed} passed, {wrong} failed")
    return 1 if wrong or not tally.passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
