# SPDX-License-Identifier: Apache-2.0
"""Tensors of torch and of what speaks DLPack: the same bits as numpy's, no copies, and errors that name the field."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from typing import Any

import numpy as np
import pytest
from toy import DIM, HEADS, KV_HEADS, LAYERS, Toy

import kvstrata
from kvstrata.tensors import stream_of, tensor_of

N = 20


@pytest.fixture
def toy(random: np.random.Generator) -> Toy:
    return Toy(random, 2 * N)


@pytest.fixture
def sequence(session: kvstrata.Session, toy: Toy):
    with session.open(toy.register(session), "full") as opened:
        yield opened


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="SKIPPED: torch is not installed; these tests are of its tensors")


class Versioned:
    """An array whose only way in is DLPack 1.0."""

    def __init__(self, array: Any) -> None:
        self.array, self.capsules = array, 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> object:
        self.capsules += 1
        return self.array.__dlpack__(stream=stream, **options)


class Legacy(Versioned):
    """From before 1.0: no arguments but the stream."""

    def __dlpack__(self, *, stream: int | None = None) -> object:  # type: ignore[override]
        self.capsules += 1
        return self.array.__dlpack__(stream=stream)


def feed(session: kvstrata.Session, sequence: kvstrata.Sequence, toy: Toy, wrap: Any, out: Any = None) -> list[Any]:
    with session.step([(sequence, toy.ids[:N])]) as step:
        result = []
        for layer in range(LAYERS):
            step.append(layer, wrap(toy.k[layer, :N]), wrap(toy.v[layer, :N]))
            step.select(layer, wrap(toy.q[layer, :N]))
            result.append(step.attend(layer, wrap(toy.q[layer, :N]), None if out is None else out()))
    return result


@pytest.mark.parametrize("producer", [Versioned, Legacy])
def test_dlpack_gives_numpys_bits(session: kvstrata.Session, toy: Toy, producer: type):
    model = toy.register(session)
    with session.open(model) as a, session.open(model) as b:
        want = feed(session, a, toy, np.asarray)
        got = feed(session, b, toy, lambda x: producer(x.copy()),
                   lambda: producer(np.zeros((N, HEADS, DIM), np.float32)))
        for layer in range(LAYERS):
            np.testing.assert_array_equal(got[layer].array, want[layer])


@pytest.mark.parametrize("producer", [Versioned, Legacy])
def test_an_export_is_given_back_after_the_call(producer: type):
    class Owned(np.ndarray):
        pass

    array = np.zeros((2, 3, 4), np.float32).view(Owned)
    gone = weakref.ref(array)
    exported = producer(array)
    view = tensor_of(exported, "k")
    assert (view.data, view.token_stride, view.head_stride) == (array.ctypes.data, 48, 16) and exported.capsules
    del array, exported
    gc.collect()
    assert gone() is not None, "the view keeps what it points into"
    del view
    gc.collect()
    assert gone() is None


def test_strides_of_dlpack_are_honoured():
    wide = np.zeros((4, 6, 8), np.float16)
    for part in (wide[:, 2:4], wide[::2, 1::3], wide.transpose(1, 0, 2)):
        view = tensor_of(Versioned(part), "k")
        assert (view.data, view.token_stride, view.head_stride) == (part.ctypes.data, *part.strides[:2])


def test_a_read_only_dlpack_out_is_refused():
    array = np.zeros((2, 3, 4), np.float32)
    array.flags.writeable = False
    tensor_of(Versioned(array), "k")
    with pytest.raises(kvstrata.InvalidArgument, match="out is read-only") as error:
        tensor_of(Versioned(array), "out", writable=True)
    assert error.value.reason == "TENSOR_READ_ONLY"
    with pytest.raises(kvstrata.InvalidArgument, match="k is a .*Legacy") as error:
        tensor_of(Legacy(array), "k")
    assert error.value.reason == "TENSOR_DLPACK"


def test_dlpack_on_a_device_that_is_not_served():
    elsewhere = types.SimpleNamespace(__dlpack__=None, __dlpack_device__=lambda: (8, 0))
    with pytest.raises(kvstrata.InvalidArgument, match="v is on DLPack device type 8") as error:
        tensor_of(elsewhere, "v")
    assert error.value.reason == "TENSOR_DEVICE"


def test_an_out_of_another_library_is_to_be_given(session: kvstrata.Session, sequence: kvstrata.Sequence, toy: Toy):
    with pytest.raises(kvstrata.InvalidArgument, match="out is None and q is a .*Versioned"):
        feed(session, sequence, toy, Versioned)


def test_streams_are_of_gpus(session: kvstrata.Session, sequence: kvstrata.Sequence, toy: Toy):
    assert not session.on_gpu
    with pytest.raises(kvstrata.Unimplemented, match="stream is not NULL"):
        session.step([(sequence, toy.ids[:1])], stream=7)
    session.step([(sequence, toy.ids[:1])], stream=0).abort()
    assert stream_of(types.SimpleNamespace(cuda_stream=5)) == 5 == stream_of(types.SimpleNamespace(ptr=5))
    for wrong in ("5", -1):
        with pytest.raises(kvstrata.InvalidArgument, match="stream is .*pass a torch.cuda.Stream"):
            session.step([(sequence, toy.ids[:1])], stream=wrong)


def test_a_closed_session_does_not_say_where_its_pages_lie(session: kvstrata.Session):
    session.close()
    with pytest.raises(kvstrata.FailedPrecondition, match="SESSION_CLOSED"):
        session.on_gpu


def test_a_gpus_session_refuses_the_sequence_that_it_is_asked_by(session: kvstrata.Session):
    """What a begin says where the stream is no reason to refuse."""
    nobody = types.SimpleNamespace(handle=0)
    with pytest.raises(kvstrata.KvstrataError) as error:
        session.step([(nobody, [0])], stream=0)
    assert error.value.reason == "SEQUENCE_UNKNOWN"


def test_torchs_stream_is_not_taken_on_the_cpu(session: kvstrata.Session, sequence: kvstrata.Sequence, toy: Toy,
                                               monkeypatch: pytest.MonkeyPatch):
    """A process that uses CUDA for something else."""
    busy = types.SimpleNamespace(cuda=types.SimpleNamespace(
        is_initialized=lambda: True, current_stream=lambda: types.SimpleNamespace(cuda_stream=5)))
    monkeypatch.setitem(sys.modules, "torch", busy)
    assert session._stream(None) == 0
    toy.feed(session, sequence, 0, 1)
    session.__dict__["on_gpu"] = True
    assert session._stream(None) == 5


def test_replay_without_a_graph_says_so(session: kvstrata.Session, sequence: kvstrata.Sequence, toy: Toy):
    with session.step([(sequence, toy.ids[:1])]) as step:
        with pytest.raises(kvstrata.KvstrataError) as error:
            step.replay()
        assert error.value.reason and error.value.code in (9, 12)
        step.abort()


def test_a_gpus_tensor_is_refused_on_the_cpu(session: kvstrata.Session, sequence: kvstrata.Sequence, toy: Toy):
    """Its address must not be read here. The tensor is a made-up one, as there may be no GPU."""
    array = toy.k[0, :4]
    made_up = types.SimpleNamespace(dtype="torch.float32", shape=array.shape, is_cuda=True, requires_grad=False,
                                    stride=lambda: (KV_HEADS * DIM, DIM, 1), data_ptr=lambda: 4096, new_empty=None)
    with session.step([(sequence, toy.ids[:4])]) as step:
        with pytest.raises(kvstrata.InvalidArgument, match="v is a GPU's.*host memory") as error:
            step.append(0, array, made_up)
        assert error.value.reason == "TENSOR_DEVICE"
        step.abort()


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_torch_tensors(session: kvstrata.Session, toy: Toy, torch: Any, name: str):
    """Strided views in, a tensor of q's dtype out, lse: the same as numpy's float32."""
    model = toy.register(session)
    dtype = getattr(torch, name)
    exact = dtype != torch.float16
    with session.open(model) as a, session.open(model) as b, session.step([(b, toy.ids[:N])]) as step:
        want = feed(session, a, toy, np.asarray)
        for layer in range(LAYERS):
            packed = torch.empty(N, HEADS + 2 * KV_HEADS, DIM, dtype=dtype)
            q, k, v = packed.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            for part, array in ((q, toy.q), (k, toy.k), (v, toy.v)):
                part.copy_(torch.from_numpy(array[layer, :N]))
            step.append(layer, k, v)
            lse = torch.empty(N, HEADS)
            out = step.attend(layer, q, lse=lse)
            assert out.dtype == dtype and out.shape == q.shape and out.is_contiguous()
            wide = step.attend(layer, q, dtype=kvstrata.DType.F32)
            assert wide.dtype == torch.float32
            np.testing.assert_allclose(wide.numpy(), want[layer], rtol=0, atol=0 if exact else 5e-3)
            np.testing.assert_allclose(out.float().numpy(), want[layer], rtol=2e-2, atol=2e-2)
            np.testing.assert_allclose(lse[-1].numpy(), toy.expected(layer, N - 1)[1], rtol=1e-5 if exact else 2e-3)
            assert step.attend(layer, q, out=out) is out


def test_torch_by_dlpack_alone_is_bfloat16_too(torch: Any):
    tensor = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    view = tensor_of(Versioned(tensor), "k")
    assert (view.data, view.dtype) == (tensor.data_ptr(), kvstrata.DType.BF16)


@pytest.mark.parametrize("reason, bad", [
    ("TENSOR_DTYPE", lambda t: t.double()),
    ("TENSOR_SHAPE", lambda t: t[0]),
    ("TENSOR_STRIDE", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)),
    ("TENSOR_STRIDE", lambda t: t[:, :1].expand(-1, KV_HEADS, -1)),
    ("TENSOR_REQUIRES_GRAD", lambda t: t.clone().requires_grad_()),
    ("TENSOR_DEVICE", lambda t: t.to("meta")),
])
def test_bad_torch_tensors(torch: Any, toy: Toy, reason: str, bad: Any):
    with pytest.raises(kvstrata.InvalidArgument, match="values") as error:
        tensor_of(bad(torch.from_numpy(toy.v[0, :4])), "values")
    assert error.value.reason == reason


def test_a_bad_lse(session: kvstrata.Session, sequence: kvstrata.Sequence, toy: Toy, torch: Any):
    with session.step([(sequence, toy.ids[:4])]) as step:
        step.append(0, toy.k[0, :4], toy.v[0, :4])
        for lse in (np.zeros((4, 1), np.float32), torch.zeros(4, HEADS).half(), torch.zeros(HEADS, 4).T):
            with pytest.raises(kvstrata.InvalidArgument, match=r"lse is F.*\(4, 4\)") as error:
                step.attend(0, toy.q[0, :4], lse=lse)
            assert error.value.reason == "LSE_SHAPE"
        step.abort()
