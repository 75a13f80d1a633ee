# SPDX-License-Identifier: Apache-2.0
"""Two models that differ in one drawn thing have two identities, or one whose keys and values are the same.

What is served privately has no identity that others share. Seeds are printed; --seed repeats a run, --draws says how
many pairs."""

from __future__ import annotations

import collections
import copy
import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kvstrata.identity import HARMLESS
from kvstrata.torch_identity import Identity
from kvstrata_transformers.identity import ModelIdentity
from operations import OPERATIONS, Inapplicable
from small_models import KINDS, built, config_of, equal, keys_and_values, model_of, original

# A drawn case: (what it is, the model, what undoes it, whether the identity has to be shared).
Case = tuple[str, Any, Callable[[], Any] | None, bool]


def _changed_field(draw: random.Random, kind: str) -> Case:
    """Another configuration at construction, weights alike where they fit."""
    fields = config_of(kind).to_dict()
    name = draw.choice(sorted(fields))
    value = _other_value(draw, name, fields[name])
    try:
        model = model_of(kind, **{name: value})
    except Exception as error:  # each architecture refuses in its own way
        raise Inapplicable from error
    return f"{name} = {value!r} at construction", model, None, name in HARMLESS


def _other_value(draw: random.Random, name: str, value: Any) -> Any:
    if name == "hidden_act":
        return draw.choice(["gelu", "relu", "gelu_pytorch_tanh"])
    if name == "rope_parameters":
        return _other_rope(draw)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice([value + 1, value * 2, max(1, value // 2)])
    if isinstance(value, float):
        return value * 3 + 0.1 if value < 0.3 else value / 2  # some may be at most 1
    if isinstance(value, list) and len(value) > 1:
        return value[::-1]
    raise Inapplicable


def _other_rope(draw: random.Random) -> dict[str, Any]:
    return draw.choice([{"rope_type": "default", "rope_theta": 321.0},
                        {"rope_type": "linear", "rope_theta": 1e4, "factor": draw.choice([2.0, 3.0])},
                        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
                        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0,
                         "original_max_position_embeddings": 128}])


def _operation(draw: random.Random, kind: str) -> Case:
    """Done to a model before anybody asks for its identity."""
    model, operation = model_of(kind), draw.choice(OPERATIONS)
    return operation.__name__, model, operation(model, draw), False


def _harmless(draw: random.Random, kind: str) -> Case:
    """What must not stand in the way of sharing."""
    model = model_of(kind)
    way = draw.choice(["copied", "attention kernel", "built again", "moved", "train and back", "names", "grad"])
    if way == "copied":
        model = copy.deepcopy(model)
    elif way == "attention kernel":
        model.set_attn_implementation("eager")
    elif way == "built again":
        model = built(config_of(kind))
    elif way == "moved":
        model.to("cpu")
    elif way == "train and back":
        model.train()
        keys_and_values(model)
        model.eval()
    elif way == "names":
        model.config._name_or_path = model.name_or_path = "elsewhere"
    else:
        model.requires_grad_(False)
    return way, model, None, True


class Tally(collections.Counter[str]):
    """What came of the draws."""


def _check(draw: random.Random, kind: str, tally: Tally) -> None:
    want = _original_identity(kind)
    way = draw.choices([_changed_field, _operation, _live_operation, _harmless], [3, 4, 4, 1])[0]
    name, model, undo, shared = way(draw, kind)
    try:
        live = getattr(model, "_live", None)
        got = live.now() if live is not None else ModelIdentity(model, resum_every=0).now()
        said = f"{kind}: {way.__name__[1:]} {name}"
        if got.private is not None:
            tally["private"] += 1
            assert not shared, f"{said}: private, {got.private}"
        elif got.digest != want.digest:
            tally["another identity"] += 1
            assert not shared, f"{said}: is another identity"
        else:
            tally["one identity"] += 1
            if not shared:
                _compare(kind, model, said, tally)
    finally:
        if undo is not None:
            undo()


@functools.cache
def _original_identity(kind: str) -> Identity:
    return ModelIdentity(original(kind), resum_every=0).now()


def _compare(kind: str, model: Any, said: str, tally: Tally) -> None:
    try:
        keys = keys_and_values(model)
    except Exception:  # each architecture fails in its own way, and then there is nothing to share
        tally["no forward"] += 1
        return
    assert equal(keys_and_values(original(kind)), keys), f"{said}: one identity, other keys"


def _live_operation(draw: random.Random, kind: str) -> Case:
    """Done to a model whose identity is known, as the daemon's pages have it."""
    model = model_of(kind)
    live = ModelIdentity(model, resum_every=0)
    live.now()
    vars(model)["_live"] = live
    operation = draw.choice(OPERATIONS)
    return operation.__name__, model, operation(model, draw), False


def test_two_models_have_two_identities(request: pytest.FixtureRequest):
    draws, seed = request.config.getoption("--draws"), request.config.getoption("--seed")
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    print(f"seed {seed}")
    tally = Tally()
    warnings.simplefilter("ignore")
    for i in range(draws):
        draw = random.Random(f"{seed}/{i}")
        torch.manual_seed(i)
        try:
            _check(draw, draw.choice(sorted(KINDS)), tally)
        except Inapplicable:
            tally["not applicable"] += 1
        except Exception as error:
            raise AssertionError(f"draw {i} of --seed {seed}: {error}") from error
    print(dict(tally))
