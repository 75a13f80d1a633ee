# SPDX-License-Identifier: Apache-2.0
"""Around a worker that copies: copies that fail, or must not be made, end like others and are named.

vLLM's connector takes every copy for a success. So each ends as one here, and the engine is told beside which were
none: a load's request is computed, a store's chunks are not shown to anybody. Threads: the engine's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

_log = logging.getLogger("vllm.kvstrata")


class Transfers(OffloadingWorker):
    """copies: who copies. filled: is told the ids of vLLM's blocks that a load has filled, before its end is said. refused: jobs that are not to be made, or must not count; unsure: those of which it is not
    known yet, whose end is not said; failed: those that do not count, for whoever asks to take out."""

    def __init__(self, copies: OffloadingWorker) -> None:
        self._copies = copies
        self.filled: Callable[[Any], None] | None = None
        self._loads: dict[int, Any] = {}
        self.refused: set[int] = set()
        self.unsure: set[int] = set()
        self.failed: set[int] = set()
        self._over: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, lambda: self._copies.submit_store(job_id, src_spec, dst_spec))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, *others: Any, **named: Any) -> bool:
        """A negative chunk is none."""
        if (src_spec.block_ids < 0).any():
            self.refused.add(job_id)
        self._loads[job_id] = dst_spec.block_ids
        return self._submit(job_id, lambda: self._copies.submit_load(job_id, src_spec, dst_spec, *others, **named))

    def _submit(self, job_id: int, begin: Callable[[], bool]) -> bool:
        begun = False
        if job_id not in self.refused:
            try:
                begun = begin()
            except Exception:
                _log.exception("a copy between vLLM's blocks and kvstratad's region could not begin")
        if not begun:
            self._over.append(TransferResult(job_id, False))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended = self._over + self._copies.get_finished()
        self._over = [result for result in ended if result.job_id in self.unsure]
        return [self._end(result) for result in ended if result.job_id not in self.unsure]

    def _end(self, result: TransferResult) -> TransferResult:
        blocks = self._loads.pop(result.job_id, None)
        if result.success and result.job_id not in self.refused:
            if self.filled is not None and blocks is not None:
                self.filled(blocks)
            return result
        self.refused.discard(result.job_id)
        self.failed.add(result.job_id)
        return TransferResult(result.job_id, True)

    def wait(self, job_ids: set[int]) -> None:
        self._copies.wait(job_ids)

    def shutdown(self) -> None:
        self._copies.shutdown()
