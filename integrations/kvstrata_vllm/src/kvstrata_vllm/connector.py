# SPDX-License-Identifier: Apache-2.0
"""kv_connector "KvstrataConnector": vLLM's own cache, with kvstratad's memory below it (docs/vllm.md).

It is vLLM's OffloadingConnector over KvstrataSpec. What is added is what a spec cannot do: whose keys they are,
requests that are asked about when they arrive, copies that fail, and what is under way at a reset and at the end. vLLM
makes one for its scheduler and one for each worker.
"""

from __future__ import annotations

from typing import Any

import torch
from kvstrata.block_planes import BLOCK_TOKENS
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from . import flags, versions
from .adapters import Adapters
from .chunk_metadata import ChunkMetadata, ChunkWorkerMetadata, Loaded
from .chunk_worker import ChunkWorker
from .loaded import identity_of
from .plan_choice import FULL, of_planes, plan_of
from .source import ChunkSource
from .space import backends_of, layout_of
from .spec import credits_ahead
from .transfers import Transfers


class KvstrataConnector(OffloadingConnector):
    """kv_connector "KvstrataConnector"."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        flags.prepare(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._adapters = Adapters()
        self._worker: ChunkWorker | None = None
        self._loaded: Loaded | None = None
        self._plan, self._link = FULL, None  # a worker's
        self._planes = of_planes(plan_of(vllm_config))

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *others: Any, **named: Any) -> Any:
        flags.name_spec(vllm_config)  # the process that answers for metrics has made no connector
        return super().build_prom_metrics(vllm_config, *others, **named)

    # Scheduler

    @property
    def _source(self) -> ChunkSource:
        source = self.scheduler.manager
        assert isinstance(source, ChunkSource)
        return source

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """metadata: all workers'. Unsupported: they are on another daemon, or have other rows than the scheduler."""
        workers, welcome = list(metadata.values()), self._source.client.welcome
        flags.refuse_workers(welcome, workers)
        offloading = versions.offloading_config(self._vllm_config, self._kv_cache_config)
        layout = layout_of(self._vllm_config, self._kv_cache_config, offloading, welcome.row_bytes)
        flags.warn_of_hashes(self._vllm_config)
        self._source.serve({**layout, "backends": sorted({name for of in workers for name in of.backends})},
                           {of.rank: of.identity for of in workers},
                           credits_ahead(offloading, self._vllm_config.scheduler_config.max_num_batched_tokens))

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        if request.lora_request is not None:
            self._source.with_adapter(request.request_id, self._adapters.salt_of(request.lora_request))
        if not request.skip_reading_prefix_cache and self._source.can_ask:
            self._source.prefetch(versions.context_of(self.scheduler, request.request_id))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._source.begins(request.request_id)
        if self._source.waits(request.request_id, num_computed_tokens):
            return None, False
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found[0] is None:
            self._source.put_off(request.request_id, num_computed_tokens)
        elif self._planes and found[0]:
            return self._whole_groups(request.num_tokens, num_computed_tokens, found[0])
        return found

    def _whole_groups(self, prompt: int, computed: int, found: int) -> tuple[int, bool]:
        """vLLM computes the last token of a prompt that is held whole, and blocks of planes have no rows to go on from:
        a chunk less is loaded then."""
        if computed + found < prompt and (computed + found) % BLOCK_TOKENS == 0:
            return found, True
        chunk = versions.chunk_tokens(self.scheduler)
        less = 0 if chunk is None else (prompt - 1) // chunk * chunk - computed
        return max(0, less), less > 0

    def build_connector_meta(self, scheduler_output: Any) -> ChunkMetadata:
        made: Any = super().build_connector_meta(scheduler_output)
        source = self._source
        source.scheduled(scheduler_output.num_scheduled_tokens, made.load_jobs, made.store_jobs)
        return ChunkMetadata(**vars(made), reset=source.epoch.reset, identities=source.identities)

    def update_connector_output(self, connector_output: Any) -> None:
        news = connector_output.kv_connector_worker_meta
        if isinstance(news, ChunkWorkerMetadata):
            if news.identities:
                self._source.follow(news.identities, news.since_reset)
            self._source.reported(news.completed_jobs, news.failed)
        self._source.failed(connector_output.failed_recving or ())
        super().update_connector_output(connector_output)

    def reset_cache(self) -> bool:
        """Called by reset_prefix_cache(reset_connector=True), and by sleep: what was stored is found no more. False:
        vLLM's own cache still has some of it."""
        super().reset_cache()
        pool = self._kv_cache_manager.block_pool
        return self._source.reset(pool.num_gpu_blocks - pool.get_num_free_blocks() - 1)  # vLLM keeps one for itself

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The model is loaded. Unavailable: no daemon; or whatever it refuses with."""
        identity = identity_of(self._vllm_config, self._extra.get("digest"))
        super().register_kv_caches(kv_caches)
        assert self.connector_worker is not None
        spec: Any = self.connector_worker.spec
        transfers = self.connector_worker.worker
        assert isinstance(transfers, Transfers)
        rank = self._vllm_config.parallel_config.rank
        self._worker = ChunkWorker(rank, identity, transfers)
        self._plan = plan_of(self._vllm_config)
        if self._plan != FULL and not self._planes:
            transfers.filled = self._index
        self._link = spec.worker_link
        self._loaded = Loaded(rank, identity, backends_of(self._vllm_config, list(kv_caches)), spec.worker_link.welcome)

    @staticmethod
    def _index(blocks: Any) -> None:
        """A plan's index of blocks that were loaded."""
        from .block_rows import BlockRows
        BlockRows.filled(torch.from_numpy(blocks.astype("int32")))

    def get_handshake_metadata(self) -> Loaded | None:
        return self._loaded

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._look(kv_connector_metadata)
        super().handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._look(self._connector_metadata)
        super().start_load_kv(forward_context, **kwargs)

    def _look(self, metadata: Any) -> None:
        assert self._worker is not None
        self._worker.look(metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        self._worker.settle(wait=False)
        return self._worker.results(super().get_transfer_results(finished_req_ids))

    def build_connector_worker_meta(self) -> ChunkWorkerMetadata | None:
        assert self._worker is not None
        self._tell_losses()
        return self._worker.news(super().build_connector_worker_meta())

    def _tell_losses(self) -> None:
        """To the daemon, what the plan has lost, if something was measured."""
        if self._plan == FULL:
            return
        from .block_rows import BlockRows
        losses = BlockRows.losses()
        if losses:
            self._link.recalled(self._plan, str(self._vllm_config.model_config.served_model_name), losses)
