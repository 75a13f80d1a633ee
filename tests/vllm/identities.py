#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What vLLM makes of settings: loads a model by each, and prints its identity.

    identities.py SPEC.json

SPEC: [{arguments of vLLM's EngineArgs}]. A line of stdout for each: [digest, private]; and a last one, of the last
model: [[what was done to it, digest]].
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

os.environ.update(VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", HF_HUB_OFFLINE="1", VLLM_CPU_CI_ENV="1")

import torch  # noqa: E402
from kvstrata_vllm import loaded, packed  # noqa: E402


class Worker:
    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def get_model(self) -> torch.nn.Module:
        return self.model


def load(arguments: dict[str, Any]) -> tuple[Any, Worker]:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.layers import rotary_embedding
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_random_seed
    config = EngineArgs(enforce_eager=True, skip_tokenizer_init=True, **arguments).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{sys.argv[1]}.group", 0, current_platform.dist_backend)
        ensure_model_parallel_initialized(1, 1)
        set_random_seed(config.model_config.seed)
        rotary_embedding._ROPE_DICT.clear()  # vLLM shares them in a process, whatever max_model_len
        return config, Worker(get_model(vllm_config=config))


def layer_of(model: torch.nn.Module) -> Any:
    return model.model.layers[0]


def scale(model: torch.nn.Module) -> None:
    with torch.no_grad():
        layer_of(model).input_layernorm.weight.mul_(1.5)


def scale_data(model: torch.nn.Module) -> None:
    layer_of(model).input_layernorm.weight.data[::2] *= 1.5


def other_epsilon(model: torch.nn.Module) -> None:
    layer_of(model).input_layernorm.variance_epsilon = 0.05


def pack_anew(model: torch.nn.Module) -> None:
    """Other weights of the layer's projection, as a reload packs them."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    projection = layer_of(model).self_attn.o_proj
    shape = projection.output_size, projection.input_size
    projection.weight = torch.nn.Parameter(torch.ones(shape), requires_grad=False)
    dispatch_cpu_unquantized_gemm(projection, remove_weight=True)


CHANGES: list[Callable[[torch.nn.Module], None]] = [scale, scale_data, other_epsilon, pack_anew]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    packed.sum_what_is_packed()
    for arguments in json.load(open(sys.argv[1])):
        config, worker = load(arguments)
        loaded._worker = weakref.ref(worker)
        print(json.dumps(loaded.identity_of(config, None)), file=answers, flush=True)
    changes = []
    for change in CHANGES:
        change(worker.model)
        changes.append([change.__name__, loaded.identity_here().digest])
    print(json.dumps(changes), file=answers, flush=True)


if __name__ == "__main__":
    main()
