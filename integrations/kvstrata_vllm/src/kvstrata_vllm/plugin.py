# SPDX-License-Identifier: Apache-2.0
"""What vLLM calls at start, in each of its processes: names the attention backend and the connectors to it."""

from __future__ import annotations

import logging
import os
from typing import Any

CONNECTORS = {"KvstrataConnector": "kvstrata_vllm.connector", "KvstrataOwnedConnector": "kvstrata_vllm.owned_connector"}

_log = logging.getLogger("vllm.kvstrata")


def register() -> None:
    """Entry point of vllm.general_plugins; again is harmless. With KVSTRATA_DISABLE=1 the same flags give vLLM's plain
    path. RuntimeError: another version of vLLM."""
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from . import __version__
    from .loaded import remember_workers
    from .versions import SERVED

    if "KvstrataConnector" in KVConnectorFactory._registry:
        return
    logging.getLogger("kvstrata").parent = logging.getLogger("vllm")  # its time, level and process in each line
    if os.environ.get("KVSTRATA_DISABLE") == "1":
        _log.warning("KVSTRATA_DISABLE=1: vLLM runs without kvstrata")
        for name in CONNECTORS:
            KVConnectorFactory.register_connector(name, "kvstrata_vllm.disabled", "DisabledConnector")
        register_backend(AttentionBackendEnum.CUSTOM, _plain_backend(current_platform))
        return
    version = ".".join(vllm.__version__.split(".")[:2])
    if version not in SERVED:
        raise RuntimeError(f"vLLM is {vllm.__version__}; kvstrata_vllm {__version__} serves {' and '.join(SERVED)}: "
                           "install one of them, or take kvstrata_vllm off")
    for name, module in CONNECTORS.items():
        KVConnectorFactory.register_connector(name, module, name)
    register_backend(AttentionBackendEnum.CUSTOM, "kvstrata_vllm.custom.Backend")
    remember_workers()
    if current_platform.is_cpu():
        _honour_custom(current_platform)


def _plain_backend(platform: Any) -> str:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    return (AttentionBackendEnum.CPU_ATTN if platform.is_cpu() else AttentionBackendEnum.FLASH_ATTN).get_path()


def _honour_custom(platform: Any) -> None:
    """vLLM's CPU platform knows one backend and passes over --attention-backend; other platforms heed it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    cpu = type(platform)
    choose = cpu.get_attn_backend_cls.__func__

    def chosen(cls: type, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        if selected_backend is AttentionBackendEnum.CUSTOM:
            return AttentionBackendEnum.CUSTOM.get_path()
        return choose(cls, selected_backend, *args, **kwargs)

    cpu.get_attn_backend_cls = classmethod(chosen)
