# SPDX-License-Identifier: Apache-2.0
"""SGLang and transformers on one daemon: what one computed of a prompt the other does not compute again, where
both are given one digest."""

from __future__ import annotations

import pytest

from conftest import SHARED, assert_computed_once


@pytest.mark.parametrize("first", ["sglang", "transformers"])
def test_one_prompt(engine, by_transformers, text_ids: list[int], first: str):
    def by_sglang(socket: str, prompt: list[int], tokens: int) -> tuple[list[int], int]:
        row, = engine("full", [{"prompts": [prompt], "tokens": tokens}], socket=socket,
                      environment={"KVSTRATA_DIGEST": SHARED})["batches"][0]
        return row["tokens"], row["held"]

    order = (by_sglang, by_transformers) if first == "sglang" else (by_transformers, by_sglang)
    assert_computed_once(*order, text_ids[1000:1700], unit=32)
