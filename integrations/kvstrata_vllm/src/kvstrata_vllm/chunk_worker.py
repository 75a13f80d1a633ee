# SPDX-License-Identifier: Apache-2.0
"""A worker's part of KvstrataConnector beside the copies: whether the model is still what the scheduler takes it for,
and whose loads have failed. Threads: the worker's."""

from __future__ import annotations

from typing import Any

from kvstrata.torch_identity import Identity
from kvstrata.torch_samples import Reading
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from .chunk_metadata import ChunkMetadata, ChunkWorkerMetadata
from .loaded import begin_look, identity_here, look_is_due
from .transfers import Transfers


class ChunkWorker:
    """identity: of the model as it was loaded."""

    def __init__(self, rank: int, identity: Identity, transfers: Transfers) -> None:
        self._rank, self._identity, self._transfers = rank, identity, transfers
        self._step: ChunkMetadata | None = None
        self._reset, self._since_reset = "", True
        self._loading: dict[int, str] = {}
        self._reading: tuple[Reading, set[int]] | None = None  # the last look's, and the jobs that go by it

    def look(self, step: ChunkMetadata) -> None:
        """Once a step, before anything of it is copied: nothing is, where the scheduler has not heard yet what the model
        is now. The first step after a reset is looked at in any case: what changed before it is all that is cached then, so
        that what the step stores goes on under the new name, which the scheduler hears before it is shown.

        A GPU is not waited for, in particular not in the step behind a prompt, which vLLM prepares before it takes the
        prompt's first token. Stores begin in the next step, which knows then; the end of a load is not said before it is
        known."""
        if step is self._step:
            return
        self.settle(wait=self._reading is not None and bool(self._reading[1]))
        first, jobs = step.reset != self._reset, {*step.load_jobs, *step.store_jobs}
        self._step, self._reset = step, step.reset
        self._loading.update((job, load.req_id) for job, load in step.load_jobs.items())
        if not (first or jobs or look_is_due()):
            return
        reading = None if first else begin_look()
        if reading is not None and not self._changed(step):
            self._reading = reading, jobs
            self._transfers.unsure.update(jobs)
            return
        self._hear(identity_here(), first)
        if self._changed(step) and not (first and self._identity.private is None):
            self._transfers.refused.update(jobs)

    def _hear(self, now: Identity | None, first: bool) -> None:
        if now is not None and now != self._identity:
            self._identity, self._since_reset = now, first

    def settle(self, wait: bool) -> None:
        """What the last look says of its jobs, if it has ended or is to be waited for."""
        if self._reading is None or not (wait or self._reading[0].ended()):
            return
        (reading, jobs), self._reading = self._reading, None
        self._transfers.unsure -= jobs
        if not reading.hold():
            self._hear(identity_here(), False)
            assert self._step is not None
            if self._changed(self._step):
                self._transfers.refused.update(jobs)

    def _changed(self, step: ChunkMetadata) -> bool:
        return step.identities.get(self._rank) != self._identity

    def results(self, results: KVConnectorTransferResults) -> KVConnectorTransferResults:
        """vLLM's of this step, with the requests whose loads have failed."""
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
