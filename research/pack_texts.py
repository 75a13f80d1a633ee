#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Packs long texts of Debian's documentation packages into one file, for train_sekv.py.

    research/pack_texts.py --out FILE.jsonl.xz [--download FOLDER] [--megabytes 30]

Packages are fetched by `apt-get download` into FOLDER and unpacked there, not installed. A line a document: its source
(package and path) and its text, markup taken out. Left out is what evaluations here read: the GPL, and what Python
documents of its language.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import lzma
import pathlib
import re
import subprocess
from collections.abc import Iterator

PACKAGES = ("python3.11-doc", "debian-handbook", "linux-doc-6.1", "git-doc", "bash-doc", "perl-doc", "developers-reference",
            "debian-policy", "debian-reference-en", "debian-faq", "doc-debian", "postgresql-doc-15",
            "installation-guide-amd64", "apt-doc", "emacs-common", "sqlite3-doc", "mercurial-common", "r-doc-info", "vim-doc")
LICENCES = ("Apache-2.0", "Artistic", "GFDL-1.2", "GFDL-1.3", "MPL-1.1", "MPL-2.0")
LEAST, MOST = 12_000, 400_000  # characters of a document
SHARE = 0.12                   # part of all text that one package may have
OTHERS = re.compile(r"/(reference|whatsnew|[a-df-z][a-z](-[a-z]+)?)/|GPL|gpl|COPYING|copying|changelog|genindex|translations|[a-z]{2}-(?!US)[A-Z]{2}/")
KINDS = re.compile(r"\.(html?|txt|rst|pod|texi|info|md)(\.gz)?$")
BLOCK = re.compile(r"<(script|style|nav|head)\b.*?</\1>", re.S | re.I)
TAG = re.compile(r"<[^>]*>")


def plain(name: str, content: str) -> str:
    """Text of a page, with blank lines and trailing spaces reduced."""
    if ".htm" in name:
        content = html.unescape(TAG.sub("", BLOCK.sub(" ", content)))
    lines = (line.rstrip() for line in content.replace("\x1f", "\n").split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def read(path: pathlib.Path) -> str:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return content.decode("utf-8", "replace")


def unpacked(folder: pathlib.Path, package: str) -> pathlib.Path:
    """The package's tree; fetched where it is not there."""
    tree = folder / package
    if not tree.exists():
        subprocess.run(["apt-get", "download", package], cwd=folder, check=True)
        deb = next(folder.glob(f"{package}_*.deb"))
        subprocess.run(["dpkg", "-x", deb, tree], check=True)
    return tree


def documents(tree: pathlib.Path) -> Iterator[tuple[str, str]]:
    """(path, text) of what is long enough, in the order of a digest of the path, so that a share is a fair one."""
    paths = [p for p in tree.rglob("*") if p.is_file() and not p.is_symlink() and KINDS.search(p.name)
             and not OTHERS.search(f"/{p.relative_to(tree)}")]
    stems: set[str] = set()  # the same text as .txt and .html is one
    for path in sorted(paths, key=lambda p: hashlib.sha256(str(p.relative_to(tree)).encode()).digest()):
        stem = path.name.split(".")[0]
        if stem in stems and stem != "index":
            continue
        text = plain(path.name, read(path))
        if len(text) >= LEAST and sum(ord(c) < 128 for c in text) > 0.97 * len(text):
            stems.add(stem)
            yield str(path.relative_to(tree)), text[:MOST]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--download", type=pathlib.Path, default=pathlib.Path("/tmp/kvstrata-texts"))
    parser.add_argument("--megabytes", type=float, default=30)
    args = parser.parse_args()
    args.download.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    total = 0
    with lzma.open(args.out, "wt", encoding="utf-8", preset=9) as file:
        for package in PACKAGES:
            used = 0
            for path, text in documents(unpacked(args.download, package)):
                digest = hashlib.sha256(text[:4000].encode()).hexdigest()
                if digest in seen or used + len(text) > SHARE * args.megabytes * 1e6:
                    continue
                seen.add(digest)
                used += len(text)
                file.write(json.dumps({"source": f"{package}/{path}", "text": text}) + "\n")
            total += used
            print(f"{package}: {used / 1e6:.2f} MB", flush=True)
        for name in LICENCES:
            text = pathlib.Path("/usr/share/common-licenses", name).read_text()
            file.write(json.dumps({"source": f"common-licenses/{name}", "text": text}) + "\n")
    print(f"{total / 1e6:.1f} MB of {len(seen)} documents in {args.out.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
