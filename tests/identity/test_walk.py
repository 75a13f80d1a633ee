# SPDX-License-Identifier: Apache-2.0
"""What values become in an identity's document: exact, in no order but their own, named where they have no form."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.util
import math
import pathlib
import re
import sys
import threading
from collections import OrderedDict
from typing import Any

import pytest
from kvstrata.identity import RULE, Unidentifiable, Walk, canonical_json, digest_of


class Colour(enum.Enum):
    RED = 1
    BLUE = 1.5


@dataclasses.dataclass
class Point:
    x: float
    more: Any = None


def of(value: Any) -> str:
    return canonical_json(Walk(strict=True).of(value, "it"))


@pytest.mark.parametrize("a, b", [
    (0.1, 0.1 + 1e-17 * 2), (1.0, 1), (True, 1), (math.inf, -math.inf), (0.0, -0.0), ("1", 1), (None, "null"),
    ([1, 2], [2, 1]), ({"a": 1}, {"b": 1}), ({1: "a"}, {"1": "a"}), ({1, 2}, {1, 3}), (Colour.RED, Colour.BLUE),
    (Point(1.0), Point(2.0)), (Point(1.0, [1]), Point(1.0, [2])), (b"a", b"b"), (math.sin, math.cos), (int, float),
    (functools.partial(pow, 2), functools.partial(pow, 3)), (functools.partial(pow, exp=2), functools.partial(pow)),
    (OrderedDict(a=1), OrderedDict(a=2)), (complex(1, 2), complex(1, 3)), (re.compile("a"), re.compile("b")), (range(3), range(4))])
def test_other_values_are_other_text(a: Any, b: Any):
    assert (of(a) == of(b)) is (repr(a) == repr(b))


@pytest.mark.parametrize("a, b", [
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ({0, 8}, {8, 0}), ((1, 2), [1, 2]),
    (Point(1.0, {"a"}), Point(1.0, {"a"})), ({3: 1, 2: 2}, {2: 2, 3: 1})])
def test_equal_values_are_equal_text(a: Any, b: Any):
    assert of(a) == of(b)


def test_what_is_inside_itself_ends():
    inner: list[Any] = [1]
    inner.append(inner)
    point = Point(1.0)
    point.more = {"me": point}
    assert of([inner, point]) == of([inner, point])


@pytest.mark.parametrize("value, what", [
    (lambda x: x, "lambda"), ([{"a": [threading.Lock()]}], "lock"), ((i for i in ()), "generator"),
    (functools.partial(lambda x: x), "lambda")])
def test_what_has_no_form_is_named(value: Any, what: str):
    with pytest.raises(Unidentifiable, match=rf"^it.* is .*{what}.*; .*digest="):
        of(value)
    walk = Walk()
    walk.of(value, "it")
    assert len(walk.unknown) == 1 and what in walk.unknown[0]


def test_the_path_of_what_has_no_form():
    with pytest.raises(Unidentifiable, match=r"^it\['a'\]\[1\].more is "):
        of({"a": [1, Point(1.0, lambda: 0)]})


def _module(folder: pathlib.Path, text: str) -> Any:
    folder.mkdir()
    (folder / "written.py").write_text(text)
    spec = importlib.util.spec_from_file_location("written", folder / "written.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["written"] = module
    spec.loader.exec_module(module)
    return module


ORIGINAL = ("import functools\nN = 1\n\n\ndef used(x):\n    return x + N\n\n\ndef f(x, y=2):\n    return used(x) in {'a', 'b'}\n\n\n"
            "class C:\n    K = 3\n\n    def method(self):\n        return self.K + f(1)\n")


@pytest.mark.parametrize("old, new", [("N = 1", "N = 2"), ("x + N", "x - N"), ("y=2", "y=3"), ("'b'", "'c'"),
                                      ("K = 3", "K = 4"), ("f(1)", "f(2)"), ("class C:", "class C(dict):")])
def test_code_from_outside_is_there_by_what_it_does(tmp_path: pathlib.Path, old: str, new: str):
    def text(module: Any) -> str:
        return of([module.f, module.C])

    before = text(_module(tmp_path / "1", ORIGINAL))
    assert text(_module(tmp_path / "2", "# moved\n\n" + ORIGINAL)) == before
    assert text(_module(tmp_path / "3", ORIGINAL.replace(old, new))) != before


def test_a_class_without_a_name_of_its_own_is_its_bases(tmp_path: pathlib.Path):
    """As torch makes classes of parametrized modules, under its own name."""
    def text(module: Any) -> str:
        return of(type("Made", (module.C,), {"__module__": "torch.nn.utils.parametrize"}))

    before = text(_module(tmp_path / "1", ORIGINAL))
    assert text(_module(tmp_path / "2", ORIGINAL)) == before
    assert text(_module(tmp_path / "3", ORIGINAL.replace("K = 3", "K = 4"))) != before


def test_functions_of_one_name_in_one_function():
    """They are a known package's."""
    walk = Walk(trusted=["test_walk"])
    made = [(lambda: 1), (lambda: 2), (lambda x=1: x), (lambda x=2: x)]
    assert len({canonical_json(walk.of(function, "it")) for function in made}) == 4 and not walk.unknown


def test_the_rule_is_in_the_digest(monkeypatch: pytest.MonkeyPatch):
    before = digest_of({"a": 1})
    assert len(before) == 64 and before == digest_of({"a": 1}) != digest_of({"a": 2})
    monkeypatch.setattr("kvstrata.identity.RULE", RULE + " b")
    assert digest_of({"a": 1}) != before
