# SPDX-License-Identifier: Apache-2.0
"""A prompt's answers under many plans, decoded side by side by transformers from a daemon's pages.

The prompt is computed once, under full attention. Then all plans are rows of one batch: each finds the prompt held, and
from its last token on every step chooses. So what differs between rows is the plan alone, and the model's own matrices
are read once for all of them. Each plan has two rows, one that is given the reference answer token by token, and one
that goes on with its own most likely token.
"""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from answer import COUNTED_STEPS, Answer
from kvstrata.daemon import Daemon
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kvstrata
import kvstrata_transformers

SETTLE_SECONDS = 600
GPU_POOL = ("--set", "pool.device=cuda", "--set", "pool.device_bytes=3GiB")


class ExactHead(torch.nn.Module):
    """The model's head in fp32, so that a loss is not rounded to half precision's steps."""

    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(head.weight.detach().float(), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden.float(), self.weight)


def _settle(sequence: kvstrata.Sequence) -> None:
    """Waits until workers have made all that the plan reads, longer than one call may take."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        try:
            return sequence.settle()
        except kvstrata.DeadlineExceeded:
            if time.monotonic() > deadline:
                raise


class Engine:
    """A model in transformers, and a daemon of its own. Threads: one at a time."""

    def __init__(self, folder: pathlib.Path, device: str, dtype: torch.dtype, socket: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
        if dtype != torch.float32:
            self.model.set_output_embeddings(ExactHead(self.model.get_output_embeddings()))
        self.context = self.model.config.max_position_embeddings
        self.stops = {self.tokenizer.eos_token_id, self.tokenizer.convert_tokens_to_ids("<|im_end|>")}
        kvstrata_transformers.enable(self.model, "full", tokenizer=self.tokenizer, socket=socket)

    def answers(self, ids: list[int], reference: list[int], plans: list[str], new_tokens: int) -> list[Answer]:
        """ids: the prompt, of which the last token is the first that is decoded by plans. new_tokens: of the greedy
        answers at most; 0: none are decoded."""
        with contextlib.closing(self._hold(ids[:-1], plans)), \
             contextlib.closing(kvstrata_transformers.cache(self.model, plans)) as cache:
            self.forward(cache, [ids[:-1]] * len(plans))
            for row in cache.rows:
                _settle(row.sequence)
            decoding = Decoding(self, cache, [Answer(row.sequence.plan) for row in cache.rows], reference)
            decoding.run(ids[-1], new_tokens)
            return decoding.answers

    def parted_from_plain(self, ids: list[int], said: list[int]) -> tuple[int, float] | None:
        """Where plain transformers, greedily behind the same prompt, says another token than `said`, and by how many
        logits it prefers its own; None: nowhere."""
        cache = DynamicCache()
        for i, token in enumerate(said):
            logits = self.forward(cache, [ids if i == 0 else [said[i - 1]]])[0]
            best = int(logits.argmax())
            if best != token:
                return i, float(logits[best] - logits[token])
        return None

    def _hold(self, ids: list[int], plans: list[str]) -> Any:
        """An open cache that has the prompt, and what plans need of the model."""
        with contextlib.closing(kvstrata_transformers.cache(self.model)) as bare:
            surprised = [plan for plan in plans if kvstrata.Need.SURPRISAL in bare.session.plan_needs(plan).flags]
        held = kvstrata_transformers.cache(self.model, surprised[0] if surprised else "full")
        self.forward(held, [ids])
        return held

    def forward(self, cache: Any, rows: list[list[int]]) -> torch.Tensor:
        """fp32 logits [rows][vocabulary] behind each row's last token."""
        with torch.no_grad():
            ids = torch.tensor(rows, device=self.model.device)
            return self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()


class Decoding:
    """Decodes behind complete prompts. Row 2 i is given the reference under plan i, row 2 i + 1 goes on alone."""

    def __init__(self, engine: Engine, cache: Any, answers: list[Answer], reference: list[int]) -> None:
        self.answers = answers
        self._engine, self._cache, self._reference = engine, cache, reference

    def run(self, first: int, new_tokens: int) -> None:
        n = len(self.answers)
        copies = 2 if new_tokens else 1
        self._cache.batch_repeat_interleave(copies)
        fed = torch.full((n, copies), first)
        for i, token in enumerate(self._reference):
            with self._counted(copies) if i < COUNTED_STEPS else contextlib.nullcontext():
                logits = self._engine.forward(self._cache, fed.view(-1, 1).tolist()).view(n, copies, -1)
            self._note(logits[:, 0], token)
            fed[:, 0] = token
            if copies == 2:
                fed[:, 1] = logits[:, 1].argmax(-1).cpu()
                self._say(list(range(n)), fed[:, 1].tolist())
        for answer, row in zip(self.answers, self._cache.rows[::copies]):
            answer.status = row.sequence.status
        if copies == 2:
            self._go_on(fed[:, 1].tolist(), new_tokens)

    def _go_on(self, fed: list[int], new_tokens: int) -> None:
        """The greedy rows that are neither at their end nor the reference itself, until there are none."""
        rows = list(range(len(self.answers)))  # the plan of each row of the cache
        places = [2 * i + 1 for i in rows]     # rows of the cache that stay
        for _ in range(len(self._reference), new_tokens):
            stay = [k for k, i in enumerate(rows) if not self._ended(self.answers[i])]
            if not stay:
                return
            if len(stay) < len(self._cache.rows):
                self._cache.batch_select_indices(torch.tensor([places[k] for k in stay]))
            rows, fed = [rows[k] for k in stay], [fed[k] for k in stay]
            places = list(range(len(rows)))
            fed = self._engine.forward(self._cache, [[token] for token in fed]).argmax(-1).tolist()
            self._say(rows, fed)

    def _ended(self, answer: Answer) -> bool:
        return answer.said[-1] in self._engine.stops or answer.said == self._reference

    def _say(self, rows: list[int], tokens: list[int]) -> None:
        for i, token in zip(rows, tokens):
            if not (self.answers[i].said and self.answers[i].said[-1] in self._engine.stops):
                self.answers[i].said.append(token)

    def _note(self, logits: torch.Tensor, token: int) -> None:
        """logits [plans][vocabulary], of the reference's next token."""
        log_p = torch.log_softmax(logits.double(), -1)
        kl = (log_p[0].exp() * (log_p[0] - log_p)).sum(-1)
        best = logits.argmax(-1).cpu()
        for answer, nats, far, said in zip(self.answers, (-log_p[:, token]).tolist(), kl.tolist(), best.tolist()):
            answer.nats.append(nats)
            answer.kl.append(far)
            answer.right &= said == token

    @contextlib.contextmanager
    def _counted(self, copies: int) -> Iterator[None]:
        """What the rows that are given the reference read in this step, as a share of the counted steps."""
        steps = min(COUNTED_STEPS, len(self._reference))
        served = self._engine.model.config
        lists = served.num_hidden_layers * served.num_key_value_heads * steps

        def add(layer: int, step: kvstrata.Step) -> None:
            for i, answer in enumerate(self.answers):
                cost = step.cost(copies * i)
                answer.rows += (cost.rows + cost.coarse_rows) / lists
                answer.attend_bytes += cost.attend_bytes / steps
                answer.select_bytes += cost.select_bytes / steps

        self._cache.watch = add
        yield
        self._cache.watch = None


@contextlib.contextmanager
def engine(folder: pathlib.Path, device: str, dtype: str | None = None) -> Iterator[Engine]:
    """dtype: bf16 or fp32; None is bf16 on a GPU, fp32 on a CPU."""
    on_gpu = device.startswith("cuda")
    exact = dtype == "fp32" if dtype else not on_gpu
    with Daemon(*(GPU_POOL if on_gpu else ())) as daemon:
        made = Engine(folder, device, torch.float32 if exact else torch.bfloat16, daemon.socket)
        yield made
        kvstrata_transformers.disable(made.model)
