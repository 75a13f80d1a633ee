#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Proves that everything that has to name the version itself names the one of VERSION: Python's packages, images in
Kubernetes' manifests, the changelogs of users and of Debian. CMake, and with it all of C++, reads the file.

Usage: check_version.py ROOT                 checks; ends with `N passed, N failed`
       check_version.py ROOT --set 1.2.3     writes VERSION, Python's packages and manifests, then checks; changelogs want words
"""
import pathlib
import re
import sys

NUMBER = r"(\d+\.\d+\.\d+)"
NAMED = ((r"integrations/*/src/*/__init__.py", rf'^__version__ = "{NUMBER}"$'),
          (r"integrations/*/pyproject.toml", rf'"kvstrata=={NUMBER}"'),
          # remote*.yaml has no image of ours.
          (r"deploy/kubernetes/[!r]*.yaml", rf"image: kvstrata:{NUMBER}$"))
# The newest section of a changelog is the first.
CHANGELOGS = (("CHANGELOG.md", rf"^## {NUMBER} "), ("debian/changelog", rf"^kvstrata \({NUMBER}\) "))


def places(root, globs):
    for glob, pattern in globs:
        for path in sorted(root.glob(glob)) or [root / glob]:
            yield path, re.compile(pattern, re.M)


def write(root, version):
    (root / "VERSION").write_text(version + "\n")
    for path, pattern in places(root, NAMED):
        text = path.read_text()
        for found in reversed(list(pattern.finditer(text))):
            text = text[:found.start(1)] + version + text[found.end(1):]
        path.write_text(text)


def check(root):
    version = (root / "VERSION").read_text().strip()
    passed, failed = 0, []
    for path, pattern in places(root, NAMED + CHANGELOGS):
        name = path.relative_to(root).as_posix()
        found = pattern.findall(path.read_text()) if path.exists() else []
        wanted = 0 if name == "integrations/kvstrata/pyproject.toml" else 1
        if found[:1] == [version] * wanted:
            passed += 1
        else:
            failed.append(f"{name}: names {found[0] if found else 'no version'}, VERSION says {version}")
    return passed, failed


def main(root, *options):
    root = pathlib.Path(root)
    if options:
        flag, version = options
        assert flag == "--set" and re.fullmatch(NUMBER, version), __doc__
        write(root, version)
    passed, failed = check(root)
    print("".join(line + "\n" for line in failed) + f"{passed} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
