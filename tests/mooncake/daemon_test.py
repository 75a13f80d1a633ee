#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two real daemons that share a real Mooncake Store, in a network namespace of this program's own.

Usage: daemon_test.py PYTHON, the one that has Mooncake (make test-mooncake). Ends with `N passed, N failed`.
"""
import contextlib
import json
import os
import pathlib
import signal
import sys
import tempfile
import time

import cluster

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "integrations/kvstrata/src"), str(ROOT / "tests/python"), str(ROOT / "tests")]

import numpy as np  # noqa: E402
from operated import DEADLINE_S, Program  # noqa: E402
from outcomes import Outcomes  # noqa: E402
from toy import Toy  # noqa: E402

import kvstrata  # noqa: E402
from kvstrata.daemon import Daemon  # noqa: E402

SEED, TOKENS, PAGE = 20261127, 1280, 16


def node(python, secret, deadline="60s"):
    settings = {"remote.mooncake": cluster.MASTER, "remote.mooncake_python": python, "remote.secret_file": secret,
                "remote.write": "all", "remote.miss_ttl": "0", "remote.deadline": deadline, "remote.deadline_most": deadline}
    return Daemon(*[word for key, value in settings.items() for word in ("--set", f"{key}={value}")])


def remote_of(daemon):
    return json.loads(Program(daemon.socket).run("tier", "ls", "-o", "json"))["remotes"][0]


def wait_for(daemon, condition):
    end = time.monotonic() + DEADLINE_S
    while not condition(remote := remote_of(daemon)):
        assert time.monotonic() < end, remote
    return remote


def is_ready(remote):
    return remote["shards"][0]["connections"] == 1 and remote["illness"] == ""


def serve(daemon, toy):
    """How much was held, and the last token's outputs."""
    with kvstrata.attach(daemon.socket) as session:
        model = toy.register(session)
        with session.open(model, "full", toy.ids) as sequence:
            held = sequence.held
            outputs = toy.feed(session, sequence, held, TOKENS)
            sequence.prefill_done()
            return held, np.array([layer[-1] for layer in outputs])


def what_one_computed_the_other_opens(a, b, _, toys):
    held, computed = serve(a, toys[0])
    assert held == 0
    wait_for(a, lambda remote: remote["written"] == TOKENS // PAGE and remote["waiting"] == 0)
    assert remote_of(a)["failed"] == 0
    held, opened = serve(b, toys[0])
    assert held >= TOKENS - PAGE, held
    assert np.array_equal(computed, opened)
    remote = remote_of(b)
    assert remote["engine"] == "mooncake" and remote["missed"] == 0 and is_ready(remote), remote
    assert json.loads(Program(b.socket).run("tier", "probe", "-o", "json"))["servers"][0]["reason"] == ""


def a_store_that_is_stopped_costs_misses_only(a, b, real, toys):
    serve(a, toys[1])
    wait_for(a, lambda remote: remote["written"] == 2 * TOKENS // PAGE and remote["waiting"] == 0)
    real.store.send_signal(signal.SIGSTOP)
    try:
        held, _ = serve(b, toys[1])
        assert held == 0, held
    finally:
        real.store.send_signal(signal.SIGCONT)
    wait_for(b, is_ready)


TESTS = [what_one_computed_the_other_opens, a_store_that_is_stopped_costs_misses_only]


def main():
    cluster.enter_namespace()
    python, outcomes = os.path.abspath(sys.argv[1]), Outcomes()
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    toys = [Toy(rng, TOKENS) for _ in TESTS]
    with contextlib.ExitStack() as all_of_them:
        folder = all_of_them.enter_context(tempfile.TemporaryDirectory())
        secret = pathlib.Path(folder, "secret")
        secret.touch(mode=0o600)
        secret.write_text(os.urandom(32).hex() + "\n")
        real = all_of_them.enter_context(cluster.Cluster(python=python))
        a = all_of_them.enter_context(node(python, secret))
        b = all_of_them.enter_context(node(python, secret, "1s"))
        for daemon in (a, b):
            wait_for(daemon, is_ready)
        for test in TESTS:
            outcomes.run(test, a, b, real, toys)
    return outcomes.end()


if __name__ == "__main__":
    sys.exit(main())
