# SPDX-License-Identifier: Apache-2.0
"""The ctypes binding, both transports: tensors in and out, selections, errors that name what is wrong."""

import gc
import subprocess
import sys

import numpy as np
import pytest
from toy import DIM, HEADS, KV_HEADS, LAYERS, Toy, bits

import kvstrata
from kvstrata.daemon import Daemon

N = 70


@pytest.fixture
def toy(random: np.random.Generator) -> Toy:
    return Toy(random, 2 * N)


@pytest.fixture
def sequence(session: kvstrata.Session, toy: Toy):
    with session.open(toy.register(session), "full") as opened:
        yield opened


def close_to(got: np.ndarray, want: np.ndarray) -> None:
    error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    assert error.max() < 1e-5


def test_full_attention_is_what_numpy_says(session: kvstrata.Session, sequence: kvstrata.Sequence, toy: Toy):
    chunk = toy.feed(session, sequence, 0, N)
    for layer in range(LAYERS):
        for t in (0, 1, N - 1):
            close_to(chunk[layer][t], toy.expected(layer, t)[0])
    sequence.prefill_done()
    one = toy.feed(session, sequence, N, N + 1)
    close_to(one[1][0], toy.expected(1, N)[0])
    assert sequence.tokens == N + 1
    assert sequence.status == "ok"
    assert sequence.plan.startswith("full")


def test_bf16_and_fp16_and_strides(session: kvstrata.Session, sequence: kvstrata.Sequence, toy: Toy):
    """k as bf16 bits, v as a strided view, out in fp16, lse: no copies asked for, none wrong."""
    wide = np.zeros((N, 3 * KV_HEADS, DIM), np.float32)
    view = wide[:, KV_HEADS:2 * KV_HEADS]
    with session.step([(sequence, toy.ids[:N])]) as step:
        for layer in range(LAYERS):
            view[:] = toy.v[layer, :N]
            step.append(layer, bits(toy.k[layer, :N]), view)
            lse = np.full((N, HEADS), np.nan, np.float32)
            out = step.attend(layer, bits(toy.q[layer, :N]), lse=lse, dtype=kvstrata.DType.F16)
            assert out.dtype == np.float16 and out.shape == (N, HEADS, DIM)
            want, want_lse = toy.expected(layer, N - 1)
            np.testing.assert_allclose(out[-1], want, atol=2e-3)
            np.testing.assert_allclose(lse[-1], want_lse, rtol=1e-5)


def test_window_selects_what_it_says(session: kvstrata.Session, toy: Toy):
    with session.open(toy.register(session), "window{n_sink = 4, n_recent = 8, min_tokens = 0}") as sequence:
        toy.feed(session, sequence, 0, N)
        sequence.prefill_done()
        with session.step([(sequence, toy.ids[N:N + 1])]) as step:
            for layer in range(LAYERS):
                step.append(layer, toy.k[layer, N:N + 1], toy.v[layer, N:N + 1])
                step.attend(layer, toy.q[layer, N:N + 1])
            (tokens,) = step.selected_tokens()
        assert tokens.tolist() == [*range(4), *range(N + 1 - 8, N + 1)]


def test_fork_and_prefix(session: kvstrata.Session, toy: Toy):
    model = toy.register(session)
    with session.open(model, "full", toy.ids[:N]) as first:
        toy.feed(session, first, 0, N)
        with first.fork() as second, session.open(model, "full", toy.ids[:N]) as third:
            assert second.tokens == N
            assert third.held == N // 16 * 16 == third.tokens
            a = toy.feed(session, first, N, N + 1)
            b = toy.feed(session, second, N, N + 1)
            toy.feed(session, third, third.tokens, N)
            c = toy.feed(session, third, N, N + 1)
            for layer in range(LAYERS):
                np.testing.assert_array_equal(a[layer], b[layer])
                np.testing.assert_array_equal(a[layer], c[layer])


def test_truncated_drafts_leave_nothing(session: kvstrata.Session, toy: Toy):
    model = toy.register(session)
    for plan in ("full", "quest{budget = 16, min_tokens = 0}", "tokenselect{k = 8, n_local = 4, min_tokens = 0}"):
        with session.open(model, plan) as plain, session.open(model, plan) as drafting:
            for sequence in (plain, drafting):
                toy.feed(session, sequence, 0, N)
                sequence.prefill_done()
            wrong = Toy(np.random.default_rng(7), 2 * N)
            wrong.ids += 1
            wrong.feed(session, drafting, N, N + 20)
            drafting.truncate(N)
            assert drafting.tokens == N
            for t in range(N, N + 3):
                for a, b in zip(toy.feed(session, plain, t, t + 1), toy.feed(session, drafting, t, t + 1)):
                    np.testing.assert_array_equal(a, b)
            with pytest.raises(kvstrata.KvstrataError, match="TRUNCATE_PROMPT"):
                drafting.truncate(N - 1)
            with pytest.raises(kvstrata.KvstrataError, match="TRUNCATE_TOKENS"):
                drafting.truncate(N + 4)


def test_reorder_continues_parents_and_closes_the_rest(session: kvstrata.Session, toy: Toy):
    model = toy.register(session)
    beams = [session.open(model, "full") for _ in range(3)]
    for end, beam in zip((10, 20, 30), beams):
        toy.feed(session, beam, 0, end)
    first, second, third = beams
    after = session.reorder(beams, [1, 1, 0, 1])
    assert after[0] is second and after[2] is first
    assert [beam.tokens for beam in after] == [20, 20, 10, 20]
    assert len({beam.handle for beam in after}) == 4
    with pytest.raises(kvstrata.KvstrataError, match="SEQUENCE_CLOSED"):
        third.tokens
    for beam in after:
        expected = [toy.expected(layer, beam.tokens)[0] for layer in range(LAYERS)]
        for a, b in zip(toy.feed(session, beam, beam.tokens, beam.tokens + 1), expected):
            np.testing.assert_allclose(a[0], b, atol=0.02)
    with pytest.raises(kvstrata.KvstrataError, match=r"parents\[1\] is 9"):
        session.reorder(after[:2], [0, 9])
    with pytest.raises(kvstrata.KvstrataError, match="REORDER_REPEATED"):
        session.reorder([first, first], [0])
    for beam in after:
        beam.close()


def test_a_scale_of_its_own_is_a_scaled_query(session: kvstrata.Session, toy: Toy):
    usual = toy.register(session)
    own = session.register_model("scaled", toy.digest, layers=LAYERS, query_heads=usual.query_heads,
                                 kv_heads=usual.kv_heads, head_dim=64, page_tokens=16, scale=0.25)
    outs = []
    for model, factor in ((usual, 2), (own, 1)):
        with session.open(model, "full") as sequence, session.step([(sequence, toy.ids[:N])]) as step:
            for layer in range(LAYERS):
                step.append(layer, toy.k[layer, :N], toy.v[layer, :N])
                outs.append(step.attend(layer, toy.q[layer, :N] * np.float32(factor)))
    for layer in range(LAYERS):
        np.testing.assert_array_equal(outs[layer], outs[LAYERS + layer])


def test_two_sequences_in_a_step(session: kvstrata.Session, toy: Toy):
    model = toy.register(session)
    with session.open(model, "full") as a, session.open(model, "full") as b:
        toy.feed(session, a, 0, N)
        alone = toy.feed(session, b, 0, 3)
        with a.fork() as c:
            single = toy.feed(session, c, N, N + 1)
        double = lambda x, layer: np.concatenate([x[layer, N:N + 1], x[layer, 3:5]])
        with session.step([(a, toy.ids[N:N + 1]), (b, toy.ids[3:5])]) as step:
            for layer in range(LAYERS):
                step.append(layer, double(toy.k, layer), double(toy.v, layer))
                out = step.attend(layer, double(toy.q, layer))
                np.testing.assert_array_equal(out[:1], single[layer])
                close_to(out[2], toy.expected(layer, 4)[0])
        assert len(alone) == LAYERS and (a.tokens, b.tokens) == (N + 1, 5)


def test_an_exception_in_a_step_commits_nothing(session: kvstrata.Session, sequence: kvstrata.Sequence,
                                                toy: Toy):
    with pytest.raises(ZeroDivisionError):
        with session.step([(sequence, toy.ids[:4])]) as step:
            step.append(0, toy.k[0, :4], toy.v[0, :4])
            raise ZeroDivisionError
    assert sequence.tokens == 0
    toy.feed(session, sequence, 0, 4)


def test_series_and_inspect(session: kvstrata.Session, sequence: kvstrata.Sequence, toy: Toy):
    toy.feed(session, sequence, 0, N)
    sequence.report(0, surprisal=np.arange(N), boundary=np.arange(N) % 2)
    sequence.settle()
    np.testing.assert_array_equal(sequence.inspect("surprisal"), np.arange(N, dtype=np.float32))
    assert sequence.inspect("boundary").dtype == np.uint8
    with pytest.raises(kvstrata.NotFound, match="no_such") as error:
        sequence.inspect("no_such")
    assert error.value.reason == "INSPECT_UNKNOWN"


def test_page_table(daemon: Daemon, toy: Toy):
    with kvstrata.attach(daemon.socket) as session, session.open(toy.register(session)) as sequence:
        toy.feed(session, sequence, 0, N)
        pages, version = sequence.page_table()
        assert len(pages) >= N // 16 + 1 and version > 0
        assert all(page.address for page in pages) and {page.tier for page in pages} <= {0, 1}


BAD_TENSORS = [
    ("TENSOR_DTYPE", lambda t: t.k[0, :4].astype(np.float64)),
    ("TENSOR_SHAPE", lambda t: t.k[0, :4].reshape(-1)),
    ("TENSOR_STRIDE", lambda t: np.asfortranarray(t.k[0, :4])),
    ("TENSOR_STRIDE", lambda t: t.k[0, 3::-1]),
    ("TENSOR_STRIDE", lambda t: np.broadcast_to(t.k[0, :1], (4, KV_HEADS, DIM))),
]


@pytest.mark.parametrize("reason, bad", BAD_TENSORS, ids=[f"{i}-{reason}" for i, (reason, _) in enumerate(BAD_TENSORS)])
def test_bad_arrays(session: kvstrata.Session, sequence: kvstrata.Sequence, toy: Toy, reason: str, bad):
    with session.step([(sequence, toy.ids[:4])]) as step:
        with pytest.raises(kvstrata.InvalidArgument) as error:
            step.append(0, bad(toy), toy.v[0, :4])
        assert error.value.reason == reason
        assert "k" in error.value.message
        step.abort()


def test_what_is_no_array(session: kvstrata.Session, sequence: kvstrata.Sequence, toy: Toy):
    """Much like an array, with a dtype and a shape, but no way to its memory."""

    class Tensor:
        dtype, shape, ndim = "bfloat16", (4, KV_HEADS, DIM), 3

    with session.step([(sequence, toy.ids[:4])]) as step:
        for call in (lambda: step.append(0, Tensor(), toy.v[0, :4]), lambda: step.attend(0, Tensor())):
            with pytest.raises(kvstrata.InvalidArgument, match=r"Tensor; pass a torch tensor.*__dlpack__") as error:
                call()
            assert error.value.reason == "TENSOR_TYPE"
        step.abort()


@pytest.mark.parametrize("wrong", ["heads", "head_dim", "tokens"])
def test_the_library_names_the_wrong_field(session: kvstrata.Session, sequence: kvstrata.Sequence, toy: Toy,
                                           wrong: str):
    k = {"heads": toy.k[0, :4, :1], "head_dim": toy.k[0, :4, :, :32], "tokens": toy.k[0, :3]}[wrong]
    with session.step([(sequence, toy.ids[:4])]) as step:
        with pytest.raises(kvstrata.InvalidArgument, match=wrong):
            step.append(0, k, toy.v[0, :4])
        step.abort()


@pytest.mark.parametrize("plan, reason, words", [
    ("qest", "PLAN_UNKNOWN", "quest"), ("quest{budgt = 4}", "PLAN_OPTION_UNKNOWN", "budget"),
    ("quest{budget = -4}", "PLAN_OPTION_INVALID", "budget"), ("quest{", "PLAN_SYNTAX", "quest")])
def test_bad_plans(session: kvstrata.Session, toy: Toy, plan: str, reason: str, words: str):
    with pytest.raises(kvstrata.InvalidArgument, match=words) as error:
        session.open(toy.register(session), plan)
    assert error.value.reason == reason and error.value.code == 3


def test_an_unknown_codec_is_answered_with_those_that_exist(session: kvstrata.Session, toy: Toy):
    with pytest.raises(kvstrata.InvalidArgument, match="raw, lowrank, packed"):
        session.open(toy.register(session), 'quest{codec = "fp8"}')


@pytest.mark.parametrize("ids", [[1.5], [[1, 2]], [-1], [1 << 31]])
def test_bad_token_ids(session: kvstrata.Session, toy: Toy, ids):
    with pytest.raises(kvstrata.InvalidArgument) as error:
        session.open(toy.register(session), "full", ids)
    assert error.value.reason == "TOKENS_INVALID"


def test_use_after_close(session: kvstrata.Session, toy: Toy):
    sequence = session.open(toy.register(session))
    step = session.step([(sequence, toy.ids[:1])])
    step.abort()
    step.abort()
    with pytest.raises(kvstrata.FailedPrecondition, match="STEP_OVER"):
        step.append(0, toy.k[0, :1], toy.v[0, :1])
    sequence.close()
    sequence.close()
    with pytest.raises(kvstrata.FailedPrecondition, match="SEQUENCE_CLOSED"):
        session.step([(sequence, toy.ids[:1])])
    session.close()
    with pytest.raises(kvstrata.FailedPrecondition, match="SESSION_CLOSED"):
        session.ping()


def test_nobody_listens(tmp_path, session: kvstrata.Session):
    with pytest.raises(kvstrata.Unavailable):
        kvstrata.attach(tmp_path / "none.sock", transport=session.transport, timeout_ms=500)


def test_library_errors(tmp_path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(kvstrata.InvalidArgument, match="linked, remote"):
        kvstrata.attach(transport="scenic")
    monkeypatch.setenv("KVSTRATA_LIBRARY", str(tmp_path / "gone.so"))
    with pytest.raises(kvstrata.KvstrataError, match="LIBRARY_MISSING"):
        kvstrata.attach()
    (tmp_path / "libkvstrata.so").write_text("no library")
    monkeypatch.setenv("KVSTRATA_LIBRARY", str(tmp_path))
    with pytest.raises(kvstrata.KvstrataError, match="LIBRARY_UNUSABLE"):
        kvstrata.attach()


def test_a_forked_child_is_refused(daemon: Daemon):
    """In a process of its own, so that pytest's is never forked with a session open."""
    program = (
        "import os, sys, kvstrata\n"
        "session = kvstrata.attach(sys.argv[1])\n"
        "if os.fork() == 0:\n"
        "    try:\n"
        "        session.ping()\n"
        "    except kvstrata.FailedPrecondition as error:\n"
        "        os._exit(7 if error.reason == 'FORKED' else 1)\n"
        "    os._exit(2)\n"
        "_, status = os.wait()\n"
        "session.ping()\n"
        "sys.exit(os.waitstatus_to_exitcode(status))\n")
    assert subprocess.run([sys.executable, "-c", program, daemon.socket], timeout=60).returncode == 7


def test_arrays_are_views_and_live_long_enough(session: kvstrata.Session, sequence: kvstrata.Sequence,
                                               toy: Toy):
    """Temporaries passed straight in must survive the call."""
    for t in range(40):
        with session.step([(sequence, [t])]) as step:
            for layer in range(LAYERS):
                step.append(layer, toy.k[layer, t:t + 1].copy(), toy.v[layer, t:t + 1].copy())
                out = np.zeros((1, HEADS, DIM), np.float32)
                assert step.attend(layer, toy.q[layer, t:t + 1].copy(), out=out) is out
                gc.collect(0)
                close_to(out[0], toy.expected(layer, t)[0])


def test_a_lookup_says_what_an_open_finds(session: kvstrata.Session, sequence: kvstrata.Sequence, toy: Toy):
    toy.feed(session, sequence, 0, N)
    raw = session.lookup(sequence.model, toy.ids[:N])
    assert raw.held == (N - 1) // 16 * 16 == raw.device_tokens + raw.host_tokens + raw.disk_tokens
    for plan in ("full", "quest", "sentencekv{n_obs = 30}"):
        found = session.lookup(sequence.model, toy.ids[:N], plan)
        with session.open(sequence.model, plan, toy.ids[:N]) as opened:
            assert (found.held, found.indexed) == (opened.held, opened.indexed)
    assert found.held < raw.held
    with pytest.raises(kvstrata.KvstrataError, match="GPU-9"):
        session.lookup(sequence.model, toy.ids[:N], "full", "GPU-9")
    with pytest.raises(kvstrata.KvstrataError, match="qest"):
        session.lookup(sequence.model, toy.ids[:N], "qest")
