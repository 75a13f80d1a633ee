# SPDX-License-Identifier: Apache-2.0
"""Indexes of an engine's blocks against indexes made anew of the rows that lie there. Between steps, in the engine."""

from __future__ import annotations

from typing import Any

import torch


class IndexCheck:
    """Looks at the full blocks of running requests, which a plan chooses among."""

    def __init__(self, llm: Any) -> None:
        from kvstrata.block_attention import index_bytes
        from kvstrata_vllm.block_rows import BlockRows
        core = llm.llm_engine.engine_core.engine_core
        self._scheduler, self._rows = core.scheduler, next(iter(BlockRows._of_process.values()))
        self._size = self._rows._shape.block_tokens
        self._index_bytes = index_bytes(self._rows._plan, self._rows._shape)
        self.checked = self.stale = 0

    def check(self) -> None:
        """Counts blocks of layers that are looked at, and those whose index is another than a new one."""
        rows, (attention, audit) = self._rows, self._rows._living()
        audit.measure(rows._steps)  # what is asked of the last step's tables, before they become another's
        torch.cuda.synchronize()
        blocks = sorted({block for request in self._scheduler.running for block in self._full(request)})
        if not blocks:
            return
        ids = torch.tensor(blocks, dtype=torch.int32, device="cuda")
        attention.index(ids.data_ptr(), 0, rows._stream())  # what the last step completed
        before = self._indexes(ids)
        attention.index(ids.data_ptr(), len(ids), rows._stream())
        after = self._indexes(ids)
        self.checked += len(blocks) * len(before)
        self.stale += sum(int((a != b).any(dim=1).sum()) for a, b in zip(before, after, strict=True))

    def _full(self, request: Any) -> list[int]:
        group = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
        return list(group[:request.num_computed_tokens // self._size])

    def _indexes(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """A layer each: [blocks][bytes of an index], copied."""
        found = []
        for layer in self._rows._layers.values():
            cache = layer.kv_cache
            storage, stride = cache.untyped_storage(), cache.stride(0) * cache.element_size()
            first = cache.data_ptr() - storage.data_ptr() + cache[0].numel() * cache.element_size()
            view = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage, first, (len(cache), self._index_bytes),
                                                                        (stride, 1))
            found.append(view[ids.long()])
        return found
