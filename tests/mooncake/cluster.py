# SPDX-License-Identifier: Apache-2.0
"""A real Mooncake master and stores, in a network namespace of this program's own: they listen on all interfaces."""
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

MASTER = "127.0.0.1:50051"
READY = b"ready"
STORE = """import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[1]), 16 << 20, "tcp", "", sys.argv[2]) == 0
print("ready", flush=True)
time.sleep(1 << 20)
"""


def enter_namespace():
    """Starts this program again where nothing but loopback is; returns there."""
    if os.environ.get("KVS_IN_NAMESPACE") == "1":
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return
    os.environ["KVS_IN_NAMESPACE"] = "1"
    flags = "--net" if os.geteuid() == 0 else "--net --map-root-user"
    os.execvp("unshare", ["unshare", *flags.split(), sys.executable, "-B", *sys.argv])


class Cluster:
    """A cluster of the Mooncake in a Python's environment. Killed at the end of `with`."""

    def __init__(self, stores=1, segment_bytes=512 << 20, python=sys.executable):
        self.folder = tempfile.TemporaryDirectory()
        self.log = open(pathlib.Path(self.folder.name, "log"), "wb")
        master = pathlib.Path(python).parent / "mooncake_master"
        host, port = MASTER.split(":")
        self.processes = [self.start([master, f"--rpc_address={host}", f"--rpc_port={port}",
                                      f"--metrics_host={host}", "--metrics_port=50052"])]
        for _ in range(stores):
            store = self.start([python, "-c", STORE, segment_bytes, MASTER], stdout=subprocess.PIPE)
            self.processes.append(store)
            assert READY in iter(lambda one=store: one.stdout.readline().strip(), b""), self.words()

    def start(self, command, stdout=None):
        return subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL,
                                stdout=stdout or self.log, stderr=self.log, cwd=self.folder.name)

    def words(self):
        return pathlib.Path(self.folder.name, "log").read_text(errors="replace")[-2000:]

    @property
    def store(self):
        return self.processes[1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
        self.log.close()
        self.folder.cleanup()
