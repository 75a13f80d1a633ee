#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What Mooncake Store as the remote tier does to prompts while its processes are stopped, and its agent is killed.

    mooncake_faults.py [ROW ...] [--json-out FILE] [--seed N] [--commit HASH] [--date DATE]

Nodes, prompts and what is checked behind each open are those of bench/remote_faults.py; a page of 16 tokens has 64 KiB.
Below them are a real master and three stores over TCP, in a network namespace of this program's own. Their Python is
MOONCAKE_PYTHON, by default that of build/venv-mooncake (make test-mooncake makes it).

stopped       SIGSTOP of the master and of each store in turn. Opens of what is there, by a new node for each: some under
              which the process is stopped at some moment and goes on afterwards, then others while it is stopped, until
              the node leaves the store alone. Milliseconds of an open beyond its deadline, 99th percentile (must: 50)
killed        kill -9 of the agent while opens and writes are on their way, every other time with a stopped store so that
              calls pile up: the most memory of calls at once, as the daemon counts it (must: 64 MiB), what is held of it
              once the next agent serves (must: 0), and tokens held by opens then (must: 99 %)
"""
import contextlib
import os
import pathlib
import signal
import socket
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests" / "mooncake")]

import remote_faults  # noqa: E402
from cluster import MASTER, Cluster, enter_namespace  # noqa: E402
from remote_faults import MIB, WITHIN, percentile  # noqa: E402

PYTHON = os.environ.get("MOONCAKE_PYTHON", str(ROOT / "build/venv-mooncake/bin/python"))
STORES = 3


def await_so(node, what, so):
    deadline = time.monotonic() + WITHIN
    while not (answer := so()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {WITHIN} s: {node.remote()}")
        time.sleep(0.02)
    return answer


def agent_of(node):
    """The number of its agent's process; None: none runs."""
    children = []
    for task in pathlib.Path(f"/proc/{node.daemon.process.pid}/task").iterdir():
        with contextlib.suppress(OSError):
            children += (task / "children").read_text().split()
    return int(children[0]) if children else None


def shard_of(node):
    return node.remote()["shards"][0]


def await_agent(node, other_than=None):
    """Until an agent serves; its number."""
    def serving():
        remote, pid = node.remote(), agent_of(node)
        return pid if pid != other_than and remote["shards"][0]["connections"] and not remote["illness"] else None
    return await_so(node, "agent that serves", serving)


class MooncakeBench(remote_faults.Bench):
    suite, command, heads = "mooncake-faults", "bench/mooncake_faults.py", 16

    def servers_of(self, _):
        return {"remote.mooncake": MASTER, "remote.mooncake_python": PYTHON}

    @contextlib.contextmanager
    def node(self, cluster, **settings):
        """With an agent that serves."""
        with tempfile.TemporaryDirectory() as folder:
            pages = f"{folder}/http.sock"
            with super().node(cluster, http_listen=f"unix:{pages}", **settings) as node:
                node.pages = pages
                await_agent(node)
                yield node

    def compute(self, cluster, prompts, **settings):
        with self.node(cluster, **settings) as node:
            node.open_all(prompts)
            written = node.await_written()
        assert written["failed"] == 0, written
        print(f"  {written['written']} values, {written['written_bytes'] / 1e6:.0f} MB written", flush=True)


def new_cluster():
    return Cluster(stores=STORES, python=PYTHON)


@contextlib.contextmanager
def stopping(process):
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


class Opens:
    """Of one process's turns: (tokens held, milliseconds) of each open."""

    def __init__(self):
        self.before, self.amid, self.asked, self.left_alone = [], [], [], []


def open_amid(bench, node, process, prompt, within):
    """The process is stopped at some moment of the open's first `within` seconds, and goes on behind it."""
    stop = threading.Timer(bench.random.uniform(0, within), process.send_signal, [signal.SIGSTOP])
    stop.start()
    try:
        opened = node.open(prompt)
    finally:
        stop.join()
        process.send_signal(signal.SIGCONT)
    await_agent(node)
    return opened


def open_under(bench, node, process, prompts, opens):
    before = [node.open(prompts.pop()) for _ in range(BEFORE)]
    opens.before += before
    within = min(ms for _, ms in before) / 1e3
    opens.amid += [open_amid(bench, node, process, prompts.pop(), within) for _ in range(AMID)]
    process.send_signal(signal.SIGSTOP)
    try:
        for _ in range(ASKED):
            if shard_of(node)["breaker_open"]:
                opens.left_alone += [node.open(prompts.pop()) for _ in range(ALONE)]
                return
            opens.asked.append(node.open(prompts.pop()))
    finally:
        process.send_signal(signal.SIGCONT)


BEFORE, AMID, ASKED, ALONE = 2, 8, 12, 5  # opens of a node


def stopped(bench, deadline=300, rounds=5):
    """No prompt was opened by its node before."""
    terms = {"remote_deadline": f"{deadline}ms", "remote_deadline_most": f"{deadline}ms", "remote_write": "reused"}
    turns = {name: Opens() for name in ("master", *(f"store {i + 1}" for i in range(STORES)))}
    for _ in range(rounds):
        with new_cluster() as cluster:
            prompts = bench.prompts((BEFORE + AMID + ASKED + ALONE) * len(turns), 32)
            bench.compute(cluster, prompts)
            for process, opens in zip(cluster.processes, turns.values()):
                with bench.node(cluster, **terms) as node:
                    open_under(bench, node, process, prompts, opens)
    for name, opens in turns.items():
        print(f"  {name}: " + "; ".join(
            f"{len(all_)} {when.replace('_', ' ')}: {sum(held > 0 for held, _ in all_)} held something, "
            f"{percentile([ms for _, ms in all_], 50):.0f} ms, at most {max(ms for _, ms in all_):.0f} ms"
            for when, all_ in vars(opens).items() if all_), flush=True)
    for when in ("amid", "asked", "left_alone"):
        times = [ms for opens in turns.values() for _, ms in getattr(opens, when)]
        if times:
            bench.row(f"stopped/{when}/beyond_deadline", percentile(times, 99) - deadline, "ms", 50, len(times), smaller=True)


def memory_of(node):
    """Bytes of calls that its agent has not answered: (now, at most). The daemon looks them up once a second."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(node.pages)
        link.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        lines = b"".join(iter(lambda: link.recv(1 << 16), b"")).decode().splitlines()
    names = [f'kvstrata_remote_agent_{what}{{server="{MASTER}"}} ' for what in ("bytes", "peak_bytes")]
    return tuple(int(float(next(line for line in lines if line.startswith(name)).split()[1])) for name in names)


class Memfd:
    """The agent's memory as the kernel counts it, from outside the daemon."""

    def __init__(self, node):
        folder = pathlib.Path(f"/proc/{node.daemon.process.pid}/fd")
        self.path = next(fd for fd in folder.iterdir() if "kvstrata-agent" in os.readlink(fd))

    def bytes(self):
        return os.stat(self.path).st_blocks * 512


def kill_agent_under(bench, node, kept):
    """Opens what the stores have, and computes what they have not, until the agent is killed at some moment. The number
    that it had, and of opens."""
    killer = threading.Timer(bench.random.uniform(0.05, 1.5), os.kill, [pid := agent_of(node), signal.SIGKILL])
    killer.start()
    under = 0
    while killer.is_alive():
        node.open(kept.pop() if under % 2 and kept else bench.prompts(1, 32)[0])
        under += 1
    killer.join()
    return pid, under


def killed(bench, nodes=8, kills=3, under_each=12, behind_each=4):
    """Every node has agents killed in a row, whose pauses double. What a node opened it holds itself, so each open is of
    a prompt that is new to it."""
    peaks, files, after, again, lost, opens, seconds = [], [], [], [], 0, 0, []
    with new_cluster() as cluster:
        prompts = bench.prompts(kills * (under_each + behind_each), 32)
        bench.compute(cluster, prompts)
        for _ in range(nodes):
            left = list(prompts)
            with bench.node(cluster) as node:
                memfd = Memfd(node)
                for kill in range(kills):
                    hang = stopping(cluster.processes[1 + bench.random.randrange(STORES)]) if kill % 2 else \
                        contextlib.nullcontext()
                    with hang:
                        pid, under = kill_agent_under(bench, node, [left.pop() for _ in range(under_each)])
                        opens += under
                    begin = time.monotonic()
                    await_agent(node, other_than=pid)
                    seconds.append(time.monotonic() - begin)
                    node.await_written()
                    await_so(node, "memory back", lambda: memory_of(node)[0] == 0)
                    after.append(memory_of(node)[0])
                    again.append(node.open_all([left.pop() for _ in range(behind_each)])[0])
                peaks.append(memory_of(node)[1])
                files.append(memfd.bytes())
                lost += shard_of(node)["failures"]
    print(f"  {nodes * kills} kills under {opens} opens; {lost} calls were on their way; an agent served again after "
          f"{percentile(seconds, 50):.1f} s, at most {max(seconds):.1f} s")
    print("  most at once, MiB: " + ", ".join(f"{peak / MIB:.0f}" for peak in peaks) +
          "; of the memfd present at the end: " + ", ".join(f"{size / MIB:.0f}" for size in files))
    assert lost, "no call was on its way when an agent was killed"
    bench.row("killed/held", max(peaks) / MIB, "MiB", 64, nodes * kills, smaller=True)
    bench.row("killed/held_after", max(after), "bytes", 0, nodes * kills, smaller=True)
    bench.row("killed/hit_again", min(again), "of the tokens", 0.99, nodes * kills)


ROWS = {f.__name__: f for f in (stopped, killed)}


if __name__ == "__main__":
    enter_namespace()
    remote_faults.main(MooncakeBench, ROWS, __doc__)
