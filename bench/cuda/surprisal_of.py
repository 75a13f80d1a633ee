# SPDX-License-Identifier: Apache-2.0
"""Writes the surprisal of a trace (docs/traces.md) into a file of its own, in the same format.

    surprisal_of.py TRACE OUT
"""

import json
import struct
import sys


def main() -> None:
    with open(sys.argv[1], "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        tensor = json.loads(file.read(size))["surprisal"]
        begin, end = tensor["data_offsets"]
        file.seek(8 + size + begin)
        values = file.read(end - begin)
    tensor["data_offsets"] = [0, len(values)]
    header = json.dumps({"surprisal": tensor}).encode()
    with open(sys.argv[2], "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + values)


if __name__ == "__main__":
    main()
