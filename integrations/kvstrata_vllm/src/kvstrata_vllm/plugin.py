# SPDX-License-Identifier: Apache-2.0
"""What vLLM calls at start, in each of its processes: names the attention backend and the connector to it."""

from __future__ import annotations

import logging
import os

CONNECTOR = "KvstrataConnector"

_log = logging.getLogger("vllm.kvstrata")


def register() -> None:
    """Entry point of vllm.general_plugins; again is harmless. With KVSTRATA_DISABLE=1 the same flags give vLLM's plain
    path. RuntimeError: another version of vLLM."""
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from . import __version__
    from .loaded import remember_workers
    from .versions import SERVED

    if CONNECTOR in KVConnectorFactory._registry:
        return
    logging.getLogger("kvstrata").parent = logging.getLogger("vllm")  # its time, level and process in each line
    if os.environ.get("KVSTRATA_DISABLE") == "1":
        _log.warning("KVSTRATA_DISABLE=1: vLLM runs without kvstrata")
        KVConnectorFactory.register_connector(CONNECTOR, "kvstrata_vllm.disabled", "DisabledConnector")
        register_backend(AttentionBackendEnum.CUSTOM, AttentionBackendEnum.FLASH_ATTN.get_path())
        return
    version = ".".join(vllm.__version__.split(".")[:2])
    if version not in SERVED:
        raise RuntimeError(f"vLLM is {vllm.__version__}; kvstrata_vllm {__version__} serves {' and '.join(SERVED)}: "
                           "install one of them, or take kvstrata_vllm off")
    KVConnectorFactory.register_connector(CONNECTOR, "kvstrata_vllm.connector", CONNECTOR)
    register_backend(AttentionBackendEnum.CUSTOM, "kvstrata_vllm.attention.KvstrataBackend")
    remember_workers()
