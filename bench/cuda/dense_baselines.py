#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times torch's dense attention at the shapes of cuda_bench and chunk_bench, in the same way.

    dense_baselines.py --json-out FILE [--only 1x128,8x32] [--chunks 128,1024]
One graph holds a call a set of inputs; all sets together are larger than the L2; medians of 60 replays.
Backends: cuDNN and flash, both with enable_gqa (K and V are read once a KV head); and, where its package is to be
found, FlashInfer's paged decode on tensor cores, planned once, over pages of 16 in random order.
--chunks: instead, 512 queries of a prompt that sees so many kilotokens (chunk_bench). A query sees the keys up
to its own (causal, aligned to the last key). torch's cuDNN backend aligns to the first: it runs without a
mask, which is at most 0.2 % more work, and so does flash once more.
"""
import argparse
import importlib.metadata
import importlib.util
import json
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

SHAPES = [(b, k) for b, ks in {1: (1, 2, 4, 8, 32, 128, 1024), 8: (1, 4, 32, 128, 1024),
                               64: (1, 4, 32)}.items() for k in ks]  # batch, kilotokens
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
QUERY_HEADS, KV_HEADS, DIM = 32, 8, 128
CHUNK, CHUNK_QUERY_HEADS, CHUNK_KV_HEADS, CHUNK_REPLAYS = 512, 28, 4, 20
PAGE, WORKSPACE_BYTES = 16, 256 << 20
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2
ROTATED_BYTES, REPLAYS, WARM_UPS = 300 << 20, 60, 5


def sets_of(batch, tokens):
    return min(max(-(-ROTATED_BYTES // (batch * tokens * TOKEN_BYTES)), 1), 64)


def inputs(batch, tokens):
    sets = sets_of(batch, tokens)
    draw = lambda heads, n: torch.randn(batch, heads, n, DIM, device="cuda", dtype=torch.bfloat16)
    return draw(QUERY_HEADS, 1), [(draw(KV_HEADS, tokens), draw(KV_HEADS, tokens)) for _ in range(sets)]


def dense(q, mask=None):
    return lambda k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def capture(attend, sets):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for one in sets[:2]:
            attend(*one)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        outs = [attend(*one) for one in sets]
    return graph, outs


def time_us(graph, nodes, replays=REPLAYS):
    times = []
    for i in range(WARM_UPS + replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()  # keeps the stream busy while the timed one is enqueued
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / nodes)
    times = sorted(times[WARM_UPS:])
    return times[len(times) // 10], statistics.median(times), times[len(times) * 9 // 10]


def paged(batch, tokens):
    """FlashInfer's decode of one query token a sequence, and its inputs."""
    import flashinfer
    each = tokens // PAGE
    ints = lambda x: torch.tensor(x, dtype=torch.int32)
    indptr, last = ints([b * each for b in range(batch + 1)]), ints([PAGE] * batch)
    order = torch.randperm(batch * each, dtype=torch.int32, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"), "HND", use_cuda_graph=True,
        use_tensor_cores=True, paged_kv_indptr_buffer=indptr.cuda(), paged_kv_indices_buffer=order.clone(),
        paged_kv_last_page_len_buffer=last.cuda())
    wrapper.plan(indptr, order, last, QUERY_HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.bfloat16,
                 kv_data_type=torch.bfloat16)
    q = torch.randn(batch, QUERY_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    caches = [(torch.randn(batch * each, 2, KV_HEADS, PAGE, DIM, device="cuda", dtype=torch.bfloat16),)
              for _ in range(sets_of(batch, tokens))]
    check_paged(wrapper.run(q, caches[0][0]), q, caches[0][0], order)
    return lambda cache: wrapper.run(q, cache), caches


def check_paged(out, q, cache, order):
    """Checks the first sequence against dense attention over its rows in order."""
    rows = cache[order[:len(order) // len(q)].long()].transpose(0, 1).transpose(1, 2)  # [k, v][heads][pages]
    k, v = rows.reshape(2, 1, KV_HEADS, -1, DIM)
    expected = dense(q[:1, :, None])(k, v)[:, :, 0]
    worst = (out[:1] - expected).abs().max().item()
    if not worst < 0.02:
        raise RuntimeError(f"FlashInfer's output is {worst} away from dense attention's")


def row(batch, kilotokens, name):
    tokens = kilotokens * 1024
    if name == "flashinfer":
        graph, outs = capture(*paged(batch, tokens))
        p10, median, p90 = time_us(graph, len(outs))
    else:
        q, sets = inputs(batch, tokens)
        with sdpa_kernel(BACKENDS[name]):
            graph, outs = capture(dense(q), sets)
            p10, median, p90 = time_us(graph, len(outs))
    label = "FlashInfer paged" if name == "flashinfer" else f"torch SDPA {name}"
    tbps = batch * kilotokens * 1024 * TOKEN_BYTES / median / 1e6
    print(f"{name} b{batch} {kilotokens}K {median:.2f} us {tbps:.2f} TB/s", flush=True)
    return {"id": f"full/b{batch}/{kilotokens}K", "name": label, "value": median,
            "unit": "us", "p10": p10, "p90": p90, "n": REPLAYS, "tbps": tbps}


def chunk_row(kilotokens, name, masked):
    tokens = kilotokens * 1024
    draw = lambda heads, n: torch.randn(1, heads, n, DIM, device="cuda", dtype=torch.bfloat16)
    q, k, v = draw(CHUNK_QUERY_HEADS, CHUNK), draw(CHUNK_KV_HEADS, tokens), draw(CHUNK_KV_HEADS, tokens)
    mask = causal_lower_right(CHUNK, tokens) if masked else None
    with sdpa_kernel(BACKENDS[name]):
        graph, _ = capture(dense(q, mask), [(k, v)])
        p10, median, p90 = time_us(graph, 1, CHUNK_REPLAYS)
    label = f"torch SDPA {name}" + (" causal" if masked else "")
    tflops = 4 * CHUNK * CHUNK_QUERY_HEADS * DIM * tokens / median / 1e6
    print(f"{label} {CHUNK} of {kilotokens}K {median:.2f} us {tflops:.1f} TFLOP/s", flush=True)
    return {"id": f"chunk/{CHUNK}of{kilotokens}K", "name": label, "value": median, "unit": "us", "p10": p10,
            "p90": p90, "n": CHUNK_REPLAYS, "tflops": tflops}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json-out", required=True)
    parser.add_argument("--only", default="", help="batch x kilotokens, for example 1x128,8x32")
    parser.add_argument("--chunks", default="", help="kilotokens, for example 128,1024")
    args = parser.parse_args()
    only = {tuple(map(int, s.split("x"))) for s in args.only.split(",") if s}
    chunks = [int(k) for k in args.chunks.split(",") if k]
    names = [*BACKENDS] + ["flashinfer"] * (importlib.util.find_spec("flashinfer") is not None)
    calls = [(row, *shape, name) for shape in SHAPES for name in names if not only or shape in only]
    if chunks:
        kinds = [("cudnn", False), ("flash", False), ("flash", True)]
        calls = [(chunk_row, kilotokens, *kind) for kilotokens in chunks for kind in kinds]
    rows = []
    for timed, *shape in calls:
        try:
            rows.append(timed(*shape))
        except RuntimeError as error:  # a shape that the backend refuses
            print(f"{shape}: {str(error).splitlines()[0]}", flush=True)
        torch.cuda.empty_cache()
    result = {"torch": torch.__version__, "device": torch.cuda.get_device_name(0), "rows": rows}
    if "flashinfer" in names:
        result["flashinfer"] = importlib.metadata.version("flashinfer-python")
    with open(args.json_out, "w") as file:
        json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
