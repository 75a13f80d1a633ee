# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler over blocks of planes without a GPU: what each row of each step attends.

A key is its token's number. BlockPlanes is played by what remembers which tokens are sealed in which block and which lie
in which slot. What a step fills is sealed when the next one begins, as late as can be.
"""

from __future__ import annotations

import ctypes
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvstrata_vllm import planes_attention, planes_rows
from kvstrata_vllm.planes_rows import PlanesRows

BLOCK, DIM, SLOTS, BLOCKS, MOST = 64, 64, 6, 18, 700
NAME = "model.layers.0.self_attn.attn"


def ints(address: int, *shape: int) -> np.ndarray:
    """int32 at an address, copied."""
    count = int(np.prod(shape))
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address)).reshape(shape).copy()


class Planes:
    """In BlockPlanes' place."""

    def __init__(self, plan: str, shape: Any) -> None:
        self.blocks: dict[int, list[int]] = {}
        self.slots: dict[int, dict[int, int]] = {}  # tokens by position
        self.filled: dict[int, list[int]] = {}
        self.attended: dict[int, list[int]] = {}  # by row, of this step
        assert shape.block_stride == BLOCK * 136 and shape.slots == shape.max_rows == SLOTS

    def bind(self, layers: list[int], workspace: int) -> None:
        pass

    def begin(self, *, blocks: int, blocks_of_row: int, tokens: int, query_starts: int, slots: int, in_full: int | None,
              rows: int, decodes: int, stream: int) -> None:
        self.blocks.update(self.filled)
        self.filled, self.attended = {}, {}
        self.table, self.tokens = ints(blocks, rows, blocks_of_row), ints(tokens, rows)
        self.starts, self.of_rows, self.decodes = ints(query_starts, rows + 1), ints(slots, rows), decodes

    def decode(self, layer: int, q: Any, k: Any, v: Any, out: int, rows: int, stream: int) -> None:
        assert rows == self.decodes
        for row in range(rows):
            if self.of_rows[row] >= 0:
                self.attended[row] = self._attended(row, int(self.tokens[row]) - 1, self._numbers(k, row, 1))

    def prompt(self, layer: int, row: int, before: int, count: int, k: Any, v: Any, all_k: int, all_v: int, stream: int
               ) -> None:
        assert before + count == self.tokens[row] and count == self.starts[row + 1] - self.starts[row]
        found = self._attended(row, before, self._numbers(k, 0, count))
        there = np.ctypeslib.as_array((ctypes.c_uint16 * (len(found) * DIM)).from_address(all_k)).reshape(-1, DIM)
        there[:, 0] = found

    @staticmethod
    def _numbers(k: Any, first: int, count: int) -> list[int]:
        return [ctypes.c_uint16.from_address(k.address + k.stride * (first + i)).value for i in range(count)]

    def _attended(self, row: int, before: int, new: list[int]) -> list[int]:
        """All tokens of the row, as blocks and its slot have them; and what is full goes to blocks."""
        slot = self.slots.setdefault(int(self.of_rows[row]), {})
        sealed = (before + len(new) - 1) // BLOCK * BLOCK if len(new) == 1 else before // BLOCK * BLOCK
        tokens = [token for at in range(sealed // BLOCK) for token in self.blocks.get(int(self.table[row][at]), [-1] * BLOCK)]
        tokens += [slot.get(at, -1) for at in range(sealed, before)] + new
        slot.update(enumerate(new, before))
        for group in range(before // BLOCK, len(tokens) // BLOCK):
            self.filled[int(self.table[row][group])] = tokens[group * BLOCK:(group + 1) * BLOCK]
        return tokens


class Runner:
    """As vLLM's model runner V2 does it: a table of requests, and batches in which rows of one token come first."""

    def __init__(self, scheduler: Any, monkeypatch: Any) -> None:
        self._scheduler = scheduler
        self._index: dict[str, int] = {}
        self._tokens: dict[str, list[int]] = {}
        self._prompts: dict[str, int] = {}  # tokens of each that were there when it began, or began anew
        monkeypatch.setattr(planes_rows, "BlockPlanes", Planes)
        monkeypatch.setattr(planes_rows, "form_of", lambda plan, shape: SimpleNamespace(workspace_bytes=64,
                                                                                            lower_token_bytes=0))
        monkeypatch.setattr(planes_attention, "flash_attn_varlen_func", self._flash, raising=False)
        monkeypatch.setattr(PlanesRows, "_stream", lambda rows: 0)
        monkeypatch.setattr(PlanesRows, "_of_process", {})
        monkeypatch.setattr(PlanesRows, "_prompt", torch.zeros(2, MOST * DIM, dtype=torch.bfloat16))
        cache = torch.zeros(BLOCKS, 1, BLOCK, 136 // 2, dtype=torch.bfloat16)
        self.impl = object.__new__(planes_attention.PlanesImpl)
        self.impl.scale, self.impl.vllm_flash_attn_version, self.impl.batch_invariant_enabled = 0.1, 3, False
        limits = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=SLOTS),
                                 model_config=SimpleNamespace(max_model_len=MOST))
        shape = planes_rows.PlanesShape(1, 1, 1, DIM, "bf16")
        self.rows = PlanesRows("strata", shape, {NAME: SimpleNamespace(impl=self.impl, kv_cache=cache)}, limits,
                               torch.device("cpu"))
        self.hits = 0

    def step(self, output: Any) -> dict[str, list[int]]:
        """Does what was scheduled. The token that each row samples, if it does; AssertionError: a row attends what is not
        its request's."""
        for name in {*output.finished_req_ids, *(output.preempted_req_ids or ())}:
            self._index.pop(name, None)
        names = sorted(output.num_scheduled_tokens, key=output.num_scheduled_tokens.__getitem__)
        if not names:
            return {}
        for name in names:
            if name not in self._index:
                self._index[name] = min({*range(SLOTS)} - {*self._index.values()})
                self._tokens[name] = list(self._scheduler.requests[name].all_token_ids)
                self._prompts[name] = len(self._tokens[name])
                self.hits += self._before(name, output) > 0
        common, key = self._batch(names, output)
        builder = object.__new__(planes_attention.PlanesBuilder)
        builder.rows = self.rows
        metadata = builder.build(0, common)
        self._flashed: list[int] = []
        self.impl.forward(None, key, key, key, None, metadata, torch.empty_like(key))
        return self._sampled(names, common, metadata)

    def _before(self, name: str, output: Any) -> int:
        return self._scheduler.requests[name].num_computed_tokens - output.num_scheduled_tokens[name]

    def _batch(self, names: list[str], output: Any) -> tuple[CommonAttentionMetadata, torch.Tensor]:
        new = [output.num_scheduled_tokens[name] for name in names]
        ends = torch.tensor([self._before(name, output) + n for name, n in zip(names, new)], dtype=torch.int32)
        starts = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
        table = torch.zeros(len(names), MOST // BLOCK + 1, dtype=torch.int32)
        for row, name in enumerate(names):
            ids = self._scheduler.kv_cache_manager.get_block_ids(name)[0]
            table[row, :len(ids)] = torch.tensor(ids)
        numbers = [token for name, n, end in zip(names, new, ends.tolist()) for token in self._tokens[name][end - n:end]]
        key = torch.zeros(len(numbers), 1, DIM, dtype=torch.bfloat16)
        key.view(torch.int16)[:, 0, 0] = torch.tensor(numbers, dtype=torch.int16)
        prompts = [end - n < self._prompts[name] for name, n, end in zip(names, new, ends.tolist())]
        return CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts.clone(), seq_lens=ends, num_reqs=len(names),
            num_actual_tokens=len(numbers), max_query_len=max(new), max_seq_len=int(ends.max()), block_table_tensor=table,
            slot_mapping=torch.zeros(len(numbers)), is_prefilling=torch.tensor(prompts),
            seq_lens_cpu_upper_bound=ends.clone(), req_idx=np.array([self._index[name] for name in names])), key

    def _flash(self, *, k: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_k: int,
               causal: bool, **others: Any) -> None:
        assert causal and len(cu_seqlens_q) == len(cu_seqlens_k)
        assert max_seqlen_k == int((cu_seqlens_k[1:] - cu_seqlens_k[:-1]).max())
        for begin, end in zip(cu_seqlens_k.tolist(), cu_seqlens_k.tolist()[1:]):
            self._flashed.append(k.view(torch.int16)[begin:end, 0, 0].tolist())

    def _sampled(self, names: list[str], common: Any, metadata: Any) -> dict[str, list[int]]:
        attended = dict(self.rows._planes.attended)
        attended.update(zip((piece.row for pieces in metadata.prompts for piece in pieces.of_rows), self._flashed,
                            strict=True))
        sampled: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            end = int(common.seq_lens[row])
            assert attended[row] == self._tokens[name][:end], f"{name}, {end} tokens"
            sampled[name] = []
            if end == len(self._tokens[name]):  # the same tokens are answered alike
                sampled[name] = [random.Random(str(self._tokens[name][-20:])).randrange(10, 900)]
                self._tokens[name] += sampled[name]
        return sampled
