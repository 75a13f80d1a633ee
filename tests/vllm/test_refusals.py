"""What is not served is refused by name, before vLLM starts."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

from kvstrata_vllm.backend import KvstrataAttention  # noqa: E402
from kvstrata_vllm.geometry import Unsupported  # noqa: E402


@pytest.mark.parametrize(("name", "value"), [("sliding_window", 4096), ("logits_soft_cap", 30.0), ("sinks", object()),
                                             ("alibi_slopes", [0.5]), ("kv_sharing_target_layer_name", "layer.0"),
                                             ("something_new", 1)])
def test_layers(name: str, value: object):
    with pytest.raises(Unsupported, match=name):
        KvstrataAttention(9, 64, 0.125, 3, **{name: value})


@pytest.mark.parametrize("head_size", [80, 96, 512])
def test_head_sizes(head_size: int):
    with pytest.raises(Unsupported, match=f"head_size {head_size}"):
        KvstrataAttention(9, head_size, 0.125, 3)
