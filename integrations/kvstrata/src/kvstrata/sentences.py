# SPDX-License-Identifier: Apache-2.0
"""Which token ids end a sentence: for register_model(boundary_tokens=), by any tokenizer of transformers' kind."""

from __future__ import annotations

from typing import Any

_ENDS = (".", "!", "?", "...", "…", "。", "！", "？")


def boundary_tokens(tokenizer: Any) -> list[int]:
    """Ids of full stops and their kin, with or without a space, and of blank lines. Decodes the vocabulary once."""
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    return [i for i, text in enumerate(texts) if text.strip() in _ENDS or (not text.strip() and text.count("\n") > 1)]
