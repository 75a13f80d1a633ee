# SPDX-License-Identifier: Apache-2.0
"""What SGLang calls at start, in each of its processes: names the attention backend and the prefix cache to it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

NAME = "kvstrata"
SERVED = "0.5.23"  # SGLang's hooks change from one version to the next

_log = logging.getLogger("sglang.kvstrata")


def register() -> None:
    """Entry point of sglang.srt.plugins. With KVSTRATA_DISABLE=1 the same flags give SGLang's plain path. RuntimeError:
    another version of SGLang, which logs it and then knows no --attention-backend kvstrata."""
    import sglang
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import default_radix_cache_factory, register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_attention_backend_choices

    from . import __version__

    if sglang.__version__ != SERVED:
        raise RuntimeError(f"SGLang is {sglang.__version__}; kvstrata_sglang {__version__} serves {SERVED}: "
                           "install that, or take kvstrata_sglang off")
    add_attention_backend_choices([NAME])
    if os.environ.get("KVSTRATA_DISABLE") == "1":
        _log.warning("KVSTRATA_DISABLE=1: SGLang runs without kvstrata")
        register_attention_backend(NAME)(_plain_backend)
        register_radix_cache_backend(NAME, default_radix_cache_factory)
        return
    register_attention_backend(NAME)(_backend)
    register_radix_cache_backend(NAME, _prefix_cache)
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.load_model", _check, HookType.BEFORE)
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.load_model", _loaded, HookType.AFTER)
    HookRegistry.register("sglang.srt.managers.cache_controller.HiCacheController.reset", _flushed, HookType.AFTER)
    HookRegistry.register("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mha_kv_pool",
                          _empty_pool, HookType.AROUND)


def _check(runner: Any) -> None:
    """An engine that cannot decode from the daemon ends before it reads weights. kvstrata.Unavailable: no daemon;
    InvalidArgument: no such plan."""
    if _is_chosen():
        from .geometry import Options, needs_of
        needs_of(Options.of_environment())


def _loaded(result: Any, runner: Any, *others: Any, **more: Any) -> None:
    from .geometry import remember
    remember(runner)


def _flushed(result: Any, *others: Any, **more: Any) -> None:
    """SGLang's pools are empty; HiCache's storage is told, where that is kvstrata's."""
    if (storage := sys.modules.get(f"{__package__}.storage")) is not None:
        storage.flushed()


def _is_chosen() -> bool:
    from sglang.srt.runtime_context import get_exec
    return get_exec().kernel.attention_backend == NAME


def _backend(runner: Any) -> Any:
    from .backend import KvstrataBackend
    return KvstrataBackend(runner)


def _prefix_cache(context: Any) -> Any:
    from .prefix_cache import KvstrataCache
    return KvstrataCache(context.params)


def _plain_backend(runner: Any) -> Any:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    return ATTENTION_BACKENDS["torch_native" if runner.device == "cpu" else "triton"](runner)


def _empty_pool(build: Callable[..., Any], configurator: Any, *, mha_pool_class: type, **arguments: Any) -> Any:
    """SGLang counts tokens by its pool's slots, so it must have them; nothing lies in them."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, NoOpMHATokenToKVPool
    if _is_chosen() and mha_pool_class is MHATokenToKVPool:
        mha_pool_class = NoOpMHATokenToKVPool
    return build(configurator, mha_pool_class=mha_pool_class, **arguments)
