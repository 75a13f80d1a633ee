# SPDX-License-Identifier: Apache-2.0
"""Keys and values of a batch in kvstratad's pages: a sequence a row, a step a forward pass.

Rows differ in padding and in how much of their prompt the daemon holds. A column that is a row's padding, or is held
for it, is no token of the row's step: its attention output is zero, and nobody reads what becomes of it. Leading columns
that are so in all rows are not computed at all (`begin`), unless results of all columns are wanted. Threads: one at a
time.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

import kvstrata

from .attention import tag, tokens_first
from .columns import Columns, NotServed, new_columns
from .rows import ODD_POSITIONS, Prompts, Row, opened
from .series import entropies

if TYPE_CHECKING:
    from .engine import Attachment, Engine

Watch = Callable[[int, kvstrata.Step], None]


@dataclass
class Pass:
    """A forward pass. columns: its new ones, of which the first left_out are not computed; of the others mine
    [batch][computed], in host memory: tokens of the step; real: which of batch * computed they are, None: all; step
    None: every column is held or padding; attended: layers."""

    columns: Columns
    left_out: int
    step: kvstrata.Step | None
    mine: torch.Tensor
    real: torch.Tensor | None
    attended: set[int] = field(default_factory=set)


class PagesLayer(CacheLayerMixin):
    """A layer whose keys and values are in pages; the cache does what concerns all of them."""

    is_croppable = True
    is_sliding = False

    def __init__(self, cache: KvstrataCache, index: int) -> None:
        super().__init__()
        self._cache, self._index = weakref.proxy(cache), index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Pages are there."""

    @torch.compiler.disable
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
    and closed by close() or when the cache is collected. copy.deepcopy() forks it: both go on from what it has.

    rows: empty before the first pass. watch: called as watch(layer of the model, step) after each layer's attention.
    """

    def __init__(self, engine: Engine, plan: str | Sequence[str], attachment: Attachment) -> None:
        pages, windows = engine.served.pages_of, engine.served.windows
        super().__init__(layers=[PagesLayer(self, i) if i in pages else DynamicSlidingWindowLayer(windows[i])
                                 for i in range(len(pages) + len(windows))])
        self.rows: list[Row] = []
        self.watch: Watch | None = None
        self.attachment = attachment
        self._engine = engine
        self._plans = [plan] if isinstance(plan, str) else list(plan)
        self._needs = [self.session.plan_needs(text).flags for text in self._plans]
        self._prompts: Prompts | None = None
        self._pass: Pass | None = None
        self._known = torch.ones(0, 0, dtype=torch.bool)  # [batch][columns]: tokens, not padding

    @property
    def session(self) -> kvstrata.Session:
        """Its sequences' one."""
        return self.attachment.session

    @property
    def columns(self) -> int:
        """Columns of all passes that were committed, and those that an open one leaves out."""
        return self._known.shape[1] + (0 if self._pass is None else self._pass.left_out)

    @property
    def prompt_is_done(self) -> bool:
        """Whether a pass has committed the end of a prompt, so that a token was chosen."""
        return any(row.tokens >= len(row.prompt) for row in self.rows)

    # A batch begins, and ends

    @contextmanager
    def generating(self, prompts: Prompts, attachment: Attachment) -> Iterator[None]:
        """Passes inside are one generate()'s, on prompts that come maybe in chunks, with drafts, or repeated by row.
        attachment: of now, for sequences that it opens."""
        self.abort()  # drops a forward that failed in the middle
        self._prompts = prompts
        if not self.rows:
            self.attachment = attachment
        try:
            yield
        finally:
            self._prompts = None

    def close(self) -> None:
        """Closes its sequences. Harmless again; for another batch make another cache."""
        self.abort()
        for row in self.rows:
            row.sequence.close()
        self._forget()

    def drop(self) -> None:
        """As close(), without waiting for a daemon that does not answer: that is noted."""
        try:
            return self.close()
        except kvstrata.DeadlineExceeded:
            self.drop_aside()

    def drop_aside(self) -> None:
        """As drop(), of a daemon that has just not answered."""
        self._engine.link.note_silence()
        ended, self._pass = self._pass, None
        steps = [] if ended is None or ended.step is None else [ended.step.abort]
        self._engine.link.aside([*steps, *(row.sequence.close for row in self.rows)])
        self._forget()

    def reset(self) -> None:
        self.close()
        super().reset()

    def _forget(self) -> None:
        self.rows, self._known = [], torch.ones(0, 0, dtype=torch.bool)

    def __deepcopy__(self, memo: dict[int, Any]) -> KvstrataCache:
        """Sequences are forked; the pages that they have are shared. Inside a forward pass it is refused."""
        if self._pass is not None and self._pass.step is not None:
            raise RuntimeError("the cache is copied inside a forward pass; copy it when the pass is over")
        other = KvstrataCache(self._engine, self._plans, self.attachment)
        other._known = self._known
        other.rows = [row.fork() for row in self.rows]
        for layer, own in enumerate(self.layers):
            if not isinstance(own, PagesLayer):
                other.layers[layer] = copy.deepcopy(own, memo)
        return other

    def _open(self, first: Columns) -> None:
        prompts = first if self._prompts is None else self._prompts.over(first)
        if self._prompts is not None and not prompts.real[:, -1].all():
            raise NotServed("attention_mask ends with padding, and the next token would be the padding's; pad on the "
                            "left (tokenizer.padding_side = \"left\")")
        batch = len(prompts.ids)
        if not self._plans or batch % len(self._plans):
            raise ValueError(f"{len(self._plans)} plans for a batch of {batch} rows; give one, or one for each row")
        repeats = batch // len(self._plans)
        plans = [pair for pair in zip(self._plans, self._needs) for _ in range(repeats)]
        if self._prompts is None:
            self.attachment = self._engine.attachment()
        windows = bool(self._engine.served.windows)
        rows = list(opened(self.attachment, prompts, plans, windows, self._engine.warn_once))
        self._engine.verify(rows)
        self.rows, self._known = rows, torch.ones(batch, 0, dtype=torch.bool)

    # A forward pass

    def begin(self, arguments: Mapping[str, Any], last_wanted: int | None) -> int:
        """Begins a pass with these arguments of the model. last_wanted: outside generate(), how many last columns'
        results are wanted, None: all.

        How many leading columns nobody needs: the pass runs over the others, at least one.
        """
        self.abort()  # drops a forward that failed in the middle
        batch, new = arguments["input_ids"].shape
        known = self._known if self.rows else torch.ones(batch, 0, dtype=torch.bool)
        if len(known) != batch:
            raise ValueError(f"the batch has {batch} rows, its cache {len(known)}; make a cache for each batch")
        columns = new_columns(arguments, known, last_wanted if self._prompts is None else self._prompts.last_wanted)
        self._check(columns)
        if not self.rows:
            self._open(columns)
        for row in self.rows:
            if not row.done and row.tokens > len(row.prompt):  # drafts came with the prompt's end, and were cropped
                row.complete()
        mine = self._mine(columns)
        # Layers of transformers' own count columns as the mask does: they get all of them.
        keep_all = self._engine.served.windows or columns.last_wanted is None
        left_out = 0 if keep_all else min(_leading(mine), new - 1)
        self._pass = self._begin(columns, left_out, mine[:, left_out:], arguments["input_ids"].device)
        return left_out

    def _check(self, columns: Columns) -> None:
        """That the pass may go on what the cache has."""
        if self.rows and self._prompts is None:
            self._engine.require_same(self)
        if any(odd and not row.private for row, odd in zip(self.rows, columns.odd.tolist())):
            raise NotServed(f"{ODD_POSITIONS}; others may find what the cache has: begin another")

    def _mine(self, columns: Columns) -> torch.Tensor:
        """[batch][new]: tokens that are not there yet."""
        indices = columns.indices(self._known.sum(1))
        return columns.real & (indices >= torch.tensor([row.tokens for row in self.rows])[:, None])

    def _begin(self, columns: Columns, left_out: int, mine: torch.Tensor, device: torch.device) -> Pass:
        members = [(row.sequence, ids[own].numpy())
                   for row, ids, own in zip(self.rows, columns.ids[:, left_out:], mine) if own.any()]
        pages = self.attachment.device
        stream = torch.cuda.current_stream(pages) if pages.type == "cuda" else 0
        step = self.session.step(members, stream) if members else None
        return Pass(columns, left_out, step, mine, None if mine.all() else mine.flatten().nonzero()[:, 0].to(device))

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
        self._pass.attended.add(layer)
        if self.watch is not None:
            self.watch(layer, step)
        if real is not None:
            out = q.new_zeros(batch * new, heads, dim).index_copy_(0, real.to(q.device), out)
        return out.view(batch, new, heads, dim)

    def _lent(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch][heads][new][dim] as the open step takes it: a copy where it lies on another device than pages."""
        assert self._pass is not None
        return tokens_first(x, self._pass.real).detach().to(self.attachment.device)

    def commit(self, hidden: torch.Tensor) -> None:
        """The pass is over; hidden [batch][new][size] are its last states."""
        assert self._pass is not None
        if self._pass.step is not None:
            self._require_attended(self._pass.attended)
        ended, self._pass = self._pass, None
        if ended.step is not None:
            ended.step.end()
        self._known = torch.cat([self._known, ended.columns.real], 1)
        for row, states, own in zip(self.rows, hidden, ended.mine):
            row.advance(states[own], self._engine.head)
            if not row.done and row.tokens == len(row.prompt):
                row.complete()
            if row.done:
                self._engine.settled(row.sequence)

    def _require_attended(self, layers: set[int]) -> None:
        """Else a layer has attended the new columns alone, and the answer is wrong."""
        if missing := sorted(self._engine.served.pages_of.keys() - layers):
            self.abort()
            raise RuntimeError(f"layers {missing} did not attend through kvstrata; the model's attention implementation "
                               "was changed, or a layer replaced: enable() it again")

    def abort(self) -> None:
        """Ends an open pass without committing it. Harmless without one."""
        ended, self._pass = self._pass, None
        if ended is not None and ended.step is not None:
            ended.step.abort()

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
        kept = self.columns + tokens_to_remove
        for row, removed in zip(self.rows, self._known[:, kept:].sum(1).tolist()) if tokens_to_remove else []:
            row.sequence.truncate(row.tokens - removed)
            row.tokens -= removed
        self._known = self._known[:, :kept]
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
        self._known = self._known[parents]


def _leading(mine: torch.Tensor) -> int:
    """How many leading columns [batch][new] are no row's."""
    computed = mine.any(0)
    return int(computed.int().argmax()) if computed.any() else mine.shape[1]
