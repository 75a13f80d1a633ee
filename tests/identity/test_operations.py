# SPDX-License-Identifier: Apache-2.0
"""Each operation by itself: done to a model whose identity is known, and done before anybody asked, it makes another
identity or a private one, and the same in both cases."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from kvstrata_transformers.identity import ModelIdentity
from operations import OPERATIONS, Inapplicable, Operation
from small_models import model_of, original

_SEED = 5


def _after(operation: Operation, live: bool) -> Any:
    model = model_of("llama")
    known = ModelIdentity(model, resum_every=0) if live else None
    torch.manual_seed(_SEED)
    undo = operation(model, random.Random(_SEED))
    try:
        return (known or ModelIdentity(model, resum_every=0)).now()
    finally:
        if undo is not None:
            undo()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_it_makes_another_model(operation: Operation):
    before = ModelIdentity(original("llama"), resum_every=0).now()
    try:
        live, fresh = _after(operation, True), _after(operation, False)
    except Inapplicable as error:
        pytest.skip(f"not with these versions: {error.__cause__}")
    assert live.digest == fresh.digest and (live.private is None) is (fresh.private is None)
    assert live.digest != before.digest or live.private is not None
