# SPDX-License-Identifier: Apache-2.0
"""Where the suites find research, what they share with tests, and kvstrata."""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# kvstrata behind PYTHONPATH, so that a run can name another build's binding.
sys.path[:0] = [str(ROOT / "research"), str(ROOT / "tests" / "python"), str(ROOT / "tests")]
sys.path += [str(ROOT / "integrations" / name / "src")
             for name in ("kvstrata", "kvstrata_numpy", "kvstrata_transformers")]
os.environ["HF_HUB_OFFLINE"] = "1"
