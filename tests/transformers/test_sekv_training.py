"""bench/accuracy/train_sekv.py: the forward pass that trains against the numpy reference, and a training of a tiny model
that stops and goes on, and whose loss falls."""

from __future__ import annotations

import json
import lzma
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench" / "accuracy"), str(ROOT / "tests" / "python")]

import sekv_student as ours  # noqa: E402
import tiny_gguf  # noqa: E402
from kvstrata_numpy import gguf_file  # noqa: E402
from kvstrata_numpy.tokenizer import Tokenizer  # noqa: E402
from reference import sekv  # noqa: E402

SEED, CPU, LOCAL = 20261126, torch.device("cpu"), 32
KV_HEADS, GROUP, DIM, TOKENS = 2, 3, 48, 420


def low_rank(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Rows that a few directions nearly hold, so that some spans are stored as factors."""
    return random.normal(size=(*shape[:-1], 4)) @ random.normal(size=(4, shape[-1])) + 0.05 * random.normal(size=shape)


class Case:
    """One layer, one text: what the reference makes of it, and the same tensors for torch [L = 1, B = 1, ...]."""

    def __init__(self, trained: bool, budget: int) -> None:
        print(f"seed {SEED}")
        random = np.random.default_rng(SEED)
        self.keys, self.values = (low_rank(random, TOKENS, KV_HEADS, DIM) for _ in "kv")
        self.surprisal = random.exponential(size=TOKENS)
        self.surprisal[90:170] = 0.1  # a span that is longer than r_max
        self.q = random.normal(size=(KV_HEADS * GROUP, DIM))
        self.parameters = ours.Parameters(1, KV_HEADS * GROUP, DIM, SEED) if trained else None
        learned = {}
        if self.parameters is not None:
            with torch.no_grad():
                self.parameters.directions.normal_(generator=torch.Generator().manual_seed(SEED))
                self.parameters.tau.fill_(0.6)
                self.parameters.g_phi[4].weight *= 40
                self.parameters.g_phi[4].bias -= 4
            named = {k: v.numpy() for k, v in self.parameters.tensors().items()}
            learned = {"w": named["W"][0], "tau": named["tau"][0], "mlp": named}
        self.reference = sekv.SeKV(KV_HEADS * GROUP, budget=budget, alpha=ours.ALPHA, local=LOCAL, min_tokens=0, **learned)
        self.reference.prefill(self.keys, self.values, self.surprisal)
        found = ours.segment(self.surprisal, LOCAL)
        self.spans = ours.spans_of([found], TOKENS, CPU, torch.float32)
        self.k, self.v = (torch.tensor(x).float().permute(1, 0, 2)[None, None] for x in (self.keys, self.values))
        self.k_mean, self.v_mean = (torch.tensor(np.array([[getattr(s, name) for s in head] for head in self.reference.spans])
                                                 ).float()[None, None] for name in ("k_mean", "v_mean"))


@pytest.mark.parametrize("trained", [False, True])
def test_spans_choice_and_output_are_the_references(trained: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ours, "MAX_LOSS", 1.0)  # which the reference does not have
    case = Case(trained, budget=200)
    assert ours.segment(case.surprisal, LOCAL) == list(case.reference.segments.spans)
    keys, values, factored = case.k, case.v, 0
    for group in case.spans.groups:
        mean = case.k_mean[:, group.row, :, group.span].permute(1, 2, 0, 3)
        both = []
        for x in (case.k, case.v):
            factors = ours.factors_of(ours.rows_of(x, group))
            gates = torch.ones_like(factors.spectrum) if case.parameters is None else case.parameters.gates(factors.spectrum, mean)
            both.append((factors, gates))
            for head in range(KV_HEADS):
                for i, span in enumerate(group.span.tolist()):
                    known = case.reference.spans[head][span]
                    which = x is case.v
                    rank = len(known.spectrum[which])
                    np.testing.assert_allclose(factors.spectrum[0, head, i, :rank], known.spectrum[which], rtol=2e-2, atol=5e-3)
                    np.testing.assert_allclose(gates[0, head, i, :rank].detach(), known.gates[which], atol=2e-2)
                    factored += (known.keys, known.values)[which].right is not None
        with torch.no_grad():
            keys, values = (ours.stored(x, group, *pair) for x, pair in zip((keys, values), both))
    assert factored, "no span of this case is stored as factors"
    for head in range(KV_HEADS):
        for (a, b), known in zip(case.reference.segments.spans, case.reference.spans[head]):
            np.testing.assert_allclose(keys[0, 0, head, a:b], known.keys.matrix(), rtol=2e-2, atol=5e-2)
            np.testing.assert_allclose(values[0, 0, head, a:b], known.values.matrix(), rtol=2e-2, atol=5e-2)
    check_step(case, keys[0], values[0])


def check_step(case: Case, keys: torch.Tensor, values: torch.Tensor) -> None:
    """One query: relevance, what is expanded, and the output."""
    chosen = case.reference.select(case.q)
    wanted = case.reference.attend(case.q, chosen)
    q = torch.tensor(case.q).float().view(1, KV_HEADS, GROUP, 1, DIM)
    scale, log_length = DIM**-0.5, case.spans.log_length[:, None, None, None]
    coarse = torch.einsum("bkgtd,bksd->bkgts", q, case.k_mean[0]) * scale + log_length
    tau = torch.zeros(KV_HEADS, GROUP)
    scores = coarse
    if case.parameters is not None:
        scores = ours.relevance(q, case.k_mean[0], case.spans.log_length, case.parameters.W[0]).detach()
        tau = case.parameters.tau[0].detach().view(KV_HEADS, GROUP)
    np.testing.assert_allclose(scores.view(KV_HEADS * GROUP, -1), case.reference.scores, atol=1e-3)
    room = torch.tensor([[case.reference.budget - case.reference.persistent]])
    zoom = ours.expanded(scores, case.spans.length, tau, room, passed_over=None)
    assert [tuple(np.flatnonzero(head)) for head in zoom.view(KV_HEADS * GROUP, -1)] == [tuple(e) for e in chosen.expanded]
    behind = torch.zeros(1, KV_HEADS, 1, DIM)
    logits = ours.Mixed(torch.einsum("bkgtd,bknd->bkgtn", q, keys) * scale, coarse,
                        torch.full((1, KV_HEADS, GROUP, 1, 1), -torch.inf))
    out = ours.attend(logits, zoom.float(), case.spans.member, values, case.v_mean[0], behind)
    np.testing.assert_allclose(out.view(-1, DIM), wanted, rtol=3e-2, atol=2e-2)


def test_losses_are_the_references():
    random = np.random.default_rng(SEED)
    logits, mass = random.normal(size=30) * 3, random.random(30)
    y = sekv.zoom_targets(mass)
    found = ours.zoom_loss(torch.tensor(logits).view(1, 1, 1, 1, -1), torch.tensor(y > 0).view(1, 1, 1, 1, -1),
                           torch.ones(1, 1, 1, 1, dtype=torch.bool), torch.full((1, 30), 4))
    assert float(found) == pytest.approx(sekv.zoom_loss(sekv.sigmoid(logits), y), rel=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny random model, and texts."""
    made = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(gguf_file.read(tiny_gguf.write(made / "x.gguf")))
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer.vocabulary), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        tie_word_embeddings=True, initializer_range=0.2, bos_token_id=1, eos_token_id=2)).save_pretrained(made)
    tokenizer.save(str(made / "tokenizer.json"))
    random = np.random.default_rng(SEED)
    words = ["".join(random.choice(list("abcdefgh"), size=4)) for _ in range(60)]
    with lzma.open(made / "texts.jsonl.xz", "wt") as file:
        for i in range(64):
            file.write(json.dumps({"source": f"made/{i}", "text": " ".join(random.choice(words, size=1500))}) + "\n")
    return made


def trained(folder: pathlib.Path, out: pathlib.Path, *more: str) -> dict:
    options = {"--model": folder, "--texts": folder / "texts.jsonl.xz", "--out": out, "--state": out / "state",
               "--device": "cpu", "--steps": 4, "--tokens": 256, "--longest": 256, "--behind": 16, "--local": 32,
               "--log-every": 1, "--held": 2, "--held-prompt": 128, "--held-shares": 0.5, "--name": "tiny"}
    subprocess.run([sys.executable, ROOT / "bench/accuracy/train_sekv.py",
                    *(str(part) for pair in options.items() for part in pair), *more], check=True)
    return json.loads((out / "tiny.json").read_text())


def test_the_loss_of_a_batch_falls(folder: pathlib.Path):
    """Of the routers', the thresholds' and the gates' losses together."""
    student = ours.Student(folder, CPU, torch.float32, 512)
    ids = torch.randint(3, len(student.embedding), (2, 256 + 16), generator=torch.Generator().manual_seed(SEED))
    batch = student.batch(ids, 16, 32)
    parameters = ours.Parameters(2, 4, 32, SEED)
    parameters.begin_at(batch.k_mean, batch.spans.length)
    adam, losses = torch.optim.AdamW(parameters.parameters(), lr=1e-2), []
    for _ in range(8):
        found = student.decode(batch, parameters, 0.5)
        lost, held = ours.gate_losses(batch, parameters)
        kl = torch.nn.functional.kl_div(found.logits.log_softmax(-1), batch.teacher, reduction="sum", log_target=True) / 32
        losses.append(kl + found.zoom.mean() + 0.1 * found.expanded.mean() + 0.5 * lost + 0.01 * held)
        adam.zero_grad()
        losses[-1].backward()
        assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in parameters.parameters())
        adam.step()
    assert losses[-1].item() < losses[0].item()


def test_a_stop_changes_nothing(folder: pathlib.Path, tmp_path: pathlib.Path):
    whole = trained(folder, tmp_path / "whole")
    trained(folder, tmp_path / "parted", "--stop-at", "2")
    parted = trained(folder, tmp_path / "parted")
    timeless = [[{k: v for k, v in line.items() if k != "seconds"} for line in one["log"]] for one in (whole, parted)]
    assert timeless[0] == timeless[1]
    one, other = (load_file(tmp_path / name / "tiny.safetensors") for name in ("whole", "parted"))
    assert sorted(one) == sorted(other) and all(torch.equal(one[name], other[name]) for name in one)
    assert one["W"].shape == (2, 4, ours.D_ROUTE, 32)
