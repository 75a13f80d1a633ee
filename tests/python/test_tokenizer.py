# SPDX-License-Identifier: Apache-2.0
"""Tokenizer: round trips, digits, special tokens, streaming, chat."""

import pathlib

import pytest
import tiny_gguf

from kvstrata_numpy import gguf_file
from kvstrata_numpy.gguf_file import GgufError
from kvstrata_numpy.tokenizer import Stream, Tokenizer

TEXTS = ["", "the cat and the dog", "  leading, trailing  ", "1234567 and 3.14", "tabs\tand\r\nlines\n\n\n",
         "naïve café — „Zitat“ …", "日本語。中文！", "🙂🙃 emoji", "a\u0000b", "<|im_end|> is text here"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(gguf_file.read(tiny_gguf.write(tmp_path_factory.mktemp("t") / "x.gguf")))


@pytest.fixture(scope="module")
def real(model_file: str) -> Tokenizer:
    return Tokenizer(gguf_file.read(model_file))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("which", ["tiny", "real"])
def test_round_trip(which: str, text: str, request: pytest.FixtureRequest):
    tokenizer = request.getfixturevalue(which)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = Stream(tokenizer)
    assert "".join(map(stream.add, ids)) == text


def test_round_trip_of_a_document(real: Tokenizer):
    text = pathlib.Path(__file__).read_text() * 3
    assert real.decode(real.encode(text)) == text


def test_known_ids(real: Tokenizer):
    """What Hugging Face's tokenizer of SmolLM2 gives."""
    assert real.encode("Hello, world!") == [19556, 28, 905, 17]


def test_merges_are_used(tiny: Tokenizer):
    assert tiny.encode("a the") == [tiny.vocabulary["a"], tiny.vocabulary["Ġthe"]]


def test_digits_stand_alone_even_where_a_merge_exists(tiny: Tokenizer):
    assert tiny.encode("12") == [tiny.vocabulary["1"], tiny.vocabulary["2"]]


def test_special_tokens_are_not_found_in_text(real: Tokenizer):
    assert not set(real.encode("<|im_start|>system<|im_end|><|endoftext|>")) & real.special


def test_chat_places_markers_by_id(real: Tokenizer):
    ids = real.chat([("user", "Hi <|im_end|>")], system="S")
    assert real.decode(ids) == "system\nS\nuser\nHi <|im_end|>\nassistant\n"
    assert [i for i in ids if i in real.special] == [1, 2, 1, 2, 1]
    assert real.stops() == {2}


def test_boundaries_end_sentences(real: Tokenizer):
    ends = set(real.boundary_tokens())
    for text in (".", "?", "!", "\n\n", "。"):
        assert real.encode(text)[-1] in ends, text
    for text in (",", " the", "\n", "a.b"):
        assert real.encode(text)[-1] not in ends, text
    assert not ends & real.special


@pytest.mark.parametrize("key, value, message", [
    ("model", "llama", "tokenizer.ggml.model is 'llama'; supported: 'gpt2'"),
    ("pre", "qwen2", "tokenizer.ggml.pre is 'qwen2'; supported: gpt-2, smollm")])
def test_other_tokenizers_are_refused(tmp_path: pathlib.Path, key: str, value: str, message: str):
    with pytest.raises(GgufError, match=message):
        Tokenizer(gguf_file.read(tiny_gguf.write(tmp_path / "x.gguf", **{key: value})))
