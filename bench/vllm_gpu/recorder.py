# SPDX-License-Identifier: Apache-2.0
"""Bytes behind a load against bytes stored: records what each store takes of the blocks, and compares each load with it.

    vllm.LLM(..., worker_extension_cls="recorder.Recorder")         with KVSTRATA_RECORDS=FOLDER

vLLM imports this in each worker. What a store is about to copy is summed, page by page, and written to the folder
before the copy begins, so that a killed process leaves it, too. A load's blocks are summed when it has ended, and
compared with the last store of these chunks, whoever made it. With a canonical layout sums are of single heads, so that
engines of other numbers of ranks are compared. Summing waits for the GPU: not for timing.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

from kvstrata_vllm.spec import KvstrataSpec
from kvstrata_vllm.transfers import Transfers
from vllm.v1.kv_offload.base import TransferResult


class _Pages:
    """Pages of a worker. heads: the whole model's, where each is summed by itself."""

    def __init__(self, spec: Any, kv_caches: Any) -> None:
        self._per_chunk = spec.blocks_per_chunk
        parallel = spec.config.parallel
        heads = int(os.environ.get("KVSTRATA_RECORDS_HEADS", "0")) if spec.config.canonical_layout else 0
        self._parts = max(1, heads // parallel.world_size)
        self._names = [f"head {parallel.rank * self._parts + i}" for i in range(self._parts)] if heads else [
            "" if spec.replicated_layout else f"rank {parallel.rank}"]
        caches = [cache.tensor for cache in kv_caches.tensors]
        self._groups = [[(caches[ref.tensor_idx], ref.page_size_bytes) for ref in refs]
                        for refs in kv_caches.group_data_refs]

    def sums(self, blocks: Any, chunks: Any) -> Iterator[tuple[str, str]]:
        """Names of pages, and sums of what lies in the blocks now, for vLLM's two specs of a copy."""
        at = row = 0
        for refs, size, first in zip(self._groups, blocks.group_sizes, blocks.block_indices, strict=True):
            places = range(first % self._per_chunk, first % self._per_chunk + size)
            ids = blocks.block_ids[at:at + size].tolist()
            for number, (cache, length) in enumerate(refs):
                pages = cache.reshape(cache.shape[0], -1)[ids].cpu()
                for page, place in zip(pages.view(-1, pages.shape[-1]), places, strict=True):
                    chunk = chunks.block_ids[row + place // self._per_chunk]
                    name = f"{chunk}/{place % self._per_chunk}/{number}"
                    for part, bytes_of in zip(self._names, page[:length].chunk(self._parts), strict=True):
                        yield f"{name} {part}", hashlib.blake2b(bytes_of.numpy().tobytes(), digest_size=8).hexdigest()
            at, row = at + size, row + (-(-places.stop // self._per_chunk) if size else 0)


class _Records:
    """The folder's files: a line a store, [when, {page: sum}], and a line a load, what was counted. Of others as far as
    they have whole lines."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder, self._read = folder, {}
        self._file, self._found = (open(folder / f"{what}-{os.getpid()}.jsonl", "a") for what in ("stores", "loads"))
        self._last: dict[str, tuple[float, str]] = {}

    def add(self, sums: dict[str, str]) -> None:
        self._file.write(json.dumps([time.monotonic(), sums]) + "\n")
        self._file.flush()

    def found(self, **counts: int) -> None:
        self._found.write(json.dumps(counts) + "\n")
        self._found.flush()

    def last(self) -> dict[str, tuple[float, str]]:
        """By page: the last store of it, and its sum."""
        for path in self._folder.glob("stores-*.jsonl"):
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            self._read[path] = self._read.get(path, 0) + len(whole) + bool(whole)
            for line in whole.splitlines():
                when, sums = json.loads(line)
                for page, found in sums.items():
                    if self._last.get(page, (0.0, ""))[0] <= when:
                        self._last[page] = when, found
        return self._last


_pages: _Pages | None = None
_records = _Records(pathlib.Path(os.environ["KVSTRATA_RECORDS"]))
_loads: dict[int, tuple[Any, Any]] = {}
_counts = {"stores": 0, "loads": 0, "pages": 0, "wrong": 0, "unknown": 0}
_get_worker, _store, _load, _end = (KvstrataSpec.get_worker, Transfers.submit_store, Transfers.submit_load,
                                    Transfers._end)


def _worker_of(spec: Any, kv_caches: Any) -> Any:
    global _pages
    _pages = _Pages(spec, kv_caches)
    _counts.update(dict.fromkeys(_counts, 0))
    return _get_worker(spec, kv_caches)


def _stored(transfers: Any, job_id: int, blocks: Any, chunks: Any) -> bool:
    assert _pages is not None
    _records.add(dict(_pages.sums(blocks, chunks)))
    _counts["stores"] += 1
    return _store(transfers, job_id, blocks, chunks)


def _loading(transfers: Any, job_id: int, chunks: Any, blocks: Any, *others: Any, **named: Any) -> bool:
    _loads[job_id] = blocks, chunks
    return _load(transfers, job_id, chunks, blocks, *others, **named)


def _ended(transfers: Any, result: TransferResult) -> TransferResult:
    sound = result.success and result.job_id not in transfers.refused
    if (load := _loads.pop(result.job_id, None)) is not None and sound:
        assert _pages is not None
        known, found = _records.last(), dict(_pages.sums(*load))
        counts = {"loads": 1, "pages": len(found), "unknown": sum(page not in known for page in found),
                  "wrong": sum(page in known and known[page][1] != of for page, of in found.items())}
        _counts.update({name: _counts[name] + count for name, count in counts.items()})
        _records.found(**counts)
    return _end(transfers, result)


KvstrataSpec.get_worker = _worker_of
Transfers.submit_store, Transfers.submit_load, Transfers._end = _stored, _loading, _ended


class Recorder:
    """vLLM adds it to its workers."""

    def recorded(self) -> dict[str, int]:
        """Since the worker was made: stores and loads; pages that were loaded, of these wrong, and of nobody's store."""
        return dict(_counts)
