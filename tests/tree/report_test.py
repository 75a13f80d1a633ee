#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench/report.py on a small tree of its own: what is made, what is found out of date, what was not measured."""
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "bench"))

import kept_results  # noqa: E402
import report_plots  # noqa: E402
import report_tables  # noqa: E402

README = """a
<!-- bench:reuse -->
<!-- /bench -->
55 is <!-- bench=reuse|reuse/disk|ratio --><!-- / --> of <!-- bench=reuse|none|ratio --><!-- / -->
<!-- table:plans -->
<!-- /table -->
"""


class ReportTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        shutil.copytree(ROOT / "bench" / "results", self.root / "bench" / "results")
        for program in (ROOT / "bench").glob("*.py"):
            shutil.copy(program, self.root / "bench")
        (self.root / "docs" / "images").mkdir(parents=True)
        (self.root / "README.md").write_text(README)
        (self.root / "docs" / "results.md").write_text("<!-- bench:reuse -->\n<!-- /bench -->\n")

    def run_report(self, *arguments):
        return subprocess.run([sys.executable, "-B", self.root / "bench" / "report.py", *arguments],
                              capture_output=True, text=True)

    def report(self, *arguments):
        done = self.run_report(*arguments)
        self.assertEqual(done.stderr, "")
        return done.returncode, done.stdout

    def change(self, file, change):
        path = self.root / "bench" / "results" / file
        result = json.loads(path.read_text())
        change(result)
        path.write_text(json.dumps(result))

    def test_makes_what_is_asked_for(self):
        self.assertEqual(self.report()[0], 0)
        text = (self.root / "README.md").read_text()
        self.assertIn("ratio -->55<!-- / --> of <!-- bench=reuse|none|ratio -->not measured<!-- / -->", text)
        self.assertIn("| reuse/disk | 582 ms |", text)
        self.assertEqual(self.report("--check"), (0, "up to date\n"))

    def test_shows_goals_in_one_document_only(self):
        self.report()
        self.assertIn("met (>= 10)", (self.root / "docs" / "results.md").read_text())
        self.assertNotIn("must", (self.root / "README.md").read_text())

    def test_finds_a_stale_figure_and_a_stale_plot(self):
        self.report()
        self.change("reuse-cpu2.json", lambda r: r["rows"][0].update(ratio=66.0))
        self.assertEqual(self.report("--check"), (1, "out of date: README.md\nout of date: docs/results.md\n"))
        self.report()
        plot = self.root / "docs" / "images" / "speed.svg"
        plot.write_text(plot.read_text().replace("bits", "stratum", 1))
        self.assertEqual(self.report("--check"), (1, "out of date: docs/images/speed.svg\n"))

    def test_says_what_was_not_measured(self):
        self.change("cuda-pool-h100.json", lambda r: r["rows"].clear())
        self.report()
        quest = re.search(r"\| `quest` .*", (self.root / "README.md").read_text())[0]
        self.assertRegex(quest, r"\| not measured \| [\d.]+x, [\d.]+x \|")

    def test_a_mark_goes_when_a_suite_is_measured_anew(self):
        sekv = next(plan for plan in report_tables.PLANS if plan.name == "sekv")
        commit = kept_results.result_of("demo")["commit"][:10]
        with mock.patch.dict(kept_results.OLDER, {("demo", commit): ("sekv",)}):
            self.assertTrue(report_tables.error_cell(sekv).endswith("\\*"))
        with mock.patch.dict(kept_results.OLDER, {("demo", "0123456789"): ("sekv",)}):
            self.assertFalse(report_tables.error_cell(sekv).endswith("\\*"))

    def test_plots_are_drawings_without_outside_parts(self):
        for draw in report_plots.PLOTS.values():
            xml.etree.ElementTree.fromstring(draw())
            self.assertNotIn("href", draw())

    def test_two_devices_are_not_mixed_up(self):
        shutil.copy(self.root / "bench/results/reuse-cpu2.json", self.root / "bench/results/reuse-other.json")
        self.assertIn("suite reuse is kept of 2 devices", self.run_report().stderr)

    def test_figures(self):
        row = {"value": 5630.6, "baseline": {"value": 16451.0}}
        self.assertEqual(kept_results.number(kept_results.figure(row, "value:1024"), 2), "5.5")
        self.assertEqual(kept_results.number(kept_results.figure(row, "baseline:1024"), 2), "16")
        self.assertIsNone(kept_results.figure(row, "ratio"))


if __name__ == "__main__":
    unittest.main()
