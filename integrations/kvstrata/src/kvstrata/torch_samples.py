# SPDX-License-Identifier: Apache-2.0
"""A sample of each tensor's bytes, read again in one go.

Of a tensor: 8 words of 8 bytes, spread over it, those that are not zero first (a factor leaves zeros as they are); all
bytes of one that has no more; of one that is not contiguous 8 elements. They are read by address, through one array
that stands for all memory, so a read costs one gather (some 10 ns a word), on a GPU one gather and one copy to the host
besides, for which nobody has to wait (Reading). Who reads has to know that the tensors still lie there. Devices other
than CPUs and CUDA have no samples. Threads: any number of readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_WORDS = 8
_CANDIDATES = 64
_Addresses = npt.NDArray[np.int64]


class Samples:
    """of: what was read of each tensor when this was made, as bytes, in the order of `tensors`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.of: list[bytes] = [b""] * len(tensors)
        self._memories: list[tuple[_Memory, npt.NDArray[np.uint64]]] = []
        for device in dict.fromkeys(tensor.device for tensor in tensors):
            if device.type not in ("cpu", "cuda"):
                continue
            places = [i for i, tensor in enumerate(tensors) if tensor.device == device and tensor.numel()]
            addresses = [_addresses(tensors[i]) for i in places]
            if not places:
                continue
            addresses = _chosen(device, addresses)
            memory = _Memory(device, addresses)
            read = memory.read()
            self._memories.append((memory, read))
            for place, part in zip(places, memory.parts(read)):
                self.of[place] = part

    def hold(self) -> bool:
        """Whether memory has still what it had."""
        return self.begin().hold()

    def begin(self) -> Reading:
        """Reads what memory has when the work that is enqueued now is done: on a GPU it is not waited for."""
        return Reading([(memory.enqueue(), was) for memory, was in self._memories])


class Reading:
    """Samples on their way to the host."""

    def __init__(self, reads: list[tuple[_Read, npt.NDArray[np.uint64]]]) -> None:
        self._reads = reads

    def ended(self) -> bool:
        return all(read.event is None or read.event.query() for read, _ in self._reads)

    def hold(self) -> bool:
        """Whether memory had what it was to have. Waits for what has not ended."""
        return all(np.array_equal(read.wait(), was) for read, was in self._reads)


class _Read(NamedTuple):
    """words: a tensor where the event of its copy has to be waited for, else an array."""

    words: Any
    event: Any = None

    def wait(self) -> npt.NDArray[np.uint64]:
        if self.event is None:
            return self.words
        self.event.synchronize()
        return self.words.numpy().view(np.uint64)


class _Memory:
    """Reads of one device, of places that each are addresses of words, or of bytes (those negated)."""

    def __init__(self, device: torch.device, places: Sequence[tuple[bool, _Addresses]]) -> None:
        self._places = places
        words = [a for whole, a in places if whole]
        single = [a for whole, a in places if not whole]
        self._views = [_view(device, np.concatenate(group), kind) for group, kind in ((words, 8), (single, 1)) if group]

    def read(self) -> npt.NDArray[np.uint64]:
        """All words, then all bytes."""
        return self.enqueue().wait()

    def enqueue(self) -> _Read:
        parts = [view[index] for view, index in self._views]
        if not isinstance(parts[0], torch.Tensor):
            return _Read(np.concatenate([part.astype(np.uint64, copy=False) for part in parts]))
        gathered = torch.cat([part.to(torch.int64) for part in parts])
        words = torch.empty(gathered.shape, dtype=torch.int64, pin_memory=True)
        words.copy_(gathered, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(gathered.device))
        return _Read(words, event)

    def parts(self, read: npt.NDArray[np.uint64]) -> list[bytes]:
        """What was read, by place."""
        at = {True: 0, False: sum(len(a) for whole, a in self._places if whole)}
        parts = []
        for whole, addresses in self._places:
            parts.append(read[at[whole]:at[whole] + len(addresses)].tobytes())
            at[whole] += len(addresses)
        return parts


def _view(device: torch.device, addresses: _Addresses, size: int) -> tuple[Any, Any]:
    """An array over all memory between the addresses, and indices into it. It owns nothing."""
    base = int(addresses.min())
    index = (addresses - base) // size
    about = {"data": (base, device.type == "cpu"), "shape": (int(index.max()) + 1,), "version": 3,
             "typestr": {(8, "cpu"): "<u8", (8, "cuda"): "<i8"}.get((size, device.type), "|u1")}
    if device.type == "cpu":
        return np.asarray(type("Memory", (), {"__array_interface__": about})()), index
    memory = torch.as_tensor(type("Memory", (), {"__cuda_array_interface__": about})(), device=device)
    return memory, torch.from_numpy(index).to(device)


def _addresses(tensor: torch.Tensor) -> tuple[bool, _Addresses]:
    """(words, not bytes; candidates for a sample)."""
    begin, size = tensor.data_ptr(), tensor.element_size()
    if not tensor.is_contiguous():
        elements = np.unique(np.linspace(0, tensor.numel() - 1, _WORDS).astype(np.int64))
        steps = np.array(tensor.stride()) @ np.stack(np.unravel_index(elements, tensor.shape))
        return False, (begin + steps[:, None] * size + np.arange(size)).ravel()
    end = begin + tensor.numel() * size
    first, words = -(-begin // 8) * 8, end // 8 - -(-begin // 8)
    if words < _WORDS:
        return False, np.arange(begin, end)
    spread = np.linspace(0, words - 1, min(words, _CANDIDATES)).astype(np.int64)
    return True, first + 8 * spread


def _chosen(device: torch.device, places: Sequence[tuple[bool, _Addresses]]) -> list[tuple[bool, _Addresses]]:
    """_WORDS of each tensor's candidates, still spread: such as are not zero, as far as there are any."""
    memory = _Memory(device, places)
    chosen = []
    for (whole, addresses), read in zip(places, memory.parts(memory.read())):
        if whole:
            filled = np.flatnonzero(np.frombuffer(read, np.uint64))
            pool = filled if len(filled) >= _WORDS else np.arange(len(addresses))
            addresses = addresses[pool[np.linspace(0, len(pool) - 1, _WORDS).astype(np.int64)]]
        chosen.append((whole, addresses))
    return chosen
