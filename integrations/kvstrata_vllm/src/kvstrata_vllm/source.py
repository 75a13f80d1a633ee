# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of engine chunks: what the daemon holds of a request, and which chunks are written where.

vLLM asks for one key at a time, of each request that waits, in each step. So a request has one memo: when it arrives,
all its keys are asked for at once under a lease, and what vLLM asks is answered from that. What is said to be a hit is
held under the lease; it is released when the copies of its load are over, when the request is scheduled without one,
and when it ends. Chunks to store are written into credits that were fetched ahead.

Which copies are over is counted here by vLLM's numbers of jobs, whatever vLLM has forgotten of them: at a reset it
takes chunks for free that a GPU may still write. A reset, or a model that has changed, begins an epoch: another space
of keys. A request is stored within the epoch that it began in.

Nothing here waits. While the daemon is silent or gone nothing is found that is not held already, and nothing is stored.
Threads: the scheduler's.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvstrata.chunks import ABSENT, COMING, ChunkClient, Key, Lease
from kvstrata.epoch import Epoch, new_reset
from kvstrata.torch_identity import Identity
from vllm.v1.kv_offload.base import (LoadStoreSpec, LookupResult, OffloadingManager, PrepareStoreOutput, ReqContext,
                                     RequestOffloadingContext, get_offload_block_hash, get_offload_group_idx)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from .space import combined, space_of
from .versions import positions_of

_log = logging.getLogger("vllm.kvstrata")

_ASKED_A_STEP = 2048  # keys, about which new requests are asked for; to ask them takes some milliseconds
_ASK_AGAIN = 0.5  # seconds after which what was not there is asked for again, while a request waits


@dataclass
class Memo:
    """What is known of a request. salt: its adapter's, to be put before the names of its blocks; alone: nothing of
    it is looked up or stored. ids: the lease's, where index says of a key where it is; again: asked anew, not answered
    yet; pending: where its keys were when vLLM last put it off, and how much it had computed; known: keys that need not be
    stored; epoch: in which it was scheduled last; never: its load has failed, so
    nothing is a hit any more."""

    lease: Lease | None = None
    ids: list[int | None] = field(default_factory=list)
    index: dict[bytes, int] = field(default_factory=dict)
    again: Lease | None = None
    pending: tuple[int, list[int | None]] | None = None
    known: set[bytes] = field(default_factory=set)
    epoch: int = -1
    step: int = -1
    never: bool = False
    alone: bool = False
    salt: Future[bytes] | None = None

    def named(self, key: bytes) -> Key:
        """As the daemon knows it."""
        name = get_offload_block_hash(key)
        if self.salt is not None:
            name = hashlib.sha256(self.salt.result() + name).digest()
        return name, get_offload_group_idx(key)

    def hold(self, lease: Lease) -> None:
        self.lease, self.ids = lease, lease.ids

    def knows(self, key: bytes) -> bool:
        """Whether the daemon has it, or is getting it."""
        return key in self.known or ((at := self.index.get(key)) is not None and self.ids[at] not in (None, ABSENT))

    def let_go(self) -> Lease | None:
        """Its lease. What that has is known."""
        lease, self.lease = self.lease, None
        self.known.update(key for key in self.index if self.knows(key))
        self.ids, self.index = [], {}
        return lease


@dataclass
class Job:
    """Copies of vLLM's number. left: workers that have not reported. A store has chunks, of vLLM's key and the
    daemon's; a load has a lease."""

    left: int
    epoch: int
    chunks: list[tuple[bytes, Key, int]] = field(default_factory=list)
    lease: Lease | None = None
    failed: bool = False


class ChunkSource(OffloadingManager):
    """client: the daemon's. workers: how many copy. identities: of the model, by rank; the first epoch begins with
    `serve`."""

    def __init__(self, client: ChunkClient, workers: int) -> None:
        self.client = client
        self.epoch = Epoch()
        self.mixed = False  # vLLM's own cache may have blocks of an epoch before
        self._layout: Mapping[str, Any] = {}
        self.identities: dict[int, Identity] = {}
        self._workers, self._ahead = workers, 0
        self._number = 0    # the epoch's
        self._step = 0
        self._asked = 0     # keys, since the last step
        self._memos: dict[str, Memo] = {}
        self._writing: dict[bytes, int] = {}  # by key: the chunk, within the epoch
        self._named: dict[int, tuple[bytes, Key]] = {}  # by chunk: its key, until the step has its job
        self._jobs: dict[int, Job] = {}

    # Epochs

    def serve(self, layout: Mapping[str, Any], identities: Mapping[int, Identity], ahead: int) -> None:
        """Workers have loaded the model. layout: what else a chunk's bytes go by; identities: by rank; ahead: credits that
        are fetched ahead."""
        self._layout, self.identities, self._ahead = layout, dict(identities), ahead
        self.epoch = Epoch(combined(self.identities))
        self._begin_epoch()
        self._fetch()
        memory = self.client.welcome
        _log.info("kvstrata is below vLLM's cache: %.1f GiB shared by this user's engines, %d KiB a chunk, model %s",
                  memory.region_bytes / 2**30, memory.row_bytes >> 10, self.epoch.digest()[:8])

    def follow(self, identities: Mapping[int, Identity], since_reset: bool) -> None:
        """Workers see the model changed. since_reset: all that was computed since the last reset is of the new one, so that
        it goes on under another name. Else an epoch begins, and nothing is stored until vLLM's cache is reset."""
        self.identities.update(identities)
        if not self.epoch.follow(identity=combined(self.identities)):
            return
        if since_reset:
            self._name_epoch()
            return
        if not self.mixed:
            _log.warning("the model has changed, and vLLM's cache was not reset: nothing is stored until "
                         "reset_prefix_cache(reset_connector=True)")
        self.mixed = True
        self._begin_epoch()

    def reset(self, used_blocks: int) -> bool:
        """Begins an epoch: nothing of before is found. used_blocks: of vLLM's cache, which was not reset if there are
        some; then the answer is False, and nothing is stored until a reset finds none."""
        self.epoch.follow(reset=new_reset())
        self.mixed = used_blocks > 0
        if self.mixed:
            _log.error("vLLM's own cache is not reset: %d blocks are in use by requests that run or load; nothing is "
                       "stored until it is reset when they have ended", used_blocks)
        self._begin_epoch()
        return not self.mixed

    def _begin_epoch(self) -> None:
        self._number += 1
        self._writing = {}
        self._name_epoch()

    def _name_epoch(self) -> None:
        for memo in self._memos.values():
            self._forget(memo)
            memo.known = set()
        if self.epoch.identity is not None:
            self.client.space(space_of(self.epoch.digest(), self._layout))

    @property
    def _closed(self) -> bool:
        """Whether nothing is asked or stored."""
        return self.epoch.identity is None or self.epoch.private or self.client.silent or bool(self.client.gone)

    # What is held

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._memos[req_context.req_id] = Memo()
        return RequestOffloadingContext()

    def with_adapter(self, request: str, salt: Future[bytes] | None) -> None:
        """It has an adapter of this salt; None: nobody knows of which."""
        memo = self._memos[request]
        memo.salt, memo.alone = salt, salt is None

    @property
    def can_ask(self) -> bool:
        """Whether a request that arrives now is asked about at once; where many do, in a later step."""
        return self._asked < _ASKED_A_STEP and not self._closed

    def prefetch(self, req_context: ReqContext) -> None:
        """A request has arrived, and its keys are known."""
        memo = self._memo(req_context)
        if self.can_ask and not memo.alone and (memo.salt is None or memo.salt.done()):
            self._ask(memo, req_context)

    def begins(self, request: str) -> None:
        """It may be scheduled now: what it computes from here on is of this epoch."""
        if (memo := self._memos.get(request)) is not None:
            memo.epoch = self._number

    def waits(self, request: str, computed: int = 0) -> bool:
        """Whether what was asked for it is not answered yet, or is as it was when vLLM put it off with so many tokens
        computed: then no key of it need be looked up. Or its turn to be asked for is in a later step."""
        memo = self._memos.get(request)
        if memo is None or self._closed:
            return False
        if memo.salt is not None and not memo.salt.done():
            return True
        if memo.pending is not None or (memo.lease is not None and not memo.lease.answered):
            self.client.receive()
        if memo.lease is not None and not memo.lease.answered:
            return True
        if self._asked >= _ASKED_A_STEP and not (memo.index or memo.never or memo.alone):
            return True
        self._ask_again(memo)
        return memo.pending == (computed, memo.ids)

    def put_off(self, request: str, computed: int) -> None:
        """vLLM found some of its keys on the way, and asks again in its next step."""
        if (memo := self._memos.get(request)) is not None:
            memo.pending = computed, list(memo.ids)

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        memo = self._memo(req_context)
        self._ask_again(memo)
        at = memo.index.get(key)
        if at is None:
            if memo.never or memo.alone or self._closed:
                return LookupResult.MISS
            self._ask(memo, req_context, key)
            at = memo.index[key]
        number = memo.ids[at]
        if number is not None and number >= 0:
            return LookupResult.HIT
        if number == ABSENT or self._closed:
            return LookupResult.MISS
        return LookupResult.RETRY if number is None else LookupResult.HIT_PENDING

    def _memo(self, req_context: ReqContext) -> Memo:
        memo = self._memos.get(req_context.req_id)
        if memo is None:
            memo = self._memos[req_context.req_id] = Memo()
        return memo

    def _ask(self, memo: Memo, req_context: ReqContext, *more: bytes) -> None:
        """All keys that the request has, and `more`, as far as they are not asked yet; first tokens first."""
        positions = positions_of(req_context)
        keys = [key for key in dict.fromkeys((*sorted(positions, key=positions.__getitem__), *more))
                if key not in memo.index]
        if keys:
            memo.index.update(zip(keys, range(len(memo.index), len(memo.index) + len(keys))))
            memo.hold(self.client.ask([memo.named(key) for key in keys], memo.lease))
            self._asked += len(keys)

    def _ask_again(self, memo: Memo) -> None:
        """Once a step: what was not there may have come since. The lease is another one when all of it is answered."""
        if memo.step == self._step:
            return
        memo.step = self._step
        if memo.again is not None and memo.again.answered:
            assert memo.lease is not None
            if len(memo.again.ids) == len(memo.lease.ids):
                old = memo.lease
                memo.hold(memo.again)
                memo.again = old
            self.client.release([memo.again])
            memo.again = None
        lease = memo.lease
        if lease is None or memo.again is not None or self._closed or not lease.answered:
            return
        if time.monotonic() - lease.asked_at < _ASK_AGAIN or all(at >= 0 for at in lease.ids if at is not None):
            return
        memo.again = self.client.ask([memo.named(key) for key in memo.index])

    def prepare_load(self, keys: Collection[bytes], req_context: ReqContext) -> LoadStoreSpec:
        """What is not held, of which there should be none, is a chunk -1: the worker lets such a load fail."""
        memo = self._memo(req_context)
        ids = [memo.ids[memo.index[key]] if key in memo.index else ABSENT for key in keys]
        return CPULoadStoreSpec([ABSENT if at is None or at < 0 else at for at in ids])

    def get_load_source(self, key: bytes, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.HOST

    def failed(self, requests: Iterable[str]) -> None:
        """Loads of these have failed: they are computed. Asked again, the same would be a hit."""
        for request in requests:
            if (memo := self._memos.get(request)) is not None:
                memo.never = True

    def on_request_finished(self, req_context: ReqContext) -> None:
        if (memo := self._memos.pop(req_context.req_id, None)) is not None:
            self._forget(memo)

    def _forget(self, memo: Memo) -> None:
        """It holds nothing any more."""
        leases = [lease for lease in (memo.let_go(), memo.again) if lease is not None]
        memo.again = None
        if leases:
            self.client.release(leases)

    # What is stored

    def prepare_store(self, keys: Collection[bytes], req_context: ReqContext) -> PrepareStoreOutput:
        """As many as there are credits for, first tokens first. vLLM is not told to try again: what it offers later may
        lack blocks that a window has left."""
        memo = self._memo(req_context)
        if self._closed or self.mixed or memo.alone or memo.epoch != self._number:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        offered = [key for key in keys if key not in self._writing and not memo.knows(key)]
        ids = self.client.credits(len(offered))
        if len(ids) < len(offered):
            first = sorted(offered, key=lambda key: req_context.get_offload_key_position(key) or 0)[:len(ids)]
            chosen = set(first)
            offered = [key for key in offered if key in chosen]
        self._writing.update(zip(offered, ids))
        self._named.update((at, (key, memo.named(key))) for key, at in zip(offered, ids))
        self._fetch()
        return PrepareStoreOutput(offered, CPULoadStoreSpec(ids), [])

    def _fetch(self) -> None:
        """Credits ahead of what the next steps can store."""
        missing = self._ahead - self.client.available - self.client.owed
        if missing > self._ahead // 4 and not self._closed:
            self.client.want(missing)

    # A step

    def scheduled(self, requests: Iterable[str], loads: Mapping[int, Any], stores: Mapping[int, Any]) -> None:
        """vLLM's step is made: these requests are in it, with these jobs (TransferJob by number)."""
        for job, load in loads.items():
            memo = self._memos.get(load.req_id, Memo())
            self._jobs[job] = Job(self._workers, self._number, lease=memo.let_go())
            self._forget(memo)
        for job, store in stores.items():
            ids = store.dst_spec.block_ids.tolist()
            self._jobs[job] = Job(self._workers, self._number, [(*self._named.pop(at), at) for at in ids])
        for request in requests:
            memo = self._memos.get(request)
            if memo is not None and memo.lease is not None:
                self._forget(memo)
        if self.client.owed:
            self.client.receive()
        self._asked = 0
        self._step += 1

    def reported(self, completed: Mapping[int, int], failed: Collection[int]) -> None:
        """By workers: how many have ended which job, and jobs that have failed at some."""
        for number in failed:
            if (job := self._jobs.get(number)) is not None:
                job.failed = True
        stored: list[tuple[Key, int]] = []
        given_back: list[int] = []
        for number, count in completed.items():
            job = self._jobs.get(number)
            if job is None:
                continue
            job.left -= count
            if job.left > 0:
                continue
            del self._jobs[number]
            if job.lease is not None:
                self.client.release([job.lease])
            if job.failed or job.epoch != self._number:
                given_back += [at for _, _, at in job.chunks]
            else:
                stored += [(name, at) for _, name, at in job.chunks]
            for key, _, at in job.chunks:
                if self._writing.get(key) == at:
                    del self._writing[key]
        if stored:
            self.client.stored(stored)
        if given_back:
            self.client.give_back(given_back)

    def has_pending_work(self) -> bool:
        """Jobs that workers have not reported: vLLM steps on until they have."""
        return bool(self._jobs)

    def shutdown(self) -> None:
        """Workers have ended. Where one has not reported all, the daemon waits for the processes' end."""
        self.client.close(detach=not self._jobs)
