# SPDX-License-Identifier: Apache-2.0
"""Whether a torch model is still what a walk found, asked before each generate.

Everything is compared at C's speed: dicts' values as tuples, of which identical objects cost a few ns each; tensors'
versions and addresses; and a sample of each tensor's bytes (torch_samples). Parameters and buffers that a module no
longer has are not kept alive by this; modules that another one took the place of are, until the next walk. Threads:
one.
"""

from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from .torch_samples import Reading, Samples
from .torch_walk import OF_TORCH, TorchWalk

_RANDOM = ("drop", "jitter", "noise")  # in names of attributes that make a module in training mode random
# Values of these types that are equal are the same for us; of others it has to be the same object.
_BY_VALUE = (bool, int, float, str, bytes, type(None), type, torch.dtype, torch.device, torch.nn.Module,
             types.FunctionType, types.BuiltinFunctionType, types.ModuleType)

_version, _forward, _chain = operator.attrgetter("_version"), operator.attrgetter("forward"), itertools.chain.from_iterable


class Snapshot:
    """What a walk has just found. transparent: ids of modules whose hooks do not change keys or values.

    traces: of each tensor, by name: what says that its sum still holds. devices: kinds that tensors lie on."""

    def __init__(self, walk: TorchWalk, transparent: Collection[int]) -> None:
        self._modules, self._classes = walk.modules, list({type(module): None for module in walk.modules})
        self._random, self._known_hooks = _random(walk), walk.known_hooks
        self._dicts = [vars(module) for module in walk.modules]
        compound = [(d, key) for d in self._dicts for key, value in d.items()
                    if key not in OF_TORCH and not isinstance(value, _BY_VALUE)]
        self._dicts += [module._modules for module in walk.modules if module._modules]
        self._named = _distinct(x for x in walk.watched if isinstance(x, dict))
        compound += [(d, key) for d in self._named for key, value in d.items() if not isinstance(value, _BY_VALUE)]
        compound += walk.bound
        self._bound = [module[name] for module, name in walk.bound]  # kept alive, so that their ids stay theirs
        self._owners, self._keys = [d for d, _ in compound], [key for _, key in compound]
        self._lists = _distinct(x for x in walk.watched if not isinstance(x, dict))
        self._hooks = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks,
                       *(hooks for module in walk.modules if id(module) not in transparent
                         for hooks in (module._forward_hooks, module._forward_pre_hooks))]
        self._hook_places = ["all modules", "all modules", *(
            name for name, module in zip(walk.names, walk.modules) if id(module) not in transparent for _ in range(2))]
        kinds = [kind for module in walk.modules for kind in (module._parameters, module._buffers)]
        self._tensor_dicts, self._no_tensors = [k for k in kinds if k], [k for k in kinds if not k]
        held = list(_chain(map(dict.values, self._tensor_dicts)))
        plain, in_dicts = set(map(id, walk.tensors.values())), set(map(id, held))
        self._plain = [id(tensor) in plain for tensor in held]
        self._others = [tensor for tensor in walk.tensors.values() if id(tensor) not in in_dicts]
        tensors = self._tensors(held)
        self._versioned = [not tensor.is_inference() for tensor in tensors]
        self.devices = {tensor.device.type for tensor in tensors} or {"cpu"}
        self._dicts += self._named
        self._values, self._names = [tuple(d.values()) for d in self._dicts], list(map(tuple, self._named))
        self._state, self._memory = self._now(), self._memory_of(tensors)
        self._samples = Samples(tensors)
        versions = iter(self._memory[1])
        trace = {id(t): (t.data_ptr(), next(versions) if versioned else None, t.dtype, t.shape, t.stride(), sample)
                 for t, versioned, sample in zip(tensors, self._versioned, self._samples.of)}
        self.traces = {name: trace[id(tensor)] for name, tensor in walk.tensors.items()}

    def holds(self) -> bool:
        """Whether all is as it was. Costs 0.2 to 0.4 us a module and tensor; on a GPU one copy to the host besides."""
        reading = self.begin()
        return reading is not None and reading.hold()

    def begin(self) -> Reading | None:
        """What is left of `holds` to wait for, on a GPU; None: it does not hold."""
        try:
            if not self._shape_holds():
                return None
            tensors = self._tensors(list(_chain(map(dict.values, self._tensor_dicts))))
            # Memory is read only where the tensors still lie where they lay.
            return self._samples.begin() if self._memory_of(tensors) == self._memory else None
        except Exception:  # values that are not identical are compared, and each type raises what it likes
            return None

    def _shape_holds(self) -> bool:
        """Whether all outside tensors' memory is as it was. One tuple is made at a time, or the garbage collector would
        run each time."""
        return (self._state == self._now() and all(map(operator.eq, map(tuple, map(dict.values, self._dicts)),
                                                       self._values))
                and all(map(operator.eq, map(tuple, self._named), self._names)))

    def _now(self) -> list[Any]:
        return [list(map(id, _chain(map(dict.values, self._tensor_dicts)))), list(map(len, self._no_tensors)),
                list(map(type, self._modules)), list(map(_forward, self._classes)), list(_chain(self._hooks)),
                list(map(id, map(dict.get, self._owners, self._keys))), list(map(id, _chain(self._lists))),
                list(map(len, self._lists))]

    def _memory_of(self, tensors: list[torch.Tensor]) -> tuple[list[int], list[int]]:
        return (list(map(torch.Tensor.data_ptr, tensors)),
                list(map(_version, itertools.compress(tensors, self._versioned))))

    def _tensors(self, held: list[Any]) -> list[torch.Tensor]:
        return [*itertools.compress(held, self._plain), *self._others]

    def hooked(self, own: Collection[int]) -> str | None:
        """Where there is a hook that is not one of `own`, as a reason to read."""
        for place, hooks in zip(self._hook_places, self._hooks):
            if foreign := [hook for key, hook in hooks.items() if key not in own and key not in self._known_hooks]:
                return (f"a forward hook ({foreign[0]!r}) is on {place}, and what it does is not known; remove it, or "
                        "name what the model is with it: digest=")
        return None

    def random(self) -> str | None:
        """Which module draws random numbers, being in training mode."""
        return next((f"{name} has {key} {value} and is in training mode, so each pass gives other keys; model.eval()"
                     for module, name, key, value in self._random if module.training), None)


def _distinct(things: Iterable[Any]) -> list[Any]:
    return list({id(thing): thing for thing in things}.values())


def _random(walk: TorchWalk) -> list[tuple[torch.nn.Module, str, str, Any]]:
    """(module, its name, attribute, value) that are random in training mode."""
    found = []
    for name, module in zip(walk.names, walk.modules):
        probabilities = {key: value for key, value in vars(module).items() if isinstance(value, float) and value > 0
                         and (any(part in key.lower() for part in _RANDOM)
                              or (key == "p" and "drop" in type(module).__name__.lower()))}
        found += [(module, name, key, value) for key, value in probabilities.items()]
    return found
