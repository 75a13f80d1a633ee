# SPDX-License-Identifier: Apache-2.0
"""What makes a model private: what nobody can know, in words that name it and the way out."""

from __future__ import annotations

import functools
import importlib
import pathlib
import shutil
import sys
from typing import Any

import pytest
import torch
from kvstrata_transformers.identity import ModelIdentity
from small_models import model_of


@pytest.fixture
def model() -> Any:
    return model_of("llama")


def _nothing(*args: Any) -> None:
    """A hook that does nothing, which nobody can know."""


def test_hooks_on_what_makes_keys(model: Any):
    live = ModelIdentity(model)
    for module in (model.model.layers[0], model.model.embed_tokens, model.model.layers[1].self_attn.k_proj):
        for register in (module.register_forward_hook, module.register_forward_pre_hook):
            handle = register(_nothing)
            assert "_nothing" in str(live.now().private) and "digest=" in str(live.now().private)
            handle.remove()
            assert live.now().private is None
    handle = torch.nn.modules.module.register_module_forward_pre_hook(_nothing)
    assert "all modules" in str(live.now().private)
    handle.remove()


def test_hooks_at_the_ends_are_no_matter(model: Any):
    live = ModelIdentity(model)
    before = live.now()
    for module in (model, model.model, model.lm_head):
        module.register_forward_hook(_nothing)
        module.register_forward_pre_hook(_nothing)
    assert live.now() == before


def test_hooks_of_the_adapter_itself(model: Any):
    live = ModelIdentity(model)
    handle = model.model.layers[0].register_forward_hook(_nothing)
    assert live.now().private is not None
    live.own_hooks.add(handle.id)
    assert live.now().private is None


def test_backward_hooks_are_no_matter(model: Any):
    model.model.layers[0].register_full_backward_hook(_nothing)
    assert ModelIdentity(model).now().private is None


def test_training(model: Any):
    live = ModelIdentity(model)
    model.train()
    assert live.now().private is None  # nothing is random
    model.model.layers[1].self_attn.attention_dropout = 0.1
    assert "attention_dropout 0.1" in str(live.now().private) and "model.eval()" in str(live.now().private)
    model.eval()
    assert live.now().private is None
    model.model.layers[1].self_attn.attention_dropout = 0.0
    model.model.layers[1].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.1)).eval()
    assert live.now().private is None
    model.train()
    assert " p 0.1" in str(live.now().private)


def test_autocast(model: Any):
    live = ModelIdentity(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in str(live.now().private)
    with torch.autocast("cpu", enabled=False):
        assert live.now().private is None
    assert live.now().private is None


def test_functions_without_a_name(model: Any):
    live = ModelIdentity(model)
    linear = model.model.layers[0].mlp.up_proj
    for forward in (lambda x: x, functools.partial(lambda x, y: x, y=1), torch.compile(lambda x: x)):
        linear.forward = forward
        assert "up_proj's forward" in str(live.now().private) and "lambda" in str(live.now().private)
    linear.forward = functools.partial(torch.nn.functional.linear, weight=linear.weight)
    assert live.now().private is None


def test_operators(model: Any):
    """What torch and known packages compiled is known by its name, as vLLM's activations hold it; two are not the same."""
    act = model.model.layers[0].mlp
    made = []
    for op in (torch.ops.aten.silu, torch.ops.aten.gelu, torch.ops.aten.silu.default):
        act.op = op
        made.append(ModelIdentity(model).now())
    assert [identity.private for identity in made] == [None] * 3 and len({identity.digest for identity in made}) == 3
    with torch.library._scoped_library("nobody_knows", "DEF") as library:
        library.define("silu(Tensor x) -> Tensor")
        act.op = torch.ops.nobody_knows.silu
        assert "torch.ops.nobody_knows.silu" in str(ModelIdentity(model).now().private)


def _outside(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> Any:
    """The module `outside` of a package of one's own, imported anew."""
    monkeypatch.syspath_prepend(folder)
    for name, text in files.items():
        monkeypatch.delitem(sys.modules, name, raising=False)
        (folder / f"{name}.py").write_text(text)
    importlib.invalidate_caches()
    return importlib.import_module("outside")


@pytest.mark.parametrize("kind", ["torch.tensor([{}])", "numpy.array([{}])"])
def test_tensors_that_code_from_outside_names(model: Any, tmp_path: pathlib.Path, kind: str,
                                              monkeypatch: pytest.MonkeyPatch):
    made = []
    for number in (2.0, 3.0):
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        outside = _outside(tmp_path, monkeypatch, {"outside": "import numpy\nimport torch\nT = " + kind.format(number) + """
class Activation(torch.nn.Module):
    def forward(self, x):
        return x * T
"""})
        model.model.layers[0].mlp.act_fn = outside.Activation().eval()
        made.append(ModelIdentity(model).now())
    assert [identity.private for identity in made] == [None, None] and made[0].digest != made[1].digest


def test_names_of_outside_code_that_are_bound_anew(model: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Numbers, tensors and functions of its own file, and of a module that it imports."""
    outside = _outside(tmp_path, monkeypatch, {"beside": "SHIFT = 1.0\nUNUSED = 1\n", "outside": """
import torch

import beside

SCALE, TABLE, UNUSED = 2.0, torch.tensor([2.0]), 1

def turned(x):
    return -x

class Activation(torch.nn.Module):
    def forward(self, x):
        return turned(x) * SCALE * TABLE + beside.SHIFT
"""})
    model.model.layers[0].mlp.act_fn = outside.Activation().eval()
    live = ModelIdentity(model)
    first = live.now()
    assert first.private is None
    for module, name, value in ((outside, "SCALE", 3.0), (outside, "TABLE", torch.tensor([3.0])),
                                (outside, "turned", importlib.import_module("beside").__loader__.is_package),
                                (outside.beside, "SHIFT", 2.0)):
        kept = getattr(module, name)
        setattr(module, name, value)
        assert live.now() != first, name
        setattr(module, name, kept)
        assert live.now() == first, name
    outside.UNUSED = outside.beside.UNUSED = 2
    assert live.holds()


def test_tensors_that_are_not_here(model: Any):
    live = ModelIdentity(model)
    model.model.layers[0].mlp.up_proj.to("meta")
    assert "up_proj.weight is a tensor without memory" in str(live.now().private)


def test_distributed_tensors(model: Any):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weight = distribute_tensor(model.lm_head.weight.detach(), init_device_mesh("cpu", (1,)))
        model.lm_head.weight = torch.nn.Parameter(weight)
        assert "lm_head.weight is a distributed tensor" in str(ModelIdentity(model).now().private)
    finally:
        dist.destroy_process_group()


class TwoParts(torch.Tensor):
    """A subclass that is made of others, as quantised tensors are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, scale: torch.Tensor, bits: int) -> TwoParts:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner: torch.Tensor, scale: torch.Tensor, bits: int) -> None:
        self.inner, self.scale, self.bits = inner, scale, bits

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner", "scale"], {"bits": self.bits}

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


def _two_parts(scale: float = 0.5, bits: int = 4) -> TwoParts:
    return TwoParts(torch.arange(64 * 96, dtype=torch.int32).view(96, 64), torch.tensor([scale]), bits)


def test_subclasses_are_what_they_are_made_of(model: Any):
    linear = model.model.layers[0].mlp.up_proj
    digests = []
    for part in (_two_parts(), _two_parts(), _two_parts(scale=0.25), _two_parts(bits=3)):
        linear._parameters["weight"] = part
        identity = ModelIdentity(model).now()
        assert identity.private is None
        digests.append(identity.digest)
    assert digests[0] == digests[1] and len(set(digests)) == 3
    live = ModelIdentity(model)
    linear.weight.inner.add_(1)
    assert live.now().digest != digests[3]
