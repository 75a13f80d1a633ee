# SPDX-License-Identifier: Apache-2.0
"""Switches a model's generate() over to kvstratad, and back."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

import torch
from kvstrata.errors import error_of
from kvstrata.sentences import boundary_tokens
from kvstrata.torch_model import registered_scale
from transformers.modeling_outputs import CausalLMOutputWithPast

import kvstrata

from . import attention
from .cache import KvstrataCache
from .digest import digest_of
from .served import Served, served

# What transformers calls a cache, among arguments and outputs: `cache` from 5.24 on. The older name is taken there, too,
# and warned of.
_CACHE, _OLDER = "cache", "past_key_values"
_CACHE_HERE = _CACHE if _CACHE in {field.name for field in fields(CausalLMOutputWithPast)} else _OLDER


class Engine:
    """An enabled model: its session with the daemon, and the hooks that tell a cache of ours where a forward pass
    begins and ends."""

    def __init__(self, model: Any, plan: str, socket: str | None, digest: str, boundary: list[int]) -> None:
        self.served: Served = served(model)
        self.plan = plan
        self._socket, self._digest, self._boundary = socket, digest, boundary
        self._model_type, self._model_device = model.config.model_type, model.device
        self._session: kvstrata.Session | None = None
        self.attach()
        self._session.open(self.model, plan).close()  # what generate() would be refused is refused now
        self.head: Callable[[torch.Tensor], torch.Tensor] = model.get_output_embeddings()
        self._plain, self._generate = model.config._attn_implementation, model.generate
        self._hooks = [model.register_forward_pre_hook(_begin, with_kwargs=True),
                       model.base_model.register_forward_hook(_commit, with_kwargs=True),
                       model.register_forward_hook(_report, with_kwargs=True)]
        attention.register()
        model.set_attn_implementation(attention.NAME)
        model.generate = self.generate

    @property
    def session(self) -> kvstrata.Session:
        if self._session is None:
            raise error_of(14, "DAEMON_GONE", "kvstratad is gone; start it, the next generate() attaches anew")
        return self._session

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        raise TypeError("the model is enabled, and a session with a daemon cannot be copied; disable(model) before it is "
                        "copied")

    def attach(self) -> None:
        """To a living daemon, anew if the last one is gone. Unavailable: there is none."""
        if self._session is not None:
            try:
                return self._session.ping()
            except kvstrata.Unavailable:
                self._session.close()
                self._session = None
        session, self.device = _attached(self._socket, self._model_device)
        s = self.served
        self.model = session.register_model(self._model_type[:63], self._digest, layers=len(s.pages_of),
                                            query_heads=s.query_heads, kv_heads=s.kv_heads, head_dim=s.head_dim,
                                            dtype=s.dtype, boundary_tokens=self._boundary,
                                            scale=registered_scale(s.scale, s.head_dim))
        self._session = session

    def detach(self, model: Any) -> None:
        """The model as it was. Caches that are still open are of no use then."""
        for hook in self._hooks:
            hook.remove()
        del model.generate  # of the instance; the class has its own
        model.set_attn_implementation(self._plain)
        if self._session is not None:
            self._session.close()

    def generate(self, inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """The model's generate(), on a cache of ours unless the caller brings another one or wants none."""
        given = next((kwargs[name] for name in (_CACHE, _OLDER) if kwargs.get(name) is not None), None)
        if kwargs.get("use_cache") is False or not isinstance(given, KvstrataCache | None):
            return self._generate(inputs, *args, **kwargs)
        if not self._reaches_daemon(given):
            return self._generate(inputs, *args, **kwargs)
        cache = KvstrataCache(self, self.plan) if given is None else given
        ids = kwargs.get("input_ids", inputs)
        if ids is None and kwargs.get("inputs_embeds") is not None:
            raise ValueError("inputs_embeds came without input_ids; kvstrata finds prompts by their ids: pass both, or "
                             "disable(model)")
        if ids is not None and not cache.rows:
            cache.expect(ids, kwargs.get("attention_mask"))
        result = None
        try:
            others = {name: value for name, value in kwargs.items() if name not in (_CACHE, _OLDER)}
            result = self._generate(inputs, *args, **others, **{_CACHE_HERE: cache})
            return result
        finally:
            if given is None and getattr(result, _CACHE_HERE, None) is None:
                cache.close()

    def _reaches_daemon(self, given: KvstrataCache | None) -> bool:
        """False: there is none, and nothing is lost by generating without it."""
        try:
            self.attach()
        except kvstrata.Unavailable as error:
            if given is not None and given.rows:
                raise
            if given is None:
                warnings.warn(f"kvstrata: {error}; this generate() runs without it", stacklevel=4)
                return False
            raise
        if given is not None and given.session is not self._session:
            raise error_of(9, "CACHE_LOST", "the cache was the daemon's that is gone; make another with "
                           "kvstrata_transformers.cache(model), and give it the whole conversation")
        return True


def _attached(socket: str | None, device: torch.device) -> tuple[kvstrata.Session, torch.device]:
    """A session for a model on `device`, and where it takes tensors: there, if the daemon has pages on that GPU, else
    in host memory."""
    if device.type == "cuda":
        uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
        try:
            return kvstrata.attach(socket, client_name="transformers", device_uuid=f"GPU-{uuid}"), device
        except kvstrata.NotFound as error:
            if error.reason != "DEVICE_UNKNOWN":
                raise
    return kvstrata.attach(socket, client_name="transformers"), torch.device("cpu")


def _cache_of(args: Iterable[Any], kwargs: dict[str, Any]) -> KvstrataCache | None:
    """By its type: its name is another one from one transformers to the next."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, KvstrataCache)), None)


def _begin(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Leaves out the columns that nobody needs."""
    if (cache := _cache_of(args, kwargs)) is None:
        return None
    if len(args) > 1:
        raise TypeError("with a cache of kvstrata's, pass everything but input_ids by name")
    ids = args[0] if args else kwargs.get("input_ids")
    if ids is None:
        raise ValueError("inputs_embeds came without input_ids; kvstrata finds prompts by their ids: pass input_ids")
    left_out = cache.begin(ids, kwargs.get("attention_mask"))
    by_column = {name: kwargs[name][..., left_out:] for name in ("position_ids", "token_type_ids")
                 if kwargs.get(name) is not None}
    return (), {**kwargs, **by_column, "input_ids": ids[:, left_out:]}


def _commit(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if (cache := _cache_of(args, kwargs)) is not None:
        cache.commit(output.last_hidden_state)


def _report(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if (cache := _cache_of(args, kwargs)) is not None:
        cache.report_entropy(output.logits)


def _engine_of(model: Any) -> Engine | None:
    owner = getattr(vars(model).get("generate"), "__self__", None)
    return owner if isinstance(owner, Engine) else None


def enable(model: Any, plan: str = "full", *, tokenizer: Any = None, socket: str | None = None,
           digest: str | None = None) -> None:
    """From now on the model's generate() keeps keys and values in kvstratad and attends by `plan` (docs/plans.md).

    tokenizer: for plans that go by sentences. socket: the daemon's; None: KVSTRATA_SOCKET, else the default. digest: of
    the weights, where they are not those of the model's files. Reads the model's files once (kvstrata.digest). With
    KVSTRATA_DISABLE=1 in the environment it changes nothing and warns.

    Errors, and nothing has changed then: Unsupported; kvstrata.Unavailable: no daemon; kvstrata.InvalidArgument: the
    plan; kvstrata.Unimplemented: the plan or the dtype, where pages are a GPU's.
    """
    if os.environ.get("KVSTRATA_DISABLE") == "1":
        warnings.warn("kvstrata: KVSTRATA_DISABLE=1, the model stays on its plain path", stacklevel=2)
        return
    served(model)  # before the files are read
    disable(model)
    boundary = [] if tokenizer is None else boundary_tokens(tokenizer)
    Engine(model, plan, socket, digest or digest_of(model), boundary)  # the model's from now on


def disable(model: Any) -> None:
    """The model's plain path. Harmless where it was not enabled."""
    if (engine := _engine_of(model)) is not None:
        engine.detach(model)


def cache(model: Any, plan: str | Sequence[str] | None = None) -> KvstrataCache:
    """An empty cache to pass as `cache` (before transformers 5.24: `past_key_values`), for several turns. plan None:
    enable()'s; several: the batch's rows divided among them in order, so that plans can be compared in one batch.
    Unavailable: no daemon."""
    engine = _engine_of(model)
    if engine is None:
        raise ValueError("the model is not enabled; call kvstrata_transformers.enable(model) first")
    engine.attach()
    return KvstrataCache(engine, engine.plan if plan is None else plan)
