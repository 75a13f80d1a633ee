# SPDX-License-Identifier: Apache-2.0
"""kv_connector "KvstrataOwnedConnector": passes vLLM's calls on to the scheduler's half or the worker's.

vLLM makes one for its scheduler and one for its worker, maybe in two processes; what one step's worker has to know
travels as StepMetadata.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.model_executor.models.utils import extract_layer_index

import kvstrata

from .epochs import WorkerIdentity
from .geometry import Geometry, Options, Unsupported, geometry_of, refuse
from .loaded import identity_of
from .lookups import follow
from .scheduler import SchedulerHalf, StepMetadata
from .worker import WorkerHalf

_log = logging.getLogger("vllm.kvstrata")
_worker: WorkerHalf | None = None


def worker() -> WorkerHalf:
    """This process's, for the attention backend."""
    if _worker is None:
        raise Unsupported("--attention-backend is CUSTOM, and --kv-transfer-config names no KvstrataOwnedConnector; "
                          "give both flags or none")
    return _worker


class KvstrataOwnedConnector(KVConnectorBase_V1, SupportsHMA):
    """kv_connector "KvstrataOwnedConnector"."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        refuse(vllm_config)
        options = Options.of(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            # A hit in vLLM's prefix cache would name blocks that have nothing in them.
            if vllm_config.cache_config.enable_prefix_caching:
                _log.info("vLLM's prefix cache is off: kvstratad finds prefixes")
            vllm_config.cache_config.enable_prefix_caching = False
            self._scheduler = SchedulerHalf(options, kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        else:
            global _worker
            _worker = self._half = WorkerHalf(options)
            self._geometry: Geometry | None = None

    # Scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._scheduler.lookups.serve(metadata[0])

    def on_new_request(self, request: Any) -> None:
        self._scheduler.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        held = self._scheduler.held(request)
        return None if held is None else max(0, held - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.admit(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        follow(self._scheduler.lookups, connector_output)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def reset_cache(self) -> bool:
        """Of reset_prefix_cache(reset_connector=True), and of sleep: nothing of before is found any more."""
        return self._scheduler.reset()

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The model is loaded: registers it. Unsupported; kvstrata.Unavailable: no daemon."""
        named = self._vllm_config.compilation_config.static_forward_context
        layers = [named[name] for name in sorted(kv_caches, key=extract_layer_index)]
        for index, layer in enumerate(layers):
            if not hasattr(layer.impl, "index"):
                raise Unsupported(f"a layer's attention is {type(layer.impl).__name__}, not kvstrata's")
            layer.impl.index = index
        options = self._half.options
        with kvstrata.attach(options.socket, client_name="vllm worker") as session:
            needs = session.plan_needs(options.plan)
        identity = identity_of(self._vllm_config, options.digest)
        self._geometry = geometry_of(self._vllm_config, layers, identity, needs)
        self._half.serve(self._geometry)

    def get_handshake_metadata(self) -> Geometry | None:
        return self._geometry

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._half.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """What is held lies in pages already."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """As above."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Attention has appended it."""

    def wait_for_save(self) -> None:
        assert self._geometry is not None
        self._half.end(self._geometry.layers)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._half.lost_blocks()

    def build_connector_worker_meta(self) -> WorkerIdentity:
        return WorkerIdentity(self._half.epoch.identity)

    def shutdown(self) -> None:
        half = self._scheduler if self._role == KVConnectorRole.SCHEDULER else self._half
        half.detach()
