#!/usr/bin/env python3
"""Proves that every source names its licence in its first lines, as `SPDX-License-Identifier: Apache-2.0`.

Usage: check_spdx.py ROOT            checks what git has below FOLDERS; ends with `N passed, N failed`
       check_spdx.py ROOT --add      adds the line where it is missing: first of the file, or behind `#!`
"""
import pathlib
import subprocess
import sys

LICENCE = "SPDX-License-Identifier: Apache-2.0"
# "": all of the tree.
FOLDERS = ("",)
COMMENT = {".cc": "//", ".h": "//", ".cu": "//", ".cuh": "//", ".proto": "//", ".c": "//", ".py": "#", ".sh": "#",
           ".cmake": "#", ".yaml": "#", ".yml": "#", ".toml": "#", ".service": "#", ".conf": "#", ".Dockerfile": "#",
           "CMakeLists.txt": "#"}


def sources(root):
    """(path, what a comment of it begins with) of every file that has a licence of its own to name."""
    names = subprocess.run(["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"], check=True,
                           text=True, stdout=subprocess.PIPE).stdout.split("\0")
    for name in names:
        path = pathlib.Path(root, name)
        comment = COMMENT.get(path.name) or COMMENT.get(path.suffix)
        inside = any(folder == "" or name.startswith(folder + "/") for folder in FOLDERS)
        if comment and inside and path.is_file() and not path.is_symlink():
            yield path, comment


def named(path):
    return any(LICENCE in line for line in path.read_text().splitlines()[:3])


def add(path, comment):
    lines = path.read_text().splitlines(keepends=True)
    at = 1 if lines and lines[0].startswith("#!") else 0
    lines.insert(at, f"{comment} {LICENCE}\n")
    path.write_text("".join(lines))


def main(root, *options):
    passed, failed = 0, 0
    for path, comment in sources(root):
        if not named(path) and options == ("--add",):
            add(path, comment)
        if named(path):
            passed += 1
        else:
            failed += 1
            print(f"{path.relative_to(root)}: `{comment} {LICENCE}` is missing; check_spdx.py {root} --add")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
