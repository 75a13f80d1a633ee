#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains SeKV's parameters of a model: routers W and the gates' network; the model stays frozen.

    research/train_sekv.py --model FOLDER --texts FILE.jsonl.xz --out FOLDER [--state FOLDER] [--seconds 200]
                                 [--stop-after SECONDS] [--steps N] [--seed 1] [--device cuda]

FILE: pack_texts.py makes it, or narrow_gemma.py; of sixteen documents one is held out, and by another one parameters are
chosen. FOLDER: SmolLM2, or Gemma 3, of which only the layers that attend to everything are trained for. Losses and
schedule are the paper's (docs/spec/sekv.md, "Training"; docs/accuracy.md says what is ours). --seconds is how long
training takes in all calls together: the learning rate falls by its share that is gone (--steps: by the share of steps,
and a run on a CPU is exactly repeatable). --stop-after ends this call, its evaluation included; the next one with the same
--state goes on. First every one of --try is trained for --try-steps, and the best goes on. --out has

    smollm2-135m.safetensors  (--name)   what a daemon reads, fp32
    smollm2-135m.json                    sources, settings, a line every --log-every steps, and evaluations

What is kept are the parameters of the best check, of which the untrained ones are the first: so nothing is shipped that
loses more of the texts that choose. There is no other state: step i's texts and budget follow from the seed and i.
"""

from __future__ import annotations

import argparse
import base64
import concurrent.futures
import copy
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import sekv_gates  # noqa: E402
from chat import Encoder  # noqa: E402
from evaluate import device_of  # noqa: E402
from gemma_student import student_of  # noqa: E402
from sekv_student import Batch, Parameters, Student  # noqa: E402

DECAY, WARM_UP, CLIP, BETAS = 0.01, 0.05, 1.0, (0.9, 0.98)
STRETCH = 10.0         # times the learning rate of turns: a stretch is one number for what a turn has head_dim for
SHARES = (0.22, 0.40)  # budgets of training, of a prompt's tokens
PARTS = 16             # parts of the documents; one is held out, one chooses
SAVE_SECONDS = 60


class Setting(NamedTuple):
    """The peak learning rate, weights of the losses, and the zoom loss's power."""
    rate: float
    zoom: float
    kl: float
    error: float
    power: float


def setting(text: str) -> Setting:
    rate, zoom, kl, error, power = map(float, text.split(","))
    return Setting(rate, zoom, kl, error, power)


class Texts:
    """Documents by length, as text or as token ids; what part one belongs to is chosen by a digest of its source. A row
    begins with `begin`, what the model wants before any text. Immutable."""

    def __init__(self, path: pathlib.Path, encode: Callable[[str], list[int]] | None = None, begin: Sequence[int] = ()) -> None:
        """encode: of texts; documents of ids need none."""
        self._encode, self._begin, self.digest = encode, list(begin), hashlib.sha256(path.read_bytes()).hexdigest()
        self._parts: dict[str, list[str] | list[np.ndarray]] = {"held": [], "choice": [], "train": []}
        self.sources: dict[str, list[str]] = {part: [] for part in self._parts}
        with lzma.open(path, "rt", encoding="utf-8") as file:
            for one in map(json.loads, file):
                digest = int(hashlib.sha256(one["source"].encode()).hexdigest(), 16) % PARTS
                part = {0: "held", 1: "choice"}.get(digest, "train")
                self._parts[part].append(np.frombuffer(base64.b64decode(one["ids"]), "<u2") if "ids" in one else one["text"])
                self.sources[part].append(one["source"])

    def _ids(self, text: str | np.ndarray) -> list[int]:
        return text.tolist() if isinstance(text, np.ndarray) else self._encode(text)

    def rows(self, part: str, key: str, count: int, length: int) -> Tensor:
        """Ids [count, length] of places that `key` draws. Errors: ValueError, no document is so long."""
        documents, own = self._parts[part], length - len(self._begin)
        least, most = (4, 7) if documents and isinstance(documents[0], str) else (1, 1)  # characters a token, or tokens
        texts = [text for text in documents if len(text) >= least * own]
        if not texts:
            raise ValueError(f"no {part} text of {least * own} {'characters' if least > 1 else 'ids'}, which {length} tokens need")
        draw, weights, rows = random.Random(key), [len(text) for text in texts], []
        while len(rows) < count:
            text = draw.choices(texts, weights)[0]
            begin = draw.randrange(len(text) - least * own + 1)
            ids = self._ids(text[begin:begin + most * own])
            if len(ids) >= own:
                rows.append(self._begin + ids[:own])
        return torch.tensor(rows)


def texts_of(path: pathlib.Path, model: pathlib.Path) -> Texts:
    """Read by the model's tokenizer, if it has one; Gemma's begin with its first token."""
    config, tokenizer = json.loads((model / "config.json").read_text()), model / "tokenizer.json"
    begin = [config["bos_token_id"]] if config["model_type"] == "gemma3_text" else []
    return Texts(path, Encoder(model).encode if tokenizer.exists() else None, begin)


@dataclass
class Standing:
    """Where training stands, over all calls; `seconds` of training alone. `best`: KL of the texts that choose."""
    step: int = 0
    seconds: float = 0.0
    best: float = math.inf
    best_step: int = 0
    setting: Setting | None = None
    log: list[dict] = field(default_factory=list)
    checks: list[dict] = field(default_factory=list)
    tried: list[dict] = field(default_factory=list)
    untrained: list[dict] = field(default_factory=list)


class Window:
    """Batches that steps draw from, kept as the frozen model made them: --window of them, the oldest giving way to a new
    one every --refresh steps. Step i draws from i / refresh .. i / refresh + window - 1, by the seed. Not reentrant."""

    def __init__(self, student: Student, texts: Texts, args: argparse.Namespace) -> None:
        self._student, self._texts, self._args = student, texts, args
        self._pool = concurrent.futures.ThreadPoolExecutor(4)
        self._ids: dict[int, concurrent.futures.Future[Tensor]] = {}
        self._made: dict[int, Batch] = {}
        self.size = args.window

    def _batch(self, number: int) -> Batch:
        """The batch of that number, which is not made twice; begins to read the texts of the next ones."""
        args = self._args
        if number not in self._made:
            for ahead in range(number, number + 8):
                prompt = args.prompts[ahead % len(args.prompts)]
                if ahead not in self._ids and ahead not in self._made:
                    self._ids[ahead] = self._pool.submit(self._texts.rows, "train", f"{args.seed}/{ahead}",
                                                         max(1, args.tokens // prompt), prompt + args.behind)
            ids = self._ids.pop(number).result().to(self._student.device)
            self._made[number] = self._student.batch(ids, args.behind, args.local)
        return self._made[number]

    def of(self, step: int) -> Batch:
        first = step // self._args.refresh
        for old in [number for number in self._made if number < first]:
            del self._made[old]
        return self._batch(first + random.Random(f"draw/{self._args.seed}/{step}").randrange(self.size))

    def at(self, step: int) -> list[Batch]:
        """All that step may draw. Where --fill-seconds are over the window is only as large as it has become."""
        begin, first = time.monotonic(), step // self._args.refresh
        for number in range(self.size):
            self._batch(first + number)
            if time.monotonic() - begin > self._args.fill_seconds:
                self.size = number + 1
                break
        return [self._made[first + number] for number in range(self.size)]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class Trainer:
    """Steps of one model's routers. Not reentrant."""

    def __init__(self, student: Student, parameters: Parameters, args: argparse.Namespace) -> None:
        self.student, self.parameters, self._args = student, parameters, args
        self.adam = torch.optim.AdamW([{"params": [parameters.turn]}, {"params": [parameters.stretch]}], betas=BETAS,
                                      lr=0.0, weight_decay=DECAY)

    def step(self, batch: Batch, number: int, rate: float, weights: Setting) -> dict[str, float]:
        share = random.Random(f"share/{self._args.seed}/{number}").uniform(*SHARES)
        found = self.student.decode(batch, self.parameters, share, errors=True, through=bool(weights.kl or weights.error),
                                    power=weights.power)
        said, teacher = found.logits.log_softmax(-1).flatten(0, 1), self.student.teacher(batch).flatten(0, 1)
        kl = F.kl_div(said, teacher, reduction="batchmean", log_target=True)
        zoom, error = found.zoom.mean(), found.error.mean()
        (weights.zoom * zoom + weights.kl * kl + weights.error * error).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.routers(), CLIP)
        for group, times in zip(self.adam.param_groups, (1.0, STRETCH)):
            group["lr"] = rate * times
        if bool(norm.isfinite()):
            self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        return {"kl": float(kl.detach()), "zoom": float(zoom.detach()), "error": float(error.detach()),
                "share": share, "norm": float(norm), "skipped": float(not bool(norm.isfinite()))}


def rate_of(share: float, peak: float) -> float:
    """By the share of training that is gone: a linear beginning, then a cosine."""
    if share < WARM_UP:
        return peak * (share + 1e-3) / WARM_UP
    return peak * 0.5 * (1 + math.cos(math.pi * (share - WARM_UP) / (1 - WARM_UP)))


def drawn(student: Student, texts: Texts, part: str, rows: int, args: argparse.Namespace) -> list[Batch]:
    """Batches of texts that are not trained on."""
    at_once = max(1, args.tokens // args.held_prompt)
    ids = [texts.rows(part, f"{part}/{args.seed}/{i}", 1, args.held_prompt + args.held_behind) for i in range(rows)]
    return [student.batch(torch.cat(ids[i:i + at_once]).to(student.device), args.held_behind, args.local, part == "held")
            for i in range(0, rows, at_once)]


@torch.no_grad()
def evaluation(student: Student, batches: list[Batch], parameters: Parameters | None, share: float) -> dict:
    """Means over texts: nats lost of the text itself, KL, attention's error (relative L2), zoom loss, and rows that
    expansions add a query and head. Of the loss also half of the 95 % interval over texts."""
    lost, rest = [], []
    for batch in batches:
        out = student.decode(batch, parameters, share, errors=True)
        said, teacher, next_ids = out.logits.log_softmax(-1), student.teacher(batch), batch.ids[:, batch.tokens + 1:, None]
        lost += (teacher[:, :-1].gather(-1, next_ids) - said[:, :-1].gather(-1, next_ids)).mean((1, 2)).tolist()
        kl = F.kl_div(said.flatten(0, 1), teacher.flatten(0, 1), reduction="batchmean", log_target=True)
        rest += [{"kl": float(kl), "attention_error": float(out.error.mean()), "zoom": float(out.zoom.mean()),
                  "rows_expanded": float(out.rows.mean())}] * len(batch.ids)
    means = {name: round(statistics.fmean(one[name] for one in rest), 5) for name in rest[0]}
    spread = statistics.stdev(lost) if len(lost) > 1 else math.nan
    return {"nats_lost": round(statistics.fmean(lost), 5), "interval": round(1.96 * spread / math.sqrt(len(lost)), 5),
            "share": share, "texts": len(lost)} | means


class Run:
    """One call of the script. Not reentrant."""

    def __init__(self, args: argparse.Namespace, begin: float) -> None:
        self.args, self.begin = args, begin
        device, dtype = device_of(args.device)
        self.texts = texts_of(args.texts, args.model)
        self.student = student_of(args.model, device, dtype, max(*args.prompts, args.held_prompt) + args.behind + args.held_behind)
        shape = self.student.shape
        self.trainer = Trainer(self.student, Parameters(len(self.student.served), shape.heads, shape.head_dim, args.seed).to(device), args)
        self.best = copy.deepcopy(self.trainer.parameters)
        self.standing, self.window = self._load(), Window(self.student, self.texts, args)
        self.about = {"name": args.name, "texts": self.texts.digest, "sources": {k: len(v) for k, v in self.texts.sources.items()},
                      "packages": sorted({source.split("/")[0] for part in self.texts.sources.values() for source in part}),
                      "settings": {k: v for k, v in vars(args).items() if not isinstance(v, pathlib.Path)},
                      "vocabulary": len(self.student.embedding), "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
        self.choice = drawn(self.student, self.texts, "choice", args.choice, args)
        self.held = drawn(self.student, self.texts, "held", args.held, args)
        self.said("texts that choose and held-out ones are there")

    def said(self, what: str) -> None:
        print(f"{time.monotonic() - self.begin:6.1f} s: {what}", flush=True)

    def _load(self) -> Standing:
        """The state, or the beginning. Errors: ValueError, the state of another seed."""
        path, parameters = self.args.state / "state.pt", self.trainer.parameters
        if not path.exists():
            return Standing()
        state = torch.load(path, map_location=self.student.device, weights_only=True)
        if state["seed"] != self.args.seed:
            raise ValueError(f"{path}: the state of seed {state['seed']}; --seed is {self.args.seed}")
        parameters.load_state_dict(state["parameters"])
        self.best.load_state_dict(torch.load(self.args.state / "best.pt", map_location=self.student.device, weights_only=True))
        self.trainer.adam.load_state_dict(torch.load(self.args.state / "adam.pt", map_location=self.student.device, weights_only=True))
        told = json.loads(state["standing"])
        self.said(f"goes on from {path}: step {told['step']}, {told['seconds']:.0f} s")
        return Standing(**told | {"setting": told["setting"] and Setting(*told["setting"])})

    def save(self) -> None:
        """The state, each file whole or not at all; and what is to be kept of it."""
        args, standing = self.args, self.standing
        for folder in (args.state, args.out):
            folder.mkdir(parents=True, exist_ok=True)

        def put(path: pathlib.Path, write: Callable[[pathlib.Path], object]) -> None:
            write(path.with_name(path.name + ".new"))
            os.replace(path.with_name(path.name + ".new"), path)

        put(args.state / "adam.pt", lambda path: torch.save(self.trainer.adam.state_dict(), path))
        put(args.state / "best.pt", lambda path: torch.save(self.best.state_dict(), path))
        state = {"seed": args.seed, "standing": json.dumps(vars(standing)), "parameters": self.trainer.parameters.state_dict()}
        put(args.state / "state.pt", lambda path: torch.save(state, path))
        told = {"model": args.name, "seed": str(args.seed), "steps": str(standing.best_step), "texts": self.texts.digest}
        put(args.out / f"{args.name}.safetensors", lambda path: save_file(self.best.tensors(), path, metadata=told))
        log = self.about | vars(standing) | {"seconds": round(standing.seconds, 1)}
        put(args.out / f"{args.name}.json", lambda path: path.write_text(json.dumps(log, indent=1) + "\n"))

    def check(self) -> float:
        """KL of the texts that choose; keeps the parameters if there were none as good."""
        found = evaluation(self.student, self.choice, self.trainer.parameters, self.args.share)
        self.standing.checks.append({"step": self.standing.step} | found)
        if found["kl"] < self.standing.best:
            self.standing.best, self.standing.best_step = found["kl"], self.standing.step
            self.best.load_state_dict(self.trainer.parameters.state_dict())
        self.said(f"step {self.standing.step}: of texts that choose nats lost {found['nats_lost']:.4f}, KL {found['kl']:.4f}, "
                   f"attention error {found['attention_error']:.4f}; best KL {self.standing.best:.4f} at {self.standing.best_step}")
        return found["kl"]

    def choose(self) -> None:
        """Tries each setting for some steps from the beginning; the best one's rate and weights are taken."""
        args, batches = self.args, self.window.at(0)
        for one in args.try_:
            parameters = copy.deepcopy(self.trainer.parameters)
            trainer, begin, step, share = Trainer(self.student, parameters, args), time.monotonic(), 0, 0.0
            while len(args.try_) > 1 and share < 1:
                batch = random.Random(f"try/{args.seed}/{step}").choice(batches)
                trainer.step(batch, step, rate_of(share, one.rate), one)
                step += 1
                share = max(step / args.try_steps, (time.monotonic() - begin) / args.try_seconds)
            found = evaluation(self.student, self.choice, parameters, args.share)
            self.standing.tried.append({"setting": one, "steps": step} | found)
            self.said(f"tried {one}, {step} steps: nats lost {found['nats_lost']:.4f}, KL {found['kl']:.4f}, "
                       f"attention error {found['attention_error']:.4f}")
        self.standing.setting = min(self.standing.tried, key=lambda row: row["kl"])["setting"]

    def share(self) -> float:
        args, standing = self.args, self.standing
        return min(1.0, standing.step / args.steps if args.steps else standing.seconds / args.seconds)

    def train(self) -> None:
        """Steps until this call's time is over, or training is done."""
        args, standing, found = self.args, self.standing, []
        until, last = self.begin + args.stop_after - args.evaluation_seconds, time.monotonic()
        saved, weights = last, standing.setting
        assert weights is not None
        while self.share() < 1 and last < until and standing.step < (args.stop_at or math.inf):
            rate = rate_of(self.share(), weights.rate)
            found.append(self.trainer.step(self.window.of(standing.step), standing.step, rate, weights))
            now = time.monotonic()
            standing.step, standing.seconds, last = standing.step + 1, standing.seconds + now - last, now
            if standing.step % args.log_every == 0:
                line = {name: round(statistics.fmean(one[name] for one in found), 5) for name in found[0]}
                standing.log.append({"step": standing.step, "seconds": round(standing.seconds, 1), "rate": round(rate, 7)} | line)
                print(json.dumps(standing.log[-1]), flush=True)
                found = []
            if standing.step % args.check_every == 0:
                self.check()
                last = time.monotonic()
            if now - saved > SAVE_SECONDS:
                self.save()
                saved = last = time.monotonic()
        if standing.step % args.check_every:
            self.check()

    def gates(self) -> None:
        """Trains them, on spectra of the window; the best routers get them."""
        spectra = [sekv_gates.spectra_of(batch, self.args.gate_spans, i) for i, batch in enumerate(self.window.at(self.standing.step)[:self.args.gate_batches])]
        joined = sekv_gates.Spectra(*(torch.cat(column) for column in zip(*spectra)))
        self.best.g_phi.load_state_dict(self.trainer.parameters.g_phi.state_dict())
        self.about["gates"] = sekv_gates.train(self.best, joined, self.args.gate_steps, self.args.seed)
        self.said(f"gates of {len(joined.mean)} spectra: {self.about['gates'][-1]}")

    def finish(self) -> None:
        """Evaluates on held-out texts, and saves. Gates stay open if with them KL is a twentieth more."""
        rows = [("untrained", row) for row in self.standing.untrained]
        for name, gated in (("routers", False), ("routers and gates", True)):
            self.best.gated = gated
            found = [evaluation(self.student, self.held, self.best, share) for share in self.args.held_shares]
            self.about[name] = found
            rows += [(name, row) for row in found]
        lost = [statistics.fmean(row["kl"] for row in self.about[name]) for name in ("routers", "routers and gates")]
        self.best.gated = lost[1] <= 1.05 * lost[0]
        self.about["gated"] = self.best.gated
        self.save()
        print(table(rows), flush=True)


def table(rows: list[tuple[str, dict]]) -> str:
    columns = ("nats_lost", "interval", "kl", "attention_error", "zoom", "rows_expanded")
    lines = ["".join(f"{name:>18}" for name in ("", "share", *columns))]
    lines += [f"{name:>18}" + "".join(f"{row[c]:18.4f}" for c in ("share", *columns)) for name, row in rows]
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
    parser.add_argument("--steps", type=int, help="in all; the rate then follows steps, not time")
    parser.add_argument("--stop-at", type=int, help="step after which this call ends")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=16384, help="of a batch's prompts")
    parser.add_argument("--prompts", type=int, nargs="+", default=[4096, 4096, 2048, 7680], help="tokens of batches' prompts, in turn")
    parser.add_argument("--behind", type=int, default=128, help="tokens behind a prompt, which are decoded")
    parser.add_argument("--local", type=int, default=128, help="the plan's option; as research/plans.py has it")
    parser.add_argument("--window", type=int, default=32, help="batches")
    parser.add_argument("--refresh", type=int, default=16, help="steps until a batch gives way")
    parser.add_argument("--try", dest="try_", type=setting, nargs="+", default=[setting("1e-3,1,0,0,1")], metavar="RATE,ZOOM,KL,ERROR,POWER")
    parser.add_argument("--then", type=setting, metavar="RATE,ZOOM,KL,ERROR,POWER", help="in the place of what was chosen")
    parser.add_argument("--try-steps", type=int, default=100)
    parser.add_argument("--try-seconds", type=float, default=1e9, help="of each, at most")
    parser.add_argument("--fill-seconds", type=float, default=1e9, help="of filling the window, at most")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--check-every", type=int, default=100)
    parser.add_argument("--share", type=float, default=0.25, help="budget of the texts that choose")
    parser.add_argument("--choice", type=int, default=16, help="texts that choose")
    parser.add_argument("--held", type=int, default=24, help="held-out texts")
    parser.add_argument("--held-prompt", type=int, default=4096)
    parser.add_argument("--held-behind", type=int, default=256)
    parser.add_argument("--held-shares", type=float, nargs="+", default=[0.25])
    parser.add_argument("--gate-spans", type=int, default=64, help="of a batch")
    parser.add_argument("--gate-batches", type=int, default=8)
    parser.add_argument("--gate-steps", type=int, default=500)
    parser.add_argument("--evaluation-seconds", type=float, default=30.0, help="of gates and evaluation, at the end of a call")
    return parser.parse_args()


def main() -> int:
    begin, args = time.monotonic(), arguments()
    print(f"seed {args.seed}", flush=True)
    torch.manual_seed(args.seed)
    run = Run(args, begin)
    before = time.monotonic()
    if not run.standing.untrained:
        run.standing.untrained = [evaluation(run.student, run.held, None, share) for share in args.held_shares]
        args.evaluation_seconds = max(args.evaluation_seconds, 20 + 3 * (time.monotonic() - before))
    print(table([("untrained", row) for row in run.standing.untrained]), flush=True)
    run.said(f"{len(run.window.at(run.standing.step))} batches in the window")
    if run.standing.setting is None:
        run.check()
        run.choose()
    run.standing.setting = args.then or run.standing.setting
    run.train()
    run.gates()
    run.finish()
    if run.student.device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
    run.said(f"{run.standing.step} steps in {run.standing.seconds:.0f} s")
    run.window.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
