# SPDX-License-Identifier: Apache-2.0
"""SGLang decodes from kvstratad's pages (docs/sglang.md).

    KVSTRATA_PLAN="bits{budget = 512}" python -m sglang.launch_server --model-path MODEL \
        --attention-backend kvstrata --radix-cache-backend kvstrata --disable-overlap-schedule --disable-cuda-graph

    plugin        what SGLang calls at start: names the backends to it
    prefix_cache  in place of SGLang's radix cache: what is held of a prompt, and the ends of requests
    backend       the attention backend: rows of a batch, layer by layer
    sequences     a sequence a request, a step a forward pass
    geometry      the model as the daemon knows it; what is refused
"""

from .plugin import register

__version__ = "0.1.0"
__all__ = ["register"]
