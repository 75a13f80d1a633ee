# SPDX-License-Identifier: Apache-2.0
"""Session, Model, Sequence, Step: kvstrata.h with Python's manners.

    with kvstrata.attach() as session:
        model = session.register_model(name="m", digest="...", layers=30, query_heads=9, kv_heads=3,
                                       head_dim=64)
        with session.open(model, "quest{budget = 1024}", prompt) as sequence:
            with session.step([(sequence, prompt[sequence.held:])]) as step:
                for layer in range(30):
                    step.append(layer, k, v)          # torch, numpy or DLPack; no copy
                    out = step.attend(layer, q)
            sequence.prefill_done()

Leaving a `with` block closes; leaving a step's by an exception aborts it (nothing is committed). What is
dropped without that is closed, or aborted, when it is collected; at the interpreter's end the daemon does it.
Threads: a session from many; one sequence, and one step, from one thread at a time. Errors: errors.py.
"""

from __future__ import annotations

import ctypes as c
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence as Items
from dataclasses import dataclass
from enum import IntFlag
from functools import cached_property
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import library as lib
from .errors import KvstrataError, NotFound, Unavailable, error_of
from .tensors import (BlockTensor, DType, View, empty_like, lse_of, stream_of, take_array, tensor_of)

Ids = Items[int] | npt.NDArray[np.int32]
_TOKENS, _UNITS = 0, 1
_UNLIMITED = 2**64 - 1
_MAX_TOKENS = 1 << 24  # tokens of a sequence
_ANY_STREAM = 1


def _ids(values: Ids, of: str = "token ids", reason: str = "TOKENS_INVALID") -> npt.NDArray[np.int32]:
    """Contiguous int32; refuses what int32 cannot hold."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise error_of(3, reason, f"{of} have shape {array.shape} and type {array.dtype}; "
                       "they are a flat list of integers")
    if array.size and (array.min() < 0 or array.max() > 0x7FFFFFFF):
        raise error_of(3, reason, f"{of} are between 0 and 2147483647")
    return np.ascontiguousarray(array, np.int32)


def _block_ids(blocks: Ids) -> npt.NDArray[np.int32]:
    return _ids(blocks, "block ids", "BLOCKS_INVALID")


def _position(first: int) -> int:
    """ctypes would wrap what uint32 cannot hold."""
    if not 0 <= first <= 0xFFFFFFFF:
        raise error_of(3, "ARGUMENT_RANGE", f"first is {first}; allowed are 0 to 4294967295")
    return first


def _int32s(array: npt.NDArray[np.int32]) -> Any:
    return array.ctypes.data_as(c.POINTER(c.c_int32))


def _member(sequence: Sequence, ids: npt.NDArray[np.int32] | int) -> lib.StepMember:
    """A number of tokens: their ids come later."""
    if isinstance(ids, int):
        if not 0 <= ids <= _MAX_TOKENS:
            raise error_of(3, "ARGUMENT_RANGE", f"a member has {ids} tokens; allowed are 1 to {_MAX_TOKENS}")
        return lib.StepMember(sequence.handle, None, ids)
    return lib.StepMember(sequence.handle, _int32s(ids), ids.size)


class PageTableEntry(NamedTuple):
    """A page of a sequence in this process's memory. tier: 0 device, 1 host; flags: 1 shared, 2 sealed,
    4 absent (address 0: released, the plan's codec holds its rows)."""

    address: int
    tier: int
    flags: int


class Built(NamedTuple):
    """What Sequence.build found and made."""
    indexed_tokens: int  # leading tokens with a complete index of the plan
    built_blocks: int  # index blocks that the daemon made
    extents: int  # the plan's codec has so many now


class Held(NamedTuple):
    """How much of a prompt the daemon holds: leading tokens, of these with a complete index of the plan,
    and by tier, where they need not be consecutive."""

    held: int
    indexed: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int


class Room(NamedTuple):
    """Bytes, and tokens of a model with a plan's index that they hold."""

    tokens: int
    bytes: int


class PoolCapacity(NamedTuple):
    """What a pool has room for: at once; with what nobody uses dropped, as an open does; what the user's own
    limit leaves for more, which bounds both (None: it has no limit)."""

    free: Room
    after_eviction: Room
    limit: Room | None


class Capacity(NamedTuple):
    """What this session has room for now. open_tokens: the longest prompt that an open would take, in both
    pools, were nothing of it held."""

    device: PoolCapacity
    host: PoolCapacity
    open_tokens: int


class Cost(NamedTuple):
    """What attending one layer read: (position, KV head) rows, units as one row, and bytes."""

    rows: int
    coarse_rows: int
    attend_bytes: int
    select_bytes: int


class Need(IntFlag):
    """What a plan needs of the engine beside keys, values and queries (kvs_plan_needs)."""

    TOKEN_IDS = 1
    PREFILL_DONE = 2
    SURPRISAL = 4
    ENTROPY = 8
    BOUNDARY = 16
    PROMPT_QUERIES = 32


class PlanNeeds(NamedTuple):
    """`text`: a line for each, with what becomes of the plan without it."""

    flags: Need
    text: str


def _pool_capacity(pool: lib.PoolCapacity) -> PoolCapacity:
    rooms = [Room(room.tokens, room.bytes) for room in (pool.free, pool.after_eviction, pool.limit)]
    unlimited = pool.limit.bytes == _UNLIMITED
    return PoolCapacity(rooms[0], rooms[1], None if unlimited else rooms[2])


def _finalizer(owner: object, run: Callable[..., object], *args: object) -> weakref.finalize[..., Any]:
    """Runs once: when called, or when `owner` is collected; not at the interpreter's end."""
    finalizer = weakref.finalize(owner, run, *args)
    finalizer.atexit = False
    return finalizer


@dataclass(frozen=True)
class Model:
    """A registered model: its handle and what the daemon checks tensors against."""

    handle: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: DType


class Session:
    """An attachment to a daemon. Closes its sequences when it is closed."""

    def __init__(self, socket: str | os.PathLike[str] | None = None, *, transport: str = "linked",
                 backend: str | None = None, threads: int = 0, timeout_ms: int = 0,
                 client_name: str | None = None, device_uuid: str | None = None) -> None:
        self._handle: int | None = None
        self._lib = lib.load(transport)
        encode = lambda text: None if text is None else os.fspath(text).encode()
        options = lib.AttachOptions(c.sizeof(lib.AttachOptions), encode(device_uuid), encode(client_name),
                                    encode(backend), threads, timeout_ms)
        out = c.c_void_p()
        try:
            self._lib.check(self._lib.kvs_attach(encode(socket), options, out))
        except Unavailable as error:
            if error.reason != "DAEMON_UNREACHABLE":
                raise
            raise error_of(error.code, error.reason, f"{error.message}; or name a running one's: KVSTRATA_SOCKET, or "
                           "`socket`") from None
        self._handle = out.value
        self._detach = _finalizer(self, self._lib.kvs_detach, out.value)

    @property
    def transport(self) -> str:
        return self._lib.kvs_transport().decode()

    @property
    def handle(self) -> int:
        if self._handle is None:
            raise error_of(9, "SESSION_CLOSED", "the session was closed; attach anew")
        return self._handle

    def ping(self) -> None:
        self._lib.check(self._lib.kvs_ping(self.handle))

    def close(self) -> None:
        if self._handle is not None:
            self._handle = None
            self._detach()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def register_model(self, name: str, digest: str, *, layers: int, query_heads: int, kv_heads: int,
                       head_dim: int, page_tokens: int = 32, dtype: DType = DType.BF16,
                       boundary_tokens: Ids = (), adapter: str | None = None,
                       keys_pre_rope: bool = False, rope_theta: float = 0, rope_dim: int = 0,
                       rope_interleaved: bool = False, scale: float = 0, rank: int = 0,
                       ranks: int = 1) -> Model:
        """The same description again gives the same handle.

        scale: of a query's products with keys, before the softmax; 0: 1 / sqrt(head_dim).
        keys_pre_rope: keys and queries come before rotary embedding, and attention rotates the first
        rope_dim channels (0: all) with base rope_theta, pairs (i, i + rope_dim/2) or (2i, 2i + 1).
        """
        boundary = _ids(boundary_tokens)
        desc = lib.ModelDesc(c.sizeof(lib.ModelDesc), name.encode(), digest.encode(),
                             adapter.encode() if adapter else None, layers, query_heads, kv_heads,
                             head_dim, page_tokens, dtype, int(keys_pre_rope), rank, ranks,
                             _int32s(boundary), boundary.size, rope_theta, rope_dim, int(rope_interleaved),
                             scale)
        out = c.c_uint64()
        self._lib.check(self._lib.kvs_model_register(self.handle, desc, out))
        return Model(out.value, layers, query_heads, kv_heads, head_dim, page_tokens, DType(dtype))

    def open(self, model: Model, plan: str = "full", tokens: Ids = (), *, max_held: int = 0,
             only_reported: bool = False, reserve_tokens: int = 0, key: str | None = None,
             private: bool = False) -> Sequence:
        """A sequence; `held` says how many leading tokens of the prompt are there already.

        max_held: hold no more than that, rounded down to whole pages; 0: no limit. only_reported: hold no
        more than the series go that the plan needs, so that it lacks none when this engine reports
        those of the positions that it computes. reserve_tokens: take memory for so many tokens, prompt and
        generated, or refuse (POOL_EXHAUSTED, nothing taken): until it is truncated or closed the sequence
        grows to them without POOL_EXHAUSTED. key: for close_key, truncate_key; up to 63 bytes, unique among this user's
        live sequences (KEY_IN_USE). private: hold nothing, and let nobody find anything of it or of its forks,
        in memory, on disk or in a remote store; for keys and values that depend on more than the model's digest and
        the tokens say. A daemon that is too old for it refuses (Unimplemented).
        """
        ids = _ids(tokens)
        if not 0 <= reserve_tokens <= _MAX_TOKENS:
            raise error_of(3, "SEQUENCE_TOO_LONG",
                           f"reserve_tokens is {reserve_tokens}; allowed are 0 to {_MAX_TOKENS}")
        options = lib.OpenOptions(c.sizeof(lib.OpenOptions), max_held, int(only_reported), reserve_tokens,
                                  int(private), None if key is None else key.encode())
        opened = lib.Opened(c.sizeof(lib.Opened))
        self._lib.check(self._lib.kvs_sequence_open_with(self.handle, model.handle, plan.encode(),
                                                         _int32s(ids), ids.size, options, opened))
        return Sequence(self, model, opened)

    def lookup(self, model: Model, tokens: Ids, plan: str | None = None, device: str | None = None, *,
               lease_ms: int = 0) -> Held:
        """What an open of `plan` would find now, in a session of `device` (None: as this one's).

        Without a plan: raw pages, on whatever device, of at most len(tokens) - 1 tokens. Without `lease_ms` (at most
        60000; with a plan) it takes nothing and promises nothing. With it what is answered stays held so long, for
        every session of this user, or until this session ends: the daemon opens the plan on what is held, as long
        as an open takes, and counts it as a sequence of the user until it is opened. The same prompt and plan again
        renew it. LEASE_TIME, LEASE_PLAN, LEASE_DEVICE, SEQUENCE_LIMIT.
        """
        ids = _ids(tokens)
        if not 0 <= lease_ms < 1 << 32:  # beyond it ctypes would take another number
            raise error_of(3, "LEASE_TIME", f"lease_ms is {lease_ms}; allowed: 0 (none) to 60000")
        options = lib.LookupOptions(c.sizeof(lib.LookupOptions), None if plan is None else plan.encode(),
                                    None if device is None else device.encode(), lease_ms)
        found = lib.LookupResult(c.sizeof(lib.LookupResult))
        self._lib.check(self._lib.kvs_lookup(self.handle, model.handle, options, _int32s(ids), ids.size, found))
        return Held(found.held, found.indexed, found.device_tokens, found.host_tokens, found.disk_tokens)

    def close_key(self, key: str) -> None:
        """Closes the live sequence that any session of this user opened with `key`, also in an open step, which
        then commits nothing of it. Its owner's calls with it raise NotFound. KEY_UNKNOWN."""
        self._lib.check(self._lib.kvs_close_key(self.handle, key.encode()))

    def truncate_key(self, key: str, tokens: int) -> None:
        """Has the live sequence that any session of this user opened with `key` cut to `tokens`, before its owner's
        next call with it but a report or close; an open step is committed first. Of several the least counts.
        KEY_UNKNOWN; refused as `truncate`, but that commits of a linked owner may still be on their way."""
        if not 0 <= tokens < 1 << 32:  # beyond it ctypes would take another number
            raise error_of(3, "TRUNCATE_TOKENS", f"tokens is {tokens}; allowed are 0 to those that the sequence has")
        self._lib.check(self._lib.kvs_truncate_key(self.handle, key.encode(), tokens))

    def capacity(self, model: Model, plan: str = "full") -> Capacity:
        """How many tokens of `model`, with the plan's index, could be opened or grown to as things are, on this
        session's device and in host memory. Takes nothing and promises nothing: others may be faster."""
        room = lib.CapacityResult(c.sizeof(lib.CapacityResult))
        self._lib.check(self._lib.kvs_capacity(self.handle, model.handle, plan.encode(), room))
        return Capacity(_pool_capacity(room.device), _pool_capacity(room.host), room.open_tokens)

    def reorder(self, sequences: Items[Sequence], parents: Items[int]) -> list[Sequence]:
        """Beams: result i continues sequences[parents[i]]. The first that names a parent is the parent itself,
        later ones are forks of it; sequences that are nobody's parent are closed. None may be in an open step."""
        old = (c.c_uint64 * max(1, len(sequences)))(*(sequence.handle for sequence in sequences))
        wanted = (c.c_uint32 * max(1, len(parents)))(*parents)
        out = (c.c_uint64 * max(1, len(parents)))()
        self._lib.check(self._lib.kvs_sequences_reorder(self.handle, old, len(sequences), wanted, len(parents), out))
        by_handle = {sequence.handle: sequence for sequence in sequences}
        result = [by_handle.pop(out[i]) if out[i] in by_handle else sequences[parent]._fork_of(out[i])
                  for i, parent in enumerate(parents)]
        for sequence in by_handle.values():
            sequence._closed()
        return result

    def plan_needs(self, plan: str) -> PlanNeeds:
        """What a plan, by its text or name, needs of the engine."""
        flags, text = c.c_uint32(), c.create_string_buffer(4096)
        self._lib.check(self._lib.kvs_plan_needs(self.handle, plan.encode(), flags, text, len(text)))
        return PlanNeeds(Need(flags.value), text.value.decode())

    def register_tensors(self, model: Model, layer: int, keys: BlockTensor, values: BlockTensor) -> None:
        """Lends an engine's own paged tensors of one layer to the daemon, which only reads them; once a layer, before
        the model's sequences are opened. Linked transport only. TENSOR_* name the field that cannot be."""
        memory = keys.memory.native()
        # The library takes two tensors of one handle to lie in one memory.
        other = memory if values.memory == keys.memory else values.memory.native()
        self._lib.check(self._lib.kvs_tensors_register(self.handle, model.handle, layer, keys.native(memory),
                                                       values.native(other)))

    def step(self, members: Iterable[tuple[Sequence, Ids | int]], stream: Any = None, *,
             padding: Iterable[tuple[Sequence, int]] = ()) -> Step:
        """Begins a forward pass: (sequence, new token ids) for each member, all of one model. A number in place of ids:
        so many tokens, whose ids late_tokens brings.

        padding: (sequence, tokens) behind the members, to fill the shape that a graph was captured with; computed, and
        nothing of them is kept. Each is a sequence of its own, opened for this (docs/engine.md).
        stream: on which all of the step is enqueued where pages are a GPU's: a torch.cuda.Stream, a CuPy one, or a
        handle as int. None: torch's current stream of its current device where torch uses CUDA, else the default
        stream. STREAM where pages are no GPU's and it is not None or 0.
        """
        return Step(self, list(members), list(padding), self._stream(stream))

    def late_tokens(self, members: Iterable[tuple[Sequence, Ids]]) -> None:
        """Ids of the oldest tokens that ended steps had none of; arrays of any device, a GPU's are waited for. All or
        nothing: LATE_TOKENS where a sequence lacks fewer."""
        ids = [(s, _ids(tokens.tolist() if getattr(tokens, "is_cuda", False) else tokens)) for s, tokens in members]
        array = (lib.StepMember * max(1, len(ids)))(*(_member(s, x) for s, x in ids))
        self._lib.check(self._lib.kvs_late_tokens(self.handle, array, len(ids), 0))

    @cached_property
    def on_gpu(self) -> bool:
        """Whether tensors may lie in a GPU's memory: pages do, and ops run in this process. Costs one call, once."""
        # A begin looks at its stream first, and no sequence is 0: it fails in any case and changes nothing.
        token, step = c.c_int32(), c.c_void_p()
        nobody = lib.StepMember(0, c.pointer(token), 1)
        try:
            self._lib.check(self._lib.kvs_step_begin(self.handle, nobody, 1, _ANY_STREAM, step, None))
        except KvstrataError as error:
            if error.reason not in ("STREAM", "SEQUENCE_UNKNOWN"):
                raise
            return error.reason == "SEQUENCE_UNKNOWN"
        raise error_of(13, "STEP_OF_NOBODY", "a step of sequence 0 has begun; report this")

    def _stream(self, stream: Any) -> int:
        if stream is not None:
            return stream_of(stream)
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized() or not self.on_gpu:
            return 0
        return stream_of(torch.cuda.current_stream())


class Sequence:
    """Tokens in the daemon's pages under a plan. From Session.open or fork().

    held: leading tokens that were there when it was opened; of them `indexed` have a complete index.
    surprisal_tokens, boundary_tokens: how far those series go already.
    """

    def __init__(self, session: Session, model: Model, opened: lib.Opened) -> None:
        self.session, self.model, self.held = session, model, int(opened.held)
        self.indexed = int(opened.indexed)
        self.surprisal_tokens, self.boundary_tokens = int(opened.surprisal_tokens), int(opened.boundary_tokens)
        self._lib = session._lib
        self._handle: int | None = opened.sequence
        self._steps: set[_OpenStep] = set()
        self._drop = _finalizer(self, _close_dropped, session, opened.sequence, self._steps)

    @property
    def handle(self) -> int:
        if self._handle is None:
            raise error_of(9, "SEQUENCE_CLOSED", "the sequence was closed; open another")
        return self._handle

    @property
    def tokens(self) -> int:
        """Committed."""
        out = c.c_uint32()
        self._lib.check(self._lib.kvs_sequence_tokens(self.session.handle, self.handle, out))
        return out.value

    @property
    def status(self) -> str:
        """"ok", or what keeps the plan from doing what it is there for (docs/plans.md, "Status")."""
        return self._text(self._lib.kvs_sequence_status)

    @property
    def plan(self) -> str:
        """The plan with every option."""
        return self._text(self._lib.kvs_sequence_plan)

    @property
    def needs(self) -> PlanNeeds:
        """What its plan needs of the engine."""
        return self.session.plan_needs(self.plan)

    def fork(self) -> Sequence:
        out = c.c_uint64()
        self._lib.check(self._lib.kvs_sequence_fork(self.session.handle, self.handle, out))
        return self._fork_of(out.value)

    def truncate(self, tokens: int) -> None:
        """Takes back the tokens from position `tokens` on: rejected drafts, what an engine resumes below. Not in
        an open step. TRUNCATE_PROMPT inside a prompt that is complete: open a sequence with the tokens to keep."""
        if tokens < 0:
            raise error_of(3, "TRUNCATE_TOKENS", f"tokens is {tokens}; allowed are 0 to {self.tokens}")
        self._lib.check(self._lib.kvs_sequence_truncate(self.session.handle, self.handle, tokens))

    def prefill_done(self) -> None:
        self._lib.check(self._lib.kvs_prefill_done(self.session.handle, self.handle))

    def report(self, first: int, surprisal: npt.ArrayLike | None = None,
               entropy: npt.ArrayLike | None = None, boundary: npt.ArrayLike | None = None) -> None:
        """Series of the positions from `first` on, nats and 0/1; all given ones of one length.

        In order, in one call or several. After a prefix hit go on at `held`; surprisal at held + 1, because
        nothing that this engine computed predicts the token at `held`: it counts 0 nats then.
        """
        kinds = ((surprisal, np.float32), (entropy, np.float32), (boundary, np.uint8))
        arrays = [None if x is None else np.ascontiguousarray(x, kind).reshape(-1) for x, kind in kinds]
        lengths = {x.size for x in arrays if x is not None}
        if len(lengths) != 1:
            raise error_of(3, "REPORT_LENGTH", f"series have lengths {sorted(lengths)}; "
                           "give at least one, and all of one length")
        pointers = [None if x is None else x.ctypes.data for x in arrays]
        self._lib.check(self._lib.kvs_report(self.session.handle, self.handle, first, lengths.pop(),
                                             *pointers))

    def report_verified(self, first: int, n: int, equal: bool) -> None:
        """Tells the daemon that positions [first, first + n) of what was held were computed anew, and whether they are
        equal, within what the engine takes for equal. A mismatch is an event (hit_mismatch) and counted
        (kvstrata_verified_hits_total), and the sequence is private from here on; raise an error beside."""
        self._lib.check(self._lib.kvs_report_verified(self.session.handle, self.handle, first, n, int(equal)))

    def settle(self) -> None:
        """Waits until everything committed and reported is in force and published."""
        self._lib.check(self._lib.kvs_settle(self.session.handle, self.handle))

    def build(self, plan: str | None = None) -> Built:
        """Makes now what the first step would: what a plan (None: its own) keeps beside the committed
        tokens. Another plan's is kept for who opens it on these tokens."""
        out = lib.BuildResult(c.sizeof(lib.BuildResult))
        text = None if plan is None else plan.encode()
        self._lib.check(self._lib.kvs_sequence_build(self.session.handle, self.handle, text, out))
        return Built(out.indexed_tokens, out.built_blocks, out.extents)

    def recompress(self) -> None:
        """Has workers recompress now what the plan's codec may, and waits for it."""
        self._lib.check(self._lib.kvs_sequence_recompress(self.session.handle, self.handle))

    def cancel_work(self) -> None:
        """Ends what workers have of the sequence; nothing that was not published stays."""
        self._lib.check(self._lib.kvs_work_cancel(self.session.handle, self.handle))

    def seal(self, first: int, blocks: Ids, tokens: Ids) -> None:
        """Positions from `first` on, of these token ids, lie in these blocks of the registered tensors, in order.

        They hold all layers now, and stay as they are until they are acknowledged. first: a multiple of block_tokens;
        tokens: block_tokens of them for each block. Returns at once. BLOCKS_OUT_OF_ORDER for a gap, BLOCKS_TOKENS where
        others were sealed, IMPORT_QUEUE when too many wait; an earlier copy's failure is raised once.
        """
        at, ids = _block_ids(blocks), _ids(tokens)
        self._lib.check(self._lib.kvs_blocks_seal(self.session.handle, self.handle, _position(first), _int32s(at),
                                                  at.size, _int32s(ids), ids.size))

    @property
    def acknowledged(self) -> int:
        """Leading tokens that the daemon has, held ones included: their blocks are the engine's again. `settle` waits
        for all. An earlier copy's failure is raised once."""
        out = c.c_uint32()
        self._lib.check(self._lib.kvs_blocks_acknowledged(self.session.handle, self.handle, out))
        return out.value

    def load(self, first: int, blocks: Ids, stream: Any = None) -> None:
        """Fills these blocks of the registered tensors with the positions from `first` on, held or acknowledged.

        Of tokens beyond those nothing is written. On a GPU it is enqueued on `stream`, as of Session.step.
        TENSOR_ADDRESS when a layer was registered without an address, PAGE_GONE where a codec alone holds the rows.
        """
        at = _block_ids(blocks)
        self._lib.check(self._lib.kvs_blocks_load(self.session.handle, self.handle, _position(first), _int32s(at),
                                                  at.size, self.session._stream(stream)))

    def inspect(self, name: str) -> npt.NDArray[Any]:
        """A copy of an intermediate array of the plan."""
        array = lib.Array()
        self._lib.check(self._lib.kvs_inspect(self.session.handle, self.handle, name.encode(), array))
        return take_array(self._lib, array)

    def page_table(self) -> tuple[list[PageTableEntry], int]:
        """Pages and the table's version. Linked transport only."""
        count, version = c.c_size_t(), c.c_uint64()
        call = self._lib.kvs_page_table
        self._lib.check(call(self.session.handle, self.handle, None, 0, count, version))
        while True:
            pages = (lib.Page * max(1, count.value))()
            capacity = count.value
            self._lib.check(call(self.session.handle, self.handle, pages, capacity, count, version))
            if count.value <= capacity:
                return ([PageTableEntry(p.address or 0, p.tier, p.flags) for p in pages[:count.value]],
                        version.value)

    def close(self) -> None:
        """Harmless when it is closed, by its key too, or gone with its session or daemon. SEQUENCE_BUSY in an open step: then
        it stays open."""
        if self._handle is not None and self.session._handle is not None:
            try:
                self._lib.check(self._lib.kvs_sequence_close(self.session.handle, self._handle))
            except Unavailable as error:
                if error.reason != "DAEMON_GONE":  # that has closed what it had
                    raise
            except NotFound:  # close_key
                pass
        self._closed()

    def _closed(self) -> None:
        self._handle = None
        self._drop.detach()

    def _fork_of(self, handle: int) -> Sequence:
        return Sequence(self.session, self.model,
                        lib.Opened(c.sizeof(lib.Opened), handle, self.held, self.indexed,
                                   self.surprisal_tokens, self.boundary_tokens))

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        try:
            self.close()
        except Exception:
            if kind is None:  # else the first error is the one to see
                raise

    def _text(self, call: Any) -> str:
        buffer = c.create_string_buffer(4096)
        self._lib.check(call(self.session.handle, self.handle, buffer, len(buffer)))
        return buffer.value.decode()


class _OpenStep:
    """A begun step's handle until its first end. Its Step and its members share it: of objects that are collected
    together any may be finalized first, and a sequence can only be closed once its step is over."""

    def __init__(self, session: Session, handle: int | None, members: list[Sequence]) -> None:
        self._session, self._handle = session, handle
        self._steps_of_members = [sequence._steps for sequence in members]
        for steps in self._steps_of_members:
            steps.add(self)

    @property
    def handle(self) -> int:
        if self._handle is None:
            raise error_of(9, "STEP_OVER", "the step has ended; begin another")
        return self._handle

    @property
    def is_open(self) -> bool:
        return self._handle is not None

    def take(self) -> int:
        """The handle, for whoever ends the step; it is over for all others."""
        handle, self._handle = self.handle, None
        for steps in self._steps_of_members:
            steps.discard(self)
        return handle

    def abort(self) -> None:
        """At most once. Not when the session is closed: that ended its steps, and the handle may be another's."""
        if self._handle is not None:
            handle = self.take()
            if self._session._handle is not None:
                self._session._lib.kvs_step_abort(handle)


def _close_dropped(session: Session, handle: int, steps: set[_OpenStep]) -> None:
    # The session's handle may be another one's by now, unless it is still open.
    if session._handle is not None:
        for step in list(steps):
            step.abort()
        session._lib.kvs_sequence_close(session._handle, handle)


class Step:
    """One forward pass over a batch: per layer append, [select,] attend; then end(). From Session.step.

    k, v, q, out and lse: torch tensors, numpy arrays, or what else has __dlpack__; read and written where they lie.
    """

    def __init__(self, session: Session, members: list[tuple[Sequence, Ids | int]],
                 padding: list[tuple[Sequence, int]], stream: int) -> None:
        self._session, self._lib, self._stream = session, session._lib, stream
        batch = [(s, tokens if isinstance(tokens, int) else _ids(tokens)) for s, tokens in [*members, *padding]]
        array = (lib.StepMember * max(1, len(batch)))(*(_member(s, x) for s, x in batch))
        options = lib.StepOptions(c.sizeof(lib.StepOptions), stream, len(padding), 0)
        out = c.c_void_p()
        self._lib.check(self._lib.kvs_step_begin_with(session.handle, array, len(batch), options, out, None))
        self._members = [sequence for sequence, _ in batch]  # nobody closes them before its end
        self._open = _OpenStep(session, out.value, self._members)
        self._drop = _finalizer(self, self._open.abort)
        self.tokens = sum(x if isinstance(x, int) else x.size for _, x in batch)

    @property
    def handle(self) -> int:
        return self._open.handle

    def append(self, layer: int, k: Any, v: Any) -> None:
        """k, v [new tokens of all members][kv_heads][head_dim]."""
        self._lib.check(self._lib.kvs_append(self.handle, layer, self._tensor(k, "k"), self._tensor(v, "v")))

    def select(self, layer: int, q: Any) -> None:
        """Fixes the layer's selection; attend does it when this was not called."""
        self._lib.check(self._lib.kvs_select(self.handle, layer, self._tensor(q, "q")))

    def attend(self, layer: int, q: Any, out: Any = None, lse: Any = None, dtype: DType | None = None) -> Any:
        """Attention of q [new tokens][query_heads][head_dim]; into `out`, or a new array of q's library.

        dtype: of a new array; None: q's own of a torch tensor, float32 of a numpy array. Other libraries' arrays are
        never made here: give `out`. lse, if given, is a contiguous float32 [new tokens][query_heads] that is written.
        """
        queries = self._tensor(q, "q")
        if out is None:
            out = empty_like(q, dtype)
        written = self._tensor(out, "out", writable=True)
        memory = None if lse is None else lse_of(lse, queries, self._stream)
        if memory is not None:
            self._check_device("lse", memory.on_cuda)
        self._lib.check(self._lib.kvs_attend(self.handle, layer, queries, written,
                                             None if memory is None else memory.address))
        return out

    def replay(self) -> None:
        """In place of all layers' calls: a CUDA graph in which a step of the same shape captured them is launched by
        the caller, on the step's stream, after this and before end().

        GRAPH_STALE: no such step was captured, or memory has changed since; make the calls, or capture anew.
        """
        self._lib.check(self._lib.kvs_step_replay(self.handle))

    def _tensor(self, array: Any, name: str, writable: bool = False) -> View:
        view = tensor_of(array, name, self._stream, writable)
        self._check_device(name, view.on_cuda)
        return view

    def _check_device(self, name: str, on_cuda: bool) -> None:
        if on_cuda and not self._session.on_gpu:
            raise error_of(3, "TENSOR_DEVICE", f"{name} is a GPU's, but this session's pages are not, or its "
                           f"transport is remote; pass {name} in host memory")

    def selected_tokens(self, member: int = 0) -> list[npt.NDArray[np.int32]]:
        """Positions that the last layer attended, always-on included: one array a group of heads."""
        return self._selection(member, _TOKENS)

    def selected_units(self, member: int = 0) -> list[npt.NDArray[np.int32]]:
        """Ids of the units that the last layer's selection chose: one array a group of heads."""
        return self._selection(member, _UNITS)

    def end(self, stream: Any = None) -> None:
        """Commits the new tokens; the step is over, also on error.

        stream: comes behind all of the step; None: the step's own. On a GPU it still works when this returns.
        """
        behind = self._stream if stream is None else stream_of(stream)
        handle, members = self._over()
        self._lib.check(self._lib.kvs_step_end(handle, behind))
        del members  # not before: one that was dropped meanwhile is closed now

    def abort(self) -> None:
        """Ends without committing. Harmless when the step is over."""
        self._open.abort()
        self._drop.detach()
        self._members = []  # not before: one that was dropped meanwhile is closed now

    def _over(self) -> tuple[int, list[Sequence]]:
        handle, members, self._members = self._open.take(), self._members, []
        self._drop.detach()
        return handle, members

    def __enter__(self) -> Step:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is not None:
            self.abort()
        elif self._open.is_open:
            self.end()

    def cost(self, member: int = 0) -> Cost:
        """What the last attend read for one member, over all heads."""
        out = lib.AttendCost(c.sizeof(lib.AttendCost))
        self._lib.check(self._lib.kvs_attend_cost(self.handle, member, out))
        return Cost(out.rows, out.coarse_rows, out.attend_bytes, out.select_bytes)

    def _selection(self, member: int, what: int) -> list[npt.NDArray[np.int32]]:
        groups, count = c.c_uint32(), c.c_size_t()
        self._lib.check(self._lib.kvs_selection_groups(self.handle, member, groups))
        lists = []
        for group in range(groups.value):
            self._lib.check(self._lib.kvs_selection(self.handle, member, group, what, None, 0, count))
            out = np.empty(count.value, np.int32)
            self._lib.check(self._lib.kvs_selection(self.handle, member, group, what, out.ctypes.data,
                                                    out.size, count))
            lists.append(out)
        return lists


def attach(socket: str | os.PathLike[str] | None = None, **options: Any) -> Session:
    """Session(socket, **options): the shortest way in."""
    return Session(socket, **options)
