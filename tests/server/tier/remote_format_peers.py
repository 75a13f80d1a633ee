# SPDX-License-Identifier: Apache-2.0
"""Two implementations of docs/remote_format.md against each other: each reads what the other wrote, and both refuse
the same of what was damaged, with the same reason.

Usage: remote_format_peers.py PEER     PEER: the program remote_format_peer. KVS_TEST_SEED repeats a run.
"""
import os
import pathlib
import random
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from reference import remote_format as reference  # noqa: E402

CASES = 60
NOW = 1_700_000_000


def draw(dice, folder, i):
    """A random value; of every tenth the bytes are several stripes."""
    count = dice.randint(1, 16)
    most = 2 << 20 if i % 10 == 9 else dice.choice([1, 64, 5000])
    sizes = [dice.randint(1, most) for _ in range(count)]
    if i % 10 == 9:
        sizes[0] = reference.STRIPE + dice.randint(-1, 1)
    case = {"secret": "".join(chr(dice.randint(0x21, 0x7E)) for _ in range(dice.randint(32, 512))),
            "tenant": dice.randbytes(dice.randint(0, 40)).hex(), "seal": dice.choice(["none", "gcm"]),
            "key": dice.randbytes(dice.randint(1, 64)).hex(),
            "place": dice.randbytes(dice.choice([0, 1, 32, 64])).hex(),
            "sizes": sizes, "written": NOW - dice.randint(0, 1000), "now": NOW, "file": str(i)}
    data = dice.randbytes(sum(sizes))
    (folder / case["file"]).write_bytes(data)
    buffers, at = [], 0
    for size in sizes:
        buffers.append(data[at:at + size])
        at += size
    return case, buffers


def tenant_of(case):
    return reference.Tenant(case["secret"].encode(), bytes.fromhex(case["tenant"]), case["seal"])


def peer(program, verb, folder, cases):
    words = [[case["file"], case["secret"], "x" + case["tenant"], case["seal"], "x" + case["key"], "x" + case["place"],
              case["written"], case["now"], *case["sizes"]] for case in cases]
    lines = "".join(" ".join(map(str, line)) + "\n" for line in words)
    done = subprocess.run([program, verb, str(folder)], input=lines, text=True, stdout=subprocess.PIPE, check=True)
    answers = done.stdout.splitlines()
    assert len(answers) == len(cases), (len(answers), len(cases))
    return answers


def python_reads(case, buffers, objects):
    try:
        got = tenant_of(case).read(bytes.fromhex(case["key"]), case["sizes"], objects, case["now"])
    except reference.Refused as why:
        return why.args[0]
    return "OK" if got == buffers else "WRONG"


def damage(dice, case, objects):
    """Changes one thing of what came, or of what is asked for."""
    at = dice.randrange(len(objects))
    found = bytearray(objects[at])
    kind = dice.choice(["header", "bytes", "cut", "pad", "key", "tenant", "age", "ahead", "swap", "sizes"])
    if kind == "header":
        found[dice.randrange(512)] ^= 1 << dice.randrange(8)
    elif kind == "bytes":
        found[dice.randrange(512, len(found))] ^= 1 << dice.randrange(8)
    elif kind == "cut":
        del found[dice.randrange(len(found)):]
    elif kind == "pad":
        found += b"\0"
    elif kind == "key":
        case["key"] = bytes(byte ^ 1 for byte in bytes.fromhex(case["key"])).hex()
    elif kind == "tenant":
        case["tenant"] += "00"
    elif kind == "age":
        case["now"] = case["written"] + 7 * 86400 + 1
    elif kind == "ahead":
        case["now"] = case["written"] - 601
    elif kind == "swap" and len(objects) > 1:
        objects[0], objects[1] = objects[1], objects[0]
        return
    elif kind == "sizes" and max(case["sizes"]) > 1 and len(case["sizes"]) > 1:
        big = case["sizes"].index(max(case["sizes"]))
        case["sizes"][big] -= 1
        case["sizes"][(big + 1) % len(case["sizes"])] += 1
    objects[at] = bytes(found)


def main(program):
    seed = int(os.environ.get("KVS_TEST_SEED") or random.SystemRandom().randrange(2**32))
    print(f"KVS_TEST_SEED={seed}", flush=True)
    dice, failed, reasons = random.Random(seed), 0, {}

    def expect(what, is_so, **more):
        nonlocal failed
        if not is_so:
            failed += 1
            print(f"{what}: {more}")

    with tempfile.TemporaryDirectory(prefix="kvs-remote-") as name:
        folder = pathlib.Path(name)
        drawn = [draw(dice, folder, i) for i in range(CASES)]
        names = peer(program, "write", folder, [case for case, _ in drawn])
        for (case, buffers), told in zip(drawn, names, strict=True):
            made, key, place = tenant_of(case), bytes.fromhex(case["key"]), bytes.fromhex(case["place"])
            objects = [(folder / f"{case['file']}.{i}").read_bytes() for i in range(len(told.split()))]
            expect("names", told.split() == [made.name(key, place, i) for i in range(len(objects))], case=case)
            expect("Python reads C++", python_reads(case, buffers, objects) == "OK", case=case)
            ours = made.write(key, buffers, case["written"])
            expect("equal bytes", case["seal"] == "gcm" or ours == objects, case=case)
            if int(case["file"]) % 3:
                damage(dice, case, ours)
            for i, found in enumerate(ours):
                (folder / f"{case['file']}.{i}").write_bytes(found)
            case["wanted"] = python_reads(case, buffers, ours)
        for (case, _), said in zip(drawn, peer(program, "open", folder, [case for case, _ in drawn]), strict=True):
            expect("C++ reads Python", said == case["wanted"], said=said, wanted=case["wanted"], case=case)
            reasons[said] = reasons.get(said, 0) + 1
    print(f"{CASES} values: {reasons}")
    return 1 if failed or "WRONG" in reasons or "OK" not in reasons else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
