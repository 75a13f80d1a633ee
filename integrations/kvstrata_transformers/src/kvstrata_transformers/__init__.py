"""transformers on kvstrata: keys and values live in kvstratad's pages, attention is a plan's.

    import kvstrata_transformers

    kvstrata_transformers.enable(model, plan="strata{budget = 1024}", tokenizer=tokenizer)
    model.generate(**inputs, max_new_tokens=64)   # as ever

    cache = kvstrata_transformers.cache(model)    # several turns on one cache
    model.generate(**inputs, past_key_values=cache)

`disable(model)`, or KVSTRATA_DISABLE=1 in the environment, leaves a model on its plain path. docs/transformers.md
says what is served.
"""

from .enable import cache, disable, enable
from .served import Unsupported

__all__ = ["Unsupported", "cache", "disable", "enable"]
