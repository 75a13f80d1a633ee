#!/usr/bin/env python3
"""What plans lose on the answers of a model: nats a token of the reference answer, above plan full.

    bench/answers.py --tasks DIR [--only PREFIX] [--prompts N] [--plan NAME=TEXT ...] [--keep FILE]
                     [--baseline FILE --must NAME=RATIO ...] [--report] [--json-out FILE] [--commit HASH] [--date DATE]

DIR has one <task>.jsonl.xz or <task>.jsonl a task with RULER's fields: `input` (a chat in Llama-3's template, of
which the model's own is made, with what the assistant's turn begins with), `outputs` (reference strings; "," is put
between several). SmolLM2-135M-Instruct reads each prompt once, under full, through the numpy engine and a daemon;
every plan opens it again (a prefix hit) and is fed the reference answer. A plan's figure is the mean over
prompts of its -ln p a token minus that of full.

--keep: one line a prompt is added there as soon as it is known; what it holds already is not run again. --report runs
nothing: rows are of what --keep holds of each plan. --baseline: such a file of another build; rows then have a ratio,
over the prompts that both hold. Without --plan: SeKV with budgets of 25 and 40 % and MosaicKV, fixed and searched.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import os
import pathlib
import re
import statistics
import sys
import time

os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "integrations" / "kvstrata" / "src"), str(ROOT / "integrations" / "kvstrata_numpy" / "src")]

import kvstrata  # noqa: E402
import numpy as np  # noqa: E402
from kvstrata.daemon import Daemon  # noqa: E402
from kvstrata.machine import device_name  # noqa: E402
from kvstrata_numpy.download import model_path  # noqa: E402
from kvstrata_numpy.engine import Engine  # noqa: E402
from kvstrata_numpy.llama import log_softmax  # noqa: E402

PLANS = {"sekv_25%": "sekv{rows_share = 0.25, min_tokens = 0}", "sekv_40%": "sekv{rows_share = 0.4, min_tokens = 0}",
         "mosaickv": "mosaickv{min_tokens = 0}", "mosaickv_search": 'mosaickv{strategy = "search", min_tokens = 0}'}
TURN = re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>(.*?)(?=<\|eot_id\|>|<\|start_header_id\|>|\Z)", re.DOTALL)


def tasks(folder: pathlib.Path, only: str) -> dict[str, pathlib.Path]:
    found = {path.name.split(".")[0]: path for path in sorted(folder.glob("*.jsonl*"))}
    chosen = {name: path for name, path in found.items() if name.startswith(only)}
    if not chosen:
        raise SystemExit(f"answers: --tasks {folder} --only '{only}': no such task; there are: {', '.join(found) or 'none'}")
    return chosen


def samples(path: pathlib.Path, count: int) -> list[dict]:
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for _, line in zip(range(count), file)]


def tokens_of(engine: Engine, sample: dict) -> tuple[list[int], list[int]]:
    """Ids of the prompt, up to where the answer begins, and of the reference answer."""
    turns = TURN.findall(sample["input"])
    begun = turns.pop()[1].strip() if turns and turns[-1][0] == "assistant" else ""
    system = [text for role, text in turns if role == "system"]
    asked = [(role, text.strip()) for role, text in turns if role != "system"]
    ids = engine.tokenizer.chat(asked, system[0].strip()) if system else engine.tokenizer.chat(asked)
    answer = (" " if begun else "") + ", ".join(sample["outputs"])
    return ids + engine.tokenizer.encode(begun), engine.tokenizer.encode(answer)


def nats(engine: Engine, plan: str, ids: list[int], answer: list[int], surprisal: np.ndarray) -> tuple[float, str]:
    """Mean -ln p of the answer's tokens under the plan, which finds the prompt held; and its status."""
    cache = engine.open(plan, ids)
    try:
        logits = engine.prefill(cache, ids, known=surprisal)
        cache.sequence.settle()
        lost = []
        for i, token in enumerate(answer):
            lost.append(-float(log_softmax(logits[None].astype(np.float64))[0, token]))
            if i + 1 < len(answer):
                logits = engine.step(cache, token)
        return statistics.fmean(lost), cache.sequence.status
    finally:
        cache.close()


def measure(engine: Engine, sample: dict, plans: dict[str, str]) -> dict:
    """On a daemon of its own, so that the whole prompt's surprisals are computed: nothing of it is held."""
    ids, answer = tokens_of(engine, sample)
    surprisal = np.zeros(len(ids), np.float32)
    begin = time.perf_counter()
    with Daemon() as daemon, kvstrata.attach(daemon.socket, client_name="answers", timeout_ms=300000) as session:
        engine.attach(session)
        prompt = engine.open("full", ids)  # stays open, so that the pages stay
        engine.prefill(prompt, ids, surprisal=surprisal)
        full, _ = nats(engine, "full", ids, answer, surprisal)
        line = {"prompt": len(ids), "answer": len(answer), "full": full, "plans": {}}
        for text in plans.values():
            value, status = nats(engine, text, ids, answer, surprisal)
            line["plans"][text] = {"nats": value - full, "status": status}
        prompt.close()
    line["seconds"] = round(time.perf_counter() - begin, 1)
    return line


def kept(path: pathlib.Path | None) -> dict[str, dict]:
    if path is None or not path.exists():
        return {}
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    return {line["id"]: line for line in lines}


def run(engine: Engine, args: argparse.Namespace, plans: dict[str, str]) -> dict[str, dict]:
    """Lines by id, task/number; every task's first prompt comes before any second one."""
    known = kept(args.keep)
    done, todo = {}, {name: samples(path, args.prompts) for name, path in tasks(args.tasks, args.only).items()}
    for i in range(args.prompts):
        for name, of_task in todo.items():
            key = f"{name}/{i}"
            if i >= len(of_task):
                continue
            old = known.get(key, {"plans": {}})
            missing = {k: text for k, text in plans.items() if text not in old["plans"]}
            if missing:
                line = {"id": key, **measure(engine, of_task[i], missing)}
                line["plans"] |= old["plans"]
                old = line
                if args.keep:
                    with args.keep.open("a") as file:
                        file.write(json.dumps(line) + "\n")
            done[key] = old
            print(f"{key} ({old['prompt']} + {old['answer']} tokens, {old['seconds']} s): full {old['full']:.3f}; " +
                  ", ".join(f"{k} {old['plans'][text]['nats']:+.3f}" for k, text in plans.items()), flush=True)
    return done


def row(name: str, text: str, task: str, lines: dict[str, dict], before: dict[str, dict], must: dict[str, float]) -> dict:
    of_task = {k: line for k, line in lines.items() if text in line["plans"] and (task == "all" or k.startswith(task + "/"))}
    values = [line["plans"][text]["nats"] for line in of_task.values()]
    error = {"standard_error": statistics.stdev(values) / math.sqrt(len(values))} if len(values) > 1 else {}
    out = {"id": f"answers/{name}/{task}", "plan": text, "value": statistics.fmean(values), "unit": "nats a token above full",
           "better": "smaller", "n": len(values), "accuracy": {"nats_above_full": statistics.fmean(values),
                                                               **error, "prompts": len(values)}}
    if task != "all":  # too few for a ratio
        return out
    shared = [k for k in of_task if text in before.get(k, {"plans": {}})["plans"]]
    if not shared:
        return out
    old = statistics.fmean(before[k]["plans"][text]["nats"] for k in shared)
    new = statistics.fmean(of_task[k]["plans"][text]["nats"] for k in shared)
    out["accuracy"]["nats_before"] = old
    out |= {"baseline": {"name": "the baseline's build", "value": old}, "ratio": old / max(new, 1e-6)}
    del out["better"]  # of the value; what is judged is the ratio
    if name in must:
        out["must"] = must[name]
    return out


def pairs(texts: list[str], what: str) -> dict[str, str]:
    split = [text.partition("=") for text in texts]
    for name, equals, value in split:
        if not (name and equals and value):
            raise SystemExit(f"answers: {what} '{name}{equals}{value}': wanted NAME=VALUE")
    return {name: value for name, _, value in split}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", type=pathlib.Path, required=True, metavar="DIR")
    parser.add_argument("--only", default="niah_", help="tasks whose names begin so")
    parser.add_argument("--prompts", type=int, default=3, help="of each task")
    parser.add_argument("--plan", action="append", default=[])
    parser.add_argument("--keep", type=pathlib.Path)
    parser.add_argument("--baseline", type=pathlib.Path)
    parser.add_argument("--must", action="append", default=[])
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--json-out")
    parser.add_argument("--commit", default="uncommitted")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    plans = pairs(args.plan, "--plan") or PLANS
    must = {name: float(value) for name, value in pairs(args.must, "--must").items()}
    lines = kept(args.keep) if args.report else run(Engine.load(model_path()), args, plans)
    before = kept(args.baseline)
    names = list(dict.fromkeys(key.split("/")[0] for key in lines))
    rows = [row(name, text, task, lines, before, must) for name, text in plans.items() for task in ["all", *names]
            if any(text in line["plans"] and task in ("all", key.split("/")[0]) for key, line in lines.items())]
    for r in rows:
        a = r["accuracy"]
        print(f"{r['id']:44} {r['value']:+.3f} ± {a.get('standard_error', math.nan):.3f} (n {r['n']})" +
              (f"; baseline {a['nats_before']:+.3f}, {r['ratio']:.1f}x" if "ratio" in r else ""))
    if args.json_out:
        result = {"suite": "answers", "device": device_name(), "commit": args.commit, "date": args.date,
                  "command": f"bench/answers.py --tasks {args.tasks.parent.name}/{args.tasks.name} --only {args.only}",
                  "ceilings": {}, "rows": rows,
                  "context": {"notes": "SmolLM2-135M-Instruct Q4_1, numpy engine; teacher-forced reference answers"}}
        pathlib.Path(args.json_out).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
