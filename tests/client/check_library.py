#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Proves what libkvstrata.so needs and exports: libc alone, an old one, and kvs_* alone.

Usage: check_library.py LIBRARY FOLDER [--any-needed], the folder of its headers. Ends with `N passed, N failed`.
"""
import pathlib
import re
import subprocess
import sys

ALLOWED_NEEDED = re.compile(r"^(libc\.so\.6|libm\.so\.6|ld-linux[-\w]*\.so\.\d)$")

NEWEST_GLIBC = 35


def readelf(*args):
    return subprocess.run(["readelf", "-W", *args], check=True, capture_output=True, text=True).stdout


def main(library, folder, *options):
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("-d", library))
    exported = set()
    for line in readelf("--dyn-syms", library).splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[4] in ("GLOBAL", "WEAK", "UNIQUE") and fields[6] != "UND":
            exported.add(fields[7].split("@")[0])
    headers = [path.read_text(encoding="utf-8") for path in pathlib.Path(folder).glob("*.h")]
    declared = {name for text in headers for name in re.findall(r"^KVS_API [^(]*?\b(kvs_\w+)\(", text, re.MULTILINE)}
    checks = {
        "needs something": bool(needed),
        "declares something": len(declared) > 20,
        f"exports what the headers do not declare: {sorted(exported - declared)}":
            exported <= declared,
        f"does not export: {sorted(declared - exported)}": declared <= exported,
    }
    if "--any-needed" not in options:
        foreign = [n for n in needed if not ALLOWED_NEEDED.match(n)]
        checks[f"needs more than libc: {foreign}"] = not foreign
        # Ubuntu 22.04's, which is below vLLM's images: the wheel is for that and newer.
        versions = set(re.findall(r"GLIBC_(2\.\d+)", readelf("-V", library)))
        newer = sorted(v for v in versions if int(v[2:]) > NEWEST_GLIBC)
        checks[f"asks for a newer glibc than 2.{NEWEST_GLIBC}: {newer}"] = not newer
    failed = [text for text, good in checks.items() if not good]
    print("".join(f"{library}: {text}\n" for text in failed)
          + f"{len(checks) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
