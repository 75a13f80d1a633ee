# SPDX-License-Identifier: Apache-2.0
"""The worker of an engine on a CPU, where vLLM has none: copies its blocks to rows of the region, and back.

Which bytes of a block go where is the same as on a GPU. Stores run in order on one thread, loads on another; both
beside the engine. Threads: the engine's calls.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult

from .region import Region

_PATIENCE = 60.0  # seconds that a copy of memory may take at most


@dataclass(frozen=True)
class _Run:
    """Bytes of a block, and of its place in a row: [block][fragment][byte], [chunk][block of it][fragment][byte].
    writers: (how many ranks have these bytes, this one's number among them)."""

    blocks: torch.Tensor
    rows: torch.Tensor
    writers: tuple[int, int] = (1, 0)


class CpuCopies(OffloadingWorker):
    """kv_caches: vLLM's, in memory of the host. canonical: rows are as the references' mappings say."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: Region, canonical: bool) -> None:
        self._per_chunk, self._region = blocks_per_chunk, region
        caches = [cache.tensor.view(torch.int8) for cache in kv_caches.tensors]
        if canonical:
            sizes = [max(ref.mapping.canonical_page_size_bytes for group in kv_caches.group_data_refs for ref in group
                         if ref.tensor_idx == index) for index in range(len(caches))]
            views = [region.create_next_canonical_view(size * blocks_per_chunk) for size in sizes]
        else:
            sizes = [cache.page_size_bytes for cache in kv_caches.tensors]
            views = [region.create_next_worker_view(size * blocks_per_chunk) for size in sizes]
        self._groups = [[run for ref in refs for run in _runs(ref, caches[ref.tensor_idx], views[ref.tensor_idx],
                                                              sizes[ref.tensor_idx], blocks_per_chunk, canonical)]
                        for refs in kv_caches.group_data_refs]
        self._threads = {True: ThreadPoolExecutor(1, "kvstrata-store"), False: ThreadPoolExecutor(1, "kvstrata-load")}
        self._jobs: dict[int, Future[tuple[int, float]]] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self._submit(job_id, dst_spec, src_spec, store=False)

    def _submit(self, job_id: int, blocks: Any, chunks: Any, store: bool) -> bool:
        self._jobs[job_id] = self._threads[store].submit(self._copy, blocks, chunks.block_ids, store)
        return True

    def _copy(self, blocks: Any, chunks: Any, store: bool) -> tuple[int, float]:
        """(bytes, seconds)."""
        begin, copied, at, row = time.perf_counter(), 0, 0, 0
        for runs, size, index in zip(self._groups, blocks.group_sizes, blocks.block_indices, strict=True):
            if size == 0:
                continue
            places = torch.arange(index % self._per_chunk, index % self._per_chunk + size)
            rows = -(-(index % self._per_chunk + size) // self._per_chunk)
            of_chunk = torch.from_numpy(chunks[row:row + rows].astype("int64"))[places // self._per_chunk]
            of_block = torch.from_numpy(blocks.block_ids[at:at + size].astype("int64"))
            copied += sum(_copy_run(run, of_block, of_chunk, places % self._per_chunk, self._per_chunk, store)
                          for run in runs)
            at, row = at + size, row + rows
        return copied, time.perf_counter() - begin

    def get_finished(self) -> list[TransferResult]:
        over = [job for job, future in self._jobs.items() if future.done()]
        return [_result(job, self._jobs.pop(job)) for job in over]

    def wait(self, job_ids: set[int]) -> None:
        left = wait([future for job, future in self._jobs.items() if job in job_ids], _PATIENCE).not_done
        if left:
            raise TimeoutError(f"{len(left)} copies of blocks are not over after {_PATIENCE:g} s")

    def shutdown(self) -> None:
        """Waits for what is under way."""
        self.wait(set(self._jobs))
        for thread in self._threads.values():
            thread.shutdown(wait=False)
        self._groups = []
        self._region.cleanup()


def _result(job: int, future: Future[tuple[int, float]]) -> TransferResult:
    if future.exception() is not None:
        return TransferResult(job, False)
    return TransferResult(job, True, *future.result())


def _runs(ref: Any, cache: torch.Tensor, view: torch.Tensor, page: int, per_chunk: int, canonical: bool) -> list[_Run]:
    """page: bytes that a block has in a row."""
    if not canonical:
        return [_run(cache, view, page, per_chunk, (0, 0, ref.page_size_bytes, 1, 0, 0))]
    mapping = ref.mapping
    writers = mapping.num_writers, mapping.writer_index
    return [_run(cache, view, page, per_chunk, (run.local_offset, run.canonical_offset, run.fragment_size,
                                                run.num_fragments, run.local_stride, run.canonical_stride), writers)
            for run in mapping.runs]


def _run(cache: torch.Tensor, view: torch.Tensor, page: int, per_chunk: int, form: Sequence[int],
         writers: tuple[int, int] = (1, 0)) -> _Run:
    begin, begin_in_row, size, count, step, step_in_row = form
    blocks = cache.as_strided((cache.shape[0], count, size), (cache.stride(0), step, 1), cache.storage_offset() + begin)
    rows = view.as_strided((view.shape[0], per_chunk, count, size), (view.stride(0), page, step_in_row, 1),
                           view.storage_offset() + begin_in_row)
    return _Run(blocks, rows, writers)


def _copy_run(run: _Run, of_block: torch.Tensor, of_chunk: torch.Tensor, place: torch.Tensor, per_chunk: int,
              store: bool) -> int:
    """Bytes copied. Ranks that have the same bytes take turns in storing them."""
    if not store:
        run.blocks[of_block] = run.rows[of_chunk, place]
        return of_block.numel() * run.blocks[0].numel()
    writers, mine = run.writers
    if writers > 1:
        turn = (of_chunk * per_chunk + place) % writers == mine
        of_block, of_chunk, place = of_block[turn], of_chunk[turn], place[turn]
    run.rows[of_chunk, place] = run.blocks[of_block]
    return of_block.numel() * run.blocks[0].numel()
