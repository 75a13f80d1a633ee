# SPDX-License-Identifier: Apache-2.0
"""The rule of identities: which document of a loaded model two processes must agree on before they share pages.

    walk = Walk()
    digest = digest_of({"engine": "numpy", "settings": walk.of(settings, "settings"), "tensors": {...}})

An identity is the SHA-256 of a document in JSON with sorted keys, whose first entry is the rule's name. `Walk` turns
values into what such a document may hold: numbers exactly, dtypes and enums by name, sets sorted, classes and functions
by name, objects by class and attributes. Code from outside the packages that are known (TRUSTED, and those that the
caller names) is there by its bytecode as well. What has no such form is named in `unknown`, or raises Unidentifiable.
docs/identity.md has the table of what is in a model's identity. Threads: a Walk is of one thread.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import hashlib
import json
import os
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

RULE = "kvstrata identity 2"
WAY_OUT = "name what it is yourself: digest="

# Packages whose classes and functions are known by name and version.
TRUSTED = ("torch", "transformers", "peft", "accelerate")
# Those whose version says nothing of what is computed but for rounding; Python's own modules are so, too.
_VERSIONLESS = {"torch", "numpy", "huggingface_hub", "safetensors", "tokenizers", "packaging", "typing_extensions",
                *sys.stdlib_module_names} - {"__main__"}

# Fields of a model's configuration that do not change keys or values, each with the reason. Whatever is not here is part
# of the identity. tests/identity/test_harmless.py has a test of each.
HARMLESS = {
    "_name_or_path": "where the files lay; the tensors' own bytes are in the identity",
    "_commit_hash": "the same of the hub",
    "transformers_version": "of the process that saved it; that of this process is in the identity",
    "architectures": "names of classes; the classes that were made are in the identity",
    "_attn_implementation": "which kernel attends: they differ by rounding",
    "_attn_implementation_internal": "the same",
    "use_cache": "whether keys are kept, not what they are",
    "output_attentions": "what a call returns",
    "_output_attentions": "what a call returns",
    "output_hidden_states": "what a call returns",
    "return_dict": "what a call returns",
    "id2label": "names of classes of a classifier",
    "label2id": "names of classes of a classifier",
    "problem_type": "the loss of a classifier",
    "initializer_range": "how weights begin before they are loaded",
    "bos_token_id": "which ids generate() adds; the ids themselves are what prefixes are found by",
    "eos_token_id": "where generate() ends",
    "_post_init_done": "a mark of transformers",
}

_PLAIN = (type(None), bool, int, float, str)
# What a class has beside its code: caches of pickle's and abc's among it.
_NOT_CODE = frozenset(("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__",
                       "__static_attributes__", "__slotnames__", "_abc_impl", "__annotate__", "__annotations_cache__"))
_CODE_PARTS = ("co_code", "co_names", "co_varnames", "co_freevars", "co_argcount", "co_kwonlyargcount", "co_flags")


class Unidentifiable(ValueError):
    """The identity of something cannot be known; the message names it and the way out."""


def digest_of(document: Mapping[str, Any]) -> str:
    """64 hex digits. document: of what JSON has; Walk.of makes the rest fit for it."""
    return hashlib.sha256(canonical_json({"rule": RULE, **document}).encode()).hexdigest()


def canonical_json(value: Any) -> str:
    """Keys sorted, no spaces; floats as repr writes them, which is exact."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def without_harmless(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's fields less HARMLESS, of its parts too, as config.json has them."""
    return {name: without_harmless(value) if isinstance(value, Mapping) else value
            for name, value in fields.items() if name not in HARMLESS}


def is_config(value: Any) -> bool:
    """Whether it is a configuration of transformers' kind; transformers need not be there."""
    return any(c.__name__ in ("PreTrainedConfig", "PretrainedConfig") for c in type(value).__mro__)


class Walk:
    """Turns values into JSON, and notes what it met.

    trusted: more packages like TRUSTED. opaque: packages and modules whose objects are written by their class alone, because what
    they say is elsewhere in the document. Who has types of its own overrides `leaf`.

    watched: mutable things that were met (dicts, lists, sets), to compare later; bound: pairs of a module's dict and a
    name in it that code from outside names. unknown: "path is ..., and why" for what has no form; of() raises instead
    where strict. versions: of packages whose names were used.
    """

    def __init__(self, trusted: Collection[str] = (), opaque: Collection[str] = (), strict: bool = False
                 ) -> None:
        self.watched: list[Any] = []
        self.bound: list[tuple[dict[str, Any], str]] = []
        self.unknown: list[str] = []
        self.versions: dict[str, str] = {}
        self._trusted = {*TRUSTED, *_VERSIONLESS, *trusted}
        self._opaque, self._strict = set(opaque), strict
        self._classes: dict[type, Any] = {}
        self._kept: dict[int, Any] = {}   # by id: what an object became
        self._alive: list[Any] = []       # so that ids stay theirs
        self._open: list[int] = []        # objects that are being walked

    def of(self, value: Any, path: str) -> Any:
        """JSON of a value that lies at `path`, which errors name. Unidentifiable where strict."""
        if type(value) in _PLAIN:
            return value
        if (own := self.leaf(value, path)) is not NotImplemented:
            return own
        if isinstance(value, enum.Enum):
            return [self.name_of_class(type(value), path), value.name]
        if isinstance(value, type):
            return {"class": self.name_of_class(value, path)}
        if isinstance(value, types.ModuleType):
            return {"import": value.__name__}
        if isinstance(value, (bytes, bytearray)):
            return {"bytes": value.hex()}
        if type(value) in (dict, list, tuple, types.MappingProxyType) or isinstance(value, (set, frozenset)):
            return self._once(value, path, self._container)
        if callable(value) and (of_function := self._callable(value, path)) is not NotImplemented:
            return of_function
        return self._once(value, path, self._object)

    def leaf(self, value: Any, path: str) -> Any:
        """JSON of a value of the engine's own types; NotImplemented for others."""
        return NotImplemented

    def refuse(self, path: str, what: str) -> Any:
        """Notes, or raises, that what lies at `path` cannot be known."""
        reason = f"{path} is {what}"
        if self._strict:
            raise Unidentifiable(f"{reason}; {WAY_OUT}")
        self.unknown.append(reason)
        return {"unknown": what}

    def _once(self, value: Any, path: str, make: Callable[[Any, str], Any]) -> Any:
        """What it became before; a thing inside itself is how far up it lies."""
        if id(value) in self._open:
            return {"up": len(self._open) - self._open.index(id(value))}
        if id(value) not in self._kept:
            self._open.append(id(value))
            made = make(value, path)
            self._open.pop()
            self._alive.append(value)
            self._kept[id(value)] = made
        return self._kept[id(value)]

    def _container(self, value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            if type(value) is dict:
                self.watched.append(value)
            if all(type(key) is str for key in value):
                return {key: self.of(item, f"{path}[{key!r}]") for key, item in value.items()}
            pairs = [[self.of(key, f"a key of {path}"), self.of(item, f"{path}[{key!r}]")]
                     for key, item in value.items()]
            return {"pairs": sorted(pairs, key=canonical_json)}
        if not isinstance(value, (tuple, frozenset)):
            self.watched.append(value)
        items = [self.of(item, f"{path}[{i}]") for i, item in enumerate(value)]
        return {"set": sorted(items, key=canonical_json)} if isinstance(value, (set, frozenset)) else items

    def _object(self, value: Any, path: str) -> Any:
        """By class and attributes, as pickle would keep it; a sum of that, since many modules hold the same object."""
        if isinstance(value, weakref.ref):
            return {"weak": self.of(value(), path)}
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        name = self.name_of_class(type(value), path)
        module = type(value).__module__
        if module in self._opaque or module.partition(".")[0] in self._opaque:
            return {"object": name}
        if is_config(value):
            fields = {**self._fields(value, path, HARMLESS), "model_type": getattr(value, "model_type", None)}
            return {"config": name, "sum": self._sum(fields)}
        if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            return {"numpy": [str(value.dtype), list(value.shape)], "sum": hashlib.sha256(value.tobytes()).hexdigest()}
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            state = value.__reduce_ex__(2) if reduce is None else reduce(value)
        except Exception as error:  # each type raises what it likes
            return self.refuse(path, f"a {name}, whose content cannot be read ({error})")
        if isinstance(state, str):
            return {"object": name, "global": state}
        parts = [self.of(part, path) for part in state[:2]]
        if len(state) > 2 and isinstance(state[2], dict) and state[2] is not getattr(value, "__dict__", None):
            parts.append(self.of(state[2], path))
        if hasattr(value, "__dict__"):
            parts.append(self._fields(value, path, ()))
        elif len(state) > 2 and not isinstance(state[2], dict):
            parts.append(self.of(state[2], path))
        if isinstance(value, (list, deque)):
            self.watched.append(value)
            parts.append([self.of(item, f"{path}[{i}]") for i, item in enumerate(value)])
        if isinstance(value, dict):
            self.watched.append(value)
            parts.append(self._container(types.MappingProxyType(value), path))
        return {"object": name, "sum": self._sum(parts)}

    def _fields(self, value: Any, path: str, left_out: Collection[str]) -> Any:
        fields = vars(value)
        self.watched.append(fields)
        return {key: self.of(item, f"{path}.{key}") for key, item in fields.items() if key not in left_out}

    @staticmethod
    def _sum(value: Any) -> str:
        return hashlib.sha256(canonical_json(value).encode()).hexdigest()

    # Code

    def _callable(self, value: Any, path: str) -> Any:
        """Identity of functions of all kinds; NotImplemented for an object that can be called."""
        if (compiled := getattr(value, "_torchdynamo_orig_callable", None)) is not None:
            return self.of(compiled, path)  # torch.compile changes how, not what
        if isinstance(value, functools.partial):
            return {"partial": [self.of(part, path) for part in (value.func, value.args, value.keywords)]}
        if isinstance(value, types.MethodType):
            return {"method": [self.of(value.__func__, path), self.of(value.__self__, f"the owner of {path}")]}
        if isinstance(value, types.FunctionType):
            return self._once(value, path, self._function)
        if isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType,
                              types.MethodDescriptorType)):
            owner = getattr(value, "__self__", None)
            named = owner is None or isinstance(owner, (type, types.ModuleType))
            return {"builtin": [getattr(value, "__module__", None) or getattr(owner, "__name__", None),
                                value.__qualname__], **({} if named else {"self": self.of(owner, path)})}
        if isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):
            return self.of(wrapped, path)  # functools.cache
        return NotImplemented

    def _function(self, value: types.FunctionType, path: str) -> Any:
        module = value.__globals__.get("__name__", "?")  # where it was written, whatever decorators say
        name = f"{module}.{value.__code__.co_qualname}"
        if self._known(module):
            if "<l" not in name:
                return {"function": name}
            # A lambda of a known package: there may be several of one name in one function.
            return {"function": name, "code": self._sum(_code(value.__code__)), "cells": self._cells(value, path),
                    "defaults": [self.of(value.__defaults__, path), self.of(value.__kwdefaults__, path)]}
        if "<lambda>" in name or "<locals>" in name or {*value.__code__.co_freevars} - {"__class__"}:
            return self.refuse(path, f"{name}, a function without a name of its own, so what it does is not known")
        return {"function": name, "code": self._function_code(value, path)}

    def _cells(self, value: types.FunctionType, path: str) -> list[Any]:
        """What a function keeps of where it was made."""
        contents = []
        for cell in value.__closure__ or ():
            try:
                contents.append(self.of(cell.cell_contents, path))
            except ValueError:
                contents.append(None)  # empty
        return contents

    def _function_code(self, value: types.FunctionType, path: str) -> Any:
        """The bytecode, with what it names of its own module: functions, classes, constants."""
        package = value.__globals__.get("__name__", "?").partition(".")[0]
        used = self._named_in(value.__globals__, _names(value.__code__), package, path)
        return self._sum([_code(value.__code__), used, self.of(value.__defaults__, path),
                          self.of(value.__kwdefaults__, path)])

    def _named_in(self, module: dict[str, Any], names: set[str], package: str, path: str) -> dict[str, Any]:
        """What code of `package`, in which `names` stand, has of a module by these names."""
        found = sorted(names & module.keys())
        self.bound += [(module, name) for name in found]
        return {name: self._used(module[name], names - {name}, package, f"{path}, which uses {name}") for name in found}

    def _used(self, value: Any, names: set[str], package: str, path: str) -> Any:
        """What code from outside names: what is another package's by name and version, if it has one. A tensor or an
        array is of its class's package, and has a content of its own."""
        if (own := self.leaf(value, path)) is not NotImplemented:
            return own
        if hasattr(value, "tobytes"):
            return self.of(value, path)
        module = isinstance(value, types.ModuleType)
        home = value.__name__ if module else getattr(value, "__module__", None)
        home = home.partition(".")[0] if isinstance(home, str) else "?"
        version = getattr(sys.modules.get(home), "__version__", None)
        if version is not None and home != package:
            return [home, str(version), value.__name__ if module else
                    getattr(value, "__qualname__", type(value).__qualname__)]
        if module and not self._known(home):
            return {"import": value.__name__, "names": self._named_in(vars(value), names, package, path)}
        return self.of(value, path)

    def name_of_class(self, cls: type, path: str) -> Any:
        """Its name; with the code of its methods where it is from outside, with its bases where it has no name of its
        own in its module."""
        if cls not in self._classes:
            self._classes[cls] = None  # while it is made: a class that is among its own attributes
            self._classes[cls] = self._class(cls, path)
        return self._classes[cls]

    def _class(self, cls: type, path: str) -> Any:
        name = f"{cls.__module__}.{cls.__qualname__}"
        if not self._known(cls.__module__):
            if "<locals>" in name:
                return self.refuse(path, f"of the class {name}, which has no name of its own, so what it does is not "
                                   "known")
            return [name, self._class_code(cls, path)]
        named = _resolved(cls.__module__, cls.__qualname__) is cls
        bases = [] if named else [self.name_of_class(base, path) for base in cls.__bases__]
        patches = [self._from_outside(vars(base), f"{base.__qualname__} of {path}") for base in cls.__mro__]
        if cls.__module__.partition(".")[0] in self.versions and cls.__module__ in sys.modules:
            patches.append(self.functions_of(sys.modules[cls.__module__], path))
        return [name, bases, patches] if bases or any(patches) else name

    def functions_of(self, module: types.ModuleType, path: str) -> Any:
        """Functions from outside that somebody put in place of a known package's own, in this module."""
        return self._once(vars(module), f"{module.__name__} of {path}", self._from_outside)

    def _from_outside(self, names: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Functions of others that somebody put in place of a known class's or module's own."""
        if type(names) is dict:
            self.watched.append(names)
        return {name: self._foreign(value, f"{name} of {path}") for name, value in list(names.items())
                if isinstance(value, types.FunctionType) and not self._known(value.__globals__.get("__name__"))}

    def _foreign(self, value: types.FunctionType, path: str) -> Any:
        """One that a package has under its own name is known by that, whatever decorates it there."""
        package = value.__module__.partition(".")[0]
        if (package == value.__globals__.get("__name__", "?").partition(".")[0] and package != "__main__"
                and _resolved(value.__module__, value.__qualname__) is value and value.__closure__):
            return [f"{value.__module__}.{value.__qualname__}", str(getattr(sys.modules[package], "__version__", "?"))]
        return self.of(value, path)

    def _class_code(self, cls: type, path: str) -> Any:
        parts: list[Any] = [self.name_of_class(base, path) for base in cls.__bases__]
        for name, value in sorted(vars(cls).items()):
            if name in _NOT_CODE:
                continue
            for one in ((value.fget, value.fset) if isinstance(value, property) else
                        (value.__func__,) if isinstance(value, (staticmethod, classmethod)) else (value,)):
                parts.append([name, self._method(one, f"{path}: {cls.__qualname__}.{name}")])
        return self._sum(parts)

    def _method(self, value: Any, path: str) -> Any:
        """Identity of what a class from outside has: functions are the class's own, however they were made."""
        if not isinstance(value, types.FunctionType) or self._known(value.__globals__.get("__name__")):
            return self.of(value, path)
        return self._once(value, path, lambda *_: [self._function_code(value, path), self._cells(value, path)])

    def is_known_code(self, value: Any) -> bool:
        """Whether what is called is of a known package."""
        while isinstance(value, (functools.partial, types.MethodType)):
            value = value.func if isinstance(value, functools.partial) else value.__func__
        return self._known(value.__globals__.get("__name__") if isinstance(value, types.FunctionType)
                           else type(value).__module__)

    def _known(self, module: str | None) -> bool:
        package = (module or "?").partition(".")[0]
        if package not in self._trusted:
            return False
        if package not in _VERSIONLESS and package not in self.versions:
            self.versions[package] = str(getattr(sys.modules.get(package), "__version__", "?"))
        return True


def _names(code: types.CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _code(code: types.CodeType) -> list[Any]:
    """Without names of files and numbers of lines, which are not what it does."""
    consts = [_code(const) if isinstance(const, types.CodeType) else
              sorted(map(repr, const)) if isinstance(const, frozenset) else repr(const) for const in code.co_consts]
    parts = [getattr(code, part) for part in _CODE_PARTS]
    return [[part.hex() if isinstance(part, bytes) else part for part in parts], consts]


def _resolved(module: str, qualname: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found
