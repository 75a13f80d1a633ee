# SPDX-License-Identifier: Apache-2.0
"""What a transformers model is to the daemon: the identity of what was loaded, and what makes it private.

    identity = identity_of(model, digest=None)
    digest, private = identity.now()      # at enable, and before each generate

Adapters (PEFT's and transformers' own), quantisers and parametrizations are modules, attributes and tensors of the model
like all others, so kvstrata.torch_identity sees them loaded, switched, scaled, merged and taken away. docs/identity.md
has the whole table. Threads: one at a time.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from kvstrata.errors import error_of
from kvstrata.rope_probe import depends_on_length
from kvstrata.torch_identity import Identity, LoadedModel

_NAME_BYTES = 80  # RegisterModel's, with its end
_KEPT = "_kvstrata_identity"
# Attributes of modules that change no keys: this, and a mark of transformers' that outputs were asked for.
_HARMLESS = (_KEPT, "_output_capturing_hooks_installed")


def identity_of(model: Any, digest: str | None = None) -> ModelIdentity:
    """The model's under this name, made at the first call and kept with it: asked for again it only looks for changes,
    so that a name stands for what it named first. digest: the caller's name of what the model is now; None: all tensors
    are read. A copy of the model has identities of its own. InvalidArgument: a name that the daemon does not take."""
    if digest is not None and not (isinstance(digest, str) and 0 < len(digest.encode()) < _NAME_BYTES):
        raise error_of(3, "DIGEST", f"digest={digest!r} is no text of 1 to {_NAME_BYTES - 1} bytes; give a shorter name")
    kept = _kept(model)
    if digest not in kept or kept[digest].root is not model:
        kept[digest] = ModelIdentity(model, digest)
    return kept[digest]


def declare_changed(model: Any, named: bool = True) -> None:
    """Somebody changed what leaves no trace. named: of a name's tensors, too, which then are another identity's, since
    nobody knows what they were."""
    for identity in _kept(model).values():
        if named or identity.given is None:
            identity.declare_changed()


def _kept(model: Any) -> dict[str | None, ModelIdentity]:
    kept: _Kept = vars(model).setdefault(_KEPT, _Kept())
    return kept.identities


class _Kept:
    """Identities by name, in the model's attributes, where copies of the model and its pickles have none."""

    def __init__(self) -> None:
        self.identities: dict[str | None, ModelIdentity] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return _Kept()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Kept, ()


class ModelIdentity(LoadedModel):
    """LoadedModel of a PreTrainedModel (for a PeftModel give get_base_model()). Errors: Unidentifiable. Hooks on the model
    itself, its decoder and its head are no matter: who calls the model compares what arrives at the decoder.

    rope: None, or why keys depend on a prompt's whole length; now() says so as its private reason, whatever `digest` is.
    """

    def __init__(self, model: Any, given: str | None = None, resum_every: int | None = None) -> None:
        config = model.config.get_text_config(decoder=True)
        self.rope = rope_depends_on_length(model)
        super().__init__(model, engine="transformers", config=config, dtype=str(model.dtype).removeprefix("torch."),
                         given=given, transparent=transparent_modules(model), harmless=_HARMLESS, resum_every=resum_every)

    def private_reason(self) -> str | None:
        return self.rope or super().private_reason()


def transparent_modules(model: Any) -> list[torch.nn.Module]:
    """Modules whose hooks see what arrives and what leaves, but no keys or values in between."""
    modules = [model, model.base_model]
    if (head := model.get_output_embeddings()) is not None and head is not model.get_input_embeddings():
        modules.append(head)
    return modules


def rope_depends_on_length(model: Any) -> str | None:
    """Why keys of a prefix depend on what follows it; None: they do not. Runs copies of the model's rotary embeddings,
    on positions up to twice the model's limit; some ms."""
    config = model.config.get_text_config(decoder=True)
    for name, rotary in _rotaries(model):
        limits = set(_limits(config, rotary))
        for layer_type in _layer_types(rotary, config):
            try:
                seen = depends_on_length(_turn(rotary, layer_type), limits, _device(rotary))
            except Exception as error:  # one that wants to be called otherwise, without positions for instance
                return f"RoPE of {name} could not be tried ({type(error).__name__}: {error}), so what it goes by is not known"
            if seen is not None:
                kind = getattr(rotary, "rope_type", None)
                return (f"RoPE of {name} (rope_type {kind!r}) goes by the prompt's whole length: {seen}, so a prefix has "
                        "no keys of its own; choose another rope_type")
    return None


def _rotaries(model: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules that give cosines and sines of positions, as copies, since some keep what they have seen."""
    for name, module in model.named_modules():
        if any(key.endswith("inv_freq") for key in module._buffers):
            yield name, copy.deepcopy(module)


def _layer_types(rotary: torch.nn.Module, config: Any) -> list[str | None]:
    """What its forward wants to know beside positions."""
    if "layer_type" not in inspect.signature(rotary.forward).parameters:
        return [None]
    return sorted(set(getattr(rotary, "layer_types", None) or config.layer_types))


def _limits(config: Any, rotary: torch.nn.Module) -> Iterator[int]:
    """Lengths from which a rotary may go another way: all whole numbers that it and its configuration call a maximum."""
    fields = [vars(config), vars(rotary), getattr(config, "rope_parameters", None) or {}]
    fields += [part for part in fields[2].values() if isinstance(part, dict)]
    for mapping in fields:
        for key, value in mapping.items():
            if "max" in key and ("position" in key or "seq" in key) and isinstance(value, int) and value > 0:
                yield value


def _turn(rotary: torch.nn.Module, layer_type: str | None) -> Any:
    x = torch.zeros(1, device=_device(rotary), dtype=torch.float32)
    more = {} if layer_type is None else {"layer_type": layer_type}

    @torch.no_grad()
    def turn(positions: torch.Tensor) -> torch.Tensor:
        # oneDNN may multiply in bf16, in long prompts alone; that is rounding, and not what is asked here. Torch warns
        # of TF32 on GPUs that are not there when it is switched.
        with warnings.catch_warnings(action="ignore"), torch.backends.mkldnn.flags(enabled=False):
            cos, sin = rotary(x, position_ids=positions[None], **more)
        return torch.cat([cos, sin], -1)

    return turn


def _device(module: torch.nn.Module) -> torch.device:
    return next((buffer.device for buffer in module.buffers()), torch.device("cpu"))
