# SPDX-License-Identifier: Apache-2.0
"""Every method that the adapter overrides is a hook of the vLLM that is installed, and takes what vLLM passes.

    python -m pytest bench/cuda/vllm26/test_hooks.py        with vLLM 0.26 or 0.32
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import vllm
from kvstrata_vllm.connector import KvstrataConnector
from kvstrata_vllm.disabled import DisabledConnector
from kvstrata_vllm.plugin import BACKENDS
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder

VERSION = ".".join(vllm.__version__.split(".")[:2])
_module, _name = BACKENDS[VERSION].rsplit(".", 1)
BACKEND = getattr(importlib.import_module(_module), _name)
OWN = {"emptied"} | ({"customize_spec"} if VERSION == "0.26" else set())  # ours; brought about in hooks_026.py


def methods(cls: type) -> dict[str, Any]:
    """Those that cls, or a class of kvstrata_vllm above it, defines; magic ones aside."""
    own = [base for base in cls.__mro__ if base.__module__.startswith("kvstrata_vllm")]
    return {name: getattr(cls, name) for base in own for name, value in vars(base).items()
            if not name.startswith("_")
            and (inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod)))}


def hooks() -> list[Any]:
    of = {KvstrataConnector: (KVConnectorBase_V1, SupportsHMA), DisabledConnector: (KVConnectorBase_V1, SupportsHMA),
          BACKEND: (AttentionBackend,), BACKEND.get_impl_cls(): (AttentionImpl,),
          BACKEND.get_builder_cls(): (AttentionMetadataBuilder,)}
    return [pytest.param(method, bases, name, id=f"{cls.__name__}.{name}") for cls, bases in of.items()
            for name, method in methods(cls).items() if name not in OWN]


@pytest.mark.parametrize("ours, bases, name", hooks())
def test_a_hook_takes_what_vllm_passes(ours: Any, bases: tuple[type, ...], name: str):
    hook = next((getattr(base, name) for base in bases if hasattr(base, name)), None)
    assert hook is not None, f"vLLM {vllm.__version__} has no {name}"
    given = [p for p in inspect.signature(hook).parameters.values() if p.kind is not p.VAR_KEYWORD]
    inspect.signature(ours).bind(*given)
    inspect.signature(ours).bind(**{p.name: p for p in given})


@pytest.mark.parametrize("cls", [KvstrataConnector, DisabledConnector, BACKEND, BACKEND.get_impl_cls(),
                                 BACKEND.get_builder_cls()])
def test_nothing_abstract_is_left(cls: type):
    assert not getattr(cls, "__abstractmethods__", None)
