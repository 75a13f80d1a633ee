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
killed        kill -9 of the agent while opens and writes are on their way, two times of three with a stopped store, so that
              calls pile up. Pages have 256 KiB here. The most memory of calls at once, by the daemon's count and by the
              kernel's (must: 64 MiB), what is held of it once the next agent serves (must: 0), and tokens that opens find
              then (must: 99 %)
"""
import concurrent.futures
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
STORES, HEADS = 3, 16


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
    suite, command, heads = "mooncake-faults", "bench/mooncake_faults.py", HEADS

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


class Opens:
    """One process's opens by turn: (tokens held, milliseconds) of each."""

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
    bench.heads = HEADS
    terms = {"remote_deadline": f"{deadline}ms", "remote_deadline_most": f"{deadline}ms", "remote_write": "reused"}
    turns = {name: Opens() for name in ("master", *(f"store {i + 1}" for i in range(STORES)))}
    for _ in range(rounds):
        with Cluster(stores=STORES, python=PYTHON) as cluster:
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


def settled_memory_of(node):
    """memory_of(), once it is the same for longer than the daemon looks at intervals."""
    first = memory_of(node)
    time.sleep(1.2)
    return memory_of(node) if memory_of(node) == first else None


class Memfd:
    """The agent's memory as the kernel counts it, from outside the daemon."""

    def __init__(self, node):
        folder = pathlib.Path(f"/proc/{node.daemon.process.pid}/fd")
        self.path = next(fd for fd in folder.iterdir() if "kvstrata-agent" in os.readlink(fd))

    def bytes(self):
        return os.stat(self.path).st_blocks * 512


class KilledAgents:
    """The row: agents of one node after the other are killed, `kills` in a row, whose pauses double. What a node opened it
    holds itself, so each open is of a prompt that is new to it; and what one computes the next would find."""

    kills, kept_under, new_under, behind = 3, 6, 4, 2  # the last three: prompts of a kill

    def __init__(self, bench):
        self.bench = bench
        self.kept = bench.prompts(self.kills * (self.kept_under + self.behind), 32)
        self.peaks, self.present, self.after, self.again, self.seconds = [], [], [], [], []
        self.opens = self.lost = 0

    def run_node(self, cluster):
        left = list(self.kept)
        take = lambda n: [left.pop() for _ in range(n)]
        with self.bench.node(cluster, remote_deadline="10s", remote_deadline_most="10s") as node:
            memfd = Memfd(node)
            for kill in range(self.kills):
                store = cluster.processes[1 + self.bench.random.randrange(STORES)] if kill % 2 == 0 else None
                pid = self.kill_one(node, store, take(self.kept_under) + self.bench.prompts(self.new_under, 32))
                begin = time.monotonic()
                await_agent(node, other_than=pid)
                self.seconds.append(time.monotonic() - begin)
                node.await_written()
                self.after.append(await_so(node, "look at its memory", lambda: settled_memory_of(node))[0])
                self.again.append(node.open_all(take(self.behind))[0])
            self.peaks.append(memory_of(node)[1])
            self.present.append(memfd.bytes())
            self.lost += shard_of(node)["failures"]

    def kill_one(self, node, store, prompts):
        """Three engines open what the stores have, and compute what they have not. A store hangs, where one is named, and
        the agent is killed, both at some moment. The number that it had."""
        pid, random = agent_of(node), self.bench.random
        random.shuffle(prompts)
        with contextlib.ExitStack() as ends, concurrent.futures.ThreadPoolExecutor(3) as threads:
            engines = [node, *(ends.enter_context(node.another()) for _ in range(2))]
            work = [threads.submit(engine.open_all, prompts[i::3]) for i, engine in enumerate(engines)]
            time.sleep(random.uniform(0, 0.5))
            if store is not None:
                store.send_signal(signal.SIGSTOP)
                time.sleep(random.uniform(0, 2))
            os.kill(pid, signal.SIGKILL)
            if store is not None:
                store.send_signal(signal.SIGCONT)
            for part in work:
                part.result()
        self.opens += len(prompts)
        return pid


def killed(bench, nodes=8):
    bench.heads = 64  # pages of 256 KiB: a prompt is a batch of 8 MiB
    row = KilledAgents(bench)
    with Cluster(stores=STORES, segment_bytes=1 << 30, python=PYTHON) as cluster:
        bench.compute(cluster, row.kept)
        for _ in range(nodes):
            row.run_node(cluster)
    n = len(row.after)
    print(f"  {n} kills under {row.opens} opens; {row.lost} calls were on their way; an agent served again after "
          f"{percentile(row.seconds, 50):.1f} s, at most {max(row.seconds):.1f} s")
    print("  most at once, MiB: " + ", ".join(f"{peak / MIB:.0f}" for peak in row.peaks) +
          "; of the memfd present at the end: " + ", ".join(f"{size / MIB:.0f}" for size in row.present))
    assert row.lost, "no call was on its way when an agent was killed"
    bench.row("killed/held", max(row.peaks + row.present) / MIB, "MiB", 64, n, smaller=True)
    bench.row("killed/held_after", max(row.after), "bytes", 0, n, smaller=True)
    bench.row("killed/hit_again", min(row.again), "of the tokens", 0.99, n)


ROWS = {f.__name__: f for f in (stopped, killed)}


if __name__ == "__main__":
    enter_namespace()
    remote_faults.main(MooncakeBench, ROWS, __doc__)
