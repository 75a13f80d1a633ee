# SPDX-License-Identifier: Apache-2.0
"""The daemon's region as this process has it mapped, in rows of one engine.

A chunk is a row: the parts of all ranks side by side, or one part that all share. vLLM's worker copies between its
blocks and views of rows; what it reads of its own SharedOffloadRegion is here under the same names. Threads: one.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import torch
from kvstrata.chunks import ChunkLink


class Region:
    """link: of a worker; it is kept open as long as the region, and says at its end that nobody copies any more. rank:
    whose part of a row is this one's; part_bytes: of such a part."""

    def __init__(self, link: ChunkLink, rank: int, part_bytes: int) -> None:
        self.rank, self.cpu_page_size, self.page_size = rank, part_bytes, mmap.PAGESIZE
        self._link, self._memory = link, link.map()
        self._row_stride = link.welcome.row_bytes
        self.num_chunks = link.welcome.region_bytes // self._row_stride
        self.total_size_bytes = self.num_chunks * self._row_stride
        self._base: torch.Tensor | None = torch.frombuffer(self._memory, dtype=torch.int8)
        self._views: list[torch.Tensor] = []
        self._next, self._end = rank * part_bytes, (rank + 1) * part_bytes
        self._next_canonical = 0
        self.is_pinned = False
        self.pinned_addresses: list[int] = []

    def create_next_worker_view(self, tensor_page_size: int) -> torch.Tensor:
        """[chunk][tensor_page_size] bytes of this rank's part, behind the last view's."""
        view = self._view(self._next, tensor_page_size, self._end)
        self._next += tensor_page_size
        return view

    def create_next_canonical_view(self, tensor_page_size: int) -> torch.Tensor:
        """[chunk][tensor_page_size] bytes that all ranks share, behind the last view's."""
        view = self._view(self._next_canonical, tensor_page_size, self._row_stride)
        self._next_canonical += tensor_page_size
        return view

    def _view(self, begin: int, size: int, end: int) -> torch.Tensor:
        assert self._base is not None
        if begin + size > end:
            raise ValueError(f"{size} bytes of a tensor's chunk at {begin} do not fit into the {end} bytes that a row "
                             "has for it; report the model and its flags, and start with KVSTRATA_DISABLE=1")
        self._views.append(self._base.as_strided((self.num_chunks, size), (self._row_stride, 1), begin))
        return self._views[-1]

    def iter_worker_slot_ranges(self) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of this rank's part of each row, widened to whole pages."""
        for row in range(self.num_chunks):
            begin = row * self._row_stride + self.rank * self.cpu_page_size
            first = begin - begin % self.page_size
            last = -(-(begin + self.cpu_page_size) // self.page_size) * self.page_size
            yield first, last - first

    def cleanup(self) -> None:
        """Once no copy is under way: unpins, unmaps, and says so to the daemon."""
        from vllm.v1.kv_offload.cpu.host_register import host_unregister
        for address in reversed(self.pinned_addresses if self.is_pinned else ()):
            host_unregister(address)
        self.pinned_addresses, self.is_pinned = [], False
        self._views, self._base = [], None
        self._link.detach()
