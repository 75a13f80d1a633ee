#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What sekv loses of held-out text through a daemon, trained against untrained: nats a token, teacher-forced.

    research/sekv_loss.py --model FOLDER --texts FILE.jsonl.xz --parameters DIRECTORY [--name smollm2-135m.safetensors]
                                [--texts-read 4] [--prompt 4096] [--behind 64] [--share 0.25] [--device cpu]

Each text is one that train_sekv.py held out. The prompt is computed under full attention, then each plan is given the next
tokens one by one. Attention's error is in train_sekv.py's own evaluation: an engine does not see what full attention
would have said of a plan's queries.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "research"), *(str(ROOT / "integrations" / name / "src") for name in
                                                    ("kvstrata", "kvstrata_numpy", "kvstrata_transformers"))]

from kvstrata.daemon import Daemon  # noqa: E402

import decode  # noqa: E402
from train_sekv import texts_of  # noqa: E402


def plans_of(args: argparse.Namespace) -> dict[str, str]:
    options = f"rows_share = {args.share:g}, local = {args.local}, min_tokens = 0"
    return {"full": "full", "untrained": f"sekv{{{options}}}",
            "trained": f'sekv{{{options}, parameters = "{args.name}"}}'}


def measure(args: argparse.Namespace) -> list[dict]:
    """By text and plan: mean nats a token, rows a step, status."""
    texts, plans, found = texts_of(args.texts, args.model), plans_of(args), []
    pool = decode.GPU_POOL if args.device.startswith("cuda") else ()
    with Daemon("--set", f"parameters.directory={args.parameters.resolve()}", *pool) as daemon:
        engine = decode.Engine(args.model, args.device, daemon.socket)
        for i in range(args.texts_read):
            ids = texts.rows("held", f"held/{args.seed}/{i}", 1, args.prompt + args.behind)[0].tolist()
            answers = engine.answers(ids[:args.prompt], ids[args.prompt:], list(plans.values()), 0)
            found.append({name: {"nats": a.loss, "rows": a.rows, "bytes": a.attend_bytes + a.select_bytes, "status": a.status}
                          for name, a in zip(plans, answers)})
            print(i, {name: round(one["nats"], 4) for name, one in found[-1].items()}, found[-1]["trained"]["status"], flush=True)
    return found


def summary(found: list[dict]) -> dict:
    """Nats lost to full, ± half of the 95 % interval over texts, and rows as a share of full's."""
    told = {}
    for name in found[0]:
        lost = [one[name]["nats"] - one["full"]["nats"] for one in found]
        spread = statistics.stdev(lost) if len(lost) > 1 else math.nan
        told[name] = {"nats_lost": round(statistics.fmean(lost), 4), "interval": round(1.96 * spread / math.sqrt(len(lost)), 4),
                      "rows": round(statistics.fmean(one[name]["rows"] / one["full"]["rows"] for one in found), 4),
                      "bytes": round(statistics.fmean(one[name]["bytes"] / one["full"]["bytes"] for one in found), 4)}
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("--model", "--texts", "--parameters"):
        parser.add_argument(name, type=pathlib.Path, required=True)
    parser.add_argument("--name", default="smollm2-135m.safetensors")
    parser.add_argument("--texts-read", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--behind", type=int, default=64)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--local", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json-out", type=pathlib.Path)
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    told = summary(measure(args))
    for name, row in told.items():
        print(f"{name:>10}: {row['nats_lost']:+.4f} ± {row['interval']:.4f} nats, {row['rows']:.1%} of the rows, "
              f"{row['bytes']:.1%} of the bytes")
    if args.json_out:
        args.json_out.write_text(json.dumps({"texts": args.texts_read, "prompt": args.prompt, "share": args.share,
                                             "plans": told}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
