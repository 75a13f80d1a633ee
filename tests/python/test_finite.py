# SPDX-License-Identifier: Apache-2.0
"""Values that are not finite, by every door on a CPU: the door answers, nothing of them is found, not after a restart
either, and what was before them is."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from bare_engine import BareEngine, Geometry
from test_imported_blocks import BLOCK_TOKENS, Blocks, lend, lend_own, own, register
from toy import DIM, HEADS, KV_HEADS, LAYERS, Toy

import kvstrata
from kvstrata.daemon import Daemon
from kvstrata.grpc import translate

PAGE, N = 16, 64
BAD = [np.nan, np.inf, -np.inf]
# Finite in fp32. The first of each rounds to the dtype's greatest, the second to an infinity.
EDGES = {
    kvstrata.DType.F16: (65519.996, 65520.0),
    kvstrata.DType.BF16: (float(np.uint32(0x7F7F7FFF).view(np.float32)), float(np.uint32(0x7F7F8000).view(np.float32))),
}


def start(folder: pathlib.Path) -> Daemon:
    return Daemon("--set", f"disk.path={folder}/tier", "--set", "disk.budget_bytes=256MiB",
                  "--set", "disk.segment_bytes=16MiB", "--set", "disk.load_timeout=10s")


@pytest.fixture
def toy(random: np.random.Generator) -> Toy:
    return Toy(random, N)


@pytest.fixture(params=["linked", "remote"])
def session(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[kvstrata.Session]:
    with kvstrata.attach(daemon.socket, transport=request.param) as attached:
        yield attached


def of_dtype(session: kvstrata.Session, toy: Toy, dtype: kvstrata.DType) -> kvstrata.Model:
    return session.register_model("toy", f"{toy.digest}:{dtype}", layers=LAYERS, query_heads=HEADS, kv_heads=KV_HEADS,
                                  head_dim=DIM, page_tokens=PAGE, dtype=dtype)


def held(session: kvstrata.Session, model: kvstrata.Model, toy: Toy, tokens: int = N) -> int:
    """How much of the prompt is found; what is found attends to finite outputs."""
    with session.open(model, "full", toy.ids[:tokens]) as sequence:
        out = toy.feed(session, sequence, sequence.held, tokens)
        assert np.isfinite(np.array(out)).all()
        return sequence.held


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("side", "kv")
def test_an_append_is_refused_by_name(session: kvstrata.Session, toy: Toy, side: str, value: float):
    model = toy.register(session)
    rows = getattr(toy, side)
    good = rows[1, 40, 0, 3]
    with session.open(model, "full", toy.ids) as sequence:
        toy.feed(session, sequence, 0, 2 * PAGE)
        rows[1, 40, 0, 3] = value
        with pytest.raises(kvstrata.InvalidArgument, match=rf"TENSOR_NOT_FINITE.*{side}\[8\]\[0\]\[3\] is -?(nan|inf)"):
            toy.feed(session, sequence, 2 * PAGE, N)
        assert sequence.tokens == 2 * PAGE
        rows[1, 40, 0, 3] = good
        toy.feed(session, sequence, 2 * PAGE, N)  # it goes on
        assert sequence.tokens == N
    assert held(session, model, toy) == N - PAGE


@pytest.mark.parametrize("dtype", EDGES)
@pytest.mark.parametrize("sign", [1, -1])
def test_what_overflows_the_pages_dtype_is_refused(session: kvstrata.Session, toy: Toy, dtype: kvstrata.DType,
                                                   sign: int):
    model = of_dtype(session, toy, dtype)
    fits, overflows = (sign * edge for edge in EDGES[dtype])
    toy.v[0, 20, 1, 63] = overflows
    with session.open(model, "full", toy.ids) as sequence:
        with pytest.raises(kvstrata.InvalidArgument, match=rf"v\[20\]\[1\]\[63\] is .*{dtype.name.lower()} holds at most "
                                                           "(65504|3.38953139e.38);.*wider"):
            toy.feed(session, sequence, 0, N)
        toy.v[0, 20, 1, 63] = fits
        toy.feed(session, sequence, 0, N)
    assert held(session, model, toy) == N - PAGE


def test_a_layer_whose_append_failed_is_appended_again_or_nothing_is_kept(session: kvstrata.Session, toy: Toy):
    model = toy.register(session)
    bad = toy.k[0].copy()
    bad[3, 1, 2] = np.nan
    with session.open(model, "full", toy.ids) as sequence:
        with pytest.raises(kvstrata.FailedPrecondition), session.step([(sequence, toy.ids)]) as step:
            for layer in range(LAYERS):
                step.append(layer, toy.k[layer], toy.v[layer])
            with pytest.raises(kvstrata.InvalidArgument):
                step.append(0, bad, toy.v[0])
        assert sequence.tokens == 0
    assert held(session, model, toy) == 0


def test_rows_written_in_place_are_looked_at(daemon: Daemon, toy: Toy):
    with BareEngine(daemon.socket, Geometry(LAYERS, HEADS, KV_HEADS, DIM, PAGE)) as engine:
        engine.map(writable=True)
        sequence = engine.open(engine.register(toy.digest), "full", toy.ids)
        good = toy.v[1, 10, 1, 5]
        toy.v[1, 10, 1, 5] = np.inf
        step = engine.begin(sequence, toy.ids)
        engine.write(sequence, 0, toy.k, toy.v)
        engine.append_in_place(step)
        with pytest.raises(grpc.RpcError) as refused:
            engine.end_step(step)
        assert "TENSOR_NOT_FINITE" in str(translate(refused.value))
        assert "v[10][1][5] is inf" in str(translate(refused.value))
        toy.v[1, 10, 1, 5] = good
    with kvstrata.attach(daemon.socket) as session:
        assert held(session, toy.register(session), toy) == 0


@pytest.mark.parametrize("kind", ["memfd", "own"])
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("side", [0, 1])
def test_blocks_are_pages_up_to_the_bad_one(tmp_path: pathlib.Path, toy: Toy, kind: str, side: int, value: float):
    sealed = 3 * BLOCK_TOKENS
    with start(tmp_path) as daemon, kvstrata.attach(daemon.socket) as session:
        blocks = Blocks()
        if kind == "memfd":
            blocks.put(toy, [0, 1, 2])
            blocks.rows[1, side, 1, 3, 0, 5] = value
            model = lend(session, toy, blocks)
        else:
            keys, values = own(toy, 8)
            for i in range(3):
                part = slice(i * BLOCK_TOKENS, (i + 1) * BLOCK_TOKENS)
                keys[:, i], values[:, i] = toy.k[:, part], toy.v[:, part]
            (keys, values)[side][1, 1, 3, 0, 5] = value
            model = lend_own(session, toy, keys, values)
        with session.open(model, "full") as sequence:
            with pytest.raises(kvstrata.InvalidArgument, match=r"TENSOR_NOT_FINITE.*block \d+, position 19: layer 1's "
                                                               + ("keys", "values")[side]):
                sequence.seal(0, [0, 1, 2], toy.ids[:sealed])
                sequence.settle()
            assert sequence.acknowledged == BLOCK_TOKENS
        with kvstrata.attach(daemon.socket) as other:
            assert held(other, register(other, toy), toy, BLOCK_TOKENS + 1) == BLOCK_TOKENS
            assert other.open(register(other, toy), "full", toy.ids[:sealed]).held == BLOCK_TOKENS
    with start(tmp_path) as daemon, kvstrata.attach(daemon.socket) as session:
        assert held(session, register(session, toy), toy, sealed) == BLOCK_TOKENS
