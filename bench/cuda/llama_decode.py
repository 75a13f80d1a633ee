#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times a decode loop of transformers' Llama-3.1-8B modules (random weights, bf16) in one CUDA graph, with torch's
dense attentions and with kvstratad's.

    llama_decode.py [--batches 1,4,7] [--tokens 131072] [--plans full,'bits{budget = 2048}'] [--dense flash,cudnn]
                    [--compiled MODE] [--json-out FILE]
    llama_decode.py --check      logits of a few steps of a small model, dense against plan full

The prompt is noise, written layer by layer; then tokens are decoded greedily. A graph holds a whole token: embedding,
layers, head, argmax, and its id is the next token's input. The loop reads an id while the next token is computed, as
engines do that schedule ahead (session.late_tokens). Dense attention reads keys and values of all positions, and those
that have yet to come (0.1 % more), since a graph's lengths are fixed. All run in one process, one after the other.
`value` is the median time between tokens; `tokens_s` counts all sequences. A batch that does not fit is left out, by
name.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

import kvstrata
from kvstrata.daemon import Daemon

NAME, CHUNK, WARM_UPS, DECODED = "decode_loop", 4096, 8, 100
SPARE = 128  # positions behind the prompt, all that are decoded
DENSE = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


class Shape(NamedTuple):
    batch: int
    tokens: int


def llama(layers: int = 32, hidden: int = 4096, inner: int = 14336, heads: int = 32, kv_heads: int = 8) -> LlamaConfig:
    return LlamaConfig(vocab_size=128256, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
                       num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=128, rms_norm_eps=1e-5,
                       max_position_embeddings=131072 + SPARE, attn_implementation=NAME)


def make_model(config: LlamaConfig, compiled: str | None) -> LlamaForCausalLM:
    """compiled: norms, rotary embedding, residuals and the MLP's products by torch.compile, up to attention and from
    it on."""
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"), torch.no_grad():
        model = LlamaForCausalLM(config).eval()
    if compiled:
        for layer in model.model.layers:
            layer.compile(dynamic=False, mode=compiled)
    return model


def noise(config: LlamaConfig, row: int, layer: int, first: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [n][kv heads][dim] of a sequence's positions from `first` on."""
    generator = torch.Generator("cuda").manual_seed((row * 64 + layer) * 1_000_003 + first)
    k, v = torch.randn(2, n, config.num_key_value_heads, config.head_dim, generator=generator, device="cuda",
                       dtype=torch.bfloat16)
    return k, v


class DenseCache:
    """Keys and values in one tensor a layer, attended by one of torch's backends."""

    def __init__(self, config: LlamaConfig, shape: Shape, backend: SDPBackend) -> None:
        self._backend = backend
        size = (shape.batch, config.num_key_value_heads, shape.tokens + SPARE, config.head_dim)
        self._kv = [(torch.zeros(size, device="cuda"), torch.zeros(size, device="cuda"))
                    for _ in range(config.num_hidden_layers)]
        for layer, pair in enumerate(self._kv):
            for row in range(shape.batch):
                for first in range(0, shape.tokens, CHUNK):
                    n = min(CHUNK, shape.tokens - first)
                    for to, part in zip(pair, noise(config, row, layer, first, n)):
                        to[row, :, first:first + n] = part.transpose(0, 1)

    def attend(self, layer: int, position: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
               ) -> torch.Tensor:
        keys, values = self._kv[layer]
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        # The reference of --check sees what was written only.
        mask = (torch.arange(keys.shape[2], device="cuda") <= position)[None, None, None] \
            if self._backend is SDPBackend.MATH else None
        with sdpa_kernel(self._backend):
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    @contextlib.contextmanager
    def token(self) -> Iterator[Callable[[], bool]]:
        yield lambda: True

    def late_ids(self, ids: list[int]) -> None:
        pass


class DaemonCache:
    """Sequences of kvstratad's; a token is a step."""

    def __init__(self, config: LlamaConfig, shape: Shape, session: kvstrata.Session, plan: str) -> None:
        self._session = session
        self._step: Any = None
        model = session.register_model("llama", f"noise:{config.num_hidden_layers}", layers=config.num_hidden_layers,
                                       query_heads=config.num_attention_heads, head_dim=config.head_dim,
                                       kv_heads=config.num_key_value_heads, page_tokens=16)
        self._sequences = []
        for row in range(shape.batch):
            sequence = session.open(model, plan)
            for first in range(0, shape.tokens, CHUNK):
                n = min(CHUNK, shape.tokens - first)
                ids = [1 + row * 131072 + first + i for i in range(n)]  # no prefix is shared
                with session.step([(sequence, ids)]) as step:
                    for layer in range(config.num_hidden_layers):
                        step.append(layer, *noise(config, row, layer, first, n))
            sequence.prefill_done()
            self._sequences.append(sequence)

    def attend(self, layer: int, position: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
               ) -> torch.Tensor:
        rows = [x[:, :, 0] for x in (q, k, v)]  # one token of each sequence: [batch][heads][dim]
        out = torch.empty_like(rows[0])
        self._step.append(layer, rows[1], rows[2])
        self._step.attend(layer, rows[0], out)
        return out[:, None]

    @contextlib.contextmanager
    def token(self) -> Iterator[Callable[[], bool]]:
        """Gives whether the graph of the last capture serves this token."""
        with self._session.step([(s, 1) for s in self._sequences]) as self._step:
            yield self._replays

    def late_ids(self, ids: list[int]) -> None:
        """Tells the last token's ids."""
        self._session.late_tokens([(s, [i]) for s, i in zip(self._sequences, ids)])

    def _replays(self) -> bool:
        try:
            self._step.replay()
            return True
        except kvstrata.FailedPrecondition as error:
            if error.reason != "GRAPH_STALE":
                raise
            return False


class Loop:
    """Greedy decoding over a cache; the cache that attention calls is the loop's that runs."""

    current: Any = None

    def __init__(self, model: LlamaForCausalLM, cache: Any, shape: Shape) -> None:
        self._model, self._cache = model, cache
        self.ids = torch.arange(shape.batch, device="cuda")[:, None] + 17
        self.position = torch.full((1,), shape.tokens, device="cuda")
        self.logits: torch.Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self.captures = 0
        self._inputs = torch.empty(shape.batch, dtype=self.ids.dtype, pin_memory=True)
        self._known = torch.cuda.Event()
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def forward(self) -> None:
        Loop.current = self
        self.logits = self._model(input_ids=self.ids, position_ids=self.position[None].expand(len(self.ids), 1),
                                  use_cache=False).logits[:, -1]
        self.ids.copy_(self.logits.argmax(-1, keepdim=True))
        self.position.add_(1)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._cache.attend(layer, self.position, q, k, v)

    def eager(self) -> None:
        with self._cache.token():
            ids = self.ids[:, 0].tolist()
            self.forward()
        self._cache.late_ids(ids)

    def token(self) -> None:
        """Enqueues a token of each sequence, captured anew where the graph does not serve, and waits for the one
        before: its ids are this one's input."""
        self._inputs.copy_(self.ids[:, 0], non_blocking=True)
        self._known.record()
        with self._cache.token() as serves:
            if self._graph is None or not serves():
                self._capture()
            assert self._graph is not None
            self._began.record()
            self._graph.replay()
            self._ended.record()
        self._known.synchronize()
        self._cache.late_ids(self._inputs.tolist())

    def gpu_ms(self) -> float:
        """Milliseconds of the last token's graph, which it waits for."""
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended))

    def _capture(self) -> None:
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        self.captures += 1
        self._graph.capture_begin()
        self.forward()
        self._graph.capture_end()


@torch.compiler.disable
def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any,
              **__: Any) -> tuple[torch.Tensor, None]:
    return Loop.current.attend(module.layer_idx, query, key, value), None


def timed(loop: Loop, shape: Shape, profile: bool) -> dict[str, Any]:
    loop.eager()
    for _ in range(WARM_UPS):
        loop.token()
    if profile and shape.batch == 1:
        profiled(loop)
    before, times = loop.captures, []
    for _ in range(DECODED):
        start = time.perf_counter()
        loop.token()
        times.append((time.perf_counter() - start) * 1e3)
    on_gpu = loop.gpu_ms()
    times.sort()
    return {"value": statistics.median(times), "unit": "ms", "p10": times[len(times) // 10],
            "p90": times[len(times) * 9 // 10], "n": DECODED, "tokens_s": shape.batch * 1e3 / statistics.fmean(times),
            "gpu_ms": on_gpu, "captures": loop.captures - before}


def profiled(loop: Loop) -> None:
    """Prints the kernels that a token's time goes into."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        loop.token()
        torch.cuda.synchronize()
    print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=18, max_name_column_width=90), flush=True)


def fresh() -> None:
    """Releases the memory of the loop before."""
    Loop.current = None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def daemon_session(config: LlamaConfig, shape: Shape) -> Iterator[kvstrata.Session]:
    rows = shape.batch * (shape.tokens + SPARE) * config.num_hidden_layers * config.num_key_value_heads
    mib = int(rows * config.head_dim * 4 * 1.04 / 2**20) + 1024  # pages, index, arenas that are not full
    with Daemon("--set", "pool.device=cuda", "--set", f"pool.device_bytes={mib}MiB", "--set",
                "pool.arena_bytes=256MiB", "--set", "pool.host_bytes=16MiB") as daemon, \
            kvstrata.attach(daemon.socket) as session:
        yield session


def rows_of(model: LlamaForCausalLM, shape: Shape, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in options.dense:
        fresh()
        with torch.cuda.stream(torch.cuda.Stream()):
            loop = Loop(model, DenseCache(model.config, shape, DENSE[name]), shape)
            yield {"plan": f"torch {name}", **timed(loop, shape, options.profile)}
            del loop
    for plan in options.plans:
        fresh()
        with daemon_session(model.config, shape) as session, torch.cuda.stream(torch.cuda.Stream()):
            loop = Loop(model, DaemonCache(model.config, shape, session, plan), shape)
            yield {"plan": plan, **timed(loop, shape, options.profile)}
            del loop


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    model = make_model(llama(), options.compiled)
    rows = []
    for batch in options.batches:
        shape = Shape(batch, options.tokens)
        try:
            for row in rows_of(model, shape, options):
                rows.append({"id": f"decode/{options.compiled}/b{batch}/{row['plan']}", "batch": batch,
                             "tokens": options.tokens, **row})
                print(f"{rows[-1]['id']}: {row['value']:.3f} ms ({row['p10']:.3f} to {row['p90']:.3f}), "
                      f"{row['gpu_ms']:.3f} on the GPU, {row['tokens_s']:.1f} tokens/s, {row['captures']} captures",
                      flush=True)
        except (torch.cuda.OutOfMemoryError, kvstrata.ResourceExhausted) as error:
            print(f"batch {batch} does not fit: {str(error)[:300]}", flush=True)
    return judged(rows, options)


def judged(rows: list[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Adds the ratio of tokens/s over the best dense attention."""
    must = {1: 1.6, 4: 3.3}
    for row in rows:
        alike = [r for r in rows if r["batch"] == row["batch"] and r["plan"].startswith("torch ")]
        if row in alike or not alike:
            continue
        best = min(alike, key=lambda r: r["value"])
        row["baseline"] = {"name": best["plan"], "value": best["value"]}
        row["ratio"] = row["tokens_s"] / best["tokens_s"]
        if row["plan"].startswith("bits"):
            row["must"] = must.get(row["batch"], 4.5)
    return rows


def check() -> None:
    """A small model's logits over plan full and over a dense reference, of the same prompt and forced ids."""
    config, shape = llama(layers=3, hidden=1024, inner=2048, heads=16, kv_heads=4), Shape(2, 5000)
    model = make_model(config, compiled=None)
    with daemon_session(config, shape) as session, torch.cuda.stream(torch.cuda.Stream()):
        loops = [Loop(model, DenseCache(config, shape, SDPBackend.MATH), shape),
                 Loop(model, DaemonCache(config, shape, session, "full"), shape)]
        for token in range(24):
            for loop in loops:
                loop.eager() if token == 0 else loop.token()
            torch.cuda.synchronize()
            want, got = (loop.logits.float() for loop in loops)
            worst = float((want - got).abs().max() / want.abs().max())
            assert worst < 2e-2, f"token {token}: logits differ by {worst:.4f} of the largest"
            loops[1].ids.copy_(loops[0].ids)
    print(f"check: 24 tokens, logits differ by at most {worst:.4f} of the largest, {loops[1].captures} captures")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--batches", type=lambda text: [int(x) for x in text.split(",")], default=[1, 4, 7])
    parser.add_argument("--compiled", metavar="MODE", help="torch.compile, in this mode, of what is between attentions")
    parser.add_argument("--profile", action="store_true", help="time of the kernels of a token at batch 1")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--plans", type=lambda text: text.split(","), default=["full", "bits{budget = 2048}"])
    parser.add_argument("--dense", type=lambda text: text.split(","), default=list(DENSE), help=f"of {', '.join(DENSE)}")
    parser.add_argument("--json-out")
    parser.add_argument("--commit", default="")
    parser.add_argument("--date", default="")
    options = parser.parse_args()
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    with torch.no_grad():
        if options.check:
            return check()
        rows = measure(options)
    if options.json_out:
        result = {"suite": "cuda-decode", "device": torch.cuda.get_device_name(), "commit": options.commit,
                  "date": options.date, "command": "bench/cuda/llama_decode.py", "ceilings": {},
                  "context": {"notes": __doc__.strip(), "torch": torch.__version__}, "rows": rows}
        with open(options.json_out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
