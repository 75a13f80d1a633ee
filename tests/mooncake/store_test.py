#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The agent over a real Mooncake master and store, in a network namespace of this program's own.

Usage: store_test.py, with a Python that has Mooncake (make test-mooncake). Ends with `N passed, N failed`.
"""
import os
import signal
import sys

import cluster
from agent_link import EXIST, GET, LATE, MISS, PATIENCE_S, PUT, REMOVE, ROOT, TOO_SMALL, AgentLink

sys.path.insert(0, str(ROOT / "tests"))
from outcomes import Outcomes  # noqa: E402

MIB = 1 << 20


def bytes_come_back(agent):
    """Under a name as the daemon's; while a reader's lease lasts, too, a value can be removed."""
    name = "kv1:{00cc1843d9f5964c}:de54eda511e14f8533526c582128067d:0"
    agent.memory[0:4 * MIB] = os.urandom(4 * MIB)
    assert agent.call(PUT, [(name, 0, 4 * MIB), ("small", 0, 512)]) == [0, 0]
    assert agent.call(PUT, [("small", 4096, 500)]) == [0], "what is there stays"
    assert agent.call(EXIST, [(name, 0, 0), ("none", 0, 0)]) == [1, 0]
    places = [(name, 8 * MIB, 4 * MIB + 4096), ("small", 16 * MIB, 511), ("none", 17 * MIB, 512)]
    assert agent.call(GET, places) == [4 * MIB, TOO_SMALL, MISS]
    assert agent.memory[8 * MIB:12 * MIB] == agent.memory[0:4 * MIB]
    assert agent.call(REMOVE, [(name, 0, 0), ("small", 0, 0), ("none", 0, 0)]) == [0, 0, MISS]
    assert agent.call(EXIST, [(name, 0, 0), ("small", 0, 0)]) == [0, 0]


def a_batch_of_the_past_has_no_effect(agent):
    agent.send(PUT, [("late", 0, 512)], deadline_s=-1)
    assert agent.answer()[1] == [LATE]
    assert agent.call(EXIST, [("late", 0, 0)]) == [0]


def a_stopped_store_holds_up_its_own_batch_alone(agent, store):
    assert agent.call(PUT, [("k", 0, MIB)]) == [0]
    store.send_signal(signal.SIGSTOP)
    try:
        held = agent.send(GET, [("k", 8 * MIB, MIB)])
        asked = agent.send(EXIST, [("k", 0, 0)])
        assert agent.answer() == (asked, [1]), "the master answers"
    finally:
        store.send_signal(signal.SIGCONT)
    number, results = agent.answer()
    assert number == held and (results == [MIB] or results[0] < 0), results
    agent.socket.close()
    assert agent.process.wait(PATIENCE_S) == 0


def main():
    cluster.enter_namespace()
    outcomes = Outcomes()
    with cluster.Cluster() as real, AgentLink(sys.executable, cluster.MASTER) as agent:
        assert agent.ready()
        outcomes.run(bytes_come_back, agent)
        outcomes.run(a_batch_of_the_past_has_no_effect, agent)
        outcomes.run(a_stopped_store_holds_up_its_own_batch_alone, agent, real.store)
    return outcomes.end()


if __name__ == "__main__":
    sys.exit(main())
