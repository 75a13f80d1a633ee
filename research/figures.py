# SPDX-License-Identifier: Apache-2.0
"""Figures of many prompts: means with 95 % intervals over prompts, and result rows.

A line is what __main__ keeps of a prompt:
    {"id", "model", "prompt", "answer" (tokens), "scored", "seconds", "files" ..., "plans": {text: {...}}}
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Container, Iterable
from typing import Any

import numpy as np

from tasks import group_of

FULL = "full"
# Settings are chosen by these tasks and judged by the others: two groups of rows.
CHOSEN_BY, CHOSEN, JUDGED = ("fwe", "niah_multikey_2", "niah_multivalue", "niah_single_2", "vt"), "chosen half", "judged half"
SOLVED = 0.6      # the share that `full` must reach for a task's score to say something about a plan
RESAMPLED = 2000  # for intervals of ratios
SEED = 20261126

Line = dict[str, Any]


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % interval; nan of one value."""
    if len(values) < 2:
        return statistics.fmean(values), math.nan
    return statistics.fmean(values), 1.96 * statistics.stdev(values) / math.sqrt(len(values))


def relative_score(lines: list[Line], text: str) -> tuple[float, float, float]:
    """The plan's summed scores over those of full, and the ends of its 95 % interval over prompts."""
    pairs = np.array([[line["plans"][text]["score"], line["plans"][FULL]["score"]] for line in lines])
    drawn = np.random.default_rng(SEED).integers(0, len(pairs), (RESAMPLED, len(pairs)))
    sums = pairs[drawn].sum(1)
    low, high = np.percentile(sums[:, 0] / np.maximum(sums[:, 1], 1e-9), [2.5, 97.5])
    plan, full = pairs.sum(0)
    return float(plan / full), float(low), float(high)


def solved(lines: Iterable[Line]) -> list[Line]:
    """Prompts of the tasks, each of one model and length, where full reaches SOLVED."""
    tasks: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        if line["scored"]:
            tasks.setdefault((line["model"], line["id"].rsplit("/", 1)[0]), []).append(line)
    reached = lambda task: statistics.fmean(line["plans"][FULL]["score"] for line in task)
    return [line for task in tasks.values() if reached(task) >= SOLVED for line in task]


def parted(lines: Iterable[Line]) -> tuple[int, int, list[float]]:
    """Greedy answers of full that are those of plain transformers, of how many, and how many logits the others hang on."""
    found = [line["plans"][FULL]["parted_from_plain"] for line in lines if "parted_from_plain" in line["plans"][FULL]]
    return found.count(None), len(found), sorted(where[1] for where in found if where)


def row(name: str, text: str, group: str, lines: list[Line]) -> dict[str, Any]:
    """A result row (docs/results.md): its value is the loss against full; the rest is in `accuracy`."""
    of_plan = [line["plans"][text] for line in lines]
    loss, error = mean_and_error([plan["nats"] - line["plans"][FULL]["nats"] for plan, line in zip(of_plan, lines)])
    mean: Callable[[str], float] = lambda key: statistics.fmean(plan[key] for plan in of_plan)
    full_bytes = statistics.fmean(line["plans"][FULL]["attend_bytes"] for line in lines)
    read = mean("attend_bytes") + mean("select_bytes")
    accuracy = {"nats_above_full": loss, "interval": error, "prompts": len(lines), "tokens_a_step": mean("rows"),
                "tokens_of_prompt": statistics.fmean(line["prompt"] for line in lines), "MB_a_step": read / 1e6,
                "MB_to_choose": mean("select_bytes") / 1e6, "of_full_bytes": read / full_bytes,
                "exact": sum(plan["right"] for plan in of_plan),
                "exact_under_full": sum(line["plans"][FULL]["right"] for line in lines),
                "exact_lost": sum(line["plans"][FULL]["right"] and not plan["right"] for plan, line in zip(of_plan, lines))}
    if all("kl" in plan for plan in of_plan):
        accuracy["kl"], accuracy["kl_interval"] = mean_and_error([plan["kl"] for plan in of_plan])
        accuracy["kl_worst"] = max(plan["kl"] for plan in of_plan)
    scored = solved(lines)
    if scored:
        value, low, high = relative_score(scored, text)
        accuracy |= {"relative_score": value, "relative_low": low, "relative_high": high, "scored_prompts": len(scored)}
    if any(line["scored"] for line in lines):
        accuracy["score"] = statistics.fmean(line["plans"][text]["score"] for line in lines if line["scored"])
    digits = lambda key: 5 if key.startswith("kl") else 4
    short = {key: round(value, digits(key)) for key, value in accuracy.items() if not math.isnan(value)}
    return {"id": f"accuracy/{name}/{group}", "plan": text, "value": round(loss, 4), "unit": "nats a token above full",
            "better": "smaller", "n": len(lines), "accuracy": short}


def half_of(key: str) -> str:
    """The half that a prompt's key belongs to."""
    return CHOSEN if key.split("/")[-2] in CHOSEN_BY else JUDGED


def rows(lines: list[Line], plans: dict[str, str], seen: Container[tuple[str, str]] | None = None) -> list[dict[str, Any]]:
    """A row a plan over each model's prompts, over each length and each group of tasks, and over both halves of its scored ones.
    seen: models and ids of prompts that settings may have been chosen by: rows over these, and over the others."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(line["model"], []).append(line)
        groups.setdefault(f"{line['model']} {group_of(line['id'])}", []).append(line)
        if (length := line["id"].split("/")[-3]).isdecimal():
            groups.setdefault(f"{line['model']} {length}", []).append(line)
        if line["scored"]:
            groups.setdefault(f"{line['model']} {half_of(line['id'])}", []).append(line)
        if seen is not None:
            groups.setdefault(f"{line['model']} {'seen' if (line['model'], line['id']) in seen else 'new'}", []).append(line)
    found = []
    for name, text in ({FULL: FULL} | plans).items():
        for group, members in groups.items():
            if having := [line for line in members if text in line["plans"]]:
                found.append(row(name, text, group, having))
    return found
