# SPDX-License-Identifier: Apache-2.0
"""What there is in a torch model: modules with their attributes, tensors by name, for an identity's document.

Modules that lie in lists, dicts or attributes are walked like the others, as are tensors that are nobody's parameter or
buffer. Tensor subclasses are flattened into the tensors that they are made of, or named in `unknown`. Threads: one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from .identity import Walk

# What torch keeps in each module for itself. Its dicts of modules, tensors and hooks are looked at one by one.
OF_TORCH = frozenset(vars(torch.nn.Module())) | {"_compiled_call_impl"}
# Attributes of modules that do not change keys or values, each with the reason.
HARMLESS_ATTRIBUTES = {
    "_is_hf_initialized": "a mark of loading",
    "_weight_conversions": "of loading",
    "_use_kernels": "whether kernels were put in; each is seen where it was put",
    "_keys_to_ignore_on_load_missing": "of loading",
    "_keys_to_ignore_on_load_unexpected": "of loading",
    "_keys_to_ignore_on_save": "of saving",
    "_keep_in_fp32_modules": "of loading; each tensor's dtype is in the identity",
    "_keep_in_fp32_modules_strict": "the same",
    "_no_split_modules": "where layers may be placed",
    "_skip_keys_device_placement": "the same",
    "hf_device_map": "the same",
    "_tp_plan": "how it would be divided; divided tensors are refused",
    "_ep_plan": "the same",
    "_pp_plan": "the same",
    "_fsdp_plan": "the same",
    "all_tied_weights_keys": "of loading; tied tensors have equal sums",
    "name_or_path": "where the files lay",
    "warnings_issued": "what was said already",
    "loss_type": "of training",
    "generation_config": "what is generated from logits",
    "generate": "how the model is called; what arrives at its forward is what counts",
    "gradient_checkpointing": "of training: what is kept for the backward pass",
    "_gradient_checkpointing_func": "the same",
}
# Namespaces of operators that torch itself registers.
_OPERATORS_OF_TORCH = ("aten", "prim", "prims", "quantized", "c10d")
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class TorchTypes(Walk):
    """A walk that knows torch's names of things. trusted may name namespaces of operators, too: what `torch.ops` has there
    is code that Python cannot read, and is known by its name."""

    def leaf(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.device):
            return "a device"  # where it is computed: the same but for rounding
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return str(value).removeprefix("torch.")  # as configurations that were saved have it
        if isinstance(value, torch.Size):
            return list(value)
        if isinstance(value, (torch.Stream, torch.Event)):
            return "a stream"  # when it is computed
        if isinstance(value, (torch._ops.OpOverloadPacket, torch._ops.OpOverload)):
            return self._operator(str(value), path)
        return NotImplemented

    def _operator(self, name: str, path: str) -> Any:
        """name: `namespace.name`, with an overload's behind it."""
        namespace = name.partition(".")[0]
        if namespace in _OPERATORS_OF_TORCH or namespace in self._trusted:
            return {"operator": name}
        return self.refuse(path, f"an operator torch.ops.{name}, whose code cannot be read")


class TorchWalk(TorchTypes):
    """modules: the root, all below it, and what is hidden in attributes; names: of each, for a reader; entries: what an
    identity's document says, by name; tensors: plain ones, by name; known_hooks: keys of hooks that known packages
    registered, which are in the document. transparent: ids of modules whose hooks do not count. scratch: whether what a
    plain tensor in a module's attribute of this path has is nobody's weights but working memory; None: none is."""

    def __init__(self, root: torch.nn.Module, trusted: Collection[str] = (), opaque: Collection[str] = (),
                 harmless: Collection[str] = (), transparent: Collection[int] = (),
                 scratch: Callable[[str], bool] | None = None) -> None:
        super().__init__(trusted, opaque)
        self._scratch = scratch
        self.known_hooks: set[int] = set()
        self._transparent = transparent
        self.modules: list[torch.nn.Module] = []
        self.names: list[str] = []
        self.entries: dict[str, Any] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self._waiting = [(name, module) for name, module in root.named_modules()]
        self._names = {id(module): name for name, module in self._waiting}
        self._left_out = OF_TORCH | HARMLESS_ATTRIBUTES.keys() | set(harmless)
        while self._waiting:
            name, module = self._waiting.pop(0)
            self.modules.append(module)
            self.names.append(name or "the model")
            self.entries[name] = self._entry(module, name)
        self.entries["torch.nn.functional"] = self.functions_of(torch.nn.functional, "the model")

    def _entry(self, module: torch.nn.Module, name: str) -> dict[str, Any]:
        path = name or "the model"
        dot = f"{name}." if name else ""
        for kind in (module._parameters, module._buffers):
            for key, tensor in kind.items():
                if tensor is not None:
                    self._tensor(tensor, f"{dot}{key}")
        attributes = {key: self.of(value, f"{path}'s {key}") for key, value in vars(module).items()
                      if key not in self._left_out}
        parts = {key: None if part is None else self._names.get(id(part)) for key, part in module._modules.items()}
        return {"class": self.name_of_class(type(module), path), "training": module.training, "attributes": attributes,
                "parts": parts, "hooks": self._hooks(module, path)}

    def _hooks(self, module: torch.nn.Module, path: str) -> list[Any]:
        """Those of known packages; what others do cannot be known, and Snapshot.hooked says so."""
        if id(module) in self._transparent:
            return []
        known = [(key, hook) for hooks in (module._forward_hooks, module._forward_pre_hooks)
                 for key, hook in hooks.items() if self.is_known_code(hook)]
        self.known_hooks.update(key for key, _ in known)
        return [self.of(hook, f"a hook of {path}") for _, hook in known]

    def leaf(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.nn.Module):
            for name, part in value.named_modules(prefix=path):
                if id(part) not in self._names:
                    self._names[id(part)] = name
                    self._waiting.append((name, part))
            return {"module": self._names[id(value)]}
        if isinstance(value, torch.Tensor):
            if self._scratch is not None and self._scratch(path):
                return {"tensor": "working memory"}
            self._tensor(value, path)
            return {"tensor": path}
        return super().leaf(value, path)

    def _tensor(self, tensor: torch.Tensor, name: str) -> None:
        """Notes it, or the tensors that it is made of."""
        kind = type(tensor)
        if tensor.device.type == "meta" or kind.__name__ == "FakeTensor":
            self._odd(name, "a tensor without memory of its own (meta, offloaded)")
        elif kind.__name__ == "DTensor" or hasattr(tensor, "device_mesh"):
            self._odd(name, "a distributed tensor (DTensor), of which this process has a part")
        elif kind not in PLAIN_TENSORS and hasattr(tensor, "__tensor_flatten__"):
            names, context = tensor.__tensor_flatten__()
            self.entries[f"tensor {name}"] = [self.name_of_class(kind, name), self.of(context, f"{name}'s context")]
            for inner in names:
                self._tensor(getattr(tensor, inner), f"{name}.{inner}")
        elif tensor.layout is not torch.strided or tensor.is_quantized:
            self._odd(name, f"a tensor of layout {tensor.layout} and dtype {tensor.dtype}")
        else:
            if kind not in PLAIN_TENSORS:
                self.watched.append(vars(tensor))
                self.entries[f"tensor {name}"] = [self.name_of_class(kind, name), {
                    key: self.of(value, f"{name}'s {key}") for key, value in vars(tensor).items()}]
            self.tensors[name] = tensor

    def _odd(self, name: str, what: str) -> None:
        self.entries[f"tensor {name}"] = self.refuse(name, what)
