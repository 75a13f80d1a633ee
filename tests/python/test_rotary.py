# SPDX-License-Identifier: Apache-2.0
"""Keys stored before rotary embedding: random cases held to tests/reference, and a model that lets the
daemon's side rotate, within its trained context and beyond it."""

from __future__ import annotations

import json
import os
import pathlib
import secrets
import subprocess

import numpy as np
import pytest
import tiny_gguf
import toy

import kvstrata
from conftest import ROOT
from kvstrata.daemon import Daemon
from kvstrata_numpy import trace as recorder
from kvstrata_numpy.engine import Engine
from reference import core

CLI = ROOT / "build" / "bin" / "kvstrata"
if library := os.environ.get("KVSTRATA_LIBRARY"):
    CLI = pathlib.Path(library).parent / "bin" / "kvstrata"
CASES = 25
PLANS = ("full", "window{{n_sink = {a}, n_recent = {b}, compact = {compact}, min_tokens = 0}}",
         "quest{{page = 8, budget = {b}, compact = {compact}, min_tokens = 0}}",
         "tokenselect{{k = {b}, n_init = {a}, n_local = 9, theta = 0.8, compact = {compact}, min_tokens = 0}}")


class Case:
    """A random sequence of one layer and what the reference answers over what was selected."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.kv_heads, self.group = int(rng.integers(1, 3)), int(rng.integers(1, 9))
        self.dim = int(rng.choice([64, 128, 256]))
        self.prompt, self.chunk = int(rng.integers(40, 400)), int(rng.integers(1, 20))
        total = self.prompt + self.chunk
        self.k, self.v, self.q = (toy.bf16(rng.standard_normal((total, h, self.dim))) for h in
                                  (self.kv_heads, self.kv_heads, self.kv_heads * self.group))
        self.rope = core.Rope(float(10 ** rng.uniform(1, 6)), int(2 * rng.integers(1, self.dim // 2 + 1)),
                              bool(rng.integers(2)))
        self.compact = bool(rng.integers(2))
        self.plan = str(rng.choice(PLANS)).format(a=rng.integers(9), b=rng.integers(8, 60),
                                                  compact=str(self.compact).lower())
        self.seed = seed

    def run(self, session: kvstrata.Session) -> tuple[np.ndarray, list[np.ndarray]]:
        """Output of the chunk after the prompt, and the positions of its first token."""
        rope = self.rope
        model = session.register_model(
            "rotary", f"rotary:{self.seed}", layers=1, query_heads=self.kv_heads * self.group,
            kv_heads=self.kv_heads, head_dim=self.dim, page_tokens=16, keys_pre_rope=True,
            rope_theta=rope.base, rope_dim=rope.dims, rope_interleaved=rope.interleaved)
        with session.open(model, self.plan) as sequence:
            with session.step([(sequence, range(self.prompt))]) as step:
                step.append(0, self.k[:self.prompt], self.v[:self.prompt])
            sequence.prefill_done()
            with session.step([(sequence, range(self.prompt, self.prompt + self.chunk))]) as step:
                step.append(0, self.k[self.prompt:], self.v[self.prompt:])
                out = step.attend(0, self.q[self.prompt:])
                return out, step.selected_tokens()

    def expected(self, selected: list[np.ndarray], i: int) -> np.ndarray:
        """Token i of the chunk: the history that its first token selected, then causally."""
        n = self.prompt + i + 1
        history = tuple(rows[rows < self.prompt] for rows in selected)
        selection = core.Selection(n, ((self.prompt, n),), history)
        return core.attend_pre_rope(self.q[n - 1], self.k[:n], self.v[:n], selection, self.rope, self.compact)


@pytest.mark.parametrize("backend", ["simd", "ref"])
def test_random_cases_answer_as_the_reference(daemon: Daemon, backend: str):
    first = int(os.environ.get("KVS_TEST_SEED", secrets.randbelow(2**31)))
    with (kvstrata.attach(daemon.socket, backend=backend) as linked,
          kvstrata.attach(daemon.socket, backend=backend, transport="remote") as remote):
        for seed in range(first, first + CASES):
            case = Case(seed)
            out, selected = case.run(linked)
            there, remotely = case.run(remote)
            where = f"KVS_TEST_SEED={seed}: {case.plan}, {case.rope}"
            np.testing.assert_array_equal(there, out, where)
            assert all(np.array_equal(a, b) for a, b in zip(selected, remotely, strict=True)), where
            for i in {0, case.chunk - 1}:
                want = case.expected(selected, i)
                error = np.linalg.norm(out[i] - want, axis=-1) / np.linalg.norm(want, axis=-1)
                assert error.max() < 3e-5, f"{where}: token {i} off by {error.max():.2g}"


def test_other_rotary_parameters_share_no_pages(session: kvstrata.Session):
    rng = np.random.default_rng(secrets.randbelow(2**31))
    rows = toy.bf16(rng.standard_normal((33, 1, 64)))
    ids = rng.integers(0, 1 << 30, 33).astype(np.int32)
    digest = f"rotary:{rng.integers(1 << 60)}"

    def held(**rope) -> int:
        model = session.register_model("m", digest, layers=1, query_heads=1, kv_heads=1, head_dim=64,
                                       page_tokens=16, **rope)
        with session.open(model, "full", ids) as sequence:
            before = sequence.held
            if before < 32:
                with session.step([(sequence, ids[before:])]) as step:
                    step.append(0, rows[before:], rows[before:])
            return before

    variants = [{}, dict(keys_pre_rope=True, rope_theta=1e4), dict(keys_pre_rope=True, rope_theta=2e4),
                dict(keys_pre_rope=True, rope_theta=1e4, rope_dim=32),
                dict(keys_pre_rope=True, rope_theta=1e4, rope_interleaved=True)]
    assert [held(**rope) for rope in variants] == [0] * 5
    assert [held(**rope) for rope in variants] == [32] * 5


@pytest.mark.parametrize("plan, reason, says", [
    ("mosaickv", "PLAN_UNIMPLEMENTED", "codec 'packed' over keys stored before rotary embedding"),
    ("sekv", "PLAN_UNIMPLEMENTED", "codec 'lowrank' over keys stored before rotary embedding"),
    ("quest{rest = \"mean\"}", "PLAN_COMBINATION", "no position to be rotated to")])
def test_plans_that_cannot_rotate_are_refused(session: kvstrata.Session, plan: str, reason: str, says: str):
    model = session.register_model("m", "d", layers=1, query_heads=1, kv_heads=1, head_dim=64,
                                   keys_pre_rope=True, rope_theta=1e4)
    with pytest.raises(kvstrata.KvstrataError, match=says) as error:
        session.open(model, plan)
    assert error.value.reason == reason


def test_compact_needs_keys_before_rotary_embedding(session: kvstrata.Session):
    model = session.register_model("m", "d", layers=1, query_heads=1, kv_heads=1, head_dim=64)
    with pytest.raises(kvstrata.KvstrataError, match="keys_pre_rope = 1, or use compact = false") as error:
        session.open(model, "window{compact = true}")
    assert error.value.reason == "PLAN_COMBINATION"


# ---- a model ----

def logits_of(engine: Engine, session: kvstrata.Session, plan: str, ids: list[int], following: list[int]
              ) -> np.ndarray:
    """[1 + len(following), vocabulary], teacher-forced."""
    engine.attach(session)
    cache = engine.open(plan, [])
    logits = [engine.prefill(cache, ids)]
    logits += [engine.step(cache, token) for token in following]
    cache.close()
    return np.stack(logits)


def test_full_is_the_post_rope_run_within_bf16(model_file: str, daemon: Daemon):
    text = (ROOT / "LICENSE").read_text(errors="replace")
    after, before = Engine.load(model_file), Engine.load(model_file, pre_rope=True)
    ids = after.tokenizer.encode(text)[:600]
    with kvstrata.attach(daemon.socket) as session:
        want = logits_of(after, session, "full", ids[:580], ids[580:])
        got = logits_of(before, session, "full", ids[:580], ids[580:])
    # Keys are rounded to bf16 before the rotation instead of after it: other noise of the same size. When this
    # was written it was 0.04 of the logits' spread; an own cache's other order of sums alone makes 0.016.
    off = np.abs(got - want).max()
    assert off < 0.1 * want.std(), f"off by {off:.3g}, spread {want.std():.3g}"
    margin = np.sort(want, axis=-1)[:, -1] - np.sort(want, axis=-1)[:, -2]
    clear = margin > 2 * off
    assert clear.sum() > 10
    np.testing.assert_array_equal(got.argmax(-1)[clear], want.argmax(-1)[clear])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine.load(tiny_gguf.write(tmp_path_factory.mktemp("m") / "x.gguf"), pre_rope=True)


# 700 tokens on a model trained for 512: all but the prompt of `window`, which attends a prompt in full.
# Chunks of a prompt under `tokenselect` see 84 + 128 rows at most.
@pytest.mark.parametrize("plan, prompt, rows", [
    ("tokenselect{k = 48, n_init = 4, n_local = 32, chunk = 128, compact = true, min_tokens = 0}", 600, 84),
    ("window{n_sink = 4, n_recent = 60, compact = true, min_tokens = 0}", 400, 64)])
def test_compact_goes_beyond_the_trained_context(tiny: Engine, daemon: Daemon, plan: str, prompt: int,
                                                 rows: int):
    ids = [int(x) for x in np.random.default_rng(5).integers(3, 200, 700)]
    with kvstrata.attach(daemon.socket) as session:
        tiny.attach(session)
        cache = tiny.open(plan, [])
        tiny.prefill(cache, ids[:prompt])
        for token in ids[prompt:]:
            logits = tiny.step(cache, token)
        assert cache.tokens == 700 > tiny.llama.config.context
        assert np.isfinite(logits).all()
        # The same rows at positions 0 .. rows - 1, which the model knows, in plain numpy.
        probe = np.random.default_rng(6).standard_normal((1, tiny_gguf.HEADS, 64)).astype(np.float32)
        key = np.random.default_rng(7).standard_normal((2, 1, tiny_gguf.KV_HEADS, 64)).astype(np.float32)
        with session.step([(cache.sequence, [9])]) as step:
            for layer in range(tiny_gguf.LAYERS):
                step.append(layer, key[0], key[1])
                out = step.attend(layer, probe)
            attended = step.selected_tokens()[0]
            step.abort()
        assert len(attended) == rows and attended[-1] == 700
        keys, values = stored_rows(cache, attended[:-1])
        keys, values = np.concatenate([keys, key[0]]), np.concatenate([values, key[1]])
        short = core.attend_pre_rope(probe[0], keys, values, core.Selection.full(rows),
                                     core.Rope(tiny.llama.config.rope_theta), False)
        error = np.linalg.norm(out[0] - short) / np.linalg.norm(short)
        assert error < 5e-3, error  # the new row is bf16 in the daemon
        cache.close()


def stored_rows(cache, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of the last layer from the sequence's pages, [positions][kv heads][dim]."""
    import ctypes
    pages, _ = cache.sequence.page_table()
    tokens, d = cache.sequence.model.page_tokens, 64
    shape = (tiny_gguf.LAYERS, 2, tiny_gguf.KV_HEADS, tokens, d)
    out = np.empty((2, len(positions), tiny_gguf.KV_HEADS, d), np.float32)
    for i, position in enumerate(positions):
        page = pages[position // tokens]
        raw = ctypes.string_at(page.address, 2 * int(np.prod(shape)))
        rows = core.from_bf16_bits(np.frombuffer(raw, np.uint16).reshape(shape))
        out[:, i] = rows[-1, :, :, position % tokens]
    return out[0], out[1]


def test_an_own_cache_does_not_rotate(tiny: Engine):
    with pytest.raises(RuntimeError, match="load the engine without pre_rope"):
        tiny.own_cache()


def test_a_trace_before_rotary_embedding_is_replayed(tmp_path: pathlib.Path, daemon: Daemon):
    """The trace says so, and replay's oracle, which rotates by itself, agrees with the daemon."""
    model, path = tiny_gguf.write(tmp_path / "x.gguf"), tmp_path / "x.safetensors"
    text = tmp_path / "doc.txt"
    text.write_text("A licence says what others may do with a work. " * 20)
    assert recorder.main(["--out", str(path), "--model", str(model), "--doc", str(text), "--tokens", "300",
                          "--steps", "8", "--tail", "16", "--socket", str(daemon.socket), "--pre-rope"]) == 0
    metadata = recorder.read(path).metadata
    assert (metadata["keys"], metadata["rope_dim"], metadata["rope_interleaved"]) == ("pre_rope", "64", "0")
    arguments = [CLI, "--socket", daemon.socket, "replay", path, "-o", "json", "--plan", "full"]
    for compact in ("false", "true"):
        arguments += ["--plan", f"window{{n_sink = 4, n_recent = 60, min_tokens = 0, compact = {compact}}}"]
    done = subprocess.run(list(map(str, arguments)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    full, window, compact = [row for row in json.loads(done.stdout)["plans"] if not row["reference"]]
    mean = lambda row, name: row[name]["mean"]
    assert mean(full, "mass_recall") == pytest.approx(1, abs=1e-4)
    # The daemon's log-sum-exp gives one, the oracle the other.
    assert mean(window, "mass_recall") == pytest.approx(mean(compact, "mass_recall"), rel=1e-3)
    assert mean(window, "output_error") != pytest.approx(mean(compact, "output_error"), rel=1e-3)
