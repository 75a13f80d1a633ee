# SPDX-License-Identifier: Apache-2.0
"""Sums of bytes: what a tree is, and that torch's operations make the same bits as xxhash."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash
from kvstrata.torch_tree_hash import sums_on_device, tensor_sums
from kvstrata.tree_hash import LEAF, Stopped, tree_sum, tree_sums

SIZES = (0, 1, 7, 8, 240, 241, 1024, LEAF - 1, LEAF, LEAF + 1, 3 * LEAF, 5 * LEAF + 13)


def _bytes(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("size", SIZES)
def test_a_tree_is_leaves_and_their_root(size: int):
    data = _bytes(size).tobytes()
    leaves = b"".join(xxhash.xxh3_128_digest(data[i:i + LEAF]) for i in range(0, size, LEAF))
    assert tree_sum(data) == xxhash.xxh3_128_digest(leaves + size.to_bytes(8, "little"))


@pytest.mark.parametrize("threads", [1, 3, None])
def test_threads_and_company_change_nothing(threads: int | None):
    buffers = [_bytes(size) for size in (*SIZES, 200 * LEAF + 5)]
    assert tree_sums(buffers, threads) == [tree_sum(buffer) for buffer in buffers]


def test_torch_makes_the_same_bits():
    """The road of GPUs, on this CPU: whole tensors, tails alone, many small ones in one piece, one above a piece."""
    flat = [torch.from_numpy(_bytes(size)) for size in (*SIZES, 1030 * LEAF + 9)]
    assert sums_on_device(flat) == tree_sums([tensor.numpy() for tensor in flat])


def test_torch_makes_the_same_bits_of_any_place_in_memory():
    whole = torch.from_numpy(_bytes(4 * LEAF + 64))
    flat = [whole[begin:begin + 2 * LEAF + 3] for begin in (0, 1, 4, 8, LEAF)]
    assert sums_on_device(flat) == [tree_sum(tensor.numpy()) for tensor in flat]


def test_a_tensor_is_its_elements_in_order():
    x = torch.arange(12.).view(3, 4)
    assert tensor_sums([x.t(), x[:, 1:3], x.to(torch.bfloat16), torch.tensor(2.5)]) == [
        tree_sum(np.ascontiguousarray(a)) for a in (
            x.numpy().T, x.numpy()[:, 1:3], x.to(torch.bfloat16).view(torch.uint16).numpy(), np.float32([2.5]))]
    with torch.inference_mode():
        made = torch.ones(5)
    assert tensor_sums([made, torch.nn.Parameter(torch.ones(5))]) == [tree_sum(np.ones(5, np.float32))] * 2


def test_every_byte_counts():
    data = _bytes(2 * LEAF + 100)
    sums = {tree_sum(data)}
    for place in (0, 1, LEAF - 1, LEAF, 2 * LEAF, 2 * LEAF + 99):
        data[place] ^= 1
        sums.add(tree_sum(data))
    assert len(sums) == 7


def test_whoever_asks_may_stop():
    with pytest.raises(Stopped):
        tree_sums([_bytes(100)], threads=1, stop=lambda: True)
