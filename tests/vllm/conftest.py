"""What the vLLM suites share: prompts, and vLLM in a process of its own (engine.py), plain and with kvstrata.

A fifth of each set runs by default, `--full` runs all. Everything is fp32: page rows too.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "integrations" / name / "src") for name in ("kvstrata", "kvstrata_numpy", "kvstrata_vllm")]

from kvstrata_numpy import hugging_face  # noqa: E402
from kvstrata_numpy.download import cache_folder, model_path  # noqa: E402

MARGIN = 3e-4  # of logprobs; kernels sum in another order than vLLM's
SEED = 20261123
DOCUMENT = pathlib.Path("/usr/share/common-licenses/GPL-3")
PATIENCE = 1800  # seconds of a process


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="all cases instead of a fifth")


@pytest.fixture(scope="session")
def amount(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """How many cases of a set run."""
    full = request.config.getoption("--full")
    return lambda cases: cases if full else max(2, cases // 5)


@pytest.fixture(scope="session")
def folder() -> pathlib.Path:
    """SmolLM2 as a Hugging Face folder, made once from the GGUF."""
    made = cache_folder() / "SmolLM2-135M-Instruct.hf"
    if not made.exists():
        hugging_face.write(model_path(), made)
    return made


@pytest.fixture(scope="session")
def text_ids(folder: pathlib.Path) -> list[int]:
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(folder)(DOCUMENT.read_text()).input_ids


@pytest.fixture(scope="session")
def prompts(text_ids: list[int], amount: Callable[[int], int]) -> list[list[int]]:
    """10 to 3,000 tokens, evenly on a logarithmic scale, from anywhere in the text."""
    print(f"seed {SEED}")
    random = np.random.default_rng(SEED)
    lengths = np.geomspace(10, 3000, amount(20)).astype(int)
    begins = [int(random.integers(0, len(text_ids) - n)) for n in lengths]
    return [text_ids[b:b + n] for b, n in zip(begins, lengths)]


def command_of(at: pathlib.Path, folder: pathlib.Path, plan: str | None, batches: list[dict[str, Any]] | None,
               spec: dict[str, Any], **llm: Any) -> list[str]:
    """Of engine.py, whose files lie in the folder `at`; the last argument is where its RESULT is going to be."""
    arguments = {"model": str(folder), "enforce_eager": True, "max_num_batched_tokens": 512, "max_num_seqs": 8,
                 "max_model_len": 8192}
    (at / "spec.json").write_text(json.dumps({"plan": plan, "batches": batches, "llm": {**arguments, **llm}, **spec}))
    return [sys.executable, str(pathlib.Path(__file__).with_name("engine.py")), str(at / "spec.json"),
            str(at / "result.json")]


@pytest.fixture(scope="session")
def engine(folder: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """engine(plan, batches, spec={more of engine.py's SPEC}, **arguments of vllm.LLM): RESULT of engine.py."""
    def run(plan: str | None, batches: list[dict[str, Any]], spec: dict[str, Any] | None = None, **llm: Any
            ) -> dict[str, Any]:
        command = command_of(tmp_path_factory.mktemp("engine"), folder, plan, batches, spec or {}, **llm)
        ran = subprocess.run(command, timeout=PATIENCE, capture_output=True, text=True,
                             env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        print(ran.stderr[-2000:])
        assert ran.returncode == 0, ran.stderr[-9000:]
        return {**json.loads(pathlib.Path(command[-1]).read_text()), "log": ran.stderr}
    return run


@pytest.fixture(scope="session")
def plain(engine: Callable[..., dict[str, Any]], prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Plain vLLM's 24 tokens of each prompt."""
    return engine(None, [{"prompts": prompts, "tokens": 24}])["batches"][0]


def assert_same(want: list[dict[str, Any]], got: list[dict[str, Any]]) -> None:
    """Equal tokens, up to the first place where plain vLLM itself does not tell the two apart."""
    assert len(want) == len(got)
    for row, (a, b) in enumerate(zip(want, got)):
        assert b["reason"] == "length", f"row {row} ended with {b['reason']}"
        at = next((i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"])) if x != y), None)
        if at is None:
            assert len(a["tokens"]) == len(b["tokens"])
            continue
        top = a["top"][at]
        margin = top[str(a["tokens"][at])] - top.get(str(b["tokens"][at]), -np.inf)
        print(f"row {row}: token {at} differs, plain's margin {margin:.2e}")
        assert margin <= MARGIN, f"row {row}: token {at} is {b['tokens'][at]}, not {a['tokens'][at]}; margin {margin}"
