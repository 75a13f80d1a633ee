# SPDX-License-Identifier: Apache-2.0
"""vLLM with kvstratad (docs/vllm.md). Below vLLM's own cache:

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvstrataConnector", "kv_role": "kv_both"}'

    plugin          what vLLM calls at start: names the backend and the connectors
    loaded          the model that vLLM has loaded, and its identity
    packed          weights that a CPU packs away, whose sums are taken before
    disabled        KVSTRATA_DISABLE=1
    versions        what is not the same in the versions of vLLM that are served

    connector       vLLM's offloading connector, with what a spec of it cannot do
    flags           what the user's flags make of it; what is refused
    spec            vLLM's offloading spec: who looks up and who copies
    source          the scheduler's side: what is held, what is stored where
    adapters        what LoRA adapters are
    space           which engines share chunks
    chunk_worker    a worker's side: whether the model is still the same, whose loads failed
    chunk_metadata  what the two tell each other
    transfers       copies that fail, or must not be made
    cpu_copies      the copies of an engine on a CPU
    region          the daemon's memory, in rows

Owned: it decodes from the daemon's pages.

    vllm serve MODEL --attention-backend CUSTOM \
        --kv-transfer-config '{"kv_connector": "KvstrataOwnedConnector", "kv_role": "kv_both",
                               "kv_connector_extra_config": {"plan": "strata{budget = 512}"}}'

    owned_connector  passes vLLM's calls on to the scheduler's half or the worker's
    geometry         the model as the daemon knows it; what is refused
    lookups          what the daemon holds of a prompt
    scheduler        which requests a step has
    worker           a sequence a request, a step a forward pass
    backend          the attention backend: rows of a batch, layer by layer
    block_count      how many blocks vLLM counts with
    epochs           how scheduler and worker agree on whose pages are found
"""

from .plugin import register

__version__ = "0.1.0"
__all__ = ["register"]
