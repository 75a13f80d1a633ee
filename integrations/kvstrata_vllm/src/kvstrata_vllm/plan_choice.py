# SPDX-License-Identifier: Apache-2.0
"""Which plan an engine's decode steps attend by, and what is refused with one.

    --attention-backend CUSTOM --additional-config '{"kvstrata": {"plan": "quest{budget = 2048}"}}'
"""

from __future__ import annotations

import functools
from typing import Any

from .unsupported import Unsupported

FULL = "full"
PLANES_HEAD_DIMS = (64, 128)
_WAY_OUT = "or take --attention-backend CUSTOM away, or start with KVSTRATA_DISABLE=1"


def plan_of(config: Any) -> str:
    """The plan that a VllmConfig names, else "full". Unsupported: kvstrata has other keys than `plan`."""
    additional = getattr(config, "additional_config", None)
    own = additional.get("kvstrata", {}) if isinstance(additional, dict) else {}
    if not isinstance(own, dict):
        raise Unsupported(f"--additional-config has kvstrata = {own!r}, and has to have an object, as "
                          "{\"kvstrata\": {\"plan\": \"quest\"}}")
    unknown = sorted(set(own) - {"plan"})
    if unknown:
        raise Unsupported(f"--additional-config has kvstrata.{unknown[0]}: known is plan; take it out")
    return str(own.get("plan", FULL))


def of_planes(plan: str) -> bool:
    """Whether vLLM's blocks hold planes under it. kvstrata.Unimplemented: strata with options that are not served
    there."""
    return _lower_bytes(plan) is not None


def is_lower_apart(plan: str) -> bool:
    """Whether its lower planes are on the host, and not in vLLM's blocks."""
    return bool(_lower_bytes(plan))


@functools.cache
def _lower_bytes(plan: str) -> int | None:
    """A token's on the host; None: vLLM's blocks hold no planes."""
    if plan == FULL:  # it needs no library
        return None
    from kvstrata import Unimplemented
    from kvstrata.block_planes import PlanesShape, form_of
    shape = PlanesShape(layers=1, query_heads=1, kv_heads=1, head_dim=PLANES_HEAD_DIMS[0], dtype="bf16")
    try:
        return form_of(plan, shape).lower_token_bytes
    except Unimplemented as error:
        if error.reason != "BLOCK_PLAN" or plan.partition("{")[0].strip() == "strata":
            raise
        return None


def refuse_other_devices(config: Any) -> None:
    """--attention-backend CUSTOM where there is no GPU of CUDA; vLLM on a CPU would pass over it without a word.
    Unsupported."""
    attention, device = config.attention_config, config.device_config.device_type
    named = [attention.backend, *attention.backend_per_kind.values()]
    if device != "cuda" and any(backend is not None and backend.name == "CUSTOM" for backend in named):
        raise Unsupported(f"--attention-backend CUSTOM serves GPUs only (cuda), and vLLM's device is {device}; take it "
                          "away (KvstrataConnector needs none), or start with KVSTRATA_DISABLE=1")


def refuse(config: Any) -> None:
    """What a plan other than full cannot be beside. Unsupported, with the setting, its value and the next step."""
    plan, parallel = plan_of(config), config.parallel_config
    if plan == FULL:
        return
    transfer = config.kv_transfer_config
    connector = transfer.kv_connector if transfer is not None else None
    dtype = config.cache_config.cache_dtype
    problems = (
        (config.speculative_config is not None,
         f"speculative decoding asks several tokens of a request in a step, and plan {plan!r} is for one; take "
         "--speculative-config away, or the plan"),
        (connector not in (None, "KvstrataConnector"),
         f"kv_connector {connector} fills blocks that the index of plan {plan!r} does not hear of; take "
         "KvstrataConnector, or the plan away"),
        (dtype not in ("auto", "float16", "bfloat16"),
         f"--kv-cache-dtype {dtype} is not served under plan {plan!r}; take auto, or the plan away"),
        (parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
         f"context parallelism divides sequences, and plan {plan!r} has all of one; take it or the plan away"),
        (bool(getattr(parallel, "enable_dbo", False)),
         f"--enable-dbo runs two halves of a step at once, and plan {plan!r} has one workspace; take it or the plan away"),
        (config.model_config.use_mla, f"the model has MLA, which plan {plan!r} does not serve; take the plan away"),
    )
    if of_planes(plan):
        problems += _beside_planes(config, plan)
    problem = next((text for wrong, text in problems if wrong), None)
    if problem is not None:
        raise Unsupported(f"{problem}, {_WAY_OUT}")


def _beside_planes(config: Any, plan: str) -> tuple[tuple[bool, str], ...]:
    """What cannot be beside blocks that hold no rows, with the reason."""
    model, transfer = config.model_config, config.kv_transfer_config
    connector = transfer.kv_connector if transfer is not None else None
    extra = transfer.kv_connector_extra_config if transfer is not None else {}
    return (
        (not config.use_v2_model_runner,
         f"plan {plan!r} needs vLLM's model runner V2, which says whose a row is; take VLLM_USE_V2_MODEL_RUNNER=0, or "
         "the flags that vLLM's log names, away, or the plan"),
        (model.is_hybrid,
         f"the model has recurrent states, whose pages vLLM makes as large as those of rows, and plan {plan!r} has "
         "none; take the plan away"),
        (model.is_mm_prefix_lm,
         f"the model attends some of its prompts both ways, which plan {plan!r} does not serve; take the plan away"),
        (connector is not None and is_lower_apart(plan),
         f"kv_connector {connector} stores and loads blocks as the GPU has them, and under plan {plan!r} their lower planes "
         "are on the host; take --kv-transfer-config away, or lower = \"host\" out of the plan"),
        (bool(extra.get("canonical_layout")),
         f"canonical_layout divides blocks by their rows, and those of plan {plan!r} have none; take canonical_layout "
         "out of kv_connector_extra_config, or the plan away"),
    )
