# SPDX-License-Identifier: Apache-2.0
"""What the suites of vLLM and of SGLang share: how tokens compare, and how many cases run. Prompts of a real model, and
transformers as the second engine, are for SGLang.

A fifth of each set runs by default, `--full` runs all. Everything is fp32: page rows too. A conftest.py imports the
fixtures by name, and brings `engine` of its own (plan, batches, ...), whose batches are lists of rows: {"tokens", "top"
(logprobs by token, a step each), "reason", "held"}.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "integrations" / name / "src") for name in ("kvstrata", "kvstrata_numpy")]

from kvstrata_numpy import hugging_face  # noqa: E402

MARGIN = 3e-4  # tolerance of logprobs; kernels sum in another order than the engine's
SEED = 20261124
NEW = 24  # tokens of an answer
SHARED = "SmolLM2-135M in fp32"  # a digest for engines that load differently, and are to share pages
DOCUMENT = pathlib.Path("/usr/share/common-licenses/GPL-3")


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
    return hugging_face.cached()


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


@pytest.fixture(scope="session")
def plain(engine: Callable[..., dict[str, Any]], prompts: list[list[int]]) -> list[dict[str, Any]]:
    """The plain engine's tokens of each prompt."""
    return engine(None, [{"prompts": prompts, "tokens": NEW}])["batches"][0]


def assert_same(want: list[dict[str, Any]], got: list[dict[str, Any]]) -> None:
    """Equal tokens, up to the first place where the plain engine itself does not tell the two apart."""
    assert len(want) == len(got)
    for row, (a, b) in enumerate(zip(want, got)):
        assert b["reason"] == "length", f"row {row} ended with {b['reason']}: {b.get('message', '')}"
        at = next((i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"])) if x != y), None)
        if at is None:
            assert len(a["tokens"]) == len(b["tokens"])
            continue
        top = a["top"][at]
        margin = top[str(a["tokens"][at])] - top.get(str(b["tokens"][at]), -np.inf)
        print(f"row {row}: token {at} differs, plain's margin {margin:.2e}")
        assert margin <= MARGIN, f"row {row}: token {at} is {b['tokens'][at]}, not {a['tokens'][at]}; margin {margin}"


Generate = Callable[[str, list[int], int], tuple[list[int], int]]
"""generate(socket, prompt, tokens to answer with): the tokens, and how many of the prompt were held."""


@pytest.fixture
def by_transformers(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Generate:
    """The model in transformers, in this process."""
    monkeypatch.syspath_prepend(ROOT / "integrations" / "kvstrata_transformers" / "src")
    import torch
    from transformers import AutoModelForCausalLM

    import kvstrata_transformers
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(socket: str, prompt: list[int], tokens: int) -> tuple[list[int], int]:
        kvstrata_transformers.enable(model, socket=socket, digest=SHARED)
        cache = kvstrata_transformers.cache(model)
        out = model.generate(torch.tensor([prompt]), past_key_values=cache, max_new_tokens=tokens,
                             min_new_tokens=tokens, do_sample=False)
        held = cache.rows[0].sequence.held
        kvstrata_transformers.disable(model)
        return out[0, len(prompt):].tolist(), held
    return generate


def assert_computed_once(first: Generate, second: Generate, prompt: list[int], unit: int) -> None:
    """One daemon, two engines, one prompt: equal tokens, and the second holds all whole units that the first made.
    unit: the larger of a page and a block of an engine's, in tokens."""
    from kvstrata.daemon import Daemon
    with Daemon() as daemon:
        (tokens, held), (again, held_then) = (by(daemon.socket, prompt, 12) for by in (first, second))
    assert tokens == again
    assert (held, held_then) == (0, (len(prompt) - 1) // unit * unit)
