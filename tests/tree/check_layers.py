#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Proves the direction of the tree: who may include whom (CONTRIBUTING.md, "Where a line belongs").

    base <- {proto, kernels} <- session <- {client, server} ; inside kernels ops <- {segment, select, codec} <- step,
    and neither of select and codec knows the other, but what they share (stored_rows.h); what still does is in
    exceeded.toml, [include]
    inside server {memory, sockets, telemetry} <- {store, tier, http}; {store, tier} <- work; store <- attach;
    {store, attach/peers, chunks/room} <- rpc <- {web, nodes}; {attach, work, http} <- config <- daemon/tiers <- doctor
    <- daemon. Rooms of the store are a stack (STORE): each knows those before it. Rooms of tier, work, attach, chunks
    and rpc have a row each in ALLOWED.

Usage: check_layers.py ROOT. Prints every forbidden include and ends with `N passed, N failed`.
"""
import pathlib
import re
import sys

import exceeded

# Rooms of server/store from the bottom up: each may include those before it, and none behind it.
STORE = ["options", "reports", "pages", "requests", "books", "references", "prompts", "space", "codecs", "lookups",
         "sequences", "openings"]
BELOW_STORE = ["base", "kernels", "proto", "server/memory"]
# folder -> folders it may include from (itself always). The longest matching folder counts. A folder that is named
# stands for its rooms, too, but in rows of its own rooms, where it is what lies in no room.
ALLOWED = {
    "base": [],
    "proto": ["base"],
    "kernels/ops": ["base", "kernels"],
    "kernels": ["base", "kernels/ops"],
    "session": ["base", "kernels", "proto"],
    "client/cli": ["base", "client/include", "client", "proto"],
    "client": ["base", "kernels", "proto", "session"],
    "server/memory": ["base", "kernels"],
    "server/sockets": ["base", "proto"],
    "server/telemetry": ["base", "proto"],
    "server/http": ["base", "server/telemetry"],
    **{f"server/store/{room}": BELOW_STORE + [f"server/store/{below}" for below in STORE[:i]]
       for i, room in enumerate(STORE)},
    "server/store": BELOW_STORE + [f"server/store/{room}" for room in STORE],
    "server/tier": ["base", "server/memory", "server/telemetry"],
    "server/tier/disk/files": ["base"],
    "server/tier/disk/format": ["base", "server/tier", "server/tier/disk/files"],
    "server/tier/disk/state": ["base", "server/tier", "server/tier/disk/files", "server/tier/disk/format"],
    "server/tier/disk": ["base", "server/telemetry", "server/tier", "server/tier/disk/files",
                         "server/tier/disk/format", "server/tier/disk/state"],
    "server/tier/remote": ["base", "server/tier"],
    "server/tier/redis/client": ["base", "server/tier"],
    "server/tier/redis": ["base", "server/telemetry", "server/tier", "server/tier/redis/client", "server/tier/remote"],
    "server/tier/mooncake": ["base", "server/memory", "server/telemetry", "server/tier", "server/tier/remote"],
    "server/work": ["base", "kernels", "server/memory", "server/store", "server/telemetry"],
    "server/work/tiers": ["base", "kernels", "server/store", "server/telemetry", "server/tier"],
    "server/work/remote": ["base", "server/store", "server/telemetry", "server/tier", "server/work/tiers"],
    "server/chunks/room": ["base", "proto", "server/memory", "server/sockets", "server/telemetry", "server/tier"],
    "server/chunks": ["base", "server/chunks/room", "server/sockets", "server/telemetry", "server/tier"],
    "server/attach/peers": ["base", "proto", "server/sockets", "server/store"],
    "server/attach/ring": ["base", "proto", "server/sockets", "server/store", "server/telemetry"],
    "server/attach": ["base", "proto", "server/attach/peers", "server/attach/ring", "server/sockets", "server/store",
                      "server/telemetry"],
    "server/rpc/steps": ["base", "kernels", "session", "server/store", "server/telemetry"],
    "server/rpc/calls": ["base", "kernels", "proto", "server/attach/peers", "server/chunks/room", "server/rpc/steps",
                         "server/sockets", "server/store", "server/telemetry"],
    "server/rpc/engine": ["base", "kernels", "server/rpc/calls", "server/rpc/steps", "server/sockets",
                          "server/telemetry"],
    "server/rpc/admin": ["base", "server/rpc/calls", "server/rpc/engine", "server/store", "server/telemetry"],
    "server/rpc": ["base", "server/attach/peers", "server/rpc/admin", "server/rpc/calls", "server/rpc/engine",
                   "server/store", "server/telemetry"],
    "server/web": ["base", "server/chunks/room", "server/http", "server/rpc/calls", "server/store",
                   "server/telemetry"],
    "server/nodes": ["base", "proto", "server/rpc/calls", "server/store", "server/telemetry", "server/tier"],
    "server/config": ["base", "kernels", "server/attach", "server/http", "server/memory", "server/sockets",
                      "server/store", "server/telemetry", "server/tier", "server/work"],
    "server/daemon/tiers": ["base", "server/config", "server/rpc/calls", "server/sockets", "server/store",
                            "server/telemetry", "server/tier", "server/work"],
    "server/doctor": ["base", "proto", "server/attach/peers", "server/config", "server/daemon/tiers", "server/memory",
                      "server/nodes", "server/sockets", "server/telemetry", "server/tier"],
    "server/daemon": ["base", "kernels", "server/attach", "server/chunks", "server/config", "server/daemon/tiers",
                      "server/doctor", "server/http", "server/memory", "server/nodes", "server/rpc", "server/sockets",
                      "server/store", "server/telemetry", "server/tier", "server/web", "server/work"],
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
    # What works over any ValueTier knows no engine.
    (r"^server/(work|chunks)/", r"^server/tier/.*/"),
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


def reaches(path, folder, target):
    """Whether `folder`, from which the file at `path` may include, has the header `target`."""
    if not target.startswith(folder + "/"):
        return False
    return not path.startswith(folder + "/") or folder_rule(target) == folder


def violations(path, text):
    rule = folder_rule(path)
    if path.startswith("server/") and path.rpartition("/")[0] != rule:
        yield f"{path} lies in a room without a row in ALLOWED"
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
            if not any(reaches(path, a, target) for a in [rule, *allowed]):
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
