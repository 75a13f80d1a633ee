#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times decode steps by plans over an engine's own blocks, in captured graphs, beside FlashAttention 3 over the same.

    block_steps.py --json-out FILE [--plans "full;quest;bits{run = 8}"] [--cases 8x1,1x128] [--kernels]

One graph has a step of all layers; keys and values are normal, blocks lie in random order, as vLLM has them:
[block][head][slot][key, value], an index behind; queries lie in rows with keys and values between. Together the layers
are larger than the L2. A row is a case and a plan: the median microseconds of a layer over 60 replays. Before, `full`
must be what FlashAttention says, and each plan with a budget that is larger than the context, too. --kernels: also how
long each kernel of a layer takes, by torch's profiler (its times include waits for the kernel before).
FlashAttention is vLLM's, where Python finds vLLM; else rows have no baseline.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from kvstrata.block_attention import BlockAttention, BlockShape, index_bytes

QUERY_HEADS, KV_HEADS, DIM = 32, 8, 128
REPLAYS, WARM_UPS, MOST_ROWS = 60, 5, 256
CASES = [(8, 1), (16, 4), (1, 8), (1, 128), (2, 128), (8, 32), (8, 128), (1, 1024)]  # batch, kilotokens
PLANS = "full;quest;bits;bits{run = 8}"


def flash() -> Callable[..., Any] | None:
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


class Step:
    """A batch of sequences of so many tokens, in blocks of a plan's size, of which each layer has its own."""

    def __init__(self, plan: str, batch: int, tokens: int, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.plan, self.batch, self.tokens = plan, batch, tokens
        self.layers = max(2, min(8, (1 << 19) // (batch * tokens)))
        self.block = 64 if plan.startswith("bits") else 16
        shape = BlockShape(layers=self.layers, query_heads=QUERY_HEADS, kv_heads=KV_HEADS, head_dim=DIM, dtype="bf16",
                           block_tokens=self.block)
        rows_bytes = KV_HEADS * self.block * 2 * DIM * 2
        stride = rows_bytes + index_bytes(plan, shape)
        count = batch * -(-tokens // self.block) + 1
        self.caches = [torch.empty(count, stride // 2, device="cuda", dtype=torch.bfloat16) for _ in range(self.layers)]
        for cache in self.caches:
            cache[:, :rows_bytes // 2].normal_()
        self.table = (torch.randperm(count - 1, device="cuda") + 1).to(torch.int32).view(batch, -1)
        self.lengths = torch.full((batch,), tokens, device="cuda", dtype=torch.int32)
        self.starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
        self.qkv = torch.randn(self.layers, batch, QUERY_HEADS + 2 * KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty(self.layers, batch, QUERY_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        self._open(BlockShape(
            layers=self.layers, query_heads=QUERY_HEADS, kv_heads=KV_HEADS, head_dim=DIM, dtype="bf16",
            block_tokens=self.block, block_stride=stride, head_stride=self.block * 2 * DIM * 2, slot_stride=2 * DIM * 2,
            value_offset=DIM * 2, index_offset=rows_bytes, max_rows=MOST_ROWS, max_decodes=batch,
            max_tokens=max(131072, tokens)))

    def _open(self, shape: BlockShape) -> None:
        self.attention = BlockAttention(self.plan, shape)
        self.workspace = torch.zeros(self.attention.workspace_bytes, device="cuda", dtype=torch.uint8)
        self.attention.bind([cache.data_ptr() for cache in self.caches], self.workspace.data_ptr())
        ids = self.table.flatten()
        self.attention.index(ids.data_ptr(), len(ids), torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()

    def begin(self) -> None:
        self.attention.begin(blocks=self.table.data_ptr(), blocks_of_row=self.table.stride(0),
                             tokens=self.lengths.data_ptr(), query_starts=self.starts.data_ptr(), in_full=None,
                             rows=self.batch, new_tokens=0, stream=torch.cuda.current_stream().cuda_stream)

    def ours(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for layer in range(self.layers):
            q = self.qkv[layer]
            self.attention.attend(layer, q.data_ptr(), 2 * q.stride(0), self.out[layer].data_ptr(), self.batch, stream)

    def theirs(self, attend: Callable[..., Any]) -> None:
        for layer, cache in enumerate(self.caches):
            rows = cache[:, :KV_HEADS * self.block * 2 * DIM].view(-1, KV_HEADS, self.block, 2 * DIM).transpose(1, 2)
            attend(q=self.qkv[layer, :, :QUERY_HEADS], k=rows[..., :DIM], v=rows[..., DIM:], out=self.out[layer],
                   cu_seqlens_q=self.starts, max_seqlen_q=1, seqused_k=self.lengths, max_seqlen_k=self.tokens,
                   softmax_scale=DIM ** -0.5, causal=True, block_table=self.table, fa_version=3)

    def close(self) -> None:
        self.attention.close()


def capture(do: Callable[[], None]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        do()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        do()
    return graph


def times(graph: torch.cuda.CUDAGraph, layers: int) -> list[float]:
    """Microseconds of a layer, of each replay."""
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
    for _ in range(WARM_UPS):
        graph.replay()
    for begin, end in marks:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return sorted(1e3 * begin.elapsed_time(end) / layers for begin, end in marks)


def kernels(graph: torch.cuda.CUDAGraph, layers: int) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    found: dict[str, float] = collections.defaultdict(float)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name.split("<")[0].split("::")[-1].split("(")[0]] += event.device_time / 3 / layers
    return ", ".join(f"{name} {us:.2f}" for name, us in sorted(found.items(), key=lambda item: -item[1])[:6])


def check(attend: Callable[..., Any]) -> None:
    """Relative errors against FlashAttention, where all is attended."""
    for plan in ("full", "quest{budget = 8192}", "bits{budget = 8192}", "bits{budget = 8192, run = 8}"):
        step = Step(plan, batch=3, tokens=5000)
        step.out.fill_(torch.nan)
        step.begin()
        step.ours()
        ours = step.out.clone()
        step.theirs(attend)
        torch.cuda.synchronize()
        error = ((ours - step.out).float().norm() / step.out.float().norm()).item()
        print(f"{plan}: {error:.1e} from FlashAttention", flush=True)
        assert error < 5e-3, error
        step.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json-out")
    parser.add_argument("--plans", default=PLANS, help="between semicolons")
    parser.add_argument("--cases", help="BATCHxKILOTOKENS, between commas")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--commit", default="")
    given = parser.parse_args()
    attend = flash()
    if attend is not None:
        check(attend)
    cases = [tuple(map(int, case.split("x"))) for case in given.cases.split(",")] if given.cases else CASES
    rows = []
    for batch, kilotokens in cases:
        dense = None
        for plan in given.plans.split(";"):
            step = Step(plan, batch, kilotokens * 1024 - 100)
            if attend is not None and dense is None:
                found = times(capture(lambda: step.theirs(attend)), step.layers)
                dense = statistics.median(found)
            step.begin()
            graph = capture(step.ours)
            found = times(graph, step.layers)
            value = statistics.median(found)
            row = {"id": f"blocks/{plan}/b{batch}/{kilotokens}K", "plan": plan, "batch": batch, "tokens": step.tokens,
                   "value": value, "unit": "us", "p10": found[REPLAYS // 10], "p90": found[-1 - REPLAYS // 10],
                   "n": REPLAYS, "layers": step.layers, "better": "smaller"}
            if dense is not None:
                row["baseline"] = {"name": "FlashAttention 3", "value": dense}
            rows.append(row)
            print(f"{row['id']}: {value:.2f} us a layer" + (f", FlashAttention 3 {dense:.2f}" if dense else "") +
                  (f"; {kernels(graph, step.layers)}" if given.kernels else ""), flush=True)
            step.close()
            del step, graph
    if given.json_out:
        with open(given.json_out, "w") as file:
            json.dump({"suite": "cuda-blocks", "device": torch.cuda.get_device_name(), "commit": given.commit,
                       "date": time.strftime("%Y-%m-%d"), "command": "bench/cuda/block_steps.py", "ceilings": {},
                       "context": {"torch": torch.__version__, "notes": "one layer of a captured step over blocks as "
                                   "vLLM has them; 32 query heads, 8 KV heads x 128, bf16; blocks of 16, of bits 64"},
                       "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
