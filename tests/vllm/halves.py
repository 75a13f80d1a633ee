# SPDX-License-Identifier: Apache-2.0
"""Both halves of the adapter without an engine, on a model of one layer."""

from __future__ import annotations

import time
from types import SimpleNamespace

from kvstrata_vllm.geometry import Geometry
from kvstrata_vllm.lookups import Lookups
from kvstrata_vllm.scheduler import Scheduled, StepMetadata
from kvstrata_vllm.worker import Rows, WorkerHalf

from restarts import GEOMETRY, IDS, batch_of

MODEL = Geometry(**vars(GEOMETRY))
PATIENCE = 60  # seconds in which a look-up, or a transfer, must be over


def held(lookups: Lookups, name: str) -> int:
    until = time.monotonic() + PATIENCE
    request = SimpleNamespace(request_id=name, all_token_ids=IDS)
    while (tokens := lookups.held(request)) is None:
        assert time.monotonic() < until, "the look-up is never over"
    return tokens


def step(worker: WorkerHalf, *members: Scheduled, ended: tuple[str, ...] = (), reset: str = "") -> set[int]:
    """Blocks that are lost in it. Each member has one block, of its name's place in the alphabet."""
    blocks = [member.first_block for member in members]
    worker.begin(StepMetadata(dict(zip(blocks, members)), list(ended), reset))
    starts = [0]
    for member in members:
        starts.append(starts[-1] + len(member.ids))
    worker.attend(0, Rows(starts, blocks), *batch_of(starts[-1]), 0.125)
    worker.end(1)
    return worker.lost_blocks()


def prompt(name: str, first: int) -> Scheduled:
    return Scheduled(name, first, ord(name), IDS[first:], IDS)


def next_token(name: str, number: int = 0) -> Scheduled:
    return Scheduled(name, len(IDS) + number, ord(name), [7], None)
