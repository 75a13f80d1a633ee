# SPDX-License-Identifier: Apache-2.0
"""docs/plans.toml, as an operator gives it to a daemon: each of its plans opens and serves, by its name alone."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator

import numpy as np
import pytest
from conftest import ROOT
from toy import Toy

import kvstrata
from kvstrata.daemon import Daemon

FILE = ROOT / "docs" / "plans.toml"
PLANS: dict[str, str] = tomllib.loads(FILE.read_text())["plans"]
N = 80
SMOLLM2 = {"layers": 30, "heads": 9, "kv_heads": 3}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon("--config", str(FILE)) as started:
        yield started
        assert started.process.poll() is None, f"kvstratad died:\n{started.said()}"


def test_the_daemon_lists_all_of_them(session: kvstrata.Session) -> None:
    assert len(PLANS) > 10
    for name in PLANS:
        assert session.plan_needs(name).text == session.plan_needs(PLANS[name]).text


@pytest.mark.parametrize("name", PLANS)
def test_it_opens_and_serves(session: kvstrata.Session, random: np.random.Generator, name: str) -> None:
    trained = "parameters" in PLANS[name]  # which are of one model's shape
    toy = Toy(random, N, **SMOLLM2 if trained else {})
    model = toy.register(session)
    with session.open(model, name, toy.ids[:N - 1]) as named, session.open(model, PLANS[name], toy.ids[:N - 1]) as spelled:
        assert named.plan == spelled.plan
        toy.feed(session, named, 0, N - 1)
        named.prefill_done()
        out = toy.feed(session, named, N - 1, N)
        # Shorter than anything is chosen of.
        np.testing.assert_allclose(out[0][0], toy.expected(0, N - 1)[0], rtol=2e-2, atol=2e-2)
