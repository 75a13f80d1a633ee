# SPDX-License-Identifier: Apache-2.0
"""HiCache's storage in the daemon: pages of SGLang's host pool, found by their hashes (docs/sglang.md, "HiCache").

    --enable-hierarchical-cache --page-size 64 --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
        '{"backend_name": "kvstrata", "module_path": "kvstrata_sglang.storage", "class_name": "KvstrataStorage",
          "interface_v1": 1}'

SGLang tells a storage no token ids, but for each page a hash of its tokens and all before them. So a page is a prompt
of its own here, whose ids are made of that hash: what one SGLang stores, others find, and other engines do not.
They are found in the present epoch (kvstrata/epoch.py). Behind a change of the model SGLang's own pools may have pages
of before, so nothing is written until it flushes them.

Threads: SGLang's, one that looks up and reads and one that writes. No call fails: what the daemon does not have, or one
that has died or does not answer, is not there.
"""

from __future__ import annotations

import hashlib
import logging
import os
import weakref
from collections.abc import Callable
from threading import Lock
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from kvstrata.attachment import Attachment
from kvstrata.epoch import Epoch, new_reset
from kvstrata.torch_identity import Identity
from kvstrata.torch_model import HEAD_DIMS, PAGE_DTYPES
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo

import kvstrata

from .geometry import loaded_model, refuse, runner_here

_log = logging.getLogger("sglang.kvstrata")

LAYOUTS = ("layer_first", "page_first", "page_first_direct")
PAGE_TOKENS = (64, 32, 16)
_FLAG = "--hicache-storage-backend"
_Result = TypeVar("_Result")


class KvstrataStorage(HiCacheStorage):
    """Fields of extra_config: socket (None: KVSTRATA_SOCKET, else the default), digest (None: the identity of the model
    as it is loaded)."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        """Unsupported: parallelism, MLA, a generic interface."""
        given = storage_config.extra_config or {}
        sizes = {name: getattr(storage_config, name) for name in ("tp_size", "pp_size", "attn_cp_size", "dcp_size")}
        refuse((*((size > 1, f"{name} is {size}; one process is served") for name, size in sizes.items()),
                (storage_config.is_mla_model, "its attention is MLA"),
                (not given.get("interface_v1"), 'hicache_storage_backend_extra_config has no "interface_v1": 1')), _FLAG)
        self._digest = given.get("digest")
        self._lock = Lock()  # guards what follows
        self._model = None
        self._epoch = Epoch()
        self._mixed = False  # SGLang's pools may have pages of before the model changed
        self._attachment = Attachment(given.get("socket"), "sglang hicache", self._registered)
        self._disabled = os.environ.get("KVSTRATA_DISABLE") == "1"

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Unsupported: pages or a layout that blocks of the daemon cannot be."""
        super().register_mem_pool_host(mem_pool_host)
        pool = mem_pool_host
        refuse(((pool.layout not in LAYOUTS, f"hicache_mem_layout is {pool.layout}; served are {LAYOUTS}"),
                (pool.page_size % PAGE_TOKENS[-1] != 0, f"page_size is {pool.page_size}; pass --page-size 64, or "
                 f"another multiple of {PAGE_TOKENS[-1]}"),
                (pool.dtype not in PAGE_DTYPES, f"kv_cache_dtype is {pool.dtype}"),
                (pool.head_dim not in HEAD_DIMS or pool.v_head_dim != pool.head_dim,
                 f"head_dim is {pool.head_dim}, of values {pool.v_head_dim}; served are {HEAD_DIMS}")), _FLAG)
        if (runner := runner_here()) is not None:
            self._model = loaded_model(runner, self._digest)
            self._epoch = Epoch(self._model.now())
        elif self._digest is not None:
            self._epoch = Epoch(Identity(self._digest, None))
        _storages.add(self)

    # HiCache's interface v1. host_indices: of pages' tokens in the host pool, page_size of them a key

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many of the first ones are there."""
        for number, key in enumerate(keys):
            if not self.exists(key):
                return number
        return len(keys)

    def exists(self, key: str) -> bool:
        def run(session: kvstrata.Session, model: kvstrata.Model) -> bool:
            return session.lookup(model, self._ids(key, 1), "full").held >= self.mem_pool_host.page_size

        return self._tried(run, False)

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor,
                     extra_info: HiCacheStorageExtraInfo | None = None) -> list[bool]:
        """Whether a key's page was filled."""
        def run(session: kvstrata.Session, model: kvstrata.Model, key: str, page: int) -> bool:
            with session.open(model, "full", self._ids(key, 1)) as sequence:
                if sequence.held < self.mem_pool_host.page_size:
                    return False
                sequence.load(0, [page])
                return True

        return [self._tried(run, False, key, page) for key, page in zip(keys, self._pages(host_indices), strict=True)]

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor,
                     extra_info: HiCacheStorageExtraInfo | None = None) -> list[bool]:
        """Whether a key's page is there now. Returns when the daemon has copied them."""
        def run(session: kvstrata.Session, model: kvstrata.Model, key: str, page: int) -> bool:
            ids = self._ids(key)
            with session.open(model, "full", self._ids(key, 1)) as sequence:
                if sequence.held < len(ids):
                    sequence.seal(0, [page], ids)
                    sequence.settle()
                return True

        return [self._tried(run, False, key, page, writes=True)
                for key, page in zip(keys, self._pages(host_indices), strict=True)]

    def clear(self) -> None:
        """Begins an epoch: nothing of before is found any more."""
        self._look(reset=new_reset())

    def flushed(self) -> None:
        """SGLang's pools are empty."""
        self._look()
        self._mixed = False

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> NoReturn:
        raise NotImplementedError('pages are read by batch_get_v1: pass "interface_v1": 1')

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> NoReturn:
        self.get("")

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> NoReturn:
        raise NotImplementedError('pages are written by batch_set_v1: pass "interface_v1": 1')

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
                  ) -> NoReturn:
        self.set("")

    def close(self) -> None:
        """The session is closed when the last call in it is over and it is collected."""
        self._attachment.let_go()

    def _ids(self, key: str, more: int = 0) -> np.ndarray:
        """Token ids that stand for a page; more: behind them, since a prompt is never held in whole."""
        tokens = self.mem_pool_host.page_size + more
        stream = hashlib.shake_256(key.encode()).digest(4 * tokens)
        return np.frombuffer(stream, np.int32) & 0x7FFFFFFF

    def _pages(self, host_indices: torch.Tensor) -> list[int]:
        size = self.mem_pool_host.page_size
        return (host_indices[::size] // size).tolist()

    def _look(self, reset: str | None = None) -> None:
        """Whether the model has changed."""
        with self._lock:
            before = self._epoch.identity
            if self._epoch.follow(reset, self._model.now() if self._model is not None else None):
                self._attachment.let_go()
            self._mixed = self._mixed or self._epoch.identity != before

    def _tried(self, run: Callable[..., _Result], otherwise: _Result, *args: Any, writes: bool = False) -> _Result:
        if self._disabled:
            return otherwise
        self._look()
        if self._epoch.private or (writes and self._mixed):
            return otherwise
        try:
            return self._attachment.ask(run, *args)  # each has sequences of its own
        except kvstrata.KvstrataError as error:
            _log.warning("a page is not read, or not written: %s", error)
            return otherwise

    def _registered(self, session: kvstrata.Session) -> kvstrata.Model:
        """Queries are never asked, so there are as many heads of them as of keys."""
        pool = self.mem_pool_host
        # Never that of another engine, whose ids are true ones.
        digest = hashlib.sha256(f"hicache\n{pool.dtype}\n{self._epoch.digest()}".encode()).hexdigest()
        model = session.register_model(
            "sglang hicache", digest, layers=pool.layer_num, query_heads=pool.head_num, kv_heads=pool.head_num,
            head_dim=pool.head_dim, dtype=PAGE_DTYPES[pool.dtype],
            page_tokens=next(tokens for tokens in PAGE_TOKENS if pool.page_size % tokens == 0))
        for layer, (keys, values) in enumerate(zip(pool.k_data_refs, pool.v_data_refs, strict=True)):
            session.register_tensors(model, layer, *(kvstrata.BlockTensor.of(blocks_of(x, pool.page_size))
                                                     for x in (keys, values)))
        return model


def blocks_of(rows: torch.Tensor, page_size: int) -> torch.Tensor:
    """[page][token][head][dim], without a copy, of a layer's rows in a host pool, which come with pages or without."""
    return rows if rows.dim() == 4 else rows.unflatten(0, (-1, page_size))


_storages: weakref.WeakSet[KvstrataStorage] = weakref.WeakSet()


def flushed() -> None:
    """SGLang has flushed its pools."""
    for storage in list(_storages):
        storage.flushed()
