# SPDX-License-Identifier: Apache-2.0
"""The agent between kvstratad and Mooncake Store, whose client is a Python module.

kvstratad starts it and owns what it inherits: a SOCK_SEQPACKET with batches, and a memfd where their bytes lie
(docs/mooncake.md, "Messages"). The whole memfd is registered with the store once. Each kind of batch has threads of its
own, since a call of the store's may take half a minute. A batch whose deadline has passed is not begun.

It ends when the socket does, whatever its threads are waiting for. Exit codes: 2 arguments, 3 the store cannot be set
up, 4 a message that is none, 5 there is no Mooncake. It writes names, bytes and addresses nowhere.

Usage: agent.py --socket FD --memory FD --bytes N --master HOST:PORT [--metadata TEXT] [--protocol tcp|rdma]
       [--devices NAMES] [--interface NAME]
"""
import argparse
import ctypes
import fcntl
import mmap
import operator
import os
import queue
import socket
import struct
import sys
import threading
import time

READY, EXIST, GET, PUT, REMOVE = range(5)  # docs/mooncake.md, "Messages"
VERSION = 1
REQUEST = struct.Struct("<IIQQ")  # kind, entries, number of the call, deadline by CLOCK_MONOTONIC in ns
ENTRY = "QQ64s"                   # offset, bytes, name
ENTRY_BYTES = struct.calcsize("<" + ENTRY)
REPLY = struct.Struct("<IIQ")     # kind, entries, number of the call; then a result each
MOST_ENTRIES = 512
THREADS = {EXIST: 2, GET: 4, PUT: 4, REMOVE: 1}
LATE, FAILED = -1_000_001, -1_000_002  # beside the store's own codes


def parse(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--memory", type=int, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--master", required=True)
    parser.add_argument("--metadata", default="P2PHANDSHAKE")
    parser.add_argument("--protocol", default="tcp")
    parser.add_argument("--devices", default="")
    parser.add_argument("--interface", default="lo")
    return parser.parse_args(argv)


def address_of(interface):
    """The IPv4 address of a network interface; OSError where there is none."""
    SIOCGIFADDR = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(one.fileno(), SIOCGIFADDR, request)[20:24])


def open_store(args, base):
    """The store, and how a value is put; None where it says no."""
    # One attempt: kvstratad starts another agent, at intervals that grow.
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
    os.environ.setdefault("GLOG_minloglevel", "2")
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig
    store = MooncakeDistributedStore()
    host = address_of(args.interface)
    if store.setup(host, args.metadata, 0, 0, args.protocol, args.devices, args.master) != 0:
        return None
    if store.register_buffer(base, args.bytes) != 0:
        return None
    once = ReplicateConfig()
    once.replica_num = 1
    return store, once


class Agent:
    """Reads batches, has threads carry them out, and answers each once."""

    def __init__(self, link, base, size, store, config):
        self.link, self.base, self.size = link, base, size
        self.store, self.config = store, config
        self.work = {kind: queue.SimpleQueue() for kind in THREADS}

    def begin(self):
        for kind, count in THREADS.items():
            for _ in range(count):
                threading.Thread(target=self.serve, args=(self.work[kind],), daemon=True).start()
        self.link.send(REPLY.pack(READY, 0, VERSION))

    def read(self):
        """Until the socket ends. ValueError: what came is no batch."""
        while message := self.link.recv(REQUEST.size + MOST_ENTRIES * ENTRY_BYTES + 1):
            kind, count, call, deadline = REQUEST.unpack_from(message)
            if kind not in THREADS or len(message) != REQUEST.size + count * ENTRY_BYTES:
                raise ValueError("no batch")
            fields = struct.unpack_from("<" + count * ENTRY, message, REQUEST.size)
            offsets, sizes, names = (fields[i::3] for i in range(3))
            if max(map(operator.add, offsets, sizes), default=0) > self.size:
                raise ValueError("beyond the memory")
            self.work[kind].put((kind, call, deadline, names, offsets, sizes))

    def serve(self, work):
        while True:
            kind, call, deadline, names, offsets, sizes = work.get()
            if time.monotonic_ns() >= deadline:
                results = [LATE] * len(names)
            else:
                results = self.results_of(kind, names, offsets, sizes)
            self.link.send(REPLY.pack(kind, len(results), call) + struct.pack(f"<{len(results)}q", *results))

    def results_of(self, kind, names, offsets, sizes):
        names = [name.rstrip(b"\0").decode("ascii") for name in names]
        places, sizes = [self.base + offset for offset in offsets], list(sizes)
        try:
            if kind == EXIST:
                results = self.store.batch_is_exist(names)
            elif kind == GET:
                results = self.store.batch_get_into(names, places, sizes)
            elif kind == PUT:
                results = self.store.batch_put_from(names, places, sizes, self.config)
            else:
                results = self.store.batch_remove(names, True)
        except Exception as error:  # whatever the module raises: the batch has an answer
            print(f"kvstrata mooncake agent: {type(error).__name__}", file=sys.stderr, flush=True)
            results = []
        return results if len(results) == len(names) else [FAILED] * len(names)


def run(args, link):
    memory = mmap.mmap(args.memory, args.bytes)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    try:
        opened = open_store(args, base)
    except ImportError as error:
        print(f"kvstrata mooncake agent: {error}", file=sys.stderr, flush=True)
        return 5
    except OSError as error:
        print(f"kvstrata mooncake agent: {error}", file=sys.stderr, flush=True)
        opened = None
    if opened is None:
        return 3
    agent = Agent(link, base, args.bytes, *opened)
    try:
        agent.begin()
        agent.read()
    except OSError:
        return 0  # the daemon is gone
    except (ValueError, struct.error):
        return 4
    return 0


def main():
    args = parse(sys.argv[1:])
    link = socket.socket(fileno=args.socket)  # closed by the end of the process alone, which tells why
    os._exit(run(args, link))  # threads that wait in the store hold up nothing


if __name__ == "__main__":
    main()
