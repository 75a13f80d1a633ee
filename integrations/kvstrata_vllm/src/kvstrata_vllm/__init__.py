# SPDX-License-Identifier: Apache-2.0
"""vLLM with kvstratad (docs/vllm.md). Owned: it decodes from the daemon's pages.

    vllm serve MODEL --attention-backend CUSTOM \
        --kv-transfer-config '{"kv_connector": "KvstrataConnector", "kv_role": "kv_both",
                               "kv_connector_extra_config": {"plan": "strata{budget = 512}"}}'

Offload: its own cache, with the daemon behind it.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvstrataOffloadConnector", "kv_role": "kv_both"}'

    plugin       what vLLM calls at start: names the backend and the connectors
    lookups      what the daemon holds of a prompt
    geometry     the model as the daemon knows it; what is refused
    loaded       the model that vLLM has loaded, and its identity
    packed       weights that a CPU packs away, whose sums are taken before
    epochs       how scheduler and worker agree on whose pages are found
    disabled     KVSTRATA_DISABLE=1
    hooks_026    what vLLM 0.26 asks for and 0.32 does not

    connector    owned: passes vLLM's calls on to the scheduler's half or the worker's
    scheduler    which requests a step has
    worker       a sequence a request, a step a forward pass
    backend      the attention backend: rows of a batch, layer by layer
    block_count  how many blocks vLLM counts with

    offload, offload_scheduler, offload_worker    the same of offload
"""

from .plugin import register

__version__ = "0.1.0"
__all__ = ["register"]
