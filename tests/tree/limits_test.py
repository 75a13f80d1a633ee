#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds the checks of this folder to trees in a temporary folder that break each rule once."""
import contextlib
import io
import pathlib
import tempfile
import unittest

import check_layers
import check_limits
import check_owners
import check_walks
import cpp_measures
import exceeded
import python_measures


def cpp_function(name, lines):
    return f"int {name}() {{\n" + "  Step();\n" * (lines - 2) + "}\n"


def python_function(name, lines):
    return f"def {name}():\n" + "    step()\n" * (lines - 1)


class Tree(unittest.TestCase):
    """A tree that keeps every rule; a test adds what breaks one."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.write("docs/a.md", "# Title\n\n## Two words\n\nSee [it](a.md#two-words), `base/b.cc`.\n")
        self.write("base/b.cc", "// See docs/a.md.\n" + cpp_function("AtTheLimit", 60))
        self.write("base/b.py", python_function("at_the_limit", 60))
        self.write("base/b.h", "\n" * 300)

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def list(self, text):
        self.write("tests/tree/exceeded.toml", text)

    def listed(self):
        return exceeded.read(self.root / "tests/tree/exceeded.toml")

    def run_check(self, check, *options):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = check.main(self.root, *options)
        return code, out.getvalue()

    def assert_passes(self, check=check_limits):
        code, out = self.run_check(check)
        self.assertEqual(code, 0, out)

    def assert_fails(self, *texts, check=check_limits):
        code, out = self.run_check(check)
        self.assertEqual(code, 1, out)
        for text in texts:
            self.assertIn(text, out)
        self.assertIn(f" {max(1, sum(t.startswith(KINDS) for t in texts))} failed", out)


KINDS = ("cycle ", "held ", "function ", "header ", "class ", "interface ", "folder ", "dangling ", "sentence ", "of ", "unparsed ")


class Limits(Tree):
    def test_a_tree_within_the_limits_passes(self):
        self.assert_passes()

    def test_an_empty_tree_fails(self):
        with tempfile.TemporaryDirectory() as folder:
            self.root = pathlib.Path(folder)
            self.assertEqual(self.run_check(check_limits)[0], 1)

    def test_a_cpp_function_too_long(self):
        self.write("base/c.cc", cpp_function("A::Long", 61))
        self.assert_fails("function base/c.cc: A::Long: 61, the limit is 60",
                          '"base/c.cc: A::Long" = 61')

    def test_a_cuda_kernel_too_long(self):
        self.write("base/c.cu", "__global__ void " + cpp_function("K", 61)[4:])
        self.assert_fails("function base/c.cu: K: 61")

    def test_the_second_of_two_overloads_too_long(self):
        self.write("base/c.cc", cpp_function("F", 3) + cpp_function("F", 61))
        self.assert_fails("function base/c.cc: F #2: 61")

    def test_a_python_function_too_long(self):
        self.write("base/c.py", "class A:\n" + "".join(
            "  " + line + "\n" for line in python_function("long", 61).splitlines()))
        self.assert_fails("function base/c.py: A.long: 61")

    def test_a_header_too_long(self):
        self.write("base/c.h", "\n" * 301)
        self.assert_fails("header base/c.h: 301, the limit is 300")

    def test_a_class_of_too_many_declarations(self):
        members = "".join(f"  void F({'int, ' * i}int);\n" for i in range(20))
        members += "".join(f"  int x{i}_ KVS_GUARDED_BY(mu_);\n" for i in range(20))
        self.write("base/c.h", f"class A {{\n{members}}};\n")
        self.assert_passes()
        self.write("base/c.h", f"class A {{\n{members}  friend class B;\n}};\n")
        self.assert_fails("class base/c.h: A: 41, the limit is 40")

    def test_an_interface_of_too_many_functions(self):
        functions = "".join(f"  virtual int F{i}() const = 0;\n" for i in range(6))
        begin = "class A {\n public:\n  virtual ~A() = default;\n"
        self.write("base/c.h", f"{begin}{functions}  int G();\n  int H() override;\n}};\n")
        self.assert_passes()
        self.write("base/c.h", f"{begin}{functions}  virtual void G() {{}}\n}};\n")
        self.assert_fails("interface base/c.h: A: 7, the limit is 6")

    def test_a_folder_of_too_many_files(self):
        for folder in ("server", "server/store/pages", "kernels/step", "client"):
            with self.subTest(folder):
                for i in range(25):
                    self.write(f"{folder}/f{i}.cc", "")
                self.assert_passes()
                self.write(f"{folder}/g.cmake", "")
                self.assert_fails(f"folder {folder}: 26, the limit is 25")
                self.list(f'[folder]\n"{folder}" = 26\n')
                self.assert_passes()
                (self.root / folder / "g.cmake").unlink()
                self.assert_fails(f"folder {folder}: is 25, within the limit of 25; remove")
                self.list("")

    def test_the_cli_and_tests_may_have_more_files(self):
        for i in range(26):
            self.write(f"client/cli/f{i}.cc", "")
            self.write(f"tests/server/f{i}.cc", "")
        self.assert_passes()

    def test_what_cannot_be_parsed(self):
        self.write("base/c.cc", "class A {\n" + "  int F(;\n" * 20)
        self.assert_fails("unparsed base/c.cc:")

    def test_built_and_generated_files_are_left_out(self):
        for path in ("build/c.h", "build-x/c.h", "dist/c.h", "base/c.pb.h"):
            self.write(path, "\n" * 301)
        self.write("base/c_pb2.py", python_function("long", 61))
        self.assert_passes()


class Walks(Tree):
    """Four walks through one file; a test breaks one."""

    def setUp(self):
        super().setUp()
        self.write("base/b.cc", "namespace n {\nvoid A::F() {}\nvoid G() {}\n}\n")

    def run_walks(self, *items, walks=4):
        one = "1. `A::F` (`base/b.cc`): first.\n2. `G` (`base/b.cc`): then.\n"
        lists = ["".join(f"1. {i}\n" for i in items) or one] + [one] * (walks - 1)
        self.write("docs/design.md", "# T\n\n## Four walks\n\n" + "".join(
            f"### Walk {i}\n\n{text}\n" for i, text in enumerate(lists)) + "## Next\n\n1. Not of a walk.\n")
        return self.run_check(check_walks)

    def assert_breaks(self, text, *items, walks=4):
        code, out = self.run_walks(*items, walks=walks)
        self.assertEqual(code, 1, out)
        self.assertIn(text, out)
        self.assertIn(" 1 failed", out)

    def test_walks_of_functions_that_exist_pass(self):
        code, out = self.run_walks()
        self.assertEqual((code, out), (0, "8 functions, 0 failed\n"))
        self.assertEqual(self.run_walks(*["`G` (`base/b.cc`): a clause."] * 10)[0], 0)

    def test_a_function_that_does_not_exist(self):
        self.assert_breaks("Walk 0: H: not defined in base/b.cc", "`H` (`base/b.cc`): a clause.")

    def test_a_method_without_its_class(self):
        self.assert_breaks("F: not defined in base/b.cc", "`F` (`base/b.cc`): a clause.")

    def test_a_method_of_another_class(self):
        self.assert_breaks("B::F: not defined in base/b.cc", "`B::F` (`base/b.cc`): a clause.")

    def test_a_function_that_is_only_declared(self):
        self.write("base/b.h", "void G();\n")
        self.assert_breaks("G: not defined in base/b.h", "`G` (`base/b.h`): a clause.")

    def test_a_file_that_does_not_exist(self):
        self.assert_breaks("G: there is no base/c.cc", "`G` (`base/c.cc`): a clause.")

    def test_an_item_that_is_no_function(self):
        self.assert_breaks("Walk 0: not `Function`", "Somewhere in `base/b.cc`.")
        self.assert_breaks("Walk 0: not `Function`", "`G` (`base/b.cc`)")

    def test_more_than_ten_functions(self):
        self.assert_breaks("Walk 0: 11 functions", *["`G` (`base/b.cc`): a clause."] * 11)

    def test_a_walk_that_is_missing(self):
        self.assert_breaks("3 walks in the section", walks=3)


class Ways(Tree):
    """One way of calls beside the four walks; a test breaks one call."""

    SOURCE = ("void Q::Put() { queue_.push(1); }\n"
              "void First() { q->Put(); }\n"
              "Handler HandlerOf(int n) { return kHandlers[n]; }\n"
              "void Handle() { KVS_RETURN_IF_ERROR(HandlerOf(1)(2)); }\n"
              "void OnOne() { std::make_shared<A>(1)->Second(); }\n"
              "void A::Second() {\n  // First()\n  Log(\"First()\");\n}\n"
              "void Take() { queue_.pop(); Handle(); Other(); }\n"
              "void Other() {}\n")
    ITEMS = ["`First` (`base/b.cc`): puts.",
             "`Q::Put` (`base/b.cc`): queues.",
             "`Take` (`base/b.cc`), in `kvs-one` by `queue_`: takes.",
             "`Handle` (`base/b.cc`): handles.",
             "`OnOne` (`base/b.cc`), out of `HandlerOf` (`base/t.cc`): is one.",
             "`A::Second` (`base/b.cc`): is second.",
             "`Other` (`base/b.cc`), by 3: is another."]

    def setUp(self):
        super().setUp()
        self.write("base/b.cc", self.SOURCE)
        self.write("base/t.cc", "const H kHandlers[] = {{1, OnOne}};\n"
                   "Handler HandlerOf(int n) { return kHandlers[n]; }\n")

    def run_way(self, items, figures="6 calls, 1 thread"):
        walks = "".join(f"### Walk {i}\n\n1. `First` (`base/b.cc`): puts.\n" for i in range(4))
        way = "".join(f"{n}. {item}\n" for n, item in enumerate(items, 1))
        self.write("docs/design.md", f"# T\n\n## Four walks\n\n{walks}\n## The way of a page\n\n"
                   f"### To disk: {figures}\n\n{way}\n## Threads\n\n| daemon | `kvs-one`, a loop |\n")
        return self.run_check(check_walks)

    def assert_breaks(self, text, items=None, **figures):
        code, out = self.run_way(items or self.ITEMS, **figures)
        self.assertEqual(code, 1, out)
        self.assertIn(text, out)

    def changed(self, n, text):
        return self.ITEMS[:n - 1] + [text] + self.ITEMS[n:]

    def test_a_way_of_calls_passes(self):
        code, out = self.run_way(self.ITEMS)
        self.assertEqual((code, out), (0, "11 functions, 0 failed\n"))

    def test_a_call_that_is_not_made(self):
        self.write("base/b.cc", self.SOURCE.replace("Handle(); Other", "Other"))
        self.assert_breaks("Handle: Take does not call it")

    def test_a_call_in_a_comment_or_a_string_is_none(self):
        self.assert_breaks("First: A::Second does not call it",
                           self.changed(7, "`First` (`base/b.cc`): puts."))

    def test_a_call_by_a_later_item_or_by_another(self):
        self.assert_breaks("item 7 does not come before", self.changed(7, self.ITEMS[6].replace("3", "7")))
        self.assert_breaks("Other: Handle does not call it",
                           self.changed(7, self.ITEMS[6].replace("3", "4")))

    def test_a_queue_that_only_one_of_them_names(self):
        self.write("base/b.cc", self.SOURCE.replace("queue_.pop()", "other_.pop()"))
        self.assert_breaks("Take: it does not name queue_")
        self.write("base/b.cc", self.SOURCE.replace("queue_.push", "other_.push"))
        self.assert_breaks("Take: Q::Put does not name queue_")

    def test_a_table_that_does_not_name_it(self):
        self.write("base/t.cc", "Handler HandlerOf(int n) { return kHandlers[n]; }\n")
        self.assert_breaks("OnOne: base/t.cc does not name it")
        self.write("base/t.cc", "const H kHandlers[] = {{1, OnOne}};\n")
        self.assert_breaks("HandlerOf: not defined in base/t.cc")

    def test_a_thread_that_the_section_does_not_have(self):
        self.assert_breaks("there is no thread kvs-two",
                           self.changed(3, self.ITEMS[2].replace("kvs-one", "kvs-two")))

    def test_other_figures_than_the_heading_says(self):
        self.assert_breaks("other figures than 6 calls, 1 thread", figures="5 calls, 1 thread")
        self.assert_breaks("other figures than 6 calls, 1 thread", figures="6 calls, 2 threads")

    def test_a_mark_that_is_none(self):
        self.assert_breaks("unknown mark ', sometimes'",
                           self.changed(4, "`Handle` (`base/b.cc`), sometimes: handles."))

    def test_more_than_eighteen_calls(self):
        self.write("base/b.cc", "void First() { First(); }\n")
        again = ["`First` (`base/b.cc`): puts."]
        self.assertEqual(self.run_way(again * 19, "18 calls, 0 threads")[0], 0)
        self.assert_breaks("19 calls, at most 18", again * 20, figures="19 calls, 0 threads")


class References(Tree):
    def assert_dangles(self, path, text, name):
        self.write(path, text)
        self.assert_fails(f"dangling {path}: 1, the limit is 0", f"{path} names {name}")

    def test_a_sentence_too_long(self):
        at_the_limit = "Word " + "word " * 28 + "word."
        self.write("docs/b.md", f"{at_the_limit} {at_the_limit}\n\n- {at_the_limit}\n- {at_the_limit}\n")
        self.assert_passes()
        self.write("docs/b.md", f"Short. {at_the_limit[:-1]}\nmore, `code` and [a link](a.md).\n")
        self.assert_fails("sentence docs/b.md: 1, the limit is 0", "docs/b.md has 35 words: 'Word word")

    def test_long_sentences_that_are_no_prose(self):
        many = "word " * 40
        self.write("docs/b.md", f"# {many}\n\n| {many} |\n\n```\n{many}\n```\n\n    {many}\n\n"
                                f"<!-- bench:a -->\n{many}\n<!-- /bench -->\n")
        self.write("docs/spec/c.md", f"{many}\n")
        self.assert_passes()

    def test_a_link_to_no_file(self):
        self.assert_dangles("README.md", "[x](docs/b.md)\n", "docs/b.md")

    def test_an_image_that_is_not_there(self):
        self.assert_dangles("README.md", "![x](docs/b.png)\n", "docs/b.png")

    def test_a_link_out_of_the_repository(self):
        (self.root / "inside").mkdir()
        self.root = self.root / "inside"
        self.write("../outside.md", "# Outside\n")
        self.assert_dangles("README.md", "[x](../outside.md)\n", "../outside.md")

    def test_an_anchor_without_a_heading(self):
        self.assert_dangles("docs/b.md", "[x](a.md#three-words)\n", "a.md#three-words")

    def test_an_anchor_of_the_same_file(self):
        self.write("docs/b.md", "# A `b`, c\n\n# A b c\n\n[x](#a-b-c) [y](#a-b-c-1)\n")
        self.assert_passes()
        self.assert_dangles("docs/b.md", "# A\n\n```\n# B\n```\n\n[x](#b)\n", "#b")

    def test_a_path_in_a_document(self):
        self.assert_dangles("docs/b.md", "In `base/gone.cc`.\n", "base/gone.cc")

    def test_a_folder_in_a_document(self):
        self.assert_dangles("docs/b.md", "In `base/gone`.\n", "base/gone")

    def test_a_path_in_a_comment_of_each_language(self):
        for path, text in {"base/c.cc": "// See base/gone.h.\n", "base/c.h": "/* base/gone.h */\n",
                           "base/c.py": "# base/gone.h\n", "base/d.py": '"""See base/gone.h."""\n',
                           "base/CMakeLists.txt": "# base/gone.h\n", "Makefile": "# base/gone.h\n",
                           "proto/c.proto": "// base/gone.h\n"}.items():
            with self.subTest(path):
                self.assert_dangles(path, text, "base/gone.h")
                (self.root / path).unlink()

    def test_a_document_that_readers_do_not_have(self):
        self.assert_dangles("base/c.cc", "// DECISIONS 7\n", "DECISIONS")
        self.assert_dangles("base/c.cc", "// (spec/x.md 2)\n", "spec/x.md")

    def test_patterns_and_what_is_no_reference(self):
        self.write("client/include/kvstrata/k.h", "")
        self.write("docs/b.md", "`base/b.{cc,h}`, `base/*.cc`, `base/NAME.cc`, `kvstrata/k.h`, "
                   "`base/gone-<date>.json`, https://x.y/base/gone.cc, /usr/base/gone.cc, [x](https://y)\n"
                   "`[x](gone.md)`\n")
        self.write("base/c.cc", 'const char* kPath = "base/gone.cc";\n')
        self.assert_passes()
        self.assert_dangles("docs/b.md", "`base/b.{cc,gone}`\n", "base/b.{cc,gone}")


class Of(Tree):
    def test_comments_that_begin_with_of_in_each_language(self):
        for path, text in {"base/c.cc": "// Of a row.\n", "base/c.h": "int a;  // of a row\n",
                           "base/d.h": "/* of it */\n", "base/e.h": "int a;  // Rows.\nint b;  // Of rows.\n",
                           "base/c.cu": "// Rows.\n//\n// Of rows.\n", "base/c.py": "a = 1  # of a row\n",
                           "base/d.py": 'def f():\n    """Of a row."""\n',
                           "base/e.py": 'class A:\n    rows: int\n    """of a page"""\n',
                           "base/CMakeLists.txt": "set(a)  # Of a row.\n",
                           "proto/c.proto": "int32 a = 1;  // of a row\n"}.items():
            with self.subTest(path):
                self.write(path, text)
                self.assert_fails(f"of {path}: 1, the limit is 0", f"{path} has line ")
                (self.root / path).unlink()

    def test_comments_that_do_not(self):
        self.write("base/c.cc", "// Bytes\n// of a row; often.\nint a;  // bytes\n        // of a row\n// Often.\n"
                   "auto b = \"// of\";\n")
        self.write("base/c.py", '"""of: bytes\nof a row."""\n# Bytes\n# of a row\na = "# of"\nb = """of"""\n')
        self.write("proto/c.proto", "// Bytes\n// of a row.\n")
        self.assert_passes()

    def test_a_file_keeps_its_figure(self):
        self.write("base/c.cc", "// Of a row.\nint a;  // of a page\n")
        self.list('[of]\n"base/c.cc" = 2\n')
        self.assert_passes()
        self.list('[of]\n"base/c.cc" = 3\n')
        self.assert_fails("of base/c.cc: shrank from 3 to 2; write")
        self.list('[of]\n"base/c.cc" = 1\n')
        self.assert_fails("of base/c.cc: grew from 1 to 2", "line 1: 'Of a row.'", "line 2: 'of a page'")


class List(Tree):
    def setUp(self):
        super().setUp()
        self.write("base/c.cc", cpp_function("F", 70))

    def test_what_is_listed_with_its_figure_passes(self):
        self.list('[function]\n"base/c.cc: F" = 70\n')
        self.assert_passes()

    def test_what_grew_fails(self):
        self.list('[function]\n"base/c.cc: F" = 69\n')
        self.assert_fails("function base/c.cc: F: grew from 69 to 70")

    def test_what_shrank_has_to_be_lowered(self):
        self.list('[function]\n"base/c.cc: F" = 71\n')
        self.assert_fails("function base/c.cc: F: shrank from 71 to 70; write",
                          '"base/c.cc: F" = 70')

    def test_what_is_within_the_limit_or_gone_has_to_be_removed(self):
        self.list('[function]\n"base/b.cc: AtTheLimit" = 61\n"base/c.cc: F" = 70\n"gone.cc: G" = 61\n')
        self.assert_fails("function base/b.cc: AtTheLimit: is 60, within the limit of 60; remove",
                          "function gone.cc: G: is gone; remove", '"gone.cc: G" = 61')

    def test_a_section_of_no_kind_fails(self):
        self.list('[function]\n"base/c.cc: F" = 70\n[functions]\n"base/c.cc: F" = 70\n')
        self.assert_fails("no kind is called [functions]")

    def test_update_lowers_and_removes_and_neither_raises_nor_adds(self):
        self.write("base/d.cc", cpp_function("New", 70) + cpp_function("Grown", 70))
        self.list('[function]\n"base/c.cc: F" = 71\n"base/d.cc: Grown" = 69\n"gone.cc: G" = 61\n')
        self.assertEqual(self.run_check(check_limits, "--update")[0], 1)
        self.assertEqual(self.listed(),
                         {"function": {"base/c.cc: F": 70, "base/d.cc: Grown": 69}})

    def test_print_gives_a_list_that_passes(self):
        self.list(self.run_check(check_limits, "--print")[1])
        self.assert_passes()

    def test_the_worst_come_first(self):
        self.write("base/d.cc", "".join(cpp_function(f"G{i}", 20 + i) for i in range(12)))
        out = self.run_check(check_limits)[1].splitlines()
        start = next(i for i, line in enumerate(out) if line.startswith("function: "))
        shown = [int(line.split()[0]) for line in out[start + 1:start + 12]
                 if line.startswith("  ")]
        self.assertEqual(shown, [70, 60, 60, 31, 30, 29, 28, 27, 26, 25])


class Layers(Tree):
    def test_an_include_against_the_arrows(self):
        for path, target in (("base/c.cc", "kernels/plan/plan.h"), ("client/c.cc", "server/x.h"),
                             ("kernels/ops/x/x.cc", "kernels/codec/b.h"),
                             ("kernels/codec/c.cc", "kernels/step/step.h"),
                             ("kernels/select/a.cc", "kernels/codec/b.h"),
                             ("kernels/codec/a.h", "kernels/select/b.h"),
                             ("kernels/ops/x/x.cc", "kernels/plans/quest/ops/y/y.h"),
                             ("kernels/plan/a.h", "kernels/plans/quest/a.h"),
                             ("kernels/plans/quest/a.cc", "kernels/plans/chess/b.h"),
                             ("kernels/plans/quest/gpu/a.cc", "kernels/plans/chess/b.h"),
                             ("kernels/plans/quest/a.cc", "kernels/plans/quest/gpu/b.h"),
                             ("kernels/plans/quest/a.cc", "kernels/plans/a.h"),
                             ("kernels/step/gpu/frame/a.h", "kernels/plans/quest/gpu/b.h"),
                             ("client/abi/a.cc", "client/linked/b.h"),
                             ("client/linked/a.cc", "client/remote/b.h"),
                             ("server/store/pages/a.cc", "server/store/books/b.h"),
                             ("server/store/pages/a.h", "server/store/store.h"),
                             ("server/tier/a.cc", "server/tier/disk/b.h"),
                             ("server/tier/redis/a.cc", "server/tier/disk/b.h"),
                             ("server/tier/redis/a.cc", "server/tier/mooncake/b.h"),
                             ("server/rpc/calls/a.cc", "server/rpc/b.h"),
                             ("server/work/tiers/a.cc", "server/tier/redis/b.h")):
            with self.subTest(path):
                self.write(path, f'#include "{target}"\n')
                self.assert_fails(f'{path} includes "{target}"', check=check_layers)
                (self.root / path).unlink()

    def test_no_room_of_the_server_reaches_itself(self):
        rooms = [room for room in check_layers.ALLOWED if room.startswith("server/")]
        arrows = {room: {other for other in rooms for folder in check_layers.ALLOWED[room]
                         if check_layers.reaches(f"{room}/a.cc", folder, f"{other}/b.h")} for room in rooms}
        self.assertEqual(check_owners.cycles(arrows), [])

    def test_a_room_without_a_row(self):
        for folder in ("server", "server/new", "server/store/new"):
            with self.subTest(folder):
                self.write(f"{folder}/a.cc", "")
                self.assert_fails(f"{folder}/a.cc lies in a room without a row", check=check_layers)
                (self.root / folder / "a.cc").unlink()

    def test_a_folder_of_kernels_on_no_floor(self):
        for folder in ("kernels", "kernels/new", "kernels/plans/quest/new"):
            with self.subTest(folder):
                self.write(f"{folder}/a.cc", "")
                self.assert_fails(f"{folder}/a.cc lies on no floor", check=check_layers)
                (self.root / folder / "a.cc").unlink()

    def test_a_type_of_an_optional_plan(self):
        self.write("kernels/plans/sekv/a.h", "namespace kvstrata {\nstruct Span {};\n}\n")
        self.write("kernels/plans/sekv/gpu/a.cc", "Span span;\n")
        self.write("kernels/plan/plan.h", "// Span\n")
        self.assert_passes(check_layers)
        for path in ("kernels/plan/plan.h", "kernels/plans/quest/a.cc", "server/work/a.cc"):
            with self.subTest(path):
                self.write(path, "const Span* span;\n")
                self.assert_fails(f"{path} names Span, a type of kernels/plans/sekv", check=check_layers)
                (self.root / path).unlink()

    def test_an_include_down_the_rooms(self):
        for path, target in (("server/store/store.cc", "server/store/openings/a.h"),
                             ("server/store/books/a.cc", "server/store/options/b.h"),
                             ("server/tier/disk/a.cc", "server/tier/value_tier.h"),
                             ("server/config/a.cc", "server/tier/redis/client/b.h"),
                             ("kernels/plan/plan.h", "kernels/plans/plan_list.h"),
                             ("kernels/plans/plan_list.h", "kernels/plans/quest/minmax_options.h"),
                             ("kernels/plans/quest/gpu/a.cc", "kernels/plans/quest/a.h"),
                             ("kernels/plans/quest/a.cc", "kernels/codec/b.h"),
                             ("kernels/plans/quest/ops/y/y.cc", "kernels/ops/x/x.h"),
                             ("kernels/cuda/a.h", "kernels/plans/quest/ops/y/y.h"),
                             ("kernels/step/gpu/a.cc", "kernels/plans/quest/gpu/b.h"),
                             ("client/linked/a.cc", "client/session.h"),
                             ("server/rpc/a.cc", "server/rpc/admin/b.h")):
            self.write(path, f'#include "{target}"\n')
        self.assert_passes(check_layers)


class Owners(Tree):
    def setUp(self):
        super().setUp()
        self.write_class("A", "B& b_;", "Lock& lock_;")
        self.write_class("B", "Lock& lock_;")

    def write_class(self, name, *members, kind="class"):
        text = "".join(f"  {member}\n" for member in members)
        self.write(f"server/store/{name.lower()}.h", f"{kind} {name} {{\n{text}}};\n")

    def test_a_stack_passes(self):
        self.assert_passes(check_owners)

    def test_a_cycle(self):
        for members in (["A& a_ KVS_GUARDED_BY(lock);"], ["const A* const a_;"], ["Parts& parts_;"], ["Whole& all_;"],
                        ["const Parts parts_;"], ["class A& a_;  // a comment", "B(const B&) = delete;"]):
            with self.subTest(members):
                self.write_class("Parts", "A a{this};", "int n = 0;", kind="struct")
                self.write_class("Whole::Parts", "A a{this};", kind="struct")
                self.write_class("B", "Lock& lock_;", *members)
                self.assert_fails("cycle server/store: 2, the limit is 0", "A -> B", check=check_owners)
                self.list('[cycle]\n"server/store" = 2\n')
                self.assert_passes(check_owners)
                self.list("")

    def test_more_references_than_eight_however_they_are_held(self):
        self.write_class("Few", *(f"Thing& thing{i}_;" for i in range(8)))
        self.assert_passes(check_owners)
        self.write_class("Bundle", *(f"Thing& thing{i};" for i in range(8)), kind="struct")
        self.write_class("Many", "Bundle parts_;", "Lock& lock_;")
        self.assert_fails("held Many: 9, the limit is 8", check=check_owners)
        self.list('[held]\n"Many" = 10\n')
        self.assert_fails("held Many: shrank from 10 to 9", check=check_owners)


class Measures(unittest.TestCase):
    def test_declarations_of_a_class(self):
        members = """
          A(); explicit A(int); ~A() = default;                   // 3
          int x, y = 3; static constexpr int k = 1; int b : 3;    // 4
          std::vector<int> v_ KVS_GUARDED_BY(mu_){1};             // 1
          void F() KVS_REQUIRES(mu_); int G() { return 1; }       // 2
          template <class U> void H(U u) {} operator bool() const;  // 2
          bool operator==(const A&) const = default;              // 1
          friend class Z; using X = int; typedef int Y; using B::f;  // 4
          struct In { int a; int b; }; enum E { kA, kB }; class Fwd;  // 3
          struct { int q; } anonymous;                            // 2
          int (*fp)(int); std::function<int(int)> fn;             // 2
          static_assert(1); private:                              // 0
        #if X
          int one;                                                // 1
        #else
          int other;                                              // 1
        #endif
        """
        found = cpp_measures.measure(f"class A : public B {{{members}}};".encode())
        self.assertEqual(found.classes, [("A", 26), ("A::In", 2), ("A::(anonymous)", 1)])

    def test_names_and_lines_of_functions(self):
        source = b"""namespace n {
template <class T>
T A<T>::F(int x) {
  struct L { void M() {} };
  return [&] {
    return x;
  }();
}
TEST_F(Suite, Name) {
}
A::operator bool() const { return true; }
KVS_HOST_DEVICE int* P() { return nullptr; }
}
"""
        self.assertEqual(sorted(cpp_measures.measure(source).functions), [
            ("A::operator bool", 1), ("A<T>::F", 6), ("A<T>::F::L::M", 1), ("P", 1),
            ("TEST_F(Suite, Name)", 2)])

    def test_python_functions(self):
        source = 'class A:\n  @d\n  async def f():\n    """Doc."""\n    def g():\n      pass\n'
        self.assertEqual(python_measures.functions(source), [("A.f", 4), ("A.f.g", 2)])


if __name__ == "__main__":
    unittest.main()
