# SPDX-License-Identifier: Apache-2.0
"""Plan strata over vLLM's own blocks, as far as no GPU is needed: the form of blocks, which rows go where, what is
refused. test_planes_scheduler.py has what rows attend; bench/vllm_gpu has the rest."""

from __future__ import annotations

import ctypes
import gc
import mmap
import pathlib
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import torch  # noqa: E402
from kvstrata.block_planes import PlanesShape, form_of  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata, MultipleOf  # noqa: E402
from vllm.v1.kv_cache_interface import (FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec,  # noqa: E402
                                        KVCacheTensor, SlidingWindowSpec, create_kv_cache_views)
from vllm.v1.worker.utils import allocate_kv_cache, customize_attention_spec  # noqa: E402

import kvstrata  # noqa: E402
from kvstrata_vllm import attention, lower_planes, plan_choice, planes_attention, planes_rows  # noqa: E402
from kvstrata_vllm.attention import KvstrataBackend, KvstrataImpl  # noqa: E402
from kvstrata_vllm.connector import KvstrataConnector  # noqa: E402
from kvstrata_vllm.planes_attention import PlanesImpl  # noqa: E402
from kvstrata_vllm.planes_rows import Piece, PlanesRows, pieces_of, slots_of  # noqa: E402
from kvstrata_vllm.planes_spec import PlanesSpec  # noqa: E402
from kvstrata_vllm.unsupported import Unsupported  # noqa: E402


@pytest.fixture
def planes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvstrataImpl, "plan", "strata")


def spec(**changes: Any) -> Any:
    return FullAttentionSpec(**{"block_size": 64, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16, **changes})


@pytest.mark.parametrize("plan, dim, token", [("strata", 128, 268), ("strata", 64, 136), ("strata{keep = 4}", 128, 140),
                                              ("strata{lower = 'host'}", 128, 102), ("strata{lower = 'host', hot = 0}", 128, 76)])
def test_a_blocks_form(monkeypatch: pytest.MonkeyPatch, plan: str, dim: int, token: int):
    monkeypatch.setattr(KvstrataImpl, "plan", plan)
    made = customize_attention_spec(KvstrataBackend, spec(head_size=dim))
    assert type(made) is PlanesSpec and made.state_content_bytes == token
    assert token % 2 == 0  # vLLM counts elements of the model's dtype
    assert made.page_size_bytes == made.unpadded_page_size_bytes == 64 * 8 * token  # nothing that offloads leaves out
    assert made.get_block_stride_alignment() == 1
    assert type(PlanesSpec.merge([made, made])) is PlanesSpec
    assert KvstrataBackend.customize_spec(made) == made


def test_others_keep_theirs(planes: None):
    window = SlidingWindowSpec(block_size=64, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, sliding_window=512)
    for other in (window, spec(head_size=256), spec(dtype=torch.float32), spec(sliding_window=512), spec(non_causal=True)):
        assert KvstrataBackend.customize_spec(other) == other
        assert KvstrataBackend.get_supported_kernel_block_sizes(other) == [MultipleOf(16)]


def test_blocks_are_groups(planes: None):
    assert KvstrataBackend.get_preferred_block_size(16) == 64
    assert KvstrataBackend.get_supported_kernel_block_sizes() == [64]
    assert not KvstrataBackend.supports_block_size(32)
    made = customize_attention_spec(KvstrataBackend, spec(block_size=128))  # which vLLM divides
    assert KvstrataBackend.get_supported_kernel_block_sizes(made) == [64]
    assert KvstrataBackend.get_impl_cls() is PlanesImpl
    assert KvstrataBackend.get_builder_cls() is planes_attention.PlanesBuilder


@pytest.mark.parametrize("block_tokens", [64, 128])
def test_a_block_of_a_layer_is_one_run_of_bytes(planes: None, block_tokens: int):
    made, blocks = customize_attention_spec(KvstrataBackend, spec(block_size=block_tokens, num_kv_heads=2)), 3
    page, group = made.page_size_bytes, 64 * 2 * 268
    for layout in KvstrataBackend.supported_kv_cache_layouts():
        layer, block = (blocks * page, page) if layout.is_layer_compact else (page, 2 * page)
        if block_tokens == 128 and not layout.is_layer_compact:
            continue  # vLLM divides no blocks that have others between them
        raw = torch.zeros(2 * blocks * page, dtype=torch.int8)
        views = create_kv_cache_views(raw, made, blocks, layout, KVCacheTensor(len(raw), ["a", "b"], layer, block), 64)
        for number, view in enumerate(views):
            assert view.shape == (blocks * block_tokens // 64, 2, 64, 134)
            for at in range(len(view)):
                raw.zero_()
                view[at].view(torch.int16).fill_(-1)
                start = number * layer + at * (group if block_tokens == 128 else block)
                assert torch.equal(raw.nonzero()[:, 0], torch.arange(start, start + group))


@pytest.mark.parametrize("layout", attention._WHOLE_BLOCKS)
def test_blocks_are_offloaded_as_they_are(planes: None, layout: Any):
    """vLLM's offloading takes all bytes of each block, and no others."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
    made, names = customize_attention_spec(KvstrataBackend, spec(num_kv_heads=2)), ["layers.0", "layers.1"]
    blocks, page = 3, made.page_size_bytes
    strides = (blocks * page, page) if layout.is_layer_compact else (page, 2 * page)
    cache = KVCacheConfig(blocks, [KVCacheTensor(2 * blocks * page, names, *strides)], [KVCacheGroupSpec(names, made)])
    views = allocate_kv_cache(cache, torch.device("cpu"), layout, [64])
    taken: list[Any] = []
    parallel = SimpleNamespace(tensor_parallel_size=1, prefill_context_parallel_size=1, world_size=1, rank=0,
                               decode_context_parallel_size=1, cp_kv_cache_interleave_size=1)
    offloading: Any = SimpleNamespace(replicated_layout=False, get_worker=taken.append, config=SimpleNamespace(
        canonical_layout=False, parallel=SimpleNamespace(rank=0)))
    OffloadingConnectorWorker(offloading, SimpleNamespace(
        parallel_config=parallel, model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 2)), cache
    ).register_kv_caches(views)
    (caches,) = taken
    for view in views.values():
        view.view(torch.int16)[1].fill_(-1)
    refs = caches.group_data_refs[0]
    found = [caches.tensors[ref.tensor_idx].tensor[1].view(torch.int8)[:ref.page_size_bytes] for ref in refs]
    assert sum(int(torch.count_nonzero(of)) for of in found) == 2 * page == sum(ref.page_size_bytes for ref in refs)


def test_who_has_planes():
    assert plan_choice.of_planes("strata") and plan_choice.of_planes("strata{keep = 4}")
    assert not any(plan_choice.of_planes(plan) for plan in ("full", "quest", "bits", "chess"))
    assert plan_choice.of_planes("strata{lower = 'host'}") and plan_choice.is_lower_apart("strata{lower = 'host'}")
    assert not any(plan_choice.is_lower_apart(plan) for plan in ("full", "quest", "strata"))
    for refused in ("strata{share = 0.1}", "strata{run = 8, share = 0.1}", "strata{unit = 128}"):
        with pytest.raises(kvstrata.Unimplemented, match="BLOCK_PLAN"):
            plan_choice.of_planes(refused)


def batch(new: list[int], ends: list[int], prompts: list[bool], of_requests: list[int] | None) -> Any:
    """Rows behind those of prompts and of_requests pad a graph."""
    starts = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts.clone(), seq_lens=torch.tensor(ends, dtype=torch.int32),
        num_reqs=len(new), num_actual_tokens=sum(new), max_query_len=max(new), max_seq_len=max(ends),
        block_table_tensor=torch.arange(len(new) * 8, dtype=torch.int32).view(len(new), 8),
        slot_mapping=torch.arange(sum(new)), is_prefilling=torch.tensor(prompts),
        seq_lens_cpu_upper_bound=torch.tensor(ends, dtype=torch.int32),
        req_idx=None if of_requests is None else np.array(of_requests))


def slots(common: Any) -> list[int]:
    starts = common.query_start_loc_cpu.numpy()
    return slots_of(common, common.seq_lens_cpu_upper_bound.numpy(), starts[1:] - starts[:-1]).tolist()


def test_slots_are_indexes_of_requests():
    assert slots(batch([1, 1, 5], [40, 7, 5], [False, False, True], [3, 0, 7])) == [3, 0, 7]
    assert slots(batch([1, 1, 0, 0], [40, 7, 0, 0], [False, False], [3, 1])) == [3, 1, -1, -1]
    assert slots(batch([1, 1], [1, 1], [False, False], [0, 1])) == [-1, -1]  # made up: others' slots are in use
    assert slots(batch([1], [1], [True], [2])) == [2]  # a prompt of one token
    with pytest.raises(Unsupported, match="needs vLLM's model runner V2"):
        slots(batch([1], [9], [False], None))


def test_pieces():
    """Each token behind the rows that decode is in one piece; what is attended at once has nothing before it."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(300):
        new = sorted(draw.choice((1, draw.randrange(1, 200))) for _ in range(draw.randrange(1, 9)))
        before = [draw.choice((0, 0, draw.randrange(1, 500))) for _ in new]
        own = np.array([draw.choice((-1, 4, 4, 4)) for _ in new], np.int32)
        starts, decodes = np.cumsum([0, *new]), sum(n == 1 for n in new)
        found = pieces_of(starts, np.array(new) + before, own, decodes)
        flat = [piece for pieces in found for piece in pieces]
        assert flat == [Piece(row, int(starts[row]), before[row], new[row]) for row in range(decodes, len(new))
                        if own[row] >= 0]
        for pieces in found:
            assert len(pieces) == 1 or all(piece.before == 0 for piece in pieces)
            assert all(a.end == b.start for a, b in zip(pieces, pieces[1:]))
        for first, second in zip(found, found[1:]):  # no more calls than needed
            assert first[-1].before or second[0].before or first[-1].end != second[0].start


class Recorded:
    """In BlockPlanes' place."""

    def __init__(self, plan: str, shape: Any) -> None:
        self.shape, self.closed, self.begun, self.calls = shape, False, [], []

    def bind(self, layers: list[int], workspace: int) -> None:
        self.layers = layers

    def bind_lower(self, layers: list[int]) -> None:
        self.lower = layers

    def begin(self, **step: Any) -> None:
        self.begun.append(step)

    def decode(self, *given: Any) -> None:
        self.calls.append(given)

    def close(self) -> None:
        self.closed = True


def layers_of(count: int, blocks: int = 9, token_bytes: int = 268) -> dict[str, Any]:
    cache = torch.zeros(count, blocks, 2, 64, token_bytes, dtype=torch.uint8)
    return {f"layer.{i}": SimpleNamespace(impl=SimpleNamespace(scale=0.1, index=-1), kv_cache=cache[i])
            for i in range(count)}


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> PlanesRows:
    monkeypatch.setattr(planes_rows, "BlockPlanes", Recorded)
    monkeypatch.setattr(planes_rows, "form_of", lambda plan, shape: SimpleNamespace(
        workspace_bytes=4096, lower_token_bytes=192 if "host" in plan else 0))
    monkeypatch.setattr(PlanesRows, "_of_process", {})
    monkeypatch.setattr(PlanesRows, "_reserved", torch.ones(10000, dtype=torch.uint8))
    monkeypatch.setattr(PlanesRows, "_stream", lambda self: 0)
    return rows_of(layers_of(3))


def rows_of(layers: dict[str, Any], plan: str = "strata") -> PlanesRows:
    limits = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8),
                             model_config=SimpleNamespace(max_model_len=1000))
    return PlanesRows(plan, PlanesShape(len(layers), 4, 2, 128, "bf16"), layers, limits, torch.device("cpu"))


def test_a_step(rows: PlanesRows):
    common = batch([1, 1, 5, 6, 3], [40, 70, 5, 6, 130], [False, True, True, True, True], [3, 0, 7, 2, 1])
    rows._ends[:] = [69, 127, 0, 39, 0, 0, 0, 0]
    fresh, behind = rows.begin(common, 2)
    (step,) = rows._planes.begun
    assert (step["rows"], step["decodes"], step["blocks_of_row"]) == (5, 2, 8)
    assert rows._slots.tolist() == [3, 0, 7, 2, 1] and step["slots"] == rows._slots.data_ptr()
    assert rows._flags.tolist() == [0, 1, 1, 1, 1] and step["in_full"] == rows._flags.data_ptr()
    assert (fresh.tokens, behind.tokens) == (slice(2, 13), slice(13, 16))
    assert (fresh.q_starts.tolist(), fresh.k_starts.tolist(), fresh.longest_q, fresh.longest_k) == ([0, 5, 11], [0, 5, 11],
                                                                                                    6, 6)
    assert (behind.q_starts.tolist(), behind.k_starts.tolist(), behind.longest_k) == ([0, 3], [0, 130], 130)
    shape = rows._planes.shape
    assert (shape.block_stride, shape.slots, shape.max_rows, shape.max_tokens) == (2 * 64 * 268, 8, 8, 1000)
    assert rows._planes.layers == [layer.kv_cache.data_ptr() for layer in rows._layers.values()]
    assert [layer.impl.index for layer in rows._layers.values()] == [0, 1, 2]
    assert len(rows._workspace) == 4096 and not rows._workspace.any() and len(PlanesRows._reserved) == 10000 - 4096


def test_memory_is_reserved_once(monkeypatch: pytest.MonkeyPatch, rows: PlanesRows, caplog: pytest.LogCaptureFixture):
    """For all layers that are served, of whichever geometry, and anew for another engine of the process."""
    monkeypatch.setattr(planes_rows, "_GPU", "cpu")
    monkeypatch.setattr(planes_rows, "form_of", lambda plan, shape: SimpleNamespace(
        workspace_bytes=1000 * shape.layers, slot_bytes=shape.layers << 20))
    monkeypatch.setattr(PlanesRows, "_prompt", None)
    monkeypatch.setattr(PlanesRows, "_engine", None)
    layers = [PlanesShape(1, 4, 2, 128, "bf16")] * 3 + [PlanesShape(1, 8, 4, 64, "bf16")]
    for most in (1000, 1000, 2000):
        limits = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8),
                                 model_config=SimpleNamespace(max_model_len=most))
        with caplog.at_level("INFO", "vllm.kvstrata"):
            PlanesRows.reserve("strata", layers, torch.bfloat16, limits)
        first, taken = PlanesRows._prompt, PlanesRows._reserved
        PlanesRows.reserve("strata", layers, torch.bfloat16, limits)
        assert PlanesRows._prompt is first and PlanesRows._reserved is taken
        assert taken.numel() == 3072 + 1024 and first.shape == (2, most * 256) and not PlanesRows._of_process
    assert "newest rows of 8 requests" in caplog.text and "4.0 MiB each (--max-num-seqs)" in caplog.text


def test_newest_rows_that_are_nowhere(rows: PlanesRows):
    rows.begin(batch([70], [70], [True], [3]), 0)
    rows.begin(batch([1], [71], [False], [3]), 1)
    rows.begin(batch([9], [64 + 9], [True], [3]), 0)  # another, behind a prefix of whole groups
    for step in (batch([1], [64 + 12], [False], [3]), batch([1], [64 + 10], [False], [4])):
        with pytest.raises(RuntimeError, match="streams in are not served under plan 'strata'"):
            rows.begin(step, 1)


def test_blocks_that_are_given_twice(rows: PlanesRows):
    """First to measure what graphs take."""
    rows.begin(batch([1], [1], [True], [0]), 1)
    again = rows_of(layers_of(3))
    again.begin(batch([1], [1], [True], [0]), 1)
    assert again._workspace is rows._workspace
    before = again._planes
    again._first.kv_cache = layers_of(3)["layer.0"].kv_cache
    again.begin(batch([1], [1], [True], [0]), 1)
    assert before.closed and again._planes is not before


class Pinned:
    """In torch.cuda.cudart()'s place: ranges that are registered."""

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}
        self.code = 0

    def cudaHostRegister(self, address: int, count: int, flags: int) -> int:  # noqa: N802
        assert flags == 0 and address % mmap.PAGESIZE == 0
        ctypes.memset(address, 1, count)  # all of it is there
        self.ranges[address] = count
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.ranges[address]
        return 0


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> Pinned:
    made = Pinned()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return made


def test_lower_planes_on_the_host(rows: PlanesRows, pinned: Pinned, caplog: pytest.LogCaptureFixture):
    """For as many blocks as vLLM has, once, whatever it makes again; for its last blocks alone."""
    plan, step, size = 'strata{lower = "host"}', batch([1], [1], [True], [0]), 64 * 2 * 192
    assert not hasattr(rows, "lower") and rows._lower is None and not pinned.ranges
    first = rows_of(layers_of(3, 9, 102), plan)
    with caplog.at_level("INFO", "vllm.kvstrata"):
        first.begin(step, 1)
    assert list(pinned.ranges.values()) == [3 * 9 * size]
    (address,) = pinned.ranges
    assert first._planes.lower == [address + layer * 9 * size for layer in range(3)]
    assert first._planes.shape.block_stride == 2 * 64 * 102
    assert "lower planes of 9 blocks of 3 layers" in caplog.text
    for blocks in (9, 40):
        again = rows_of(layers_of(3, blocks, 102), plan)
        again.begin(step, 1)
        again.begin(step, 1)
        assert list(pinned.ranges.values()) == [3 * blocks * size]
        assert again._planes.lower == [next(iter(pinned.ranges)) + layer * blocks * size for layer in range(3)]
    PlanesRows._of_process.clear()
    del first, again
    gc.collect()
    assert not pinned.ranges  # no engine has them any more


def test_lower_planes_that_the_host_has_no_room_for(rows: PlanesRows, pinned: Pinned, monkeypatch: pytest.MonkeyPatch):
    layers = rows_of(layers_of(3, 40, 102), 'strata{lower = "host"}')
    monkeypatch.setenv("KVSTRATA_LOWER_PLANES_BYTES", str(3 * 39 * 64 * 2 * 192))
    with pytest.raises(Unsupported, match=r"of 40 blocks, and KVSTRATA_LOWER_PLANES_BYTES allows 0.0 GiB, for 39 blocks; .*--num-gpu-blocks-override"):
        layers.begin(batch([1], [1], [True], [0]), 1)
    monkeypatch.setenv("KVSTRATA_LOWER_PLANES_BYTES", "4GiB")
    with pytest.raises(Unsupported, match="KVSTRATA_LOWER_PLANES_BYTES is '4GiB', and has to be a number"):
        layers.begin(batch([1], [1], [True], [0]), 1)
    monkeypatch.setenv("KVSTRATA_LOWER_PLANES_BYTES", str(3 * 40 * 64 * 2 * 192))
    pinned.code = 2
    with pytest.raises(Unsupported, match="cudaHostRegister of 0.0 GiB for lower planes failed with 2: raise the limit"):
        layers.begin(batch([1], [1], [True], [0]), 1)
    pinned.code = 0
    layers.begin(batch([1], [1], [True], [0]), 1)
    monkeypatch.delenv("KVSTRATA_LOWER_PLANES_BYTES")
    assert 0 < lower_planes.available() < 1 << 50 and lower_planes.allowed() < lower_planes.available()


def test_a_containers_limit_counts_where_it_is_nearer(tmp_path: pathlib.Path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 200 kB\nMemAvailable: 100 kB\n")
    assert lower_planes.available(meminfo, tmp_path) == 100 << 10  # there is no container
    (tmp_path / "memory.current").write_text(f"{21 << 10}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1024\nactive_file {15 << 10}\ninactive_file {5 << 10}\n")
    for limit, there in (("max", 100 << 10), (str(90 << 10), 89 << 10), (str(900 << 10), 100 << 10), ("0", 0)):
        (tmp_path / "memory.max").write_text(limit + "\n")
        assert lower_planes.available(meminfo, tmp_path) == there


def test_rows_are_read_where_they_lie(rows: PlanesRows):
    """Where they can be: heads side by side, whatever lies between rows."""
    rows._planes = Recorded("strata", None)
    product = torch.zeros(3, 8, 128, dtype=torch.bfloat16)  # 4 of queries, 2 of keys, 2 of values
    query, key, value = product[:, :4], product[:, 4:6], product[:, 6:]
    rows.decode(1, query, key, value, torch.empty(3, 4, 128))
    rows.decode(1, product[:, ::2], key, value, torch.empty(3, 4, 128))
    row = 8 * 128 * 2
    (layer, q, k, v, _, count, _), (_, copied, *_) = rows._planes.calls
    assert (layer, count) == (1, 3)
    assert (q, k, v) == tuple((tensor.data_ptr(), row) for tensor in (query, key, value))
    assert copied.stride == 4 * 128 * 2 and copied.address != product.data_ptr()


@pytest.mark.parametrize("served", [False, True])
def test_blocks_of_planes_are_not_written_row_by_row(monkeypatch: pytest.MonkeyPatch, served: bool):
    written: list[Any] = []
    monkeypatch.setattr(attention.FlashAttentionImpl, "do_kv_cache_update", lambda self, *given: written.append(given))
    layer = object.__new__(PlanesImpl)
    layer.index = 0 if served else -1
    layer.do_kv_cache_update(None, None, None, None, None)
    assert len(written) == (0 if served else 1)


def config(**changes: Any) -> Any:
    base = {"additional_config": {"kvstrata": {"plan": "strata"}}, "speculative_config": None, "kv_transfer_config": None,
            "cache_config": SimpleNamespace(cache_dtype="auto"), "use_v2_model_runner": True,
            "model_config": SimpleNamespace(use_mla=False, is_hybrid=False, is_mm_prefix_lm=False),
            "parallel_config": SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)}
    return SimpleNamespace(**{**base, **changes})


def model(**changes: Any) -> Any:
    return SimpleNamespace(**{"use_mla": False, "is_hybrid": False, "is_mm_prefix_lm": False, **changes})


@pytest.mark.parametrize("changes, said", [
    ({"use_v2_model_runner": False}, "needs vLLM's model runner V2"),
    ({"model_config": model(is_hybrid=True)}, "recurrent states"),
    ({"model_config": model(is_mm_prefix_lm=True)}, "both ways"),
    ({"kv_transfer_config": SimpleNamespace(kv_connector="KvstrataConnector",
                                            kv_connector_extra_config={"canonical_layout": True})}, "canonical_layout"),
    ({"kv_transfer_config": SimpleNamespace(kv_connector="KvstrataConnector", kv_connector_extra_config={}),
      "additional_config": {"kvstrata": {"plan": "strata{lower = 'host'}"}}}, "their lower planes are on the host"),
    ({"speculative_config": object()}, "--speculative-config"),
    ({"cache_config": SimpleNamespace(cache_dtype="fp8")}, "--kv-cache-dtype fp8"),
    ({"additional_config": {"kvstrata": {"plan": "strata{share = 0.1}"}}}, "share")])
def test_what_planes_cannot_be_beside(changes: dict[str, Any], said: str):
    with pytest.raises((Unsupported, kvstrata.Unimplemented), match=said):
        plan_choice.refuse(config(**changes))
    plan_choice.refuse(config())


@pytest.mark.parametrize("changes, said", [
    ({"head_size": 256}, "heads of 256"), ({"num_heads": 72}, "72 heads"), ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
    ({"sinks": torch.zeros(32)}, "sinks"), ({"kv_sharing_target_layer_name": "a"}, "another layer's keys"),
    ({"alibi_slopes": [1.0]}, "alibi"), ({"sliding_window": 512, "unmanaged": True}, "hybrid manager is off"),
    ({"sliding_window": 512}, None), ({}, None)])
def test_layers_that_are_refused(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str | None):
    def made(self: Any, num_heads: int = 32, head_size: int = 128, sliding_window: int | None = None,
             alibi_slopes: Any = None, logits_soft_cap: float = 0, sinks: Any = None,
             kv_sharing_target_layer_name: str | None = None) -> None:
        self.num_heads, self.head_size, self.num_kv_heads, self.attn_type = num_heads, head_size, 8, "decoder"
        self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.alibi_slopes, self.logits_soft_cap, self.sinks = alibi_slopes, logits_soft_cap, sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    given = config(scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=changes.get("unmanaged", False)))
    monkeypatch.setattr(KvstrataImpl, "plan", "full")
    monkeypatch.setattr(attention.FlashAttentionImpl, "__init__", made)
    monkeypatch.setattr(planes_attention, "get_current_vllm_config", lambda: given)
    arguments = {name: value for name, value in changes.items() if name != "unmanaged"}
    if said is None:
        assert PlanesImpl(**arguments).index == -1 and KvstrataImpl.plan == "strata"
        return
    with pytest.raises(Unsupported, match=f"not for plan 'strata': .*{said}.*take the plan away"):
        PlanesImpl(**arguments)


def test_a_prompt_that_is_held_whole(monkeypatch: pytest.MonkeyPatch):
    """A chunk of 256 tokens less is loaded, so that what is computed begins with a group."""
    connector: Any = object.__new__(KvstrataConnector)
    groups = [SimpleNamespace(tokens_per_chunk=256)]
    connector.connector_scheduler = SimpleNamespace(config=SimpleNamespace(kv_group_configs=groups))
    assert connector._whole_groups(1000, 64, 768 - 64) == (768 - 64, True)
    assert connector._whole_groups(768, 64, 768 - 64) == (512 - 64, True)
    assert connector._whole_groups(256, 0, 256) == (0, False)
    assert connector._whole_groups(768, 576, 768 - 576) == (0, False)
    groups.append(groups[0])  # vLLM looks windows up by the end of what it finds
    assert connector._whole_groups(768, 0, 767) == (0, False)
    assert connector._whole_groups(1000, 0, 768) == (768, True)


def test_slots_take_what_the_form_says():
    """8.4 MB a sequence of Llama-3.1-8B's shape."""
    assert form_of("strata", PlanesShape(32, 32, 8, 128, "bf16")).slot_bytes == 32 * 64 * 8 * 2 * 128 * 2
