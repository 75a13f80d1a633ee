# SPDX-License-Identifier: Apache-2.0
"""The model that vLLM has loaded in this process, and its identity.

A connector is not told of the model. So the plugin has vLLM's wrapper of a worker remember it, whichever executor made
it. In the process of a worker the identity is of the modules and tensors as vLLM holds them: fused, quantised,
post-processed. It is made once, behind loading (docs/identity.md has the cost), and looked at again before a step opens
or saves anything; what a CPU packs away is summed when it is packed (packed.py). Threads: the engine's.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
from kvstrata.identity import digest_of

from .packed import sum_what_is_packed
from .plan_choice import FULL, plan_of, refuse_other_devices
from .plugin import CONNECTOR

if TYPE_CHECKING:
    from kvstrata.torch_identity import Identity
    from kvstrata.torch_samples import Reading

# Namespaces of vLLM's compiled operators, which its version stands for ("vllm" is one, too).
_OPERATORS = ("_C", "_C_cache_ops", "_C_custom_ar", "_C_cuda_utils", "_moe_C", "_rocm_C", "_xpu_C", "_qutlass_C",
              "_flashmla_C", "_flashmla_extension_C", "_flashkda_C", "_vllm_fa2_C", "_vllm_fa3_C", "vllm_ir",
              "vllm_helion", "vllm_aiter")
_MOMENT = 0.05  # seconds for which a look serves a step that opens nothing
_WAITED_EVERY = 64  # looks, on a GPU
_RESUM_EVERY = 4096  # looks between sums of all tensors in the background, which take cores from the engine

# Attributes of vLLM's modules that do not change keys or values, each with the reason.
_HARMLESS = {
    "kv_cache": "what is cached",
    "_do_torchao_reload": "a mark of reloading",
    "_original_do_torchao_reload": "the same",
    **dict.fromkeys(("compiled", "first_compile", "_compiled_bytecode", "_compiled_callable", "_bytecode_hook_handle",
                     "_compile_prefix", "_compile_tag", "evaluate_guards", "layerwise_nvtx_tracing_enabled",
                     "aot_compiled_fn", "was_aot_compile_fn_loaded_from_disk", "_aot_cache_dir",
                     "_aot_compilation_path"), "how torch.compile is getting on: it changes how, not what"),
    **dict.fromkeys(("vllm_config", "_vllm_config", "model_config", "cache_config", "parallel_config",
                     "scheduler_config", "load_config", "compilation_config", "device_config", "observability_config"),
                    "of the whole engine; what of it changes keys is in settings_of, or in the modules it made"),
}

# Modules of ours whose objects are made of the configuration, and know their place in the engine besides.
_OPAQUE = ("kvstrata_vllm.attention", "kvstrata_vllm.planes_attention")

# What vLLM's modules have in plain attributes is working memory, and adapters of LoRA, which the names of their
# requests' blocks have: but what these words are in.
_WEIGHTS = ("weight", "bias", "scale", "W_U", "w_u", "cos_sin", "inv_freq")


@functools.cache
def trusted() -> tuple[str, ...]:
    """Packages whose functions are known by their names: vLLM, and those that it requires; and vLLM's operators."""
    by_package = importlib.metadata.packages_distributions()
    # An installation of vLLM that has no list of its files is not among them.
    own = {"vllm", *by_package.get("vllm", ())}
    required = {re.split(r"[^A-Za-z0-9._-]", line)[0].lower() for distribution in importlib.metadata.distributions()
                if distribution.name in own for line in distribution.requires or ()}
    return ("vllm", "kvstrata_vllm", *_OPERATORS, *sorted(package for package, names in by_package.items()
                                             if any(name.lower() in required for name in names)))


def _is_scratch(path: str) -> bool:
    """path: as "model.layers.0.mlp's w13_weight". Objects of vLLM's that are no modules are known by their class: what
    they have is made of the model's configuration."""
    return not any(word in path.rpartition("'s ")[2] for word in _WEIGHTS)


_worker: weakref.ref[Any] | None = None
_loaded: _Loaded | None = None


class _Loaded:
    """given: the digest that the user names, or None."""

    def __init__(self, config: Any, model: torch.nn.Module, given: str | None) -> None:
        from kvstrata.torch_identity import LoadedModel  # not in engines that do not use kvstrata
        self.model, self.given = weakref.ref(model), given
        self.identity = LoadedModel(
            model, engine="vllm", config=config.model_config.hf_text_config, dtype=str(config.model_config.dtype),
            settings=settings_of(config), given=given, transparent=transparent_of(model),
            trusted=trusted(), opaque=("vllm", "torch", *_OPAQUE), harmless=_HARMLESS, scratch=_is_scratch,
            resum_every=_RESUM_EVERY)
        self.looked_at = time.monotonic()

        self._began = 0  # looks since the last one that was waited for
        self._place, self._peers = peers_of(config, self.identity.now())

    def now(self) -> Identity:
        from .space import combined  # not in engines that do not use kvstrata
        self.looked_at, self._began = time.monotonic(), 0
        return combined({**self._peers, self._place: self.identity.now()})

    def may_begin(self) -> bool:
        """Now and then a look is waited for, which counts them and sums anew in the background."""
        self.looked_at, self._began = time.monotonic(), self._began + 1
        return self._began < _WAITED_EVERY


def remember_workers() -> None:
    """Notes this process's worker. The plugin calls it once, maybe while the wrapper makes that worker, so the
    call behind that is what is looked at: before weights are read. vLLM makes no connector until they are, so flags
    that are not served are refused here, too."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase
    init_device = WorkerWrapperBase.init_device

    def remember_and_init(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        global _worker
        _worker = weakref.ref(wrapper.worker)
        refuse_other_devices(wrapper.vllm_config)
        transfer = wrapper.vllm_config.kv_transfer_config
        if transfer is not None and transfer.kv_connector == CONNECTOR:
            sum_what_is_packed()
            from .flags import refuse_before_loading  # not in processes that do not use it
            refuse_before_loading(wrapper.vllm_config)
        init_device(wrapper, *args, **kwargs)

    WorkerWrapperBase.init_device = remember_and_init


def identity_of(config: Any, given: str | None) -> Identity:
    """The identity of the model that this process has loaded by vLLM's configuration `config`. given: a user's digest;
    changes from now on are noticed all the same. Reads all tensors at its first call."""
    global _loaded
    worker = _worker() if _worker is not None else None
    if worker is None:
        raise RuntimeError("this process has no worker of vLLM's that kvstrata_vllm saw made; load the plugin in each "
                           "process (VLLM_PLUGINS must name kvstrata, or nothing)")
    if given is not None and plan_of(config) != FULL:
        given = digest_of({"given": given, "plan": plan_of(config)})
    model = worker.get_model()
    if _loaded is None or _loaded.model() is not model or _loaded.given != given:
        _convert_now(config, model)
        _loaded = _Loaded(config, model, given)
    return _loaded.now()


def _convert_now(config: Any, model: torch.nn.Module) -> None:
    """Tables of RoPE that are float32 become the model's dtype at the first forward pass, unless it is compiled. That
    would be another model by then, and on a CPU the identity is made before."""
    from vllm.config import CompilationMode
    if config.compilation_config.mode != CompilationMode.NONE:
        return
    for module in model.modules():
        convert = getattr(module, "_match_cos_sin_cache_dtype", None)
        if convert is not None:
            convert(torch.empty(0, dtype=config.model_config.dtype, device=module.cos_sin_cache.device))


def peers_of(config: Any, identity: Identity) -> tuple[int, dict[int, Identity]]:
    """This data parallel rank, and the identities of all as they are loaded. vLLM divides experts among them, so that
    keys of one are of the weights of all; where there are no experts, each rank is an engine by itself, of size 1. All
    call it once, at their start; it waits for them as long as vLLM's groups do."""
    if config.parallel_config.data_parallel_size == 1:
        return 0, {}
    from vllm.distributed import get_dp_group
    group = get_dp_group()
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, identity, group=group.cpu_group)
    return group.rank_in_group, dict(enumerate(found))


def identity_here() -> Identity | None:
    """As it is now; waits for the GPU. None: the model is another process's."""
    return None if _loaded is None else _loaded.now()


def look_is_due() -> bool:
    """Whether there is one for a step that opens and saves nothing: for that one of a moment ago will do."""
    return _loaded is not None and time.monotonic() - _loaded.looked_at >= _MOMENT


def begin_look() -> Reading | None:
    """Whether it is what it was when identity_here or identity_of said so last, without waiting for a GPU: as it is
    behind the work that is enqueued now. None: identity_here says it."""
    return None if _loaded is None or not _loaded.may_begin() else _loaded.identity.begin()


def settings_of(config: Any) -> dict[str, Any]:
    """What vLLM was told beside the model's own configuration that changes keys and values, and that does not show in
    the modules: max_model_len does, where RoPE goes by it."""
    model, parallel = config.model_config, config.parallel_config
    # What is generated under a plan has other keys, and is a prompt's beginning in the next turn.
    plan = {} if plan_of(config) == FULL else {"plan": plan_of(config)}
    return {**plan, "kv_cache_dtype": config.cache_config.cache_dtype, "quantization": model.quantization,
            "tensor_parallel": [parallel.rank, parallel.tensor_parallel_size]}


def transparent_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules that no key goes through behind what their hooks make."""
    return [model, *(part for name in ("model", "lm_head") if isinstance(part := getattr(model, name, None),
                                                                       torch.nn.Module))]
