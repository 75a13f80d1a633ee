# SPDX-License-Identifier: Apache-2.0
"""The bytes of docs/remote_format.md once more, of that page alone: names, headers, sealing, and what refuses what.

Needs xxhash and cryptography (integrations/requirements.txt), and nothing of kvstrata's.

Usage: remote_format.py DOC GOLDEN            checks the page's example and the vectors
       remote_format.py DOC GOLDEN --update   writes both again
"""
from __future__ import annotations

import hashlib
import hmac
import json
import os
import pathlib
import struct
import sys

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

STRIPE = 4 << 20
HEADER = 512
MAGIC = b"KVSRMT01"
VERSION = 1
SEALS = {"none": 0, "gcm": 1}
# written, key bytes, buffers, stripe, stripes, zero, check, whole, key, sizes, zeros: bytes 64 to 512.
FIELDS = struct.Struct("<QHHIII16s16s64s16Q200s")
CLEAR = struct.Struct("<8sII32s")  # magic, version, seal, salt: bytes 0 to 48
NO_BYTES = bytes(16)


class Refused(Exception):
    """What came is not what was put; the first argument is the reason."""


def checksum(data):
    return xxhash.xxh3_128_digest(data)


def stripes_of(data):
    return [data[i:i + STRIPE] for i in range(0, len(data), STRIPE)]


class Tenant:
    def __init__(self, secret, tenant, seal="none", max_age=7 * 86400, max_ahead=600):
        self.seal, self.max_age, self.max_ahead = seal, max_age, max_ahead

        def derive(use):
            info = f"kvstrata kv1 {seal} {use}".encode() + b"\0" + tenant
            return HKDF(hashes.SHA256(), 32, b"kvstrata remote tier", info).derive(secret)

        self.place_key, self.name_key, self.envelope_key = derive("place"), derive("name"), derive("envelope")

    def name(self, key, place=b"", stripe=0):
        where = hmac.digest(self.place_key, place or key, "sha256")[:8].hex()
        what = hmac.digest(self.name_key, key, "sha256")[:16].hex()
        return f"kv1:{{{where}}}:{what}:{stripe}"

    def write(self, key, buffers, written, salts=None):
        """The objects of all stripes. `salts`: one of 32 bytes for each, for vectors; None: random, as they must be."""
        stripes = stripes_of(b"".join(buffers))
        sums = [checksum(stripe) for stripe in stripes]
        whole = checksum(b"".join(sums)) if len(stripes) > 1 else NO_BYTES
        sizes = [len(buffer) for buffer in buffers] + [0] * (16 - len(buffers))

        def fields(i, check):
            return FIELDS.pack(written, len(key), len(buffers), i, len(stripes), 0, check, whole, key, *sizes, b"")

        objects = []
        for i, stripe in enumerate(stripes):
            if self.seal == "none":
                clear, fine = CLEAR.pack(MAGIC, VERSION, SEALS[self.seal], bytes(32)), fields(i, sums[i])
                tag = hmac.digest(self.envelope_key, clear + fine, "sha256")[:16]
                objects.append(clear + tag + fine + stripe)
                continue
            salt = salts[i] if salts else os.urandom(32)
            clear = CLEAR.pack(MAGIC, VERSION, SEALS[self.seal], salt)
            cipher = AESGCM(hmac.digest(self.envelope_key, salt, "sha256"))
            sealed = cipher.encrypt(nonce(1), stripe, None)
            header = cipher.encrypt(nonce(0), fields(i, sealed[-16:]), clear)
            objects.append(clear + header[-16:] + header[:-16] + sealed[:-16])
        return objects

    def inspect(self, header, now):
        """What a header says: written, stripe, stripes, check, whole, key, sizes, salt."""
        if len(header) < HEADER:
            raise Refused("REMOTE_CORRUPT", "short")
        clear, tag, fine = header[:48], header[48:64], header[64:HEADER]
        magic, version, seal, salt = CLEAR.unpack(clear)
        if (magic, version, seal) != (MAGIC, VERSION, SEALS[self.seal]):
            raise Refused("REMOTE_CORRUPT", "begins otherwise")
        if self.seal == "gcm":
            fine = self.decrypt(salt, 0, fine, tag, clear)
        elif not hmac.compare_digest(hmac.digest(self.envelope_key, clear + fine, "sha256")[:16], tag):
            raise Refused("REMOTE_CORRUPT", "tag")
        written, key_bytes, count, stripe, stripes, _, check, whole, key, *rest = FIELDS.unpack(fine)
        sizes = rest[:count]
        if written > now + self.max_ahead or written + self.max_age < now:
            raise Refused("REMOTE_STALE", written)
        return {"written": written, "stripe": stripe, "stripes": stripes, "check": check, "whole": whole,
                "key": key[:key_bytes], "sizes": list(sizes), "salt": salt}

    def read(self, key, sizes, objects, now):
        """The buffers of a value, of the objects of all its stripes."""
        data, wholes = [], set()
        total = sum(sizes)
        if len(objects) != max((total + STRIPE - 1) // STRIPE, 1):
            raise Refused("REMOTE_CORRUPT", "stripes")
        for i, found in enumerate(objects):
            head = self.inspect(found[:HEADER], now)
            if head["key"] != key or head["stripe"] != i:
                raise Refused("REMOTE_OTHER", i)
            if head["sizes"] != list(sizes):
                raise Refused("REMOTE_VALUE", head["sizes"])
            wholes.add(head["whole"])
            body = found[HEADER:]
            if len(body) != min(STRIPE, total - i * STRIPE):
                raise Refused("REMOTE_CORRUPT", "length")
            if self.seal == "gcm":
                body = self.decrypt(head["salt"], 1, body, head["check"], None)
            elif checksum(body) != head["check"]:
                raise Refused("REMOTE_CORRUPT", "bytes")
            data.append(body)
        if len(wholes) != 1:
            raise Refused("REMOTE_OTHER", "versions")
        whole, buffers = b"".join(data), []
        for size in sizes:
            buffers.append(whole[:size])
            whole = whole[size:]
        return buffers

    def decrypt(self, salt, message, data, tag, clear):
        try:
            return AESGCM(hmac.digest(self.envelope_key, salt, "sha256")).decrypt(nonce(message), data + tag, clear)
        except InvalidTag:
            raise Refused("REMOTE_CORRUPT", "tag") from None


def nonce(message):
    return bytes([message]) + bytes(11)


# --- the vectors of tests/golden/remote_format.json, and the page's example, which is the first of them

def pattern(size, start=0):
    """Byte i is (i + start) * 167 / 16, modulo 256."""
    return bytes((i + start) * 167 >> 4 & 255 for i in range(size))


def vector(name, seal, key, place, sizes, tenant=b"uid:1000", secret=b"0123456789abcdef0123456789abcdef"):
    written = 1700000000
    made = Tenant(secret, tenant, seal)
    buffers = [pattern(size, i) for i, size in enumerate(sizes)]
    count = len(stripes_of(b"".join(buffers)))
    salts = [hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(count)] if seal == "gcm" else None
    objects = made.write(key, buffers, written, salts)
    assert made.read(key, sizes, objects, written) == buffers
    return {"name": name, "secret": secret.decode(), "tenant": tenant.decode(), "seal": seal, "key": key.hex(),
            "place": place.hex(), "sizes": sizes, "written": written,
            "keys": [made.place_key.hex(), made.name_key.hex(), made.envelope_key.hex()],
            "stripes": [{"name": made.name(key, place, i), "header": found[:HEADER].hex(),
                         "bytes": found[HEADER:].hex() if seal == "gcm" else ""} for i, found in enumerate(objects)]}


def vectors():
    page, group = hashlib.sha256(b"page").digest(), hashlib.sha256(b"group").digest()
    return [vector("example", "none", page, group, [40, 8]),
            vector("example sealed", "gcm", page, group, [40, 8]),
            vector("no place", "none", page, b"", [1]),
            vector("sixteen buffers", "none", b"k" * 64, b"p" * 64, list(range(1, 17))),
            vector("sixteen buffers sealed", "gcm", b"k" * 64, b"p" * 64, list(range(17, 1, -1))),
            vector("another tenant", "none", page, group, [40, 8], tenant=b""),
            vector("another secret", "gcm", b"\0", group, [300], secret=b"~" * 512),
            vector("striped", "none", page, group, [STRIPE - 1, STRIPE, 2])]


def dump(data, start=0):
    """Lines of 32 bytes with their offsets; what is zero in whole lines is left out."""
    lines = []
    for at in range(0, len(data), 32):
        row = data[at:at + 32]
        if any(row):
            lines.append(f"{at + start:3d}  {row[:16].hex()} {row[16:].hex()}".rstrip())
    return lines


def example():
    """The lines between the page's two marks."""
    lines = []
    for case in vectors()[:2]:
        stripe = case["stripes"][0]
        says = "32 bytes a line, lines of zeros left out:" if case["seal"] == "none" else "with the salt that is at 16:"
        lines += [f"`remote.seal = {case['seal']}`, {says}", "", "```"]
        for use, key in zip(("place", "name", "envelope"), case["keys"], strict=True):
            lines.append(f"{use:8} {key}")
        lines += [f"object   {stripe['name']}"]
        body = bytes.fromhex(stripe["bytes"]) or b"".join(pattern(n, i) for i, n in enumerate(case["sizes"]))
        lines += [*dump(bytes.fromhex(stripe["header"])), *dump(body, HEADER), "```", ""]
    return lines


BEGIN, END = "<!-- example: tests/reference/remote_format.py -->", "<!-- end of example -->"


def main(doc, golden, *options):
    doc, golden = pathlib.Path(doc), pathlib.Path(golden)
    page, made = doc.read_text(), json.dumps(vectors(), indent=1) + "\n"
    before, rest = page.split(BEGIN)
    wanted = before + BEGIN + "\n\n" + "\n".join(example()) + "\n" + END + rest.split(END)[1]
    if options == ("--update",):
        doc.write_text(wanted)
        golden.write_text(made)
    is_so = lambda path, text: path.exists() and path.read_text() == text
    wrong = [str(path) for path, text in ((doc, wanted), (golden, made)) if not is_so(path, text)]
    for path in wrong:
        print(f"{path} is not what tests/reference/remote_format.py makes: --update")
    print(f"{2 - len(wrong)} passed, {len(wrong)} failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
