# SPDX-License-Identifier: Apache-2.0
"""research/emulated.py against the references of the specs: outputs, choices and bytes, while groups fill."""
import math
import pathlib
import tempfile
import unittest
import unittest.mock

import emulated
import numpy as np
import torch
from emulated import (RAW, Engine, Form, Layer, Read, Rows, Rule, Side, Steps, fp8, keys_of, lloyd_max, turboquant_keys_of,
                      turboquant_values_of, values_of)
from reference import baselines, bits, core, planes
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HEADS, GROUP, D, PROMPT, STEPS = 2, 3, 64, 550, 100
SEED = 20261129
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def rows_and_queries():
    """bf16 keys and values [N, H, d] with a channel that is larger than others, and queries [steps, Hq, d]."""
    rng = np.random.default_rng(SEED)
    keys = core.bf16(rng.normal(size=(PROMPT + STEPS, HEADS, D)) * np.where(np.arange(D) == 7, 6, 1) + 0.5)
    values = core.bf16(rng.normal(size=(PROMPT + STEPS, HEADS, D)))
    return keys, values, rng.normal(size=(STEPS, HEADS * GROUP, D)).astype(np.float32) * 2


class Emulated(unittest.TestCase):
    """Every rule's steps over the same rows; each reference: a function of (q, keys, values) of a step."""

    def check(self, text, reference, bytes_of):
        for device in DEVICES:
            with self.subTest(device):
                self.check_on(device, text, reference, bytes_of)

    def check_on(self, device, text, reference, bytes_of):
        keys, values, queries = rows_and_queries()
        by_head = lambda x: torch.from_numpy(x.transpose(1, 0, 2).copy()).to(device)
        rule, steps = Rule(text), Steps(PROMPT, STEPS, torch.device(device))
        layer = Layer(by_head(keys[:PROMPT]), by_head(values[:PROMPT]), [rule], steps, D ** -0.5)
        of_heads = torch.from_numpy(queries).unflatten(1, (HEADS, GROUP)).transpose(0, 1).to(device)
        out, read = (x.cpu() if torch.is_tensor(x) else Read(*(of.cpu() for of in x)) for x in layer.attend(
            rule, of_heads, by_head(keys[PROMPT:]), by_head(values[PROMPT:])))
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
        self.check_planes("strata{share = 0.2}", share=0.2)
        self.check_planes("strata{share = 0.25, run = 8, unit = 128}", share=0.25, run=8, unit=128)

    def test_planes_by_threshold(self):
        self.check_planes("strata{fine_above = 2, sample = 2}", fine_above=2, sample=2)
        self.check_planes("strata{fine_above = 4, keep = 4, skip_below = 0.5}", fine_above=4, keep=4, skip_below=0.5)

    def test_variance_is_that_of_rounding(self):
        keys, values, queries = (torch.from_numpy(x) for x in rows_and_queries())
        keys, q = keys.transpose(0, 1).contiguous(), queries.unflatten(1, (HEADS, GROUP)).transpose(0, 1)
        steps, form = Steps(PROMPT, STEPS, torch.device("cpu")), Form("planes", 64, 64)
        rows = Rows(Side(keys[:, :PROMPT], [form], Form.keys), keys[:, PROMPT:], steps)
        error = (rows.dots(form, q) - rows.dots(RAW, q))[..., :512].var((0, 2, 3))  # sealed groups alone
        said = (q ** 2 @ rows.squared_steps(64)[:, None, :8].transpose(2, 3) * (64 ** 2 - 1) / 12).mean((0, 2, 3))
        self.assertTrue(0.8 < float((error / said).mean()) < 1.25, (SEED, error / said))

    def test_variance_makes_fine_what_it_hides(self):
        fine = {}
        for text in ("strata{sample = 1, sinks_in = 1, variance = 0}", "strata{sample = 1, sinks_in = 1}",
                     "strata{sample = 1, variance = 0}", "strata{sample = 1, candidates = 1, variance = 0}"):
            keys, values, queries = (torch.from_numpy(x) for x in rows_and_queries())
            by_head, rule, steps = lambda x: x.transpose(0, 1), Rule(text), Steps(PROMPT, STEPS, torch.device("cpu"))
            layer = Layer(by_head(keys[:PROMPT]), by_head(values[:PROMPT]), [rule], steps, D ** -0.5)
            _, read = layer.attend(rule, queries.unflatten(1, (HEADS, GROUP)).transpose(0, 1), by_head(keys[PROMPT:]),
                                   by_head(values[PROMPT:]))
            fine[text] = read.fine
        plain, *others = fine.values()
        for text, more in zip(list(fine)[1:], others):
            self.assertFalse((plain & ~more).any(), text)
            self.assertGreater(int(more.sum()), int(plain.sum()), text)

    def test_bits(self):
        def step(q, keys, values):
            found = bits.Bits(budget=60, min_tokens=0).select(q, keys)
            return core.attend(q, keys, values, found), [found.positions(h * GROUP, len(q)) for h in range(HEADS)]
        self.check("bits{budget = 60, min_tokens = 0}", step,
                   lambda n, fine: sum(map(len, fine)) * 4 * D + HEADS * ((n - 1) // 64) * (64 * D // 4 + 4 * D))

    def test_quest(self):
        def step(q, keys, values):
            selector = baselines.Quest(budget=64, min_tokens=0)
            selector.append(keys)
            found = selector.select(q)
            return core.attend(q, keys, values, found), [found.positions(h * GROUP, len(q)) for h in range(HEADS)]
        self.check("quest{budget = 64, min_tokens = 0}", step,
                   lambda n, fine: sum(map(len, fine)) * 4 * D + HEADS * ((n - 1) // 16) * 4 * D)

    def check_all(self, text, rounded, bytes_of_token):
        """A rule that reads all of `rounded`(keys or values [n, H, d], those of the prompt's) rows."""
        def step(q, keys, values):
            read = [rounded(torch.from_numpy(x), torch.from_numpy(x[:PROMPT])).numpy() for x in (keys, values)]
            return core.attend(q, *read, core.Selection.full(len(keys))), [np.arange(len(keys))] * HEADS
        self.check(text, step, lambda n, _: HEADS * n * bytes_of_token)

    def test_fp8_reads_all(self):
        self.check_all("fp8{}", lambda x, prompt: fp8(x, 1.0), 2 * D)
        self.check_all("fp8{by_tensor = 1}", lambda x, prompt: fp8(x, prompt.abs().amax() / 448), 2 * D)
        self.check_all("fp8{by_channel = 1}", lambda x, prompt: fp8(x, prompt.abs().amax(0) / 448), 2 * D)

    def test_turboquant_reads_all(self):
        for bits, of_keys, row in ((8, lambda x: fp8(x, 1.0), 1.5 * D + 4), (4, turboquant_keys_of, D + 6)):
            def step(q, keys, values):
                read = of_keys(torch.from_numpy(keys)).numpy(), turboquant_values_of(torch.from_numpy(values)).numpy()
                return core.attend(q, *read, core.Selection.full(len(keys))), [np.arange(len(keys))] * HEADS
            self.check(f"turboquant{{keys = {bits}}}", step, lambda n, _: HEADS * n * row)

    def test_turboquant_is_off_by_what_four_bits_are(self):
        x = torch.from_numpy(np.random.default_rng(SEED).normal(size=(2, 500, 256)).astype(np.float32)) * 3
        error = lambda read: float(((read - x) ** 2).mean() / (x ** 2).mean())
        self.assertAlmostEqual(lloyd_max(16)[-1], 2.733, delta=1e-3)  # Max, 1960
        self.assertAlmostEqual(error(turboquant_keys_of(x)), 0.009497, delta=3e-4)
        spread = x.amax(-1) - x.amin(-1)
        self.assertAlmostEqual(error(turboquant_values_of(x)), float(((spread / 15) ** 2 / 12).mean() / (x ** 2).mean()), delta=3e-4)
        norms = turboquant_keys_of(x).norm(dim=-1)
        np.testing.assert_allclose(norms.numpy(), x.norm(dim=-1).numpy(), rtol=1e-3)

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
        for text in ("chess{}", "strata{budget = 3}"):
            with self.assertRaisesRegex(SystemExit, "leave out --emulate"):
                Rule(text)
        self.assertEqual(Rule("strata{tail = 1}").coarse_values, Form("planes", 64, 128))


SHAPE = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "max_position_embeddings": 1024}
MODELS = {"llama": lambda: LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **SHAPE)),
          "gemma": lambda: Gemma3ForCausalLM(Gemma3TextConfig(
              num_hidden_layers=3, sliding_window=32, query_pre_attn_scalar=16,
              layer_types=["sliding_attention", "full_attention", "sliding_attention"], **SHAPE))}


class Models(unittest.TestCase):
    """An Engine of a small model with random weights, in a folder that has a tokenizer."""

    def engines(self, name):
        torch.manual_seed(SEED)
        model = MODELS[name]()
        for parameter in model.parameters():
            parameter.data *= 3  # so that queries prefer some tokens
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            words = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
            PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
            for device in DEVICES:
                yield device, model.eval(), Engine(pathlib.Path(folder), device)

    def test_full_is_the_plain_model(self):
        ids, reference = torch.randint(50, (700,)).tolist(), torch.randint(50, (90,)).tolist()
        for name in MODELS:
            for device, plain, engine in self.engines(name):
                with self.subTest(f"{name} {device}"), torch.no_grad(), unittest.mock.patch.multiple(
                        emulated, PREFILL=256, _as_bf16=lambda x: x):
                    full, again, planed = engine.answers(ids, reference, ["full", "full", "strata{}"], 0)
                    log_p = plain(torch.tensor([ids + reference])).logits[0, len(ids) - 1:-1].log_softmax(-1)
                    want = -log_p.gather(1, torch.tensor(reference)[:, None])[:, 0]
                    np.testing.assert_allclose(full.nats, want, atol=2e-4, err_msg=SEED)
                    self.assertLess(max(again.kl), 1e-6, SEED)
                    self.assertTrue(1e-6 < max(planed.kl) < 0.5, (SEED, max(planed.kl)))
                    layers = len([kind for kind in getattr(plain.config, "layer_types", None) or [""] * 2 if "sliding" not in kind])
                    self.assertAlmostEqual(full.attend_bytes, layers * 2 * 4 * 16 * (700 + 1.5), msg=SEED)
                    self.assertAlmostEqual(full.rows, 700 + 1.5, 3)
