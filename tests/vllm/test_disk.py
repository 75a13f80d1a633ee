# SPDX-License-Identifier: Apache-2.0
"""A prompt that the daemon holds on disk, after the daemon and the engine were started again."""

from __future__ import annotations

import pathlib

from kvstrata.daemon import Daemon

from conftest import assert_same

LONG, FASTER = 7600, 10


def test_first_token_of_a_prompt_on_disk(engine, text_ids: list[int], tmp_path: pathlib.Path):
    """The first token, from the request's arrival at a ready engine, against computing the prompt anew."""
    prompt = (text_ids * 2)[:LONG]
    disk = ("--set", f"disk.path={tmp_path}/tier", "--set", "disk.budget_bytes=4GiB", "--set", "disk.load_timeout=10s")
    once = {"prompts": [prompt], "tokens": 1}
    warm = {"prompts": [text_ids[5000:5040]], "tokens": 2}
    with Daemon(*disk) as daemon:
        computed = engine("full", [warm, once], {"socket": daemon.socket})
    with Daemon(*disk) as daemon:
        held = engine("full", [warm, once], {"socket": daemon.socket})
    assert_same(computed["batches"][1], held["batches"][1])
    assert held["batches"][1][0]["held"] == (LONG - 1) // 32 * 32
    ratio = computed["seconds"][1] / held["seconds"][1]
    print(f"computed {computed['seconds'][1]:.2f} s, held on disk {held['seconds'][1]:.2f} s: {ratio:.1f}x")
    assert ratio >= FASTER
