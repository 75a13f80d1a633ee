# SPDX-License-Identifier: Apache-2.0
"""research/emulated.py against the references of the specs: outputs, choices and bytes, while groups fill."""
import math
import unittest

import numpy as np
import torch
from emulated import Form, Layer, Rule, Steps, fp8, keys_of, values_of
from reference import baselines, bits, core, planes

HEADS, GROUP, D, PROMPT, STEPS = 2, 3, 64, 550, 100
SEED = 20261129


def rows_and_queries():
    """bf16 keys and values [N, H, d] with a channel that is larger than others, and queries [steps, Hq, d]."""
    rng = np.random.default_rng(SEED)
    keys = core.bf16(rng.normal(size=(PROMPT + STEPS, HEADS, D)) * np.where(np.arange(D) == 7, 6, 1) + 0.5)
    values = core.bf16(rng.normal(size=(PROMPT + STEPS, HEADS, D)))
    return keys, values, rng.normal(size=(STEPS, HEADS * GROUP, D)).astype(np.float32) * 2


class Emulated(unittest.TestCase):
    """Every rule's steps over the same rows; each reference: a function of (q, keys, values) of a step."""

    def check(self, text, reference, bytes_of):
        keys, values, queries = rows_and_queries()
        by_head = lambda x: torch.from_numpy(x.transpose(1, 0, 2).copy())
        rule, steps = Rule(text), Steps(PROMPT, STEPS, torch.device("cpu"))
        layer = Layer(by_head(keys[:PROMPT]), by_head(values[:PROMPT]), [rule], steps, D ** -0.5)
        of_heads = torch.from_numpy(queries).unflatten(1, (HEADS, GROUP)).transpose(0, 1)
        out, read = layer.attend(rule, of_heads, by_head(keys[PROMPT:]), by_head(values[PROMPT:]))
        for step, q in enumerate(queries):
            n = PROMPT + step + 1
            if step % 9 == 0 or n % 64 < 3:
                want, fine = reference(q, keys[:n], values[:n])
                for h in range(HEADS):
                    self.assertEqual(read.fine[h, step].nonzero()[:, 0].tolist(), fine[h].tolist(), (SEED, n, h))
                np.testing.assert_allclose(out[:, step].flatten(0, 1).numpy(), want, atol=2e-5, err_msg=f"{SEED} {n}")
                self.assertEqual(int(read.attend_bytes[step] + read.select_bytes[step]), bytes_of(n, fine), (SEED, n))

    def check_planes(self, text, **options):
        reference, choices = planes.Planes(min_tokens=0, **options), []

        def step(q, keys, values):
            out, choices[:], _ = reference.step(q, keys, values)
            return out, [choice.fine for choice in choices]
        self.check(text, step, lambda n, _: sum(reference.bytes_read(choice, n, D, 2) for choice in choices))

    def test_planes_by_share(self):
        self.check_planes("planes{share = 0.2}", share=0.2)
        self.check_planes("planes{share = 0.25, run = 8, unit = 128}", share=0.25, run=8, unit=128)

    def test_planes_by_threshold(self):
        self.check_planes("planes{fine_above = 2, sample = 2}", fine_above=2, sample=2)
        self.check_planes("planes{fine_above = 4, keep = 4, skip_below = 0.5}", fine_above=4, keep=4, skip_below=0.5)

    def test_strata(self):
        def step(q, keys, values):
            found = bits.Bits(budget=60, min_tokens=0).select(q, keys)
            return core.attend(q, keys, values, found), [found.positions(h * GROUP, len(q)) for h in range(HEADS)]
        self.check("strata{budget = 60, min_tokens = 0}", step,
                   lambda n, fine: sum(map(len, fine)) * 4 * D + HEADS * ((n - 1) // 64) * (64 * D // 4 + 4 * D))

    def test_quest(self):
        def step(q, keys, values):
            selector = baselines.Quest(budget=64, min_tokens=0)
            selector.append(keys)
            found = selector.select(q)
            return core.attend(q, keys, values, found), [found.positions(h * GROUP, len(q)) for h in range(HEADS)]
        self.check("quest{budget = 64, min_tokens = 0}", step,
                   lambda n, fine: sum(map(len, fine)) * 4 * D + HEADS * ((n - 1) // 16) * 4 * D)

    def test_fp8_reads_all(self):
        def step(q, keys, values):
            rounded = [fp8(torch.from_numpy(x), 1.0).numpy() for x in (keys, values)]
            return core.attend(q, *rounded, core.Selection.full(len(keys))), [np.arange(len(keys))] * HEADS
        self.check("fp8{}", step, lambda n, _: HEADS * n * 2 * D)

    def test_keys_and_values_by_cells(self):
        rng = np.random.default_rng(SEED)
        x = rng.normal(size=(2, 64, D)).astype(np.float32) * 3
        for h in range(2):
            group = planes.seal(x[h], x[h])
            for plane, cell in enumerate(planes.CELLS):
                got = keys_of(torch.from_numpy(x), 64, cell)[h].numpy()
                np.testing.assert_allclose(got, group.keys.read(plane), atol=1e-5, err_msg=SEED)
            halves = group.values.codes // 128 * 128.0 + 63.5
            want = (group.values.minimum + group.values.step * halves) @ planes.hadamard(D)
            np.testing.assert_allclose(values_of(torch.from_numpy(x), 128)[h].numpy(), want, atol=2e-3, err_msg=SEED)

    def test_fp8_has_four_bits_of_significance_and_saturates(self):
        got = fp8(torch.tensor([1.0, 1.06, 1.07, 500.0, -math.inf]), 1.0)
        self.assertEqual(got.tolist(), [1.0, 1.0, 1.125, 448.0, -448.0])

    def test_what_is_not_emulated_is_refused(self):
        for text in ("chess{}", "planes{budget = 3}"):
            with self.assertRaisesRegex(SystemExit, "leave out --emulate"):
                Rule(text)
        self.assertEqual(Rule("planes{tail = 1}").coarse_values, Form("planes", 64, 128))
