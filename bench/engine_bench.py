#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What attaching costs an engine, and what numpy's best does: the two comparisons that need Python.

    engine_bench.py --json-out FILE [--commit HASH] [--date DATE]

engine/full-tax   one decode step of the numpy engine (SmolLM2-135M, about 2K tokens of context) with its
                  cache in kvstratad under plan full, against the same engine with a cache of its own and
                  the same kernel on it (libkvs_op_attend). Steps alternate; medians.
numpy/attend      attention of one token over 32K tokens, 8 KV heads x 128, 32 query heads: the simd
                  backend on bf16 pages against numpy's fp32 BLAS on the same values, 2 threads each,
                  rotated over arrays beyond the last-level cache.
"""
import argparse
import ctypes
import json
import math
import os
import pathlib
import platform
import statistics
import sys
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "2")
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "integrations" / "kvstrata" / "src"),
                str(ROOT / "integrations" / "kvstrata_numpy" / "src")]

import numpy as np  # noqa: E402

import kvstrata  # noqa: E402
from kvstrata.daemon import Daemon  # noqa: E402
from kvstrata.machine import device_name  # noqa: E402
from kvstrata_numpy.cache import bf16_bits, from_bf16_bits  # noqa: E402
from kvstrata_numpy.download import model_path  # noqa: E402
from kvstrata_numpy.engine import Engine  # noqa: E402

THREADS = 2
CONTEXT, STEPS = 2048, 60
TOKENS, KV_HEADS, GROUP, DIM, PAGE, BUFFERS = 32768, 8, 4, 128, 16, 4


def op_attend():
    function = ctypes.CDLL(str(ROOT / "build" / "lib" / "libkvs_op_attend.so")).kvs_op_attend
    function.argtypes = [ctypes.c_void_p] + [ctypes.c_int] * 5 + [
        ctypes.c_float, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    return function


class KernelCache:
    """A cache of the engine's own: bf16 pages of one layer each, the same kernel on them."""

    def __init__(self, source, config, capacity):
        """Takes what `source`, a DaemonCache, holds."""
        self.config, self.tokens, self._attend = config, source.tokens, op_attend()
        page = source.sequence.model.page_tokens
        self.page, pages = page, -(-capacity // page)
        shape = (config.layers, 2, config.kv_heads, page, config.head_dim)
        self._rows = np.zeros((config.layers, pages, *shape[1:]), np.uint16)
        for i, entry in enumerate(source.sequence.page_table()[0][:-(-self.tokens // page)]):
            raw = (ctypes.c_uint16 * math.prod(shape)).from_address(entry.address)
            self._rows[:, i] = np.frombuffer(raw, np.uint16).reshape(shape)
        step = self._rows[0, 0].nbytes
        self._tables = [np.array([self._rows[layer].ctypes.data + i * step for i in range(pages)], np.uint64)
                        for layer in range(config.layers)]

    def begin(self, ids):
        assert len(ids) == 1

    def attend(self, layer, q, k, v):
        page, slot = divmod(self.tokens, self.page)
        self._rows[layer, page, 0, :, slot] = bf16_bits(k[0])
        self._rows[layer, page, 1, :, slot] = bf16_bits(v[0])
        q = np.ascontiguousarray(q, np.float32)
        out = np.empty_like(q)
        c = self.config
        assert 0 == self._attend(self._tables[layer].ctypes.data, self.tokens + 1, self.page, c.kv_heads,
                                 c.query_heads // c.kv_heads, c.head_dim, 1 / math.sqrt(c.head_dim),
                                 q.ctypes.data, out.ctypes.data, THREADS)
        return out

    def end(self):
        self.tokens += 1

    def report(self, first, entropy):
        pass


def percentile(xs, p):
    return float(np.percentile(xs, p))


def row(name, unit, values, base_name, base, must):
    value, baseline = statistics.median(values), statistics.median(base)
    return {"id": name, "value": value, "unit": unit, "p10": percentile(values, 10),
            "p90": percentile(values, 90), "n": len(values),
            "baseline": {"name": base_name, "value": baseline}, "ratio": baseline / value, "must": must}


def engine_tax():
    engine = Engine.load(model_path())
    text = pathlib.Path("/usr/share/common-licenses/GPL-3").read_text()
    ids = engine.tokenizer.encode(text)[:CONTEXT]
    with Daemon() as daemon, kvstrata.attach(daemon.socket, threads=THREADS) as session:
        engine.attach(session)
        attached = engine.open("full", ids)
        logits = engine.prefill(attached, ids)
        own = KernelCache(attached, engine.llama.config, CONTEXT + STEPS + 8)
        token, times = int(logits.argmax()), {0: [], 1: []}
        for i in range(STEPS):
            answers = {}
            for which, cache in ((0, own), (1, attached)) if i % 2 else ((1, attached), (0, own)):
                begin = time.perf_counter()
                answers[which] = engine.step(cache, token)
                times[which].append((time.perf_counter() - begin) * 1e3)
            assert answers[0].argmax() == answers[1].argmax(), "the two caches disagree"
            token = int(answers[1].argmax())
        attached.close()
    return row("engine/full-tax", "ms", times[1][4:], "own cache, same kernel", times[0][4:], 0.98)


def numpy_attend():
    rng, attend = np.random.default_rng(), op_attend()
    scale, pages = 1 / math.sqrt(DIM), TOKENS // PAGE
    buffers = []
    for _ in range(BUFFERS):
        bits = bf16_bits(rng.standard_normal((pages, 2, KV_HEADS, PAGE, DIM), np.float32))
        table = np.array([bits.ctypes.data + i * bits[0].nbytes for i in range(pages)], np.uint64)
        # [2][head][token][dim] fp32, as BLAS likes it best.
        buffers.append((bits, table, from_bf16_bits(np.ascontiguousarray(
            bits.transpose(1, 2, 0, 3, 4).reshape(2, KV_HEADS, TOKENS, DIM)))))
    q = rng.standard_normal((KV_HEADS * GROUP, DIM), np.float32)

    def ours(buffer):
        out = np.empty_like(q)
        attend(buffer[1].ctypes.data, TOKENS, PAGE, KV_HEADS, GROUP, DIM, scale, q.ctypes.data,
               out.ctypes.data, THREADS)
        return out

    def blas(buffer):
        keys, values = buffer[2]
        s = np.matmul(q.reshape(KV_HEADS, GROUP, DIM), keys.transpose(0, 2, 1)) * np.float32(scale)
        s -= s.max(axis=-1, keepdims=True)
        np.exp(s, out=s)
        return (np.matmul(s, values) / s.sum(axis=-1, keepdims=True)).reshape(-1, DIM)

    times = {ours: [], blas: []}
    for i in range(24):
        buffer = buffers[i % BUFFERS]
        out = {}
        for f in (ours, blas):
            begin = time.perf_counter()
            out[f] = f(buffer)
            times[f].append((time.perf_counter() - begin) * 1e3)
        np.testing.assert_allclose(out[ours], out[blas], rtol=1e-3, atol=1e-4)
    return row("numpy/attend/32K", "ms", times[ours][4:], "numpy fp32 BLAS", times[blas][4:], 3.0)


def write_result(args, suite, notes, rows):
    """Prints rows; keeps them where args.json_out says (docs/results.md)."""
    for r in rows:
        print(f"{r['id']:20} {r['value']:8.2f} {r['unit']}  {r['ratio']:.3f}x {r['baseline']['name']}")
    if args.json_out:
        result = {"suite": suite, "device": device_name(), "commit": args.commit, "date": args.date,
                  "command": "make bench",
                  "context": {"cpu": platform.processor(), "numpy": np.__version__, "notes": notes},
                  "ceilings": {}, "rows": rows}
        pathlib.Path(args.json_out).write_text(json.dumps(result, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json-out")
    parser.add_argument("--commit", default="uncommitted")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    rows = [numpy_attend(), engine_tax()]
    write_result(args, "engine", "", rows)


if __name__ == "__main__":
    main()
