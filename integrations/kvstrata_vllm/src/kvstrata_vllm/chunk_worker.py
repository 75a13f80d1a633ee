# SPDX-License-Identifier: Apache-2.0
"""A worker's part of KvstrataConnector beside the copies: whether the model is still what the scheduler takes it for, and
whose loads have failed. Threads: the worker's."""

from __future__ import annotations

from typing import Any

from kvstrata.torch_identity import Identity
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from .chunk_metadata import ChunkMetadata, ChunkWorkerMetadata
from .loaded import identity_here
from .transfers import Transfers


class ChunkWorker:
    """identity: of the model as it was loaded."""

    def __init__(self, rank: int, identity: Identity, transfers: Transfers) -> None:
        self._rank, self._identity, self._transfers = rank, identity, transfers
        self._step: ChunkMetadata | None = None
        self._reset, self._since_reset = "", True
        self._loading: dict[int, str] = {}

    def look(self, step: ChunkMetadata) -> None:
        """Once a step, before anything of it is copied: nothing is, where the scheduler has not heard yet what the model is
        now. The first step after a reset is looked at in any case: what changed before it is all that is cached then."""
        if step is self._step:
            return
        first = step.reset != self._reset
        self._step, self._reset = step, step.reset
        now = identity_here(first or bool(step.load_jobs or step.store_jobs))
        if now is not None and now != self._identity:
            self._identity, self._since_reset = now, first
        self._loading.update((job, load.req_id) for job, load in step.load_jobs.items())
        if self._changed(step):
            self._transfers.refused.update(step.load_jobs, step.store_jobs)

    def _changed(self, step: ChunkMetadata) -> bool:
        return step.identities.get(self._rank) != self._identity

    def results(self, results: KVConnectorTransferResults) -> KVConnectorTransferResults:
        """With the requests whose loads have failed."""
        failed = {request for job, request in self._loading.items() if job in self._transfers.failed}
        self._loading = {job: request for job, request in self._loading.items()
                         if request not in results.finished_recving}
        return KVConnectorTransferResults(results.finished_sending, results.finished_recving, failed)

    def news(self, meta: Any) -> ChunkWorkerMetadata | None:
        """For the scheduler, with vLLM's own of this step, if any."""
        failed, self._transfers.failed = self._transfers.failed, set()
        changed = self._step is not None and self._changed(self._step)
        if meta is None and not changed and not failed:
            return None
        made = ChunkWorkerMetadata(identities={self._rank: self._identity} if changed else {},
                                   since_reset=self._since_reset, failed=failed)
        if meta is not None:
            made.completed_jobs, made.transfer_stats = meta.completed_jobs, meta.transfer_stats
        return made
