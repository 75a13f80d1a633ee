# SPDX-License-Identifier: Apache-2.0
"""vLLM's own cache, and kvstratad behind it: kv_connector "KvstrataOffloadConnector" (docs/vllm.md, "Offload").

Prompts that the daemon holds are loaded into vLLM's blocks while other requests run; what vLLM computed is saved once
a prompt's first token is out. vLLM makes one connector for its scheduler and one for its worker, maybe in two
processes; what a step's worker has to know travels as Transfers.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (KVConnectorBase_V1, KVConnectorRole,
                                                               KVConnectorTransferResults, SupportsHMA)
from vllm.model_executor.models.utils import extract_layer_index

from .epochs import WorkerIdentity
from .geometry import Geometry, Options, geometry_of, refuse_layers, refuse_offload
from .loaded import identity_of
from .lookups import follow
from .offload_scheduler import OffloadScheduler, Transfers
from .offload_worker import OffloadWorker


class KvstrataOffloadConnector(KVConnectorBase_V1, SupportsHMA):
    """kv_connector "KvstrataOffloadConnector"."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        refuse_offload(vllm_config, len(kv_cache_config.kv_cache_groups))
        options = Options.of(vllm_config, ("socket", "digest"))
        # What a daemon that died had is computed; no request ends for it.
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = OffloadScheduler(options, kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        else:
            self._options = options
            self._worker: OffloadWorker | None = None
            self._geometry: Geometry | None = None

    # Scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._scheduler.lookups.serve(metadata[0])

    def on_new_request(self, request: Any) -> None:
        self._scheduler.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._scheduler.loadable(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.admit(request.request_id, list(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.failed(connector_output.failed_recving or ())
        follow(self._scheduler.lookups, connector_output)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self._scheduler.finish(request.request_id), None

    def reset_cache(self) -> bool:
        """Of reset_prefix_cache(reset_connector=True), and of sleep: nothing of before is found any more."""
        pool = self._pool
        return self._scheduler.reset(pool.num_gpu_blocks - pool.get_num_free_blocks() - 1)  # vLLM keeps one for itself

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The model is loaded. Unsupported: a cache whose blocks have another form."""
        named = self._vllm_config.compilation_config.static_forward_context
        names = sorted(kv_caches, key=extract_layer_index)
        layers = [named[name] for name in names]
        refuse_layers(self._vllm_config, layers, [kv_caches[name] for name in names])
        self._geometry = geometry_of(self._vllm_config, layers, identity_of(self._vllm_config, self._options.digest))
        self._worker = OffloadWorker(self._options, self._geometry, [kv_caches[name] for name in names])

    def get_handshake_metadata(self) -> Geometry | None:
        return self._geometry

    def handle_preemptions(self, kv_connector_metadata: Transfers) -> None:
        assert self._worker is not None
        self._worker.drop(kv_connector_metadata.preempted)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._worker is not None and isinstance(self._connector_metadata, Transfers)
        self._worker.follow(self._connector_metadata)
        self._worker.load(self._connector_metadata.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests wait for their blocks before they are scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole blocks are saved, of all layers."""

    def wait_for_save(self) -> None:
        """Enqueues: blocks are the worker's until it says that they are saved."""
        assert self._worker is not None and isinstance(self._connector_metadata, Transfers)
        self._worker.save(self._connector_metadata.saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        done = self._worker.results(finished_req_ids)
        return KVConnectorTransferResults(done.saved, done.loaded | done.failed, done.failed)

    def build_connector_worker_meta(self) -> WorkerIdentity:
        assert self._worker is not None
        return WorkerIdentity(self._worker.epoch.identity)

    def shutdown(self) -> None:
        if self._role == KVConnectorRole.SCHEDULER:
            self._scheduler.lookups.detach()
        elif self._worker is not None:
            self._worker.shutdown()
