# SPDX-License-Identifier: Apache-2.0
"""KvstrataSpec: vLLM's offloading connector with chunks in the daemon's region (docs/vllm.md).

vLLM makes one in the scheduler's process and one in each worker's. Rows are as vLLM's own of the host are: a chunk of
each rank's blocks side by side, or one where all ranks have the same bytes.
"""

from __future__ import annotations

import hashlib
from typing import Any

from kvstrata.chunks import SCHEDULER, WORKER, ChunkClient, ChunkLink
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingSpec, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig

from .cpu_copies import CpuCopies
from .region import Region
from .source import ChunkSource
from .transfers import Transfers
from .unsupported import Unsupported

_PAGE = 4096
_STEPS_AHEAD, _LEAST_AHEAD = 4, 64


def credits_ahead(config: OffloadingConfig, tokens_per_step: int) -> int:
    """How many an engine that schedules so many tokens a step at most has in stock: for the chunks of some steps."""
    per_chunk = config.cache.blocks_per_chunk
    chunks = sum(tokens_per_step // (group.tokens_per_block * per_chunk) + 1 for group in config.groups)
    return max(_LEAST_AHEAD, _STEPS_AHEAD * chunks)


class KvstrataSpec(OffloadingSpec):
    """worker_link: of the worker's process, once it has one."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.replicated_layout = config.replicated_layout
        copies = 1 if self.replicated_layout else config.parallel.world_size
        self._part_bytes = config.worker_kv_bytes_per_block * self.blocks_per_chunk
        self.row_bytes = -(-self._part_bytes * copies // _PAGE) * _PAGE
        self.worker_link: ChunkLink | None = None
        self._source: ChunkSource | None = None

    def get_manager(self) -> OffloadingManager:
        if self._source is None:
            client = ChunkClient(self._link(SCHEDULER))
            self._source = ChunkSource(client, self.config.parallel.world_size)
        return self._source

    def _link(self, role: int) -> ChunkLink:
        name = self.config.engine_id
        if len(name.encode()) > 63:
            name = hashlib.sha256(name.encode()).hexdigest()[:63]
        who = "scheduler" if role == SCHEDULER else f"worker {self.config.parallel.rank}"
        return ChunkLink(self.extra_config.get("socket"), role=role, row_bytes=self.row_bytes, engine=name,
                         client_name=f"vllm {who}")

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        canonical = self.config.canonical_layout
        if canonical:
            self._refuse_other_layouts(kv_caches)
        self.worker_link = self._link(WORKER)
        rank = 0 if self.replicated_layout else self.config.parallel.rank
        region = Region(self.worker_link, rank, self._part_bytes)
        if current_platform.is_cpu():
            return Transfers(CpuCopies(kv_caches, self.blocks_per_chunk, region, canonical))
        from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
        copies = CPUOffloadingWorker(kv_caches, self.blocks_per_chunk, region.num_chunks, mmap_region=region,
                                     canonical_layout=canonical)
        if not region.is_pinned:
            copies.shutdown()
            raise RuntimeError(f"the {region.total_size_bytes >> 20} MiB of kvstratad's region cannot be pinned for the "
                               "GPU, so copies would be slow: raise the limit of locked memory (ulimit -l), or make the "
                               "region smaller (kvstratad --set chunks.bytes=SIZE); vLLM's log has the driver's error "
                               "above")
        return Transfers(copies)

    def _refuse_other_layouts(self, kv_caches: CanonicalKVCaches) -> None:
        mappings = [ref.mapping for group in kv_caches.group_data_refs for ref in group]
        agnostic: Any = self.config.parallel.is_parallelism_agnostic
        if any(mapping is None for mapping in mappings) or (
                agnostic and not all(mapping.parallelism_agnostic for mapping in mappings)):
            raise Unsupported("canonical_layout: vLLM knows no layout of this model's cache that is the same for other "
                              "numbers of ranks; take canonical_layout out of kv_connector_extra_config")
