# SPDX-License-Identifier: Apache-2.0
"""Imported mode from Python: an engine's paged tensors in a memfd, sealed, acknowledged, and loaded again."""

from __future__ import annotations

import dataclasses
import fcntl
import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest
from toy import DIM, KV_HEADS, LAYERS, Toy

import kvstrata
from kvstrata.daemon import Daemon

BLOCKS, BLOCK_TOKENS = 8, 16


class Blocks:
    """An engine's tensors: rows [layer][keys, values][block][slot][head][dim] in one memfd."""

    def __init__(self) -> None:
        shape = (LAYERS, 2, BLOCKS, BLOCK_TOKENS, KV_HEADS, DIM)
        self.bytes = 4 * int(np.prod(shape))
        self.fd = os.memfd_create("blocks", os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.rows = np.frombuffer(mmap.mmap(self.fd, self.bytes), np.float32).reshape(shape)

    def tensor(self, layer: int, side: int) -> kvstrata.BlockTensor:
        memory = kvstrata.MemoryHandle(kvstrata.MemoryKind.MEMFD, self.bytes, self.fd)
        rows = self.rows[layer, side]
        address = rows.ctypes.data
        block_stride, slot_stride, head_stride, _ = rows.strides
        return kvstrata.BlockTensor(memory, address - self.rows.ctypes.data, kvstrata.DType.F32, BLOCKS, BLOCK_TOKENS,
                                    KV_HEADS, DIM, block_stride, slot_stride, head_stride, address)

    def put(self, toy: Toy, at: list[int]) -> None:
        for i, block in enumerate(at):
            part = slice(i * BLOCK_TOKENS, (i + 1) * BLOCK_TOKENS)
            self.rows[:, 0, block], self.rows[:, 1, block] = toy.k[:, part], toy.v[:, part]


@pytest.fixture
def toy(random: np.random.Generator) -> Toy:
    return Toy(random, 4 * BLOCK_TOKENS)


@pytest.fixture
def blocks() -> Iterator[Blocks]:
    made = Blocks()
    yield made
    os.close(made.fd)


@pytest.fixture
def linked(daemon: Daemon) -> Iterator[kvstrata.Session]:
    with kvstrata.attach(daemon.socket, client_name="pytest") as session:
        yield session


def register(session: kvstrata.Session, toy: Toy) -> kvstrata.Model:
    return session.register_model("lent", toy.digest, layers=LAYERS, query_heads=4, kv_heads=KV_HEADS, head_dim=DIM,
                                  page_tokens=BLOCK_TOKENS, dtype=kvstrata.DType.F32)


def lend(session: kvstrata.Session, toy: Toy, blocks: Blocks) -> kvstrata.Model:
    model = register(session, toy)
    for layer in range(LAYERS):
        session.register_tensors(model, layer, blocks.tensor(layer, 0), blocks.tensor(layer, 1))
    return model


def test_sealed_blocks_are_loaded_elsewhere(linked: kvstrata.Session, toy: Toy, blocks: Blocks):
    at, other = [5, 0, 7], [1, 2]
    with linked.open(lend(linked, toy, blocks), "full") as sequence:
        blocks.put(toy, at)
        sequence.seal(0, at, toy.ids[:3 * BLOCK_TOKENS])
        sequence.settle()
        assert sequence.acknowledged == 3 * BLOCK_TOKENS
        blocks.rows[:, :, other] = 0
        sequence.load(BLOCK_TOKENS, other)
        np.testing.assert_array_equal(blocks.rows[:, :, other], blocks.rows[:, :, at[1:]])
        np.testing.assert_array_equal(blocks.rows[1, 0, 1], toy.k[1, BLOCK_TOKENS:2 * BLOCK_TOKENS])


def test_a_session_that_owns_its_pages_goes_on_from_there(linked: kvstrata.Session, daemon: Daemon, toy: Toy,
                                                          blocks: Blocks):
    held = 3 * BLOCK_TOKENS
    with linked.open(lend(linked, toy, blocks), "full") as lender, kvstrata.attach(daemon.socket) as session:
        blocks.put(toy, [0, 1, 2])
        lender.seal(0, [0, 1, 2], toy.ids[:held])
        lender.settle()
        with session.open(register(session, toy), "full", toy.ids[:held + 1]) as sequence:
            assert sequence.held == held
            out = toy.feed(session, sequence, held, held + 1)
            for layer in range(LAYERS):
                np.testing.assert_allclose(out[layer][0], toy.expected(layer, held)[0], atol=1e-4)


def test_errors_name_the_field(linked: kvstrata.Session, toy: Toy, blocks: Blocks):
    model = register(linked, toy)
    good = blocks.tensor(0, 0)
    bad = dataclasses.replace(good, heads=KV_HEADS + 1)
    with pytest.raises(kvstrata.InvalidArgument, match="heads"):
        linked.register_tensors(model, 0, bad, good)
    with pytest.raises(kvstrata.InvalidArgument, match="offset is -4"):
        linked.register_tensors(model, 0, good, dataclasses.replace(good, offset=-4))
    memory = kvstrata.MemoryHandle(kvstrata.MemoryKind.CUDA_IPC, blocks.bytes, ipc=b"short")
    with pytest.raises(kvstrata.InvalidArgument, match="ipc has 5 bytes.*pass 64"):
        linked.register_tensors(model, 0, dataclasses.replace(good, memory=memory), good)
    with linked.open(lend(linked, toy, blocks), "full") as sequence:
        with pytest.raises(kvstrata.InvalidArgument, match="block ids are between"):
            sequence.seal(0, [-1], toy.ids[:BLOCK_TOKENS])
        with pytest.raises(kvstrata.InvalidArgument, match="first is -16"):
            sequence.load(-BLOCK_TOKENS, [0])
        with pytest.raises(kvstrata.KvstrataError, match="BLOCKS_OUT_OF_ORDER"):
            sequence.seal(BLOCK_TOKENS, [1], toy.ids[BLOCK_TOKENS:2 * BLOCK_TOKENS])


def test_the_remote_transport_has_no_block_calls(daemon: Daemon, toy: Toy, blocks: Blocks):
    with kvstrata.attach(daemon.socket, transport="remote") as session, pytest.raises(kvstrata.Unimplemented):
        lend(session, toy, blocks)


def own(toy: Toy, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """An engine's own memory, as vLLM's on a CPU: keys transposed in a block, values not: [layer][block][slot][head]
    [dim] by their strides."""
    keys = np.zeros((LAYERS, blocks, KV_HEADS, DIM, BLOCK_TOKENS), np.float32).transpose(0, 1, 4, 2, 3)
    values = np.zeros((LAYERS, blocks, KV_HEADS, BLOCK_TOKENS, DIM), np.float32).transpose(0, 1, 3, 2, 4)
    return keys, values


def lend_own(session: kvstrata.Session, toy: Toy, keys: np.ndarray, values: np.ndarray) -> kvstrata.Model:
    model = register(session, toy)
    for layer in range(LAYERS):
        session.register_tensors(model, layer, kvstrata.BlockTensor.of(keys[layer]),
                                 kvstrata.BlockTensor.of(values[layer]))
    return model


def test_an_engines_own_memory_is_copied(linked: kvstrata.Session, daemon: Daemon, toy: Toy):
    keys, values = own(toy, BLOCKS)
    held = 4 * BLOCK_TOKENS
    with linked.open(lend_own(linked, toy, keys, values), "full") as sequence:
        at = [6, 1, 3, 0]
        for i, block in enumerate(at):
            part = slice(i * BLOCK_TOKENS, (i + 1) * BLOCK_TOKENS)
            keys[:, block], values[:, block] = toy.k[:, part], toy.v[:, part]
        sequence.seal(0, at, toy.ids[:held])
        keys[:], values[:] = -1, -1  # they are the engine's again at once
        sequence.settle()
        assert sequence.acknowledged == held
        sequence.load(BLOCK_TOKENS, [2, 5])
        for block, i in ((2, 1), (5, 2)):
            part = slice(i * BLOCK_TOKENS, (i + 1) * BLOCK_TOKENS)
            np.testing.assert_array_equal(keys[:, block], toy.k[:, part])
            np.testing.assert_array_equal(values[:, block], toy.v[:, part])
        assert (keys[:, 0] == -1).all()
    with kvstrata.attach(daemon.socket) as session, session.open(register(session, toy), "full", [*toy.ids, 7]) as again:
        assert again.held == held


def test_more_than_is_staged_at_a_time(linked: kvstrata.Session, random: np.random.Generator):
    """Blocks of 12 MiB: five of them are staged, and later ones wait for the daemon."""
    heads, dim, tokens = 48, 256, 128
    model = linked.register_model("wide", f"wide:{random.integers(1 << 60)}", layers=1, query_heads=heads,
                                  kv_heads=heads, head_dim=dim, page_tokens=64, dtype=kvstrata.DType.F32)
    keys, values = random.standard_normal((2, 9, tokens, heads, dim), np.float32)
    want = keys.copy()
    linked.register_tensors(model, 0, kvstrata.BlockTensor.of(keys), kvstrata.BlockTensor.of(values))
    ids = random.integers(0, 1 << 30, 9 * tokens)
    with linked.open(model, "full") as sequence:
        sequence.seal(0, list(range(9)), ids)
        sequence.settle()
        assert sequence.acknowledged == 9 * tokens
        keys[:] = 0
        sequence.load(0, list(range(9)))
        np.testing.assert_array_equal(keys, want)


def test_refusals_of_an_engines_own_memory(linked: kvstrata.Session, toy: Toy):
    model = register(linked, toy)
    keys, values = own(toy, BLOCKS)
    good = kvstrata.BlockTensor.of(keys[0])
    for field, value, reason in (("heads", 3, "TENSOR_SHAPE"), ("head_dim", 0, "TENSOR_SHAPE"),
                                 ("blocks", 0, "TENSOR_SHAPE"), ("block_tokens", -1, "TENSOR_SHAPE"),
                                 ("dtype", kvstrata.DType.BF16, "TENSOR_DTYPE"), ("address", 0, "TENSOR_ADDRESS")):
        with pytest.raises(kvstrata.InvalidArgument, match=field) as error:
            linked.register_tensors(model, 0, good, dataclasses.replace(good, **{field: value}))
        assert error.value.reason == reason
    memory = kvstrata.MemoryHandle(kvstrata.MemoryKind.MEMFD, 1 << 20, os.memfd_create("x"))
    with pytest.raises(kvstrata.InvalidArgument, match="dim_stride is 64"):
        linked.register_tensors(model, 0, dataclasses.replace(good, memory=memory), good)
    linked.register_tensors(model, 0, good, kvstrata.BlockTensor.of(values[0]))
    with linked.open(model, "full") as sequence:
        with pytest.raises(kvstrata.FailedPrecondition, match="TENSORS_MISSING"):
            sequence.seal(0, [0], toy.ids[:BLOCK_TOKENS])
        linked.register_tensors(model, 1, good, kvstrata.BlockTensor.of(values[1]))
        for call in (lambda: sequence.seal(0, [BLOCKS], toy.ids[:BLOCK_TOKENS]),
                     lambda: sequence.seal(0, [0], toy.ids[:3])):
            with pytest.raises(kvstrata.InvalidArgument, match="BLOCK"):
                call()
