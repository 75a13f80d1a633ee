# SPDX-License-Identifier: Apache-2.0
"""What the SGLang suites share: SGLang in processes of its own (engine.py), plain and with kvstrata.

sgl_kernel, which PyPI has for CUDA only, is stood in for (stand_in/).
"""

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
sys.path += [str(HERE / "stand_in"), str(HERE.parent), str(ROOT / "integrations" / "kvstrata_sglang" / "src")]

from engine_cases import (NEW, SEED, SHARED, amount, assert_computed_once, assert_same,  # noqa: E402, F401
                          by_transformers, folder, plain, prompts, pytest_addoption, text_ids)

PATIENCE = 3600  # seconds of an engine


@pytest.fixture(scope="session")
def engine(folder: pathlib.Path, tmp_path_factory: pytest.TempPathFactory  # noqa: F811
          ) -> Callable[..., dict[str, Any]]:
    """engine(plan, batches, record=, socket=, environment=, daemon=, **arguments of sglang.Engine): RESULT of engine.py,
    and its log."""
    def run(plan: str | None, batches: list[dict[str, Any]], record: bool = False, socket: str | None = None,
            environment: dict[str, str] | None = None, daemon: tuple[str, ...] = (), **server: Any) -> dict[str, Any]:
        at = tmp_path_factory.mktemp("engine")
        arguments = {"model_path": str(folder), "chunked_prefill_size": 512, "max_running_requests": 8,
                     "context_length": 8192, "max_total_tokens": 16384, "log_level": "info"}
        spec = {"plan": plan, "batches": batches, "record": record, "socket": socket, "daemon": daemon,
                "server": {**arguments, **server}}
        (at / "spec.json").write_text(json.dumps(spec))
        with open(at / "log", "w") as log:
            ran = subprocess.run([sys.executable, str(HERE / "engine.py"), str(at / "spec.json"),
                                  str(at / "result.json")], timeout=PATIENCE, stdout=log, stderr=log,
                                 env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(sys.path)})
        said = (at / "log").read_text()
        print(said[-2000:])
        assert ran.returncode == 0, said[-9000:]
        return {**json.loads((at / "result.json").read_text()), "log": said}
    return run
