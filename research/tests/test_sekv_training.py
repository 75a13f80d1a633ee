# SPDX-License-Identifier: Apache-2.0
"""research/train_sekv.py: the forward pass that trains against the numpy reference, and a training of a tiny model
that begins as the untrained rule, whose loss falls, and that stops, goes on and keeps its best."""

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

import sekv_gates
import sekv_student as ours
import tiny_gguf
from kvstrata_numpy import gguf_file
from kvstrata_numpy.tokenizer import Tokenizer
from reference import sekv

ROOT = pathlib.Path(__file__).resolve().parents[2]

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
                self.parameters.turn.normal_(generator=torch.Generator().manual_seed(SEED))
                self.parameters.turn *= 0.3
                self.parameters.tau.fill_(0.6)
                self.parameters.g_phi[4].weight *= 40
                self.parameters.g_phi[4].bias -= 8
            self.parameters.gated = True
            named = {k: v.numpy() for k, v in self.parameters.tensors().items()}
            learned = {"w": named["W"][0], "tau": named["tau"][0], "norm": named["norm"][0], "mlp": named}
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


def test_the_zoom_loss_is_of_the_whole_distribution():
    """0 where relevance is the log of the mass, whatever is added to it, and spans that are none have no part in it."""
    random, length = torch.Generator().manual_seed(SEED), torch.tensor([[4, 9, 5, 6, 0, 0]])
    mass = torch.rand(1, 2, 3, 5, 6, generator=random) * (length > 0)
    scores = mass.clamp(min=1e-9).log() + torch.randn(1, 2, 3, 5, 1, generator=random)
    assert float(ours.zoom_loss(scores, mass, length)) == pytest.approx(0, abs=1e-6)
    assert float(ours.zoom_loss(scores.flip(-1), mass, length)) > 0.1
    assert float(ours.zoom_loss(scores - (length - 1).clamp(min=1).log(), mass, length, 1.0)) == pytest.approx(0, abs=1e-6)


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
               "--device": "cpu", "--steps": 4, "--tokens": 256, "--prompts": 256, "--behind": 16, "--local": 32,
               "--window": 2, "--refresh": 2, "--log-every": 1, "--check-every": 2, "--choice": 2, "--held": 2,
               "--held-prompt": 128, "--held-behind": 16, "--held-shares": 0.5, "--share": 0.5, "--gate-steps": 20,
               "--name": "tiny"}
    subprocess.run([sys.executable, ROOT / "research/train_sekv.py",
                    *(str(part) for pair in options.items() for part in pair), *more], check=True)
    return json.loads((out / "tiny.json").read_text())


@pytest.fixture(scope="module")
def student(folder: pathlib.Path) -> ours.Student:
    return ours.Student(folder, CPU, torch.float32, 512)


def made_of(student: ours.Student, tokens: int, seed: int, gated: bool = False) -> ours.Batch:
    ids = torch.randint(3, len(student.embedding), (2, tokens + 16), generator=torch.Generator().manual_seed(seed))
    return student.batch(ids, 16, 32, gated)


def test_parameters_begin_as_the_untrained_rule(student: ours.Student):
    """Exactly: the same spans and logits; and the same loss, which some kernels of torch's round otherwise. What is saved has
    open gates too."""
    batch, parameters = made_of(student, 256, SEED, gated=True), ours.Parameters(2, 4, 32, SEED)
    with torch.no_grad():
        untrained, begun = (student.decode(batch, p, 0.5, errors=True) for p in (None, parameters))
        assert untrained.rows.sum() > 0, "nothing is expanded in this case"
        assert all(torch.equal(one, other) for one, other in zip(untrained._replace(zoom=begun.zoom), begun))
        torch.testing.assert_close(begun.zoom, untrained.zoom, rtol=1e-6, atol=1e-7)
        saved = parameters.tensors()
        assert torch.equal(saved["W"], torch.eye(32).expand(2, 4, 32, 32)) and not saved["tau"].any()
        parameters.g_phi.load_state_dict({k.removeprefix("g_phi."): v for k, v in saved.items() if k.startswith("g_phi.")})
        assert bool((parameters.gates(torch.rand(5, ours.R_MAX), torch.rand(5, 32)) == 1).all())


def test_open_gates_need_no_factors_of_short_spans(student: ours.Student):
    plain, gated = (made_of(student, 256, SEED, which) for which in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(plain.known, gated.known))


def test_a_budget_passes_over_alike(student: ours.Student):
    random = torch.Generator().manual_seed(SEED)
    logits, length = torch.randn(2, 2, 2, 5, 12, generator=random), torch.randint(0, 30, (2, 12), generator=random)
    tau, room = torch.full((2, 2), 0.2), torch.randint(0, 90, (2, 5), generator=random)
    assert torch.equal(ours.expanded(logits, length, tau, room), ours.expanded(logits, length, tau, room, passed_over=12))


@pytest.mark.parametrize("through", [False, True])
def test_the_loss_of_a_batch_falls(student: ours.Student, through: bool):
    """Routers learn, and every one of them has a gradient; by the zoom loss alone, and through the choice."""
    batch, parameters = made_of(student, 256, SEED), ours.Parameters(2, 4, 32, SEED)
    adam, losses = torch.optim.Adam(parameters.routers(), lr=3e-3), []
    for _ in range(12):
        found = student.decode(batch, parameters, 0.5, errors=True, through=through)
        kl = torch.nn.functional.kl_div(found.logits.log_softmax(-1), student.teacher(batch), reduction="sum", log_target=True) / 32
        loss = kl + found.error.mean() if through else found.zoom.mean()
        losses.append(loss.item())
        adam.zero_grad()
        loss.backward()
        assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in parameters.routers())
        adam.step()
    assert min(losses[6:]) < losses[0]


def test_gates_learn_what_components_are_worth(student: ours.Student):
    """Those of tiny singular values close, those of large ones stay open."""
    parameters, n = ours.Parameters(2, 4, 32, SEED), 400
    spectrum = torch.zeros(n, ours.R_MAX)
    spectrum[:, :8], spectrum[:, 8:16] = 5.0, 0.01
    spectra = sekv_gates.Spectra(spectrum, torch.randn(n, 32, generator=torch.Generator().manual_seed(SEED)),
                                 (torch.arange(ours.R_MAX) < 16).expand(n, -1))
    before = sekv_gates.losses(parameters, spectra)
    sekv_gates.train(parameters, spectra, 600, SEED)
    after, gates = sekv_gates.losses(parameters, spectra), parameters.gates(spectra.spectrum, spectra.mean)
    assert after[1] < before[1] and gates[:, :8].min() > 0.9 and gates[:, 8:16].mean() < 0.9 and parameters.gated
    drawn = sekv_gates.spectra_of(made_of(student, 256, SEED), 4, SEED)
    assert len(drawn.mean) and bool((drawn.spectrum.amax(-1) > 0).all()) and not drawn.spectrum[~drawn.within].any()


def test_a_stop_changes_nothing(folder: pathlib.Path, tmp_path: pathlib.Path):
    whole = trained(folder, tmp_path / "whole")
    trained(folder, tmp_path / "parted", "--stop-at", "2")
    parted = trained(folder, tmp_path / "parted")
    timeless = [[{k: v for k, v in line.items() if k != "seconds"} for line in one["log"]] for one in (whole, parted)]
    assert timeless[0] == timeless[1] and whole["checks"] == parted["checks"]
    one, other = (load_file(tmp_path / name / "tiny.safetensors") for name in ("whole", "parted"))
    assert sorted(one) == sorted(other) and all(torch.equal(one[name], other[name]) for name in one)
    assert one["W"].shape == (2, 4, 32, 32)


def test_what_loses_more_is_not_kept(folder: pathlib.Path, tmp_path: pathlib.Path):
    """A learning rate that harms: what is saved is what training began with."""
    told = trained(folder, tmp_path, "--try", "30,0,1,0,0", "--steps", "2")
    best = min(told["checks"], key=lambda row: row["kl"])
    assert told["best"] == best["kl"] and told["best_step"] == 0 == best["step"] and len(told["checks"]) > 1
    assert torch.equal(load_file(tmp_path / "tiny.safetensors")["W"], torch.eye(32).expand(2, 4, 32, 32))
