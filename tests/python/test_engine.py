# SPDX-License-Identifier: Apache-2.0
"""The engine on kvstratad: with plan `full` it writes what it writes without; prefixes are found again."""

import os
import pathlib
import select
import subprocess
import sys

import numpy as np
import pytest
import tiny_gguf

import kvstrata
from kvstrata.daemon import Daemon
from kvstrata_numpy.cache import DaemonCache
from kvstrata_numpy.engine import Engine
from kvstrata_numpy.shadow import ShadowCache

WORDS = ("A licence is a document that says what others may do with a work. This one lets anybody copy, "
         "change and share the program, if they pass the same freedoms on. ") * 6


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine.load(tiny_gguf.write(tmp_path_factory.mktemp("m") / "x.gguf"))


@pytest.fixture(scope="module")
def real(model_file: str) -> Engine:
    return Engine.load(model_file)


@pytest.fixture
def linked(daemon: Daemon):
    with kvstrata.attach(daemon.socket, client_name="test_engine") as session:
        yield session


def greedy(engine: Engine, cache, ids: list[int], count: int) -> list[int]:
    return list(engine.decode(cache, engine.prefill(cache, ids), count, stop=False))


def test_same_tokens_as_without_kvstrata(real: Engine, linked: kvstrata.Session):
    real.attach(linked)
    ids = real.tokenizer.chat([("user", f"{WORDS}\nSum this up.")])
    assert len(ids) > 200
    own = greedy(real, real.own_cache(), ids, 40)
    assert greedy(real, real.open("full", ids), ids, 40) == own


def test_it_writes_english(real: Engine, linked: kvstrata.Session):
    real.attach(linked)
    ids = real.tokenizer.chat([("user", "What is the capital of France?")])
    text = real.tokenizer.decode(greedy(real, real.open("full", ids), ids, 12))
    assert "Paris" in text


@pytest.mark.parametrize("transport", ["linked", "remote"])
def test_chunks_and_transports_agree_with_own_cache(tiny: Engine, daemon: Daemon, transport: str):
    ids = tiny.tokenizer.encode(WORDS)[:300]
    want = tiny.prefill(tiny.own_cache(), ids)
    with kvstrata.attach(daemon.socket, transport=transport) as session:
        tiny.attach(session)
        cache = tiny.open("full", [])
        for part in (1, 33, 299):
            tiny.llama.forward(ids[cache.tokens:part], cache)
        np.testing.assert_allclose(tiny.prefill(cache, ids), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("plan", ["full", "window{n_recent = 60, min_tokens = 0}",
                                  "quest{budget = 64, min_tokens = 0}", "chess{min_tokens = 0, window = 2}"])
def test_a_prompt_is_found_again(tiny: Engine, linked: kvstrata.Session, plan: str):
    tiny.attach(linked)
    ids = tiny.tokenizer.encode(plan + WORDS)[:200]
    first = tiny.open("full", ids)
    full = tiny.prefill(first, ids)
    again = tiny.open(plan, ids)
    assert again.tokens == len(ids) // 32 * 32
    logits = tiny.prefill(again, ids)
    if plan == "full":
        np.testing.assert_allclose(logits, full, rtol=1e-4, atol=1e-4)
    assert len(list(tiny.decode(again, logits, 20, stop=False))) == 20


@pytest.mark.parametrize("before", [None, 0, 100, 200])
def test_surprisal_after_a_prefix_hit(tiny: Engine, linked: kvstrata.Session, before: int | None):
    """The prompt was there, without surprisal, as a shorter one's, or as a whole; sekv has its spans all the same."""
    tiny.attach(linked)
    ids = tiny.tokenizer.encode(f"{before} {WORDS}")[:200]
    whole = np.zeros(len(ids), np.float32)
    if before == 0:
        tiny.prefill(tiny.open("full", ids), ids)
    elif before is not None:
        tiny.prefill(tiny.open("full", ids[:before]), ids[:before], surprisal=whole[:before])
    cache = tiny.open("sekv{min_tokens = 0, local = 16}", ids)
    assert cache.tokens == (before or 0) // 32 * 32
    surprisal = np.full(len(ids), -1, np.float32)
    tiny.prefill(cache, ids, surprisal=surprisal)
    assert (surprisal[cache.sequence.held + 1:] >= 0).all()
    cache.sequence.settle()
    assert cache.sequence.status.startswith("no trained parameters")


def test_shadow_measures(tiny: Engine, linked: kvstrata.Session):
    tiny.attach(linked)
    ids = tiny.tokenizer.encode(WORDS)[:256]
    pair: list[DaemonCache] = []
    for plan in ("window{n_sink = 4, n_recent = 28, min_tokens = 0}", "full"):
        pair.append(tiny.open(plan, ids))
        tiny.prefill(pair[-1], ids)
    shadow = ShadowCache(linked, *pair)
    for token in ids[:8]:
        tiny.step(shadow, token)
    recall = np.stack(shadow.recalls)
    assert recall.shape == (2, tiny_gguf.LAYERS, tiny_gguf.HEADS)
    assert (recall > 0).all() and (recall < 1).all()
    assert np.stack(shadow.errors).min() > 0
    assert shadow.tokens_read == [32.0] * 8
    assert shadow.pages[0].tolist() == [1, 0, 0, 0, 0, 0, 0, 1, 1]
    with pytest.raises(ValueError, match="256 tokens, the full one 264"):
        ShadowCache(linked, _held(tiny, ids), pair[1])


def _held(engine: Engine, ids: list[int]) -> DaemonCache:
    cache = engine.open("full", ids)
    engine.prefill(cache, ids)
    return cache


def test_shadow_of_full_is_exact(tiny: Engine, linked: kvstrata.Session):
    tiny.attach(linked)
    ids = tiny.tokenizer.encode(WORDS)[:100]
    shadow = ShadowCache(linked, _held(tiny, ids), _held(tiny, ids))
    tiny.step(shadow, 5)
    assert np.allclose(shadow.recalls[0], 1, atol=1e-5) and (shadow.errors[0] == 0).all()


def test_too_long_is_refused(tiny: Engine):
    ids = [5] * (tiny_gguf.CONTEXT + 1)
    with pytest.raises(ValueError, match="context of 512"):
        tiny.prefill(tiny.own_cache(), ids)


def test_own_cache_grows(tiny: Engine):
    ids = tiny.tokenizer.encode(WORDS)[:200]
    small, large = tiny.own_cache(8), tiny.own_cache(512)
    for cache in (small, large):
        tiny.llama.forward(ids[:90], cache)
    np.testing.assert_array_equal(tiny.prefill(small, ids), tiny.prefill(large, ids))


def test_series_are_right(tiny: Engine):
    """Surprisal against a plain log-softmax, a token at a time."""
    ids = tiny.tokenizer.encode(WORDS)[:20]
    got = np.zeros(20, np.float32)
    tiny.prefill(tiny.own_cache(), ids, surprisal=got)
    cache, want = tiny.own_cache(), [0.0]
    for token, following in zip(ids, ids[1:]):
        logits = tiny.step(cache, token).astype(np.float64)
        want.append(np.log(np.exp(logits - logits.max()).sum()) - (logits[following] - logits.max()))
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_daemon_gone(tiny: Engine):
    with Daemon() as own, kvstrata.attach(own.socket, timeout_ms=2000) as session:
        tiny.attach(session)
        ids = tiny.tokenizer.encode(WORDS)[:40]
        cache = tiny.open("full", ids)
        logits = tiny.prefill(cache, ids)
        own.process.kill()
        own.process.wait()
        with pytest.raises(kvstrata.KvstrataError) as error:
            for _ in tiny.decode(cache, logits, 400, stop=False):
                session.ping()
        assert error.value.code == kvstrata.Unavailable.code


def test_a_killed_engine_leaves_no_daemon():
    program = ("import os, signal, sys\nfrom kvstrata.daemon import Daemon\n"
               "print(Daemon().process.pid, flush=True)\nsys.stdin.read()\n")
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as process:
        handle = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
    try:
        assert select.select([handle], [], [], 30)[0], "kvstratad outlived the program that started it"
    finally:
        os.close(handle)


def test_path_of_a_missing_model(tmp_path: pathlib.Path):
    with pytest.raises(ValueError, match="cannot be read"):
        Engine.load(tmp_path / "none.gguf")
