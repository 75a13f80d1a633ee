# SPDX-License-Identifier: Apache-2.0
"""What plans cost in answers: models x tasks x plans x budgets, through transformers and a daemon.

    build/venv-transformers/bin/python research --tasks DIR --keep FILE          # runs, or goes on
    build/venv-transformers/bin/python research --keep FILE --report OUT.md --json-out OUT.json

DIR: see tasks.py. --prompts ruler/4096/=25 ...: how many of each task, by the beginning of its name; --first N: from its
N-th sample on, to judge by prompts that no setting was chosen by. --model: smollm2, or a folder with a model of
transformers. --plan NAME=TEXT: only these plans (plans.py has the grid, and P%). --device cuda: pages of a GPU, and the
model in bf16; else two cores and fp32. --shard I/N: every N-th prompt, for several processes. --own FILE=N: prompts of
your own, or the windows of a text. --emulate: rules of emulated.py, without a daemon and in fp32 on either device.

A line a prompt is added to FILE as soon as it is known; plans that FILE has already of a prompt are not run again, so a
run that was stopped goes on where it was, and a plan that is added later costs its own time only.

A plan's figures are of three things. *Loss*: -ln p of the reference answer's tokens, each said by a step that chose,
less that of full; it tells plans apart where a small model cannot solve a task. *KL*: of the next token's distribution,
from full's to the plan's, a mean over the reference's tokens; it has no noise of which token that is. *Score*: the
share of the reference strings that the model's own answer has, over that of full, where full reaches 60 %.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import statistics
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "research"), *(str(ROOT / "integrations" / name / "src") for name in
                                           ("kvstrata", "kvstrata_numpy", "kvstrata_transformers"))]

import figures  # noqa: E402
import plans as grid  # noqa: E402
import tasks  # noqa: E402

DEFAULT_COUNTS = ["ruler/4096/=25", "ruler/8192/=10", "longbench/=10"]


def folder_of(model: str) -> pathlib.Path:
    from kvstrata_numpy import hugging_face
    return hugging_face.cached() if model == "smollm2" else pathlib.Path(model)


def measure(engine: Any, prompt: tasks.Prompt, ids: list[int], reference: list[int], names: dict[str, str], plain: bool
            ) -> dict[str, Any]:
    """By text, of one prompt. names: of the texts. plain: whether full is compared with plain transformers."""
    texts = list(names)
    new_tokens = max(tasks.NEW_TOKENS, 2 * len(reference)) if prompt.is_scored else 0
    answers = engine.answers(ids, reference, [grid.for_prompt(text, len(ids)) for text in texts], new_tokens)
    decoded = [engine.tokenizer.decode(answer.said) for answer in answers]
    found = {text: {"name": names[text], "plan": answer.plan, "status": answer.status,
                    "nats": answer.loss, "kl": statistics.fmean(answer.kl), "right": answer.right,
                    "score": prompt.score(said) if prompt.is_scored else 0.0, "rows": answer.rows,
                    "attend_bytes": answer.attend_bytes, "select_bytes": answer.select_bytes}
             for text, answer, said in zip(texts, answers, decoded)}
    if figures.FULL in found and plain:
        found[figures.FULL]["parted_from_plain"] = engine.parted_from_plain(ids, answers[texts.index(figures.FULL)].said)
    return found


def counts_of(option: str, texts: list[str]) -> dict[str, int]:
    split = [text.rpartition("=") for text in texts]
    if wrong := [f"{name}{equals}{count}" for name, equals, count in split if not (name and count.isdecimal())]:
        raise SystemExit(f"accuracy: {option} {' '.join(wrong)}: wanted NAME=N, as in --prompts ruler/4096/=25")
    return {name: int(count) for name, _, count in split}


def shard_of(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise SystemExit(f"accuracy: --shard {text}: wanted I/N, from 1/N to N/N")
    return int(part), int(parts)


def prompts_of(args: argparse.Namespace) -> list[tasks.Prompt]:
    """Errors: SystemExit, there are none."""
    own = counts_of("--own", args.own)
    found = [prompt for path, count in own.items() for prompt in tasks.own_prompts(pathlib.Path(path), count)]
    if args.tasks:
        counts = counts_of("--prompts", args.prompts or DEFAULT_COUNTS)
        found += tasks.prompts(args.tasks, counts, lambda name: print(f"{name}: not in {args.tasks}, left out", flush=True),
                               args.first)
    if not found:
        raise SystemExit(f"accuracy: no prompt: --tasks {args.tasks} has none of --prompts "
                         f"{' '.join(args.prompts or DEFAULT_COUNTS)}; known are {', '.join(tasks.DIGESTS)}")
    return found


def run(args: argparse.Namespace, names: dict[str, str]) -> None:
    """names: of the plans' texts."""
    part, parts = shard_of(args.shard)
    todo, known = prompts_of(args), kept(args.keep)
    left = [prompt for prompt in todo[part - 1::parts] if missing_of(known, args.model_name, prompt, names)]
    if not left:
        print(f"{args.keep} has all of it already", flush=True)
        return
    with engine_of(args) as engine:
        for number, prompt in enumerate(left, 1):
            begin = time.perf_counter()
            line = known.get((args.model_name, prompt.key), {"plans": {}})
            missing = missing_of(known, args.model_name, prompt, names)
            ids, reference = tasks.ids_of(prompt, engine.tokenizer)
            if len(ids) + len(reference) > engine.context:
                print(f"{number}/{len(left)} {prompt.key}: {len(ids)} tokens exceed the model's context, left out", flush=True)
                continue
            found = measure(engine, prompt, ids, reference, missing, not (args.skip_plain or args.emulate))
            line = {"id": prompt.key, "model": args.model_name, "prompt": len(ids), "answer": len(reference),
                    "scored": prompt.is_scored, "seconds": round(time.perf_counter() - begin, 1),
                    "plans": line["plans"] | found}
            with args.keep.open("ab", buffering=0) as file:  # one write, which other shards' lines do not part
                file.write((json.dumps(line) + "\n").encode())
            say(number, len(left), line)


def engine_of(args: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    if args.emulate:
        import emulated
        return contextlib.nullcontext(emulated.Engine(folder_of(args.model), args.device))
    import decode
    return decode.engine(folder_of(args.model), args.device, args.dtype)


def missing_of(known: dict[tuple[str, str], figures.Line], model: str, prompt: tasks.Prompt, names: dict[str, str]
               ) -> dict[str, str]:
    """Texts, with their names, that are not known of the prompt; full, which KL is against, first with any of them."""
    plans = known.get((model, prompt.key), {"plans": {}})["plans"]
    missing = {text: name for text, name in names.items() if text not in plans}
    return {figures.FULL: figures.FULL} | missing if missing or figures.FULL not in plans else {}


def say(number: int, of: int, line: figures.Line) -> None:
    """A bar, and how the plans did."""
    full = line["plans"][figures.FULL]
    worst = sorted(((text, plan) for text, plan in line["plans"].items() if text != figures.FULL),
                   key=lambda pair: -pair[1]["nats"])[:2]
    bar = "#" * round(20 * number / of)
    print(f"[{bar:20}] {number}/{of} {line['id']} ({line['prompt']} tokens, {line['seconds']} s): full {full['nats']:.3f}, "
          f"score {full['score']:.2f}; most lost by " +
          ", ".join(f"{text.split('{')[0]} {plan['nats'] - full['nats']:+.2f}" for text, plan in worst), flush=True)


def kept(path: pathlib.Path) -> dict[tuple[str, str], figures.Line]:
    """By model and prompt; of two lines of one prompt the later, which has what the earlier had."""
    if not path.exists():
        return {}
    found = {}
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise SystemExit(f"accuracy: --keep {path}: line {number} is not whole ({error}); take it out") from error
        found[line["model"], line["id"]] = line
    return found


def plans_of(lines: list[figures.Line]) -> dict[str, str]:
    """Names and texts of what was kept; names of the grid where a line has none."""
    of_grid = {text: name for name, text in (grid.grid() | grid.ON_CPUS).items()}
    return {plan.get("name") or of_grid.get(text, text): text for line in lines for text, plan in line["plans"].items()
            if text != figures.FULL}


def report_of(args: argparse.Namespace) -> None:
    import report
    lines = list(kept(args.keep).values())
    if not lines:
        raise SystemExit(f"accuracy: --keep {args.keep} has no line; run with --tasks first")
    chosen = named(args.plan) or plans_of(lines)
    report.write(lines, chosen, kept(args.seen) if args.seen else None, args)
    if args.brief:
        print(report.brief(lines, chosen))


def named(texts: list[str]) -> dict[str, str]:
    split = [text.partition("=") for text in texts]
    for name, equals, text in split:
        if not (name and equals and text) or "{" in name:
            raise SystemExit(f"accuracy: --plan '{name}{equals}{text}': wanted NAME=PLAN")
    return {name: text for name, _, text in split}


def main() -> int:
    parser = argparse.ArgumentParser(prog="research", description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--prompts", nargs="+", metavar="NAME=N", help=f"default: {' '.join(DEFAULT_COUNTS)}")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="of each task's samples; those before it are left out")
    parser.add_argument("--keep", type=pathlib.Path, required=True, metavar="FILE")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--model-name", help="in results; default: the model's, or its folder's name")
    parser.add_argument("--plan", action="append", default=[], metavar="NAME=PLAN")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", choices=["bf16", "fp32"], help="of the model and its pages; default: bf16 on a GPU, else fp32")
    parser.add_argument("--own", nargs="+", default=[], metavar="FILE=N", help="N prompts of a .jsonl, or windows of a .txt")
    parser.add_argument("--skip-plain", action="store_true", help="full's answer is not compared with plain transformers'")
    parser.add_argument("--emulate", action="store_true", help="rules of emulated.py, without a daemon")
    parser.add_argument("--shard", default="1/1", metavar="I/N")
    parser.add_argument("--report", type=pathlib.Path, metavar="FILE.md")
    parser.add_argument("--json-out", type=pathlib.Path, metavar="FILE.json")
    parser.add_argument("--groups", default=".*", metavar="PATTERN", help="of rows that are written, such as '\\S+( \\d+)?'")
    parser.add_argument("--seen", type=pathlib.Path, metavar="FILE", help="a --keep: rows of its prompts and of the others")
    parser.add_argument("--brief", action="store_true", help="prints a line a plan of what --keep has")
    parser.add_argument("--suite", default="accuracy", help="of the result file")
    parser.add_argument("--device-name", default="")
    parser.add_argument("--command", default="research --tasks DIR --keep FILE --json-out OUT", help="that the result file names")
    parser.add_argument("--commit", default="uncommitted")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    args.model_name = args.model_name or pathlib.Path(args.model).name
    chosen = named(args.plan) or (grid.EMULATED if args.emulate else grid.grid() | (grid.ON_CPUS if args.device == "cpu" else {}))
    reported = args.report or args.json_out or args.brief
    if not (args.tasks or args.own or reported):
        parser.error("nothing is asked for: --tasks DIR or --own FILE=N runs, --report, --json-out and --brief say what --keep has")
    if args.tasks or args.own:
        run(args, {text: name for name, text in chosen.items()})
    if reported:
        report_of(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
