# SPDX-License-Identifier: Apache-2.0
"""A Mooncake store of files in a folder: what the agent calls, with the codes that Mooncake 0.3.13 answers.

FAKE_MOONCAKE names the folder, FAKE_MOONCAKE_BYTES what it takes before the oldest objects go. Values outlive the
agent, as a cluster's do. While a test holds an exclusive lock on the folder's file `hold`, every call waits.
"""
import contextlib
import ctypes
import fcntl
import os
import pathlib
import threading

MISS, TOO_SMALL, FULL = -704, -600, -200


class ReplicateConfig:
    replica_num = 1


class MooncakeDistributedStore:
    def __init__(self):
        self.folder = pathlib.Path(os.environ["FAKE_MOONCAKE"])
        self.most = int(os.environ.get("FAKE_MOONCAKE_BYTES", str(1 << 40)))
        self.lock = threading.Lock()
        self.buffer = (0, 0)

    def setup(self, host, metadata, segment_bytes, buffer_bytes, protocol, devices, master):
        assert host and master and metadata and segment_bytes == 0 and protocol in ("tcp", "rdma")
        return 1 if (self.folder / "no_setup").exists() else 0

    def register_buffer(self, place, size):
        self.buffer = (place, size)
        return 0

    @contextlib.contextmanager
    def answering(self):
        with open(self.folder / "hold", "rb") as hold:
            fcntl.flock(hold, fcntl.LOCK_SH)
        with self.lock:
            yield

    def path(self, name):
        return self.folder / f"object {name}"

    def batch_is_exist(self, names):
        with self.answering():
            return [int(self.path(name).exists()) for name in names]

    def batch_get_into(self, names, places, sizes):
        with self.answering():
            return [self.read(*one) for one in zip(names, places, sizes)]

    def read(self, name, place, size):
        assert self.buffer[0] <= place and place + size <= sum(self.buffer)
        try:
            data = self.path(name).read_bytes()
        except FileNotFoundError:
            return MISS
        if len(data) > size:
            return TOO_SMALL
        ctypes.memmove(place, data, len(data))
        return len(data)

    def batch_put_from(self, names, places, sizes, config):
        assert config.replica_num == 1
        with self.answering():
            return [self.write(*one) for one in zip(names, places, sizes)]

    def write(self, name, place, size):
        assert self.buffer[0] <= place and place + size <= sum(self.buffer)
        if self.path(name).exists():
            return 0  # what is there stays
        if size > self.most:
            return FULL
        self.make_room(size)
        self.path(name).write_bytes(ctypes.string_at(place, size))
        return 0

    def make_room(self, size):
        objects = sorted(self.folder.glob("object *"), key=lambda path: path.stat().st_mtime_ns)
        used = sum(path.stat().st_size for path in objects)
        for path in objects:
            if used + size <= self.most:
                return
            used -= path.stat().st_size
            path.unlink()

    def batch_remove(self, names, force):
        assert force  # leases of readers would keep what is damaged
        with self.answering():
            return [self.drop(name) for name in names]

    def drop(self, name):
        try:
            self.path(name).unlink()
        except FileNotFoundError:
            return MISS
        return 0
