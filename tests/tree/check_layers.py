#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Proves the direction of the tree: who may include whom (CONTRIBUTING.md, "Where a line belongs").

    base <- {proto, kernels} <- session <- {client, server} ; inside kernels ops <- {segment, select, codec} <- step,
    and neither of select and codec knows the other, but what they share (stored_rows.h); what still does is in
    exceeded.toml, [include]
    inside server memory <- store <- {attach, rpc, work} <- {pages, nodes} <- daemon <- main; tier (disk) <- {work,
    daemon}; http <- {pages, daemon}; sockets <- {attach, rpc, chunks, daemon}; {memory, tier} <- chunks <- {rpc, pages, daemon}

Usage: check_layers.py ROOT. Prints every forbidden include and ends with `N passed, N failed`.
"""
import pathlib
import re
import sys

import exceeded

# folder -> folders it may include from (itself always). The longest matching folder counts.
ALLOWED = {
    "base": [],
    "proto": ["base"],
    "kernels/ops": ["base", "kernels"],
    "kernels": ["base"],
    "session": ["base", "kernels", "proto"],
    "client/cli": ["base", "client/include", "client", "proto"],
    "client": ["base", "kernels", "proto", "session"],
    "server/memory": ["base", "kernels"],
    "server/telemetry": ["base", "proto"],
    "server/tier": ["base"],
    "server/http": ["base", "server/telemetry"],
    "server/store": ["base", "kernels", "proto", "server/memory"],
    "server/sockets": ["base", "proto"],
    "server/chunks": ["base", "proto", "server/memory", "server/sockets", "server/telemetry", "server/tier"],
    "server/attach": ["base", "kernels", "proto", "server/sockets", "server/store", "server/telemetry"],
    "server/rpc": ["base", "kernels", "proto", "session", "server/store", "server/telemetry",
                   "server/attach", "server/sockets", "server/chunks"],
    "server/work": ["base", "kernels", "server/memory", "server/store", "server/telemetry",
                    "server/tier"],
    "server/pages": ["base", "server/chunks", "server/store", "server/rpc", "server/telemetry", "server/http"],
    "server/nodes": ["base", "proto", "server/store", "server/rpc", "server/telemetry", "server/tier", "server/work"],
    "server": ["base", "kernels", "proto", "server/memory", "server/store", "server/attach",
               "server/rpc", "server/work", "server/telemetry", "server/tier", "server/http",
               "server/pages", "server/nodes", "server/sockets", "server/chunks"],
    "tests": ["*"],
    "bench": ["*"],
}
# Headers of a kernel folder that the folders below it must not know.
FORBIDDEN = [
    (r"^kernels/ops/", r"^kernels/(segment|select|codec|step|plan)"),
    # What selectors, codecs and steps share knows none of them.
    (r"^kernels/(attend_works|score_works|select_context|selection|sequence_view|stored_rows)\.",
     r"^kernels/((segment|select|codec|step)/|plan)"),
    (r"^kernels/(segment|select|codec)/", r"^kernels/step/"),
    (r"^(base|kernels|proto)/", r"^(client|server|session)/"),
    (r"^session/", r"^(client|server)/"),
    (r"^client/", r"^server/"),
    (r"^server/", r"^client/"),
    # Tools reach kernels through kvs_* alone.
    (r"^client/cli/", r"^(kernels|session)/"),
    (r"^(tests/(e2e|cli|python)|bench/(plans|ring))", r"^kernels/"),
]
# Axes that do not know each other; exceeded.toml lists, in SECTION, the includes that still do.
APART = [
    (r"^kernels/select/", r"^kernels/codec/"),
    (r"^kernels/codec/", r"^kernels/select/"),
]
SECTION = "include"
SYSTEM_FORBIDDEN = [
    (r"^(client/(?!cli|remote)|kernels|session|base)", r"^(grpc|google/protobuf|spdlog|jemalloc|torch)"),
    (r"^(?!.*\.(cu|cuh)$)(?!kernels/cuda/|tests/cuda/|bench/cuda/).*", r"^(cuda|cuda_runtime|cublas)"),
]
INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]', re.MULTILINE)


def folder_rule(path):
    matches = [f for f in ALLOWED if path == f or path.startswith(f + "/")]
    return max(matches, key=len) if matches else None


def violations(path, text):
    rule = folder_rule(path)
    for kind, target in INCLUDE.findall(text):
        if kind == "<":
            for where, what in SYSTEM_FORBIDDEN:
                if re.search(where, path) and re.search(what, target):
                    yield f"{path} includes <{target}>"
            continue
        for where, what in FORBIDDEN:
            if re.search(where, path) and re.search(what, target):
                yield f"{path} includes \"{target}\""
        allowed = ALLOWED.get(rule, ["*"])
        inside = target.split("/")[0] in {f.split("/")[0] for f in ALLOWED}
        if inside and "*" not in allowed:
            own = target == rule or target.startswith(rule + "/")
            if not own and not any(target.startswith(a + "/") for a in allowed):
                yield f"{path} includes \"{target}\", not in {allowed}"


def sources(root):
    return [p for folder in ("base", "proto", "kernels", "session", "client", "server", "tests", "bench")
            for p in sorted((root / folder).rglob("*")) if p.suffix in (".h", ".cc", ".cu", ".cuh", ".c")]


def crossings(root):
    """`FILE: HEADER` -> 1 of each include between folders that are APART."""
    return {f"{path}: {target}": 1
            for path, file in ((str(f.relative_to(root)), f) for f in sources(root))
            for where, what in APART if re.search(where, path)
            for _, target in INCLUDE.findall(file.read_text()) if re.search(what, target)}


def main(root):
    root = pathlib.Path(root)
    files = sources(root)
    failed = 0
    for file in files:
        found = list(violations(str(file.relative_to(root)), file.read_text()))
        failed += bool(found)
        print("\n".join(found), end="\n" if found else "")
    listed = exceeded.read(root / "tests" / "tree" / "exceeded.toml").get(SECTION, {})
    apart = list(exceeded.complaints(SECTION, crossings(root), 0, listed))
    print("\n".join(apart), end="\n" if apart else "")
    print(f"{len(files) - failed} passed, {failed + len(apart)} failed")
    return 1 if failed or apart or not files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
