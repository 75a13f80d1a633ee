# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers decode from kvstratad's pages (docs/transformers.md).

    import kvstrata_transformers

    kvstrata_transformers.enable(model, plan="bits{budget = 512}", tokenizer=tokenizer)
    model.generate(**inputs, max_new_tokens=64)       # as ever

    cache = kvstrata_transformers.cache(model)        # several turns on one cache
    model.generate(**inputs, past_key_values=cache)   # or cache=cache, transformers' name of it from 5.24 on

    enable      switches a model over, and back
    generate    what generate() does then
    engine      an enabled model: its identity, its session, its options
    identity    what keys and values depend on
    link        the way to the daemon, and what becomes of one that is gone or does not answer
    hooks       where forward passes begin and end
    cache       keys and values of a batch: a sequence a row
    rows        sequences of the daemon for the rows of a batch
    columns     tokens, padding and positions of a pass
    attention   the attention function, and tensors in the order in which the binding takes them
    series      surprisal and entropy for the plans that need them
    served      which models, and which of their layers
    verify      hits computed anew, and compared
"""

from .cache import KvstrataCache
from .columns import NotServed
from .enable import cache, changed, disable, document, enable
from .served import Unsupported

__version__ = "0.1.0"
__all__ = ["KvstrataCache", "NotServed", "Unsupported", "cache", "changed", "disable", "document", "enable"]
