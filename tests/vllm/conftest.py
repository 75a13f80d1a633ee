# SPDX-License-Identifier: Apache-2.0
"""What the vLLM suites share: vLLM in a process of its own (engine.py), plain and with kvstrata."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path += [str(HERE), str(HERE.parent), str(ROOT / "integrations" / "kvstrata_vllm" / "src")]

from engine_cases import SEED, amount, assert_same, pytest_addoption  # noqa: E402, F401

PATIENCE = 1800  # seconds of a process


def command_of(at: pathlib.Path, mode: str | None, batches: list[dict[str, Any]] | None, spec: dict[str, Any], /,
               **llm: Any) -> list[str]:
    """The command of engine.py, whose files lie in the folder `at`; the last argument is where its RESULT will be."""
    arguments = {"enforce_eager": True, "max_num_batched_tokens": 512, "max_num_seqs": 8}
    (at / "spec.json").write_text(json.dumps({"mode": mode, "batches": batches, "llm": {**arguments, **llm}, **spec}))
    return [sys.executable, str(HERE / "engine.py"), str(at / "spec.json"), str(at / "result.json")]


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """engine(mode, batches, spec={more of engine.py's SPEC}, **arguments of vllm.LLM): RESULT of engine.py."""
    def run(mode: str | None, batches: list[dict[str, Any]], spec: dict[str, Any] | None = None, **llm: Any
            ) -> dict[str, Any]:
        command = command_of(tmp_path_factory.mktemp("engine"), mode, batches, spec or {}, **llm)
        ran = subprocess.run(command, timeout=PATIENCE, capture_output=True, text=True,
                             env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        print(ran.stderr[-2000:])
        assert ran.returncode == 0, ran.stderr[-9000:]
        return {**json.loads(pathlib.Path(command[-1]).read_text()), "log": ran.stderr}
    return run
