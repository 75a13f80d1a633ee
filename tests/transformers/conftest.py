# SPDX-License-Identifier: Apache-2.0
"""What the transformers suites share: paths, the real model twice (plain and enabled), a daemon, how tokens compare.

A tenth of each set runs by default, `--full` runs all, `--full --shard 3/10` every tenth case from the third on: ten runs
are all. Everything is fp32: page rows too.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence as Items
from typing import Any

import numpy as np
import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Behind PYTHONPATH, so that a run can name another build's binding.
sys.path += [str(ROOT / "tests"), *(str(ROOT / "integrations" / name / "src")
               for name in ("kvstrata", "kvstrata_numpy", "kvstrata_transformers"))]
os.environ["HF_HUB_OFFLINE"] = "1"

from kvstrata.daemon import Daemon  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import kvstrata_transformers  # noqa: E402

MARGIN = 3e-4  # logits; kernels sum in another order than torch
SEED = 20261123
DOCUMENT = pathlib.Path("/usr/share/common-licenses/GPL-3")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="all cases instead of a tenth")
    parser.addoption("--shard", default="1/1", help="I/N: of each set every N-th case, from the I-th on")


@pytest.fixture(scope="session")
def amount(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """How many cases of a set run."""
    full = request.config.getoption("--full")
    return lambda cases: cases if full else max(1, cases // 10)


@pytest.fixture(scope="session")
def shard(request: pytest.FixtureRequest) -> Callable[[Items[Any]], Items[Any]]:
    """The cases of a set that run."""
    part, parts = map(int, request.config.getoption("--shard").split("/"))
    assert 1 <= part <= parts, f"--shard {part}/{parts}"
    return lambda cases: cases[part - 1::parts]


@pytest.fixture
def random(request: pytest.FixtureRequest) -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


@pytest.fixture(scope="session")
def folder() -> pathlib.Path:
    """SmolLM2 as a Hugging Face folder, made once from the GGUF."""
    # Not at the top: a machine that runs test_cuda.py alone need not read GGUF.
    from kvstrata_numpy import hugging_face
    return hugging_face.cached()


@pytest.fixture(scope="session")
def tokenizer(folder: pathlib.Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def _load(folder: pathlib.Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def plain(folder: pathlib.Path) -> Any:
    return _load(folder)


@pytest.fixture(scope="session")
def loaded(folder: pathlib.Path) -> Any:
    return _load(folder)


@pytest.fixture
def model(loaded: Any, tokenizer: Any, daemon: Daemon) -> Iterator[Any]:
    """Enabled under plan `full`."""
    kvstrata_transformers.enable(loaded, tokenizer=tokenizer, socket=daemon.socket)
    yield loaded
    kvstrata_transformers.disable(loaded)


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    with Daemon() as started:
        yield started
        assert started.process.poll() is None, f"kvstratad died:\n{started.said()}"


@pytest.fixture(scope="session")
def text_ids(tokenizer: Any) -> list[int]:
    return tokenizer(DOCUMENT.read_text()).input_ids


@pytest.fixture
def columns(loaded: Any) -> Iterator[list[int]]:
    """The number of columns of each forward pass, as they come."""
    seen: list[int] = []
    hook = loaded.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    yield seen
    hook.remove()


def batch_of(prompts: list[list[int]], pad: int) -> dict[str, torch.Tensor]:
    """Left-padded."""
    length = max(map(len, prompts))
    ids = torch.tensor([[pad] * (length - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def assert_same(plain: Any, batch: dict[str, torch.Tensor], want: torch.Tensor, got: torch.Tensor) -> None:
    """Equal tokens, row by row, up to the first place where the plain model itself does not tell the two apart."""
    begin = batch["input_ids"].shape[1]
    for row, (a, b) in enumerate(zip(want, got)):
        n = min(len(a), len(b))
        differing = (a[:n] != b[:n]).nonzero().flatten()
        if not len(differing):
            assert len(a) == len(b), f"row {row}: {len(a)} and {len(b)} tokens"
            continue
        at = int(differing[0])
        assert at >= begin, f"row {row}: the prompt itself differs at {at}"
        mask = torch.cat([batch["attention_mask"][row], torch.ones(at - begin, dtype=torch.long)]).bool()
        with torch.no_grad():
            logits = plain(a[:at][mask][None]).logits[0, -1]
        margin = float(logits[a[at]] - logits[b[at]])
        print(f"row {row}: token {at - begin} differs, plain's margin {margin:.2e}")
        assert margin <= MARGIN, f"row {row}: token {at - begin} is {int(b[at])}, not {int(a[at])}; margin {margin}"


def prompts_of(text: list[int], random: np.random.Generator, number: int, shortest: int, longest: int
               ) -> list[list[int]]:
    """Pieces of a text, from anywhere in it; lengths spread evenly on a logarithmic scale."""
    lengths = np.geomspace(shortest, longest, number).astype(int)
    begins = [int(random.integers(0, len(text) - n + 1)) for n in lengths]
    return [text[b:b + n] for b, n in zip(begins, lengths)]
