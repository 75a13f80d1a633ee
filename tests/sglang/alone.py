# SPDX-License-Identifier: Apache-2.0
"""The adapter's sequences without an engine, on a model of one layer."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from kvstrata.torch_identity import Identity
from kvstrata_sglang.sequences import Row, Sequences

from restarts import IDS, batch_of

PATIENCE = 60  # seconds in which an open must be over


class Loaded:
    """In place of LoadedModel."""

    def __init__(self) -> None:
        self.identity = Identity("d", None)

    def now(self) -> Identity:
        return self.identity


def request_of(name: str, **other: Any) -> Any:
    usual = {"full_untruncated_fill_ids": IDS, "extra_key": None, "cache_salt": None, "input_embeds": None,
             "positional_embed_overrides": None, "beam_group": None, "to_finish": None, "output_ids": []}
    return SimpleNamespace(rid=name, **{**usual, **other})


def show(sequences: Sequences, request: Any, restart: Any = None) -> int:
    """Tokens that it begins with. restart: is done between the look-up and the open."""
    held = sequences.held(request, IDS, len(IDS) - 1)
    if restart is not None:
        restart()
    until = time.monotonic() + PATIENCE
    while held and (opened := sequences.open(request, held)) is None:
        assert time.monotonic() < until, "the open is never over"
    return held if held and opened else 0


def step(sequences: Sequences, *rows: tuple[str, int, list[int]]) -> None:
    at, batch = 0, []
    for name, first, ids in rows:
        batch.append(Row(name, first, slice(at, at + len(ids)), ids))
        at += len(ids)
    sequences.begin(batch)
    sequences.attend(0, *batch_of(at))
