# SPDX-License-Identifier: Apache-2.0
"""Recall audits of live sequences: what the daemon says against the definition, written out in numpy.

Recall: softmax mass of full attention on the positions that the plan attended. Error: relative L2 of a
head's output against full attention's.
"""

import contextlib
import json
import pathlib
import subprocess
import time

import numpy as np
import pytest
from cli_schema import check
from toy import DIM, HEADS, KV_HEADS, LAYERS, Toy

import kvstrata
from kvstrata.daemon import Daemon, find_daemon
from kvstrata.grpc import Client

PROMPT, EVERY, STEPS = 400, 3, 4
PLANS = ["window{n_sink = 4, n_recent = 60, min_tokens = 0}", "quest{budget = 64, min_tokens = 0}"]
DEADLINE_S = 60


@pytest.fixture
def client(daemon: Daemon):
    with Client(daemon.socket) as opened:
        yield opened


def softmax(toy: Toy, layer: int, t: int, head: int) -> np.ndarray:
    keys = toy.k[layer, :t + 1, head // (HEADS // KV_HEADS)].astype(np.float64)
    scores = keys @ toy.q[layer, t, head] / np.sqrt(DIM)
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def decode(toy: Toy, session: kvstrata.Session, sequence: kvstrata.Sequence, t: int
           ) -> tuple[np.ndarray, np.ndarray]:
    """One token; recall and error [layers][heads] by their definition, from what the step answered."""
    recall, error = np.empty((LAYERS, HEADS)), np.empty((LAYERS, HEADS))
    with session.step([(sequence, toy.ids[t:t + 1])]) as step:
        for layer in range(LAYERS):
            step.append(layer, toy.k[layer, t:t + 1], toy.v[layer, t:t + 1])
            out = step.attend(layer, toy.q[layer, t:t + 1])[0].astype(np.float64)
            groups = step.selected_tokens()
            full, _ = toy.expected(layer, t)
            for head in range(HEADS):
                positions = groups[len(groups) * head // HEADS]
                recall[layer, head] = softmax(toy, layer, t, head)[positions].sum()
                error[layer, head] = np.linalg.norm(out[head] - full[head]) / np.linalg.norm(full[head])
    return recall, error


def prefilled(toy: Toy, session: kvstrata.Session, plan: str) -> kvstrata.Sequence:
    sequence = session.open(toy.register(session), plan)
    toy.feed(session, sequence, 0, PROMPT)
    sequence.prefill_done()
    return sequence


@pytest.mark.parametrize("plan", PLANS)
def test_is_the_definition(session: kvstrata.Session, client: Client, random: np.random.Generator, plan: str):
    toy = Toy(random, PROMPT + EVERY * (STEPS + 1))
    with prefilled(toy, session, plan) as sequence:
        answers = client.audit_recall(sequence.handle, EVERY, STEPS)
        assert next(answers).steps == 0
        measured = {t: decode(toy, session, sequence, t) for t in range(PROMPT, len(toy.ids))}
        *_, last = answers
    positions = [t for t in measured if t % EVERY == 0][:STEPS]
    assert (last.steps, last.dropped_steps, last.first_position, last.last_position) == (
        STEPS, 0, positions[0], positions[-1])
    wanted = {name: np.array([measured[t][i] for t in positions]) for i, name in enumerate(("recall", "error"))}
    assert wanted["recall"].min() < 0.9, "a plan that loses nothing tests nothing"
    for name, values in wanted.items():
        bounds = np.array(getattr(last, f"{name}_bounds"))
        bounds[-1] = np.inf
        for row, mine in [(last.all, values), *((row, values[:, row.layer]) for row in last.layers)]:
            metric, mine = getattr(row, name), mine.ravel()
            assert metric.samples == mine.size
            got = [metric.mean, metric.p5, metric.p50, metric.p95, metric.min, metric.max]
            np.testing.assert_allclose(got, [mine.mean(), *np.percentile(mine, [5, 50, 95]), mine.min(),
                                             mine.max()], atol=2e-5, err_msg=f"{name} of layer {row.layer}")
            # A sample within rounding of a bound may fall on either side of it.
            histogram = np.histogram(mine, bounds)[0]
            near = sum(np.abs(mine - bound).min() < 2e-5 for bound in bounds)
            assert np.abs(np.array(metric.histogram) - histogram).sum() <= 2 * near
    assert [row.layer for row in last.layers] == list(range(LAYERS))


def test_the_program(daemon: Daemon, session: kvstrata.Session, random: np.random.Generator):
    toy = Toy(random, PROMPT + 4000)
    program = pathlib.Path(find_daemon()).parent / "kvstrata"

    def audited(*words: str) -> str:
        """Runs the audit, and decodes until it has ended."""
        start = len(decoded)
        with subprocess.Popen([program, "audit", "--recall", str(sequence.handle), *words, "--socket",
                               daemon.socket, "--timeout", "50s"], text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) as process:
            end = time.monotonic() + DEADLINE_S
            while process.poll() is None:
                assert time.monotonic() < end and len(decoded) < start + 1900, "the audit does not end"
                t = PROMPT + len(decoded)
                toy.feed(session, sequence, t, t + 1)
                decoded.append(t)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.02)  # on a busy machine it starts late: not all tokens by then
            out, err = process.communicate()
        assert process.returncode == 0 and err == "", (out, err)
        return out

    decoded: list[int] = []
    with prefilled(toy, session, PLANS[0]) as sequence:
        document = json.loads(audited("--every", "2", "--steps", "3", "-o", "json"))
        check("audit --recall", document)
        assert (document["sequence"], document["plan"], document["transport"]) == (
            sequence.handle, "window", session.transport)
        assert (document["every"], document["wanted_steps"], document["steps"]) == (2, 3, 3)
        assert [row["layer"] for row in document["layers"]] == list(range(LAYERS))
        assert document["all"]["recall"]["samples"] == 3 * LAYERS * HEADS
        assert sum(document["all"]["error"]["histogram"]) == 3 * LAYERS * HEADS
        table = audited("--every", "1", "--steps", "2")
        for words in ("2 of 2 decode steps", "LAYER", "all", "recall", "output error", "#"):
            assert words in table, table
        bare = audited("--steps", "1", "--no-headers").splitlines()
        assert len(bare) == LAYERS + 1 and bare[-1].split()[0] == "all", bare


def test_the_programs_errors(daemon: Daemon, session: kvstrata.Session, random: np.random.Generator):
    program = pathlib.Path(find_daemon()).parent / "kvstrata"

    def run(*words: str) -> tuple[int, str, str]:
        result = subprocess.run([program, "audit", *words, "--socket", daemon.socket], text=True,
                                capture_output=True, timeout=DEADLINE_S)
        return result.returncode, result.stdout, result.stderr

    code, _, err = run("--recall", "987654")
    assert code == 5 and "SEQUENCE_UNKNOWN" in err and "987654" in err and "kvstrata seq ls" in err, err
    for words in (["--every", "2"], ["--recall", "1", "--every", "0"], ["--recall", "1", "--steps", "2000"],
                  ["--recall", "x"], ["--recall", "1", "--timeout", "2h"]):
        assert run(*words)[0] == 2, words
    toy = Toy(random, PROMPT + 8)
    with prefilled(toy, session, PLANS[1]) as sequence:
        code, out, err = run("--recall", str(sequence.handle), "--timeout", "300ms")
        assert code == 6 and out == "" and "0 of 8 steps" in err and "300 ms" in err, (out, err)
        assert "next: " in err and "--every 1" in err
        code, _, err = run("--recall", str(sequence.handle), "--timeout", "300ms", "-o", "json")
        error = json.loads(err)["error"]
        assert code == 6 and error["reason"] == "RECALL_TIMEOUT" and error["next"]
