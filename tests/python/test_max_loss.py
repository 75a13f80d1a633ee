# SPDX-License-Identifier: Apache-2.0
"""max_loss of the codecs through a daemon: what is stored, what the status and the log say, on both transports."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from toy import Toy

import kvstrata
from kvstrata.daemon import Daemon

PROMPT, STEPS = 320, 40
MODELS = itertools.count()
NONSENSE = "mosaickv{truncate = false, share = 1, min_tokens = 0%s}"


def decode(session: kvstrata.Session, toy: Toy, plan: str, surprisal: np.ndarray | None = None) -> tuple[np.ndarray, str]:
    """Outputs [steps][layers][heads][dim] of a settled prompt, and the status at the end."""
    toy.digest = f"toy:{next(MODELS)}"  # nothing in common with what another model has left there
    with session.open(toy.register(session), plan, toy.ids[:PROMPT]) as sequence:
        toy.feed(session, sequence, 0, PROMPT)
        if surprisal is not None:
            sequence.report(0, surprisal=surprisal)
        sequence.prefill_done()
        out = []
        for t in range(PROMPT, PROMPT + STEPS):
            sequence.settle()
            out.append([layer[0] for layer in toy.feed(session, sequence, t, t + 1)])
        sequence.settle()
        toy.feed(session, sequence, PROMPT + STEPS, PROMPT + STEPS + 1)
        return np.array(out), sequence.status


def attach(daemon: Daemon, transport: str) -> kvstrata.Session:
    return kvstrata.attach(daemon.socket, transport=transport, client_name="pytest")


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def test_random_keys_are_packed_more_mildly_on_both_transports_alike(random: np.random.Generator):
    full, outputs = None, {}
    for transport in ("linked", "remote"):
        for limit in ("", ", max_loss = 1"):
            # A daemon each, for its log.
            with Daemon() as daemon, attach(daemon, transport) as session:
                toy = Toy(np.random.default_rng(7), PROMPT + STEPS + 1)
                outputs[transport, limit], status = decode(session, toy, NONSENSE % limit)
                if full is None:
                    full, _ = decode(session, toy, "full")
                log = daemon.said()
            warned = [line for line in log.splitlines() if "max_loss" in line and "keep = 0 (head_dim / 4)" in line]
            if limit:
                assert status == "ok"
                assert not warned
            else:
                assert "tokens 0 to 320: some 16 of them lose" in status and "more than max_loss = 0.300" in status, status
                assert "is taken there, which loses" in status
                assert len(warned) == 1, "once a sequence"
    for limit in ("", ", max_loss = 1"):
        assert np.array_equal(outputs["linked", limit], outputs["remote", limit])
    assert error(outputs["linked", ""], full) < error(outputs["linked", ", max_loss = 1"], full) / 1.5


@pytest.mark.parametrize("transport", ["linked", "remote"])
def test_rows_that_nothing_keeps_stay_raw_and_are_attended(daemon: Daemon, transport: str):
    with attach(daemon, transport) as session:
        toy = Toy(np.random.default_rng(8), PROMPT + STEPS + 1)
        out, status = decode(session, toy, "mosaickv{max_loss = 0.1, share = 0.3, min_tokens = 0}")
        want, _ = decode(session, toy, "full")
    assert "nothing is packed: attends in full" in status
    assert error(out, want) < 1e-5
    assert "these rows and what follows them stay raw" in daemon.said()


@pytest.mark.parametrize("transport", ["linked", "remote"])
def test_spans_whose_factors_lose_too_much_keep_their_rows(daemon: Daemon, transport: str):
    surprisal = np.full(PROMPT, 0.1, np.float32)
    surprisal[::40] = 9
    with attach(daemon, transport) as session:
        toy = Toy(np.random.default_rng(9), PROMPT + STEPS + 1)
        plan = "sekv{r_max = 2, local = 16, rows = 0, min_tokens = 0%s}"
        out, status = decode(session, toy, plan % "", surprisal)
        lossy, said = decode(session, toy, plan % ", max_loss = 1", surprisal)
        want, _ = decode(session, toy, "full")
    assert "keep their rows: factors of r_max = 2 lose more than max_loss there" in status
    assert "max_loss" not in said
    assert error(out, want) < 0.02 < error(lossy, want)
