# SPDX-License-Identifier: Apache-2.0
"""Keys and values in nested bits: everything is attended, what matters finely (docs/spec/planes.md)."""
import copy
import math
from typing import NamedTuple

import numpy as np

from . import bits, core

STRIP = 16
CELLS = (64, 16, 1)         # codes of a cell, read to plane 0, 1, 2


# --- a group's numbers (rules 2 to 5 of storage) -----------------------------------------------------------------

def rotate(rows):
    """rows [..., d] times the orthonormal Hadamard matrix, in fp32; a NaN counts as 0. Its own inverse."""
    x = np.clip(np.nan_to_num(np.asarray(rows, np.float32), nan=0.0), -bits.LARGEST, bits.LARGEST)
    stride = 1
    while stride < x.shape[-1]:
        a, b = np.moveaxis(x.reshape(*x.shape[:-1], -1, 2, stride), -2, 0)
        x = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
        stride *= 2
    return x * np.float32(1 / math.sqrt(x.shape[-1]))


def hadamard(d):
    """The same matrix, float64."""
    h = np.ones((1, 1))
    while len(h) < d:
        h = np.block([[h, h], [h, -h]])
    return h / math.sqrt(d)


class Codes(NamedTuple):
    """Minimum and step fp16, and codes uint8 [U, d]: by channel [d] for keys, by token [U, 1] for rotated values."""
    minimum: np.ndarray
    step: np.ndarray
    codes: np.ndarray

    def middles(self, plane):
        """Codes as they count, read to a plane."""
        cell = CELLS[plane]
        return (self.codes // cell * cell).astype(np.float32) + np.float32((cell - 1) / 2)

    def read(self, plane):
        """Numbers [U, d], float64."""
        return self.minimum.astype(np.float64) + self.step.astype(np.float64) * self.middles(plane)


class Group(NamedTuple):
    """A sealed group of one KV head; values are rotated."""
    keys: Codes
    values: Codes


def seal(keys, values):
    """Group of keys and values [U, d]."""
    minimum, step, codes = bits.quantise(rotate(values).T, 8)
    return Group(Codes(*bits.quantise(keys, 8)), Codes(minimum[:, None], step[:, None], codes.T))


def fine_plane(keep):
    """The last plane that is stored."""
    return {8: 2, 4: 1}[keep]


def widen(group, keep):
    """Rows (keys, values) [U, d] of a group, fp32."""
    widened = lambda x: x.minimum.astype(np.float32) + x.step.astype(np.float32) * x.middles(fine_plane(keep))
    return widened(group.keys), rotate(widened(group.values))


# --- and its bytes -------------------------------------------------------------------------------------------------

def words(digits, width):
    """Words [d width / 32, n] of digits [n, d] of so many bits each."""
    word, bit = bits.places(digits.shape[1], width)
    plane = np.zeros((digits.shape[1] * width // 32, len(digits)), np.uint32)
    for channel in range(digits.shape[1]):
        plane[word[channel]] |= digits[:, channel].astype(np.uint32) << np.uint32(bit[channel])
    return plane


def digits_of(plane, dim, width):
    """Digits [n, d] of words."""
    word, bit = bits.places(dim, width)
    return (plane[word].T >> bit.astype(np.uint32) & np.uint32(2 ** width - 1)).astype(np.uint8)


def strip_words(digits):
    """Words [U / 16, d] of the 2-bit digits [U, d]: 16 tokens of a channel each, placed as channels are in `words`."""
    return np.concatenate([words(strip.T, 2) for strip in digits.reshape(-1, STRIP, digits.shape[1])])


def little(x):
    return np.ascontiguousarray(x, x.dtype.newbyteorder("<")).tobytes()


def group_bytes(group, keep):
    """The upper and the lower bytes of a group, uint8."""
    keys, values = group
    upper = b"".join(map(little, (keys.minimum, keys.step, words(keys.codes >> 6, 2), values.minimum, values.step,
                                  strip_words(values.codes >> 6))))
    rows = []
    for codes in (keys.codes, values.codes):
        rows.append(words(codes >> 4 & 3, 2))
        if keep == 8:
            rows.append(words(codes & 15, 4))
    return np.frombuffer(upper, np.uint8), np.frombuffer(little(np.concatenate(rows).T), np.uint8)


def parse_group(upper, lower, dim, unit, keep):
    """Group of group_bytes; what keep = 4 does not store is 0."""
    at, plane = [0], unit * dim // 16

    def take(kind, count, size):
        at[0] += count * size
        return np.frombuffer(upper, kind, count, at[0] - count * size)
    k_minimum, k_step, k_words = take("<f2", dim, 2), take("<f2", dim, 2), take("<u4", plane, 4)
    v_minimum, v_step, v_words = take("<f2", unit, 2), take("<f2", unit, 2), take("<u4", plane, 4)
    k_codes = digits_of(k_words.reshape(-1, unit), dim, 2) << 6
    strips = [digits_of(strip[None], STRIP, 2).T for strip in v_words.reshape(-1, dim)]
    v_codes = np.concatenate(strips) << 6
    rows = np.frombuffer(lower, "<u4").reshape(unit, -1).T
    own = len(rows) // 2                                            # words of a key, or a value, in a row
    for codes, row in ((k_codes, rows[:own]), (v_codes, rows[own:])):
        codes |= digits_of(row[:dim // 16], dim, 2) << 4
        if keep == 8:
            codes |= digits_of(row[dim // 16:], dim, 4)
    return Group(Codes(k_minimum, k_step, k_codes), Codes(v_minimum[:, None], v_step[:, None], v_codes))


# --- a step ----------------------------------------------------------------------------------------------------------

class Choice(NamedTuple):
    """What one KV head attends finely, and of what it reads values."""
    fine: np.ndarray        # F: ascending positions, raw rows included
    strips: np.ndarray      # strips that are not left out, ascending


class Head(NamedTuple):
    """One KV head as a step sees it: logits by query head and token, values by token.

    coarse [G, S], fine [G, S]; variance [G, S]: V_h of the token's group; coarse_values, fine_values [S, d], rotated;
    raw_logits [G, N - S], raw_values [N - S, d]
    """
    coarse: np.ndarray
    fine: np.ndarray
    variance: np.ndarray
    coarse_values: np.ndarray
    fine_values: np.ndarray
    raw_logits: np.ndarray
    raw_values: np.ndarray

    @property
    def scores(self):
        """[G, S] (rule 2)."""
        return self.coarse + self.variance / 2


class Planes:
    """Attention of one layer over groups of planes and raw rows.

    share, fine_above: the two rules of the fine set; fine_above is None for the first.
    """

    def __init__(self, keep=8, unit=64, share=0.05, fine_above=None, skip_below=2, run=1, sample=None, n_sink=4,
                 n_recent=64, min_tokens=4096):
        self.keep, self.unit, self.share, self.fine_above = keep, unit, share, fine_above
        self.skip_below, self.run, self.n_sink, self.n_recent = skip_below, run, n_sink, n_recent
        self.sample = sample or (1 if fine_above is None else 16)
        self.min_tokens, self.has_lower = min_tokens, True

    def without_lower(self):
        """The same until lower runs are here (rule 8)."""
        coarse = copy.copy(self)
        coarse.n_sink, coarse.n_recent, coarse.run, coarse.has_lower = 0, 1, 1, False
        return coarse

    def sealed(self, n):
        """Tokens of sealed groups."""
        return (n - 1) // self.unit * self.unit

    def candidates(self, n):
        """First and end position of those that compete."""
        start = -(-self.n_sink // self.run) * self.run
        stop = min(self.sealed(n), (n - self.n_recent) // self.run * self.run)
        return start, max(start, stop)

    def head(self, q, keys, values, scale=None):
        """Head of the queries q [G, d] and one KV head's rows [N, d]."""
        n, d = keys.shape
        scale, q = 1 / math.sqrt(d) if scale is None else scale, np.asarray(q, np.float64)
        edge = self.sealed(n)
        groups = [seal(keys[i:i + self.unit], values[i:i + self.unit]) for i in range(0, edge, self.unit)]
        read = lambda of, plane: np.concatenate([of(g).read(plane) for g in groups] or [np.zeros((0, d))])
        last = fine_plane(self.keep)
        logits = lambda k: scale * (q @ np.asarray(k, np.float64).T)
        steps = np.array([g.keys.step for g in groups], np.float64).reshape(-1, d)
        variance = scale ** 2 * (CELLS[0] ** 2 - CELLS[last] ** 2) / 12 * (q ** 2 @ steps.T ** 2)
        return Head(logits(read(lambda g: g.keys, 0)), logits(read(lambda g: g.keys, last)),
                    variance.repeat(self.unit, axis=1),
                    read(lambda g: g.values, 0), read(lambda g: g.values, last),
                    logits(keys[edge:]), np.asarray(values[edge:], np.float64))

    def log_normaliser(self, head):
        """L_h [G] (rule 3)."""
        n, edge = head.coarse.shape[1] + head.raw_logits.shape[1], head.coarse.shape[1]
        start, stop = self.candidates(n)
        always = np.concatenate([head.fine[:, stop:], head.raw_logits], axis=1)  # no sinks
        if start >= stop:
            return log_sum(always)
        positions = np.arange(start, stop)
        sampled = positions[positions // self.unit % self.sample == (self.sample - 1) // 2]
        logits = head.coarse[:, sampled if len(sampled) else positions]
        largest = logits.max(axis=1, keepdims=True)
        ratio = (stop - start) / logits.shape[1]
        rest = np.maximum(np.exp(logits - largest).sum(axis=1, keepdims=True) - 1, 0)
        return log_sum(np.concatenate([always, largest + np.log(1 + rest * ratio)], axis=1))

    def choose(self, scores, log_normaliser, n):
        """Choice of one KV head, of scores [G, S]."""
        edge, (start, stop) = scores.shape[1], self.candidates(n)
        weights = np.exp(scores - log_normaliser[:, None])
        always = [np.arange(min(start, n)), np.arange(stop, n)]
        in_full = start >= stop or n < self.min_tokens
        if not self.has_lower:
            chosen = np.arange(0)
        elif in_full:
            chosen = np.arange(start, stop)
        elif self.fine_above is not None:
            chosen = start + np.flatnonzero((weights[:, start:stop] >= self.fine_above / n).any(axis=0))
        else:
            mass = core.softmax(scores[:, start:stop]).reshape(len(scores), -1, self.run).sum(axis=(0, 2))
            room = max(self.run, core.ceil_share(self.share, n) - (n - stop + start))
            chosen = start + core.unit_tokens(core.top_k(mass, room // self.run), self.run, stop - start)
        fine = np.unique(np.concatenate([*always, chosen])).astype(np.int64)
        in_fine = np.isin(np.arange(edge), fine).reshape(-1, STRIP).any(axis=1)
        low = (weights < (0 if in_full else self.skip_below / n)).all(axis=0).reshape(-1, STRIP).all(axis=1)
        return Choice(fine, np.flatnonzero(in_fine | ~low))

    def partials(self, head, choice):
        """Partials over sealed tokens, rotated back, and over raw rows."""
        edge, d = head.coarse.shape[1], head.raw_values.shape[1]
        is_fine = np.isin(np.arange(edge), choice.fine)
        read = core.unit_tokens(choice.strips, STRIP, edge)
        logits = np.where(is_fine, head.fine, head.coarse)[:, read]
        values = np.where(is_fine[:, None], head.fine_values, head.coarse_values)[read]
        packed = core.partial_of_logits(logits, values)
        return packed._replace(o=packed.o @ hadamard(d)), core.partial_of_logits(head.raw_logits, head.raw_values)

    def step(self, q, keys, values):
        """(output [Hq, d], Choice by KV head, L_h [Hq]) of a step; q [Hq, d], keys and values [N, Hkv, d]."""
        group, out, choices, normalisers = len(q) // keys.shape[1], [], [], []
        for h in range(keys.shape[1]):
            head = self.head(q[h * group:(h + 1) * group], keys[:, h], values[:, h])
            normalisers.append(self.log_normaliser(head))
            choices.append(self.choose(head.scores, normalisers[-1], len(keys)))
            out.append(core.output(core.merge(self.partials(head, choices[-1]))))
        return np.concatenate(out), choices, np.concatenate(normalisers)

    def bytes_read(self, choice, n, d, element):
        """Bytes that a step reads of one KV head; `element`: of an element of raw rows."""
        edge = self.sealed(n)
        fine_row = {8: 3 * d // 2, 4: d // 2}[self.keep]
        return (edge // self.unit * (4 * d + self.unit * d // 4) + len(choice.strips) * (64 + 4 * d) +
                int((choice.fine < edge).sum()) * fine_row + (n - edge) * 2 * d * element)


def log_sum(x):
    """ln of the sum of exp over the last axis."""
    largest = x.max(axis=-1)
    return largest + np.log(np.exp(x - largest[..., None]).sum(axis=-1))
