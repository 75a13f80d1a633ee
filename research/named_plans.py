#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/plans.toml: named plans for the models that were measured, which an operator gives to the daemon.

    research/named_plans.py [--calibrated MODEL=FILE.toml ...] [--out docs/plans.toml]

Three kinds, for each model. MODEL-PLAN-0_01nats: what reads the fewest bytes of all settings of that plan whose mean loss
was at most 0.01 nats a token, from bench/results/accuracy-*.json; of settings by a share of the prompt alone, so that a
length can be put in. MODEL-PLAN: what `kvstrata calibrate --out FILE.toml`
found; without --calibrated, what the file has already. Those of CHOSEN: settings that were chosen by answers. Options that say something about a machine alone (min_tokens) are
left out.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from plans import for_prompt  # noqa: E402

FILE = ROOT / "docs" / "plans.toml"
LOSSES = (0.01, 0.02, 0.05)  # nats a token
MEASURED_ON = 0.75  # part of a model's prompts: what was measured on easier ones alone has another mean
FAMILIES = ("bits", "tokenselect", "quest", "chess", "sentencekv", "sekv", "mosaickv")
CALIBRATED = ("chess", "tokenselect", "mosaickv")
LICENCE = "SPDX-License-Identifier: Apache-2.0"
HEAD = """\
Named plans for models that were measured. Made by research/named_plans.py; docs/plans.md says how.
Give this file to kvstratad --config, or copy [plans] into its own.
"""


class Model(NamedTuple):
    """name: of its plans. measured: in result rows. longest: tokens of its longest prompts there, of which a budget is
    a share; a shorter prompt reads a larger share of it."""
    name: str
    measured: str
    longest: int


MODELS = (Model("smollm2-135m", "smollm2", 8192), Model("smollm2-135m-retrieval", "smollm2-retrieval", 16384))


class Named(NamedTuple):
    name: str
    text: str
    why: list[str]


# Names of plans, and the rows of their settings, each for the model that was measured. Rows of suite `judged`, of prompts
# that the settings were not chosen by, before those of `accuracy`.
CHOSEN = {"smollm2-135m-retrieval-sekv": "sekv_pairs_25%/smollm2-retrieval",
          "smollm2-135m-retrieval-chess-layer": "chess_layer_25%/smollm2-retrieval"}


def result() -> dict[str, Any]:
    path, = (ROOT / "bench" / "results").glob("accuracy-*.json")
    return json.loads(path.read_text())


def _cheapest(rows: Iterable[dict], family: str, loss: float) -> dict | None:
    """The plan's row that reads the fewest bytes, among those that lose at most so much."""
    fitting = [row for row in rows if re.match(rf"{family}\b", row["plan"]) and row["value"] <= loss]
    return min(fitting, key=lambda row: row["accuracy"]["of_full_bytes"], default=None)


def without(text: str, option: str) -> str:
    """The plan's text without an option whose value is a word or a number."""
    text = re.sub(rf"(, )?\b{option} = [^,}}\]]+", "", text)
    return text.replace("{, ", "{").replace("{}", "")


def _why(row: dict, model: Model) -> list[str]:
    a = row["accuracy"]
    lines = [f"{row['value']:+.4f} +- {a['interval']:.4f} nats a token over {row['n']} prompts, with "
             f"{a['tokens_a_step'] / a['tokens_of_prompt']:.1%} of the tokens and {a['of_full_bytes']:.1%} of the bytes"]
    if "%" in row["plan"]:
        lines.append(f"measured as {row['plan']}; here for {model.longest} tokens")
    return lines


def by_loss(measured: dict[str, Any]) -> list[Named]:
    """A named plan for each model, loss and plan that holds it; min_tokens is the plan's own."""
    found = []
    for model in MODELS:
        of_model = [row for row in measured["rows"] if row["id"].endswith(f"/{model.measured}")]
        enough = MEASURED_ON * max((row["n"] for row in of_model), default=0)
        rows = [row for row in of_model if "%" in row["id"] and row["n"] >= enough]
        for family in FAMILIES:
            for loss in LOSSES:
                if row := _cheapest(rows, family, loss):
                    text = without(for_prompt(row["plan"], model.longest), "min_tokens")
                    name = f"{model.name}-{family}-{loss:.2f}nats".replace(".", "_")
                    found.append(Named(name, text, _why(row, model)))
    return found


def judged() -> list[dict]:
    """Rows of all results of that suite."""
    return [row for path in sorted((ROOT / "bench" / "results").glob("judged-*.json")) for row in json.loads(path.read_text())["rows"]]


def by_answers(rows: Iterable[dict]) -> list[Named]:
    """CHOSEN, of those that were measured; of two rows of a setting the later."""
    of_setting = {row["id"].partition("/")[2]: row for row in rows}
    found = []
    for name, setting in CHOSEN.items():
        if row := of_setting.get(setting):
            a, fresh = row["accuracy"], " that it was not chosen by" * row["id"].startswith("judged/")
            why = [f"keeps {a['relative_score']:.3f} ({a['relative_low']:.2f} to {a['relative_high']:.2f}) of the score of "
                   f"{a['scored_prompts']} prompts{fresh}, with {a['tokens_a_step'] / a['tokens_of_prompt']:.1%} of the tokens and "
                   f"{a['of_full_bytes']:.1%} of the bytes"]
            found.append(Named(name, without(row["plan"], "min_tokens"), why))
    return found


def of_calibration(model: str, toml: str) -> list[Named]:
    """Plans of a file that `kvstrata calibrate --out` wrote, under the model's names."""
    found, why = [], []
    for line in toml.partition("\n[plans]\n")[2].splitlines():
        if line.startswith("# "):
            why.append(line[2:])
        elif match := re.fullmatch(r"(\w+)_calibrated = '(.*)'", line):
            text = without(match[2], "min_tokens")
            if match[1] in CALIBRATED and "{" in text:
                found.append(Named(f"{model}-{match[1]}", text, [w for w in why if not w.startswith("min_tokens")]))
            why = []
    return found


def kept(model: str, toml: str) -> list[Named]:
    """The calibrated plans of a model that the file has already."""
    found, why = [], []
    for line in toml.splitlines():
        if line.startswith("# "):
            why.append(line[2:])
        elif match := re.fullmatch(rf"({model}-(?:{'|'.join(CALIBRATED)})) = '(.*)'", line):
            found.append(Named(match[1], match[2], why))
        if not line.startswith("# "):
            why = []
    return found


def toml_of(measured: dict[str, Any], calibrated: Iterable[Named]) -> str:
    head = [*HEAD.splitlines(), f"Losses: {measured['device']}, {measured['date']}, commit {measured['commit']}."]
    parts = ["".join(f"# {line}\n" for line in [LICENCE, *head]), "[plans]\n"]
    for one in (*by_loss(measured), *by_answers([*measured["rows"], *judged()]), *calibrated):
        parts.append("".join(f"# {line}\n" for line in one.why) + f"{one.name} = '{one.text}'\n")
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calibrated", nargs="*", default=[], metavar="MODEL=FILE.toml")
    parser.add_argument("--out", type=pathlib.Path, default=FILE)
    args = parser.parse_args()
    files = dict(pair.split("=", 1) for pair in args.calibrated)
    if unknown := set(files) - {model.name for model in MODELS}:
        raise SystemExit(f"named_plans: --calibrated {', '.join(unknown)}: wanted is one of "
                         f"{', '.join(model.name for model in MODELS)}")
    old = args.out.read_text() if args.out.exists() else ""
    calibrated = [named for model in MODELS for named in (
        of_calibration(model.name, pathlib.Path(files[model.name]).read_text()) if model.name in files
        else kept(model.name, old))]
    args.out.write_text(toml_of(result(), calibrated))
    print(f"{args.out}: {len(calibrated)} plans of calibrations beside those by loss")
    return 0


if __name__ == "__main__":
    sys.exit(main())
