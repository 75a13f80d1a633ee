# SPDX-License-Identifier: Apache-2.0
"""What --attention-backend CUSTOM is, asked for as `Backend`: attention over vLLM's own blocks (attention.py), or with
KvstrataOwnedConnector over the daemon's pages (backend.py), which an engine on a CPU has alone."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "Backend":
        raise AttributeError(name)
    from vllm.config import get_current_vllm_config_or_none
    from vllm.platforms import current_platform
    config = get_current_vllm_config_or_none()
    transfer = None if config is None else config.kv_transfer_config
    if current_platform.is_cpu() or (transfer is not None and transfer.kv_connector == "KvstrataOwnedConnector"):
        from . import backend
        return backend.KvstrataBackend
    from . import attention
    return attention.KvstrataBackend
