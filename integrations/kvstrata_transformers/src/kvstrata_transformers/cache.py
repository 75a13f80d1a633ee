# SPDX-License-Identifier: Apache-2.0
"""Keys and values of a batch in kvstratad's pages: a sequence a row, a step a forward pass.

transformers has one length for all rows, counted in columns of the padded batch; rows differ in padding and in how much
of their prompt the daemon holds. A column that is a row's padding, or is held for it, is no token of the row's step:
its attention output is zero, and nobody reads what becomes of it. Leading columns that are so in all rows are not
computed at all (`begin`). Threads: one at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

import kvstrata

from .attention import tag, tokens_first
from .series import entropies, surprisals

if TYPE_CHECKING:
    from .enable import Engine

Watch = Callable[[int, kvstrata.Step], None]


@dataclass
class Row:
    """A row of the batch. needs: its plan's; first: the column of its first token that is computed; tokens: committed;
    surprisal [prompt]: if the plan needs it."""

    sequence: kvstrata.Sequence
    needs: kvstrata.Need
    prompt: list[int]
    first: int
    tokens: int
    surprisal: npt.NDArray[np.float32] | None
    done: bool = False  # the prompt is complete, and the daemon knows


@dataclass
class Pass:
    """A forward pass. mine [batch][new], in host memory: tokens of the step; real: which of batch * new they are, None:
    all; step None: every column is held or padding."""

    step: kvstrata.Step | None
    mine: torch.Tensor
    real: torch.Tensor | None


class PagesLayer(CacheLayerMixin):
    """A layer whose keys and values are in pages; the cache does what concerns all of them."""

    is_croppable = True
    is_sliding = False

    def __init__(self, cache: KvstrataCache, index: int) -> None:
        super().__init__()
        self._cache, self._index = weakref.proxy(cache), index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Pages are there."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
               ) -> tuple[torch.Tensor, torch.Tensor]:
        self._cache.append(self._index, key_states, value_states)
        return tag(key_states, self._cache), value_states

    def get_seq_length(self) -> int:
        return self._cache.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1  # transformers' word for none

    def reset(self) -> None: ...

    def reorder_cache(self, beam_idx: torch.Tensor) -> None: ...

    def crop(self, tokens_to_remove: int) -> None: ...

    def batch_repeat_interleave(self, repeats: int) -> None: ...

    def batch_select_indices(self, indices: torch.Tensor) -> None: ...


class KvstrataCache(Cache):
    """From kvstrata_transformers.cache(); passed as generate()'s cache. Sequences are opened by the first forward pass,
    and closed by close() or when the cache is collected.

    rows: empty before the first pass. watch: called as watch(layer of the model, step) after each layer's attention.
    """

    def __init__(self, engine: Engine, plan: str | Sequence[str]) -> None:
        pages, windows = engine.served.pages_of, engine.served.windows
        super().__init__(layers=[PagesLayer(self, i) if i in pages else DynamicSlidingWindowLayer(windows[i])
                                 for i in range(len(pages) + len(windows))])
        self.rows: list[Row] = []
        self.columns = 0
        self.watch: Watch | None = None
        self.session = engine.session
        self._engine = engine
        self._plans = [plan] if isinstance(plan, str) else list(plan)
        self._needs = [self.session.plan_needs(text).flags for text in self._plans]
        self._prompts: tuple[torch.Tensor, torch.Tensor] | None = None
        self._pass: Pass | None = None

    # A batch begins, and ends

    def expect(self, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """The prompts [batch][columns] that the next passes bring, maybe in chunks, with drafts, or repeated by row."""
        self._prompts = ids, torch.ones_like(ids) if mask is None else mask

    def close(self) -> None:
        """Closes its sequences. Harmless again; for another batch make another cache."""
        self.abort()
        for row in self.rows:
            row.sequence.close()
        self.rows, self.columns = [], 0

    def reset(self) -> None:
        self.close()
        super().reset()

    def _open(self, ids: torch.Tensor, mask: torch.Tensor) -> None:
        """ids and mask in host memory."""
        ids, mask = self._whole_prompts(ids, mask)
        if not self._plans or len(ids) % len(self._plans):
            raise ValueError(f"{len(self._plans)} plans for a batch of {len(ids)} rows; give one, or one for each row")
        repeats = len(ids) // len(self._plans)
        for i, (row_ids, real) in enumerate(zip(ids, mask.bool())):
            plan, needs = self._plans[i // repeats], self._needs[i // repeats]
            prompt = row_ids[real].tolist()
            # What is held for a layer of ours is not there for a layer of transformers' own.
            known = [] if self._engine.served.windows else prompt
            only_reported = kvstrata.Need.SURPRISAL in needs
            sequence = self.session.open(self._engine.model, plan, known, only_reported=only_reported)
            padding = int(real.int().argmax())
            self.rows.append(Row(sequence, needs, prompt, padding + sequence.held, sequence.held,
                                 np.zeros(len(prompt), np.float32) if only_reported else None))

    def _whole_prompts(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The expected prompts, if this first pass is of them; else what it brings."""
        if self._prompts is None:
            return ids, mask
        whole, real = (x.to(ids.device).repeat_interleave(max(1, len(ids) // len(x)), 0) for x in self._prompts)
        n = min(ids.shape[1], whole.shape[1])
        pairs = ((whole, ids), (real.bool(), mask.bool()))
        same = all(torch.equal(a[:, :n], b[:, :n]) for a, b in pairs)
        return (whole, real) if same else (ids, mask)

    # A forward pass

    def begin(self, ids: torch.Tensor, mask: torch.Tensor | None) -> int:
        """Of new columns ids [batch][new]; mask [batch][all columns so far] is 0 where they are padding.

        How many leading columns nobody needs: the pass runs over the others, at least one.
        """
        self.abort()  # of a forward that failed in the middle
        batch, new = ids.shape
        if mask is not None and mask.dim() != 2:
            raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; kvstrata takes [batch][columns]")
        device, ids = ids.device, ids.cpu()  # once a pass: what belongs to the step is decided in host memory
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask[:, -new:].cpu().bool()
        if not self.rows:
            self._open(ids, real)
        if len(self.rows) != batch:
            raise ValueError(f"the batch has {batch} rows, its cache {len(self.rows)}; make a cache for each batch")
        for row in self.rows:
            if row.tokens > len(row.prompt):  # drafts came with the prompt's end, and have been cropped since
                self._complete(row)
        first = torch.tensor([row.first for row in self.rows])
        # Layers of transformers' own count columns as the mask does: they get all of them.
        unneeded = 0 if self._engine.served.windows else int(first.min()) - self.columns
        left_out = max(0, min(unneeded, new - 1))
        self.columns += left_out
        columns = torch.arange(self.columns, self.columns + new - left_out)
        self._pass = self._begin(ids[:, left_out:], real[:, left_out:] & (columns >= first[:, None]), device)
        return left_out

    def _begin(self, ids: torch.Tensor, mine: torch.Tensor, device: torch.device) -> Pass:
        members = [(row.sequence, row_ids[own].numpy())
                   for row, row_ids, own in zip(self.rows, ids, mine) if own.any()]
        pages = self._engine.device
        stream = torch.cuda.current_stream(pages) if pages.type == "cuda" else 0
        step = self.session.step(members, stream) if members else None
        return Pass(step, mine, None if mine.all() else mine.flatten().nonzero()[:, 0].to(device))

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v [batch][KV heads][new][dim]."""
        if self._pass is None:
            raise RuntimeError("no forward pass of an enabled model is open on this cache; enable() the model, and "
                               "call it, not its base_model")
        if self._pass.step is not None:
            self._pass.step.append(self._engine.served.pages_of[layer], *(self._lent(x) for x in (k, v)))

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q [batch][heads][new][dim]; gives [batch][new][heads][dim], zero where a column is not of the step."""
        assert self._pass is not None
        batch, heads, new, dim = q.shape
        step, real = self._pass.step, self._pass.real
        if step is None:
            return q.new_zeros(batch, new, heads, dim)
        lent = self._lent(q)
        out = step.attend(self._engine.served.pages_of[layer], lent, torch.empty(lent.shape, dtype=q.dtype,
                                                                                device=lent.device)).to(q.device)
        if self.watch is not None:
            self.watch(layer, step)
        if real is not None:
            out = q.new_zeros(batch * new, heads, dim).index_copy_(0, real.to(q.device), out)
        return out.view(batch, new, heads, dim)

    def _lent(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch][heads][new][dim] as the open step takes it: a copy where it lies on another device than pages."""
        assert self._pass is not None
        return tokens_first(x, self._pass.real).detach().to(self._engine.device)

    def commit(self, hidden: torch.Tensor) -> None:
        """The pass is over; hidden [batch][new][size] are its last states."""
        assert self._pass is not None
        ended, self._pass = self._pass, None
        if ended.step is not None:
            ended.step.end()
        self.columns += hidden.shape[1]
        for row, states, own in zip(self.rows, hidden, ended.mine):
            row.tokens += int(own.sum())
            if row.done:
                continue
            if row.surprisal is not None:
                self._note_surprisal(row, states[own])
            if row.tokens == len(row.prompt):
                self._complete(row)

    def abort(self) -> None:
        """Ends an open pass without committing it. Harmless without one."""
        ended, self._pass = self._pass, None
        if ended is not None and ended.step is not None:
            ended.step.abort()

    # Series

    def _note_surprisal(self, row: Row, states: torch.Tensor) -> None:
        """states[i] predicts the token behind its own."""
        assert row.surprisal is not None
        begin = row.tokens - len(states) + 1
        following = row.prompt[begin:row.tokens + 1]
        head = self._engine.head
        row.surprisal[begin:begin + len(following)] = surprisals(head, states[:len(following)], following)

    def _complete(self, row: Row) -> None:
        if row.done:
            return
        if row.surprisal is not None:
            begin = row.sequence.held + 1 if row.sequence.held else 0
            row.sequence.report(begin, surprisal=row.surprisal[begin:])
        row.sequence.prefill_done()
        row.done = True

    def report_entropy(self, logits: torch.Tensor) -> None:
        """logits [batch][positions][vocabulary] of the pass that was committed last; drafts are left out, because they
        may be taken back."""
        wanted = [i for i, row in enumerate(self.rows)
                  if kvstrata.Need.ENTROPY in row.needs and row.tokens > len(row.prompt)]
        if not wanted or logits.shape[1] != 1:
            return
        for i, entropy in zip(wanted, entropies(logits[wanted, -1])):
            self.rows[i].sequence.report(self.rows[i].tokens - 1, entropy=[entropy])

    # What generate() does to rows and columns

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last -tokens_to_remove columns; TRUNCATE_PROMPT inside a complete prompt."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}; a number of columns to take back is negative")
        for row in self.rows if tokens_to_remove else []:
            row.sequence.truncate(row.tokens + tokens_to_remove)
            row.tokens += tokens_to_remove
        self.columns += tokens_to_remove
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._take(beam_idx.tolist())
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._take([i for i in range(len(self.rows)) for _ in range(repeats)])
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._take(torch.arange(len(self.rows))[indices.cpu()].tolist())
        super().batch_select_indices(indices)

    def _take(self, parents: list[int]) -> None:
        """Row i becomes what row parents[i] was."""
        if not self.rows or parents == list(range(len(self.rows))):
            return
        sequences = self.session.reorder([row.sequence for row in self.rows], parents)
        self.rows = [replace(self.rows[parent], sequence=sequence) for parent, sequence in zip(parents, sequences)]
