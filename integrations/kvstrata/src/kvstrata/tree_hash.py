# SPDX-License-Identifier: Apache-2.0
"""The sum of a tensor's bytes: a tree of XXH3-128, made in parallel.

    tree_sum(array)             # 16 bytes; anything with the buffer protocol that is contiguous
    tree_sums([a, b, mapped])   # one sum for each, all of them on one pool of threads

A leaf is the XXH3-128 of 256 KiB, the last one of what is left. The root is the XXH3-128 over the leaves' digests, in
order, and the length as 8 bytes (little-endian). It finds changes and tells models apart; against somebody who makes two
tensors of one sum on purpose it does not help, nor does any look-up by weights that another user gave.

Cost: 0.11 s of one core's time a GB, so about 1 s for 16 GB on two idle cores. xxhash lets go of the interpreter while it
reads a leaf, so threads run beside each other. At 256 KiB a leaf a call's own time (1 us) is a twentieth.
Threads: any; a call makes its own pool and ends it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

try:
    import xxhash
except ImportError as error:
    raise ImportError("kvstrata makes identities with the package xxhash, which is not here: pip install xxhash") \
        from error

LEAF = 256 * 1024
SUM_BYTES = 16
# What one task of the pool reads: large against a task's cost, small against a model.
_SPAN = 64 * LEAF


def tree_sum(buffer: Any) -> bytes:
    """The sum of one contiguous buffer; 16 bytes."""
    return tree_sums([buffer])[0]


def tree_sums(buffers: Iterable[Any], threads: int | None = None, stop: Callable[[], bool] | None = None
              ) -> list[bytes]:
    """A sum for each contiguous buffer (numpy, memoryview, mmap, bytes), in order. threads None: as many as this process
    may use processors. stop: asked before each 16 MiB; once it says True, Stopped is raised. TypeError: a buffer that is
    not contiguous."""
    views = [memoryview(buffer).cast("B") if memoryview(buffer).nbytes else memoryview(b"") for buffer in buffers]
    spans = [(view, begin) for view in views for begin in range(0, len(view), _SPAN)]

    def digests(span: tuple[memoryview, int]) -> bytes:
        if stop is not None and stop():
            raise Stopped
        return leaf_digests(span[0][span[1]:span[1] + _SPAN])

    threads = threads or len(os.sched_getaffinity(0))
    if threads == 1 or len(spans) < 2:
        parts = list(map(digests, spans))
    else:
        with ThreadPoolExecutor(min(threads, len(spans)), thread_name_prefix="kvstrata-sums") as pool:
            parts = list(pool.map(digests, spans))
    rest = iter(parts)
    return [root_of([next(rest) for _ in range(0, len(view), _SPAN)], len(view)) for view in views]


class Stopped(Exception):
    """Whoever asked for sums wants them no more."""


def leaf_digests(view: memoryview) -> bytes:
    """Digests of a buffer's leaves, one behind the other."""
    hasher, digests = xxhash.xxh3_128(), []
    for begin in range(0, len(view), LEAF):
        hasher.reset()
        hasher.update(view[begin:begin + LEAF])  # lets go of the interpreter, which the one-shot function does not
        digests.append(hasher.digest())
    return b"".join(digests)


def root_of(leaves: Sequence[bytes], length: int) -> bytes:
    """The root over leaves' digests, in pieces of any size, of `length` bytes."""
    hasher = xxhash.xxh3_128()
    for digests in leaves:
        hasher.update(digests)
    hasher.update(length.to_bytes(8, "little"))
    return hasher.digest()
