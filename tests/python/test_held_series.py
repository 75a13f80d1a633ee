# SPDX-License-Identifier: Apache-2.0
"""Series after a prefix hit: where they go on, how far they are known, and opens that hold no more of it."""

from __future__ import annotations

import numpy as np
import pytest
from toy import Toy

import kvstrata

N, PAGE = 200, 16
SEKV = "sekv{min_tokens = 0, local = 16}"
SENTENCES = "sentencekv{min_tokens = 0, tau = 16, start = 4, recent = 8, n_obs = 8}"
SURPRISAL = np.arange(N, dtype=np.float32) % 5
ENDS = np.arange(N) % 7 == 0


@pytest.fixture
def toy(random: np.random.Generator) -> Toy:
    return Toy(random, N + 10)


def first(session: kvstrata.Session, toy: Toy, plan: str = "full", surprisal: int = 0, boundary: int = 0
          ) -> kvstrata.Model:
    """Leaves the prompt behind, with so many leading values of the series; what holds it is closed."""
    model = toy.register(session)
    with session.open(model, plan, toy.ids[:N]) as sequence:
        toy.feed(session, sequence, 0, N)
        if surprisal:
            sequence.report(0, surprisal=SURPRISAL[:surprisal])
        if boundary:
            sequence.report(0, boundary=ENDS[:boundary])
        sequence.prefill_done()
        sequence.settle()
    return model


def works(sequence: kvstrata.Sequence) -> bool:
    """Whether the plan has its spans."""
    sequence.prefill_done()
    sequence.settle()
    return sequence.status.startswith("no trained parameters")


def test_surprisal_goes_on_behind_the_first_token(session: kvstrata.Session, toy: Toy):
    model = first(session, toy, surprisal=N)
    with session.open(model, SEKV, toy.ids[:N]) as sequence:
        held = sequence.held
        assert held == sequence.surprisal_tokens == N // PAGE * PAGE
        toy.feed(session, sequence, held, N)
        with pytest.raises(kvstrata.InvalidArgument,
                           match=f"a gap; go on at position {held} or {held + 1}$") as error:
            sequence.report(held + 2, surprisal=SURPRISAL[held + 2:])
        assert error.value.reason == "REPORT_ORDER"
        sequence.report(held + 1, surprisal=SURPRISAL[held + 1:held + 4])
        with pytest.raises(kvstrata.InvalidArgument, match=f"already reported; go on at position {held + 4}$"):
            sequence.report(held + 1, surprisal=SURPRISAL[held + 1:])
        sequence.report(held + 4, surprisal=SURPRISAL[held + 4:])
        assert works(sequence)
        reported = sequence.inspect("surprisal")
        assert reported[held] == 0 and (reported[held + 1:] == SURPRISAL[held + 1:]).all()


def test_a_prompt_without_a_prefix_may_skip_its_first_token(session: kvstrata.Session, toy: Toy):
    model = toy.register(session)
    with session.open(model, SEKV, toy.ids[:N]) as sequence:
        toy.feed(session, sequence, 0, N)
        sequence.report(1, surprisal=SURPRISAL[1:])
        assert works(sequence)


def test_boundaries_skip_nothing(session: kvstrata.Session, toy: Toy):
    model = first(session, toy)
    with session.open(model, SENTENCES, toy.ids[:N]) as sequence:
        held = sequence.held
        toy.feed(session, sequence, held, N)
        with pytest.raises(kvstrata.InvalidArgument, match=f"boundary.*go on at position {held}$"):
            sequence.report(held + 1, boundary=ENDS[held + 1:])


def test_a_skipped_token_does_not_end_the_series_for_those_behind(session: kvstrata.Session, toy: Toy):
    """A conversation: each turn holds the one before, and each hit skips a token."""
    model = toy.register(session)
    for end in (50, 100, 150, N):
        with session.open(model, SEKV, toy.ids[:end], only_reported=True) as sequence:
            held = sequence.held
            assert held == max(end - 50, 0) // PAGE * PAGE
            assert sequence.surprisal_tokens == held
            toy.feed(session, sequence, held, end)
            begin = held + 1 if held else 0
            sequence.report(begin, surprisal=SURPRISAL[begin:end])
            assert works(sequence)


@pytest.mark.parametrize("reported", [0, 15, 16, 40, 199])
def test_holds_no_more_than_was_reported(session: kvstrata.Session, toy: Toy, reported: int):
    model = first(session, toy, surprisal=reported)
    known = reported // PAGE * PAGE
    with session.open(model, SEKV, toy.ids[:N]) as all_of_it:
        assert all_of_it.held == N // PAGE * PAGE
        assert all_of_it.surprisal_tokens == min(reported, all_of_it.held)
    with session.open(model, "quest", toy.ids[:N], only_reported=True) as needs_none:
        assert needs_none.held == N // PAGE * PAGE
    with session.open(model, SEKV, toy.ids[:N], only_reported=True) as sequence:
        assert (sequence.held, sequence.surprisal_tokens, sequence.tokens) == (known, known, known)
        toy.feed(session, sequence, known, N)
        begin = known + 1 if known else 0
        sequence.report(begin, surprisal=SURPRISAL[begin:])
        assert works(sequence)


def test_of_a_packed_prompt_everything_is_held(session: kvstrata.Session, toy: Toy):
    model = first(session, toy, SEKV, surprisal=N)
    with session.open(model, SEKV, toy.ids[:N], only_reported=True) as sequence:
        assert sequence.held == N // PAGE * PAGE


@pytest.mark.parametrize("reported", [0, 40, 192])
def test_sentence_ends_are_held_as_far_as_they_were_reported(session: kvstrata.Session, toy: Toy, reported: int):
    model = first(session, toy, boundary=reported)
    usable = (N - 8) // PAGE * PAGE  # the last n_obs queries must pass
    with session.open(model, SENTENCES, toy.ids[:N]) as sequence:
        assert sequence.held == usable
        assert sequence.boundary_tokens == min(reported // PAGE * PAGE, usable)
    with session.open(model, SENTENCES, toy.ids[:N], only_reported=True) as sequence:
        held = sequence.held
        assert held == sequence.boundary_tokens == min(reported // PAGE * PAGE, usable)
        toy.feed(session, sequence, held, N)
        sequence.report(held, boundary=ENDS[held:])
        sequence.prefill_done()
        assert sequence.status == "ok"


def test_ids_that_end_sentences_need_no_reports(session: kvstrata.Session, toy: Toy):
    toy.ids[::7] = 5
    model = session.register_model("toy", toy.digest, layers=2, query_heads=4, kv_heads=2, head_dim=64,
                                   page_tokens=PAGE, boundary_tokens=[5])
    with session.open(model, "full", toy.ids[:N]) as sequence:
        toy.feed(session, sequence, 0, N)
    with session.open(model, SENTENCES, toy.ids[:N], only_reported=True) as sequence:
        assert sequence.held == sequence.boundary_tokens == (N - 8) // PAGE * PAGE


@pytest.mark.parametrize(("limit", "held"), [(0, 192), (1, 0), (15, 0), (16, 16), (100, 96), (1 << 31, 192)])
@pytest.mark.parametrize("plan", ["quest{min_tokens = 0}", "chess{min_tokens = 0}", SEKV])
def test_holds_no_more_than_was_asked(session: kvstrata.Session, toy: Toy, plan: str, limit: int, held: int):
    model = first(session, toy, plan, surprisal=N)
    with session.open(model, plan, toy.ids[:N], max_held=limit) as sequence:
        assert sequence.held == held and sequence.indexed <= held
        toy.feed(session, sequence, held, N)
        sequence.prefill_done()
        sequence.settle()
        toy.feed(session, sequence, N, N + 1)
        assert sequence.tokens == N + 1
