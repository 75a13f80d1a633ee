#!/usr/bin/env python3
"""What plans lose on the answers of a model: nats a token of the reference answer, above plan full.

    bench/answers.py --tasks DIR[:N] ... [--only PREFIX ...] [--plan NAME=TEXT ...] [--keep FILE]
                     [--baseline FILE --must NAME=RATIO ...] [--report] [--json-out FILE] [--commit HASH] [--date DATE]

DIR has one <task>.jsonl.xz or <task>.jsonl a task with RULER's fields: `input` (a chat in Llama-3's template, of
which the model's own is made, with what the assistant's turn begins with) and `outputs` (reference strings). The
first N (3) samples of each task are prompts. The answer is all of `outputs`, with "," between two; of a question
(qa_*), whose outputs are one answer in other words, the first.

SmolLM2-135M-Instruct reads each prompt but its last token once, under full, through the numpy engine and a daemon.
Every plan opens it again (a prefix hit) and decodes the last token and the reference answer, so that each token of
the answer is said by a step that chooses. A plan's figure is the mean over prompts of its -ln p a token minus that
of full; `right` counts prompts whose answer is what greedy decoding says, of those where it is under full. MB_a_step
is what the daemon counted of keys, values and what is chosen by, MB_to_choose the latter.

In a plan's text P% is that share of the prompt's tokens, P%-K the same less K tokens, and budget = @NAME the budget
with which its first step reads as many bytes as that of plan NAME, which comes before it: equal bytes. A plan that
reads more without any budget is not run (where the index fits, equal bytes begin).

--keep: one line a prompt is added there as soon as it is known; what it holds already is not run again. --report runs
nothing: rows are of what --keep holds of each plan. --baseline: such a file of another build; rows then have a ratio,
over the prompts that both hold.
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
from typing import NamedTuple

os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "integrations" / "kvstrata" / "src"), str(ROOT / "integrations" / "kvstrata_numpy" / "src")]

import kvstrata  # noqa: E402
import numpy as np  # noqa: E402
from kvstrata.daemon import Daemon  # noqa: E402
from kvstrata.machine import device_name  # noqa: E402
from kvstrata_numpy.cache import DaemonCache  # noqa: E402
from kvstrata_numpy.download import model_path  # noqa: E402
from kvstrata_numpy.engine import Engine  # noqa: E402
from kvstrata_numpy.llama import log_softmax  # noqa: E402

PLANS = {"quest_10%": "quest{budget = 10%, min_tokens = 0}",
         "strata@quest_10%": "strata{budget = @quest_10%, min_tokens = 0}",
         "quest_5%": "quest{budget = 5%, min_tokens = 0}",
         "strata@quest_5%": "strata{budget = @quest_5%, min_tokens = 0}",
         "strata_5%": "strata{budget = 5%-68, min_tokens = 0}",
         "tokenselect_10%": "tokenselect{k = 10%-192, n_init = 64, n_local = 128, min_tokens = 0}",
         "tokenselect_10%_head": 'tokenselect{k = 10%-192, n_init = 64, n_local = 128, cosine = "head", min_tokens = 0}'}
GROUPS = {"niah": "needles", "qa": "questions"}  # of tasks, by the first word of their names
EQUAL = re.compile(r"@([^\s,}]+)")
SHARE = re.compile(EQUAL.pattern + r"|([\d.]+)%(?:-(\d+))?")  # or a name, which may have a % in it
TURN = re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>(.*?)(?=<\|eot_id\|>|<\|start_header_id\|>|\Z)", re.DOTALL)


class Prompt(NamedTuple):
    """`key`: length/task/number, as the file's path has them."""
    key: str
    sample: dict


def prompts(folders: list[str], only: list[str]) -> list[Prompt]:
    """Folder by folder; every task's first prompt comes before any second one."""
    found = []
    for text in folders:
        name, _, count = text.partition(":")
        folder = pathlib.Path(name)
        paths = {path.name.split(".")[0]: path for path in sorted(folder.glob("*.jsonl*"))}
        chosen = {task: path for task, path in paths.items() if task.startswith(tuple(only))}
        if not chosen:
            raise SystemExit(f"answers: --tasks {name} --only {' '.join(only)}: no such task; there are: "
                             f"{', '.join(paths) or 'none'}")
        ranked = [(i, Prompt(f"{folder.name}/{task}/{i}", sample)) for task, path in chosen.items()
                  for i, sample in enumerate(samples(path, int(count or 3)))]
        found += [prompt for _, prompt in sorted(ranked, key=lambda pair: pair[0])]
    return found


def group_of(key: str) -> str:
    """Of a prompt's key: its length and what kind of task it is."""
    length, task, _ = key.split("/")
    word = task.split("_")[0]
    return f"{length} {GROUPS.get(word, word)}"


def samples(path: pathlib.Path, count: int) -> list[dict]:
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for _, line in zip(range(count), file)]


def tokens_of(engine: Engine, prompt: Prompt) -> tuple[list[int], list[int]]:
    """Ids of the prompt, up to where the answer begins, and of the reference answer."""
    turns = TURN.findall(prompt.sample["input"])
    begun = turns.pop()[1].strip() if turns and turns[-1][0] == "assistant" else ""
    system = [text for role, text in turns if role == "system"]
    asked = [(role, text.strip()) for role, text in turns if role != "system"]
    ids = engine.tokenizer.chat(asked, system[0].strip()) if system else engine.tokenizer.chat(asked)
    outputs = prompt.sample["outputs"][:1 if prompt.key.split("/")[1].startswith("qa_") else None]
    answer = (" " if begun else "") + ", ".join(outputs)
    return ids + engine.tokenizer.encode(begun), engine.tokenizer.encode(answer)


def count_bytes(cache: DaemonCache) -> list[list[int]]:
    """What each later step reads: bytes attended, bytes to choose; all layers."""
    steps: list[list[int]] = []
    attend = cache.attend

    def counted(layer: int, *tensors: np.ndarray) -> np.ndarray:
        out = attend(layer, *tensors)
        cost = cache.step.cost()
        if layer == 0:
            steps.append([0, 0])
        steps[-1][0] += cost.attend_bytes
        steps[-1][1] += cost.select_bytes
        return out

    cache.attend = counted
    return steps


def ask(engine: Engine, plan: str, ids: list[int], answer: list[int], surprisal: np.ndarray | None) -> dict:
    """-ln p of the answer's tokens under the plan, which finds the prompt held, and what its steps read."""
    cache = engine.open(plan, ids[:-1], only_reported=False)
    try:
        engine.prefill(cache, ids[:-1], known=surprisal)
        cache.sequence.settle()
        steps, lost, right = count_bytes(cache), [], True
        for token, following in zip([ids[-1], *answer], answer):
            logits = engine.step(cache, token)
            lost.append(-float(log_softmax(logits[None].astype(np.float64))[0, following]))
            right &= int(logits.argmax()) == following
        read = np.array(steps)
        return {"plan": plan, "nats": statistics.fmean(lost), "right": right, "status": cache.sequence.status,
                "first_step": read[0].tolist(), "attend_bytes": float(read[:, 0].mean()),
                "select_bytes": float(read[:, 1].mean())}
    finally:
        cache.close()


def with_shares(text: str, tokens: int) -> str:
    """The text with numbers for P% and P%-K."""
    return SHARE.sub(lambda m: m[0] if m[1] else str(max(0, round(float(m[2]) / 100 * tokens) - int(m[3] or 0))), text)


def measure(engine: Engine, prompt: Prompt, plans: dict[str, str], known: dict) -> dict:
    """The prompt's line with all plans, of which `known` has some. On a daemon of its own: nothing of the prompt is held."""
    ids, answer = tokens_of(engine, prompt)
    texts = {text: with_shares(text, len(ids)) for text in plans.values()}
    begin = time.perf_counter()
    with Daemon() as daemon, kvstrata.attach(daemon.socket, client_name="answers", timeout_ms=300000) as session:
        engine.attach(session)
        needed = any(kvstrata.Need.SURPRISAL in session.plan_needs(EQUAL.sub("0", plan)).flags for plan in texts.values())
        surprisal = np.zeros(len(ids) - 1, np.float32) if needed else None
        held = engine.open("full", ids[:-1])  # stays open, so that the pages stay
        engine.prefill(held, ids[:-1], surprisal=surprisal)
        full = ask(engine, "full", ids, answer, surprisal)
        found = dict(known["plans"])
        for text, plan in texts.items():
            if text in found:
                continue
            if equal := EQUAL.search(plan):
                bare = ask(engine, EQUAL.sub("0", plan), ids, answer[:1], surprisal)  # to choose, and always on
                left = sum(found[plans[equal[1]]]["first_step"]) - sum(bare["first_step"])
                budget = round(left * len(ids) / full["first_step"][0])
                plan = EQUAL.sub(str(budget), plan) if budget >= 1 else ""
            found[text] = ask(engine, plan, ids, answer, surprisal) if plan else {"plan": ""}
            if plan:
                found[text]["nats"] -= full["nats"]
        held.close()
    return {"id": prompt.key, "prompt": len(ids), "answer": len(answer), "full": full["nats"], "right": full["right"],
            "full_bytes": full["attend_bytes"], "plans": found, "seconds": round(time.perf_counter() - begin, 1)}


def kept(path: pathlib.Path | None) -> dict[str, dict]:
    if path is None or not path.exists():
        return {}
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    return {line["id"]: line for line in lines}


def said(name: str, of_plan: dict) -> str:
    if not of_plan["plan"]:
        return f"{name} cannot read as little"
    status = "" if of_plan["status"] == "ok" else f" [{of_plan['status']}]"
    return f"{name} {of_plan['nats']:+.3f}, {(of_plan['attend_bytes'] + of_plan['select_bytes']) / 1e6:.1f} MB{status}"


def run(engine: Engine, args: argparse.Namespace, plans: dict[str, str]) -> dict[str, dict]:
    """Lines by prompt."""
    known, done, todo = kept(args.keep), {}, prompts(args.tasks, args.only)
    for number, prompt in enumerate(todo, 1):
        where = f"{number}/{len(todo)} {prompt.key}"
        line = known.get(prompt.key, {"plans": {}})
        if any(text not in line["plans"] for text in plans.values()):
            tokens = sum(map(len, tokens_of(engine, prompt)))
            if tokens > engine.llama.config.context:
                print(f"{where}: {tokens} tokens are more than the model's context, left out", flush=True)
                continue
            line = measure(engine, prompt, plans, line)
            if args.keep:
                with args.keep.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        done[prompt.key] = line
        print(f"{where} ({line['prompt']} + {line['answer']} tokens, {line['seconds']} s): full {line['full']:.3f}, "
              f"{line['full_bytes'] / 1e6:.1f} MB; " + "; ".join(said(k, line["plans"][text]) for k, text in plans.items()),
              flush=True)
    return done


def row(name: str, text: str, group: str, lines: dict[str, dict], before: dict[str, dict], must: dict[str, float]) -> dict:
    of_group = {k: line for k, line in lines.items() if line["plans"].get(text, {}).get("plan")
                and group in ("all", group_of(k))}
    found = [line["plans"][text] for line in of_group.values()]
    values = [f["nats"] for f in found]
    error = {"standard_error": statistics.stdev(values) / math.sqrt(len(values))} if len(values) > 1 else {}
    right = [line["plans"][text]["right"] for line in of_group.values() if line["right"]]
    read = {"MB_a_step": statistics.fmean(f["attend_bytes"] + f["select_bytes"] for f in found) / 1e6,
            "MB_to_choose": statistics.fmean(f["select_bytes"] for f in found) / 1e6,
            "MB_of_full": statistics.fmean(line["full_bytes"] for line in of_group.values()) / 1e6}
    out = {"id": f"answers/{name}/{group}", "plan": text, "value": statistics.fmean(values), "unit": "nats a token above full",
           "better": "smaller", "n": len(values),
           "accuracy": {"nats_above_full": statistics.fmean(values), **error, "prompts": len(values), **read,
                        "right": sum(right), "right_under_full": len(right), "most": max(values)}}
    if group != "all":  # too few for a ratio
        return out
    shared = [k for k in of_group if before.get(k, {"plans": {}})["plans"].get(text, {}).get("plan")]
    if not shared:
        return out
    old = statistics.fmean(before[k]["plans"][text]["nats"] for k in shared)
    new = statistics.fmean(of_group[k]["plans"][text]["nats"] for k in shared)
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


def check_order(plans: dict[str, str]) -> None:
    """What @ names must have bytes of its own, before."""
    own: set[str] = set()
    for name, text in plans.items():
        equal = EQUAL.search(text)
        if equal is None:
            own.add(name)
        elif equal[1] not in own:
            raise SystemExit(f"answers: '{text}': no plan '{equal[1]}' with a budget of its own comes before it")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", nargs="+", required=True, metavar="DIR[:N]")
    parser.add_argument("--only", nargs="+", default=["niah_", "qa_"], help="tasks whose names begin so")
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
    check_order(plans)
    must = {name: float(value) for name, value in pairs(args.must, "--must").items()}
    lines = kept(args.keep) if args.report else run(Engine.load(model_path()), args, plans)
    before = kept(args.baseline)
    groups = ["all", *dict.fromkeys(map(group_of, lines))]
    rows = [row(name, text, group, lines, before, must) for name, text in plans.items() for group in groups
            if any(line["plans"].get(text, {}).get("plan") and group in ("all", group_of(key)) for key, line in lines.items())]
    for r in rows:
        a = r["accuracy"]
        print(f"{r['id']:44} {r['value']:+.3f} ± {a.get('standard_error', math.nan):.3f} (n {r['n']}), most {a['most']:+.2f}; "
              f"right {a['right']} of {a['right_under_full']}; {a['MB_a_step']:.1f} of {a['MB_of_full']:.1f} MB, "
              f"{a['MB_to_choose']:.1f} to choose" +
              (f"; baseline {a['nats_before']:+.3f}, {r['ratio']:.1f}x" if "ratio" in r else ""))
    if args.json_out:
        result = {"suite": "answers", "device": device_name(), "commit": args.commit, "date": args.date,
                  "command": "bench/answers.py --tasks " + " ".join("/".join(pathlib.Path(t).parts[-2:]) for t in args.tasks),
                  "ceilings": {}, "rows": rows,
                  "context": {"notes": "SmolLM2-135M-Instruct Q4_1, numpy engine; teacher-forced reference answers. Prompts "
                                       "(length/task/number of its sample): " + ", ".join(sorted(lines))}}
        pathlib.Path(args.json_out).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
