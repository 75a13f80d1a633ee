# SPDX-License-Identifier: Apache-2.0
"""What KvstrataConnector's scheduler and workers tell each other, with each step and its output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvstrata.chunks import Welcome
from kvstrata.torch_identity import Identity
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (OffloadingConnectorMetadata,
                                                                            OffloadingWorkerMetadata)


@dataclass
class ChunkMetadata(OffloadingConnectorMetadata):
    """To workers. reset: the last one's name; identities: of the model as the scheduler knows it, by rank."""

    reset: str = ""
    identities: dict[int, Identity] = field(default_factory=dict)


@dataclass
class ChunkWorkerMetadata(OffloadingWorkerMetadata):
    """From workers. identities: where they are others than the scheduler's, by rank; since_reset: whether all that was
    cached since the last reset is of these; failed: jobs that were not done."""

    identities: dict[int, Identity] = field(default_factory=dict)
    since_reset: bool = True
    failed: set[int] = field(default_factory=set)

    def aggregate(self, other: Any) -> ChunkWorkerMetadata:
        both = super().aggregate(other)
        assert isinstance(both, OffloadingWorkerMetadata)
        return ChunkWorkerMetadata(both.completed_jobs, both.transfer_stats, self.identities | other.identities,
                                   self.since_reset and other.since_reset, self.failed | other.failed)


@dataclass
class Loaded(KVConnectorHandshakeMetadata):
    """What a worker says of itself once the model is loaded. backends: how its layers lay out blocks."""

    rank: int
    identity: Identity
    backends: list[str]
    welcome: Welcome
