#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Blanks a CUDA library's device code but for one architecture, in place.

    prune.py LIBRARY.so [--keep 90]

Nothing moves, so the file is as long as before and runs on that architecture alone; what is blank packs to nothing.
Kernels that have no code of the architecture, in any of their images, are lost, and the images are counted in the
output. Run `strip` before.
"""

from __future__ import annotations

import argparse
import pathlib
import struct
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

CONTAINER = 0xBA55ED50
ELF = 2


class Image(NamedTuple):
    """Device code of one architecture: bytes [begin, end) of the file."""

    elf: bool
    arch: int
    begin: int
    end: int


def fatbin_sections(library: pathlib.Path) -> Iterator[tuple[int, int]]:
    """Where (offset, size) the linker put containers."""
    listed = subprocess.run(["readelf", "-SW", library], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        words = line.partition("]")[2].split()
        if words and words[0] in (".nv_fatbin", "__nv_relfatbin"):
            yield int(words[3], 16), int(words[4], 16)


def containers(data: bytes, begin: int, size: int) -> Iterator[list[Image]]:
    """A container is a header and images, each of which has a header of its own."""
    at = begin
    while at + 16 <= begin + size:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
        if magic != CONTAINER:
            at += 8  # padding
            continue
        image, at = at + header, at + header + length
        found = []
        while image < at:
            kind, _, header, length = struct.unpack_from("<HHIQ", data, image)
            arch, = struct.unpack_from("<I", data, image + 28)
            found.append(Image(kind == ELF, arch, image + header, image + header + length))
            image += header + length
        yield found


def prune(library: pathlib.Path, keep: int) -> str:
    """One line: what is left."""
    data = bytearray(library.read_bytes())
    left = blanked = without = 0
    for section in fatbin_sections(library):
        for images in containers(bytes(data), *section):
            wanted = [image for image in images if image.elf and image.arch == keep]
            without += not wanted
            for image in images:
                size = image.end - image.begin
                if image in wanted:
                    left += size
                else:
                    data[image.begin:image.end] = bytes(size)
                    blanked += size
    library.write_bytes(data)
    return (f"{library.name}: {left / 1e6:.1f} MB of sm_{keep} left, {blanked / 1e6:.1f} MB blanked, {without} "
            f"containers without sm_{keep}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("library", type=pathlib.Path)
    parser.add_argument("--keep", type=int, default=90, help="compute capability, as 90")
    arguments = parser.parse_args()
    print(prune(arguments.library, arguments.keep))


if __name__ == "__main__":
    main()
