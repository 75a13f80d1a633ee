# SPDX-License-Identifier: Apache-2.0
"""What is not served is refused by name, before SGLang starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed; make test-sglang installs it")

import torch  # noqa: E402
from kvstrata_sglang.geometry import Unsupported, check_layer, never_served, refuse  # noqa: E402
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: E402


@pytest.mark.parametrize(("name", "value"), [
    ("sliding_window_size", 4096), ("logit_cap", 30.0), ("is_cross_attention", True), ("v_head_dim", 128),
    ("pos_encoding_mode", "ALIBI"), ("use_irope", True)])
def test_layers(name: str, value: object):
    check_layer(RadixAttention(9, 64, 0.125, 3, 0))
    with pytest.raises(Unsupported, match=name):
        check_layer(RadixAttention(9, 64, 0.125, 3, 0, **{name: value}))


def test_the_ways_out_are_named():
    refuse(((False, "LoRA is on"),))
    with pytest.raises(Unsupported, match="LoRA .* --attention-backend and --radix-cache-backend .*KVSTRATA_DISABLE=1"):
        refuse(((True, "LoRA is on"),))


@pytest.mark.parametrize(("lora", "dtype", "said"), [
    (True, torch.bfloat16, "LoRA is on"), (False, torch.float8_e5m2, "kv_cache_dtype is torch.float8_e5m2")])
def test_lora_and_fp8_caches(monkeypatch: pytest.MonkeyPatch, lora: bool, dtype: torch.dtype, said: str):
    """By the configuration alone: on a CPU SGLang stops at both before it asks us."""
    of = {"get_parallel": SimpleNamespace(tp_size=1, pp_size=1, dp_size=1, attn_cp_size=1, dcp_size=1),
          "get_spec": SimpleNamespace(speculative_algorithm=None), "get_lora": SimpleNamespace(enable_lora=lora),
          "get_disagg": SimpleNamespace(disaggregation_mode="null")}
    for name, value in of.items():
        monkeypatch.setattr(runtime_context, name, lambda value=value: value)
    model = SimpleNamespace(is_multimodal=False, is_encoder_decoder=False, is_generation=True, dtype=torch.bfloat16)
    runner = SimpleNamespace(model_config=model, use_mla_backend=False, kv_cache_dtype=dtype)
    with pytest.raises(Unsupported, match=said):
        refuse(never_served(runner))


@pytest.mark.parametrize("head_dim", [80, 96, 512])
def test_head_dims(head_dim: int):
    with pytest.raises(Unsupported, match=f"head_dim {head_dim}"):
        check_layer(RadixAttention(9, head_dim, 0.125, 3, 0))


def test_encoders():
    with pytest.raises(Unsupported, match="encoder_only"):
        check_layer(RadixAttention(9, 64, 0.125, 3, 0, attn_type=AttentionType.ENCODER_ONLY))


# fp8: on a CPU SGLang itself refuses it, before it asks us.
FLAGS = [({"radix_cache_backend": None}, "--radix-cache-backend is None"),
         ({"disable_overlap_schedule": False}, "--disable-overlap-schedule"),
         ({"attention_backend": "torch_native"}, "--attention-backend is not"),
         ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2 is not supported"),
         ({"disable_radix_cache": True}, "--disable-radix-cache")]


def test_flags(engine, amount):
    for flags, said in FLAGS[:amount(10)]:
        with pytest.raises(AssertionError) as error:
            engine("full", [], **flags)
        assert said in str(error.value), flags


@pytest.mark.parametrize(("plan", "socket", "said"), [("full", "/nowhere/kvstratad.sock", "DAEMON_UNREACHABLE"),
                                                      ("no plan{", None, "PLAN_")])
def test_without_a_daemon_or_a_plan_no_weights_are_read(engine, plan: str, socket: str | None, said: str):
    with pytest.raises(AssertionError) as error:
        engine(plan, [], socket=socket)
    assert said in str(error.value)
    assert "Load weight begin" not in str(error.value)
