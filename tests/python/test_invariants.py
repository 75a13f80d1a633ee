# SPDX-License-Identifier: Apache-2.0
"""The rules of docs/spec/README.md that hold for every plan, line by line, on random data and on a real trace.

Rules that only an op or a selector can show have their tests there: ties (ops_pick_test), empty partials and
merge (ops_merge_test), shares of n units (select_test), planted needles (select_test).
"""

from __future__ import annotations

import itertools
import pathlib
from dataclasses import dataclass

import numpy as np
import pytest
from toy import bf16, bits

import kvstrata
from kvstrata.daemon import Daemon
from kvstrata.grpc import Client

PROMPT, STEPS, TAIL = 400, 12, 64
PLANS = {
    "window": "window{n_sink = 4, n_recent = 60, %s}",
    "quest": "quest{budget = 64, n_sink = 8, n_recent = 20, %s}",
    "quest, softmax": 'quest{page = 32, n_sink = 4, n_recent = 64, group = "softmax", budget = 64, %s}',
    "bits": "bits{budget = 64, unit = 32, recent = 24, %s}",
    "chess": 'chess{trigger = "every", every = 1, page = 16, sinks = 1, window = 2, %s}',
    "tokenselect": "tokenselect{k = 48, n_init = 4, n_local = 16, %s}",
    "sentencekv": "sentencekv{tau = 64, start = 4, recent = 16, n_obs = 16, %s}",
    "sekv": "sekv{max_loss = 1, alpha = 1, local = 32, rows_share = 0.6, %s}",
    "mosaickv": "mosaickv{max_loss = 1, share = 0.2, %s}",
    "block over raw": '{selector = "block", codec = "raw", page = 16, share = 0.2, %s}',
}
# Positions that are attended always, of n: sinks before `first`, recent ones from `n - last`.
ALWAYS = {"window": (4, 60), "quest": (8, 20), "quest, softmax": (4, 64), "bits": (4, 24), "chess": (16, 32), "tokenselect": (4, 16),
          "sentencekv": (4, 16), "sekv": (0, 1), "mosaickv": (8, 1), "block over raw": (0, 32)}
# The most that is attended of n beside them, rounded outwards to units.
BUDGET = {"window": 0, "quest": 64, "quest, softmax": 64, "bits": 64, "tokenselect": 48, "sentencekv": 64}
# Budgets that hold everything.
WHOLE = {
    "window": "window{n_recent = 4096, min_tokens = 0}", "quest": "quest{budget = 4096, min_tokens = 0}",
    "quest, softmax": 'quest{group = "softmax", budget = 4096, min_tokens = 0}', "bits": "bits{budget = 4096, min_tokens = 0}",
    "chess": 'chess{rho = [1, 1, 1], trigger = "always", min_tokens = 0}',
    "tokenselect": "tokenselect{k = 4096, min_tokens = 0}",
    "sentencekv": "sentencekv{tau = 4096, min_tokens = 0}", "sekv": "sekv{max_loss = 1, rows = 4096, min_tokens = 0}",
    "block over raw": '{selector = "block", codec = "raw", share = 1, min_tokens = 0}',
}


@dataclass
class Stream:
    """What a model hands over: k, v [layers][tokens][kv heads][dim], q [layers][tokens][heads][dim], exact in bf16."""

    k: np.ndarray
    v: np.ndarray
    q: np.ndarray
    ids: np.ndarray
    surprisal: np.ndarray
    boundary: np.ndarray
    digest: str

    @property
    def layers(self) -> int:
        return len(self.k)

    @property
    def group(self) -> int:
        return self.q.shape[2] // self.k.shape[2]

    def register(self, session: kvstrata.Session) -> kvstrata.Model:
        return session.register_model("stream", self.digest, layers=self.layers, query_heads=self.q.shape[2],
                                      kv_heads=self.k.shape[2], head_dim=self.k.shape[3], page_tokens=16)


def random_stream(rng: np.random.Generator) -> Stream:
    layers, kv_heads, heads, dim, tokens = 2, 2, 6, 64, PROMPT + STEPS
    make = lambda heads: bf16(rng.standard_normal((layers, tokens, heads, dim)))
    return Stream(make(kv_heads), make(kv_heads), make(heads), rng.integers(0, 1 << 30, tokens).astype(np.int32),
                  rng.exponential(size=tokens).astype(np.float32), rng.random(tokens) < 0.08, f"r:{rng.integers(1 << 60)}")


def real_stream(path: pathlib.Path) -> Stream:
    from kvstrata_numpy import trace as recorder
    t = recorder.read(str(path))
    wide = lambda name: np.stack([(t[f"{name}.{layer}"].astype(np.uint32) << 16).view(np.float32) for layer in t.layers])
    q, k = wide("q"), wide("k")
    unknown = np.zeros((*q.shape[:1], t.prompt - t.tail, *q.shape[2:]), np.float32)  # nothing is held to their outputs
    surprisal = np.concatenate([t["surprisal"], np.full(t.steps, t["surprisal"].mean(), np.float32)])
    return Stream(k, wide("v"), np.concatenate([unknown, q], axis=1), t["tokens"], surprisal, t["boundary"] != 0, "real")


@pytest.fixture(scope="module", params=["random", "real"])
def stream(request: pytest.FixtureRequest, random: np.random.Generator, tmp_path_factory: pytest.TempPathFactory) -> Stream:
    if request.param == "random":
        return random_stream(random)
    from kvstrata_numpy import trace as recorder
    path = tmp_path_factory.mktemp("trace") / "gpl.safetensors"
    model = request.getfixturevalue("model_file")
    assert recorder.main(["--out", str(path), "--model", model, "--tokens", str(PROMPT), "--steps", str(STEPS),
                          "--tail", str(TAIL), "--layers", "1,15"]) == 0
    return real_stream(path)


@pytest.fixture(scope="module")
def linked(daemon: Daemon):
    with kvstrata.attach(daemon.socket, client_name="invariants") as opened:
        yield opened


@dataclass
class Answer:
    """Every decode step's outputs [steps][layers][heads][dim], and attended positions by step, layer, group."""

    out: np.ndarray
    tokens: list[list[list[np.ndarray]]]


def feed(session: kvstrata.Session, sequence: kvstrata.Sequence, s: Stream, first: int, end: int) -> tuple[list, list]:
    """Appends and reports [first, end); outputs of the last token by layer, and what it attended."""
    out, tokens = [], []
    with session.step([(sequence, s.ids[first:end])]) as step:
        for layer in range(s.layers):
            step.append(layer, bits(s.k[layer, first:end]), bits(s.v[layer, first:end]))
            out.append(step.attend(layer, s.q[layer, first:end])[-1].astype(np.float32))
            tokens.append([np.array(group) for group in step.selected_tokens()])
    sequence.report(first, surprisal=s.surprisal[first:end], boundary=s.boundary[first:end])
    return out, tokens


def run(session: kvstrata.Session, s: Stream, plan: str, cuts: tuple[int, ...] = (), between=lambda sequence: None) -> Answer:
    """The prompt in pieces cut at `cuts`, then token by token; `between` acts on the sequence before each of those."""
    out, tokens = [], []
    with session.open(s.register(session), plan) as sequence:
        for first, end in itertools.pairwise((0, *cuts, PROMPT)):
            feed(session, sequence, s, first, end)
        sequence.prefill_done()
        for t in range(PROMPT, PROMPT + STEPS):
            sequence.settle()
            between(sequence)
            step_out, step_tokens = feed(session, sequence, s, t, t + 1)
            out.append(step_out)
            tokens.append(step_tokens)
    return Answer(np.array(out), tokens)


def same_tokens(a: Answer, b: Answer) -> bool:
    return all(np.array_equal(x, y) for steps in zip(a.tokens, b.tokens) for layers in zip(*steps)
               for x, y in zip(*layers, strict=True))


@pytest.fixture(scope="module")
def answers(stream: Stream, linked: kvstrata.Session) -> dict[str, Answer]:
    plans = {name: text % "min_tokens = 0" for name, text in PLANS.items()}
    return {name: run(linked, stream, plan) for name, plan in {"full": "full", **plans}.items()}


def test_full_is_attention_and_heads_share_h_over_g(stream: Stream, answers: dict[str, Answer]):
    for step, layer, head in itertools.product(range(STEPS), range(stream.layers), range(stream.q.shape[2])):
        n = PROMPT + step + 1
        k, v = (x[layer, :n, head // stream.group].astype(np.float64) for x in (stream.k, stream.v))
        scores = k @ stream.q[layer, n - 1, head] / np.sqrt(k.shape[1])
        weights = np.exp(scores - scores.max())
        np.testing.assert_allclose(answers["full"].out[step, layer, head], weights @ v / weights.sum(), atol=2e-5)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_chooses(answers: dict[str, Answer], name: str):
    """Otherwise the rules below say nothing about it."""
    assert min(len(g) for layers in answers[name].tokens for groups in layers for g in groups) < PROMPT
    assert not np.array_equal(answers[name].out, answers["full"].out)


@pytest.mark.parametrize("name", PLANS)
def test_is_deterministic(stream: Stream, linked: kvstrata.Session, answers: dict[str, Answer], name: str):
    again = run(linked, stream, PLANS[name] % "min_tokens = 0")
    assert np.array_equal(again.out, answers[name].out)
    assert same_tokens(again, answers[name])


@pytest.mark.parametrize("name", PLANS)
def test_sinks_the_recent_window_and_the_own_token_are_always_on(answers: dict[str, Answer], name: str):
    sinks, recent = ALWAYS[name]
    for step, layers in enumerate(answers[name].tokens):
        n = PROMPT + step + 1
        always = {*range(sinks), *range(n - recent, n)}
        for group in itertools.chain.from_iterable(layers):
            assert always <= set(group.tolist()), f"step {step}"


@pytest.mark.parametrize("name", BUDGET)
def test_budgets_hold_beside_the_always_on(stream: Stream, answers: dict[str, Answer], name: str):
    unit = {"quest": 16, "quest, softmax": 32}.get(name, 1)
    sinks, recent = (-(-x // unit) * unit + (unit > 1) * unit for x in ALWAYS[name])
    for step, layers in enumerate(answers[name].tokens):
        n = PROMPT + step + 1
        # SentenceKV's window reaches back to where the sentence that is being generated began.
        began = max(np.flatnonzero(stream.boundary[PROMPT:n - 1]) + PROMPT + 1, default=PROMPT)
        window = max(recent, n - began) if name == "sentencekv" else recent
        for group in itertools.chain.from_iterable(layers):
            assert len(group) <= BUDGET[name] + sinks + window


@pytest.mark.parametrize("name", WHOLE)
def test_a_budget_for_all_is_full_bit_for_bit(stream: Stream, linked: kvstrata.Session, answers: dict[str, Answer],
                                              name: str):
    assert np.array_equal(run(linked, stream, WHOLE[name]).out, answers["full"].out)


def test_packed_with_a_budget_for_all_is_all_blocks(stream: Stream, linked: kvstrata.Session):
    whole = run(linked, stream, "mosaickv{max_loss = 1, share = 1, min_tokens = 0}")
    for step, layers in enumerate(whole.tokens):
        for group in itertools.chain.from_iterable(layers):
            assert np.array_equal(group, np.arange(PROMPT + step + 1))


@pytest.mark.parametrize("name", PLANS)
def test_below_min_tokens_is_full_bit_for_bit(stream: Stream, linked: kvstrata.Session, answers: dict[str, Answer],
                                              name: str):
    below = run(linked, stream, PLANS[name] % f"min_tokens = {PROMPT + STEPS + 1}")
    assert np.array_equal(below.out, answers["full"].out)


@pytest.mark.parametrize("name", PLANS)
def test_dense_layers_are_full_and_others_as_without(stream: Stream, linked: kvstrata.Session,
                                                     answers: dict[str, Answer], name: str):
    dense = run(linked, stream, PLANS[name] % "min_tokens = 0, n_dense_layers = 1")
    if name not in ("sekv", "mosaickv"):  # their rows lie in a codec, whose full attention is over what it kept
        assert np.array_equal(dense.out[:, 0], answers["full"].out[:, 0])
    for step, layers in enumerate(dense.tokens):
        assert all(np.array_equal(g, np.arange(PROMPT + step + 1)) for g in layers[0])
    assert np.array_equal(dense.out[:, 1], answers[name].out[:, 1])


@pytest.mark.parametrize("name", PLANS)
def test_incremental_is_batch(stream: Stream, linked: kvstrata.Session, answers: dict[str, Answer], random: np.random.Generator,
                              name: str):
    plan = PLANS[name] % "min_tokens = 0"
    cuts = tuple(sorted({int(x) for x in random.integers(1, PROMPT, 9)}))
    for pieces in (cuts, tuple(range(1, PROMPT))):
        pieced = run(linked, stream, plan, pieces)
        assert same_tokens(pieced, answers[name]), f"prompt cut at {pieces[:9]}"
        np.testing.assert_allclose(pieced.out, answers[name].out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["full", *PLANS])
def test_moving_bytes_changes_nothing(stream: Stream, daemon: Daemon, linked: kvstrata.Session, answers: dict[str, Answer],
                                      name: str):
    plan = PLANS[name] % "min_tokens = 0" if name in PLANS else name
    with Client(daemon.socket) as client:
        alternating = itertools.cycle([client.demote, client.prefetch])
        moved = run(linked, stream, plan, between=lambda sequence: next(alternating)(sequence.handle))
    assert np.array_equal(moved.out, answers[name].out)
    assert same_tokens(moved, answers[name])


@pytest.mark.parametrize("name", PLANS)
def test_both_transports_give_the_same_bits(stream: Stream, daemon: Daemon, answers: dict[str, Answer], name: str):
    with kvstrata.attach(daemon.socket, transport="remote", client_name="invariants") as remote:
        of_remote = run(remote, stream, PLANS[name] % "min_tokens = 0")
    assert np.array_equal(of_remote.out, answers[name].out)
    assert same_tokens(of_remote, answers[name])
