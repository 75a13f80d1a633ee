# SPDX-License-Identifier: Apache-2.0
"""SampleSelections of live sequences, on both transports: what the daemon says that steps selected between two calls,
against the positions that the steps themselves tell."""

import math

import numpy as np
import pytest
from toy import LAYERS, Toy

import kvstrata
from kvstrata.daemon import Daemon
from kvstrata.errors import KvstrataError
from kvstrata.grpc import Client

PAGE_TOKENS = 16
PROMPT = 40 * PAGE_TOKENS
PLANS = ["window{n_sink = 4, n_recent = 60, min_tokens = 0}", "quest{budget = 64, min_tokens = 0}"]


@pytest.fixture
def client(daemon: Daemon):
    with Client(daemon.socket) as opened:
        yield opened


def prefilled(toy: Toy, session: kvstrata.Session, plan: str) -> kvstrata.Sequence:
    sequence = session.open(toy.register(session), plan)
    toy.feed(session, sequence, 0, PROMPT)
    sequence.prefill_done()
    sequence.settle()
    return sequence


def decode(toy: Toy, session: kvstrata.Session, sequence: kvstrata.Sequence, t: int) -> np.ndarray:
    """One token; how many of its layers selected a row of each page."""
    pages = np.zeros(math.ceil((t + 1) / PAGE_TOKENS), dtype=int)
    with session.step([(sequence, toy.ids[t:t + 1])]) as step:
        for layer in range(LAYERS):
            step.append(layer, toy.k[layer, t:t + 1], toy.v[layer, t:t + 1])
            step.attend(layer, toy.q[layer, t:t + 1])
            pages[np.unique(np.concatenate(step.selected_tokens()) // PAGE_TOKENS)] += 1
    return pages


def in_buckets(pages: np.ndarray, width: int) -> list[int]:
    return [int(pages[i:i + width].sum()) for i in range(0, len(pages), width)]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("buckets", [0, 4])
def test_a_sample_is_what_steps_selected_since_the_last(session: kvstrata.Session, client: Client,
                                                        random: np.random.Generator, plan: str, buckets: int):
    steps = 3 * PAGE_TOKENS
    toy = Toy(random, PROMPT + steps)
    with prefilled(toy, session, plan) as sequence:
        cursor = client.sample_selections(sequence.handle, buckets).cursor
        for first in range(PROMPT, PROMPT + steps, PAGE_TOKENS):
            selected = np.zeros((first + PAGE_TOKENS) // PAGE_TOKENS, dtype=int)
            for t in range(first, first + PAGE_TOKENS):
                pages = decode(toy, session, sequence, t)
                selected[:len(pages)] += pages
            sequence.settle()
            sample = client.sample_selections(sequence.handle, buckets, cursor)
            cursor = sample.cursor
            assert (sample.tokens, sample.tokens_since) == (first + PAGE_TOKENS, PAGE_TOKENS)
            assert (sample.steps_since, sample.layers, sample.page_tokens) == (PAGE_TOKENS, LAYERS, PAGE_TOKENS)
            assert sample.bucket_tokens == (PAGE_TOKENS if buckets == 0 else 16 * PAGE_TOKENS)
            assert list(sample.selected) == in_buckets(selected, sample.bucket_tokens // PAGE_TOKENS)
            assert sample.uncounted == ""
        again = client.sample_selections(sequence.handle, buckets, cursor)
        assert not any(again.selected) and again.steps_since == 0


def test_two_callers_do_not_disturb_each_other(session: kvstrata.Session, client: Client,
                                               random: np.random.Generator):
    toy = Toy(random, PROMPT + 2)
    with prefilled(toy, session, PLANS[0]) as sequence:
        slow = client.sample_selections(sequence.handle)
        decode(toy, session, sequence, PROMPT)
        sequence.settle()
        quick = client.sample_selections(sequence.handle, since=slow.cursor)
        decode(toy, session, sequence, PROMPT + 1)
        sequence.settle()
        both = client.sample_selections(sequence.handle, since=slow.cursor)
        last = client.sample_selections(sequence.handle, since=quick.cursor)
        assert both.steps_since == 2 and quick.steps_since == last.steps_since == 1
        assert list(both.selected) == [a + b for a, b in zip(quick.selected, last.selected)]


def test_plan_full_is_not_counted(session: kvstrata.Session, client: Client, random: np.random.Generator):
    toy = Toy(random, PROMPT + 1)
    with prefilled(toy, session, "full") as sequence:
        decode_full = client.sample_selections(sequence.handle)
        assert decode_full.uncounted == "full" and not any(decode_full.selected)


def test_what_no_answer_said_is_refused(session: kvstrata.Session, client: Client, random: np.random.Generator):
    toy = Toy(random, PROMPT)
    with prefilled(toy, session, PLANS[0]) as sequence:
        cursor = client.sample_selections(sequence.handle).cursor
        cursor.bucket_tokens = 3
        for arguments in ({"buckets": 513}, {"since": cursor}):
            with pytest.raises(KvstrataError, match="SAMPLE_OPTION"):
                client.sample_selections(sequence.handle, **arguments)
        handle = sequence.handle
    with pytest.raises(KvstrataError, match="SEQUENCE_UNKNOWN"):
        client.sample_selections(handle)
