# SPDX-License-Identifier: Apache-2.0
"""Every text that a status can be, on both transports: provoked, and held to the table of docs/plans.md.

tests/kernels/notice_test.cc holds that table to the program's own list, so that none is left out here.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from conftest import ROOT
from toy import LAYERS, Toy

import kvstrata

N = 80
# Random rows lose more than max_loss: test_max_loss.py has those texts.
SEKV = "sekv{min_tokens = 0, local = 16, max_loss = 1, %s}"
SENTENCES = "sentencekv{min_tokens = 0, tau = 8, start = 4, recent = 8, n_obs = 8, max_length = 5}"
# What `kvstrata seq show` says of a plan, and no sequence of itself: test_cli_lists.py.
OPERATORS = {"attends in full: its selector is full",
             "attends in full: what it always reads and its budget hold all {} tokens; it chooses from {} on"}
# open_on_upper_test.cc has it.
ARRIVING = {"the lower planes of {} packed tokens are on their way from a tier: attends their upper planes"}
CHESS = "chess{min_tokens = 0, page = 16, window = 1, every = 3, thresholds = %s}"


def documented() -> list[str]:
    text = (ROOT / "docs" / "plans.md").read_text()
    section = text.split("\n## Status\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(.*?)` \|", section, re.MULTILINE)


def parts_of(status: str) -> set[str]:
    """The rows of the table that a status is made of; fails where it says anything else."""
    patterns = {row: "".join(r"\d+" if part == "{}" else re.escape(part)
                             for part in re.split(r"(\{\})", row)) for row in documented()}
    found, rest = set(), status
    while rest:
        row, end = next(((row, match.end()) for row, pattern in patterns.items()
                         if (match := re.match(pattern + "(?:; |$)", rest))), (None, 0))
        assert row is not None, f"{rest!r} is not in docs/plans.md"
        found.add(row)
        rest = rest[end:]
    return found


class Provoked:
    """Sequences of one model that each lack something."""

    def __init__(self, session: kvstrata.Session, random: np.random.Generator) -> None:
        self.session = session
        self.toy = Toy(random, 2 * N)
        self.model = self.toy.register(session)
        self.seen: dict[str, str] = {}

    def open(self, plan: str) -> kvstrata.Sequence:
        # Other ids each time: nothing is held.
        self.toy.ids += 1
        return self.session.open(self.model, plan, self.toy.ids[:N])

    def note(self, sequence: kvstrata.Sequence) -> None:
        status = sequence.status
        for row in parts_of(status) if status != "ok" else ():
            self.seen[row] = sequence.plan

    def run(self, plan: str, *, surprisal: bool = False, boundary: bool = False, done: bool = True,
            generated: int = 0, entropy: bool = False, attend: bool = True) -> str:
        with self.open(plan) as sequence:
            if attend:
                self.toy.feed(self.session, sequence, 0, N)
            else:
                with self.session.step([(sequence, self.toy.ids[:N])]) as step:
                    for layer in range(LAYERS):
                        step.append(layer, self.toy.k[layer, :N], self.toy.v[layer, :N])
            if surprisal or boundary:
                sequence.report(0, surprisal=np.arange(N) % 5 if surprisal else None,
                                boundary=np.arange(N) % 7 == 0 if boundary else None)
            if done:
                sequence.prefill_done()
                sequence.settle()
            for t in range(N, N + generated):
                self.toy.feed(self.session, sequence, t, t + 1)
                if entropy:
                    sequence.report(t, entropy=[1.0])
            self.note(sequence)
            return sequence.status

    def spans_on_their_way(self) -> str:
        """Surprisal comes inside of a step, whose table does not change: no worker can be faster."""
        with self.open(SEKV % "alpha = 2") as sequence:
            self.toy.feed(self.session, sequence, 0, N)
            sequence.prefill_done()
            step = self.session.step([(sequence, self.toy.ids[N:N + 1])])
            sequence.report(0, surprisal=np.arange(N) % 5)
            self.note(sequence)
            status = sequence.status
            step.abort()
            return status


def test_each_text_is_seen(session: kvstrata.Session, random: np.random.Generator):
    p = Provoked(session, random)
    assert "80 tokens are fewer than min_tokens = 4096" in p.run("quest")
    p.run('quest{page = 1, min_tokens = "auto"}')
    assert "prefill_done" in p.run("quest{min_tokens = 0}", done=False)
    assert "all of the prompt's 80 tokens" in p.run(SEKV % "alpha = 2")
    assert "not there yet" in p.spans_on_their_way()
    assert "no more than its local window of 80" in p.run(f"sekv{{min_tokens = 0, local = {N}}}", surprisal=True)
    assert "holds all 80 tokens" in p.run(SEKV % f"rows = {N + 1}", surprisal=True)
    assert p.run(SEKV % "rows = 0", surprisal=True).startswith("no trained parameters")
    p.run(SEKV % "rows = 1", surprisal=True)
    assert "for 0 of the prompt's 80" in p.run(SENTENCES)
    assert "last 8 tokens" in p.run(SENTENCES, boundary=True, attend=False)
    assert "every 5 tokens" in p.run(SENTENCES, boundary=True, generated=6)
    assert "every 3 pages" in p.run(CHESS % "[0.5, 0.5]", generated=1)
    p.run(CHESS % "[inf, inf]", generated=1, entropy=True)
    missing = set(documented()) - OPERATORS - ARRIVING - set(p.seen)
    assert not missing, f"never seen on the {session.transport} transport: {missing}"


def test_the_smallest_budget_that_is_named_holds(session: kvstrata.Session, random: np.random.Generator):
    p = Provoked(session, random)
    named = re.search(r"rows = (\d+)", p.run(SEKV % "rows = 1", surprisal=True))
    assert named is not None
    smallest = int(named.group(1))
    assert "smallest budget" in p.run(SEKV % f"rows = {smallest - 1}", surprisal=True)
    assert "smallest budget" not in p.run(SEKV % f"rows = {smallest}", surprisal=True)


@pytest.mark.parametrize(("plan", "inputs"), [
    ("full", {}),
    ("window{min_tokens = 0}", {}),
    ("tokenselect{min_tokens = 0}", {"done": False}),
    (SENTENCES, {"boundary": True, "generated": 3}),
    (CHESS % "[0.5, 0.5]", {"generated": 2, "entropy": True}),
    (CHESS % "[0.5, inf], combine = \"or\"", {"generated": 2, "entropy": True}),
    ('{selector = "bucket", codec = "lowrank", local = 16, min_tokens = 0, max_loss = 1}', {"surprisal": True}),
    ("mosaickv{min_tokens = 0, max_loss = 1}", {"generated": 2}),
])
def test_a_plan_that_lacks_nothing_is_ok(session: kvstrata.Session, random: np.random.Generator, plan: str,
                                         inputs: dict):
    assert Provoked(session, random).run(plan, **inputs) == "ok"


@pytest.mark.parametrize("plan", ["full", "window", "quest", "bits", "chess", 'chess{trigger = "every"}', "tokenselect",
                                  "sentencekv", "sekv", "mosaickv", '{selector = "bucket", codec = "lowrank"}',
                                  '{selector = "full", codec = "packed"}'])
def test_what_a_plan_needs_is_what_its_status_misses(session: kvstrata.Session, random: np.random.Generator,
                                                     plan: str):
    """Without everything: the series that are missed are among those that it says it needs."""
    needs = session.plan_needs(plan)
    assert kvstrata.Need.TOKEN_IDS in needs.flags
    assert [line.split(":")[0].upper() for line in needs.text.split("\n")] == \
        [need.name for need in kvstrata.Need if need in needs.flags]
    text = session.open(Toy(random, 1).register(session), plan).plan
    text = re.sub(r"min_tokens = \d+", "min_tokens = 0", text)
    text = re.sub(r"max_loss = [0-9.]+", "max_loss = 1", text)
    text = re.sub(r"local = \d+", "local = 16", text)
    p = Provoked(session, random)
    status = p.run(text, generated=1)
    for need, words in ((kvstrata.Need.SURPRISAL, "surprisal"), (kvstrata.Need.ENTROPY, "entropy was"),
                        (kvstrata.Need.BOUNDARY, "boundaries")):
        if words in status:
            assert need in needs.flags, status
    if kvstrata.Need.SURPRISAL in needs.flags:
        assert "surprisal" in status
    elif kvstrata.Need.BOUNDARY in needs.flags:
        assert "boundaries" in status
    assert (kvstrata.Need.PREFILL_DONE in needs.flags) == \
        (p.run(text, done=False) != "ok" or "tokenselect" in plan)
    if kvstrata.Need.PROMPT_QUERIES in needs.flags:
        assert "last" in p.run(text.replace("tau = 1024", "tau = 8"), boundary=True, attend=False)
    with p.open(plan) as sequence:
        assert sequence.needs == needs


def test_needs_of_a_plan_that_is_none(session: kvstrata.Session):
    with pytest.raises(kvstrata.InvalidArgument, match="did you mean 'quest'") as error:
        session.plan_needs("qest")
    assert error.value.reason == "PLAN_UNKNOWN"
