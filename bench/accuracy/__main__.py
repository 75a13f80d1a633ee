"""What plans cost in answers: models x tasks x plans x budgets, through transformers and a daemon.

    build/venv-transformers/bin/python bench/accuracy --tasks DIR --keep FILE          # runs, or goes on
    build/venv-transformers/bin/python bench/accuracy --keep FILE --report OUT.md --json-out OUT.json

DIR: see tasks.py. --prompts ruler/4096/=25 ...: how many of each task, by the beginning of its name. --model: smollm2, or
a folder with a model of transformers. --plan NAME=TEXT: only these plans (plans.py has the grid, and P%). --device cuda:
pages of a GPU, and the model in bf16; else two cores and fp32. --shard I/N: every N-th prompt, for several processes.

A line a prompt is added to FILE as soon as it is known; plans that FILE has already of a prompt are not run again, so a
run that was stopped goes on where it was, and a plan that is added later costs its own time only.

A plan's figures are of two things. *Loss*: -ln p of the reference answer's tokens, each said by a step that chose, less
that of full; it tells plans apart where a small model cannot solve a task. *Score*: the share of the reference strings
that the model's own answer has, over that of full, where full reaches 60 %.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench" / "accuracy"), *(str(ROOT / "integrations" / name / "src") for name in
                                                    ("kvstrata", "kvstrata_numpy", "kvstrata_transformers"))]

import figures  # noqa: E402
import plans as grid  # noqa: E402
import tasks  # noqa: E402

DEFAULT_COUNTS = ["ruler/4096/=25", "ruler/8192/=10", "longbench/=10"]


def folder_of(model: str) -> pathlib.Path:
    from kvstrata_numpy import hugging_face
    return hugging_face.cached() if model == "smollm2" else pathlib.Path(model)


def measure(engine: Any, prompt: tasks.Prompt, ids: list[int], reference: list[int], texts: list[str]) -> dict[str, Any]:
    """By text, of one prompt."""
    new_tokens = max(tasks.NEW_TOKENS, 2 * len(reference)) if prompt.is_scored else 0
    answers = engine.answers(ids, reference, [grid.for_prompt(text, len(ids)) for text in texts], new_tokens)
    decoded = [engine.tokenizer.decode(answer.said) for answer in answers]
    found = {text: {"plan": answer.plan, "nats": answer.loss, "right": answer.right, "status": answer.status,
                    "score": prompt.score(said) if prompt.is_scored else 0.0, "rows": answer.rows,
                    "attend_bytes": answer.attend_bytes, "select_bytes": answer.select_bytes}
             for text, answer, said in zip(texts, answers, decoded)}
    if figures.FULL in found:
        found[figures.FULL]["parted_from_plain"] = engine.parted_from_plain(ids, answers[texts.index(figures.FULL)].said)
    return found


def run(args: argparse.Namespace, texts: list[str]) -> None:
    import decode
    counts = {name: int(count) for name, _, count in (text.partition("=") for text in args.prompts or DEFAULT_COUNTS)}
    part, parts = map(int, args.shard.split("/"))
    todo = tasks.prompts(args.tasks, counts, lambda name: print(f"{name}: not in {args.tasks}, left out", flush=True))
    known = kept(args.keep)
    with decode.engine(folder_of(args.model), args.device) as engine:
        for number, prompt in list(enumerate(todo, 1))[part - 1::parts]:
            begin = time.perf_counter()
            line = known.get((args.model_name, prompt.key), {"plans": {}})
            missing = [text for text in [figures.FULL, *texts] if text not in line["plans"]]
            if not missing:
                continue
            ids, reference = tasks.ids_of(prompt, engine.tokenizer)
            if len(ids) + len(reference) > engine.context:
                print(f"{number}/{len(todo)} {prompt.key}: {len(ids)} tokens exceed the model's context, left out", flush=True)
                continue
            found = measure(engine, prompt, ids, reference, missing)
            line = {"id": prompt.key, "model": args.model_name, "prompt": len(ids), "answer": len(reference),
                    "scored": prompt.is_scored, "seconds": round(time.perf_counter() - begin, 1),
                    "plans": line["plans"] | found}
            with args.keep.open("ab", buffering=0) as file:  # one write, which other shards' lines do not part
                file.write((json.dumps(line) + "\n").encode())
            say(number, len(todo), line)


def say(number: int, of: int, line: figures.Line) -> None:
    """A bar, and how the plans did."""
    full = line["plans"][figures.FULL]
    worst = sorted(line["plans"].items(), key=lambda pair: -pair[1]["nats"])[:2]
    bar = "#" * round(20 * number / of)
    print(f"[{bar:20}] {number}/{of} {line['id']} ({line['prompt']} tokens, {line['seconds']} s): full {full['nats']:.3f}, "
          f"score {full['score']:.2f}; most lost by " +
          ", ".join(f"{text.split('{')[0]} {plan['nats'] - full['nats']:+.2f}" for text, plan in worst), flush=True)


def kept(path: pathlib.Path) -> dict[tuple[str, str], figures.Line]:
    """By model and prompt; of two lines of one prompt the later, which has what the earlier had."""
    if not path.exists():
        return {}
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    return {(line["model"], line["id"]): line for line in lines}


def named(texts: list[str]) -> dict[str, str]:
    split = [text.partition("=") for text in texts]
    for name, equals, text in split:
        if not (name and equals and text):
            raise SystemExit(f"accuracy: --plan '{name}{equals}{text}': wanted NAME=PLAN")
    return {name: text for name, _, text in split}


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/accuracy", description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--prompts", nargs="+", metavar="NAME=N", help=f"default: {' '.join(DEFAULT_COUNTS)}")
    parser.add_argument("--keep", type=pathlib.Path, required=True, metavar="FILE")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--model-name", help="in results; default: the model's, or its folder's name")
    parser.add_argument("--plan", action="append", default=[], metavar="NAME=PLAN")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shard", default="1/1", metavar="I/N")
    parser.add_argument("--report", type=pathlib.Path, metavar="FILE.md")
    parser.add_argument("--json-out", type=pathlib.Path, metavar="FILE.json")
    parser.add_argument("--device-name", default="")
    parser.add_argument("--commit", default="uncommitted")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    args.model_name = args.model_name or pathlib.Path(args.model).name
    chosen = named(args.plan) or grid.grid()
    if args.tasks:
        run(args, list(chosen.values()))
    if args.report or args.json_out:
        import report
        report.write(list(kept(args.keep).values()), chosen, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
