# SPDX-License-Identifier: Apache-2.0
"""A prompt that the daemon holds on disk, after the daemon and the engine were started again."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

from conftest import ROOT

FASTER = 10


def test_first_token_of_a_prompt_on_disk(folder: pathlib.Path, tmp_path: pathlib.Path):
    """From the request's arrival at a ready engine, against computing the prompt anew; the program holds the two to the
    same token, and the second to all pages of the prompt."""
    result = tmp_path / "result.json"
    subprocess.run([sys.executable, str(ROOT / "bench" / "transformers_first_token.py"), "--rounds", "1", "--json-out",
                    str(result)], check=True)
    first, = json.loads(result.read_text())["rows"]
    print(f"computed {first['baseline']['value']:.0f} ms, held on disk {first['value']:.0f} ms: {first['ratio']:.1f}x")
    assert first["ratio"] >= FASTER
