# SPDX-License-Identifier: Apache-2.0
"""Two ranks of tensor parallelism on one CPU: each has its part of a chunk, and in canonical rows other numbers of ranks
read what they wrote."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest
from kvstrata.daemon import Daemon

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

from conftest import assert_same  # noqa: E402
from families import made, prompt  # noqa: E402

BATCH: dict[str, Any] = {"prompts": [prompt(600)], "tokens": 8}
RANKS = {1: {}, 2: {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "disable_custom_all_reduce": True}}


@pytest.fixture
def heads(tmp_path: pathlib.Path) -> dict[str, Any]:
    """A model that can be divided."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("vLLM wants a core for each rank")
    return made("divisible", tmp_path)


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """One a rank; vLLM divides by NUMA nodes otherwise."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


def held(batches: list[list[dict[str, Any]]]) -> list[int]:
    return [rows[0]["held"] for rows in batches]


def test_two_ranks(engine, heads: dict[str, Any]):
    ran = engine("chunks", [BATCH, {**BATCH, "reset": True}], **heads, **RANKS[2])["batches"]
    assert held(ran) == [0, 512]
    assert_same(*ran)


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
def test_what_so_many_ranks_wrote_others_read(engine, heads: dict[str, Any], monkeypatch: pytest.MonkeyPatch, first: int,
                                              second: int):
    """Where rows are canonical, and the user names the model: parts of it have sums of their own."""
    with Daemon() as daemon:
        spec = {"socket": daemon.socket, "extra": {"canonical_layout": True, "digest": "of whole heads"}}
        ran = []
        for ranks in (first, second):
            monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1" if ranks == 2 else "nobind")
            ran += engine("chunks", [BATCH], spec, **heads, **RANKS[ranks])["batches"]
    assert held(ran) == [0, 512]
    assert_same(*ran)
