# SPDX-License-Identifier: Apache-2.0
"""What makes a model another one: operations that the property test draws.

Each takes a model (a copy, its own) and a random generator, changes the model, and may give what undoes it where it
reached beyond the model. Where it does not apply to an architecture it raises Inapplicable.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import random
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import parametrizations, parametrize, prune

Undo = Callable[[], Any]
Operation = Callable[[Any, random.Random], Undo | None]


class Inapplicable(Exception):
    """The model has nothing of the kind."""


def _one_of(draw: random.Random, things: Any) -> Any:
    things = list(things)
    if not things:
        raise Inapplicable
    return draw.choice(things)


def _parameter(model: Any, draw: random.Random) -> tuple[torch.nn.Module, str, torch.nn.Parameter]:
    return _one_of(draw, [(module, name, p) for module in model.modules() for name, p in module._parameters.items()
                          if p is not None])


def _linear(model: Any, draw: random.Random) -> torch.nn.Linear:
    return _one_of(draw, [m for m in _layers(model).modules() if type(m) is torch.nn.Linear])


def _layers(model: Any) -> torch.nn.ModuleList:
    return next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 2)


def _norm(model: Any, draw: random.Random) -> torch.nn.Module:
    return _one_of(draw, [m for m in model.modules() if "Norm" in type(m).__name__])


# Weights in place

def data_factor(model: Any, draw: random.Random) -> None:
    _parameter(model, draw)[2].data.mul_(draw.choice([0.5, 1.25, -1.0]))


def data_copy(model: Any, draw: random.Random) -> None:
    parameter = _parameter(model, draw)[2]
    parameter.data.copy_(torch.randn(parameter.shape))


def data_other(model: Any, draw: random.Random) -> None:
    parameter = _parameter(model, draw)[2]
    parameter.data = torch.randn(parameter.shape).to(parameter.dtype)


def no_grad_add(model: Any, draw: random.Random) -> None:
    with torch.no_grad():
        _parameter(model, draw)[2].add_(draw.choice([0.01, -0.3]))


def inference_mode(model: Any, draw: random.Random) -> None:
    with torch.inference_mode():
        _parameter(model, draw)[2].mul_(1.5)


def through_numpy(model: Any, draw: random.Random) -> None:
    _parameter(model, draw)[2].detach().numpy()[...] *= 1.5


def another_parameter(model: Any, draw: random.Random) -> None:
    module, name, parameter = _parameter(model, draw)
    setattr(module, name, torch.nn.Parameter(parameter.detach() * 1.5))


def state_dict(model: Any, draw: random.Random) -> None:
    name = _one_of(draw, model.state_dict())
    model.load_state_dict({name: torch.randn(model.state_dict()[name].shape)}, strict=False)


def optimizer_step(model: Any, draw: random.Random) -> None:
    optimizer = draw.choice([torch.optim.SGD, torch.optim.AdamW])(model.parameters(), lr=0.1)
    ids = torch.arange(3, 11)[None]
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def other_dtype(model: Any, draw: random.Random) -> None:
    draw.choice([model, *_layers(model)]).to(draw.choice([torch.bfloat16, torch.float16]))


def rounded(model: Any, draw: random.Random) -> None:
    """By another dtype and back."""
    model.to(torch.bfloat16).to(torch.float32)


# Buffers

def inverse_frequencies(model: Any, draw: random.Random) -> None:
    rotary = _one_of(draw, [m for m in model.modules() if any(k.endswith("inv_freq") for k in m._buffers)])
    for name, buffer in rotary._buffers.items():
        if draw.random() < 0.5:
            buffer.mul_(1.1)
        else:
            rotary.register_buffer(name, buffer * 1.1, persistent=False)


# Attributes and modules

def attribute(model: Any, draw: random.Random) -> None:
    """A number of a module's own, as what others know it by."""
    module, name, value = _one_of(draw, [
        (m, n, v) for m in model.modules() for n, v in vars(m).items()
        if isinstance(v, (int, float)) and n != "training" and not n.startswith("_")])
    setattr(module, name, not value if isinstance(value, bool) else value * 2 + 1)


def epsilon(model: Any, draw: random.Random) -> None:
    norm = _norm(model, draw)
    norm.__dict__["eps" if "eps" in vars(norm) else "variance_epsilon"] = 0.3


def attention_scaling(model: Any, draw: random.Random) -> None:
    rotary = _one_of(draw, [m for m in model.modules() if "attention_scaling" in vars(m)])
    rotary.attention_scaling *= 1.3


def activation(model: Any, draw: random.Random) -> None:
    parent, name = _one_of(draw, [(m, n) for m in model.modules() for n in m._modules if n in ("act", "act_fn")])
    setattr(parent, name, draw.choice([torch.nn.ReLU(), torch.nn.LeakyReLU(0.3), torch.nn.Hardswish()]))


def activation_option(model: Any, draw: random.Random) -> None:
    parent, name = _one_of(draw, [(m, n) for m in model.modules() for n in m._modules if n in ("act", "act_fn")])
    setattr(parent, name, torch.nn.LeakyReLU(draw.choice([0.1, 0.5])))


def layers_swapped(model: Any, draw: random.Random) -> None:
    layers = _layers(model)
    layers[0], layers[1] = layers[1], layers[0]


def same_layer_twice(model: Any, draw: random.Random) -> None:
    layers = _layers(model)
    layers[1] = layers[0]


def linear_taken_away(model: Any, draw: random.Random) -> None:
    parent, name = _one_of(draw, [(m, n) for m in _layers(model).modules() for n, c in m._modules.items()
                                  if "Norm" in type(c).__name__])
    setattr(parent, name, torch.nn.Identity())


def bias_added(model: Any, draw: random.Random) -> None:
    linear = _one_of(draw, [m for m in _layers(model).modules() if type(m) is torch.nn.Linear and m.bias is None])
    linear.bias = torch.nn.Parameter(torch.randn(linear.out_features))


def other_class(model: Any, draw: random.Random) -> None:
    """A module's class, and nothing else."""
    linear = _linear(model, draw)
    linear.__class__ = Doubled


class Doubled(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def tied(model: Any, draw: random.Random) -> None:
    model.get_input_embeddings().weight = model.get_output_embeddings().weight


# The configuration after loading

def config_in_place(model: Any, draw: random.Random) -> None:
    """Changes a built model's configuration; most fields were read when it was made, some are read in each forward."""
    name, value = _one_of(draw, [(n, v) for n, v in vars(model.config).items()
                                 if isinstance(v, (int, float)) and not n.startswith("_")])
    setattr(model.config, name, not value if isinstance(value, bool) else value + 1)


# Parametrizations

class Scaled(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x


def parametrized(model: Any, draw: random.Random) -> None:
    parametrize.register_parametrization(_linear(model, draw), "weight", Scaled(draw.choice([0.5, 2.0])))


def weight_norm(model: Any, draw: random.Random) -> None:
    linear = parametrizations.weight_norm(_linear(model, draw))
    linear.parametrizations.weight.original0.data.mul_(1.5)


def older_weight_norm(model: Any, draw: random.Random) -> None:
    linear = torch.nn.utils.weight_norm(_linear(model, draw))
    linear.weight_g.data.mul_(1.5)


def pruned(model: Any, draw: random.Random) -> None:
    prune.random_unstructured(_linear(model, draw), "weight", amount=0.5)


# Functions

def _halved(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return 0.5 * forward(*args, **kwargs)


def forward_partial(model: Any, draw: random.Random) -> None:
    linear = _linear(model, draw)
    linear.forward = functools.partial(_halved, linear.forward)


def forward_lambda(model: Any, draw: random.Random) -> None:
    linear = _linear(model, draw)
    forward = linear.forward
    linear.forward = lambda x: 0.5 * forward(x)


def method_of_class(model: Any, draw: random.Random) -> Undo:
    """All modules of a class compute otherwise, and none of them says so."""
    cls = type(_norm(model, draw))
    forward = cls.forward

    def scaled(self: Any, x: torch.Tensor) -> Any:
        return 0.7 * forward(self, x)

    cls.forward = scaled
    return lambda: setattr(cls, "forward", forward)


def function_of_module(model: Any, draw: random.Random) -> Undo:
    """As kernels' packages put their functions in place of an architecture's."""
    module = sys.modules[type(_layers(model)[0]).__module__]
    rotate = module.rotate_half
    module.rotate_half = _other_half
    return lambda: setattr(module, "rotate_half", rotate)


def _other_half(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x[..., x.shape[-1] // 2:], x[..., :x.shape[-1] // 2]), dim=-1)


def function_of_torch(model: Any, draw: random.Random) -> Undo:
    linear = torch.nn.functional.linear
    torch.nn.functional.linear = _other_linear
    return lambda: setattr(torch.nn.functional, "linear", linear)


def _other_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return 0.9 * (x @ weight.T) + (0 if bias is None else bias)


# Hooks, modes

def hook(model: Any, draw: random.Random) -> None:
    _one_of(draw, _layers(model).modules()).register_forward_hook(
        lambda module, args, output: 1.5 * output if torch.is_tensor(output) else output)


def pre_hook(model: Any, draw: random.Random) -> None:
    _linear(model, draw).register_forward_pre_hook(lambda module, args: (1.5 * args[0],))


def embedding_hook(model: Any, draw: random.Random) -> None:
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: 1.5 * output)


def global_hook(model: Any, draw: random.Random) -> Undo:
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: 1.1 * output if type(module) is torch.nn.Linear else None)
    return handle.remove


def autocast(model: Any, draw: random.Random) -> Undo:
    context = torch.autocast("cpu", dtype=torch.bfloat16)
    context.__enter__()
    return lambda: context.__exit__(None, None, None)


def matmul_precision(model: Any, draw: random.Random) -> Undo:
    """By torch's older or newer way, of which the older one refuses to speak after the newer."""
    if draw.random() < 0.5:
        torch.set_float32_matmul_precision("medium")
    else:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"

    def undo() -> None:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")

    return undo


def dropout(model: Any, draw: random.Random) -> None:
    attention = _one_of(draw, [m for m in model.modules() if "attention_dropout" in vars(m)])
    attention.attention_dropout = 0.5
    model.train()


# Adapters

def _lora(model: Any, draw: random.Random, name: str) -> Any:
    from peft import LoraConfig, get_peft_model
    names = sorted({n.rpartition(".")[2] for n, m in _layers(model).named_modules() if type(m) is torch.nn.Linear})
    config = LoraConfig(r=draw.choice([2, 4]), lora_alpha=draw.choice([8, 16]), use_rslora=draw.random() < 0.3,
                        use_dora=draw.random() < 0.2, target_modules=draw.sample(names, min(2, len(names))),
                        init_lora_weights=False)
    torch.manual_seed(draw.randrange(1000))
    return get_peft_model(model, config, adapter_name=name), config


def adapter(model: Any, draw: random.Random) -> None:
    _lora(model, draw, "a")


def adapter_scaled(model: Any, draw: random.Random) -> None:
    peft, _ = _lora(model, draw, "a")
    layer = _one_of(draw, [m for m in peft.modules() if hasattr(m, "scaling") and isinstance(m.scaling, dict)])
    layer.scaling["a"] *= 2


def adapter_merged(model: Any, draw: random.Random) -> None:
    _lora(model, draw, "a")[0].merge_adapter()


def adapter_unloaded(model: Any, draw: random.Random) -> None:
    _lora(model, draw, "a")[0].merge_and_unload()


def adapters_own(model: Any, draw: random.Random) -> None:
    """transformers' own way."""
    from peft import LoraConfig
    names = sorted({n.rpartition(".")[2] for n, m in _layers(model).named_modules() if type(m) is torch.nn.Linear})
    torch.manual_seed(draw.randrange(1000))
    config = LoraConfig(r=2, target_modules=names[:2], init_lora_weights=False)
    try:
        model.add_adapter(config, adapter_name="own")
    except ValueError as error:  # transformers asks for a PEFT that is not out yet
        raise Inapplicable from error
    model.eval()


# Code from outside

def remote_code(model: Any, draw: random.Random) -> None:
    """A class of one name, whose source says another number."""
    _linear(model, draw).__class__ = _written(draw.choice([0.5, 0.7, 2.0]))


def _written(factor: float) -> type:
    folder = pathlib.Path(tempfile.mkdtemp())
    file = folder / "modeling_remote.py"
    file.write_text(f"import torch\nFACTOR = {factor}\n\n\nclass RemoteLinear(torch.nn.Linear):\n"
                    "    def forward(self, x):\n        return FACTOR * super().forward(x)\n")
    spec = importlib.util.spec_from_file_location("modeling_remote", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["modeling_remote"] = module
    spec.loader.exec_module(module)
    return module.RemoteLinear


OPERATIONS: list[Operation] = [
    data_factor, data_copy, data_other, no_grad_add, inference_mode, through_numpy, another_parameter, state_dict,
    optimizer_step, other_dtype, rounded, inverse_frequencies, attribute, epsilon, attention_scaling, activation,
    activation_option, layers_swapped, same_layer_twice, linear_taken_away, bias_added, other_class, tied,
    config_in_place, parametrized, weight_norm, older_weight_norm, pruned, forward_partial, forward_lambda,
    method_of_class, function_of_module, function_of_torch, hook, pre_hook, embedding_hook, global_hook, autocast,
    matmul_precision, dropout, adapter, adapter_scaled, adapter_merged, adapter_unloaded, adapters_own, remote_code]
