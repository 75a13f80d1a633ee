# SPDX-License-Identifier: Apache-2.0
"""Lower planes of vLLM's blocks on the host (plan strata{lower = "host"}): memory that the GPU reads and writes over the
bus at the address that the process has it at.

Threads: the worker's.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import pathlib
import time
import weakref
from typing import Any

import torch

from .unsupported import Unsupported

_log = logging.getLogger("vllm.kvstrata")
_LIMIT = "KVSTRATA_LOWER_PLANES_BYTES"  # in the environment
_KEPT = 4 << 30  # bytes of the host that are left to others
_WAYS_OUT = ("give vLLM fewer (--num-gpu-blocks-override, or a lower --gpu-memory-utilization), take lower = \"host\" out of "
             f"the plan, or say by {_LIMIT} how many bytes each worker may take")


class LowerPlanes:
    """[layer][block] of `stride` bytes each, zero at first; given back by release(), or when it is collected. Making it
    takes as long as the kernel takes to hand out the memory, a second for some GiB. Unsupported: more than there is."""

    def __init__(self, plan: str, layers: int, blocks: int, stride: int) -> None:
        self.blocks = blocks
        self._layers, self._layer_bytes = layers, blocks * stride
        count = layers * self._layer_bytes
        refuse_too_much(plan, count, blocks)
        began, memory, cudart = time.monotonic(), _mapped(count), torch.cuda.cudart()
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        _check("cudaHostRegister", cudart.cudaHostRegister(self._address, count, 0), count)
        self._end = weakref.finalize(self, _give_back, cudart, memory, self._address)
        _log.info("plan %s: lower planes of %d blocks of %d layers take %.1f GiB of the host, pinned in %.1f s", plan,
                  blocks, layers, count / 2**30, time.monotonic() - began)

    def addresses(self) -> list[int]:
        """Where each layer's first block lies."""
        return [self._address + layer * self._layer_bytes for layer in range(self._layers)]

    def release(self) -> None:
        """Waits for the GPU. Again is harmless."""
        self._end()


def refuse_too_much(plan: str, count: int, blocks: int) -> None:
    """Unsupported, if the host has not `count` bytes for so many blocks."""
    there, says = allowed(), f"{_LIMIT} allows" if _LIMIT in os.environ else "the host has"
    if count > there:
        raise Unsupported(f"plan {plan!r} takes {count / 2**30:.1f} GiB of the host for lower planes of {blocks} blocks, and "
                          f"{says} {there / 2**30:.1f} GiB, for {blocks * there // count} blocks; {_WAYS_OUT}")


def allowed() -> int:
    """Bytes of the host that lower planes may take: what the environment says, else what is available, less some."""
    said = os.environ.get(_LIMIT)
    if said is None:
        return max(available() - _KEPT, 0)
    if not said.isdecimal():
        raise Unsupported(f"{_LIMIT} is {said!r}, and has to be a number of bytes")
    return int(said)


def available(meminfo: pathlib.Path = pathlib.Path("/proc/meminfo"),
              container: pathlib.Path = pathlib.Path("/sys/fs/cgroup")) -> int:
    """What the kernel says that processes can take without swapping: the host's, or what a container's limit (cgroup v2)
    leaves beside what is not of files, if that is less."""
    (line,) = (line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
    there = int(line.split()[1]) << 10
    try:
        limit, used, stat = ((container / name).read_text().strip()
                             for name in ("memory.max", "memory.current", "memory.stat"))
    except OSError:  # no container's
        return there
    if limit == "max":
        return there
    of_files = sum(int(value) for name, value in (line.split() for line in stat.splitlines())
                   if name in ("inactive_file", "active_file"))
    return min(there, max(int(limit) - int(used) + of_files, 0))


def _mapped(count: int) -> mmap.mmap:
    """A child does not have it: at a fork pinned pages would be copied."""
    try:
        memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise Unsupported(f"the host has no {count / 2**30:.1f} GiB for lower planes ({error}); {_WAYS_OUT}") from error
    memory.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _give_back(cudart: Any, memory: mmap.mmap, address: int) -> None:
    with contextlib.suppress(RuntimeError):  # at the process's end CUDA may be gone
        torch.cuda.synchronize()
    cudart.cudaHostUnregister(address)
    memory.close()


def _check(call: str, code: Any, count: int) -> None:
    if int(code) != 0:
        raise Unsupported(f"{call} of {count / 2**30:.1f} GiB for lower planes failed with {int(code)}: raise the limit of locked "
                          f"memory (ulimit -l), or {_WAYS_OUT}")
