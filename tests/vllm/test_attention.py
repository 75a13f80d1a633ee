# SPDX-License-Identifier: Apache-2.0
"""The attention backend over vLLM's own blocks, as far as no GPU is needed: which rows go where, what is refused, how
much larger blocks become. bench/vllm_gpu has the rest."""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import torch  # noqa: E402
from kvstrata.block_attention import BlockShape  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata, FlashAttentionMetadataBuilder  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec  # noqa: E402

from kvstrata_vllm import attention, block_rows, loaded, plan_choice  # noqa: E402
from kvstrata_vllm.block_rows import BlockRows  # noqa: E402
from kvstrata_vllm.unsupported import Unsupported  # noqa: E402


def batch(new: list[int], ends: list[int], prompts: list[bool] | None = None) -> CommonAttentionMetadata:
    """new: tokens of each row; ends: tokens that it has then."""
    starts = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
    rows, tokens = len(new), sum(new)
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts.clone(), seq_lens=torch.tensor(ends, dtype=torch.int32),
        num_reqs=rows, num_actual_tokens=tokens, max_query_len=max(new), max_seq_len=max(ends),
        block_table_tensor=torch.arange(rows * 8, dtype=torch.int32).view(rows, 8),
        slot_mapping=torch.arange(tokens), positions=torch.arange(tokens),
        is_prefilling=torch.tensor(prompts if prompts is not None else [n > 1 for n in new]),
        seq_lens_cpu_upper_bound=torch.tensor(ends, dtype=torch.int32))


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A builder whose FlashAttention says which batch it was asked for, and whose BlockRows note their steps."""
    def build(self: Any, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False) -> Any:
        return FlashAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens, max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc, max_seq_len=common.max_seq_len, seq_lens=common.seq_lens,
            block_table=common.block_table_tensor, slot_mapping=common.slot_mapping)

    class Rows:
        most, begun = 4, []

        def begin(self, common: CommonAttentionMetadata, decodes: int) -> int:
            self.begun.append((common.num_reqs, decodes))
            return decodes if decodes <= self.most else 0

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", build)
    made = object.__new__(attention.KvstrataBuilder)
    made.rows = Rows()
    made.rows.begun = []
    return made


def test_a_batch_that_decodes_is_the_plans(builder: Any):
    made = builder.build(0, batch([1, 1, 1], [40, 7, 100]))
    assert (made.decodes, made.rest, made.rows) == (3, None, builder.rows)
    assert builder.rows.begun == [(3, 3)]


def test_prompts_are_flash_attentions(builder: Any):
    made = builder.build(0, batch([5, 9], [5, 100]))
    assert (made.decodes, made.rest, made.rows) == (0, None, None)
    assert builder.rows.begun == [(2, 0)]  # their rows are indexed all the same


def test_a_mixed_batch_is_divided(builder: Any):
    common = batch([1, 1, 6, 3], [40, 7, 6, 100])
    made = builder.build(0, common)
    assert made.decodes == 2 and made.num_actual_tokens == 11
    rest = made.rest
    assert rest.query_start_loc.tolist() == [0, 6, 9] and rest.num_actual_tokens == 9
    assert rest.seq_lens.tolist() == [6, 100] and rest.slot_mapping.tolist() == list(range(2, 11))
    assert torch.equal(rest.block_table, common.block_table_tensor[2:])


def test_more_rows_than_choose_at_once(builder: Any):
    builder.rows.most = 2
    made = builder.build(0, batch([1, 1, 1, 6], [40, 7, 9, 6]))
    assert (made.decodes, made.rest, made.rows) == (0, None, None)
    assert made.num_actual_tokens == 9


def test_rows_go_where_they_belong(monkeypatch: pytest.MonkeyPatch):
    """Each token's query reaches one of the two, and its output is written once."""
    seen: dict[str, list[int]] = {"plan": [], "flash": []}

    def flash(self: Any, layer: Any, query: torch.Tensor, key: Any, value: Any, cache: Any, metadata: Any,
              output: torch.Tensor, *others: Any) -> torch.Tensor:
        count = metadata.num_actual_tokens
        seen["flash"] += query[:count, 0, 0].tolist()
        output[:count] = query[:count]
        return output

    class Rows:
        def attend(self, index: int, query: torch.Tensor, output: torch.Tensor, rows: int) -> None:
            assert (index, len(query)) == (3, rows)
            seen["plan"] += query[:, 0, 0].tolist()
            output.copy_(query)

    monkeypatch.setattr(attention.FlashAttentionImpl, "forward", flash)
    layer = object.__new__(attention.KvstrataImpl)
    layer.index = 3
    query = torch.arange(12.0).view(12, 1, 1).expand(12, 2, 64).contiguous()
    for decodes, left in ((2, 9), (12, 0), (0, 12)):
        seen["plan"], seen["flash"] = [], []
        rest = SimpleNamespace(num_actual_tokens=left) if left and decodes else None
        metadata = SimpleNamespace(decodes=decodes, rest=rest, num_actual_tokens=12, rows=Rows() if decodes else None)
        output = torch.full_like(query, torch.nan)
        layer.forward(None, query, query, query, None, metadata, output)
        assert seen == {"plan": list(range(decodes)), "flash": list(range(decodes, decodes + left))}
        assert torch.equal(output[:decodes + left], query[:decodes + left])
    layer.index = -1  # a layer that the plan is not for
    seen["flash"] = []
    layer.forward(None, query, query, query, None, SimpleNamespace(rows=Rows(), decodes=2, num_actual_tokens=12), query)
    assert seen["flash"] == list(range(12))


def test_when_units_are_completed():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    rows = object.__new__(BlockRows)
    for unit in (16, 64):
        rows._attention = SimpleNamespace(unit_tokens=unit)
        for _ in range(200):
            new = [draw.choice((1, 1, 1, draw.randrange(1, 100))) for _ in range(draw.randrange(1, 5))]
            ends = [n + draw.randrange(200) for n in new]
            completes = any(end // unit > (end - n) // unit for end, n in zip(ends, new))
            assert rows._new_tokens(batch(new, ends)) == (max(new) if completes else 0)
    rows._attention = SimpleNamespace(unit_tokens=0)
    assert rows._new_tokens(batch([70], [70])) == 0


class Recorded:
    """In BlockAttention's place."""

    unit_tokens, workspace_bytes, min_tokens = 16, 4096, 1 << 30

    def __init__(self, plan: str, shape: Any) -> None:
        self.shape, self.closed, self.begun, self.indexed = shape, False, [], []

    def bind(self, layers: list[int], workspace: int) -> None:
        self.layers, self.workspace = layers, workspace

    def begin(self, **batch: Any) -> None:
        self.begun.append(batch)

    def attend(self, layer: int, q: int, q_stride: int, out: int, rows: int, stream: int) -> None:
        self.attended = layer, q, q_stride, rows

    def index(self, blocks: int, count: int, stream: int) -> None:
        self.indexed.append(count)

    def close(self) -> None:
        self.closed = True


def test_queries_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch):
    """Where they can be: heads side by side, whatever lies between rows."""
    monkeypatch.setattr(BlockRows, "_stream", lambda rows: 0)
    rows = object.__new__(BlockRows)
    rows._attention = Recorded("full", None)

    def attended(query: torch.Tensor) -> tuple[bool, int]:
        rows.attend(2, query, torch.empty(query.shape, dtype=query.dtype), len(query))
        layer, q, q_stride, count = rows._attention.attended
        assert (layer, count) == (2, len(query))
        return q == query.data_ptr(), q_stride

    product = torch.zeros(3, 8, 64, dtype=torch.bfloat16)  # queries, keys, values
    assert attended(product[:, :4]) == (True, 8 * 64 * 2)
    assert attended(product[:, :4].contiguous()) == (True, 4 * 64 * 2)
    assert attended(product[:, :8:2]) == (False, 4 * 64 * 2)
    assert attended(torch.as_strided(product, (1, 4, 64), (1, 64, 1))) == (True, 4 * 64 * 2)
    assert attended(torch.as_strided(product, (3, 1, 64), (512, 7, 1))) == (True, 8 * 64 * 2)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """What BlockRows has made, on a CPU."""
    made: list[Recorded] = []

    def make(plan: str, shape: Any) -> Recorded:
        made.append(Recorded(plan, shape))
        return made[-1]

    monkeypatch.setattr(block_rows, "BlockAttention", make)
    monkeypatch.setattr(BlockRows, "_of_process", {})
    monkeypatch.setattr(BlockRows, "_reserved", None)
    monkeypatch.setattr(BlockRows, "_stream", lambda self: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return made


def layers_of(count: int, heads: int, slots: int, dim: int, more: int, slots_first: bool) -> dict[str, Any]:
    """As vLLM gives them: [blocks][heads][slots][2 * dim] in one allocation, `more` bytes behind each block's rows."""
    page, blocks = heads * slots * 2 * dim + more // 2, 9
    memory = torch.zeros(count * blocks * page, dtype=torch.bfloat16)
    strides = (page, 2 * dim, heads * 2 * dim, 1) if slots_first else (page, slots * 2 * dim, 2 * dim, 1)
    return {f"layer.{i}": SimpleNamespace(impl=SimpleNamespace(scale=0.1, index=-1), kv_cache=torch.as_strided(
        memory, (blocks, heads, slots, 2 * dim), strides, i * blocks * page)) for i in range(count)}


def rows_of(layers: dict[str, Any], heads: int, slots: int, dim: int) -> BlockRows:
    shape = BlockShape(layers=len(layers), query_heads=2 * heads, kv_heads=heads, head_dim=dim, dtype="bf16",
                       block_tokens=slots)
    limits = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4),
                             model_config=SimpleNamespace(max_model_len=1000))
    return BlockRows("quest", shape, layers, limits, torch.device("cpu"))


def test_a_prompts_last_token_attends_all(made: list[Recorded]):
    """Rows that pad a graph have no entry in vLLM's flags, and are read all the same."""
    rows = rows_of(layers_of(1, 2, 16, 64, 0, False), 2, 16, 64)
    assert rows.begin(batch([1, 1, 1, 1], [40, 7, 9, 30], [False, False, False, False]), 4) == 4
    assert made[-1].begun[-1]["in_full"] is None
    padded = batch([1, 1, 1, 1], [40, 7, 0, 0])
    padded.is_prefilling = torch.tensor([False, True])
    rows.begin(padded, 4)
    assert made[-1].begun[-1]["in_full"] == rows._flags.data_ptr() and rows._flags.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("slots_first", [False, True])
def test_where_blocks_lie(made: list[Recorded], slots_first: bool):
    heads, slots, dim, more = 2, 16, 64, 512
    layers = layers_of(3, heads, slots, dim, more, slots_first)
    rows = rows_of(layers, heads, slots, dim)
    assert [layer.impl.index for layer in layers.values()] == [0, 1, 2]
    assert rows.begin(batch([1, 1], [40, 7]), 2) == 2
    attention = made[-1]
    row = 4 * dim
    assert attention.shape.block_stride == heads * slots * row + more
    assert (attention.shape.head_stride, attention.shape.slot_stride) == ((row, heads * row) if slots_first else
                                                                          (slots * row, row))
    assert (attention.shape.value_offset, attention.shape.index_offset) == (2 * dim, heads * slots * row)
    assert attention.shape.scale == 0.1 and attention.layers == [l.kv_cache.data_ptr() for l in layers.values()]
    assert attention.begun[0]["rows"] == 2 and attention.begun[0]["blocks_of_row"] == 8
    assert rows.begin(batch([1] * 5, [9] * 5), 5) == 0  # more of them than choose at once


def test_blocks_that_are_given_twice(made: list[Recorded]):
    """First to measure what graphs take."""
    first = rows_of(layers_of(1, 2, 16, 64, 0, False), 2, 16, 64)
    first.begin(batch([1], [9]), 1)
    measured = made[-1]
    rows = rows_of(layers_of(1, 2, 16, 64, 0, False), 2, 16, 64)
    rows.begin(batch([1], [9]), 1)
    assert made[-1] is not measured and made[-1].workspace == measured.workspace
    before = made[-1]
    rows._first.kv_cache = layers_of(1, 2, 16, 64, 0, False)["layer.0"].kv_cache
    rows.begin(batch([1], [9]), 1)
    assert before.closed and made[-1].layers == [rows._first.kv_cache.data_ptr()]
    BlockRows.filled(torch.tensor([3, 4], dtype=torch.int32))
    assert made[-1].indexed == [2] and not measured.indexed and not before.indexed


def spec(**changes: Any) -> Any:
    return FullAttentionSpec(**{"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16, **changes})


@pytest.mark.parametrize("plan, block, share", [("quest", 16, 1 / 16), ("bits", 64, 5 / 64), ("window", 16, 0),
                                                ("tokenselect", 16, 0), ("full", 16, 0)])
def test_room_for_the_index(monkeypatch: pytest.MonkeyPatch, plan: str, block: int, share: float):
    monkeypatch.setattr(attention.KvstrataImpl, "plan", plan)
    asked = spec(block_size=block)
    made = attention.KvstrataBackend.customize_spec(asked)
    assert made.page_size_bytes == asked.page_size_bytes * (1 + share)
    assert made.unpadded_page_size_bytes == asked.page_size_bytes and made.page_size_bytes % 256 == 0
    window = SlidingWindowSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, sliding_window=512)
    for other in (window, spec(dtype=torch.float32), spec(head_size=96), spec(sliding_window=512)):
        assert attention.KvstrataBackend.customize_spec(other) == other


def test_blocks_are_of_whole_units(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention.KvstrataImpl, "plan", "bits")
    assert attention.KvstrataBackend.get_preferred_block_size(16) == 64
    assert [size.base for size in attention.KvstrataBackend.get_supported_kernel_block_sizes()] == [64]
    monkeypatch.setattr(attention.KvstrataImpl, "plan", "quest")
    assert attention.KvstrataBackend.get_preferred_block_size(16) == 16


def test_a_plan_is_of_the_identity():
    """What is generated under it is the beginning of the next turn's prompt."""
    def told(plan: str | None) -> dict[str, Any]:
        return loaded.settings_of(SimpleNamespace(
            model_config=SimpleNamespace(quantization=None), cache_config=SimpleNamespace(cache_dtype="auto"),
            parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1),
            additional_config={} if plan is None else {"kvstrata": {"plan": plan}}))
    assert told(None) == told("full")
    assert len({str(told(plan)) for plan in (None, "quest", "quest{budget = 512}", "bits")}) == 4


def config(**changes: Any) -> Any:
    base = {"additional_config": {"kvstrata": {"plan": "quest"}}, "speculative_config": None, "kv_transfer_config": None,
            "cache_config": SimpleNamespace(cache_dtype="auto"), "model_config": SimpleNamespace(use_mla=False),
            "parallel_config": SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)}
    return SimpleNamespace(**{**base, **changes})


@pytest.mark.parametrize("changes, said", [
    ({"speculative_config": object()}, "--speculative-config"),
    ({"kv_transfer_config": SimpleNamespace(kv_connector="OffloadingConnector")}, "kv_connector OffloadingConnector"),
    ({"cache_config": SimpleNamespace(cache_dtype="fp8")}, "--kv-cache-dtype fp8"),
    ({"model_config": SimpleNamespace(use_mla=True)}, "MLA"),
    ({"additional_config": {"kvstrata": {"plans": "quest"}}}, "kvstrata.plans: known is plan")])
def test_what_a_plan_cannot_be_beside(changes: dict[str, Any], said: str):
    with pytest.raises(Unsupported, match=said):
        plan_choice.refuse(config(**changes))
    plan_choice.refuse(config())
    if "additional_config" not in changes:
        plan_choice.refuse(config(**changes, additional_config={}))  # full is FlashAttention's own affair


@pytest.mark.parametrize("of_kind", [False, True])
def test_only_gpus_are_served(of_kind: bool):
    custom, other = SimpleNamespace(name="CUSTOM"), SimpleNamespace(name="FLASH_ATTN")

    def told(backend: Any, device: str) -> Any:
        attention = SimpleNamespace(backend=None if of_kind else backend,
                                    backend_per_kind={"full_attention": backend} if of_kind else {})
        return SimpleNamespace(attention_config=attention, device_config=SimpleNamespace(device_type=device))

    with pytest.raises(Unsupported, match="serves GPUs only .* device is cpu; take it away .*KVSTRATA_DISABLE=1"):
        plan_choice.refuse_other_devices(told(custom, "cpu"))
    plan_choice.refuse_other_devices(told(custom, "cuda"))
    plan_choice.refuse_other_devices(told(other, "cpu"))
