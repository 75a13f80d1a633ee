# SPDX-License-Identifier: Apache-2.0
"""What the user's flags make of KvstrataConnector, and what it refuses before vLLM serves anything.

    --kv-transfer-config '{"kv_connector": "KvstrataConnector", "kv_role": "kv_both"}'

Nothing else is needed; what kv_connector_extra_config may have is in KNOWN.
"""

from __future__ import annotations

import difflib
import logging
import os
import socket
from typing import Any

from kvstrata.chunks import START_SECONDS, Welcome, chunk_socket

import kvstrata

from . import versions
from .chunk_metadata import Loaded
from .unsupported import Unsupported

_log = logging.getLogger("vllm.kvstrata")

KNOWN = {"socket": "of kvstratad; else KVSTRATA_SOCKET, else the default",
         "digest": "an identity of the model that the user names",
         "blocks_per_chunk": "vLLM's blocks in a chunk; else as many as have 256 tokens, and one with recurrent states",
         "block_size": "tokens in a chunk, in place of blocks_per_chunk",
         "canonical_layout": "chunks that engines of other numbers of ranks read, too",
         "offload_prompt_only": "whether what is generated is not stored; true",
         "self_describing_kv_events": "of vLLM's events"}
_SPEC = {"spec_name": "KvstrataSpec", "spec_module_path": "kvstrata_vllm.spec"}
_ELSEWHERE = {"cpu_bytes_to_use": "the region is the daemon's: kvstratad --set chunks.bytes=SIZE",
              "plan": "plans are of --attention-backend CUSTOM: --additional-config '{\"kvstrata\": {\"plan\": ...}}'",
              "eviction_policy": "the daemon evicts what was used longest ago",
              "store_threshold": "all that a prompt has is stored"}
_CHUNK_TOKENS = 256


def refuse_before_loading(config: Any) -> None:
    """By a worker's process, before it reads weights. Unsupported, as of `prepare`; kvstrata.Unavailable: no daemon
    listens, to which a connection is made and closed."""
    refuse_chunks(config)
    path = chunk_socket(config.kv_transfer_config.kv_connector_extra_config.get("socket"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as tried:
        tried.settimeout(START_SECONDS)
        try:
            tried.connect(path)
        except OSError as error:
            raise kvstrata.Unavailable(f"no kvstratad speaks of chunks at {path} ({error}); start kvstratad, or name a "
                                       "running one's: KVSTRATA_SOCKET, or `socket` in kv_connector_extra_config",
                                       "DAEMON_UNREACHABLE") from None


def prepare(config: Any, kv_cache_config: Any) -> None:
    """Puts vLLM's configuration in order for KvstrataSpec; again is harmless. Unsupported, with the setting, its value
    and the next step."""
    refuse_chunks(config)
    extra = name_spec(config)
    if "blocks_per_chunk" not in extra and "block_size" not in extra:
        tokens = versions.tokens_per_block(config, kv_cache_config)
        # States that are made where a step ends lie behind a block, which need not be the last one of several.
        several = not kv_cache_config.has_mamba_layers or config.cache_config.mamba_cache_mode != "align"
        extra["blocks_per_chunk"] = max(1, _CHUNK_TOKENS // tokens) if several else 1
    # What cannot be loaded is computed; no request ends for it.
    config.kv_transfer_config.kv_load_failure_policy = "recompute"


def name_spec(config: Any) -> dict[str, Any]:
    """vLLM's configuration names KvstrataSpec. kv_connector_extra_config as it is then."""
    extra: dict[str, Any] = config.kv_transfer_config.kv_connector_extra_config
    extra.update(_SPEC)
    return extra


def refuse_workers(welcome: Welcome, workers: list[Loaded]) -> None:
    """welcome: the scheduler's."""
    for worker in workers:
        if worker.welcome.daemon_epoch != welcome.daemon_epoch:
            raise Unsupported(f"worker {worker.rank} and the scheduler are on different lives of kvstratad, which was "
                              "started again meanwhile; start vLLM again")
        if worker.welcome != welcome:
            raise Unsupported(f"chunks of worker {worker.rank} have {worker.welcome.row_bytes} bytes, the scheduler's "
                              f"{welcome.row_bytes}: ranks must have equal shares of layers and heads; choose another "
                              "--pipeline-parallel-size, or take --kv-transfer-config away")


def warn_of_hashes(config: Any) -> None:
    """Where vLLM names blocks anew in each process."""
    algorithm = config.cache_config.prefix_caching_hash_algo
    if algorithm.startswith("xxhash") and os.getenv("PYTHONHASHSEED") is None:
        _log.warning("--prefix-caching-hash-algo is %s and PYTHONHASHSEED is not set, so vLLM names blocks anew in each "
                     "process: what is stored is found by nobody else, and not after a restart. Set PYTHONHASHSEED to "
                     "one number for all engines, or pass --prefix-caching-hash-algo sha256", algorithm)


def refuse_chunks(config: Any) -> None:
    extra = config.kv_transfer_config.kv_connector_extra_config
    unknown = sorted(key for key, value in extra.items() if key not in KNOWN and _SPEC.get(key) != value)
    if unknown:
        near = difflib.get_close_matches(unknown[0], KNOWN, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        why = _ELSEWHERE.get(unknown[0], f"{meant}known are {', '.join(sorted(KNOWN))}")
        raise Unsupported(f"kv_connector_extra_config has {unknown[0]} = {extra[unknown[0]]!r}: {why}; take it out")
    parallel, device = config.parallel_config, config.device_config.device_type
    problems = (
        (parallel.nnodes_within_dp > 1,
         f"one scheduler over {parallel.nnodes_within_dp} nodes: the region is one host's; serve each node by an "
         "engine of its own (--data-parallel-size), or take --kv-transfer-config away"),
        (getattr(parallel, "enable_elastic_ep", False),
         "elastic expert parallelism moves experts between ranks while they serve, so that none can know the model; "
         "take --enable-elastic-ep or --kv-transfer-config away"),
        (config.attention_config.hisparse_config is not None,
         "HiSparse keeps its cache on the host itself; take it or --kv-transfer-config away"),
        (device not in ("cpu", "cuda"),
         f"the device is {device}; served are cpu and cuda: take --kv-transfer-config away"))
    problem = next((text for wrong, text in problems if wrong), None)
    if problem is not None:
        raise Unsupported(f"{problem}, or start with KVSTRATA_DISABLE=1")
