# SPDX-License-Identifier: Apache-2.0
"""GGUF files: every supported tensor type, and what is wrong with bad ones."""

import pathlib

import gguf
import numpy as np
import pytest
import tiny_gguf

from kvstrata_numpy import gguf_file, llama
from kvstrata_numpy.gguf_file import GgufError

T = gguf.GGMLQuantizationType


@pytest.mark.parametrize("kind, tolerance", [(T.F16, 1e-3), (T.Q8_0, 1e-2), (T.Q4_1, 0.15), (T.Q4_0, 0.15)])
def test_quantised_weights_are_close_to_the_exact_ones(tmp_path: pathlib.Path, kind: T, tolerance: float):
    exact = gguf_file.read(tiny_gguf.write(tmp_path / "exact.gguf")).tensor("blk.0.ffn_up.weight")
    got = gguf_file.read(tiny_gguf.write(tmp_path / "q.gguf", kind)).tensor("blk.0.ffn_up.weight")
    assert got.dtype == np.float32 and got.shape == (tiny_gguf.FFN, tiny_gguf.WIDTH)
    error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    assert 0 < error < tolerance


def test_q4_1_against_its_definition(tmp_path: pathlib.Path):
    """A block is fp16 scale, fp16 minimum, 16 bytes of nibbles: low halves first."""
    file = gguf_file.read(tiny_gguf.write(tmp_path / "q.gguf", T.Q4_1))
    raw = np.asarray(file._tensors["blk.1.ffn_down.weight"].data).reshape(-1, 20)[7]
    scale, minimum = raw[:4].view(np.float16).astype(np.float32)
    want = np.concatenate([raw[4:] & 15, raw[4:] >> 4]).astype(np.float32) * scale + minimum
    np.testing.assert_allclose(file.tensor("blk.1.ffn_down.weight").reshape(-1, 32)[7], want, rtol=1e-6)


def test_foreign_file(tmp_path: pathlib.Path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(GgufError, match="not a GGUF file"):
        gguf_file.read(path)


@pytest.mark.parametrize("missing", ["file", "folder"])
def test_unreadable(tmp_path: pathlib.Path, missing: str):
    with pytest.raises(GgufError, match="cannot be read"):
        gguf_file.read(tmp_path / "absent" if missing == "file" else tmp_path)


def test_other_version(tmp_path: pathlib.Path):
    path = tiny_gguf.write(tmp_path / "x.gguf")
    data = bytearray(path.read_bytes())
    data[4:8] = (99).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(GgufError, match="version 99; supported: 2 and 3"):
        gguf_file.read(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.3, 0.7, 0.999])
def test_truncated(tmp_path: pathlib.Path, share: float):
    whole = tiny_gguf.write(tmp_path / "x.gguf").read_bytes()
    path = tmp_path / "short.gguf"
    path.write_bytes(whole[:8 + int((len(whole) - 8) * share)])
    with pytest.raises(GgufError, match="truncated"):
        gguf_file.read(path)


def test_missing_tensor_is_named(tmp_path: pathlib.Path):
    file = gguf_file.read(tiny_gguf.write(tmp_path / "x.gguf", without="blk.1.ffn_up"))
    with pytest.raises(GgufError, match=r"blk\.1\.ffn_up\.weight.*missing"):
        llama.Llama(file)


def test_other_architecture(tmp_path: pathlib.Path):
    file = gguf_file.read(tiny_gguf.write(tmp_path / "x.gguf", architecture="bert"))
    with pytest.raises(GgufError, match="'bert'; supported: 'llama'"):
        llama.Llama(file)


def test_halves_undo_the_permutation_of_gguf():
    """llama.cpp stores row pairs (i, i + d/2) of each head side by side."""
    heads, dim = 3, 8
    rows = np.arange(heads * dim, dtype=np.float32)[:, None] * np.ones((1, 4), np.float32)
    stored = rows.reshape(heads, 2, dim // 2, 4).swapaxes(1, 2).reshape(rows.shape)
    np.testing.assert_array_equal(llama.halves(np.ascontiguousarray(stored), heads), rows)
