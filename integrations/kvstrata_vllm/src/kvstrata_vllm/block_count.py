# SPDX-License-Identifier: Apache-2.0
"""What vLLM asks the daemon before it serves, in owned mode: whether it can decode from it, and how many blocks it has.

vLLM divides the memory that a worker reports by a block's bytes. Blocks of kvstrata's backend have next to nothing in
them, so that the memory for caches would make hundreds of times what the daemon can hold. A worker reports
`kv_cache_memory_bytes` where it is set: this sets it, once the model is loaded and before vLLM asks.
`--num-gpu-blocks-override` goes over its head. Threads: the worker's.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention

import kvstrata

from .geometry import Options, Unsupported, geometry_of, refuse_other_connectors
from .loaded import identity_of

_log = logging.getLogger("vllm.kvstrata")


class BlockCount:
    """Of the model that this process has loaded last."""

    def __init__(self) -> None:
        self._config: Any = None
        self._told = False

    def loading(self, config: Any) -> None:
        """A layer of vLLM's configuration `config` is made. The first one asks the daemon, before weights are read: an
        engine that cannot decode from it ends at once. Unsupported; kvstrata.Unavailable: no daemon; InvalidArgument:
        no such plan."""
        if config is not self._config:
            _check(config)
            self._config, self._told = config, False

    def tell(self, spec: Any) -> None:
        """vLLM is told how many blocks of `spec`, a layer's, there are; once. kvstrata.Unavailable: no daemon."""
        config, told, self._told = self._config, self._told, True
        if told or config is None or config.kv_transfer_config is None:
            return
        if config.cache_config.num_gpu_blocks_override is not None:
            return
        layers = list(get_layers_from_vllm_config(config, Attention).values())
        tokens = _room(config, layers, spec.block_size)
        blocks = tokens // spec.block_size
        _log.info("kvstratad has room for %d tokens under plan %s: vLLM counts with %d blocks of %d", tokens,
                  Options.of(config).plan, blocks, spec.block_size)
        # vLLM keeps a block for itself.
        config.cache_config.kv_cache_memory_bytes = (blocks + 1) * spec.page_size_bytes * len(layers)


def _check(config: Any) -> None:
    if config.kv_transfer_config is None:  # the connector refuses by name
        return
    refuse_other_connectors(config)
    options = Options.of(config)
    with kvstrata.attach(options.socket, client_name="vllm start") as session:
        if config.device_config.device_type == "cuda" and not session.on_gpu:
            raise Unsupported("vLLM computes on a GPU, and kvstratad's pages are not there; start it with --set "
                              "pool.device=cuda")
        session.plan_needs(options.plan)


def _room(config: Any, layers: list[Any], block_tokens: int) -> int:
    """Tokens that requests may have together, were nothing of them held already."""
    options = Options.of(config)
    with kvstrata.attach(options.socket, client_name="vllm start") as session:
        needs = session.plan_needs(options.plan)
        model = geometry_of(config, layers, identity_of(config, options.digest), needs).register(session)
        tokens = session.capacity(model, options.plan).open_tokens
    # A request's last page may hold more than its last block, and pages are taken whole.
    return max(0, tokens - config.scheduler_config.max_num_seqs * max(0, model.page_tokens - block_tokens))
