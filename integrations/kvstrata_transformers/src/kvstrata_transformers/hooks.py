# SPDX-License-Identifier: Apache-2.0
"""The hooks of an enabled model, which tell a cache of ours where a forward pass begins and ends.

A pass begins at the model's own call, where columns that nobody needs are left out. It has to arrive at base_model as it
was begun: other hooks may look at it, but what they change would be held under the wrong prompt.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from .cache import KvstrataCache
from .columns import NotServed, asked, wanted

# What a pass may have, and what is looked at here or changes no keys. Anything else is not served.
_KNOWN = frozenset(("input_ids", "attention_mask", "position_ids", "labels", "shift_labels", "num_items_in_batch",
                    "logits_to_keep", "past_key_values", "cache"))
_COMPARED = ("input_ids", "position_ids", "inputs_embeds", "attention_mask")


class Hooks:
    """Registered until remove(). Threads: each has its own pass."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._base = model.base_model
        self._pass = _Pass()
        self._last = self._base.register_forward_pre_hook(self._arrive, with_kwargs=True)
        self._handles = [model.register_forward_pre_hook(self._begin, with_kwargs=True), self._last,
                         self._base.register_forward_hook(self._commit, with_kwargs=True),
                         model.register_forward_hook(self._report, with_kwargs=True),
                         model.register_forward_hook(self._over, always_call=True)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """What a copy of the model meets first."""
        raise TypeError("the model is enabled, and a session with a daemon cannot be copied; disable(model) before it is "
                        "copied")

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @torch.compiler.disable
    def _begin(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
               ) -> tuple[tuple[()], dict[str, Any]] | None:
        """Leaves out the columns that nobody needs."""
        if (cache := _cache_of(args, kwargs)) is None:
            return None
        if len(args) > 1:
            raise TypeError("with a cache of kvstrata's, pass everything but input_ids by name")
        if args:
            kwargs = {"input_ids": args[0], **kwargs}
        _require_served(module, kwargs)
        left_out = cache.begin(kwargs, wanted(kwargs, module.config))
        by_column = {name: kwargs[name][..., left_out:] for name in ("input_ids", "position_ids")
                     if kwargs.get(name) is not None}
        self._pass.begun = {**kwargs, **by_column}
        self._base._forward_pre_hooks.move_to_end(self._last.id)  # behind hooks that came since
        return (), self._pass.begun

    @torch.compiler.disable
    def _arrive(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Nothing but the model's own call lies between."""
        if (begun := self._pass.begun) is None:
            return
        self._pass.begun = None
        if args:
            kwargs = {**kwargs, "input_ids": args[0]}
        if (cache := _cache_of((), kwargs)) is None:
            changed = "the cache"
        else:
            changed = next((name for name in _COMPARED if not _same(begun.get(name), kwargs.get(name))), None)
        if changed is not None:
            if cache is not None:
                cache.abort()
            raise NotServed(f"a forward pre-hook of {type(module).__name__}, or of the model around it, has changed "
                            f"{changed}{_named(module, self._last.id)}; what it makes of the prompt cannot be found by the "
                            "prompt's ids: remove it, or disable(model)")

    @torch.compiler.disable
    def _commit(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if (cache := _cache_of(args, kwargs)) is not None:
            cache.commit(output[0] if isinstance(output, tuple) else output.last_hidden_state)

    @torch.compiler.disable
    def _report(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if (cache := _cache_of(args, kwargs)) is not None:
            cache.report_entropy(_logits(output, kwargs.get("labels") is not None))

    def _over(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._pass.begun = None


class _Pass(threading.local):
    """begun: the arguments that a pass left the model with, until it arrives."""

    begun: dict[str, Any] | None = None


def note_outputs(model: Any) -> None:
    """Has transformers put the hooks on the model by which it notes hidden states and attentions. Else it would do that
    when somebody first asks for such outputs, and the model would be another one from then on."""
    if getattr(model.base_model, "_can_record_outputs", None):
        maybe_install_capturing_hooks(model.base_model)


def _cache_of(args: Iterable[Any], kwargs: dict[str, Any]) -> KvstrataCache | None:
    """By its type: its name is another one from one transformers to the next."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, KvstrataCache)), None)


def _require_served(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    """NotServed: pages cannot do what the arguments ask for."""
    if kwargs.get("inputs_embeds") is not None or kwargs.get("input_ids") is None:
        raise NotServed("inputs_embeds came with a cache of kvstrata's, which finds prompts by their ids; pass input_ids "
                        "alone, or a cache of transformers' own")
    if asked("output_attentions", kwargs, module.config):
        raise NotServed("output_attentions is True, and attention over pages has no weights to return; use a cache of "
                        "transformers' own for them")
    if kwargs.get("is_causal") is False:
        raise NotServed("is_causal is False; pages hold what came before a token")
    if module.training and any(getattr(part, "gradient_checkpointing", False) for part in module.modules()):
        raise NotServed("gradient checkpointing drops the cache of a model in training mode; call model.eval()")
    for name, value in kwargs.items():
        if name not in _KNOWN and not isinstance(value, bool | int | float | str | None):
            raise NotServed(f"argument {name} may change keys and values in a way that is not known; leave it out, or use a "
                            "cache of transformers' own")


def _same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b))


def _named(module: torch.nn.Module, last: int) -> str:
    """The module's other forward pre-hooks, for a sentence."""
    names = [f"{hook.__module__}.{getattr(hook, '__qualname__', type(hook).__name__)}"
             for number, hook in module._forward_pre_hooks.items() if number != last]
    return f" (it has {', '.join(names)})" if names else ""


def _logits(output: Any, with_loss: bool) -> torch.Tensor:
    return output[int(with_loss)] if isinstance(output, tuple) else output.logits
