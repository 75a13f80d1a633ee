# SPDX-License-Identifier: Apache-2.0
"""The attention backend: rows of a batch, layer by layer, to the requests' sequences. SGLang's own pool stays empty."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from .geometry import Options, geometry_of, loaded_model, needs_of, never_served, refuse
from .plugin import NAME
from .sequences import Row, Sequences, serve


class KvstrataBackend(AttentionBackend):
    """--attention-backend kvstrata. Threads: the scheduler's."""

    needs_cpu_seq_lens = True

    def __init__(self, runner: Any) -> None:
        """The model is loaded: reads its tensors, and registers it. Unsupported; kvstrata.Unavailable: no daemon."""
        super().__init__()
        refuse((*_owned(runner), *never_served(runner)))
        options = Options.of_environment()
        self._sequences = Sequences(options)
        model = loaded_model(runner, options.digest)
        self._sequences.serve(geometry_of(runner, model.digest, needs_of(options)), model)
        serve(self._sequences)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """A forward pass begins."""
        self._sequences.begin(rows_of(forward_batch))

    def forward_extend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
                       save_kv_cache: bool = True, **others: Any) -> torch.Tensor:
        """q [tokens and padding][query heads * head_dim]; k, v with KV heads. Returns what q is."""
        if given := sorted(name for name, value in others.items() if value is not None):
            raise NotImplementedError(f"attention layer {layer.layer_id} passes {given}, which kvstrata does not serve")
        tokens = self._sequences.tokens
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        q, k, v, written = (x.view(x.shape[0], -1, layer.head_dim)[:tokens] for x in (q, k, v, out))
        self._sequences.attend(layer.layer_id, q, k, v, written)
        return out

    forward_decode = forward_extend

    def support_triton(self) -> bool:
        return False


def rows_of(batch: Any) -> list[Row]:
    """The rows of SGLang's ForwardBatch: who they are, and what is new in each. Waits for ids that are a GPU's."""
    ids, names = batch.input_ids.tolist(), batch.rids or [""] * batch.batch_size
    if batch.forward_mode.is_decode():
        firsts, lengths = [n - 1 for n in batch.seq_lens_cpu.tolist()], [1] * batch.batch_size
    else:
        firsts, lengths = list(map(int, batch.extend_prefix_lens_cpu)), list(map(int, batch.extend_seq_lens_cpu))
    rows, at = [], 0
    for name, first, length in zip(names, firsts, lengths):
        rows.append(Row(name, first, slice(at, at + length), ids[at:at + length]))
        at += length
    return rows


def _owned(runner: Any) -> tuple[tuple[bool, str], ...]:
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.runtime_context import get_disagg, get_exec, get_memory, get_schedule
    graphs, memory = get_exec().graph.cuda_graph_config, get_memory()
    phases = {runner.prefill_attention_backend_str, runner.decode_attention_backend_str}
    return ((phases != {NAME}, f"attention backends are {sorted(phases)}; {NAME} serves both phases or none"),
            (memory.radix_cache_backend != NAME, f"--radix-cache-backend is {memory.radix_cache_backend}, whose hits "
             f"would name slots that have nothing in them; pass {NAME}"),
            (memory.disable_radix_cache, "--disable-radix-cache: prompts that are held would be computed"),
            (memory.enable_hierarchical_cache, "--enable-hierarchical-cache: SGLang's pool has nothing in it"),
            (not get_schedule().disable_overlap_schedule,
             "the overlap schedule is on; pass --disable-overlap-schedule"),
            (runner.device != "cpu" and {graphs.decode.backend, graphs.prefill.backend} != {Backend.DISABLED},
             "CUDA graphs are on; pass --disable-cuda-graph"),
            *((bool(value), f"--{name}") for name, value in (
                ("enable-torch-compile", get_exec().graph.enable_torch_compile),
                ("enable-two-batch-overlap", get_exec().overlap.enable_two_batch_overlap),
                ("enable-pdmux", get_disagg().enable_pdmux), ("enable-hisparse", memory.enable_hisparse),
                ("dllm-algorithm", get_exec().dllm.dllm_algorithm))))
