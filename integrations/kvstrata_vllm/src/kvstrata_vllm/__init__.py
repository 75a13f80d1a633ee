# SPDX-License-Identifier: Apache-2.0
"""vLLM with kvstratad (docs/vllm.md). Below vLLM's own cache:

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvstrataConnector", "kv_role": "kv_both"}'

    plugin          what vLLM calls at start: names the backend and the connector
    loaded          the model that vLLM has loaded, and its identity
    packed          weights that a CPU packs away, whose sums are taken before
    disabled        KVSTRATA_DISABLE=1
    versions        what is not the same in the versions of vLLM that are served
    unsupported     what a user's flags are refused with

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

On a GPU, decode steps attend by a plan over vLLM's own blocks:

    vllm serve MODEL --attention-backend CUSTOM --additional-config '{"kvstrata": {"plan": "quest{budget = 2048}"}}'

    attention       the attention backend: FlashAttention, but that decode steps attend by the plan
    block_rows      what libkvstrata is told of a batch, and where it works
    block_audit     what a plan loses, measured while the engine runs
    plan_choice     which plan; what is refused

and under plan `strata` its blocks have another form:

    planes_attention  the backend then
    planes_spec       the blocks, as vLLM's allocator and scheduler have them
    planes_rows       what libkvstrata is told of a batch, and the memory beside the blocks
"""

from .plugin import register

__version__ = "0.1.0"
__all__ = ["register"]
