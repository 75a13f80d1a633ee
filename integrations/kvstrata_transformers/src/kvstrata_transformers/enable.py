# SPDX-License-Identifier: Apache-2.0
"""Switches a model's generate() over to kvstratad, and back."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

from kvstrata.sentences import boundary_tokens

from . import attention
from .cache import KvstrataCache
from .engine import Engine
from .generate import Generate
from .hooks import Hooks
from .identity import declare_changed
from .served import served


class Enabled(Generate):
    """What stands in place of an enabled model's generate(), and knows how to give the model back."""

    def __init__(self, engine: Engine, model: Any) -> None:
        super().__init__(engine, model.generate)
        self._attention = model.config._attn_implementation
        self._hooks = Hooks(model)
        attention.register()
        model.set_attn_implementation(attention.name_over(self._attention))
        model.generate = self

    def remove(self, model: Any) -> None:
        """The model as it was. Caches that are still open are of no use then."""
        self._hooks.remove()
        del model.generate  # the instance's; the class has its own
        model.set_attn_implementation(self._attention)
        self.engine.close()


def _inner(model: Any) -> Any:
    """The model of transformers' inside torch.compile's and PEFT's wrappers, whose generate() calls its."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


def _enabled(model: Any) -> Enabled | None:
    owner = vars(_inner(model)).get("generate")
    return owner if isinstance(owner, Enabled) else None


def _engine_of(model: Any) -> Engine:
    if (enabled := _enabled(model)) is None:
        raise ValueError("the model is not enabled; call kvstrata_transformers.enable(model) first")
    return enabled.engine


def enable(model: Any, plan: str = "full", *, tokenizer: Any = None, socket: str | None = None,
           digest: str | None = None, settle: bool = False) -> None:
    """From now on the model's generate() keeps keys and values in kvstratad and attends by `plan` (docs/plans.md).

    tokenizer: for plans that go by sentences. socket: the daemon's; None: KVSTRATA_SOCKET, else the default. digest:
    names the model as it is now, in place of the sum of its tensors and settings; two with one digest share pages.
    settle: waits behind each pass until workers have done what the plan has them do, so that answers of `sekv` and
    `mosaickv` can be repeated. A model inside torch.compile's or PEFT's wrapper is enabled there. Reads all tensors
    once (docs/identity.md). With KVSTRATA_DISABLE=1 in the environment it changes nothing and warns.

    Errors, and nothing has changed then: Unsupported; kvstrata.Unavailable: no daemon; kvstrata.DeadlineExceeded: it
    does not answer; kvstrata.InvalidArgument: the plan, the digest; kvstrata.Unimplemented: the plan or the dtype, where pages are a
    GPU's; ValueError: KVSTRATA_VERIFY.
    """
    if os.environ.get("KVSTRATA_DISABLE") == "1":
        warnings.warn("kvstrata: KVSTRATA_DISABLE=1, the model stays on its plain path", stacklevel=2)
        return
    model = _inner(model)
    served(model)  # before tensors are read
    disable(model)
    boundary = [] if tokenizer is None else boundary_tokens(tokenizer)
    engine = Engine(model, plan, socket=socket, digest=digest, boundary=boundary, settle=settle)
    Enabled(engine, model)  # the model's from now on


def disable(model: Any) -> None:
    """The model's plain path. Harmless where it was not enabled. Enabled again without a name, all its tensors are read
    anew: nobody looks at it meanwhile."""
    if (enabled := _enabled(model)) is not None:
        declare_changed(_inner(model), named=False)
        enabled.remove(_inner(model))


def cache(model: Any, plan: str | Sequence[str] | None = None) -> KvstrataCache:
    """An empty cache to pass as `cache` (before transformers 5.24: `past_key_values`), for several turns. plan None:
    enable()'s; several: the batch's rows divided among them in order, so that plans can be compared in one batch.
    Unavailable: no daemon."""
    engine = _engine_of(model)
    return KvstrataCache(engine, engine.plan if plan is None else plan, engine.attachment())


def changed(model: Any) -> None:
    """Says that the model's tensors have changed in a way that leaves no trace: all are read again before the next use,
    and nothing that was held is hit if they differ (docs/identity.md). A name (`digest=`) stands for them no longer."""
    _engine_of(model)
    declare_changed(_inner(model))


def document(model: Any) -> dict[str, Any]:
    """What the model's identity is made of, in JSON's types: two models that do not share differ here
    (docs/identity.md). Reads what changed, as a generate() would."""
    return _engine_of(model).identity.document()
