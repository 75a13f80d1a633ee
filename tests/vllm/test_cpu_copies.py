# SPDX-License-Identifier: Apache-2.0
"""Which bytes an engine on a CPU copies: whole chunks and parts of them, groups, ranks side by side, canonical rows.
Against copies byte by byte. Without an engine or a daemon."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import torch  # noqa: E402
from kvstrata.chunks import Welcome  # noqa: E402
from kvstrata_vllm.cpu_copies import CpuCopies  # noqa: E402
from kvstrata_vllm.region import Region  # noqa: E402
from kvstrata_vllm.transfers import Transfers  # noqa: E402
from vllm.v1.kv_offload.base import (CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor,  # noqa: E402
                                     CanonicalPageMapping, CopyRun, GPULoadStoreSpec)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec  # noqa: E402

ROW, CHUNKS, BLOCKS, PER_CHUNK = 8192, 16, 20, 3
SEED = 20261128


class Link:
    """Memory in place of the daemon's."""

    def __init__(self) -> None:
        self.welcome, self.detached = Welcome(1, ROW * CHUNKS, ROW), False
        self.memory = mmap.mmap(-1, ROW * CHUNKS)

    def map(self) -> mmap.mmap:
        return self.memory

    def detach(self) -> None:
        self.detached = True


@pytest.fixture
def link() -> Iterator[Link]:
    print(f"seed {SEED}")
    torch.manual_seed(SEED)
    yield Link()


def caches(pages: list[int], groups: list[list[CanonicalKVCacheRef]]) -> CanonicalKVCaches:
    """Caches of random bytes; every other one lies in wider rows, as packed layouts have it."""
    tensors = []
    for number, page in enumerate(pages):
        wide = torch.randint(-128, 127, (BLOCKS, page + (32 if number % 2 else 0)), dtype=torch.int8)
        tensors.append(CanonicalKVCacheTensor(wide[:, :page], page))
    return CanonicalKVCaches(tensors, groups)


def wait_for(copies: Any, job: int) -> list[Any]:
    copies.wait({job})
    return copies.get_finished()


def test_whole_chunks_and_parts_of_two_groups(link: Link):
    """The first group begins within a chunk, and both end within one; a layer's page may be shorter than its block."""
    kv = caches([64, 96], [[CanonicalKVCacheRef(0, 64), CanonicalKVCacheRef(1, 80)], [CanonicalKVCacheRef(1, 96)]])
    region: Any = Region(link, rank=1, part_bytes=PER_CHUNK * 160)
    copies = CpuCopies(kv, PER_CHUNK, region, canonical=False)
    before = [cache.tensor.clone() for cache in kv.tensors]
    blocks = GPULoadStoreSpec([4, 9, 2, 7, 11, 3], group_sizes=[4, 2], block_indices=[2, 6])
    chunks = CPULoadStoreSpec([5, 12, 1])
    assert copies.submit_store(1, blocks, chunks)
    result, = wait_for(copies, 1)
    assert (result.job_id, result.success) == (1, True)
    memory = np.frombuffer(link.memory, np.int8).reshape(CHUNKS, ROW)
    part = PER_CHUNK * 160  # rank 1's
    places = [(0, 5, 2, 4), (0, 12, 0, 9), (0, 12, 1, 2), (0, 12, 2, 7), (1, 1, 0, 11), (1, 1, 1, 3)]
    for group, chunk, place, block in places:
        first = memory[chunk, part + place * 64:][:64]
        second = memory[chunk, part + PER_CHUNK * 64 + place * 96:][:96]
        if group == 0:
            assert np.array_equal(first, before[0][block].numpy())
        size = 80 if group == 0 else 96
        assert np.array_equal(second[:size], before[1][block, :size].numpy()) and (group or not second[size:].any())
    assert not memory[:, :part].any() and not memory[[0, 2, 3, 4], :].any()
    for cache in kv.tensors:
        cache.tensor.zero_()
    assert copies.submit_load(2, chunks, blocks)
    wait_for(copies, 2)
    for group, _, _, block in places:
        if group == 0:
            assert torch.equal(kv.tensors[0].tensor[block], before[0][block])
            assert torch.equal(kv.tensors[1].tensor[block, :80], before[1][block, :80])
        else:
            assert torch.equal(kv.tensors[1].tensor[block], before[1][block])
    assert not kv.tensors[0].tensor[[0, 1, 11, 3]].any()
    copies.shutdown()
    assert link.detached


def test_what_two_ranks_wrote_one_reads(link: Link):
    """Canonical rows: each rank has every other 8 bytes of one tensor, and both have all of another, which they take turns
    to write."""

    def mapping(rank: int) -> CanonicalPageMapping:
        return CanonicalPageMapping(64, 32, (CopyRun(0, 8 * rank, 8, 4, 8, 16),), 1, 0, True)

    both = CanonicalPageMapping(16, 16, (CopyRun(0, 0, 16, 1, 0, 0),), 2, 0, True)
    pages, copied = [], 0
    blocks = GPULoadStoreSpec([1, 2, 3, 4, 5, 6], group_sizes=[6], block_indices=[0])
    chunks = CPULoadStoreSpec([7, 3])
    shared = torch.randint(-128, 127, (BLOCKS, 16), dtype=torch.int8)
    for rank in range(2):
        turns = CanonicalPageMapping(both.canonical_page_size_bytes, 16, both.runs, 2, rank, True)
        kv = caches([32, 16], [[CanonicalKVCacheRef(0, 32, mapping(rank)), CanonicalKVCacheRef(1, 16, turns)]])
        kv.tensors[1].tensor.copy_(shared)
        pages.append(kv.tensors[0].tensor.clone())
        region: Any = Region(link, rank=rank, part_bytes=PER_CHUNK * 48)
        copies = CpuCopies(kv, PER_CHUNK, region, canonical=True)
        assert copies.submit_store(1, blocks, chunks)
        result, = wait_for(copies, 1)
        copied += result.transfer_size
    assert copied == 2 * 6 * 32 + 6 * 16
    one = CanonicalPageMapping(64, 64, (CopyRun(0, 0, 64, 1, 0, 0),), 1, 0, True)
    alone = CanonicalPageMapping(16, 16, both.runs, 1, 0, True)
    kv = caches([64, 16], [[CanonicalKVCacheRef(0, 64, one), CanonicalKVCacheRef(1, 16, alone)]])
    reader: Any = Region(link, rank=0, part_bytes=PER_CHUNK * 80)
    copies = CpuCopies(kv, PER_CHUNK, reader, canonical=True)
    assert copies.submit_load(1, chunks, blocks)
    wait_for(copies, 1)
    for block in range(1, 7):
        want = torch.stack([page[block].view(4, 8) for page in pages], dim=1).reshape(64)
        assert torch.equal(kv.tensors[0].tensor[block], want) and torch.equal(kv.tensors[1].tensor[block], shared[block])


def test_a_tensor_that_does_not_fit_is_refused(link: Link):
    region: Any = Region(link, rank=0, part_bytes=100)
    with pytest.raises(ValueError, match="do not fit .*KVSTRATA_DISABLE=1"):
        CpuCopies(caches([64], [[CanonicalKVCacheRef(0, 64)]]), PER_CHUNK, region, canonical=False)


class Copies:
    """That are told what to say."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.over: list[Any] = []

    def submit_store(self, job: int, *_: Any) -> bool:
        self.begun.append(job)
        if job == 13:
            raise RuntimeError("no stream")
        return True

    submit_load = submit_store

    def get_finished(self) -> list[Any]:
        over, self.over = self.over, []
        return over


def ended(transfers: Transfers) -> list[tuple[int, bool]]:
    return [(result.job_id, result.success) for result in transfers.get_finished()]


def test_copies_that_fail_end_as_successes_and_are_named():
    copies: Any = Copies()
    transfers, nothing = Transfers(copies), CPULoadStoreSpec([])
    transfers.refused.add(2)
    for job in (1, 2, 13):
        assert transfers.submit_store(job, nothing, nothing)
    assert transfers.submit_load(4, CPULoadStoreSpec([3, -1]), nothing)
    assert copies.begun == [1, 13]
    copies.over = [SimpleNamespace(job_id=1, success=False)]
    assert sorted(ended(transfers)) == [(1, True), (2, True), (4, True), (13, True)]
    assert transfers.failed == {1, 2, 4, 13} and not transfers.refused


def test_the_end_of_what_nobody_is_sure_of_is_not_said():
    copies: Any = Copies()
    transfers, nothing = Transfers(copies), CPULoadStoreSpec([])
    for job in (1, 2, 3):
        transfers.submit_load(job, nothing, nothing)
    transfers.unsure.update((1, 2))
    copies.over = [SimpleNamespace(job_id=job, success=True) for job in (1, 2, 3)]
    assert ended(transfers) == [(3, True)] and ended(transfers) == []
    transfers.unsure.clear()
    transfers.refused.add(2)
    assert ended(transfers) == [(1, True), (2, True)] and transfers.failed == {2}
