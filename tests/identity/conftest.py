# SPDX-License-Identifier: Apache-2.0
"""What the suites of identities share: paths, small random models, keys and values of a plain forward.

    pytest tests/identity [--draws 2000] [--seed 7]
"""

from __future__ import annotations

import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Behind PYTHONPATH, so that a run can name another build's binding.
sys.path += [str(pathlib.Path(__file__).parent), *(str(ROOT / "integrations" / name / "src") for name in
                                                   ("kvstrata", "kvstrata_transformers"))]
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
import transformers  # noqa: E402

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--draws", type=int, default=300, help="pairs of models of the property test")
    parser.addoption("--seed", type=int, default=None, help="of the property test; else a new one")
