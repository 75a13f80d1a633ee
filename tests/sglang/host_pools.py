# SPDX-License-Identifier: Apache-2.0
"""HiCache on a machine without a GPU, for the tests: SGLang page-locks its host pools, and moves pages between them
and its device pool by CUDA kernels. Here they are not page-locked, and torch moves pages."""

from __future__ import annotations

from typing import Any

import torch


def serve_without_cuda() -> None:
    from sglang.srt.mem_cache.pool_host import base, common
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    common._cuda_host_register = base._cuda_host_unregister = lambda *_: None
    MHATokenToKVPoolHost.load_to_device_per_layer = _load
    MHATokenToKVPoolHost.backup_from_device_all_layer = _back_up


def _load(pool: Any, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, layer_id: int,
          io_backend: str, **_: Any) -> None:
    pool.device_k_buffers[layer_id][device_indices] = pool.k_data_refs[layer_id][host_indices]
    pool.device_v_buffers[layer_id][device_indices] = pool.v_data_refs[layer_id][host_indices]


def _back_up(pool: Any, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
             ) -> None:
    for layer in range(pool.layer_num):
        pool.k_data_refs[layer][host_indices] = pool.device_k_buffers[layer][device_indices]
        pool.v_data_refs[layer][host_indices] = pool.device_v_buffers[layer][device_indices]
