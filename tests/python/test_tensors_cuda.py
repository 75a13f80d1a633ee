# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors, streams and graphs of torch against a daemon whose pages are a GPU's."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from toy import LAYERS, Toy

import kvstrata
from kvstrata.daemon import Daemon

if importlib.util.find_spec("torch"):
    import torch
    MISSING = "" if torch.cuda.is_available() else "no GPU; torch.cuda.is_available() is False"
else:
    MISSING = "torch is not installed; these tests are of its tensors"
# Skips each test, not the module: pytest fails where it collects none.
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"SKIPPED: {MISSING}")

N = 20
SEED = 20261123


@pytest.fixture(scope="module")
def gpu() -> Iterator[Daemon]:
    with Daemon("--set", "pool.device=cuda", "--set", "pool.device_bytes=256MiB") as started:
        yield started


@pytest.fixture
def toy() -> Toy:
    print(f"seed {SEED}")
    return Toy(np.random.default_rng(SEED), 2 * N)


@pytest.fixture
def session(gpu: Daemon) -> Iterator[kvstrata.Session]:
    with kvstrata.attach(gpu.socket) as opened:
        yield opened


def bfloat16(array: np.ndarray) -> Any:
    return torch.from_numpy(array).to("cuda", torch.bfloat16)


class Exported:
    """A tensor whose only way in is DLPack."""

    def __init__(self, tensor: Any) -> None:
        self.__dlpack__, self.__dlpack_device__ = tensor.__dlpack__, tensor.__dlpack_device__


def feed(step: kvstrata.Step, toy: Toy, part: slice, wrap: Any = lambda tensor: tensor) -> list[Any]:
    outs = []
    for layer in range(LAYERS):
        step.append(layer, wrap(bfloat16(toy.k[layer, part])), wrap(bfloat16(toy.v[layer, part])))
        q = bfloat16(toy.q[layer, part])
        outs.append(torch.empty_like(q))
        step.attend(layer, wrap(q), outs[-1])
    return outs


def check(outs: list[Any], toy: Toy, t: int) -> None:
    torch.cuda.synchronize()
    for layer in range(LAYERS):
        np.testing.assert_allclose(outs[layer][-1].float().cpu().numpy(), toy.expected(layer, t)[0], atol=2e-2)


def test_a_session_says_where_its_pages_lie(gpu: Daemon, session: kvstrata.Session):
    assert session.on_gpu
    with kvstrata.attach(gpu.socket, transport="remote") as remote:
        assert not remote.on_gpu


@pytest.mark.parametrize("wrap", [lambda tensor: tensor, Exported], ids=["torch", "dlpack"])
@pytest.mark.parametrize("given", ["none", "stream", "int", "default"])
def test_tensors_on_a_stream(session: kvstrata.Session, toy: Toy, given: str, wrap: Any):
    stream = torch.cuda.default_stream() if given == "default" else torch.cuda.Stream()
    argument = {"none": None, "stream": stream, "int": stream.cuda_stream, "default": None}[given]
    with session.open(toy.register(session)) as sequence, torch.cuda.stream(stream):
        with session.step([(sequence, toy.ids[:N])], stream=argument) as step:
            assert step._stream == stream.cuda_stream
            outs = feed(step, toy, slice(0, N), wrap)
        check(outs, toy, N - 1)
        assert sequence.tokens == N


def test_a_new_out_and_lse_are_on_the_gpu(session: kvstrata.Session, toy: Toy):
    with session.open(toy.register(session)) as sequence, session.step([(sequence, toy.ids[:1])]) as step:
        for layer in range(LAYERS):
            step.append(layer, bfloat16(toy.k[layer, :1]), bfloat16(toy.v[layer, :1]))
            q = bfloat16(toy.q[layer, :1])
            lse = torch.empty(q.shape[:2], device="cuda")
            out = step.attend(layer, q, lse=lse, dtype=kvstrata.DType.F32)
            assert out.is_cuda and out.dtype == torch.float32
            torch.cuda.synchronize()
            np.testing.assert_allclose(lse[0].cpu().numpy(), toy.expected(layer, 0)[1], atol=2e-2)


def test_a_captured_step_is_replayed(session: kvstrata.Session, toy: Toy):
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    rows = [[bfloat16(x[layer, :1]) for x in (toy.k, toy.v, toy.q, toy.q)] for layer in range(LAYERS)]
    with session.open(toy.register(session)) as sequence, torch.cuda.stream(stream):
        with session.step([(sequence, toy.ids[:N])]) as step:
            feed(step, toy, slice(0, N))
        sequence.prefill_done()
        for t in range(N, N + 4):
            for layer, tensors in enumerate(rows):
                for to, array in zip(tensors[:3], (toy.k, toy.v, toy.q)):
                    to.copy_(bfloat16(array[layer, t:t + 1]))
            with session.step([(sequence, toy.ids[t:t + 1])]) as step:
                if t == N:
                    with pytest.raises(kvstrata.FailedPrecondition, match="GRAPH_STALE"):
                        step.replay()
                    torch.cuda.synchronize()
                    graph.capture_begin()
                    for layer, (k, v, q, out) in enumerate(rows):
                        step.append(layer, k, v)
                        step.attend(layer, q, out)
                    graph.capture_end()
                else:
                    step.replay()
                graph.replay()
            check([out for _, _, _, out in rows], toy, t)
        assert sequence.tokens == N + 4


def test_a_graph_of_padding_serves_whoever_comes(session: kvstrata.Session, toy: Toy):
    """Captured at start without a request; replayed with one and padding, whose ids come a token late."""
    stream, graph, model = torch.cuda.Stream(), torch.cuda.CUDAGraph(), toy.register(session)
    rows = [[torch.zeros(2, x.shape[2], x.shape[3], device="cuda", dtype=torch.bfloat16)
             for x in (toy.k, toy.v, toy.q, toy.q)] for _ in range(LAYERS)]
    with torch.cuda.stream(stream), session.open(model) as a, session.open(model) as b, session.open(model) as real:
        for filler in (a, b):
            with session.step([(filler, [0])]) as step:
                for layer, (k, v, _, _) in enumerate(rows):
                    step.append(layer, k[:1], v[:1])
            filler.prefill_done()
        with session.open(model) as first, session.step([(first, toy.ids[:N])]) as step:
            feed(step, toy, slice(0, N))  # memory grows before the capture
        with session.step([], padding=[(a, 1), (b, 1)]) as step:
            torch.cuda.synchronize()
            graph.capture_begin()
            for layer, (k, v, q, out) in enumerate(rows):
                step.append(layer, k, v)
                step.attend(layer, q, out)
            graph.capture_end()
            graph.replay()
        with session.step([(real, toy.ids[:N])]) as step:
            feed(step, toy, slice(0, N))
        real.prefill_done()
        for t in range(N, N + 6):
            for layer, tensors in enumerate(rows):
                for to, array in zip(tensors[:3], (toy.k, toy.v, toy.q)):
                    to[:1].copy_(bfloat16(array[layer, t:t + 1]))
            with session.step([(real, 1)], padding=[(a, 1)]) as step:
                step.replay()
                graph.replay()
            if t > N:
                session.late_tokens([(real, torch.tensor(toy.ids[t - 1:t]).cuda())])
            check([out[:1] for *_, out in rows], toy, t)
        session.late_tokens([(real, toy.ids[N + 5:N + 6])])
        real.settle()
        assert (real.tokens, a.tokens, b.tokens) == (N + 6, 1, 1)
