# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, from a GGUF's metadata: byte-level BPE.

Special tokens (<|im_start|> and the like) are never found in text: a document that spells one out is
text. Only chat() places them, by id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BpeTokenizer

from .gguf_file import GgufError, GgufFile

SPECIAL = 3  # tokenizer.ggml.token_type of control tokens
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

# How tokenizer.ggml.pre cuts text before BPE. smollm: single digits, then GPT-2's rule.
_PRE_TOKENIZERS = {
    "smollm": lambda: pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]),
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
}
_SENTENCE_ENDS = (".", "!", "?", "…", "...", "。", "！", "？")


class Tokenizer:
    """Immutable after construction; thread-safe."""

    def __init__(self, file: GgufFile) -> None:
        model = file.require("tokenizer.ggml.model")
        if model != "gpt2":
            raise GgufError(f"{file.path}: tokenizer.ggml.model is {model!r}; supported: 'gpt2' (BPE)")
        pre = file.get("tokenizer.ggml.pre", "gpt-2")
        if pre not in _PRE_TOKENIZERS:
            raise GgufError(f"{file.path}: tokenizer.ggml.pre is {pre!r}; "
                            f"supported: {', '.join(sorted(_PRE_TOKENIZERS))}")
        self.name = f"{model}/{pre}"
        self._tokens: list[str] = file.require("tokenizer.ggml.tokens")
        types: list[int] = file.get("tokenizer.ggml.token_type", [])
        merges = [tuple(line.split(" ", 1)) for line in file.require("tokenizer.ggml.merges")]
        self.vocabulary = {token: i for i, token in enumerate(self._tokens)}
        self.special = frozenset(i for i, kind in enumerate(types) if kind == SPECIAL)
        self._bpe = BpeTokenizer(models.BPE(vocab=self.vocabulary, merges=merges))
        self._bpe.pre_tokenizer = _PRE_TOKENIZERS[pre]()
        self._bpe.decoder = decoders.ByteLevel()
        self._bytes = _byte_table()
        self.eos: int = file.get("tokenizer.ggml.eos_token_id", -1)
        self._chat_markers = self._find_chat_markers(file)

    def encode(self, text: str) -> list[int]:
        return self._bpe.encode(text, add_special_tokens=False).ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of the ids, special tokens left out; may end inside a UTF-8 character."""
        table = self._bytes
        return bytes(table[c] for i in ids if i not in self.special for c in self._tokens[i])

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def chat(self, turns: Sequence[tuple[str, str]], system: str = DEFAULT_SYSTEM) -> list[int]:
        """ChatML of (role, text) turns, ready for the assistant's answer."""
        if self._chat_markers is None:
            raise GgufError("this model has no ChatML template: <|im_start|> and <|im_end|> are not both "
                            "control tokens of its vocabulary; give plain text instead")
        start, end = self._chat_markers
        newline = self.encode("\n")
        ids: list[int] = []
        for role, text in [("system", system), *turns]:
            ids += [start, *self.encode(f"{role}\n{text}"), end, *newline]
        return [*ids, start, *self.encode("assistant\n")]

    def save(self, path: str) -> None:
        """As tokenizer.json. Who loads that finds special tokens in text, as Hugging Face's tokenizers do."""
        copy = BpeTokenizer.from_str(self._bpe.to_str())
        copy.add_special_tokens([AddedToken(self._tokens[i], special=True, normalized=False)
                                 for i in sorted(self.special)])
        copy.save(path)

    def stops(self) -> frozenset[int]:
        """Ids that end an answer."""
        ends = {self.eos} | ({self._chat_markers[1]} if self._chat_markers else set())
        return frozenset(i for i in ends if i >= 0)

    def boundary_tokens(self) -> list[int]:
        """Ids that end a sentence: . ! ? ellipsis, their CJK forms, with and without a space; blank lines."""
        ids = []
        for i, token in enumerate(self._tokens):
            text = bytes(self._bytes.get(c, 0) for c in token).decode("utf-8", errors="replace")
            if text.strip() in _SENTENCE_ENDS or text.count("\n") >= 2:
                ids.append(i)
        return ids

    def _find_chat_markers(self, file: GgufFile) -> tuple[int, int] | None:
        start, end = self.vocabulary.get("<|im_start|>"), self.vocabulary.get("<|im_end|>")
        if start is None or end is None or "<|im_start|>" not in file.get("tokenizer.chat_template", ""):
            return None
        return start, end


class Stream:
    """Decodes ids as they come; holds back bytes until their UTF-8 character is complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._held = b""

    def add(self, token: int) -> str:
        self._held += self._tokenizer.decode_bytes([token])
        try:
            text, self._held = self._held.decode("utf-8"), b""
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and len(self._held) < 4:
                return ""
            text, self._held = self._held.decode("utf-8", errors="replace"), b""
        return text


def _byte_table() -> dict[str, int]:
    """GPT-2's printable stand-in of every byte, inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1),
                 *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(b): b for b in printable}
    spare = 0
    for b in range(256):
        if b not in printable:
            table[chr(256 + spare)] = b
            spare += 1
    return table
