# SPDX-License-Identifier: Apache-2.0
"""Records and reads traces: what a model wrote into its cache and asked of it (docs/traces.md).

    python -m kvstrata_numpy.trace --out FILE [--model GGUF] [--doc TEXT] [--tokens N] [--steps T]
                                   [--tail N] [--layers 0,9,19,29] [--read] [--socket PATH] [--plan PLAN]

The prompt is the document's first N tokens; the steps feed what the model writes (greedy), with --read the
document's next T tokens (at the speed of a prefill, without entropies). Without --socket, keys and values stay in this process. `kvstrata replay FILE --plan quest` runs a trace.

read() maps a file and proves it whole: TraceError names what is wrong with a truncated or foreign one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvstrata

from .cache import Cache, bf16_bits
from .engine import PAGE_TOKENS, Engine
from .gguf_file import Array, GgufError
from .llama import Config, entropy_of

FORMAT, VERSION = "kvstrata-trace", "1"
_DTYPES = {"BF16": np.uint16, "F32": np.float32, "I32": np.int32, "U8": np.uint8}
_NAMES = {np.dtype(kind).name: name for name, kind in _DTYPES.items()}
_MAX_HEADER = 100_000_000


class TraceError(ValueError):
    """A trace that cannot be used: `reason` as in docs/traces.md, and what is wrong."""

    def __init__(self, path: str, reason: str, message: str) -> None:
        super().__init__(f"{reason}: trace '{path}': {message}")
        self.reason = reason


@dataclass
class Trace:
    """Arrays are read-only views of the file; k, v, q by layer, bf16 bit patterns as uint16."""

    metadata: dict[str, str]
    arrays: dict[str, np.ndarray]

    @property
    def prompt(self) -> int:
        return int(self.metadata["N0"])

    @property
    def steps(self) -> int:
        return int(self.metadata["T"])

    @property
    def tail(self) -> int:
        return int(self.metadata["tail"])

    @property
    def layers(self) -> list[int]:
        return _layers(self.metadata)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]


# ---- reading ----

def _layers(metadata: dict[str, str]) -> list[int]:
    given = metadata.get("trace_layers", "")
    return [int(x) for x in given.split(",")] if given else list(range(int(metadata["layers"])))


def _header(path: str, data: np.ndarray) -> tuple[dict[str, Any], int]:
    """The JSON header, and where the tensors' bytes begin."""
    if data.size < 8:
        raise TraceError(path, "TRACE_TRUNCATED", f"{data.size} bytes; a header alone has 8")
    size = int(data[:8].view("<u8")[0])
    if not 2 <= size <= _MAX_HEADER or (data.size > 8 and data[8] != ord("{")):
        raise TraceError(path, "TRACE_FOREIGN", "not a safetensors file")
    if 8 + size > data.size:
        raise TraceError(path, "TRACE_TRUNCATED", f"the header has {size} bytes, the file {data.size}")
    try:
        header = json.loads(bytes(data[8:8 + size]))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TraceError(path, "TRACE_HEADER", f"the header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise TraceError(path, "TRACE_HEADER", "the header is no JSON object")
    return header, 8 + size


def _views(path: str, header: dict[str, Any], data: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors by name; `data` are the bytes behind the header."""
    arrays, at = {}, 0
    try:
        members = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        for name, member in members:
            (begin, end), shape = member["data_offsets"], tuple(member["shape"])
            kind = np.dtype(_DTYPES[member["dtype"]])
            if begin != at or end - begin != kind.itemsize * int(np.prod(shape, dtype=np.int64)):
                raise TraceError(path, "TRACE_HEADER", f"tensor {name!r}: bytes {begin} .. {end} do not "
                                 f"fit {member['dtype']} {list(shape)} beginning at {at}")
            if end > data.size:
                raise TraceError(path, "TRACE_TRUNCATED", f"tensor {name!r} ends at byte {end}, "
                                 f"the data at {data.size}")
            arrays[name], at = data[begin:end].view(kind).reshape(shape), end
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(path, "TRACE_HEADER", f"a tensor's member is malformed: {error!r}") from error
    if at != data.size:
        raise TraceError(path, "TRACE_HEADER", f"{data.size - at} bytes belong to no tensor")
    return arrays


def _check_metadata(path: str, metadata: dict[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise TraceError(path, "TRACE_FOREIGN", f"__metadata__.format is {metadata.get('format')!r}, "
                         f"of a trace it is {FORMAT!r}")
    if metadata.get("format_version") != VERSION:
        raise TraceError(path, "TRACE_VERSION", f"format_version is {metadata.get('format_version')!r}; "
                         f"this program reads {VERSION}")
    for key in ("layers", "query_heads", "kv_heads", "head_dim", "page_tokens", "N0", "T", "tail"):
        least = 0 if key in ("T", "tail") else 1
        value = metadata.get(key, "")
        if not value.isdecimal() or int(value) < least:
            raise TraceError(path, "TRACE_METADATA", f"{key} is {value or 'missing'!r}; "
                             f"it is a number of at least {least}")
    if int(metadata["tail"]) > int(metadata["N0"]):
        raise TraceError(path, "TRACE_METADATA", f"tail = {metadata['tail']} exceeds N0 = {metadata['N0']}")
    if metadata.get("keys") not in ("post_rope", "pre_rope"):
        raise TraceError(path, "TRACE_METADATA", f"keys is {metadata.get('keys')!r}; "
                         "allowed: 'post_rope', 'pre_rope'")
    for key in ("rope_theta", "rope_dim") if metadata["keys"] == "pre_rope" else ():
        if key not in metadata:
            raise TraceError(path, "TRACE_METADATA", f"{key} is missing; keys = pre_rope needs it")


def _wanted(metadata: dict[str, str]) -> dict[str, tuple[type, tuple[int, ...]]]:
    number = lambda key: int(metadata[key])
    total, dim = number("N0") + number("T"), number("head_dim")
    out: dict[str, tuple[type, tuple[int, ...]]] = {"tokens": (np.int32, (total,))}
    for layer in _layers(metadata):
        out[f"k.{layer}"] = out[f"v.{layer}"] = (np.uint16, (total, number("kv_heads"), dim))
        out[f"q.{layer}"] = (np.uint16, (number("tail") + number("T"), number("query_heads"), dim))
    return out


def read(path: str | os.PathLike[str]) -> Trace:
    """Maps the file. Errors: TraceError; nothing of a bad file is returned."""
    path = os.fspath(path)
    try:
        with open(path, "rb") as file:
            data = (np.memmap(file, np.uint8, "r") if os.path.getsize(path)
                    else np.zeros(0, np.uint8))
    except OSError as error:
        raise TraceError(path, "TRACE_UNREADABLE", error.strerror or str(error)) from error
    header, begin = _header(path, data)
    metadata = header.pop("__metadata__", {})
    _check_metadata(path, metadata)
    arrays = _views(path, header, data[begin:])
    prompt, steps = int(metadata["N0"]), int(metadata["T"])
    of_all = "surprisal" in arrays and arrays["surprisal"].shape == (prompt + steps,)
    optional = {"surprisal": (np.float32, (prompt + steps if of_all else prompt,)),
                "entropy": (np.float32, (steps,)), "boundary": (np.uint8, (prompt + steps,))}
    wanted = _wanted(metadata)
    for name, (kind, shape) in {**wanted, **optional}.items():
        if name not in arrays and name in optional:
            continue
        got = arrays.get(name)
        if got is None or got.dtype != kind or got.shape != shape:
            found = "missing" if got is None else f"{got.dtype} {list(got.shape)}"
            raise TraceError(path, "TRACE_TENSOR", f"tensor {name!r} is {found}; "
                             f"it must be {np.dtype(kind)} {list(shape)}")
    for name in ("surprisal", "entropy"):
        if name in arrays and not (np.isfinite(arrays[name]).all() and (arrays[name] >= 0).all()):
            raise TraceError(path, "TRACE_VALUE", f"{name!r} holds a value that is negative or not finite")
    return Trace(metadata, arrays)


# ---- recording ----

class Recorder:
    """A cache around a cache: keeps what passes of the layers asked for."""

    def __init__(self, inner: Cache, config: Config, layers: Sequence[int], total: int,
                 first_query: int) -> None:
        self.inner = inner
        self._first_query = first_query
        rows = lambda n, heads: np.zeros((n, heads, config.head_dim), np.uint16)
        self.arrays: dict[str, np.ndarray] = {}
        for layer in layers:
            self.arrays[f"k.{layer}"] = rows(total, config.kv_heads)
            self.arrays[f"v.{layer}"] = rows(total, config.kv_heads)
            self.arrays[f"q.{layer}"] = rows(total - first_query, config.query_heads)

    @property
    def tokens(self) -> int:
        return self.inner.tokens

    def begin(self, ids: Sequence[int]) -> None:
        self.inner.begin(ids)

    def attend(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        if f"k.{layer}" in self.arrays:
            first, n = self.tokens, len(k)
            self.arrays[f"k.{layer}"][first:first + n] = bf16_bits(k)
            self.arrays[f"v.{layer}"][first:first + n] = bf16_bits(v)
            skip = max(0, self._first_query - first)
            if skip < n:
                at = first + skip - self._first_query
                self.arrays[f"q.{layer}"][at:at + n - skip] = bf16_bits(q[skip:])
        return self.inner.attend(layer, q, k, v)

    def end(self) -> None:
        self.inner.end()

    def abort(self) -> None:
        self.inner.abort()

    def prefill_done(self) -> None:
        self.inner.prefill_done()

    def report(self, first: int, entropy: Array | None = None, surprisal: Array | None = None) -> None:
        self.inner.report(first, entropy, surprisal)


def write(path: str | os.PathLike[str], arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """The safetensors format by hand: its Python package has no bf16 for numpy."""
    header: dict[str, Any] = {"__metadata__": metadata}
    # Each tensor begins at a multiple of its dtype's size: the wider first, bytes last.
    arrays = dict(sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize))
    at = 0
    for name, x in arrays.items():
        header[name] = {"dtype": _NAMES[x.dtype.name], "shape": list(x.shape),
                        "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = f"{os.fspath(path)}.partial"
    with open(partial, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for x in arrays.values():
            file.write(np.ascontiguousarray(x).data)
    os.replace(partial, path)  # a half-written trace never bears the name


def metadata_of(engine: Engine, layers: Sequence[int], prompt: int, steps: int, tail: int,
                source: str) -> dict[str, str]:
    c = engine.llama.config
    numbers = {"layers": c.layers, "query_heads": c.query_heads, "kv_heads": c.kv_heads,
               "head_dim": c.head_dim, "page_tokens": PAGE_TOKENS, "N0": prompt, "T": steps, "tail": tail,
               "rope_theta": c.rope_theta, "rope_dim": c.head_dim, "rope_interleaved": 0}
    keys = "pre_rope" if c.pre_rope else "post_rope"
    return {"format": FORMAT, "format_version": VERSION, "keys": keys, "model": c.name,
            "digest": engine.digest, "tokenizer": engine.tokenizer.name, "rope_scaling": "none",
            "source": source, "trace_layers": ",".join(map(str, layers)),
            **{key: str(value) for key, value in numbers.items()}}


def record(engine: Engine, cache: Cache, ids: list[int], steps: int, tail: int, layers: Sequence[int],
           source: str, progress: Any = None) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Runs prompt and steps; tensors and metadata of the trace. The cache must be empty."""
    tail = min(tail, len(ids))
    total = len(ids) + steps
    recorder = Recorder(cache, engine.llama.config, layers, total, len(ids) - tail)
    surprisal, entropy = np.zeros(len(ids), np.float32), np.zeros(steps, np.float32)
    logits = engine.prefill(recorder, ids, progress, surprisal)
    tokens = list(ids)
    for t in range(steps):
        tokens.append(int(logits.argmax()))
        logits = engine.step(recorder, tokens[-1])
        entropy[t] = max(0.0, float(entropy_of(logits)))
    boundary = np.isin(tokens, engine.tokenizer.boundary_tokens()).astype(np.uint8)
    arrays = {"tokens": np.array(tokens, np.int32), "surprisal": np.maximum(surprisal, 0),
              "entropy": entropy, "boundary": boundary, **recorder.arrays}
    return arrays, metadata_of(engine, layers, len(ids), steps, tail, source)


def record_reading(engine: Engine, cache: Cache, ids: list[int], steps: int, tail: int, layers: Sequence[int],
                   source: str, progress: Any = None) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """record() of a model that reads on: the steps feed the last `steps` of `ids`, whose surprisals are known."""
    prompt = len(ids) - steps
    tail = min(tail, prompt)
    recorder = Recorder(cache, engine.llama.config, layers, len(ids), prompt - tail)
    surprisal = np.zeros(len(ids), np.float32)
    engine.prefill(recorder, ids, progress, surprisal)
    boundary = np.isin(ids, engine.tokenizer.boundary_tokens()).astype(np.uint8)
    arrays = {"tokens": np.array(ids, np.int32), "surprisal": np.maximum(surprisal, 0), "boundary": boundary,
              **recorder.arrays}
    return arrays, metadata_of(engine, layers, prompt, steps, tail, source)


def _layer_list(text: str) -> list[int]:
    try:
        layers = sorted({int(x) for x in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: comma-separated layer numbers") from None
    return layers


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvstrata_numpy.trace", description="Records a trace.")
    parser.add_argument("--out", required=True, metavar="FILE", help="the trace, .safetensors")
    parser.add_argument("--model", metavar="GGUF", help="default: SmolLM2-135M-Instruct, fetched once")
    parser.add_argument("--doc", default="/usr/share/common-licenses/GPL-3", metavar="TEXT")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt (default %(default)s)")
    parser.add_argument("--steps", type=int, default=64, help="decode steps (default %(default)s)")
    parser.add_argument("--tail", type=int, default=32, help="prompt queries kept (default %(default)s)")
    parser.add_argument("--layers", type=_layer_list, help="e.g. 0,9,19,29; default: all")
    parser.add_argument("--read", action="store_true", help="the steps feed the document's next tokens")
    parser.add_argument("--socket", help="of a kvstratad that holds keys and values meanwhile")
    parser.add_argument("--plan", default="full", help="with --socket (default %(default)s)")
    parser.add_argument("--pre-rope", action="store_true",
                        help="record keys and queries before rotary embedding; needs --socket")
    options = parser.parse_args(arguments)
    if options.pre_rope and not options.socket:
        parser.error("--pre-rope needs --socket: the daemon rotates")
    return options


def main(arguments: list[str] | None = None) -> int:
    from .download import model_path
    from .progress import bar
    options = _parse(arguments)
    engine = Engine.load(options.model or model_path(), pre_rope=options.pre_rope)
    with open(options.doc, encoding="utf-8", errors="replace") as file:
        ids = engine.tokenizer.encode(file.read())[:options.tokens + (options.steps if options.read else 0)]
    steps = 0 if options.read else options.steps  # behind the ids
    c = engine.llama.config
    layers = list(range(c.layers)) if options.layers is None else options.layers
    if layers[0] < 0 or layers[-1] >= c.layers:
        raise SystemExit(f"--layers: the model has layers 0 .. {c.layers - 1}")
    if not ids or (len(ids) + steps > c.context and not c.pre_rope):
        raise SystemExit(f"{len(ids)} prompt tokens + {steps} steps: allowed are 1 .. {c.context}")
    if options.read and len(ids) <= options.steps:
        raise SystemExit(f"--steps {options.steps}: the document has {len(ids)} tokens, one is the prompt's")
    with contextlib.ExitStack() as stack:
        cache: Cache
        if options.socket:
            engine.attach(stack.enter_context(kvstrata.attach(options.socket, client_name="trace")))
            cache = engine.open(options.plan, [])
        else:
            cache = engine.own_cache(len(ids) + steps)
        progress = stack.enter_context(bar("prefill", "token"))
        record_steps = record_reading if options.read else record
        arrays, metadata = record_steps(engine, cache, ids, options.steps, options.tail, layers,
                                        os.path.basename(options.doc), progress)
    write(options.out, arrays, metadata)
    print(f"{options.out}: {metadata['N0']} + {metadata['T']} tokens, {len(layers)} layers, "
          f"{os.path.getsize(options.out) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (GgufError, kvstrata.KvstrataError, OSError) as error:
        sys.exit(f"kvstrata_numpy.trace: {error}")
