# SPDX-License-Identifier: Apache-2.0
"""What LoRA adapters are, so that chunks behind one are found behind the same one alone.

vLLM names a request's blocks by its adapter's name and path. Another adapter may lie there tomorrow, so the sums of its
files are put into the keys as well. They are read once, on a thread, when the first request with it arrives. Files that
change while the engine lives make it nobody's: what the engine has loaded is not known then. Threads: the scheduler's.
"""

from __future__ import annotations

import hashlib
import logging
import pathlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger("vllm.kvstrata")

_Marks = tuple[tuple[str, int, int], ...]


@dataclass
class _Adapter:
    """marks: of its files when it was first seen; salt: their sum; changed: they are others now."""

    marks: _Marks
    salt: Future[bytes]
    changed: bool = False


class Adapters:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, "kvstrata-adapter")
        self._known: dict[str, _Adapter] = {}

    def salt_of(self, request: Any) -> Future[bytes] | None:
        """request: vLLM's LoRARequest. What is put before the names of blocks; None: it cannot be known."""
        path = pathlib.Path(request.lora_path)
        adapter = self._known.get(request.lora_path)
        marks = _marks(path)
        if adapter is None:
            if not marks:
                _log.warning("adapter %s is not in a local folder (%s), so what it is cannot be known: its requests "
                             "are computed, and not kept", request.lora_name, path)
            adapter = self._known[request.lora_path] = _Adapter(marks, self._threads.submit(_sum, path, marks))
        elif marks != adapter.marks and not adapter.changed:
            adapter.changed = True
            _log.warning("files of adapter %s in %s have changed since it was first used: its requests are computed, "
                         "and not kept, until the engine is started again; give the new one a folder of its own",
                         request.lora_name, path)
        return None if adapter.changed or not adapter.marks else adapter.salt


def _marks(path: pathlib.Path) -> _Marks:
    """Name, size and time of each file of it."""
    try:
        files = sorted(file for file in path.iterdir() if file.name.startswith("adapter_"))
        return tuple((file.name, about.st_size, about.st_mtime_ns) for file in files if (about := file.stat()))
    except OSError:
        return ()


def _sum(path: pathlib.Path, marks: _Marks) -> bytes:
    total = hashlib.sha256()
    for name, size, _ in marks:
        with open(path / name, "rb") as file:
            total.update(f"{name} {size}\n".encode() + hashlib.file_digest(file, "sha256").digest())
    return total.digest()
