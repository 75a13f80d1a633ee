# SPDX-License-Identifier: Apache-2.0
"""Tokens chosen by keys in few bits, per KV head (docs/spec/bits.md)."""
import math

import numpy as np

from . import core
from .core import Selection

LARGEST = np.float32(65504)
AIM = 0.85                  # part of max_missed (rule 5)
BYTE_OF = (0, 2, 1, 3)      # where the codes of channels 4 i + c are in word i


# --- quantised keys (rule 2) ---------------------------------------------------------------------------------

def fp16_towards(x, end):
    """The nearest fp16 of x, or else the next one, on the side of x where `end` is; a zero is +0."""
    near = x.astype(np.float16)
    beyond = near.astype(np.float32) > x if end < 0 else near.astype(np.float32) < x
    with np.errstate(over="ignore"):        # what is not taken may overflow
        return np.where(beyond, np.nextafter(near, np.float16(end)), near) + np.float16(0)


def quantise(keys, bits):
    """(minimum, step) fp16 and codes uint8 of a group's keys [group, ...]: per channel, over the first axis."""
    x = np.clip(np.nan_to_num(np.asarray(keys, np.float32), nan=0.0), -LARGEST, LARGEST)
    minimum = fp16_towards(x.min(axis=0), -np.inf)
    low = minimum.astype(np.float32)
    step = fp16_towards((x.max(axis=0) - low) / np.float32(2 ** bits - 1), np.inf)
    size = step.astype(np.float32)
    inverse = np.where(size > 0, np.float32(1) / np.where(size > 0, size, np.float32(1)), np.float32(0))
    return minimum, step, np.rint((x - low) * inverse).astype(np.uint8)


def dequantise(minimum, step, codes):
    """Quantised keys, float64."""
    return minimum.astype(np.float64) + step.astype(np.float64) * codes


# --- a sealed group's bytes ------------------------------------------------------------------------------------

def planes(bits):
    """(first bit, bits) of each plane."""
    return {2: [(0, 2)], 3: [(0, 2), (2, 1)], 4: [(0, 4)]}[bits]


def places(dim, width):
    """Word and first bit [dim] of each channel in a plane of `width` bits a code."""
    channel = np.arange(dim)
    run = dim * width // 8
    return channel % run // 4, 8 * np.take(BYTE_OF, channel % 4) + width * (channel // run)


def group_bytes(minimum, step, codes, bits):
    """The bytes of a sealed group of one KV head: minimum, step [dim], codes [group, dim]."""
    parts = [minimum.astype("<f2").tobytes(), step.astype("<f2").tobytes()]
    for first, width in planes(bits):
        word, bit = places(codes.shape[1], width)
        plane = np.zeros((codes.shape[1] * width // 32, len(codes)), np.uint32)
        value = (codes.astype(np.uint32) >> first) & (2 ** width - 1)
        for channel in range(codes.shape[1]):
            plane[word[channel]] |= value[:, channel] << np.uint32(bit[channel])
        parts.append(plane.astype("<u4").tobytes())
    return np.frombuffer(b"".join(parts), np.uint8)


def parse_group(data, dim, bits, group):
    """(minimum, step, codes) of group_bytes."""
    minimum, step = np.frombuffer(data, "<f2", dim), np.frombuffer(data, "<f2", dim, 2 * dim)
    codes, at = np.zeros((group, dim), np.uint8), 4 * dim
    for first, width in planes(bits):
        word, bit = places(dim, width)
        plane = np.frombuffer(data, "<u4", dim * width // 32 * group, at).reshape(-1, group)
        at += plane.nbytes
        for channel in range(dim):
            value = plane[word[channel]] >> np.uint32(bit[channel]) & np.uint32(2 ** width - 1)
            codes[:, channel] |= (value << first).astype(np.uint8)
    return minimum, step, codes


# --- the selector ----------------------------------------------------------------------------------------------

def approximate(keys, bits, group, sealed):
    """keys [N, Hkv, d] as scores see them: the first `sealed` groups quantised, the others as they are."""
    seen = np.array(keys, np.float64)
    for first in range(0, sealed * group, group):
        seen[first:first + group] = dequantise(*quantise(keys[first:first + group], bits))
    return seen


def noise(q, keys, bits, group, sealed):
    """Variance [Hq] of the logits of quantised keys around the true ones, by every eighth sealed group (rule 3)."""
    if sealed == 0:
        return np.zeros(len(q))
    steps = np.array([quantise(keys[g * group:(g + 1) * group], bits)[1] for g in range(min(7, sealed - 1), sealed, 8)])
    squares = np.repeat((steps.astype(np.float64) ** 2).mean(axis=0), len(q) // keys.shape[1], axis=0)
    return (np.asarray(q, np.float64) ** 2 * squares).sum(axis=1) / 12 / q.shape[1]


def take(votes, missed):
    """How many of the largest votes to take so that those that are left sum to at most `missed` (rule 4)."""
    counts = np.bincount(np.asarray(votes, np.float32).view(np.uint32) >> 19)
    used = np.flatnonzero(counts)
    middles = (used.astype(np.uint32) << 19 | 1 << 18).view(np.float32).astype(np.float64)
    taken, room = len(votes), missed
    for count, middle in zip(counts[used], middles):
        if room // middle < count:
            return taken - int(room // middle)
        taken, room = taken - int(count), room - count * middle
    return taken


class Bits:
    """Selector of one layer; one token list a KV head. With max_missed `budget` is a limit alone; None: there is none.

    run: so many tokens are chosen together (rule 7).
    """

    def __init__(self, bits=2, group=64, budget=2048, n_sink=4, n_recent=64, min_tokens=4096, max_missed=0, run=1):
        self.bits, self.group, self.budget, self.max_missed, self.run = bits, group, budget, max_missed, run
        self.n_sink, self.n_recent, self.min_tokens = n_sink, n_recent, min_tokens
        self.logits = None              # the last selection's [Hq, candidates]
        self.scores = None              # the last selection's [Hkv, candidates], or runs of them

    def select(self, q, keys):
        """Selection of a decode step; q [Hq, d], keys [N, Hkv, d], the current token last."""
        n, (heads, d), kv_heads = len(keys), q.shape, keys.shape[1]
        budget = 0 if self.max_missed else self.budget // self.run * self.run
        start, stop = -(-self.n_sink // self.run) * self.run, (n - self.n_recent) // self.run * self.run
        if core.attends_in_full(n, start + n - stop, budget, self.min_tokens):
            return Selection.full(n)
        sealed = (n - 1) // self.group
        logits_of = lambda rows: np.einsum("hd,nhd->hn", np.asarray(q, np.float64), np.repeat(
            rows, heads // kv_heads, axis=1)) / math.sqrt(d)
        self.logits = logits_of(approximate(keys, self.bits, self.group, sealed)[start:stop])
        shares = core.softmax(self.logits)
        if self.max_missed:
            always = logits_of(np.concatenate([keys[:start], keys[stop:]]).astype(np.float64))
            shares = self.shares(always, noise(q, keys, self.bits, self.group, sealed))
        self.scores = shares.reshape(kv_heads, heads // kv_heads, -1, self.run).sum(axis=(1, 3))
        chosen = [self.choose(s, heads // kv_heads) for s in self.scores]
        tokens = tuple(start + core.unit_tokens(runs, self.run, stop - start) for runs in chosen)
        return Selection(n, ((0, start), (stop, n)), tokens, (core.EMPTY,) * kv_heads)

    def shares(self, always, variance):
        """Each candidate's share of all attention [Hq, candidates]; `always`: logits of what is always attended."""
        top = np.maximum(self.logits.max(axis=1), always.max(axis=1))[:, None]
        own = np.exp(self.logits - top)
        return own / (own.sum(axis=1) * np.exp(-variance / 2) + np.exp(always - top).sum(axis=1))[:, None]

    def choose(self, scores, heads):
        """The candidates, or runs of them, that one KV head of so many query heads takes."""
        if not self.max_missed:
            return core.top_k(scores, self.budget // self.run)
        most = len(scores) if self.budget is None else self.budget // self.run
        return core.top_k(scores, min(most, take(scores, AIM * self.max_missed * heads)))
