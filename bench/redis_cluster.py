# SPDX-License-Identifier: Apache-2.0
"""Real redis-servers on loopback for the benches: a cluster of masters and replicas, which can be killed, stopped and
started again, empty. All end with the object. Debian's redis-tools has the server's program under another name.

    with RedisCluster(folder, replicas=1) as cluster:
        cluster.kill(0)
"""
import contextlib
import pathlib
import shutil
import signal
import socket
import subprocess
import time

WITHIN = 60  # seconds: until a cluster is well
SERVER = shutil.which("redis-server") or shutil.which("redis-check-rdb")


def free_port():
    """Whose cluster bus, 10000 above, is free, too."""
    while True:
        with socket.socket() as one, socket.socket() as bus, contextlib.suppress(OSError, OverflowError):
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            bus.bind(("127.0.0.1", port + 10000))
            return port


class RedisCluster:
    """Servers 0 to masters - 1 are the masters, in the order of their slots; then their replicas.

    max_memory: bytes of each server, 0: no limit; the least recently used leave then. front: from a server's port to that
    which clients are told in its place."""

    def __init__(self, folder, masters=3, replicas=0, max_memory=0, front=None):
        self.folder, self.masters, self.max_memory = pathlib.Path(folder), masters, max_memory
        self.ports = [free_port() for _ in range(masters * (1 + replicas))]
        self.told_ports = {port: front(port) if front else port for port in self.ports}
        self.servers = [self._spawn(port) for port in self.ports]
        try:
            self._form(replicas)
        except BaseException:
            self.close()
            raise

    @property
    def address(self):
        """For remote.redis: all of them."""
        return ",".join(f"127.0.0.1:{port}" for port in self.told_ports.values())

    def kill(self, i):
        self.servers[i].kill()
        self.servers[i].wait()

    def stop(self, i):
        self.servers[i].send_signal(signal.SIGSTOP)

    def go_on(self, i):
        self.servers[i].send_signal(signal.SIGCONT)

    def start(self, i):
        """Again, at its port and in its place in the cluster, with nothing in it."""
        self.servers[i] = self._spawn(self.ports[i])

    def ask(self, i, *command):
        """A reply's text."""
        return subprocess.run(["redis-cli", "-p", str(self.ports[i]), *command], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, check=False).stdout.strip()

    def info(self, i, field):
        return next((line.split(":")[1] for line in self.ask(i, "INFO").splitlines() if line.startswith(field + ":")), "")

    def await_well(self):
        """Until all servers agree on all slots, and replicas have all that their masters have."""
        self._await("cluster that is well", lambda: all(
            "cluster_state:ok" in self.ask(i, "CLUSTER", "INFO") and
            "cluster_known_nodes:%d" % len(self.ports) in self.ask(i, "CLUSTER", "INFO")
            for i in range(len(self.ports))))
        self._await("replica that follows", lambda: all(
            self.info(i, "master_link_status") == "up" for i in range(self.masters, len(self.ports))))

    def dump(self, i):
        """What the server keeps, as it writes it to disk (SAVE)."""
        said = self.ask(i, "SAVE")
        if said != "OK":
            raise RuntimeError(f"SAVE: {said}")
        return (self._folder_of(self.ports[i]) / "dump.rdb").read_bytes()

    def close(self):
        for server in self.servers:
            server.kill()
            server.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _folder_of(self, port):
        return self.folder / f"redis-{port}"

    def _spawn(self, port):
        folder = self._folder_of(port)
        folder.mkdir(exist_ok=True)
        (folder / "dump.rdb").unlink(missing_ok=True)
        options = {"port": port, "bind": "127.0.0.1", "dir": folder, "save": "", "appendonly": "no",
                   "rdbcompression": "no", "cluster-enabled": "yes", "cluster-require-full-coverage": "no",
                   "cluster-announce-port": self.told_ports[port], "cluster-node-timeout": 2000, "repl-diskless-sync-delay": 0,
                   "client-output-buffer-limit": "replica 2gb 1gb 60",
                   "maxmemory": self.max_memory, "maxmemory-policy": "allkeys-lru"}
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        return subprocess.Popen(["redis-server", *words], executable=SERVER, stdout=subprocess.DEVNULL)

    def _await(self, what, so):
        deadline = time.monotonic() + WITHIN
        while not so():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} within {WITHIN} s")
            time.sleep(0.05)

    def _form(self, replicas):
        for i in range(len(self.ports)):
            self._await("answer to PING", lambda i=i: self.ask(i, "PING") == "PONG")
        for i in range(self.masters):
            first, end = (16384 * n // self.masters for n in (i, i + 1))
            self.ask(i, "CLUSTER", "ADDSLOTSRANGE", str(first), str(end - 1))
        for i in range(len(self.ports)):
            self.ask(i, "CLUSTER", "SET-CONFIG-EPOCH", str(i + 1))
        for port in self.ports[1:]:
            self.ask(0, "CLUSTER", "MEET", "127.0.0.1", str(port))
        for i in range(self.masters, len(self.ports)):
            of = self.ask((i - self.masters) % self.masters, "CLUSTER", "MYID")
            self._await("replica", lambda i=i, of=of: self.ask(i, "CLUSTER", "REPLICATE", of) == "OK")
        self.await_well()
        assert replicas == 0 or all(self.info(i, "connected_slaves") == str(replicas) for i in range(self.masters))
