# SPDX-License-Identifier: Apache-2.0
"""kvstrata.block_planes without a GPU: the form of blocks, what is refused, and structures as the header has them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from conftest import ROOT
from kvstrata.block_planes import BlockPlanes, PlanesShape, Rows, form_of

import kvstrata
from kvstrata import library

SHAPE = PlanesShape(layers=32, query_heads=32, kv_heads=8, head_dim=128, dtype="bf16", block_stride=64 * 8 * 268, slots=16,
                    max_rows=16, max_tokens=131072)


@pytest.mark.parametrize("plan, dim, token", [("strata", 128, 268), ("strata", 64, 136), ("strata{keep = 4}", 128, 140),
                                              ("strata{keep = 4}", 64, 72)])
def test_the_form_is_that_of_groups(plan: str, dim: int, token: int):
    """docs/spec/planes.md, "The bytes of a group": both runs of a group, over its tokens; and a slot has raw rows."""
    unit, row = 64, dim * (0.5 if "keep" in plan else 1.5)
    assert token == (2 * dim * 2 + unit * dim // 4 * 2 + 2 * unit * 2 + unit * row) / unit
    form = form_of(plan, replace(SHAPE, head_dim=dim))
    assert form.token_bytes == token
    assert form.slot_bytes == SHAPE.layers * unit * SHAPE.kv_heads * 2 * dim * 2


@pytest.mark.parametrize("plan, dim, upper, lower", [("strata", 128, 76, 192), ("strata", 64, 40, 96),
                                                      ("strata{keep = 4}", 128, 76, 64)])
def test_lower_runs_may_be_on_the_host(plan: str, dim: int, upper: int, lower: int):
    host = plan.replace("}", ", lower = 'host'}") if "{" in plan else plan + "{lower = 'host'}"
    form, whole = form_of(host, replace(SHAPE, head_dim=dim)), form_of(plan, replace(SHAPE, head_dim=dim))
    assert (form.token_bytes, form.lower_token_bytes) == (upper + 2 + 8 * lower // 64, lower)
    assert form_of(host.replace("'host'", "'host', hot = 0"), replace(SHAPE, head_dim=dim)).token_bytes == upper
    assert (whole.token_bytes, whole.lower_token_bytes) == (upper + lower, 0)
    assert form.slot_bytes == whole.slot_bytes


@pytest.mark.parametrize("plan, changes", [
    ("quest", {}), ("full", {}), ("strata{share = 0.1}", {}), ("strata{share = 0.1, run = 8}", {}),
    ("strata{unit = 128}", {}), ("strata", {"head_dim": 256}), ("strata", {"query_heads": 72})])
def test_what_is_not_served(plan: str, changes: dict[str, Any]):
    with pytest.raises(kvstrata.Unimplemented, match="^BLOCK_PLAN: .*is not served over an engine's own blocks"):
        form_of(plan, replace(SHAPE, **changes))


@pytest.mark.parametrize("changes, reason", [
    ({"dtype": "f32"}, "BLOCK_SHAPE"), ({"block_tokens": 16}, "BLOCK_SHAPE"), ({"head_dim": 96}, "GEOMETRY_INVALID"),
    ({"layers": 0}, "GEOMETRY_INVALID"), ({"kv_heads": 3}, "GEOMETRY_INVALID")])
def test_shapes_that_are_none(changes: dict[str, Any], reason: str):
    with pytest.raises(kvstrata.InvalidArgument, match=f"^{reason}: "):
        form_of("strata", replace(SHAPE, **changes))


def test_it_is_opened_on_a_gpu():
    """Where there is none it says so."""
    try:
        BlockPlanes("strata", SHAPE).close()
    except kvstrata.Unavailable as error:
        assert error.reason in ("CUDA_LIBRARY", "CUDA_NO_DEVICE")


def test_structures_are_the_headers():
    """Names in order; ctypes lays them out as C does."""
    text = (ROOT / "client" / "include" / "kvstrata" / "block_planes.h").read_text()
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    for name, ours in (("shape", library.PlanesShape), ("form", library.PlanesForm), ("batch", library.PlanesBatch),
                       ("rows", library.PlanesRows)):
        body = re.search(rf"typedef struct kvs_planes_{name} {{(.*?)}} kvs_planes_{name};", text, re.DOTALL)
        assert body is not None
        fields = [field for line in body[1].split(";") for field in re.findall(r"(\w+)\s*(?:,|$)", line.strip())]
        assert [field for field, _ in ours._fields_] == fields
    assert Rows(8, 16)._raw().stride == 16
