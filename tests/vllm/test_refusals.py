# SPDX-License-Identifier: Apache-2.0
"""What is not served is refused by name, before vLLM starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

from kvstrata_vllm.backend import KvstrataAttention  # noqa: E402
from kvstrata_vllm.geometry import Unsupported, refuse  # noqa: E402


@pytest.mark.parametrize(("name", "value"), [("sliding_window", 4096), ("logits_soft_cap", 30.0), ("sinks", object()),
                                             ("alibi_slopes", [0.5]), ("kv_sharing_target_layer_name", "layer.0"),
                                             ("something_new", 1)])
def test_layers(name: str, value: object):
    with pytest.raises(Unsupported, match=name):
        KvstrataAttention(9, 64, 0.125, 3, **{name: value})


def test_lora_names_the_ways_out():
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="fail"),
        attention_config=SimpleNamespace(backend=SimpleNamespace(name="CUSTOM")), lora_config=object(),
        parallel_config=SimpleNamespace(world_size=1, data_parallel_size=1), speculative_config=None,
        model_config=SimpleNamespace(is_multimodal_model=False, enable_prompt_embeds=False, use_mla=False, dtype=None),
        cache_config=SimpleNamespace(cache_dtype="auto"), device_config=SimpleNamespace(device_type="cpu"),
        scheduler_config=SimpleNamespace(async_scheduling=False))
    with pytest.raises(Unsupported, match="LoRA .* --attention-backend CUSTOM and --kv-transfer-config .*"
                                          "KVSTRATA_DISABLE=1"):
        refuse(config)
    config.lora_config = None
    refuse(config)


@pytest.mark.parametrize("head_size", [80, 96, 512])
def test_head_sizes(head_size: int):
    with pytest.raises(Unsupported, match=f"head_size {head_size}"):
        KvstrataAttention(9, head_size, 0.125, 3)


@pytest.mark.parametrize(("plan", "spec", "said"), [("full", {"socket": "/nowhere/kvstratad.sock"}, "DAEMON_UNREACHABLE"),
                                                    ("no plan{", {}, "PLAN_")])
def test_without_a_daemon_or_a_plan_no_weights_are_read(engine, plan: str, spec: dict, said: str):
    with pytest.raises(AssertionError) as error:
        engine(plan, [], spec)
    assert said in str(error.value)
    assert "Loading weights took" not in str(error.value)
