# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers decode from kvstratad's pages (docs/transformers.md).

    import kvstrata_transformers

    kvstrata_transformers.enable(model, plan="strata{budget = 512}", tokenizer=tokenizer)
    model.generate(**inputs, max_new_tokens=64)       # as ever

    cache = kvstrata_transformers.cache(model)        # several turns on one cache
    model.generate(**inputs, past_key_values=cache)   # or cache=cache, transformers' name of it from 5.24 on

    enable      switches a model over, and back; what generate() does then
    cache       keys and values of a batch: a sequence a row
    attention   the attention function, and tensors in the order in which the binding takes them
    series      surprisal and entropy for the plans that need them
    served      which models, and which of their layers
"""

from .cache import KvstrataCache
from .enable import cache, disable, enable
from .served import Unsupported

__version__ = "0.1.0"
__all__ = ["KvstrataCache", "Unsupported", "cache", "disable", "enable"]
