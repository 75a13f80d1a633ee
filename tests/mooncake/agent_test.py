#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The agent's messages, by the agent that is shipped over a store of files.

Usage: agent_test.py. Ends with `N passed, N failed`.
"""
import fcntl
import os
import pathlib
import struct
import sys
import tempfile

import agent_link
from agent_link import EXIST, GET, LATE, MISS, PATIENCE_S, PUT, REMOVE, TOO_SMALL, AgentLink

sys.path.insert(0, str(agent_link.ROOT / "tests"))
from outcomes import Outcomes  # noqa: E402


def environment(folder):
    pathlib.Path(folder, "hold").touch()
    return os.environ | {"FAKE_MOONCAKE": folder, "PYTHONPATH": str(agent_link.FAKE)}


def ready_agent(folder, **options):
    agent = AgentLink(sys.executable, env=environment(folder), **options)
    assert agent.ready()
    return agent


def bytes_come_back(folder):
    with ready_agent(folder) as agent:
        agent.memory[0:1000] = bytes(range(250)) * 4
        assert agent.call(PUT, [("a", 0, 1000), ("b", 0, 500)]) == [0, 0]
        assert agent.call(EXIST, [("a", 0, 0), ("c", 0, 0)]) == [1, 0]
        assert agent.call(GET, [("a", 4096, 2000), ("b", 8192, 499), ("c", 9000, 5)]) == [1000, TOO_SMALL, MISS]
        assert agent.memory[4096:5096] == agent.memory[0:1000]
        assert agent.call(REMOVE, [("a", 0, 0), ("c", 0, 0)]) == [0, MISS]
        assert agent.call(EXIST, [("a", 0, 0)]) == [0]


def a_late_batch_has_no_effect(folder):
    with ready_agent(folder) as agent:
        agent.send(PUT, [("a", 0, 100)], deadline_s=-1)
        assert agent.answer()[1] == [LATE]
        assert agent.call(EXIST, [("a", 0, 0)]) == [0]


def a_store_that_hangs_holds_up_no_other_kind(folder):
    """Nor the agent's end."""
    with ready_agent(folder) as agent, open(pathlib.Path(folder, "hold"), "rb") as hold:
        fcntl.flock(hold, fcntl.LOCK_EX)
        agent.send(GET, [("a", 0, 100)])
        late = agent.send(PUT, [("a", 0, 100)], deadline_s=-1)
        assert agent.answer() == (late, [LATE])
        agent.socket.close()
        assert agent.process.wait(PATIENCE_S) == 0


def what_is_no_batch_ends_it(folder):
    size = 64 << 20
    entry = struct.Struct("<QQ64s")
    for message in (b"x", struct.pack("<IIQQ", 9, 0, 1, 0), struct.pack("<IIQQ", GET, 1, 1, 0),
                    struct.pack("<IIQQ", GET, 1, 1, 1 << 62) + entry.pack(size - 10, 11, b"a"),
                    struct.pack("<IIQQ", GET, 1, 1, 1 << 62) + entry.pack(1 << 63, 1 << 63, b"a")):
        with ready_agent(folder) as agent:
            agent.socket.send(message)
            assert agent.process.wait(PATIENCE_S) == 4, message


def without_store_or_interface_it_says_so(folder):
    env = environment(folder)
    with AgentLink(sys.executable, env=env, arguments=("--interface", "no-such-one")) as agent:
        assert agent.process.wait(PATIENCE_S) == 3
    with AgentLink(sys.executable, env=env | {"PYTHONPATH": ""}) as agent:
        assert agent.process.wait(PATIENCE_S) == 5
    pathlib.Path(folder, "no_setup").touch()
    with AgentLink(sys.executable, env=env) as agent:
        assert agent.process.wait(PATIENCE_S) == 3


TESTS = [bytes_come_back, a_late_batch_has_no_effect, a_store_that_hangs_holds_up_no_other_kind,
         what_is_no_batch_ends_it, without_store_or_interface_it_says_so]


def main():
    outcomes = Outcomes()
    for test in TESTS:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            outcomes.run(test, folder)
    return outcomes.end()


if __name__ == "__main__":
    sys.exit(main())
