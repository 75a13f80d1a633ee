"""KvstrataCache: a transformers cache whose full-attention layers live in kvstratad's pages.

A row of the batch is a sequence. The engine counts columns of the padded batch, a sequence its own tokens: left
padding is never stored. One forward pass is one step of all rows; hooks (enable.py) begin and end it.

Threads: one at a time, as a model has. What is dropped is closed when it is collected.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

import kvstrata

from .attention import CACHE
from .series import Row

if TYPE_CHECKING:
    from .enable import Engine


def as_array(x: torch.Tensor) -> Any:
    """A numpy view; bf16 as bit patterns."""
    x = x.detach()
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


class ServedLayer(CacheLayerMixin):
    """A layer whose rows are the daemon's."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: KvstrataCache, layer: int) -> None:
        super().__init__()
        self._cache, self._layer = cache, layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
               ) -> tuple[torch.Tensor, torch.Tensor]:
        self._cache.append(self._layer, key_states, value_states)
        setattr(key_states, CACHE, self._cache)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self._cache.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self._cache.close()

    def crop(self, *args: Any) -> None:
        """The cache crops all layers at once."""

    reorder_cache = batch_repeat_interleave = batch_select_indices = crop


class KvstrataCache(Cache):
    """columns: of the padded batch that are stored, as the engine counts them. held: of these, those that the daemon
    had when the cache was opened."""

    def __init__(self, engine: Engine, plan: str) -> None:
        model = engine.served
        super().__init__(layers=[ServedLayer(self, i) if i in engine.layer_of else
                                 DynamicSlidingWindowLayer(model.window) for i in range(engine.layers)])
        self.engine, self.plan = engine, plan
        self.columns = self.held = 0
        self.rows: list[Row] = []
        self._step: kvstrata.Step | None = None
        self._real: torch.Tensor | None = None  # [batch * new] of a padded pass: which are tokens
        self._pass: tuple[torch.Tensor, list[int]] | None = None

    # --- sequences ---

    def open(self, ids: torch.Tensor, mask: torch.Tensor | None, share: bool) -> None:
        """A sequence for each row of prompts [batch][columns]. share: skip the columns that the daemon holds of all
        rows; not where layers of the engine's own need them."""
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask[:, -ids.shape[1]:].bool()
        self.rows = [Row(self.engine, self.plan, row[keep].tolist(), share and not self.engine.served.window)
                     for row, keep in zip(ids, real)]
        pads = (~real).sum(1).tolist()
        self.columns = min(pad + row.sequence.held for pad, row in zip(pads, self.rows)) if share else 0
        if all(row.sequence.held == 0 for row in self.rows):
            self.columns = 0
        for pad, row in zip(pads, self.rows):
            row.keep(max(0, self.columns - pad))
        self.held = self.columns

    def close(self) -> None:
        """Gives all pages back; the cache may be opened again."""
        self.abort()
        for row in self.rows:
            row.sequence.close()
        self.rows, self.columns, self.held = [], 0, 0

    def abort(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.abort()

    # --- a forward pass ---

    def begin(self, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """ids [batch][new]: what the pass computes."""
        self.abort()  # of a pass that an exception ended
        if not self.rows:
            self.open(ids, mask, share=False)
        real = torch.ones_like(ids, dtype=torch.bool)
        if mask is not None and mask.dim() == 2:
            real = mask[:, -ids.shape[1]:].bool()
        self._real = None if bool(real.all()) else real.reshape(-1)
        members = [i for i in range(len(self.rows)) if bool(real[i].any())]
        tokens = [(self.rows[i].sequence, as_array(ids[i][real[i]].to(torch.int32))) for i in members]
        for i, (_, new) in zip(members, tokens):
            self.rows[i].extend(new.tolist())
        self._step = self.engine.session.step(tokens)
        self._pass = (real, members)

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if self._step is None:
            raise RuntimeError("the cache is used outside of its model's forward pass; call the model that kvstrata "
                               "was enabled for")
        served = self.engine.layer_of[layer]
        self._step.append(served, as_array(self._packed(key)), as_array(self._packed(value)))

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        batch, heads, new, dim = query.shape
        packed = self._packed(query)
        part = torch.empty(packed.shape, dtype=packed.dtype)
        self._step.attend(self.engine.layer_of[layer], as_array(packed), as_array(part))
        if self.engine.watch is not None:
            self.engine.watch(layer, self._step)
        if self._real is not None:
            out = part.new_zeros((batch * new, heads, dim))
            out[self._real] = part
            part = out
        return part.view(batch, new, heads, dim)

    def end(self, hidden: torch.Tensor) -> None:
        """hidden [batch][new][size]: the model's last states, for surprisals."""
        step, self._step = self._step, None
        real, members = self._pass
        step.end()
        self.columns += real.shape[1]
        for i in members:
            self.rows[i].committed(hidden[i][real[i]])

    def _packed(self, x: torch.Tensor) -> torch.Tensor:
        """[batch][heads][new][dim] -> [tokens][heads][dim]: a view where nothing is padded and batch or new is 1."""
        x = x.transpose(1, 2)
        if x.shape[0] == 1:
            x = x[0]
        elif x.shape[1] == 1:
            x = x[:, 0]
        else:
            x = x.reshape(-1, *x.shape[2:])
        return x if self._real is None else x[self._real]

    # --- what generate() does to caches ---

    def crop(self, tokens: int) -> None:
        """tokens < 0: takes back so many; else keeps so many columns, 0 all (5.23) ."""
        away = -tokens if tokens <= 0 else max(0, self.columns - tokens)
        for layer in self.layers:
            if not isinstance(layer, ServedLayer):
                layer.crop(tokens)
        if away == 0:
            return
        self.columns -= away
        for row in self.rows:
            row.keep(max(0, row.sequence.tokens - away))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._take(beam_idx.tolist())
        self._of_own_layers("reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._take([i for i in range(len(self.rows)) for _ in range(repeats)])
        self._of_own_layers("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._take(indices.tolist())
        self._of_own_layers("batch_select_indices", indices)

    def _take(self, parents: Items[int]) -> None:
        sequences = self.engine.session.reorder([row.sequence for row in self.rows], parents)
        self.rows = [self.rows[parent].continued_by(sequence) for parent, sequence in zip(parents, sequences)]

    def _of_own_layers(self, call: str, argument: Any) -> None:
        for layer in self.layers:
            if not isinstance(layer, ServedLayer):
                getattr(layer, call)(argument)
