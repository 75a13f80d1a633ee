# SPDX-License-Identifier: Apache-2.0
"""research without a model: prompts from files, shares of a prompt, lines that are kept, and figures of them."""
import hashlib
import json
import lzma
import pathlib
import runpy
import subprocess
import sys
import tempfile
import tomllib
import unittest
import unittest.mock

import figures
import gemma
import named_plans
import narrow_gemma
import numpy as np
import plans
import tasks
import tokenizers

ROOT = pathlib.Path(__file__).resolve().parents[2]

SAMPLE = {"input": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>Be brief<|eot_id|><|start_header_id|>user"
                   "<|end_header_id|>What is 1?<|eot_id|><|start_header_id|>assistant<|end_header_id|> It is",
          "outputs": ["one", "uno"]}


def line(key, full, plan, model="m", read=10.0):
    """A line of a prompt with (nats, score) of full and of a plan."""
    of = lambda nats, score, attended: {"plan": "", "nats": nats, "kl": nats / 8, "score": score, "right": score == 1.0,
                                        "status": "ok", "rows": 50.0, "attend_bytes": attended, "select_bytes": 1.0}
    return {"id": key, "model": model, "prompt": 100, "answer": 2, "scored": True, "seconds": 1.0,
            "plans": {"full": of(*full, 100.0), "quest": of(*plan, read)}}


class Plans(unittest.TestCase):
    def test_shares_are_of_the_prompt(self):
        self.assertEqual(plans.for_prompt(plans.at(plans.BY_BUDGET["bits"], 10), 4000), "bits{budget = 332, min_tokens = 0}")
        self.assertEqual(plans.at(plans.BY_BUDGET["sekv"], 25), "sekv{rows_share = 0.25, local = 128, min_tokens = 0}")
        self.assertIn("k = 1,", plans.for_prompt(plans.at(plans.BY_BUDGET["tokenselect"], 5), 1000))

    def test_every_name_has_its_text(self):
        grid = plans.grid()
        self.assertEqual(len(set(grid.values())), len(grid))
        self.assertFalse([text for text in grid.values() if "P%" in text or "ROOT" in text or "P/" in text])


class NamedPlans(unittest.TestCase):
    def test_the_file_has_what_the_results_say(self):
        plans_of_file = tomllib.loads(named_plans.FILE.read_text())["plans"]
        by_loss = named_plans.by_loss(named_plans.result())
        self.assertGreaterEqual(plans_of_file.items(), {one.name: one.text for one in by_loss}.items())
        calibrated = [one for model in named_plans.MODELS for one in named_plans.kept(model.name, named_plans.FILE.read_text())]
        self.assertEqual(named_plans.FILE.read_text(), named_plans.toml_of(named_plans.result(), calibrated))

    def test_the_cheapest_that_holds_the_loss(self):
        of = lambda name, plan, value, read: {"id": f"accuracy/{name}/smollm2", "plan": plan, "value": value, "n": 9, "accuracy": {
            "interval": 0.01, "of_full_bytes": read, "tokens_a_step": 10, "tokens_of_prompt": 100}}
        rows = [of("bits_5%", "bits{budget = 5%-68, min_tokens = 0}", 0.03, 0.1),
                of("bits_10%", "bits{budget = 10%-68, min_tokens = 0}", 0.015, 0.2),
                of("bits_25%", "bits{budget = 25%-68, min_tokens = 0}", 0.01, 0.3), of("bits_preset", "bits", 0, 0.0)]
        found = {one.name: one.text for one in named_plans.by_loss({"rows": rows})}
        self.assertEqual(found, {"smollm2-135m-bits-0_01nats": "bits{budget = 1980}",
                                 "smollm2-135m-bits-0_02nats": "bits{budget = 751}",
                                 "smollm2-135m-bits-0_05nats": "bits{budget = 342}"})

    def test_what_was_measured_on_few_prompts_holds_no_loss(self):
        of = lambda name, value, prompts: {"id": f"accuracy/{name}/smollm2", "plan": "bits{budget = 9%-68}", "value": value,
                                           "n": prompts, "accuracy": {"interval": 0.01, "of_full_bytes": 0.1, "tokens_a_step": 9,
                                                                      "tokens_of_prompt": 100}}
        self.assertEqual(named_plans.by_loss({"rows": [of("full", 1, 100), of("bits_9%", 0, 74)]}), [])
        self.assertEqual(len(named_plans.by_loss({"rows": [of("full", 1, 100), of("bits_9%", 0, 75)]})), 3)

    def test_a_setting_that_was_chosen_by_answers_says_what_it_keeps(self):
        row = {"id": "accuracy/sekv_pairs_25%/smollm2-retrieval", "plan": "sekv{l_min = 2, min_tokens = 0}", "accuracy": {
            "relative_score": 0.9, "relative_low": 0.85, "relative_high": 0.94, "scored_prompts": 9, "tokens_a_step": 30,
            "tokens_of_prompt": 100, "of_full_bytes": 0.31}}
        one, = named_plans.by_answers([row])
        self.assertEqual((one.name, one.text), ("smollm2-135m-retrieval-sekv", "sekv{l_min = 2}"))
        self.assertEqual(one.why, ["keeps 0.900 (0.85 to 0.94) of the score of 9 prompts, with 30.0% of the tokens and 31.0% of "
                                   "the bytes"])
        self.assertEqual(named_plans.by_answers([]), [])
        fresh, = named_plans.by_answers([row, row | {"id": row["id"].replace("accuracy/", "judged/")}])
        self.assertIn("prompts that it was not chosen by", fresh.why[0])

    def test_of_a_calibration_what_is_the_models(self):
        toml = ("# Plans calibrated\n\n[plans]\n# min_tokens: of this machine\nquest_calibrated = 'quest{min_tokens = 512}'\n"
                "# thresholds: 99th\n# min_tokens: of this machine\n"
                "chess_calibrated = 'chess{thresholds = [2.5, 3.0], min_tokens = 512}'\n")
        wanted = named_plans.Named("m-chess", "chess{thresholds = [2.5, 3.0]}", ["thresholds: 99th"])
        self.assertEqual(named_plans.of_calibration("m", toml), [wanted])


class Prompts(unittest.TestCase):
    def test_a_chat_and_where_its_answer_begins(self):
        prompt = tasks.prompt_of("ruler/4096/niah_multivalue/0", SAMPLE)
        self.assertEqual((prompt.system, prompt.asked, prompt.begun), ("Be brief", [("user", "What is 1?")], "It is"))
        self.assertEqual(prompt.reference, " one, uno")
        self.assertEqual(prompt.score("Uno!"), 0.5)

    def test_a_question_has_one_answer_in_many_words(self):
        prompt = tasks.prompt_of("ruler/4096/qa_1/0", SAMPLE)
        self.assertEqual((prompt.reference, prompt.score("uno"), prompt.score("two")), (" one", 1.0, 0.0))

    def test_files_are_known_by_their_digest(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "ruler/4096/vt.jsonl.xz")
            path.parent.mkdir(parents=True)
            path.write_bytes(lzma.compress(json.dumps(SAMPLE).encode()))
            missing = []
            with self.assertRaisesRegex(SystemExit, "ruler/4096/vt is"):
                tasks.prompts(pathlib.Path(folder), {"ruler/4096/": 1}, missing.append)
            self.assertIn("ruler/4096/fwe", missing)
            known = {"ruler/4096/vt": hashlib.sha256(path.read_bytes()).hexdigest()}
            with unittest.mock.patch.dict(tasks.DIGESTS, known):
                found = tasks.prompts(pathlib.Path(folder), {"ruler/4096/": 5, "ruler/8192/": 0}, missing.append)
            self.assertEqual([prompt.key for prompt in found], ["ruler/4096/vt/0"])
            self.assertNotIn("ruler/8192/fwe", missing)
            path.write_bytes(lzma.compress("\n".join([json.dumps(SAMPLE)] * 5).encode()))
            known = {"ruler/4096/vt": hashlib.sha256(path.read_bytes()).hexdigest()}
            with unittest.mock.patch.dict(tasks.DIGESTS, known):
                found = tasks.prompts(pathlib.Path(folder), {"ruler/4096/": 2}, missing.append, first=3)
            self.assertEqual([prompt.key for prompt in found], ["ruler/4096/vt/3", "ruler/4096/vt/4"])


class OwnPrompts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def test_prompts_of_a_file(self):
        path = self.folder / "mine.jsonl"
        path.write_text("".join(json.dumps(SAMPLE) + "\n" for _ in range(3)))
        found = tasks.own_prompts(path, 2)
        self.assertEqual([prompt.key for prompt in found], ["own/mine/0", "own/mine/1"])
        path.write_text(json.dumps({"key": "generated/4096/vt/7", **SAMPLE}))
        self.assertEqual([prompt.key for prompt in tasks.own_prompts(path, 9)], ["generated/4096/vt/7"])
        self.assertTrue(found[0].is_scored)

    def test_windows_of_a_text_do_not_overlap(self):
        path = self.folder / "book.txt"
        text = " ".join(f"word{i}" for i in range(6000))
        path.write_text(text)
        first, second = tasks.own_prompts(path, 2)
        self.assertEqual((first.key, first.is_scored, first.asked), ("text/4096/book/0", False, []))
        self.assertTrue(text.startswith(first.begun + first.reference))
        self.assertNotIn(second.begun, first.begun + first.reference)
        ids, reference = tasks.ids_of(first, unittest.mock.Mock(
            side_effect=lambda text, **_: unittest.mock.Mock(input_ids=text.split())))
        self.assertEqual((ids + reference)[:2000], text.split()[:2000])
        self.assertGreater(len(reference), 100)

    def test_what_is_wrong_is_named(self):
        (self.folder / "short.txt").write_text("too short")
        for name, error in (("short.txt", "a text has"), ("prompts.csv", "wanted a name that ends in")):
            with self.assertRaisesRegex(SystemExit, f"{name}: {error}"):
                tasks.own_prompts(self.folder / name, 1)


class Gemma(unittest.TestCase):
    def test_a_narrowed_tokenizer_merges_as_the_whole_one(self):
        whole = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
        whole.train_from_iterator([pathlib.Path(__file__).read_text()], tokenizers.trainers.BpeTrainer(
            vocab_size=600, special_tokens=["<bos>", "<unk>"], show_progress=False))
        whole.post_processor = tokenizers.processors.TemplateProcessing("<bos> $A", "<bos> $A <bos> $B", [("<bos>", 0)])
        form, text = json.loads(whole.to_str()), "assertEqual of prompts in test_files"
        kept = narrow_gemma.parts_of(form, np.array(sorted({0, 1, *whole.encode(text).ids})))
        narrowed = tokenizers.Tokenizer.from_str(json.dumps(narrow_gemma.narrow_tokenizer(form, kept)))
        self.assertLess(len(kept), 300)
        self.assertEqual([int(kept[i]) for i in narrowed.encode(text).ids], whole.encode(text).ids)

    def test_weights_have_their_names_in_transformers(self):
        self.assertEqual(gemma.name_of("token_embd.weight"), "model.embed_tokens.weight")
        self.assertEqual(gemma.name_of("blk.17.attn_k_norm.weight"), "model.layers.17.self_attn.k_norm.weight")
        with self.assertRaises(KeyError):
            gemma.name_of("blk.0.attn_bias.weight")

    def test_three_layers_attend_to_everything(self):
        self.assertEqual([i for i, kind in enumerate(gemma.CONFIG["layer_types"]) if kind == "full_attention"], [5, 11, 17])

    def test_another_file_is_refused(self):
        with tempfile.NamedTemporaryFile() as file, self.assertRaisesRegex(ValueError, "wanted is a5fd3b62"):
            gemma.check(pathlib.Path(file.name))


class Figures(unittest.TestCase):
    def test_the_score_is_of_tasks_that_full_solves(self):
        lines = [line(f"ruler/4096/vt/{i}", (1.0, 1.0), (2.0, 0.5)) for i in range(4)]
        lines += [line(f"ruler/4096/fwe/{i}", (1.0, 0.0), (2.0, 1.0)) for i in range(4)]
        row = figures.row("quest", "quest", "all", lines)
        self.assertEqual(row["accuracy"]["scored_prompts"], 4)
        self.assertEqual(row["accuracy"]["relative_score"], 0.5)
        self.assertEqual(row["value"], 1.0)
        self.assertAlmostEqual(row["accuracy"]["of_full_bytes"], 0.11)

    def test_kl_is_of_lines_that_all_have_it(self):
        lines = [line(f"ruler/4096/vt/{i}", (1.0, 1.0), (1.0 + i, 0.5)) for i in range(3)]
        row = figures.row("quest", "quest", "all", lines)["accuracy"]
        self.assertEqual((row["kl"], row["kl_worst"]), (0.25, 0.375))
        self.assertEqual(row["kl_interval"], round(1.96 * 0.125 / 3 ** 0.5, 5))
        del lines[1]["plans"]["quest"]["kl"]
        self.assertNotIn("kl", figures.row("quest", "quest", "all", lines)["accuracy"])

    def test_prompts_that_were_seen_and_others_are_rows_apart(self):
        lines = [line(f"ruler/4096/vt/{i}", (1.0, 1.0), (1.0, 1.0)) for i in range(3)]
        counts = lambda *seen: {row["id"].split("/", 2)[2]: row["n"] for row in figures.rows(lines, {}, *seen)}
        self.assertEqual(counts({("m", "ruler/4096/vt/0"), ("n", "ruler/4096/vt/1")}), counts() | {"m seen": 1, "m new": 2})

    def test_full_is_decoded_beside_what_is_missing(self):
        prompt = tasks.Prompt("ruler/4096/vt/0", "", [], "", ["1"])
        known = {("m", prompt.key): line(prompt.key, (1.0, 1.0), (2.0, 0.5))}
        missing_of = runpy.run_path(str(ROOT / "research/__main__.py"), run_name="accuracy")["missing_of"]
        self.assertEqual(missing_of(known, "m", prompt, {"quest": "pages", "bits": "tokens"}),
                         {"full": "full", "bits": "tokens"})
        self.assertEqual(missing_of(known, "m", prompt, {"quest": "pages"}), {})

    def test_intervals_are_over_prompts(self):
        mean, error = figures.mean_and_error([1.0, 2.0, 3.0])
        self.assertEqual(mean, 2.0)
        self.assertAlmostEqual(error, 1.96 / 3 ** 0.5)

    def test_a_report_of_what_was_kept(self):
        with tempfile.TemporaryDirectory() as folder:
            kept, page, result = (pathlib.Path(folder, name) for name in ("kept.jsonl", "page.md", "result.json"))
            kept.write_text("".join(json.dumps(line(f"ruler/4096/vt/{i}", (1.0, 1.0), (1.5, 1.0))) + "\n" for i in range(3)))
            subprocess.run([sys.executable, str(ROOT / "research"), "--keep", str(kept), "--plan", "pages=quest",
                            "--report", str(page), "--json-out", str(result), "--device-name", "a test"], check=True)
            self.assertIn("| `pages` | 50.0% | 11.0% |", page.read_text())
            rows = {row["id"]: row for row in json.loads(result.read_text())["rows"]}
            self.assertEqual(rows["accuracy/pages/m 4096 variables"]["value"], 0.5)


class Mistakes(unittest.TestCase):
    """Said at once, before a model is loaded."""

    def said(self, *arguments):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([sys.executable, str(ROOT / "research"), "--keep", f"{folder}/kept", *arguments],
                                  capture_output=True, text=True)
        self.assertNotEqual(done.returncode, 0)
        self.assertNotIn("Traceback", done.stderr)
        return done.stderr

    def test_mistakes_are_named(self):
        for arguments, text in ((["--tasks", ".", "--shard", "0/2"], "--shard 0/2"), (["--tasks", ".", "--shard", "1"], "I/N"),
                                (["--tasks", ".", "--prompts", "ruler/4096/"], "wanted NAME=N"),
                                (["--tasks", "/nowhere"], "no prompt"), (["--tasks", ".", "--prompts", "rulr=1"], "known are"),
                                (["--tasks", ".", "--plan", "quest{budget = 10%}"], "wanted NAME=PLAN"),
                                (["--report", "x.md"], "no line"), ([], "nothing is asked for")):
            with self.subTest(arguments):
                self.assertIn(text, self.said(*arguments))


if __name__ == "__main__":
    unittest.main()
