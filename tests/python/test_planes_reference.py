# SPDX-License-Identifier: Apache-2.0
"""Properties of docs/spec/planes.md, of its executable reference."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import ROOT

from reference import bits, core, golden, planes, synth

DIMS, UNITS = (64, 128, 256), (16, 48, 64)
GOLDEN = ROOT / "tests" / "golden"
CASES = [c for c in json.loads((GOLDEN / "cases.json").read_text()) if "planes" in c.get("only", ())]
HALF_CELL = 1 + 2.0**-13  # what fp32 adds to half of a cell
formats = pytest.mark.parametrize("keep,unit,dim", [(k, u, d) for k in (8, 4) for u in UNITS for d in DIMS])


def counted(rows: np.ndarray) -> np.ndarray:
    """Rows as the rule counts them."""
    return np.clip(np.nan_to_num(rows.astype(np.float64), nan=0.0), -65504, 65504)


def rows_of(random: np.random.Generator, unit: int, dim: int) -> np.ndarray:
    """Rows of every magnitude that fp32 holds, with constant channels, subnormals, infinities and NaN."""
    size = np.exp2(random.integers(-40, 20, dim).astype(np.float64))
    offset = random.integers(0, 2, dim) * random.normal(size=dim) * size * np.exp2(random.integers(0, 15, dim))
    rows = offset + size * random.normal(size=(unit, dim))
    rows[:, 0], rows[:, 1] = 0.0, -3.5
    rows[:, 2] = random.integers(-4, 5, unit) * 2.0**-24
    rows[:, 3] = random.integers(-4, 5, unit) * 2.0**-149
    rows[:, 4] = random.choice([np.inf, -np.inf, 1.0], unit)
    rows[:, 5] = random.choice([np.nan, 1.0, 2.0], unit)
    rows[:, 6], rows[:, 7] = np.nan, 65504 - random.integers(0, 100, unit)
    return rows.astype(np.float32)


def sample(seed: int, **shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(q [Hq, d], keys, values [N, Hkv, d]) of one step."""
    print(f"seed {seed}")
    s = synth.sample(seed, **{"layers": 1, "steps": 1, "tail": 1, **shape})
    return s.queries[s.tail, 0], s.keys[0], s.values[0]


# ---- storage ----

@formats
def test_bytes_are_read_back(random: np.random.Generator, keep: int, unit: int, dim: int):
    group = planes.seal(rows_of(random, unit, dim), rows_of(random, unit, dim))
    upper, lower = planes.group_bytes(group, keep)
    assert len(upper) == 4 * dim + 4 * unit + unit * dim // 2
    assert len(lower) == unit * dim * (12 if keep == 8 else 4) // 8
    again = planes.parse_group(upper, lower, dim, unit, keep)
    stored = np.uint8(255 if keep == 8 else 0xF0)
    for mine, theirs in zip(again, group, strict=True):
        assert np.array_equal(mine.minimum, theirs.minimum) and np.array_equal(mine.step, theirs.step)
        assert np.array_equal(mine.codes, theirs.codes & stored)
        last = planes.fine_plane(keep)
        assert np.array_equal(mine.read(last), theirs.read(last))


@pytest.mark.parametrize("plane", range(3))
@pytest.mark.parametrize("dim", DIMS)
def test_a_number_is_within_half_a_cell(random: np.random.Generator, dim: int, plane: int):
    keys, values = rows_of(random, 64, dim), rows_of(random, 64, dim)
    group = planes.seal(keys, values)
    for codes, rows in ((group.keys, counted(keys)), (group.values, counted(planes.rotate(values)))):
        step = codes.step.astype(np.float64)
        assert (step >= 0).all() and (codes.minimum.astype(np.float64) <= rows).all()
        assert (np.abs(codes.read(plane) - rows) <= planes.CELLS[plane] / 2 * step * HALF_CELL).all()


def test_the_other_planes_are_a_correction(random: np.random.Generator):
    group = planes.seal(rows_of(random, 16, 64), rows_of(random, 16, 64))
    for x in group:
        step, middle, low = x.step.astype(np.float64), (x.codes >> 4 & 3) * 16.0, (x.codes & 15).astype(np.float64)
        assert np.allclose(x.read(2), x.read(0) + step * (middle + low - 31.5), rtol=0, atol=1e-9 * step.max())
        assert np.allclose(x.read(1), x.read(0) + step * (middle - 24), rtol=0, atol=1e-9 * step.max())


def test_by_hand():
    keys, values = np.zeros((16, 64), np.float32), np.zeros((16, 64), np.float32)
    keys[:, 21] = [255, 0b10_01_0110] + [0] * 14     # minimum 0, step 1
    values[5, 0] = 8.0                               # rotated: 1 in every channel, so no step
    upper, lower = planes.group_bytes(planes.seal(keys, values), 8)
    words, halves = upper.view("<u4"), upper.view("<f2")
    assert halves[64 + 21] == 1
    # Channel 21 = 1 * 16 + 4 * 1 + 1: word 1, run 1, third byte; after 256 bytes of scales.
    assert words[64 + 16] == 3 << 18 and words[64 + 17] == 2 << 18
    rows = lower.view("<u4").reshape(16, 24)
    assert rows[1, 1] == 1 << 18 and rows[0, 1] == 3 << 18
    # With four bits a code: channel 21 = 0 * 32 + 4 * 5 + 1: word 5 behind the four of plane 1.
    assert rows[1, 4 + 5] == 0b0110 << 16 and rows[0, 4 + 5] == 15 << 16
    minimum = upper[256 + 256:].view("<f2")[:16]
    assert minimum[5] == 1 and not np.delete(minimum, 5).any()
    # Token 9 = 4 * 2 + 1 of a strip, rotated channel 3.
    values[9, 0], values[9, 1] = 4.0, 4.0            # rotated: 1, 0, 1, 0, ..: codes 255, 0, ..
    upper, _ = planes.group_bytes(planes.seal(keys, values), 8)
    strip = upper[256 + 256 + 64:].view("<u4")
    assert strip[2] == 3 << (16 + 4) and strip[3] == 0


@pytest.mark.parametrize("dim", DIMS)
def test_rotation(random: np.random.Generator, dim: int):
    rows = random.normal(size=(50, dim)).astype(np.float32)
    size = np.linalg.norm(rows, axis=1)
    rotated = planes.rotate(rows)
    assert (np.linalg.norm(rotated - rows @ planes.hadamard(dim), axis=1) <= 2.0**-20 * size).all()
    assert (np.linalg.norm(planes.rotate(rotated) - rows, axis=1) <= 2.0**-19 * size).all()
    wild, as_counted = rows[0].copy(), rows[0].copy()
    wild[1:4], as_counted[1:4] = (np.inf, -np.inf, np.nan), (65504, -65504, 0)
    assert np.array_equal(planes.rotate(wild), planes.rotate(as_counted))


@formats
def test_widened_rows(random: np.random.Generator, keep: int, unit: int, dim: int):
    """Rounded once; sealed again they lose less than another cell."""
    keys, values = random.normal(size=(2, unit, dim)).astype(np.float32)
    group, cell = planes.seal(keys, values), planes.CELLS[planes.fine_plane(keep)]
    wide_keys, wide_values = planes.widen(group, keep)
    assert np.array_equal(wide_keys, group.keys.read(planes.fine_plane(keep)).astype(np.float32))
    assert wide_values.dtype == np.float32
    error = np.linalg.norm(wide_values - values, axis=1)
    assert (error <= np.sqrt(dim) * (cell / 2 * group.values.step[:, 0].astype(float) * HALF_CELL + 2.0**-18)).all()


def test_channels_that_pad_a_head_change_nothing(random: np.random.Generator):
    """Keys: code 0, step 0, whatever a query has there. Values: zeros stay near zeros."""
    q, keys, values = sample(int(random.integers(2**31)), prompt=200, kv_heads=1, group=2)
    keys[..., 40:], values[..., 40:] = 0, 0
    group = planes.seal(keys[:64, 0], values[:64, 0])
    assert not group.keys.codes[:, 40:].any() and not group.keys.step[40:].any()
    plan, other = planes.Planes(share=0.2, min_tokens=0), q.copy()
    other[:, 40:] += random.normal(size=(2, 24))
    (out, _, sums), (out_other, _, sums_other) = plan.step(q, keys, values), plan.step(other, keys, values)
    assert np.array_equal(out, out_other) and np.array_equal(sums, sums_other)
    steps = planes.seal(keys[:, 0][:192], values[:, 0][:192]).values.step
    assert np.abs(out[:, 40:]).max() <= 32 * float(steps.max()) * np.sqrt(64)


# ---- a step ----

@pytest.mark.parametrize("dim", DIMS)
def test_all_fine_is_attention_within_the_bound(random: np.random.Generator, dim: int):
    q, keys, values = sample(int(random.integers(2**31)), prompt=300, kv_heads=2, group=2, dim=dim)
    plan = planes.Planes(share=1, min_tokens=0)
    out, choices, _ = plan.step(q, keys, values)
    exact, edge = core.attend_full(q, keys, values), plan.sealed(len(keys))
    for h in range(len(q)):
        choice = choices[h // 2]
        assert len(choice.fine) == len(keys) and len(choice.strips) == edge // 16
        groups = [planes.seal(keys[i:i + 64, h // 2], values[i:i + 64, h // 2]) for i in range(0, edge, 64)]
        logit = max((np.abs(q[h]) * g.keys.step.astype(float)).sum() for g in groups) / np.sqrt(dim) / 2 * HALF_CELL
        size = np.linalg.norm(values[:, h // 2], axis=1)
        step = np.concatenate([g.values.step[:, 0] for g in groups]).astype(float)
        row = (np.sqrt(dim) * step / 2 * HALF_CELL + 2.0**-20 * size[:edge]).max()
        assert np.linalg.norm(out[h] - exact[h]) <= row + np.expm1(2 * logit) * size.max()
        seen = np.concatenate([g.values.read(2) @ planes.hadamard(dim) for g in groups] + [values[edge:, h // 2]])
        read = np.concatenate([g.keys.read(2) for g in groups] + [keys[edge:, h // 2]])
        assert core.relative_l2(out[h], core.output(core.partial(q[h], read, seen))) < 1e-12


def test_groups_are_sealed_before_the_step_and_never_again(random: np.random.Generator):
    q, keys, values = sample(int(random.integers(2**31)), prompt=200, kv_heads=1, group=2)
    plan = planes.Planes(unit=32, share=0.1, n_recent=1, min_tokens=0)
    assert [plan.sealed(n) for n in (1, 32, 33, 64, 65)] == [0, 0, 32, 32, 64]
    for n in (1, 32):  # nothing but raw rows
        out, choices, _ = plan.step(q, keys[:n], values[:n])
        assert core.relative_l2(out, core.attend_full(q, keys[:n], values[:n])).max() < 1e-12
        assert len(choices[0].strips) == 0 and len(choices[0].fine) == n
    for n in (33, 64, 65, 130):
        head = plan.head(q, keys[:n, 0], values[:n, 0])
        later = plan.head(q, keys[:, 0], values[:, 0])
        assert head.raw_logits.shape[1] == n - plan.sealed(n)
        assert np.array_equal(head.fine, later.fine[:, :plan.sealed(n)])
        assert set(range(plan.sealed(n), n)) <= set(plan.step(q, keys[:n], values[:n])[1][0].fine)


@pytest.mark.parametrize("run", (1, 4, 8, 16))
def test_share_counts_what_is_always_fine(random: np.random.Generator, run: int):
    q, keys, values = sample(int(random.integers(2**31)), prompt=500, kv_heads=2, group=3)
    plan = planes.Planes(unit=32, share=0.3, run=run, n_sink=5, n_recent=40, min_tokens=0)
    start, stop = plan.candidates(len(keys))
    assert start % run == 0 and stop % run == 0 and start >= 5 and stop <= len(keys) - 40
    for choice in plan.step(q, keys, values)[1]:
        assert 0 <= core.ceil_share(0.3, len(keys)) - len(choice.fine) < run
        chosen = choice.fine[(choice.fine >= start) & (choice.fine < stop)]
        assert np.array_equal(chosen, core.unit_tokens(np.unique(chosen // run), run, stop))
        assert set(range(start)) | set(range(stop, len(keys))) <= set(choice.fine)


def test_limits_of_weights(random: np.random.Generator):
    q, keys, values = sample(int(random.integers(2**31)), prompt=600, kv_heads=1, group=4, needles=((300, 8, 3.0),))
    n = len(keys)
    for sample_of in (1, 16):
        plan = planes.Planes(unit=16, fine_above=4, sample=sample_of, min_tokens=0)
        head = plan.head(q, keys[:, 0], values[:, 0])
        total = plan.log_normaliser(head)
        choice, (start, stop) = plan.choose(head.scores, total, n), plan.candidates(n)
        weights = np.exp(head.scores - total[:, None]).max(axis=0) * n
        fine = np.isin(np.arange(n), choice.fine)
        assert np.array_equal(fine[start:stop], weights[start:stop] >= 4)
        low = weights.reshape(-1, 16).max(axis=1) < 2
        wanted = fine[:len(weights)].reshape(-1, 16).any(axis=1) | ~low
        assert np.array_equal(choice.strips, np.flatnonzero(wanted))
        assert 0 < len(choice.strips) < len(low)
    every = planes.Planes(unit=16, skip_below=0, min_tokens=0).step(q, keys, values)[1][0]
    assert len(every.strips) == len(low)


@pytest.mark.parametrize("keep", (8, 4))
def test_the_variance_is_that_of_digits_that_are_not_read(random: np.random.Generator, keep: int):
    """A channel that has every code once: the variance is exact."""
    keys, values = np.full((257, 64), 3.0, np.float32), np.zeros((257, 64), np.float32)
    keys[:256, 5] = random.permutation(256) / 8
    head = planes.Planes(keep=keep, unit=256, min_tokens=0).head(random.normal(size=(2, 64)), keys, values)
    assert np.allclose((head.fine - head.coarse).var(axis=1), head.variance[:, 0], rtol=1e-9)
    assert np.allclose((head.fine - head.coarse).mean(axis=1), 0, atol=1e-12)
    assert np.allclose(head.variance, head.variance[:, :1], rtol=0, atol=0)


@pytest.mark.parametrize("rule", ({"fine_above": 8}, {"share": 0.2}))
def test_a_token_whose_coarse_logit_is_too_low_is_fine(random: np.random.Generator, rule: dict):
    """An outlier in the group makes steps so wide that the token's own digits are lost."""
    q, keys, values = random.normal(size=(2, 64)), *random.normal(size=(2, 641, 1, 64)).astype(np.float32)
    keys[:, 0, 9], q[:, 9] = random.uniform(-0.1, 0.1, 641), 24
    keys[330, 0], keys[331, 0, 9] = 0, -14
    keys[330, 0, 9] = 2  # counts as nearly 0, the middle of a cell of 4
    plan = planes.Planes(min_tokens=0, **rule)
    head = plan.head(q, keys[:, 0], values[:, 0])
    by = lambda scores: 330 in plan.choose(scores, plan.log_normaliser(head), 641).fine
    assert (head.fine - head.coarse)[0, 330] > 5
    assert by(head.scores) and not by(head.coarse)
    assert 330 in plan.step(q, keys, values)[1][0].fine


def test_the_normaliser(random: np.random.Generator):
    """Sinks do not count. Exact with every group; of one in 16 the largest sampled weight counts once, others for all."""
    q, keys, values = sample(int(random.integers(2**31)), prompt=1200, kv_heads=1, group=2)
    exact, sampled = (planes.Planes(unit=16, sample=s, min_tokens=0) for s in (1, 16))
    head = exact.head(q, keys[:, 0], values[:, 0])
    start, stop = exact.candidates(len(keys))
    logits = head.fine.copy()
    logits[:, start:stop] = head.coarse[:, start:stop]
    want = np.log(np.exp(logits[:, start:]).sum(axis=1) + np.exp(head.raw_logits).sum(axis=1))
    assert np.allclose(exact.log_normaliser(head), want, rtol=0, atol=1e-12)
    flat = head._replace(coarse=np.zeros_like(head.coarse), fine=np.zeros_like(head.fine),
                         raw_logits=np.zeros_like(head.raw_logits))
    count = sum(1 for t in range(start, stop) if t // 16 % 16 == 7)
    others = len(keys) - stop + (count - 1) * (stop - start) / count
    for position, largest in ((7 * 16 + 3, np.exp(9)), (6 * 16 + 3, 1)):
        spiked = flat.coarse.copy()
        spiked[:, position] = 9
        assert np.allclose(np.exp(sampled.log_normaliser(flat._replace(coarse=spiked))), others + largest, rtol=1e-12)


def test_a_query_that_is_not_finite_spoils_its_own_head(random: np.random.Generator):
    q, keys, values = sample(int(random.integers(2**31)), prompt=300, kv_heads=2, group=2)
    q[1, 3] = np.nan
    for plan in (planes.Planes(share=0.3, min_tokens=0), planes.Planes(fine_above=4, min_tokens=0)):
        out, choices, _ = plan.step(q, keys, values)
        assert np.isnan(out[1]).all() and np.isfinite(out[[0, 2, 3]]).all()
        assert len(choices[0].strips) == plan.sealed(len(keys)) // 16


def test_what_matters_is_read_finely(random: np.random.Generator):
    """With a needle that is fine the output is nearer to exact attention than all coarse."""
    q, keys, values = sample(int(random.integers(2**31)), prompt=1000, kv_heads=1, group=2, needles=((500, 4, 4.0),))
    exact = core.attend_full(q, keys, values)
    error = lambda **o: core.relative_l2(planes.Planes(min_tokens=0, **o).step(q, keys, values)[0], exact).max()
    coarse = error(fine_above=np.inf, skip_below=0)
    assert error(share=0.15) < coarse / 2
    assert error(share=1) < error(share=1, keep=4) < coarse


def test_bytes_of_a_step():
    """docs/spec/planes.md, "Bytes of a step": the figures of d = 128, of bf16's 512 bytes a token."""
    plan, n = planes.Planes(), 64 * 1000 + 1
    raw, edge = 2 * 128 * 2, n - 1
    fine = np.append(np.arange(edge // 20), edge)
    read = plan.bytes_read(planes.Choice(fine, np.arange(edge // 16)), n, 128, 2) - raw
    assert round(read / edge / 512, 4) == 0.1672
    read = plan.bytes_read(planes.Choice(fine, np.arange(edge // 32)), n, 128, 2) - raw
    assert round(read / edge / 512, 4) == 0.132
    assert bits.LARGEST == 65504


# ---- until lower runs are here ----

def test_without_lower_runs_nothing_reads_them(random: np.random.Generator):
    """Whatever lies there: outputs are finite. Attended is what is raw and, coarsely, every sealed token of some weight."""
    q, keys, values = sample(int(random.integers(2**31)), prompt=600, kv_heads=2, group=2)
    n = len(keys)
    for rule in ({"fine_above": 4}, {"share": 0.3, "run": 8}, {"share": 1}):
        plan = planes.Planes(unit=16, min_tokens=0, **rule).without_lower()
        edge = plan.sealed(n)
        assert plan.candidates(n) == (0, edge)
        for h, choice in enumerate(plan.step(q, keys, values)[1]):
            head = plan.head(q[2 * h:2 * h + 2], keys[:, h], values[:, h])
            damaged = head._replace(fine=np.full_like(head.fine, np.nan),
                                    fine_values=np.full_like(head.fine_values, np.nan))
            total = plan.log_normaliser(damaged)
            assert np.array_equal(choice.fine, np.arange(edge, n))
            weights = np.exp(head.scores - total[:, None]).max(axis=0) * n
            assert np.array_equal(choice.strips, np.flatnonzero(weights.reshape(-1, 16).max(axis=1) >= 2))
            assert 0 < len(choice.strips) < edge // 16
            whole = core.output(core.merge(plan.partials(head, choice)))
            assert np.isfinite(whole).all()
            assert np.array_equal(core.output(core.merge(plan.partials(damaged, choice))), whole)
            assert plan.bytes_read(choice, n, 64, 2) == (edge // 16 * (4 * 64 + 16 * 64 // 4) +
                                                         len(choice.strips) * (64 + 4 * 64) + (n - edge) * 2 * 64 * 2)


def test_without_lower_runs_in_full_no_strip_is_left_out(random: np.random.Generator):
    q, keys, values = sample(int(random.integers(2**31)), prompt=300, kv_heads=1, group=2)
    in_full = planes.Planes(min_tokens=len(keys) + 1).without_lower()
    out, choices, _ = in_full.step(q, keys, values)
    edge = in_full.sealed(len(keys))
    assert np.array_equal(choices[0].strips, np.arange(edge // 16))
    assert np.array_equal(choices[0].fine, np.arange(edge, len(keys)))
    coarse = planes.Planes(fine_above=np.inf, skip_below=0, n_sink=0, n_recent=1, min_tokens=0)
    assert np.array_equal(out, coarse.step(q, keys, values)[0])


# ---- tests/golden ----

@pytest.mark.parametrize("case", CASES, ids=lambda c: str(c["seed"]))
def test_the_vectors_are_the_references(case: dict):
    again = golden.vectors(case)
    with np.load(golden.path_of(case, str(GOLDEN))) as kept:
        assert set(kept.files) == set(again)
        for name, want in again.items():
            if want.dtype.kind != "f" or "widened" in name:
                assert np.array_equal(kept[name], want), name
            else:
                assert np.allclose(kept[name], want, rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize("case", CASES, ids=lambda c: str(c["seed"]))
def test_the_bytes_of_the_vectors_are_those_rows(case: dict):
    """Codes read back from the bytes are near the rows that they are of."""
    with np.load(golden.path_of(case, str(GOLDEN))) as kept:
        arrays = {name: kept[name] for name in kept.files}
    options = json.loads(arrays["params"].tobytes())["plans"]["planes"]
    unit, dim, keep = options["unit"], case["dim"], options["keep"]
    last = planes.fine_plane(keep)
    for name, of, prepare in (("keys", 0, counted), ("values", 1, planes.rotate)):
        rows = core.from_bf16_bits(arrays[f"{name}_bf16"])
        for layer, head, g in np.ndindex(arrays["planes.upper"].shape[:3]):
            upper, lower = (arrays[f"planes.{part}"][layer, head, g].tobytes() for part in ("upper", "lower"))
            codes = planes.parse_group(upper, lower, dim, unit, keep)[of]
            want = prepare(rows[layer, g * unit:(g + 1) * unit, head])
            limit = planes.CELLS[last] / 2 * codes.step.astype(float) * HALF_CELL
            assert (np.abs(codes.read(last) - want) <= limit).all()
