# SPDX-License-Identifier: Apache-2.0
"""vLLM and transformers on one daemon: what one computed of a prompt the other does not compute again, where both
are given one digest."""

from __future__ import annotations

import pytest

from conftest import SHARED, assert_computed_once


@pytest.mark.parametrize("first", ["vllm", "transformers"])
def test_one_prompt(engine, by_transformers, text_ids: list[int], first: str):
    def by_vllm(socket: str, prompt: list[int], tokens: int) -> tuple[list[int], int]:
        spec = {"socket": socket, "extra": {"digest": SHARED}}
        row, = engine("full", [{"prompts": [prompt], "tokens": tokens}], spec)["batches"][0]
        return row["tokens"], row["held"]

    order = (by_vllm, by_transformers) if first == "vllm" else (by_transformers, by_vllm)
    assert_computed_once(*order, text_ids[1000:1700], 32)
