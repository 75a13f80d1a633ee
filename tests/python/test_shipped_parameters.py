# SPDX-License-Identifier: Apache-2.0
"""Parameters that are shipped fit the models that they are named after, and no other."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
from kvstrata.daemon import Daemon

import kvstrata

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "parameters"
SMOLLM2 = {"layers": 30, "query_heads": 9, "kv_heads": 3, "head_dim": 64}
MODELS = {"smollm2-135m": SMOLLM2, "smollm2-135m-retrieval": SMOLLM2,
          "gemma3-270m": {"layers": 3, "query_heads": 4, "kv_heads": 1, "head_dim": 256}}  # three of 18 are served


@pytest.fixture(scope="module")
def session() -> Iterator[kvstrata.Session]:
    with Daemon("--set", f"parameters.directory={FOLDER}") as daemon:
        yield kvstrata.attach(daemon.socket)


def test_each_is_known() -> None:
    assert sorted(MODELS) == sorted(path.stem for path in FOLDER.glob("*.safetensors"))


@pytest.mark.parametrize("name", MODELS)
def test_they_fit_their_model(session: kvstrata.Session, name: str) -> None:
    plan = f'sekv{{parameters = "{name}"}}'
    model = session.register_model(name, name, **MODELS[name])
    with session.open(model, plan, range(64)) as sequence:
        assert f'parameters = "{name}"' in sequence.plan
    other = session.register_model("other", name, **MODELS[name] | {"layers": MODELS[name]["layers"] + 1})
    with pytest.raises(kvstrata.InvalidArgument, match="PARAMETERS_INVALID.*'W' is F32"):
        session.open(other, plan, range(64))
