# SPDX-License-Identifier: Apache-2.0
"""The Markdown page and the result file of what research kept."""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections.abc import Container
from typing import Any

import figures

HEAD = ["plan", "tokens read", "bytes read", "MB a token", "loss, nats", "KL, nats", "exact", "score of full's"]


def write(lines: list[figures.Line], chosen: dict[str, str], seen: Container[tuple[str, str]] | None,
          args: argparse.Namespace) -> None:
    """lines: of all models and prompts; seen: see figures.rows."""
    rows = [row for row in figures.rows(lines, chosen, seen) if re.fullmatch(args.groups, row["id"].split("/", 2)[2])]
    if args.json_out:
        args.json_out.write_text(json.dumps(result(lines, rows, args), indent=1) + "\n")
    if args.report:
        args.report.write_text(page(lines, rows))


def result(lines: list[figures.Line], rows: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    from kvstrata.machine import device_name
    counts: dict[str, int] = {}
    for line in lines:
        task = f"{line['model']} {line['id'].rsplit('/', 1)[0]}"
        counts[task] = counts.get(task, 0) + 1
    notes = ("rules emulated by research/emulated.py over keys and values in bf16; score: of the likeliest token behind each of "
             "the reference's" if args.emulate else "transformers")
    rows = [row | {"id": row["id"].replace("accuracy", args.suite, 1)} for row in rows]
    return {"suite": args.suite, "device": args.device_name or device_name(), "commit": args.commit, "date": args.date,
            "command": args.command, "ceilings": {},
            "context": {"notes": f"{notes}; every plan decodes behind the same prompt, which was computed under full; "
                                 "intervals are of 95 %, over prompts", "prompts": counts, "as_plain": figures.parted(lines),
                        "hours": round(sum(line["seconds"] for line in lines) / 3600, 2)}, "rows": rows}


def page(lines: list[figures.Line], rows: list[dict[str, Any]]) -> str:
    equal, of, ties = figures.parted(lines)
    parts = ["# What plans cost in answers", "", summary(lines), "",
             f"`full` gives the tokens of plain transformers in {equal} of {of} greedy answers." +
             (f" In the others plain prefers its own token by {', '.join(f'{tie:.2g}' for tie in ties)} logits." if ties else "")]
    groups = list(dict.fromkeys(row["id"].split("/", 2)[2] for row in rows))
    for group in groups:
        of_group = [row for row in rows if row["id"].split("/", 2)[2] == group]
        n = max(row["n"] for row in of_group)
        parts += ["", f"## {group} ({n} prompts)", "", table(of_group)]
    return "\n".join(parts) + "\n"


def brief(lines: list[figures.Line], chosen: dict[str, str]) -> str:
    """A line a plan, over prompts that have it: KL as a mean over each model's prompts, then over models."""
    models = list(dict.fromkeys(line["model"] for line in lines))
    found = [f"{'':24}{'bytes':>7}{'KL':>9}{'worst':>9}{'lost':>10}" + "".join(f"{model[:16]:>18}" for model in models)]
    for name, text in ({figures.FULL: figures.FULL} | chosen).items():
        rows = [figures.row(name, text, model, having)["accuracy"] for model in models
                if (having := [line for line in lines if line["model"] == model and text in line["plans"]])]
        if len(rows) == len(models):
            sums = [sum(row[key] for row in rows) for key in ("exact_lost", "exact_under_full")]
            found.append(f"{name:24}{statistics.fmean(row['of_full_bytes'] for row in rows):7.1%}"
                         f"{statistics.fmean(row['kl'] for row in rows):9.5f}{max(row['kl_worst'] for row in rows):9.4f}"
                         f"{sums[0]:>5}/{sums[1]:<4}" + "".join(f"{row['kl']:11.5f} of{row['prompts']:4}" for row in rows))
    return "\n".join(found)


def summary(lines: list[figures.Line]) -> str:
    models = ", ".join(dict.fromkeys(line["model"] for line in lines))
    solved = figures.solved(lines)
    mean = statistics.fmean(line["plans"][figures.FULL]["score"] for line in solved) if solved else math.nan
    return (f"{len(lines)} prompts, {models}. Loss: nats a token of the reference answer above `full`, ± 95 %. KL: of the "
            "next token's distribution, from `full`'s, a mean over the same tokens. Exact: answers whose every token is the "
            "likeliest, of those under `full`. Score: of the tasks where `full` reaches "
            f"{figures.SOLVED:.0%} ({len(solved)} prompts, on which it has {mean:.0%}), what the plan's own answer has of the "
            "references, over what `full`'s has, with the ends of its 95 % interval. Bytes: keys, values and what is chosen "
            "by, of what `full` reads.")


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(HEAD) + " |", "| " + " | ".join(["---"] * len(HEAD)) + " |"]
    for row in rows:
        a = row["accuracy"]
        score = (f"{a['relative_score']:.3f} ({a['relative_low']:.2f} to {a['relative_high']:.2f})"
                 if "relative_score" in a else "")
        loss = f"{row['value']:+.3f}" + (f" ± {a['interval']:.3f}" if "interval" in a else "")
        kl = f"{a['kl']:.4f} ± {a['kl_interval']:.4f}" if "kl_interval" in a else f"{a['kl']:.4f}" if "kl" in a else ""
        cells = [f"`{row['id'].split('/')[1]}`", f"{a['tokens_a_step'] / a['tokens_of_prompt']:.1%}",
                 f"{a['of_full_bytes']:.1%}", f"{a['MB_a_step']:.1f}", loss, kl,
                 f"{a['exact']} of {a['exact_under_full']}", score]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
