#!/usr/bin/env python3
"""Trains SeKV's parameters of a model: routers W, thresholds tau and the gates' network; the model stays frozen.

    bench/accuracy/train_sekv.py --model FOLDER --texts FILE.jsonl.xz --out FOLDER [--state FOLDER] [--seconds 200]
                                 [--stop-after SECONDS] [--steps N] [--seed 1] [--device cuda]

FILE: pack_texts.py makes it; a document of sixteen is held out. Losses and schedule are the paper's (docs/spec/sekv.md,
"Training"; docs/accuracy.md says what is ours). --seconds is how long training takes in all calls together: prompts grow
and the learning rate falls by its share that is gone (--steps: by the share of steps, and a run on a CPU is exactly
repeatable). --stop-after ends this call, its evaluation included; the next one with the same --state goes on. --out has

    smollm2-135m.safetensors  (--name)   what a daemon reads, fp32
    smollm2-135m.json                    sources, settings, a line every --log-every steps, and both evaluations

There is no other state: step i's texts and budget follow from the seed and i.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import lzma
import math
import os
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from chat import Chat  # noqa: E402
from evaluate import device_of  # noqa: E402
from sekv_student import Batch, Parameters, Student, gate_losses  # noqa: E402

ZOOM, RECONSTRUCTION, BUDGET, RANKS = 1.0, 0.5, 0.1, 0.1
RATE, DECAY, WARM_UP, CLIP = 1e-3, 0.01, 0.1, 1.0
PHASES = ((0.25, 0.25), (0.75, 0.5), (1.0, 1.0))  # until this share of training, prompts of that share of --longest
SHARES = (0.15, 0.35)                             # budgets of training, of a prompt's tokens
HELD_OUT = 16
SAVE_SECONDS = 60


class Texts:
    """Documents by length; the held-out ones are chosen by a digest of their source. Immutable."""

    def __init__(self, path: pathlib.Path, chat: Chat) -> None:
        self._chat, self.digest = chat, hashlib.sha256(path.read_bytes()).hexdigest()
        with lzma.open(path, "rt", encoding="utf-8") as file:
            found = [json.loads(line) for line in file]
        held = [int(hashlib.sha256(one["source"].encode()).hexdigest(), 16) % HELD_OUT == 0 for one in found]
        self._parts = {part: [one["text"] for one, is_held in zip(found, held) if is_held == (part == "held")]
                       for part in ("held", "train")}
        self.sources = {part: sorted(one["source"] for one, is_held in zip(found, held) if is_held == (part == "held"))
                        for part in ("held", "train")}

    def rows(self, part: str, key: str, count: int, length: int) -> Tensor:
        """Ids [count, length] of places that `key` draws. Errors: ValueError, no document is so long."""
        texts = [text for text in self._parts[part] if len(text) >= 4 * length]
        if not texts:
            raise ValueError(f"no {part} text of {4 * length} characters, which {length} tokens need")
        draw, weights, rows = random.Random(key), [len(text) for text in texts], []
        while len(rows) < count:
            text = draw.choices(texts, weights)[0]
            begin = draw.randrange(len(text) - 4 * length + 1)
            ids = self._chat.encode(text[begin:begin + 7 * length])
            if len(ids) >= length:
                rows.append(ids[:length])
        return torch.tensor(rows)


@dataclass
class Standing:
    """Where training stands, over all calls; `seconds` of training alone."""
    step: int = 0
    seconds: float = 0.0
    log: list[dict] = field(default_factory=list)
    untrained: list[dict] = field(default_factory=list)


class Schedule:
    """What a step does, by the share of training that is gone."""

    def __init__(self, args: argparse.Namespace, standing: Standing) -> None:
        self._args, self._standing = args, standing

    def share(self, step: int) -> float:
        return min(1.0, step / self._args.steps if self._args.steps else self._standing.seconds / self._args.seconds)

    def rate(self, step: int) -> float:
        share = self.share(step)
        if share < WARM_UP:
            return RATE * (share + 1e-3) / WARM_UP
        return RATE * 0.5 * (1 + math.cos(math.pi * (share - WARM_UP) / (1 - WARM_UP)))

    def ramp(self, step: int) -> float:
        return min(1.0, self.share(step) / 0.5)

    def prompt(self, step: int) -> int:
        """Tokens."""
        return round(self._args.longest * next(part for until, part in PHASES if self.share(step) <= until))


class Trainer:
    """Steps of one model's parameters. Not reentrant."""

    def __init__(self, student: Student, parameters: Parameters, texts: Texts, args: argparse.Namespace) -> None:
        self.student, self.parameters, self._texts, self._args = student, parameters, texts, args
        self.adam = torch.optim.AdamW(parameters.parameters(), lr=RATE, weight_decay=DECAY)
        self._pool = concurrent.futures.ThreadPoolExecutor(2)
        self._ahead: dict[tuple[int, int], concurrent.futures.Future[Tensor]] = {}
        self._made: tuple[int, Batch] | None = None

    def ids(self, number: int, prompt: int) -> Tensor:
        """Of the batch, and begins the next one's."""
        rows = max(1, self._args.tokens // prompt)
        for ahead in (number, number + 1):
            if (ahead, prompt) not in self._ahead:
                self._ahead[ahead, prompt] = self._pool.submit(
                    self._texts.rows, "train", f"{self._args.seed}/{ahead}", rows, prompt + self._args.behind)
        found = self._ahead.pop((number, prompt)).result()
        return found.to(self.student.device)

    def batch(self, step: int, prompt: int) -> Batch:
        """One for --reuse steps that follow each other: making it takes longer than a step."""
        number = step // self._args.reuse
        if self._made is None or self._made[0] != number:
            self._made = None  # its memory first
            self._made = number, self.student.batch(self.ids(number, prompt), self._args.behind, self._args.local)
        return self._made[1]

    def step(self, batch: Batch, number: int, rate: float, ramp: float) -> dict[str, float]:
        share = random.Random(f"share/{self._args.seed}/{number}").uniform(*SHARES)
        found = self.student.decode(batch, self.parameters, share)
        said = found.logits.log_softmax(-1).flatten(0, 1)
        kl = F.kl_div(said, batch.teacher.flatten(0, 1), reduction="batchmean", log_target=True)
        zoom, expanded = found.zoom.mean(), found.expanded.mean()
        lost, ranks = gate_losses(batch, self.parameters)
        loss = kl + ZOOM * zoom + RECONSTRUCTION * lost + ramp * BUDGET * (expanded + RANKS * ranks)
        loss.backward()
        # Apart, because squared singular values are thousands: together they would leave routers no step at all.
        norms = [float(torch.nn.utils.clip_grad_norm_(group, CLIP)) for group in
                 ([self.parameters.directions], [self.parameters.tau], list(self.parameters.g_phi.parameters()))]
        for group in self.adam.param_groups:
            group["lr"] = rate
        if all(map(math.isfinite, norms)):
            self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        with torch.no_grad():
            self.parameters.tau.clamp_(0, 1)
        return {"loss": float(loss.detach()), "kl": float(kl.detach()), "zoom": float(zoom.detach()),
                "reconstruction": float(lost.detach()), "ranks": float(ranks.detach()),
                "above_tau": float(expanded.detach()), "tau": float(self.parameters.tau.detach().mean()),
                "share": share, "norm": norms[0], "skipped": float(not all(map(math.isfinite, norms)))}

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def held_out(student: Student, texts: Texts, args: argparse.Namespace) -> list[tuple[Batch, int]]:
    return [(student.batch(texts.rows("held", f"held/{args.seed}/{i}", 1, args.held_prompt + args.behind).to(student.device),
                           args.behind, args.local), i) for i in range(args.held)]


@torch.no_grad()
def evaluation(student: Student, batches: list[tuple[Batch, int]], parameters: Parameters | None, share: float) -> dict:
    """Means over held-out texts: nats lost of the text itself, KL, attention's error (relative L2), zoom loss, and rows
    that expansions add a query and head. Of the loss also half of the 95 % interval over texts."""
    found = []
    for batch, _ in batches:
        out = student.decode(batch, parameters, share, errors=True)
        said, next_ids = out.logits.log_softmax(-1), batch.ids[:, batch.tokens + 1:, None]
        lost = (batch.teacher[:, :-1].gather(-1, next_ids) - said[:, :-1].gather(-1, next_ids)).mean()
        kl = F.kl_div(said.flatten(0, 1), batch.teacher.flatten(0, 1), reduction="batchmean", log_target=True)
        found.append({"nats_lost": float(lost), "kl": float(kl), "attention_error": float(out.error.mean()),
                      "zoom": float(out.zoom.mean()), "rows_expanded": float(out.rows.mean())})
    means = {name: round(statistics.fmean(one[name] for one in found), 5) for name in found[0]}
    spread = statistics.stdev(one["nats_lost"] for one in found) if len(found) > 1 else math.nan
    return means | {"interval": round(1.96 * spread / math.sqrt(len(found)), 5), "share": share, "texts": len(found)}


def save(trainer: Trainer, standing: Standing, args: argparse.Namespace, about: dict) -> None:
    """The state, whole or not at all; and what is to be kept of it."""
    for folder in (args.state, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    state = {"step": standing.step, "seconds": standing.seconds, "log": json.dumps(standing.log), "seed": args.seed,
             "untrained": json.dumps(standing.untrained), "parameters": trainer.parameters.state_dict(),
             "adam": trainer.adam.state_dict()}

    def put(path: pathlib.Path, write: Callable[[pathlib.Path], object]) -> None:
        write(path.with_name(path.name + ".new"))
        os.replace(path.with_name(path.name + ".new"), path)

    put(args.state / "state.pt", lambda path: torch.save(state, path))
    told = {"model": args.name, "seed": str(args.seed), "steps": str(standing.step), "texts": about["texts"]}
    put(args.out / f"{args.name}.safetensors", lambda path: save_file(trainer.parameters.tensors(), path, metadata=told))
    log = about | {"steps": standing.step, "seconds": round(standing.seconds, 1), "untrained": standing.untrained,
                   "log": standing.log}
    put(args.out / f"{args.name}.json", lambda path: path.write_text(json.dumps(log, indent=1) + "\n"))


def load(trainer: Trainer, args: argparse.Namespace) -> Standing:
    """The state, or the beginning. Errors: ValueError, the state of another seed."""
    path = args.state / "state.pt"
    if not path.exists():
        first = trainer.batch(0, round(args.longest * PHASES[0][1]))
        trainer.parameters.begin_at(first.k_mean, first.spans.length)
        return Standing()
    state = torch.load(path, map_location=trainer.student.device, weights_only=True)
    if state["seed"] != args.seed:
        raise ValueError(f"{path}: the state of seed {state['seed']}; --seed is {args.seed}")
    trainer.parameters.load_state_dict(state["parameters"])
    trainer.adam.load_state_dict(state["adam"])
    print(f"goes on from {path}: step {state['step']}, {state['seconds']:.0f} s", flush=True)
    return Standing(state["step"], state["seconds"], json.loads(state["log"]), json.loads(state["untrained"]))


def train(trainer: Trainer, standing: Standing, until: float, args: argparse.Namespace, keep: Callable[[], None]) -> None:
    """Steps until the clock says `until` (time.monotonic), or training is done."""
    schedule, found = Schedule(args, standing), []
    saved = last = time.monotonic()
    prompt = schedule.prompt(standing.step)
    while schedule.share(standing.step) < 1 and last < until and standing.step < (args.stop_at or math.inf):
        if standing.step % args.reuse == 0:  # steps of one batch have one length
            prompt = schedule.prompt(standing.step)
        rate, ramp = schedule.rate(standing.step), schedule.ramp(standing.step)
        found.append(trainer.step(trainer.batch(standing.step, prompt), standing.step, rate, ramp))
        now = time.monotonic()
        standing.step, standing.seconds, last = standing.step + 1, standing.seconds + now - last, now
        if standing.step % args.log_every == 0:
            line = {name: round(statistics.fmean(one[name] for one in found), 5) for name in found[0]}
            standing.log.append({"step": standing.step, "seconds": round(standing.seconds, 1), "prompt": prompt,
                                 "rate": round(rate, 7)} | line)
            print(json.dumps(standing.log[-1]), flush=True)
            found = []
        if now - saved > SAVE_SECONDS:
            keep()
            saved = last = time.monotonic()


def table(rows: list[tuple[str, dict]]) -> str:
    columns = ("nats_lost", "interval", "kl", "attention_error", "zoom", "rows_expanded")
    lines = ["".join(f"{name:>17}" for name in ("", "share", *columns))]
    lines += [f"{name:>17}" + "".join(f"{row[c]:17.4f}" for c in ("share", *columns)) for name, row in rows]
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--texts", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--state", type=pathlib.Path, default=pathlib.Path("/tmp/sekv_state"))
    parser.add_argument("--name", default="smollm2-135m")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--stop-after", type=float, default=1e9, help="seconds of this call")
    parser.add_argument("--steps", type=int, help="in all; lengths and rate then follow steps, not time")
    parser.add_argument("--stop-at", type=int, help="step after which this call ends")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=16384, help="of a batch's prompts")
    parser.add_argument("--longest", type=int, default=7680, help="tokens of a prompt")
    parser.add_argument("--behind", type=int, default=256, help="tokens behind a prompt, which are decoded")
    parser.add_argument("--local", type=int, default=128, help="the plan's option; as bench/accuracy/plans.py has it")
    parser.add_argument("--reuse", type=int, default=2, help="steps a batch")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--held", type=int, default=32, help="held-out texts")
    parser.add_argument("--held-prompt", type=int, default=4096)
    parser.add_argument("--held-shares", type=float, nargs="+", default=[0.25])
    parser.add_argument("--evaluation-seconds", type=float, default=25.0)
    return parser.parse_args()


def main() -> int:
    begin, args = time.monotonic(), arguments()
    print(f"seed {args.seed}", flush=True)
    torch.manual_seed(args.seed)
    device, dtype = device_of(args.device)
    texts = Texts(args.texts, Chat(args.model))
    student = Student(args.model, device, dtype, args.longest + args.held_prompt + args.behind)
    shape = student.shape
    trainer = Trainer(student, Parameters(shape.layers, shape.heads, shape.head_dim, args.seed).to(device), texts, args)
    standing = load(trainer, args)
    about = {"name": args.name, "texts": texts.digest, "sources": {k: len(v) for k, v in texts.sources.items()},
             "packages": sorted({source.split("/")[0] for part in texts.sources.values() for source in part}),
             "settings": {k: v for k, v in vars(args).items() if not isinstance(v, pathlib.Path)},
             "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
    batches = held_out(student, texts, args)
    if not standing.untrained:
        standing.untrained = [evaluation(student, batches, None, share) for share in args.held_shares]
    print(table([("untrained", row) for row in standing.untrained]), flush=True)
    print(f"training begins after {time.monotonic() - begin:.0f} s", flush=True)
    keep: Callable[[], None] = lambda: save(trainer, standing, args, about)
    train(trainer, standing, begin + args.stop_after - args.evaluation_seconds, args, keep)
    about["trained"] = [evaluation(student, batches, trainer.parameters, share) for share in args.held_shares]
    tau = trainer.parameters.tau.detach().clone()
    trainer.parameters.tau.data.zero_()
    about["trained_without_tau"] = [evaluation(student, batches, trainer.parameters, share) for share in args.held_shares]
    trainer.parameters.tau.data.copy_(tau)
    keep()
    print(table([("untrained", row) for row in standing.untrained] + [("trained", row) for row in about["trained"]]
                + [("trained, tau 0", row) for row in about["trained_without_tau"]]), flush=True)
    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
    print(f"{standing.step} steps in {standing.seconds:.0f} s, {time.monotonic() - begin:.0f} s in all", flush=True)
    trainer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
