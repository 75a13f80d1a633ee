# SPDX-License-Identifier: Apache-2.0
"""The worker's half of offload: vLLM's blocks are filled from the daemon's pages, and copied there.

Loads run on threads of their own, saves in order on another: neither is waited for by a step, but the seal that reads
blocks of a preempted request, which must not be written meanwhile. What a step orders to be saved is begun in the step
after it, when its tokens are out: a copy beside a step that samples would take its cores.

The daemon may die between any two calls: what was to be loaded is computed then, what was to be saved is not, and the
next transfer attaches to the daemon that is there. One that does not answer is waited for once (attachment.py).

A reset, or a model that has changed (epochs.py), gives up what was not saved yet. Behind a change without a reset
vLLM's own cache may have blocks of before, so nothing is saved until a reset comes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Lock

import torch
from kvstrata.attachment import Attachment
from kvstrata.epoch import Epoch

import kvstrata

from .geometry import Geometry, Options
from .loaded import identity_here
from .offload_scheduler import Load, Save, Transfers

_log = logging.getLogger("vllm.kvstrata")


@dataclass
class Results:
    """Requests whose transfers are over."""

    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    saved: set[str] = field(default_factory=set)


@dataclass
class Saving:
    """A request of which blocks were ordered to be saved. given_up: what is left is not saved; reading: is held while
    blocks are read."""

    sequence: kvstrata.Sequence | None = None
    given_up: bool = False
    reading: Lock = field(default_factory=Lock)


class OffloadWorker:
    """caches: of the layers, in order, [block][KV head][slot][2 * head_dim]. epoch: the present one."""

    def __init__(self, options: Options, geometry: Geometry, caches: list[torch.Tensor]) -> None:
        self._geometry, self.epoch = geometry, Epoch(geometry.identity)
        self._mixed = False  # vLLM's cache may have blocks of before the model changed
        self._caches = [blocks_of(cache) for cache in caches]
        self._block_tokens = caches[0].shape[2]
        self._attachment = Attachment(options.socket, "vllm worker", self._register)
        self._lock = Lock()  # guards what follows
        self._results = Results()
        self._saving: dict[str, Saving] = {}  # the saver's, but for who is in it
        self._ordered: list[tuple[Save, Saving]] = []  # the worker's own thread's
        self._loader = ThreadPoolExecutor(2, "kvstrata-load")
        self._saver = ThreadPoolExecutor(1, "kvstrata-save")

    def follow(self, transfers: Transfers) -> None:
        """A step begins, which may be the first of an epoch."""
        was_reset = transfers.reset != self.epoch.reset
        opens = bool(transfers.loads or transfers.saves or self._ordered)
        if not self.epoch.follow(transfers.reset, identity_here(opens)):
            return
        if not was_reset and not self._mixed:
            _log.warning("the model has changed, and vLLM's cache was not reset: nothing is saved until "
                         "reset_prefix_cache(reset_connector=True)")
        self._mixed = not was_reset
        with self._lock:
            for saving in self._saving.values():
                saving.given_up = True
        self._ordered = []
        self._attachment.let_go()

    def load(self, loads: Iterable[Load]) -> None:
        """Begins them, and what the step before ordered to be saved; results() says when they are over."""
        self._begin_saves()
        for load in loads:
            self._loader.submit(self._load, load)

    def save(self, saves: Iterable[Save]) -> None:
        """For the next step to begin. Blocks are read until results() names the request, or drop() returns."""
        for save in saves:
            with self._lock:
                saving = self._saving.setdefault(save.request, Saving(given_up=self._mixed or self.epoch.private))
            self._ordered.append((save, saving))

    def _begin_saves(self) -> None:
        ordered, self._ordered = self._ordered, []
        for save, saving in ordered:
            self._saver.submit(self._save, save, saving)

    def drop(self, requests: Iterable[str]) -> None:
        """Blocks of these are read no more when it returns."""
        for request in requests:
            with self._lock:
                saving = self._saving.pop(request, None)
            if saving is not None:
                saving.given_up = True
                with saving.reading:  # a seal that runs has read them
                    self._saver.submit(self._end, saving)

    def results(self, finished: Iterable[str]) -> Results:
        """Since the last call. finished: requests that have ended, whose blocks are free when they are saved. Behind this
        step's load(), so that all that was ordered for them has begun."""
        for request in finished:
            with self._lock:
                saving = self._saving.pop(request, None)
            if saving is not None:
                self._saver.submit(self._finish, request, saving)
        with self._lock:
            results, self._results = self._results, Results()
        return results

    def shutdown(self) -> None:
        """What was ordered is saved first, unless the interpreter has ended its threads already."""
        with contextlib.suppress(RuntimeError):
            self._begin_saves()
        self._saver.shutdown()
        self._loader.shutdown()
        with self._lock:
            left, self._saving = list(self._saving.values()), {}
        for saving in left:
            self._end(saving)
        self._attachment.settle()
        self._attachment.let_go()

    # On threads

    def _load(self, load: Load) -> None:
        def run(session: kvstrata.Session, model: kvstrata.Model) -> bool:
            sequence = _open(session, model, load.ids)
            try:
                if sequence.held < load.end:
                    _log.warning("request %s: %d tokens were held when it was scheduled, %d are now", load.request,
                                 load.end, sequence.held)
                    return False
                sequence.load(load.first, load.blocks)
                return True
            finally:
                self._attachment.close([sequence])

        loaded = self._tried(load.request, lambda: self._attachment.ask(run))
        with self._lock:
            (self._results.loaded if loaded else self._results.failed).add(load.request)

    def _save(self, save: Save, saving: Saving) -> None:
        if not saving.given_up:
            saving.given_up = not self._tried(save.request, lambda: self._seal(save, saving))

    def _seal(self, save: Save, saving: Saving) -> bool:
        skipped = 0
        if save.prompt is not None:
            saving.sequence = self._attachment.ask(_open, save.prompt)
            skipped = min(saving.sequence.held // self._block_tokens, len(save.blocks))
        assert saving.sequence is not None
        tokens = skipped * self._block_tokens
        with saving.reading:
            if skipped < len(save.blocks) and not saving.given_up:
                self._seal_blocks(saving.sequence, save.first + tokens, save.blocks[skipped:], save.ids[tokens:])
        return True

    def _seal_blocks(self, sequence: kvstrata.Sequence, first: int, blocks: list[int], ids: list[int]) -> None:
        try:
            sequence.seal(first, blocks, ids)
        except kvstrata.KvstrataError as error:
            self._attachment.lost(sequence.session, error)
            raise

    def _finish(self, request: str, saving: Saving) -> None:
        self._end(saving)
        with self._lock:
            self._results.saved.add(request)

    def _end(self, saving: Saving) -> None:
        if (sequence := saving.sequence) is None:
            return
        session = sequence.session
        self._attachment.close([sequence] if self._attachment.is_now(session) else [session, sequence])

    def _tried(self, request: str, run: Callable[[], bool]) -> bool:
        """Whether it went well; whatever does not ends here, since nobody waits for a thread's exception."""
        try:
            return run()
        except Exception as error:  # noqa: BLE001
            _log.warning("request %s is computed, or not saved: %s", request, error)
            return False

    def _register(self, session: kvstrata.Session) -> kvstrata.Model:
        model = replace(self._geometry, digest=self.epoch.digest()).register(session)
        for layer, (keys, values) in enumerate(self._caches):
            session.register_tensors(model, layer, kvstrata.BlockTensor.of(keys), kvstrata.BlockTensor.of(values))
        return model


def _open(session: kvstrata.Session, model: kvstrata.Model, ids: list[int]) -> kvstrata.Sequence:
    return session.open(model, "full", ids)


def blocks_of(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [block][slot][KV head][head_dim] of a layer's cache of the CPU's attention "vec", without a copy:
    a block and head are its keys, transposed, and behind them its values."""
    blocks, heads, slots, width = cache.shape
    dim = width // 2
    of_block, of_head = cache.stride(0), cache.stride(1)
    shape, first = (blocks, slots, heads, dim), cache.storage_offset()
    return (cache.as_strided(shape, (of_block, 1, of_head, slots), first),
            cache.as_strided(shape, (of_block, dim, of_head, 1), first + slots * dim))
