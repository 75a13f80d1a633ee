# SPDX-License-Identifier: Apache-2.0
"""What torch takes for the rows of selection_bench, measured the same way: graphs of several calls
over different data, medians of replays per call. Prints lines of `id microseconds`.

Usage: selection_baseline.py > FILE; selection_bench --baseline FILE
"""
import statistics

import torch

CALLS, REPLAYS = 20, 50


def microseconds(call, calls):
    """Median per call of a replayed graph of call(0) .. call(calls - 1)."""
    for i in range(3):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    samples = []
    for _ in range(REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(stop) * 1e3 / calls)
    return statistics.median(samples)


def length(n):
    return f"{n >> 20}M" if n % (1 << 20) == 0 else f"{n >> 10}K"


def topk(lists, n, k):
    scores = torch.randn(4, lists, n, device="cuda")
    us = microseconds(lambda i: torch.topk(scores[i % 4], k, dim=-1, sorted=False), CALLS)
    print(f"pick/{k}of{length(n)}" + (f"x{lists}" if lists > 1 else ""), us)


def vote(n):
    """On contiguous keys: scores of all heads, softmax, sum over heads."""
    sets = max(2, int(200e6 / (2048 * n)) + 1)
    keys = torch.randn(sets, 8, n, 128, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(8, 4, 128, device="cuda", dtype=torch.bfloat16) / 128**0.5

    def call(i):
        scores = torch.matmul(q, keys[i % sets].transpose(1, 2)).float()
        return torch.softmax(scores, -1).sum((0, 1))

    print(f"vote/{length(n)}", microseconds(call, max(sets, 4)))


def main():
    for n in (1 << 15, 1 << 17, 1 << 19, 1 << 20):
        topk(1, n, 2048)
    for lists, n in ((8, 2048), (8, 8192), (8, 65536), (64, 8192)):
        topk(lists, n, 128)
    for n in (1 << 15, 1 << 17, 1 << 19, 1 << 20):
        vote(n)


if __name__ == "__main__":
    main()
