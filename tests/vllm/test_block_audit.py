# SPDX-License-Identifier: Apache-2.0
"""What a plan is said to lose in vLLM: which rows are sampled, when they are measured, and the figures. No GPU."""

from __future__ import annotations

import ctypes
import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import torch  # noqa: E402
from kvstrata.block_attention import BlockShape  # noqa: E402
from kvstrata.chunks import LayerRecall  # noqa: E402

from kvstrata_vllm import block_audit  # noqa: E402
from kvstrata_vllm.block_audit import BlockAudit, add, loss_of  # noqa: E402

HEADS, DIM, LAYERS = 4, 64, 3


def batch(ends: list[int], prompts: list[bool]) -> Any:
    return SimpleNamespace(seq_lens_cpu_upper_bound=torch.tensor(ends, dtype=torch.int32), is_prefilling=torch.tensor(prompts))


class Attention:
    """In BlockAttention's place: its audits say that half of the mass was attended."""

    min_tokens = 1000

    def __init__(self) -> None:
        self.audited: list[int] = []

    def audit(self, layer: int, outputs: int, lse: int, stream: int) -> None:
        self.audited.append(layer)
        floats = 2 * HEADS * DIM
        (ctypes.c_float * floats).from_address(outputs)[:] = [1.5] * (floats // 2) + [1.0] * (floats // 2)
        (ctypes.c_float * (2 * HEADS)).from_address(lse)[:] = [0.0] * HEADS + [0.6931472] * HEADS


class Event:
    """In a CUDA event's place."""

    there = True

    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return Event.there


STREAM: Any = SimpleNamespace(cuda_stream=0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(block_audit.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "there", True)
    return clock


def audit_of(attention: Any) -> BlockAudit:
    shape = BlockShape(layers=LAYERS, query_heads=HEADS, kv_heads=2, head_dim=DIM, dtype="bf16", block_tokens=16)
    return BlockAudit(attention, "quest", shape, [10, 20, 30])


def test_a_loss_is_what_attention_says():
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    q, k, v = torch.randn(HEADS, 1, DIM), torch.randn(HEADS, 50, DIM), torch.randn(HEADS, 50, DIM)
    logits = (q @ k.transpose(1, 2))[:, 0] / DIM ** 0.5
    chosen = torch.rand(50) < 0.4
    weights = torch.softmax(logits, -1)
    rows = torch.stack([(torch.softmax(logits[:, chosen], -1)[:, None] @ v[:, chosen])[:, 0], (weights[:, None] @ v)[:, 0]])
    lse = torch.stack([logits[:, chosen].logsumexp(-1), logits.logsumexp(-1)])
    found = loss_of(7, rows, lse)
    recall = weights[:, chosen].sum(-1)
    assert found is not None and (found.layer, found.samples) == (7, HEADS)
    assert found.recall == pytest.approx(float(recall.mean()), abs=1e-5)
    assert found.least == pytest.approx(float(recall.min()), abs=1e-5)
    off = (rows[0] - rows[1]).norm(dim=1) / rows[1].norm(dim=1)
    assert found.error == pytest.approx(float(off.mean()), rel=1e-4)
    lse[0, 1] = torch.nan
    assert loss_of(7, rows, lse) is None


def test_losses_add_up():
    losses: dict[int, LayerRecall] = {}
    add(losses, LayerRecall(3, 4, 0.5, 0.25, 0.2))
    add(losses, LayerRecall(3, 12, 0.9, 0.75, 0.6))
    assert losses[3] == pytest.approx(LayerRecall(3, 16, 0.8, 0.25, 0.5))


def test_rows_that_a_plan_chooses_for_are_sampled(clock: SimpleNamespace):
    attention = Attention()
    audit = audit_of(attention)
    rows = batch([900, 5000, 6000, 7000], [False, False, True, False])
    assert audit.sample(batch([900, 1000], [False, False]), 2) is None
    assert audit.sample(rows, 3) == 1  # a prompt's last token attends all; row 3 is none of those in front
    assert audit.sample(rows, 3) is None  # a second has not gone by
    clock.now += 1.0
    assert audit.sample(rows, 3) == 1
    assert audit.sample(rows, 0) is None


def test_a_sample_is_measured_behind_its_step(clock: SimpleNamespace):
    attention = Attention()
    audit = audit_of(attention)
    audit.measure(STREAM)
    assert attention.audited == []
    assert audit.sample(batch([5000], [False]), 1) == 0
    Event.there = False
    audit.measure(STREAM)
    assert sorted(attention.audited) == [0, 1, 2] and audit.losses() == []
    clock.now += 1.0
    assert audit.sample(batch([5000], [False]), 1) is None  # the GPU has not come as far as that
    audit.measure(STREAM)
    Event.there = True
    audit.measure(STREAM)
    found = sorted(audit.losses())
    assert [(loss.layer, loss.samples) for loss in found] == [(10, HEADS), (20, HEADS), (30, HEADS)]
    for loss in found:
        assert (loss.recall, loss.least, loss.error) == pytest.approx((0.5, 0.5, 0.5))
    assert audit.losses() == [] and len(attention.audited) == LAYERS


def test_long_sequences_are_measured_by_and_by(clock: SimpleNamespace):
    """Layer after layer, so that what a sample reads has a limit."""
    attention = Attention()
    audit = audit_of(attention)
    for _ in range(LAYERS):
        assert audit.sample(batch([1 << 20], [False]), 1) == 0
        audit.measure(STREAM)
        audit.measure(STREAM)
        clock.now += 1.0
    assert sorted(attention.audited) == [0, 1, 2]


def test_the_log_has_it_once_a_minute(clock: SimpleNamespace, caplog: pytest.LogCaptureFixture):
    audit = audit_of(Attention())
    with caplog.at_level("INFO", logger="vllm.kvstrata"):
        for _ in range(62):
            audit.sample(batch([5000], [False]), 1)
            audit.measure(STREAM)
            clock.now += 1.0
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and said[0].startswith("plan quest: it attended 0.5000 of full attention's mass (0.5000 in layer ")


def test_the_daemon_is_told_what_was_lost(monkeypatch: pytest.MonkeyPatch):
    from kvstrata_vllm.block_rows import BlockRows
    from kvstrata_vllm.connector import KvstrataConnector
    told: list[Any] = []
    losses = [[LayerRecall(3, 4, 0.5, 0.25, 0.2)], []]
    monkeypatch.setattr(BlockRows, "losses", classmethod(lambda cls: losses.pop(0)))
    connector = object.__new__(KvstrataConnector)
    connector._plan, connector._link = "quest", SimpleNamespace(recalled=lambda *what: told.append(what))
    connector._vllm_config = SimpleNamespace(model_config=SimpleNamespace(served_model_name="m"))
    connector._tell_losses()
    connector._tell_losses()  # nothing has come since
    assert told == [("quest", "m", [LayerRecall(3, 4, 0.5, 0.25, 0.2)])]
    connector._plan = "full"
    connector._tell_losses()
