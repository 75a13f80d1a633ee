# SPDX-License-Identifier: Apache-2.0
"""The identity of a torch model as it is loaded, and whether it is still that.

    loaded = LoadedModel(root, engine="transformers", config=root.config, dtype="bfloat16", transparent=[root, head])
    digest, private = loaded.now()      # before each generate

`now` asks first whether anything changed (some 0.1 us a tensor and module): classes, attributes, hooks and membership
of modules; versions and addresses of tensors, and of each tensor a sample of its bytes, since writes through `.data`
and to inference tensors leave no other trace. Only what changed is summed again. Every n-th time all tensors are summed
anew in the background, and what that finds counts at the next call.

What cannot be known (a lambda for an activation, a hook, an offloaded tensor) makes `private` a sentence that says so:
nobody else may find what is computed now. docs/identity.md has the whole table, and what it costs.

Threads: one at a time; the background's thread is its own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .identity import WAY_OUT, Unidentifiable, digest_of, without_harmless
from .torch_samples import Reading
from .torch_snapshot import Snapshot
from .torch_tree_hash import tensor_sums
from .torch_walk import HARMLESS_ATTRIBUTES, TorchTypes, TorchWalk
from .tree_hash import Stopped

__all__ = ["HARMLESS_ATTRIBUTES", "Identity", "LoadedModel", "Unidentifiable"]

# How many calls of now() lie between two sums of all tensors in the background; 0: there are none.
RESUM_EVERY = int(os.environ.get("KVSTRATA_RESUM_EVERY", "64"))


class Identity(NamedTuple):
    """digest: 64 hex digits. private: None, or why nobody else may find what is computed now, for a user to read."""

    digest: str
    private: str | None


class _Sum(NamedTuple):
    """A tensor's sum, as hex (None: what the given digest has), and what says that it still holds."""

    tensor: weakref.ref[torch.Tensor]
    trace: tuple[Any, ...]
    value: str | None


class LoadedModel:
    """root: the module that is called. engine: its name and version. config: its configuration, of transformers' kind
    or a mapping; fields in HARMLESS are left out. dtype: in which it computes. settings: what else the engine was told
    that changes keys or values (strings, numbers, lists, dicts, dataclasses, enums, dtypes).

    given: an identity that the caller names, for what the model is now. Its tensors are not read then, and what cannot
    be known now, hooks among it, is taken as named. What changes from now on makes another identity, of given and
    changes. transparent: modules whose hooks change no keys or values (the root, its decoder, its head). trusted,
    opaque: as Walk has them. harmless: names of more attributes of modules, as in HARMLESS_ATTRIBUTES. own_hooks:
    `handle.id` of the hooks that the adapter itself registers; may be added to later. scratch: as TorchWalk has it.
    resum_every: None is RESUM_EVERY.

    Errors: Unidentifiable, where config or settings have what has no form. Reads all tensors once (0.1 s a GB and
    core).
    """

    def __init__(self, root: torch.nn.Module, *, engine: str, config: Any = None, dtype: str = "",
                 settings: Mapping[str, Any] | None = None, given: str | None = None,
                 transparent: Iterable[torch.nn.Module] = (), trusted: Collection[str] = (),
                 opaque: Collection[str] = (), harmless: Collection[str] = (), own_hooks: Iterable[int] = (),
                 scratch: Callable[[str], bool] | None = None, resum_every: int | None = None) -> None:
        self._root = weakref.ref(root)
        config = without_harmless(config) if isinstance(config, Mapping) else config
        self._about = {"engine": engine, "dtype": dtype, "config": config, "settings": dict(settings or {})}
        self.given, self.own_hooks = given, set(own_hooks)
        self._transparent = {id(module) for module in transparent}
        self._packages, self._harmless, self._scratch = (tuple(trusted), tuple(opaque)), tuple(harmless), scratch
        self._every, self._calls = RESUM_EVERY if resum_every is None else resum_every, 0
        self._sums: dict[str, _Sum] = {}
        self._background = _Background()
        self._first: str | None = None   # where given: what the document was then
        self._look()
        self._excused = {*self._unknown, self._snapshot.hooked(self.own_hooks)} if given is not None else set()

    @property
    def root(self) -> torch.nn.Module | None:
        """None: it is gone."""
        return self._root()

    def now(self) -> Identity:
        """What it is now. Sums anew what changed since the last call."""
        self._calls += 1
        for name in self._background.differing(self._sums):
            self._sums.pop(name, None)
            self._stale = True
        self._stale |= self._background.walk_differs()
        if not self.holds():
            self._look()
        elif self._every and self._calls % self._every == 0:
            self._background.start(self._tensors(), self._sums, functools.partial(self._walks_to, self._entries))
        return Identity(self.digest, self.private_reason())

    def holds(self) -> bool:
        """Whether it is what it was at the last now(): the check that now() makes, alone."""
        reading = self.begin()
        return reading is not None and reading.hold()

    def begin(self) -> Reading | None:
        """The same without waiting for a GPU: what it is when the work that is enqueued now is done. None: it is not
        what it was, or must be asked by now()."""
        if self._stale or self._background.found or self._compute != _precision(self._snapshot.devices):
            return None
        return self._snapshot.begin()

    def private_reason(self) -> str | None:
        """Why what is computed now must not be found by others, with the way out; None: it may."""
        unknown = next((reason for reason in self._unknown if reason not in self._excused), None)
        if unknown is not None:
            return f"{unknown}; {WAY_OUT}"
        hooked = self._snapshot.hooked(self.own_hooks)
        return ((None if hooked in self._excused else hooked) or self._snapshot.random()
                or _of_the_moment(self._snapshot.devices))

    def declare_changed(self) -> None:
        """Somebody changed what now() may not see: the next one sums all tensors anew."""
        self._sums, self._stale = {}, True
        self._background.forget()

    def close(self) -> None:
        """Ends what runs in the background."""
        self._background.forget()

    def document(self) -> dict[str, Any]:
        """What the digest is of, for people who ask why two are not the same. Made anew at each call."""
        return self._document(self._walked())

    def _look(self) -> None:
        """Walks, sums what is not known, and makes the digest."""
        walk = self._walked()
        self._unknown, self._entries = walk.unknown, digest_of(walk.entries)
        self._snapshot, self._stale = Snapshot(walk, self._transparent), False
        self._compute = _precision(self._snapshot.devices)
        digest = digest_of(self._document(walk))
        if self.given is None:
            self.digest = digest
        else:
            self._first = self._first or digest
            self.digest = self.given if digest == self._first else digest_of({"given": self.given, "changed": digest})

    def _walked(self) -> TorchWalk:
        root = self._root()
        if root is None:
            raise ReferenceError("the model is gone")
        return TorchWalk(root, *self._packages, self._harmless, self._transparent, self._scratch)

    def _walks_to(self, entries: str) -> bool:
        """Whether a walk finds now what it found; False, too, where the model changes meanwhile."""
        try:
            return digest_of(self._walked().entries) == entries
        except RuntimeError:  # a dict changed size
            return False

    def _document(self, walk: TorchWalk) -> dict[str, Any]:
        about = TorchTypes(*self._packages, strict=True)
        sums = self._summed(walk)
        return {**{name: about.of(value, name) for name, value in self._about.items()}, "compute": self._compute,
                "modules": walk.entries, "versions": {**walk.versions, **about.versions},
                "tensors": {name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), sums[name]]
                            for name, tensor in walk.tensors.items()}}

    def _summed(self, walk: TorchWalk) -> dict[str, str | None]:
        """A sum of each tensor: those that still hold, others made; tensors that share memory once."""
        traces = self._snapshot.traces
        missing: dict[tuple[Any, ...], list[str]] = {}
        for name, tensor in walk.tensors.items():
            kept = self._sums.get(name)
            if kept is None or kept.tensor() is not tensor or kept.trace != traces[name]:
                place = tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()
                missing.setdefault(place, []).append(name)
        if self.given is not None and self._first is None:
            made: list[str | None] = [None] * len(missing)
        else:
            made = [value.hex() for value in tensor_sums(walk.tensors[names[0]] for names in missing.values())]
        for names, value in zip(missing.values(), made):
            for name in names:
                self._sums[name] = _Sum(weakref.ref(walk.tensors[name]), traces[name], value)
        self._sums = {name: self._sums[name] for name in walk.tensors}
        return {name: kept.value for name, kept in self._sums.items()}

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Those of the last walk that are still there."""
        return {name: tensor for name, kept in self._sums.items() if (tensor := kept.tensor()) is not None}


class _Background:
    """A walk and sums of all tensors, on a thread of the lowest priority. What it found is asked for by `walk_differs`
    and `differing`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._thread: threading.Thread | None = None
        self._run = 0                  # counts starts: what an older one finds is of no use
        self._made: dict[str, tuple[_Sum, str]] = {}
        self._walk_differs = False
        self._as_given: dict[str, tuple[_Sum, str]] = {}  # first sums of what a given digest stands for

    def start(self, tensors: Mapping[str, torch.Tensor], sums: Mapping[str, _Sum], walks_alike: Callable[[], bool]
              ) -> None:
        """Sums tensors by name; does nothing where the last ones are still being made."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            self._run += 1
            self._thread = threading.Thread(target=self._sum, name="kvstrata-identity", daemon=True,
                                            args=(self._run, dict(tensors), dict(sums), walks_alike))
            self._thread.start()

    def _sum(self, run: int, tensors: dict[str, torch.Tensor], sums: dict[str, _Sum], walks_alike: Callable[[], bool]
             ) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        differs = not walks_alike()
        with self._lock:
            self._walk_differs |= differs and run == self._run
        try:
            streams = [torch.cuda.Stream(device) for device in {t.device for t in tensors.values()}
                       if device.type == "cuda"]
            with contextlib.ExitStack() as stack:
                for stream in streams:
                    stack.enter_context(torch.cuda.stream(stream))
                made = tensor_sums(tensors.values(), threads=1, stop=lambda: run != self._run)
        except (Stopped, torch.OutOfMemoryError):
            return
        with self._lock:
            if run == self._run:
                self._made = {name: (sums[name], value.hex()) for name, value in zip(tensors, made)}

    @property
    def found(self) -> bool:
        """Whether there is something that `walk_differs` or `differing` would say."""
        return self._walk_differs or bool(self._made)

    def walk_differs(self) -> bool:
        """Whether a walk found what the checks had not seen. Answered once."""
        with self._lock:
            differs, self._walk_differs = self._walk_differs, False
        return differs

    def differing(self, sums: Mapping[str, _Sum]) -> list[str]:
        """Names of tensors whose bytes are no longer what their sum says. Each result is answered once."""
        if not self._made:
            return []
        with self._lock:
            made, self._made = self._made, {}
        return [name for name, (kept, value) in made.items()
                if sums.get(name) is kept and value != (kept.value or self._given_value(name, kept, value))]

    def _given_value(self, name: str, kept: _Sum, value: str) -> str:
        """The first sum of a tensor that has none because a given digest stands for it: this one, if there
        is none."""
        if self._as_given.get(name, (None, ""))[0] is not kept:
            self._as_given[name] = kept, value
        return self._as_given[name][1]

    def forget(self) -> None:
        with self._lock:
            self._run += 1
            self._made, self._walk_differs = {}, False

    def wait(self) -> None:
        """For tests: until what runs is over."""
        if self._thread is not None:
            self._thread.join()


def _precision(devices: Collection[str]) -> list[str]:
    """How torch multiplies float32, where that is not in float32."""
    precisions = {_float32_products(device) for device in devices}
    return sorted(precisions - {"ieee", "none", "highest"})


def _float32_products(device: str) -> str:
    matmul = torch.backends.cuda.matmul if device == "cuda" else getattr(torch.backends.mkldnn, "matmul", None)
    precision: str | None = getattr(matmul, "fp32_precision", None)
    return torch.get_float32_matmul_precision() if precision is None else precision  # None: before torch 2.9


def _of_the_moment(devices: Collection[str]) -> str | None:
    """What is on in this thread that changes what is computed."""
    on = next((device for device in devices if torch.is_autocast_enabled(device)), None)
    if on is not None:
        return f"torch.autocast is on for {on}, so keys and values are of another dtype; leave it before generate()"
    if _get_current_dispatch_mode() is not None:
        return f"a TorchDispatchMode is on ({_get_current_dispatch_mode()!r}), and what it does is not known; leave it"
    return None
