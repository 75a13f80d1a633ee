# SPDX-License-Identifier: Apache-2.0
"""How the two halves agree on the epoch (kvstrata/epoch.py).

The scheduler tells the worker of resets with each step; the worker tells the scheduler of the model's identity with
each step's output, where the two are not one process. Until the scheduler has heard that it changed, what it promises
is not there when the worker opens it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.torch_identity import Identity
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata


@dataclass
class WorkerIdentity(KVConnectorWorkerMetadata):
    """From the worker to the scheduler."""

    identity: Identity | None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return other  # there is one worker
