# SPDX-License-Identifier: Apache-2.0
"""Traces: what is recorded is what was there; bad files are refused with their reason."""

import json
import pathlib
import struct
import subprocess
import sys

import numpy as np
import pytest
import safetensors
import tiny_gguf

from kvstrata_numpy import trace
from kvstrata_numpy.cache import from_bf16_bits
from kvstrata_numpy.engine import Engine
from kvstrata_numpy.trace import TraceError

PROMPT, STEPS, TAIL = 40, 5, 8


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine.load(tiny_gguf.write(tmp_path_factory.mktemp("m") / "x.gguf"))


@pytest.fixture(scope="module")
def path(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    out = tmp_path_factory.mktemp("t") / "x.safetensors"
    ids = engine.tokenizer.encode("the cat and the dog. " * 20)[:PROMPT]
    trace.write(out, *trace.record(engine, engine.own_cache(), ids, STEPS, TAIL, [0, 1], "words"))
    return out


def test_shapes_and_series(engine: Engine, path: pathlib.Path):
    t = trace.read(path)
    assert (t.prompt, t.steps, t.tail, t.layers) == (PROMPT, STEPS, TAIL, [0, 1])
    assert t["k.1"].shape == (PROMPT + STEPS, tiny_gguf.KV_HEADS, 64)
    assert t["q.0"].shape == (TAIL + STEPS, tiny_gguf.HEADS, 64)
    assert t["surprisal"][0] == 0 and (t["surprisal"][1:] > 0).all()
    assert (t["entropy"] > 0).all() and t["entropy"].max() <= np.log(engine.llama.config.vocabulary) + 1e-3
    dot = engine.tokenizer.encode(".")[0]
    np.testing.assert_array_equal(t["boundary"][:PROMPT] == 1, t["tokens"][:PROMPT] == dot)


def test_reading_on_is_a_trace_of_known_steps(engine: Engine, tmp_path: pathlib.Path):
    ids = engine.tokenizer.encode("the cat and the dog. " * 20)[:PROMPT]
    whole, _ = trace.record(engine, engine.own_cache(), ids, 0, PROMPT, [0, 1], "words")
    trace.write(tmp_path / "x", *trace.record_reading(engine, engine.own_cache(), ids, STEPS, TAIL, [0, 1], "words"))
    t = trace.read(tmp_path / "x")
    assert (t.prompt, t.steps, t.tail) == (PROMPT - STEPS, STEPS, TAIL)
    assert t["surprisal"].shape == (PROMPT,) and "entropy" not in t.arrays
    for name in ("tokens", "surprisal", "k.1", "v.0"):
        np.testing.assert_array_equal(t[name], whole[name])
    np.testing.assert_array_equal(t["q.1"], whole["q.1"][-TAIL - STEPS:])


def test_others_can_read_it(path: pathlib.Path):
    with safetensors.safe_open(path, framework="np") as file:
        assert file.metadata()["format"] == "kvstrata-trace"
        np.testing.assert_array_equal(file.get_tensor("tokens"), trace.read(path)["tokens"])
        assert file.get_slice("k.0").get_dtype() == "BF16"


def test_rows_are_those_of_the_model(engine: Engine, path: pathlib.Path):
    """The last step's output from the trace's k, v and q is what the model's own cache gave."""
    t = trace.read(path)
    cache = engine.own_cache()
    outs = []
    attend = cache.attend
    cache.attend = lambda layer, *qkv: outs.append(attend(layer, *qkv)) or outs[-1]
    logits = engine.prefill(cache, t["tokens"][:PROMPT].tolist())
    for token in t["tokens"][PROMPT:]:
        assert int(logits.argmax()) == token
        logits = engine.step(cache, int(token))
    k, v, q = (from_bf16_bits(t[f"{x}.1"]).astype(np.float64) for x in "kvq")
    scores = np.einsum("hd,nd->hn", q[-1], k[:, 0]) / 8
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    out = weights @ v[:, 0] / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(outs[-1][0], out, rtol=0.03, atol=0.03)  # the trace's q is rounded to bf16


def rewrite(path: pathlib.Path, out: pathlib.Path, change) -> pathlib.Path:
    """The file with its header changed by change(header)."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    change(header)
    text = json.dumps(header).encode()
    out.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size:])
    return out


HEADERS = [
    ("TRACE_FOREIGN", lambda h: h.pop("__metadata__")),
    ("TRACE_VERSION", lambda h: h["__metadata__"].update(format_version="2")),
    ("TRACE_METADATA", lambda h: h["__metadata__"].pop("kv_heads")),
    ("TRACE_METADATA", lambda h: h["__metadata__"].update(N0="-3")),
    ("TRACE_METADATA", lambda h: h["__metadata__"].update(keys="rotated")),
    ("TRACE_METADATA", lambda h: (h["__metadata__"].update(keys="pre_rope"), h["__metadata__"].pop("rope_dim"))),
    ("TRACE_TENSOR", lambda h: h["__metadata__"].update(head_dim="128")),
    ("TRACE_TENSOR", lambda h: h.update({"key.1": h.pop("k.1")})),
    ("TRACE_HEADER", lambda h: h["k.0"].update(shape=[1])),
    ("TRACE_HEADER", lambda h: h["k.0"].update(dtype="F8")),
    ("TRACE_HEADER", lambda h: h.pop("tokens")),
]


@pytest.mark.parametrize("number", range(len(HEADERS)))
def test_bad_headers(path: pathlib.Path, tmp_path: pathlib.Path, number: int):
    reason, change = HEADERS[number]
    bad = rewrite(path, tmp_path / "bad.safetensors", change)
    with pytest.raises(TraceError) as error:
        trace.read(bad)
    assert error.value.reason == reason, str(error.value)
    assert str(bad) in str(error.value)


@pytest.mark.parametrize("keep", [0, 5, 8, 100, -1, -5000])
def test_truncated(path: pathlib.Path, tmp_path: pathlib.Path, keep: int):
    bad = tmp_path / "short.safetensors"
    bad.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(TraceError, match="TRACE_TRUNCATED"):
        trace.read(bad)


@pytest.mark.parametrize("content", [b"GGUF" + bytes(200), b"hello, this is a text file and no trace"])
def test_foreign(tmp_path: pathlib.Path, content: bytes):
    bad = tmp_path / "x.safetensors"
    bad.write_bytes(content)
    with pytest.raises(TraceError, match="TRACE_FOREIGN"):
        trace.read(bad)


def test_unreadable(tmp_path: pathlib.Path):
    with pytest.raises(TraceError, match="TRACE_UNREADABLE"):
        trace.read(tmp_path / "absent")


@pytest.mark.parametrize("value", [np.nan, np.inf, -1])
def test_bad_values(path: pathlib.Path, tmp_path: pathlib.Path, value: float):
    t = trace.read(path)
    arrays = {name: x.copy() for name, x in t.arrays.items()}
    arrays["entropy"][2] = value
    trace.write(tmp_path / "bad.safetensors", arrays, t.metadata)
    with pytest.raises(TraceError, match="TRACE_VALUE.*entropy"):
        trace.read(tmp_path / "bad.safetensors")


def test_command_line(tmp_path: pathlib.Path):
    model, doc, out = tmp_path / "m.gguf", tmp_path / "d.txt", tmp_path / "t.safetensors"
    tiny_gguf.write(model)
    doc.write_text("the end. " * 30)
    command = [sys.executable, "-m", "kvstrata_numpy.trace", "--out", out, "--model", model, "--doc", doc,
               "--tokens", "64", "--steps", "3", "--layers", "1"]
    subprocess.run(command, check=True, timeout=120)
    t = trace.read(out)
    assert (t.prompt, t.steps, t.layers) == (64, 3, [1])
    refused = subprocess.run([*command[:-1], "2"], capture_output=True, text=True, timeout=120)
    assert refused.returncode == 1 and "layers 0 .. 1" in refused.stderr
