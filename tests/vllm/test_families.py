# SPDX-License-Identifier: Apache-2.0
"""Behind chunks that the daemon held, a model says what plain vLLM says behind a hit of its own prefix cache: families
that differ in what they cache."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

from families import FAMILIES, NOT_ON_CPUS, adapter, made, prompt  # noqa: E402

TOKENS, HELD = 1300, 1280  # whole chunks, of 256 tokens and of 640
NEW = 8


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("families")


def held(batches: list[list[dict[str, Any]]]) -> list[list[int]]:
    return [[row["held"] for row in rows] for rows in batches]


def said(rows: list[dict[str, Any]]) -> list[tuple[list[int], list[Any]]]:
    return [(row["tokens"], row["top"]) for row in rows]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("divisible", "wide", *NOT_ON_CPUS)])
def test_a_hit_is_vllms_own(engine, models: pathlib.Path, family: str):
    batch = {"prompts": [prompt(TOKENS)], "tokens": NEW}
    computed, own, ours = engine("chunks", [batch, batch, {**batch, "reset": True}], **made(family, models))["batches"]
    assert held([computed, own, ours]) == [[0], [HELD], [HELD]]
    assert said(ours) == said(own)


def test_a_state_is_held_at_the_end_of_a_block(engine, models: pathlib.Path):
    """vLLM has states of a recurrent layer where a step ended: behind a block, of which 256 tokens are two."""
    batch = {"prompts": [prompt(1430)], "tokens": NEW}
    _, own, ours = engine("chunks", [batch, batch, {**batch, "reset": True}], **made("wide", models))["batches"]
    assert held([own, ours]) == [[11 * 128], [11 * 128]]
    assert said(ours) == said(own)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_plain_says_the_same(engine, models: pathlib.Path, eager: bool):
    batch, arguments = {"prompts": [prompt(TOKENS)], "tokens": NEW}, {**made("llama", models), "enforce_eager": eager}
    own = engine(None, [batch, batch], **arguments)["batches"]
    ran = engine("chunks", [batch, {**batch, "reset": True}], **arguments)["batches"]
    assert held(own) == held(ran) == [[0], [HELD]] and [*map(said, ran)] == [*map(said, own)]


def test_adapters(engine, models: pathlib.Path):
    """Each request finds what its own adapter made, and what no adapter made."""
    arguments = {**made("llama", models), "enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "dtype": "bfloat16"}
    adapters = [None, *(adapter(models / name, arguments["model"], seed) for seed, name in enumerate("ab"))]
    batches = [{"prompts": [prompt(TOKENS)], "tokens": NEW, "lora": at} for at in adapters]
    again = [{**batches[0], "reset": True}, *batches[1:]]
    ran = engine("chunks", [*batches, *batches, *again], **arguments)["batches"]
    assert held(ran) == [[0]] * 3 + [[HELD]] * 6
    assert [said(rows) for rows in ran[6:]] == [said(rows) for rows in ran[3:6]]
    assert len({tuple(rows[0]["tokens"]) for rows in ran[:3]}) == 3


def test_salts(engine, models: pathlib.Path):
    """Nobody of another salt finds it."""
    batch = {"prompts": [prompt(TOKENS)], "tokens": NEW, "reset": True}
    salts = [{"cache_salt": "a"}, {"cache_salt": "b"}, {}, {"cache_salt": "a"}, {"cache_salt": "b"}, {}]
    ran = engine("chunks", [{**batch, "with": salt} for salt in salts], **made("llama", models))["batches"]
    assert held(ran) == [[0]] * 3 + [[HELD]] * 3
    assert len({tuple(rows[0]["tokens"]) for rows in ran}) == 1
