# SPDX-License-Identifier: Apache-2.0
"""What an enabled model's generate() does: on pages, or the plain way.

What counts is what transformers resolves, whether it was said by keyword, by a GenerationConfig, by the model's own or
by config.json. What pages cannot serve goes the plain way, with a warning where the caller did not ask for that. A
generate() on a cache of its own that fails for the daemon's or the values' sake runs once more, plainly, unless somebody
has seen tokens of it already.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

import kvstrata

from .cache import KvstrataCache
from .columns import NotServed
from .engine import Attachment, Engine
from .rows import Prompts

# What transformers calls a cache, among arguments and outputs: `cache` from 5.24 on. The older name is taken there, too,
# and warned of.
_CACHE, _OLDER = "cache", "past_key_values"
_CACHE_HERE = _CACHE if _CACHE in {field.name for field in fields(CausalLMOutputWithPast)} else _OLDER
# Keywords of generate() that its generation configuration is not asked about.
_NO_OPTIONS = ("tokenizer", "assistant_tokenizer")
# Whoever has seen scores or tokens of the first run cannot be given others of a second.
_SEES_TOKENS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "custom_generate")


@dataclass
class Call:
    """One generate(): its arguments by name, and what transformers makes of them."""

    arguments: dict[str, Any]
    config: GenerationConfig
    given: Any  # a cache of whatever kind, or None

    @property
    def ids(self) -> torch.Tensor | None:
        inputs = self.arguments.get("inputs")
        return self.arguments.get("input_ids") if inputs is None else inputs

    def prompts(self) -> Prompts:
        last_wanted = None if self.config.output_hidden_states else 1
        return Prompts(self.ids, self.arguments.get("attention_mask"), last_wanted)


class Streamed:
    """A caller's streamer, which is given each token once though generate() runs twice."""

    def __init__(self, streamer: Any) -> None:
        self._streamer, self._repeated, self.puts = streamer, 0, 0

    def again(self) -> None:
        self._repeated = self.puts

    def put(self, value: torch.Tensor) -> None:
        if self._repeated:
            self._repeated -= 1
            return
        self.puts += 1
        self._streamer.put(value)

    def end(self) -> None:
        self._streamer.end()


class Generate:
    """In place of a model's generate(). plain: the model's own, bound."""

    def __init__(self, engine: Engine, plain: Any) -> None:
        self.engine, self._plain = engine, plain
        functools.update_wrapper(self, plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._plain.__self__
        call = _resolved(model, self._plain, args, kwargs)
        reason = _plain_way(model, call)
        if reason is None and call.given is None and (attachment := self._reached()) is None:
            return self._plain(*args, **kwargs)
        if reason is not None:
            if isinstance(call.given, KvstrataCache):
                raise NotServed(f"{reason or 'use_cache is False'}, which a cache of kvstrata's does not do; leave one of "
                                "the two out")
            if reason:
                warnings.warn(f"kvstrata: this generate() runs without it: {reason}", stacklevel=2)
            return self._plain(*args, **kwargs)
        if call.given is not None:
            return self._on_given(call)
        assert attachment is not None
        return self._on_own(call, attachment)

    def _reached(self) -> Attachment | None:
        """None: no daemon answers, and nothing is lost by generating without it."""
        try:
            return self.engine.attachment()
        except (kvstrata.Unavailable, kvstrata.DeadlineExceeded) as error:
            warnings.warn(f"kvstrata: {error}; this generate() runs without it", stacklevel=3)
            return None

    def _on_given(self, call: Call) -> Any:
        """On a cache of ours that the caller keeps."""
        cache: KvstrataCache = call.given
        attachment = self.engine.attachment()
        if cache.rows:
            self.engine.require_session(cache)
            self.engine.require_same(cache)
        with cache.generating(call.prompts(), attachment), _uncompiled(self._plain.__self__, self.engine):
            try:
                return self._plain(**{**call.arguments, _CACHE_HERE: cache})
            except kvstrata.DeadlineExceeded:
                self.engine.link.note_silence()
                raise

    def _on_own(self, call: Call, attachment: Attachment) -> Any:
        """On a cache that ends with the call, unless the caller asked for it among the outputs."""
        cache = KvstrataCache(self.engine, self.engine.plan, attachment)
        streamed = None if call.arguments.get("streamer") is None else Streamed(call.arguments["streamer"])
        if streamed is not None:
            call.arguments["streamer"] = streamed
        seeds = _Seeds(self._plain.__self__.device) if call.config.do_sample else None
        result = None
        try:
            with cache.generating(call.prompts(), attachment), _uncompiled(self._plain.__self__, self.engine):
                result = self._plain(**{**call.arguments, _CACHE_HERE: cache})
            return result
        except (NotServed, kvstrata.KvstrataError) as error:
            again = _can_run_again(error, call, cache, streamed)
            if isinstance(error, kvstrata.DeadlineExceeded):
                cache.drop_aside()
            if not again:
                raise
            warnings.warn(f"kvstrata: {error}; this generate() runs without it", stacklevel=3)
        finally:
            if getattr(result, _CACHE_HERE, None) is None:
                cache.drop()
        if streamed is not None:
            streamed.again()
        if seeds is not None:
            seeds.restore()
        return self._plain(**call.arguments)


def _resolved(model: Any, plain: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Arguments by name, without a cache; errors are those that generate() raises."""
    bound = inspect.signature(plain).bind(*args, **kwargs)
    arguments = {**bound.arguments}
    options = arguments.pop("kwargs", {})
    given = next((options[name] for name in (_CACHE, _OLDER) if options.get(name) is not None), None)
    options = {name: value for name, value in options.items() if name not in (_CACHE, _OLDER)}
    config, _ = model._prepare_generation_config(
        arguments.get("generation_config"), **{k: v for k, v in options.items() if k not in _NO_OPTIONS})
    return Call({**arguments, **options}, config, given)


def _plain_way(model: Any, call: Call) -> str | None:
    """Why this generate() goes the plain way, "" where the caller asked for it; None: it goes on pages."""
    embeds = call.arguments.get("inputs_embeds") is not None
    if not isinstance(call.given, KvstrataCache | None) or (call.config.use_cache is False and not embeds):
        return ""
    own = vars(model).get("prepare_inputs_for_generation")
    return next((text for wrong, text in (
        (embeds, "inputs_embeds is given, and prompts are found by their ids"),
        (call.config.cache_implementation is not None,
         f"cache_implementation is {call.config.cache_implementation!r}, a cache of transformers' own"),
        (call.config.output_attentions, "output_attentions is True, and attention over pages has no weights to return"),
        (call.config.is_assistant, "the model drafts for another one, on a cache that is cropped into its prompt"),
        (model.training and model.is_gradient_checkpointing,
         "gradient checkpointing drops the cache of a model in training mode"),
        (own is not None and getattr(own, "__func__", None) is not type(model).prepare_inputs_for_generation,
         "prepare_inputs_for_generation was replaced, as PEFT does for learned prompts"),
    ) if wrong), None)


def _can_run_again(error: Exception, call: Call, cache: KvstrataCache, streamed: Streamed | None) -> bool:
    """Whether nobody is shown two runs, and a plain one can do better."""
    for_the_daemon = isinstance(error, kvstrata.Unavailable | kvstrata.DeadlineExceeded)
    for_the_values = getattr(error, "reason", "") == "TENSOR_NOT_FINITE"
    if not (for_the_daemon or for_the_values or isinstance(error, NotServed)):
        return False
    if streamed is not None and streamed.puts > 1:  # the first is the prompt
        return False
    return not cache.prompt_is_done or not any(call.arguments.get(name) for name in _SEES_TOKENS)


class _Seeds:
    """torch's generators as they were, so that a second run draws the same."""

    def __init__(self, device: torch.device) -> None:
        self._cpu = torch.get_rng_state()
        self._device = device
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


@contextmanager
def _uncompiled(model: Any, engine: Engine) -> Iterator[None]:
    """Compiled parts of the model run as they were written: what goes on in pages is not for a compiler."""
    if not any(module._compiled_call_impl is not None for module in model.modules()):
        yield
        return
    engine.warn_once("the model is compiled, and runs uncompiled where its keys and values are in pages")
    with torch.compiler.set_stance("force_eager"):
        yield
