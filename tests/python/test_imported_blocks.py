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


def test_the_remote_road_has_no_block_calls(daemon: Daemon, toy: Toy, blocks: Blocks):
    with kvstrata.attach(daemon.socket, road="remote") as session, pytest.raises(kvstrata.Unimplemented):
        lend(session, toy, blocks)
