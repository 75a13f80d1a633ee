#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Proves the table of reasons (proto/reasons_*.cc): every reason that the code says has a row, every row is said, by
the code or by an adapter, and docs/reasons.md is what the table says.

Usage: check_reasons.py ROOT            checks; prints what is missing, ends with `N passed, N failed`
       check_reasons.py ROOT --update   writes docs/reasons.md, then checks
"""
import pathlib
import re
import sys

ROWS = re.compile(r'\{"([A-Z0-9_]+)",\s*k(\w+),\s*((?:"(?:[^"\\]|\\.)*"\s*)+),\s*((?:"(?:[^"\\]|\\.)*"\s*)+)\}')
TABLE = re.compile(r"^proto/reasons_\w+\.cc$")
FOLDERS = ("base", "proto", "kernels", "session", "server", "client")
# A literal where a Status is made, whatever its form.
MADE = re.compile(r"\b(?:InvalidArgument|NotFound|FailedPrecondition|ResourceExhausted|Unavailable|Unimplemented"
                  r"|Internal|Denied|Refused?|mismatch)\s*\(\s*\"([A-Z][A-Z0-9_]+)\"\s*,"
                  r"|\bCode::k\w+\s*,\s*\"([A-Z][A-Z0-9_]+)\"")
# A literal where Python makes an exception.
RAISED = re.compile(r"\berror_of\(\s*\d+,\s*\"([A-Z][A-Z0-9_]+)\"")
LITERAL = re.compile(r'"([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*)"')
# Words in capitals with an underscore that are no reasons: codes of gRPC, types of safetensors, the environment.
OTHERS = set("""ALREADY_EXISTS DATA_LOSS DEADLINE_EXCEEDED FAILED_PRECONDITION INVALID_ARGUMENT NOT_FOUND OUT_OF_RANGE
PERMISSION_DENIED RESOURCE_EXHAUSTED F8_E4M3 F8_E5M2 F_ADD_SEALS LIST_VALUES NOTIFY_SOCKET NOT_SERVING NO_COLOR
CUDA_MPS_PIPE_DIRECTORY O_DIRECT SERVICE_UNKNOWN XDG_RUNTIME_DIR""".split())
# Reasons that are put together: by base/safetensors.cc of what the file is called, by AdminService::Missing.
COMPOSED = {"TRACE_FOREIGN": "FOREIGN", "TRACE_HEADER": "HEADER", "TRACE_TRUNCATED": "TRUNCATED",
            "TRACE_UNREADABLE": "UNREADABLE", "ADMIN_LIST_VALUES_UNIMPLEMENTED": "LIST_VALUES",
            "ADMIN_VERIFY_UNIMPLEMENTED": "VERIFY", "ADMIN_RELOAD_UNIMPLEMENTED": "RELOAD",
            "ADMIN_METRICS_UNIMPLEMENTED": "METRICS"}
PARTS = set(COMPOSED.values()) | {"ADMIN_"}
AREAS = {"Start": "Configuration and start", "Connect": "Connecting, attaching", "Sequence": "Sequences and steps",
         "Plan": "Plans", "Tensor": "Engines' tensors", "Memory": "Pools and GPUs", "Disk": "The disk tier",
         "Remote": "The tier of the cluster", "Work": "Workers", "Admin": "Operators' verbs",
         "Library": "libkvstrata", "Program": "The program kvstrata"}


def text(literals):
    parts = re.findall(r'"((?:[^"\\]|\\.)*)"', literals)
    return re.sub(r"\\(.)", r"\1", "".join(parts))


def read_table(root):
    rows = []
    for path in sorted((root / "proto").glob("reasons_*.cc")):
        rows += [(m[1], m[2], text(m[3]), text(m[4])) for m in ROWS.finditer(path.read_text())]
    return rows


def read_code(root):
    """What the code makes a Status of, with where; and every literal in capitals."""
    made, literals = {}, set()
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.suffix not in (".cc", ".h", ".cu", ".cuh") or TABLE.match(name):
                continue
            source = path.read_text()
            found = {m[1] or m[2] for m in MADE.finditer(source)}
            words = set(LITERAL.findall(source))
            found |= {w for w in words if "_" in w and not w.startswith("KVSTRATA_")} - OTHERS
            literals |= words | found
            for word in found - PARTS:
                made.setdefault(word, name)
    for path in sorted((root / "integrations").rglob("*.py")):
        literals |= set(RAISED.findall(path.read_text()))
    return made, literals


def render(rows):
    out = ["# Reasons", "",
           "Every error and refusal has a reason, a stable name. `kvstrata explain REASON` says the same as",
           "this document, which is made from `proto/reasons_*.cc` by `tests/tree/check_reasons.py . --update`.",
           "[operations.md](operations.md#by-symptom) goes by symptom.", ""]
    for area, title in AREAS.items():
        out += [f"## {title}", "", "| reason | meaning | next |", "| --- | --- | --- |"]
        escaped = [[cell.replace("|", "\\|") for cell in row] for row in sorted(rows) if row[1] == area]
        out += [f"| `{name}` | {meaning} | {next_step} |".replace("|  |", "| |") for name, _, meaning, next_step in escaped]
        out.append("")
    return "\n".join(out).rstrip() + "\n"


def main():
    root = pathlib.Path(sys.argv[1])
    page = root / "docs" / "reasons.md"
    rows = read_table(root)
    if "--update" in sys.argv:
        page.write_text(render(rows))
    names = [row[0] for row in rows]
    made, literals = read_code(root)
    wrong = [f"{n}: {where} says it, and no row of proto/reasons_*.cc does" for n, where in sorted(made.items())
             if n not in names]
    wrong += [f"{n}: has a row, and nothing says it" for n in names if COMPOSED.get(n, n) not in literals]
    wrong += [f"{n}: has {names.count(n)} rows" for n in sorted(set(names)) if names.count(n) > 1]
    wrong += [f"{n}: its meaning is no sentence" for n, _, meaning, _ in rows if not meaning.endswith(".")]
    wrong += [f"{n}: area k{area} has no title here" for n, area, _, _ in rows if area not in AREAS]
    if not page.exists() or page.read_text() != render(rows):
        wrong.append("docs/reasons.md is not what the table says: tests/tree/check_reasons.py . --update")
    for line in wrong:
        print(line)
    print(f"{len(rows) + 1 - len(wrong)} passed, {len(wrong)} failed")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
