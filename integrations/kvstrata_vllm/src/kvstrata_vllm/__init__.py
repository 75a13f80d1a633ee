"""vLLM decodes from kvstratad's pages (docs/vllm.md).

    vllm serve MODEL --attention-backend CUSTOM \
        --kv-transfer-config '{"kv_connector": "KvstrataConnector", "kv_role": "kv_both",
                               "kv_connector_extra_config": {"plan": "strata{budget = 512}"}}'

    plugin      what vLLM calls at start: names the backend and the connector to it
    connector   vLLM's connector: passes its calls on to the scheduler's half or the worker's
    scheduler   what is held of a prompt; which requests a step has
    worker      a sequence a request, a step a forward pass
    backend     the attention backend: rows of a batch, layer by layer
    geometry    the model as the daemon knows it; what is refused
    hooks_026   what vLLM 0.26 asks for and 0.32 does not
"""

from .plugin import register

__version__ = "0.1.0"
__all__ = ["register"]
