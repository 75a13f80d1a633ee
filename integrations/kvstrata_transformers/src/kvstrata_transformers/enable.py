"""Switching kvstrata on for a model, and off again."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

import kvstrata

from .attention import NAME
from .cache import KvstrataCache
from .digest import digest_of
from .served import Served, served

DTYPES = {torch.float32: kvstrata.DType.F32, torch.float16: kvstrata.DType.F16,
          torch.bfloat16: kvstrata.DType.BF16}
SENTENCE_ENDS = (".", "!", "?", "…", "...", "。", "！", "？")
_engines: weakref.WeakKeyDictionary[torch.nn.Module, Engine] = weakref.WeakKeyDictionary()


class Engine:
    """A model that decodes from a daemon: its session, hooks and defaults.

    watch: called as watch(layer, step) behind each layer's attention, for costs and selections; None: nobody."""

    def __init__(self, module: torch.nn.Module, plan: str, tokenizer: Any, socket: str | None, page_tokens: int,
                 digest: str | None) -> None:
        self.served: Served = served(module)
        self.plan, self.watch = plan, None
        self._module = weakref.ref(module)
        self._socket, self._page_tokens = socket, page_tokens
        self._plain = module.config._attn_implementation
        self._boundary = _sentence_ends(tokenizer)
        self._digest = digest or digest_of(module)
        self.layers = module.config.get_text_config().num_hidden_layers
        self.layer_of = {layer: i for i, layer in enumerate(self.served.layers)}
        self._session: kvstrata.Session | None = None
        self._model: kvstrata.Model | None = None
        self.attach()
        self._hooks = [module.base_model.register_forward_pre_hook(_before, with_kwargs=True),
                       module.base_model.register_forward_hook(_behind, with_kwargs=True),
                       module.register_forward_hook(_logits, with_kwargs=True)]
        module.set_attn_implementation(NAME)
        self._generate = module.generate
        module.generate = _Generate(self)

    @property
    def module(self) -> Any:
        return self._module()

    @property
    def session(self) -> kvstrata.Session:
        return self._session

    @property
    def model(self) -> kvstrata.Model:
        return self._model

    def attach(self) -> None:
        """To the daemon, anew if it was restarted. Unavailable: there is none."""
        try:
            if self._session is not None:
                return self._session.ping()
        except kvstrata.Unavailable:
            self._session.close()
            self._session = None
        session = kvstrata.attach(self._socket, client_name="transformers")
        module, s = self.module, self.served
        self._model = session.register_model(
            module.config.model_type, self._digest, layers=len(s.layers), query_heads=s.query_heads,
            kv_heads=s.kv_heads, head_dim=s.head_dim, page_tokens=self._page_tokens, dtype=DTYPES[module.dtype],
            boundary_tokens=self._boundary, scale=s.scale)
        self._session = session

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        del self.module.generate  # the class's is back
        self.module.set_attn_implementation(self._plain)
        self._session.close()

    def plain_generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._generate(*args, **kwargs)


class _Generate:
    """generate() of an enabled model: with a cache of ours where the caller brings none."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine
        mine = kwargs.get("past_key_values")
        if (mine is not None and not isinstance(mine, KvstrataCache)) or not kwargs.get("use_cache", True):
            return engine.plain_generate(inputs, *args, **kwargs)
        try:
            engine.attach()
        except kvstrata.Unavailable as error:
            if mine is not None:
                raise
            warnings.warn(f"kvstrata: {error}; generating without it", stacklevel=2)
            return engine.plain_generate(inputs, *args, **kwargs)
        fresh = mine is None
        cache = KvstrataCache(engine, engine.plan) if fresh else mine
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        if ids is None:
            raise ValueError("kvstrata needs token ids (input_ids): prefixes are found by them")
        if not cache.rows and _starts_with_the_prompt(engine.module, args, kwargs):
            cache.open(ids, kwargs.get("attention_mask"), share=True)
        try:
            return engine.plain_generate(inputs, *args, **{**kwargs, "past_key_values": cache})
        finally:
            if fresh and not _returns_cache(args, kwargs):
                cache.close()


def _returns_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(_option("return_dict_in_generate", args, kwargs))


def _option(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    config = args[0] if args else kwargs.get("generation_config")
    return kwargs.get(name, getattr(config, name, None))


def _starts_with_the_prompt(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the batch that generate() computes first is the prompts as they were given: beams and several returned
    sequences repeat them, drafts follow them."""
    def option(name: str) -> Any:
        value = _option(name, args, kwargs)
        return getattr(module.generation_config, name, None) if value is None else value
    alone = (option("num_beams") or 1) == 1 and (option("num_return_sequences") or 1) == 1
    return alone and kwargs.get("assistant_model") is None and not option("prompt_lookup_num_tokens")


def _cache_of(kwargs: dict[str, Any]) -> KvstrataCache | None:
    cache = kwargs.get("past_key_values")
    return cache if isinstance(cache, KvstrataCache) else None


def _before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if (cache := _cache_of(kwargs)) is None:
        return
    ids = args[0] if args else kwargs.get("input_ids")
    if ids is None:
        raise ValueError("kvstrata needs token ids; a pass of inputs_embeds alone has none")
    cache.begin(ids, kwargs.get("attention_mask"))


def _behind(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if (cache := _cache_of(kwargs)) is not None:
        cache.end(output.last_hidden_state)


def _logits(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if (cache := _cache_of(kwargs)) is None:
        return
    for row, logits in zip(cache.rows, output.logits[:, -1]):
        row.report_entropy(logits)


def _sentence_ends(tokenizer: Any) -> list[int]:
    if tokenizer is None:
        return []
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    return [i for i, text in enumerate(texts) if text.strip().endswith(SENTENCE_ENDS) or text.count("\n") >= 2]


def enable(model: Any, plan: str = "full", *, tokenizer: Any = None, socket: str | None = None,
           page_tokens: int = 32, digest: str | None = None) -> Engine | None:
    """From now on generate() keeps keys and values in kvstratad, and attends by `plan` (docs/plans.md).

    tokenizer: for plans that know sentences. socket: the daemon's; None: KVSTRATA_SOCKET, else the default path.
    page_tokens: of a page; two engines share pages of equal sizes. digest: of the weights, where they are not those of
    the files that the model came from (kvstrata.digest). Unsupported names what the model has that kvstrata
    does not serve; kvstrata.Unavailable: there is no daemon. With KVSTRATA_DISABLE=1 nothing is done, and None
    returned.
    """
    if os.environ.get("KVSTRATA_DISABLE") == "1":
        warnings.warn("KVSTRATA_DISABLE=1: the model stays on its plain path", stacklevel=2)
        return None
    disable(model)
    engine = Engine(model, plan, tokenizer, socket, page_tokens, digest)
    _engines[model] = engine
    return engine


def disable(model: Any) -> None:
    """Back to the plain path. Harmless where it was not enabled."""
    if (engine := _engines.pop(model, None)) is not None:
        engine.detach()


def cache(model: Any, plan: str | None = None) -> KvstrataCache:
    """A cache to pass as past_key_values, for several turns; plan None: that of enable()."""
    engine = _engines.get(model)
    if engine is None:
        raise ValueError("kvstrata is not enabled for this model; call kvstrata_transformers.enable(model) first")
    return KvstrataCache(engine, engine.plan if plan is None else plan)
