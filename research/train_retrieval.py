#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the retrieval adapter of SmolLM2-135M: rank 16 on attention, on generated tasks of 1K to 22K tokens.

    research/train_retrieval.py --model FOLDER --out FOLDER [--state FOLDER] [--minutes 9] [--budget-minutes 14.5]
                                      [--resume FOLDER] [--seed 1] [--device cuda] [--workers 15] [--attention auto]

One call ends by itself within --minutes, a held-out evaluation included; the next one with the same --state goes on.
--budget-minutes is how long training takes in all calls together: lengths and learning rate follow its share that is
gone (--steps: the share of steps instead, and the run is exactly repeatable on a CPU). --resume: where a state lies
if --state has none; --out is such a folder. Both are written every two minutes, whole or not at all (--state) and
file by file (--out):

    adapter.safetensors   factors, bf16, by layer; rope_theta, scale and context in its metadata (tuned.py reads it)
    log.jsonl             a line every --log-every steps, one a call's evaluation
    weights, first, second .safetensors, state.json      fp32 factors, Adam's moments, where training stands

There is no other state: step i's rows and text follow from the seed and i, and nothing is dropped out at random.

RoPE base 5e5: the smallest round one with which no dimension has turned further at 22,528 tokens than any had at the
8,192 that the model has seen (of those that do not turn full circle in them): 1e5 * 2.75^(ln 1e5 / ln 1304) = 5.1e5.
A larger one moves short distances further from what the model knows. Before training, nats a token of news text at
1-2K, 3-4K, 11-12K and 13-14K tokens: 2.68, 2.33, 3.77, 7.22 with the model's own 1e5; 2.74, 2.48, 2.72, 3.14 with
5e5; 2.83, 2.63, 3.00, 3.39 with 1e6.

What keeps text as it was: every fourth step, KL of the base (own RoPE base) to the adapted model on plain text.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import pathlib
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import generated  # noqa: E402
from batches import TASKS, Ahead, Batch, Later, text_rows  # noqa: E402
from chat import Chat  # noqa: E402
from evaluate import MOST, answers, device_of, scored  # noqa: E402
from lora_llama import Adapter, Llama  # noqa: E402

RANK, SCALE, ROPE_THETA = 16, 2.0, 5e5
# Few of them: cuDNN plans each shape once.
LENGTHS = (128, 192, 256, 384, 512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 20480, 22528)
# Until this share of training, rows of at most that share of --longest.
PHASES = ((0.12, 4096 / 22528), (0.35, 8192 / 22528), (0.65, 16384 / 22528), (1.0, 1.0))
WARM_UP, LAST_RATE, CLIP = 0.02, 0.05, 1.0
TEXT_EVERY, TEXT_ROWS, TEXT_LENGTH, TEXT_PLACES, TEXT_WEIGHT = 4, 2, 2048, 512, 1.0
ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
SAVE_SECONDS, MARGIN_SECONDS = 120, 15
H100_TOKENS_A_SECOND = {4096: 180e3, 8192: 140e3, 22528: 75e3}  # predicted on paper


@dataclass
class Standing:
    """Where training stands, over all calls; `seconds` of training alone."""
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    log: list[dict] = field(default_factory=list)


class Schedule:
    """What a step does, by the share of training that is gone."""

    def __init__(self, args: argparse.Namespace, standing: Standing) -> None:
        self._args, self._standing = args, standing

    def share(self, step: int) -> float:
        args = self._args
        return min(1.0, step / args.steps if args.steps else self._standing.seconds / (60 * args.budget_minutes))

    def rate(self, step: int) -> float:
        share = self.share(step)
        cosine = LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * share))
        return self._args.rate * cosine * min(1.0, (share + 1e-4) / WARM_UP)

    def shape(self, step: int) -> tuple[int, int]:
        """(rows, length): lengths from a quarter of the phase's longest on, and in every seventh step any of them."""
        draw = random.Random(f"shape/{self._args.seed}/{step}")
        longest = self._args.longest * next(part for until, part in PHASES if self.share(step) <= until)
        shortest = self._args.shortest if draw.random() < 1 / 7 else max(self._args.shortest, longest / 4)
        found = [length for length in LENGTHS if shortest <= length <= longest] or [self._args.shortest]
        length = draw.choice(found)
        return max(1, self._args.tokens // length), length


def save(folder: pathlib.Path, adapter: Adapter, adam: torch.optim.AdamW, standing: Standing, args: argparse.Namespace
         ) -> None:
    """All files of the state, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    named = dict(adapter.named_parameters())
    moments = {which: {name: adam.state[p][which].cpu() for name, p in named.items() if p in adam.state}
               for which in ("exp_avg", "exp_avg_sq")}
    about = {"scale": str(SCALE), "rank": str(RANK), "rope_theta": str(ROPE_THETA), "context": str(args.longest + 2048),
             "step": str(standing.step), "tokens": str(standing.tokens)}
    where = {"step": standing.step, "tokens": standing.tokens, "seconds": standing.seconds, "skipped": standing.skipped,
             "adam_steps": int(max((float(s["step"]) for s in adam.state.values()), default=0)), "seed": args.seed}

    def put(name: str, write: Callable[[pathlib.Path], object]) -> None:
        write(folder / f"{name}.new")
        os.replace(folder / f"{name}.new", folder / name)

    put("weights.safetensors", lambda path: save_file({n: p.detach().cpu() for n, p in named.items()}, path))
    put("first.safetensors", lambda path: save_file(moments["exp_avg"], path))
    put("second.safetensors", lambda path: save_file(moments["exp_avg_sq"], path))
    put("adapter.safetensors", lambda path: save_file(adapter.tensors(), path, metadata=about))
    put("log.jsonl", lambda path: path.write_text("".join(json.dumps(line) + "\n" for line in standing.log)))
    put("state.json", lambda path: path.write_text(json.dumps(where) + "\n"))


def save_whole(folder: pathlib.Path, *state: object) -> None:
    """As save(), but all files or none: a call that is killed here leaves the state before, as `.old` at worst."""
    new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    shutil.rmtree(new, ignore_errors=True)
    save(new, *state)  # type: ignore[arg-type]
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)


def load(folders: list[pathlib.Path], adapter: Adapter, adam: torch.optim.AdamW, seed: int) -> Standing:
    """The state of the first folder that has one; else the beginning. Errors: ValueError, the state of another seed."""
    folder = next((f for f in folders if (f / "state.json").exists()), None)
    if folder is None:
        return Standing()
    where = json.loads((folder / "state.json").read_text())
    if where["seed"] != seed:
        raise ValueError(f"{folder}: the state of seed {where['seed']}; --seed is {seed}")
    weights, first, second = (load_file(folder / f"{name}.safetensors") for name in ("weights", "first", "second"))
    with torch.no_grad():
        for name, p in adapter.named_parameters():
            p.copy_(weights[name])
            if name in first:
                steps = torch.tensor(float(where["adam_steps"]), device=p.device if adam.defaults["fused"] else "cpu")
                adam.state[p] = {"step": steps, "exp_avg": first[name].to(p.device),
                                 "exp_avg_sq": second[name].to(p.device)}
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    print(f"goes on from {folder}: step {where['step']}, {where['seconds']:.0f} s", flush=True)
    return Standing(where["step"], where["tokens"], where["seconds"], where["skipped"], log)


class Trainer:
    """Steps of one adapter. Not reentrant."""

    def __init__(self, llama: Llama, adapter: Adapter, chat: Chat, args: argparse.Namespace) -> None:
        self._llama, self.adapter, self._chat, self._args = llama, adapter, chat, args
        self.adam = torch.optim.AdamW(adapter.parameters(), lr=args.rate, betas=(0.9, 0.98), weight_decay=0.0,
                                      fused=llama.device.type == "cuda")
        positions = args.longest + MOST
        self.turn = llama.rope(ROPE_THETA, positions)
        self._base = llama.attention(None)
        self._base_turn = llama.rope(llama.shape.rope_theta, TEXT_LENGTH)
        self.parts = 1  # parts of a step's rows; twice as many where memory did not suffice

    def step(self, batch: Batch, number: int, rate: float) -> dict:
        """One update, or none where something is not finite. Sums by task: loss, tokens, right ones."""
        while True:
            try:
                sums = self._gradients(batch)
                break
            except torch.OutOfMemoryError:
                self.adam.zero_grad(set_to_none=True)
                torch.cuda.empty_cache()
                self.parts *= 2
                print(f"step {number}: out of memory; rows in {self.parts} parts from now on", flush=True)
                if self.parts > 2 * len(batch.ids):
                    return {"norm": math.nan, "sums": torch.zeros(3, len(TASKS)), "kl": None}
        kl = self._text_gradients(number) if number % TEXT_EVERY == 0 else None
        norm = float(torch.nn.utils.clip_grad_norm_(self.adapter.parameters(), CLIP))
        if math.isfinite(norm):
            for group in self.adam.param_groups:
                group["lr"] = rate
            self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        return {"norm": norm, "sums": sums.cpu(), "kl": kl}

    def _gradients(self, batch: Batch) -> Tensor:
        """[3, tasks]: -ln p, tokens, tokens that are said greedily."""
        device, length = self._llama.device, batch.ids.shape[1]
        sums = torch.zeros(3, len(TASKS), device=device)
        a_part = math.ceil(len(batch.ids) / self.parts)
        for begin in range(0, len(batch.ids), a_part):
            end = min(begin + a_part, len(batch.ids))
            own = (batch.places >= begin * length) & (batch.places < end * length)
            places, targets, weights, tasks = (torch.from_numpy(a[own]).to(device) for a in batch[1:5])
            ids = torch.from_numpy(batch.ids[begin:end]).to(device)
            hidden = self._llama.hidden(ids, self._llama.attention(self.adapter), self.turn)
            logits = self._llama.logits(hidden.flatten(0, 1)[places - begin * length])
            lost = F.cross_entropy(logits, targets, reduction="none")
            (lost * weights).sum().backward()
            with torch.no_grad():
                right = (logits.argmax(-1) == targets).float()
                sums.index_add_(1, tasks, torch.stack([lost.detach(), torch.ones_like(lost), right]))
        return sums

    def _text_gradients(self, number: int) -> float:
        """KL of the base to the adapted model, nats a token."""
        llama, length = self._llama, min(TEXT_LENGTH, self._args.longest)
        ids = torch.from_numpy(text_rows(self._chat, self._args.seed, number, TEXT_ROWS, length)).to(llama.device)
        chosen = random.Random(number).sample(range(ids.numel()), min(TEXT_PLACES, ids.numel()))
        places = torch.tensor(chosen, device=llama.device)
        with torch.no_grad():
            known = llama.logits(llama.hidden(ids, self._base, self._base_turn).flatten(0, 1)[places]).log_softmax(-1)
        hidden = llama.hidden(ids, llama.attention(self.adapter), self.turn)
        said = llama.logits(hidden.flatten(0, 1)[places]).log_softmax(-1)
        kl = F.kl_div(said, known, reduction="batchmean", log_target=True)
        (TEXT_WEIGHT * kl).backward()
        return float(kl.detach())


def fastest_attention(llama: Llama, length: int) -> tuple[str, bool]:
    """The fastest forward and backward at two rows of this length: (kernel, whether keys are repeated for it).
    One that fails, or says something else than flash with repeated keys, is not taken. RuntimeError: none works."""
    s, shape = llama.shape, (2, length)
    q = torch.randn(*shape, s.heads, s.head_dim, device=llama.device, dtype=llama.dtype).transpose(1, 2)
    k, v = torch.randn(2, *shape, s.kv_heads, s.head_dim, device=llama.device, dtype=llama.dtype).transpose(2, 3)
    known, best = None, (math.inf, "flash", True)
    for name, repeats in (("flash", True), ("flash", False), ("cudnn", False), ("cudnn", True)):
        try:
            tensors = [t.detach().requires_grad_() for t in (q, k, v)]
            times = []
            for _ in range(4):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                q1, k1, v1 = tensors
                if repeats:
                    k1, v1 = (t.repeat_interleave(s.heads // s.kv_heads, dim=1) for t in (k1, v1))
                with sdpa_kernel(ATTENTION[name]):
                    out = F.scaled_dot_product_attention(q1, k1, v1, is_causal=True, enable_gqa=not repeats)
                    found = [out, *torch.autograd.grad(out.float().square().sum(), tensors)]
                torch.cuda.synchronize()
                times.append(time.perf_counter() - begin)
            known = known or found
            apart = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, known))
            print(f"attention {name}{', keys repeated' if repeats else ''}: {1e3 * min(times):.1f} ms, "
                  f"apart {apart:.1e}", flush=True)
            if apart < 0.02 and min(times) < best[0]:
                best = (min(times), name, repeats)
        except RuntimeError as error:
            print(f"attention {name}{', keys repeated' if repeats else ''}: {str(error).splitlines()[0]}", flush=True)
    if best[0] == math.inf:
        raise RuntimeError("no attention kernel works")
    return best[1:]


@contextlib.contextmanager
def attention_kernel(llama: Llama, args: argparse.Namespace) -> Iterator[None]:
    """The kernel of causal attention in training: the fastest, or the one of --attention with keys repeated."""
    if llama.device.type == "cpu":
        yield
        return
    name, llama.repeats_kv = (fastest_attention(llama, min(16384, args.longest)) if args.attention == "auto"
                              else (args.attention, True))
    print(f"attention: {name}{', keys repeated' if llama.repeats_kv else ''}", flush=True)
    with sdpa_kernel(ATTENTION[name]):
        yield


def log_line(standing: Standing, found: list[dict], rate: float, seconds: float, tokens: int, lengths: list[int]
             ) -> dict:
    """Sums over the steps since the last line."""
    sums = torch.stack([one["sums"] for one in found]).sum(0)
    loss, right = sums[0] / sums[1], sums[2] / sums[1]
    by_task = {name: {"loss": round(float(loss[i]), 4), "right": round(float(right[i]), 3)}
               for i, name in enumerate(TASKS) if sums[1, i]}
    kl = [one["kl"] for one in found if one["kl"] is not None]
    return {"step": standing.step, "tokens": standing.tokens,
            "loss": round(float(sums[0].sum() / sums[1].sum().clamp(min=1)), 4), "tasks": by_task,
            "kl": round(statistics.fmean(kl), 4) if kl else None, "rate": rate,
            "norm": round(statistics.median(one["norm"] for one in found), 3), "skipped": standing.skipped,
            "length": round(statistics.fmean(lengths)), "tokens_a_second": round(tokens / seconds),
            "seconds": round(standing.seconds, 1)}


def train(trainer: Trainer, data: Ahead, standing: Standing, until: float, args: argparse.Namespace,
          keep: Callable[[], None]) -> None:
    """Steps until the clock says `until` (time.monotonic), or training is done."""
    schedule, found, lengths, tokens, spent = Schedule(args, standing), [], [], 0, 0.0
    saved, longest_step, last = time.monotonic(), 0.0, time.monotonic()
    stop_at = args.stop_at or math.inf
    while schedule.share(standing.step) < 1 and standing.step < stop_at and last + 1.5 * longest_step < until:
        batch, rate = data.take(standing.step, schedule.shape), schedule.rate(standing.step)
        done = trainer.step(batch, standing.step, rate)
        now = time.monotonic()
        seconds, last = now - last, now
        longest_step = max(0.9 * longest_step, seconds) if standing.step else 0.0  # the first one compiles
        standing.skipped += not math.isfinite(done["norm"])
        standing.step, standing.tokens, standing.seconds = (standing.step + 1, standing.tokens + batch.used,
                                                            standing.seconds + seconds)
        found.append(done)
        lengths.append(batch.ids.shape[1])
        tokens, spent = tokens + batch.used, spent + seconds
        if standing.step % args.log_every == 0:
            standing.log.append(log_line(standing, found, rate, spent, tokens, lengths))
            print(json.dumps(standing.log[-1]), flush=True)
            found, lengths, tokens, spent = [], [], 0, 0.0
        if now - saved > SAVE_SECONDS:
            keep()
            saved = last = time.monotonic()


def evaluation(trainer: Trainer, llama: Llama, chat: Chat, prompts: list[tuple[str, int, Later]],
               until: float) -> dict:
    """Percent by task and length, of held-out generated prompts; what there is no time for is left out."""
    found: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        weights = llama.attention(trainer.adapter)
    slowest = 0.0
    for task, length, made in prompts:
        begin = time.monotonic()
        if begin + slowest > until:
            print(f"evaluation: no time for {task} at {length} and what follows", flush=True)
            break
        try:
            some = made.result()
        except ValueError as error:  # the task does not fit into so few tokens
            print(f"evaluation: {task} at {length}: {error}", flush=True)
            continue
        said = answers(llama, weights, trainer.turn, chat, some)
        found.setdefault(str(length), {})[task] = round(scored(task, some, said), 1)
        slowest = max(slowest, time.monotonic() - begin)
        print(f"evaluation {length} {task}: {found[str(length)][task]} %, n {len(some)}; wanted {some[0].outputs}, "
              f"said {said[0]!r}", flush=True)
    return found


def predict(args: argparse.Namespace) -> None:
    """On paper, for an H100: phases with their tokens a second, and steps."""
    known, steps, begin = sorted(H100_TOKENS_A_SECOND.items()), 0.0, 0.0
    for until, part in PHASES:
        typical = 0.55 * part * args.longest
        speed = next((speed for length, speed in known if typical <= length), known[-1][1])
        steps += (until - begin) * 60 * args.budget_minutes * speed / args.tokens
        print(f"predicted for an H100: until {until:.0%} of training rows of up to {part * args.longest:.0f} tokens, "
              f"{speed:.0f} tokens/s", flush=True)
        begin = until
    print(f"predicted: {steps:.0f} steps of {args.tokens} tokens in {args.budget_minutes} minutes; activations "
          f"{args.tokens * 475e3 / 1e9:.0f} GB", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--state", type=pathlib.Path, default=pathlib.Path("/tmp/train_state"))
    parser.add_argument("--resume", type=pathlib.Path)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--budget-minutes", type=float, default=14.5)
    parser.add_argument("--steps", type=int, help="in all; lengths and rate then follow steps, not time")
    parser.add_argument("--stop-at", type=int, help="step after which this call ends")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--attention", choices=("auto", *ATTENTION), default="auto")
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=49152, help="a step")
    parser.add_argument("--shortest", type=int, default=1024)
    parser.add_argument("--longest", type=int, default=22528)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--evaluation-seconds", type=float, default=60.0)
    parser.add_argument("--evaluation-lengths", type=int, nargs="*", default=[16384, 4096, 8192])
    parser.add_argument("--evaluation-samples", type=int, default=8)
    return parser.parse_args()


def main() -> int:
    begin, args = time.monotonic(), arguments()
    chat, data = Chat(args.model), Ahead(args.model, args.seed, args.workers, ahead=32)
    device, dtype = device_of(args.device)
    llama = Llama(args.model, device, dtype)
    trainer = Trainer(llama, Adapter(llama.shape, RANK, SCALE, args.seed).to(device), chat, args)
    folders = [args.state, args.state.with_name(args.state.name + ".old"), *([args.resume] if args.resume else [])]
    standing = load(folders, trainer.adapter, trainer.adam, args.seed)

    def keep() -> None:
        for write, folder in ((save_whole, args.state), (save, args.out)):
            write(folder, trainer.adapter, trainer.adam, standing, args)

    predict(args)
    end = begin + 60 * args.minutes - MARGIN_SECONDS
    with attention_kernel(llama, args):
        schedule = Schedule(args, standing)
        data.prepare(standing.step, schedule.shape)
        prompts = data.held_out(generated.TASKS, args.evaluation_lengths, args.evaluation_samples)
        print(f"training begins after {time.monotonic() - begin:.0f} s", flush=True)
        train(trainer, data, standing, end - args.evaluation_seconds, args, keep)
        data.begin_held_out()
        keep()
    found = evaluation(trainer, llama, chat, prompts, end)
    standing.log.append({"step": standing.step, "evaluation": found, "samples": args.evaluation_samples,
                         "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"})
    keep()
    print(json.dumps(standing.log[-1]), flush=True)
    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
    data.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
