#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Proves the direction of the tree: who may include whom (CONTRIBUTING.md, "Where a line belongs").

    base <- {proto, kernels} <- session <- {client, server}
    inside kernels a stack of floors (KERNELS): each knows those below it. Rooms of one floor do not know each other,
    and a room of a plan knows no room of another plan on any floor
    inside client {abi, linked, remote} know what lies beside them, and not each other
    inside server {memory, sockets, telemetry} <- {store, tier, http}; {store, tier} <- work; store <- attach;
    {store, attach/peers, chunks/room} <- rpc <- {web, nodes}; {attach, work, http} <- config <- daemon/tiers <- doctor
    <- daemon. Rooms of the store are a stack (STORE): each knows those before it. Rooms of tier, work, attach, chunks
    and rpc have a row each in ALLOWED.

A plan's types are its folder's: no file of the product outside of it names them, but tables that list every plan's
(TABLES), which have ops of their own for plans that a build may leave out (OPTIONAL). Tests and benchmarks may.

Usage: check_layers.py ROOT. Prints every forbidden include and name, and ends with `N passed, N failed`.
"""
import collections
import pathlib
import re
import sys

import check_type_names

# Rooms of server/store from the bottom up: each may include those before it, and none behind it.
STORE = ["options", "reports", "pages", "requests", "books", "references", "prompts", "space", "codecs", "lookups",
         "sequences", "openings"]
# Engines of the remote tier: every folder of server/tier but those of the disk and of what they share.
ENGINES = sorted({folder.name for folder in (pathlib.Path(__file__).parents[2] / "server/tier").iterdir()
                  if folder.is_dir()} - {"disk", "remote"})
BELOW_STORE = ["base", "kernels", "proto", "server/memory"]
# folder -> folders it may include from (itself always). The longest matching folder counts. A folder that is named
# stands for its rooms, too, but in rows of its own rooms, where it is what lies in no room.
ALLOWED = {
    "base": [],
    "proto": ["base"],
    "kernels": ["base"],
    "session": ["base", "kernels", "proto"],
    "client/cli": ["base", "client/include", "client", "proto"],
    "client/abi": ["base", "client", "client/include", "kernels"],
    "client/linked": ["base", "client", "client/include", "kernels", "proto", "session"],
    "client/remote": ["base", "client", "client/include", "proto", "session"],
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
    **{f"server/tier/{engine}": ["base", "server/memory", "server/telemetry", "server/tier",
                                 f"server/tier/{engine}/client", "server/tier/remote"] for engine in ENGINES},
    **{f"server/tier/{engine}/client": ["base", "server/tier"] for engine in ENGINES},
    "server/work": ["base", "kernels", "server/memory", "server/store", "server/telemetry"],
    "server/work/rates": ["base"],
    "server/work/tiers": ["base", "kernels", "server/store", "server/telemetry", "server/tier", "server/work/rates"],
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
# Floors of kernels from the bottom up, each a pattern of its files: a file includes from its own room and from floors
# below. Where a floor has several rooms, a group is the room's name: that of its plan, in most cases.
KERNELS = [
    r"kernels/cpu/[^/]+",
    r"kernels/pages/[^/]+",
    # What a plan is made of: a header for each of its parts, in the folder of the plan that owns it, and their list.
    r"kernels/plan/(?:built_plans|plan_kinds|index_options|stored_options)\.h"
    r"|kernels/plans/(?:plan_list|\w+/\w+_options)\.h",
    r"kernels/cuda/batches/[^/]+",
    r"kernels/cuda/warps/[^/]+",
    r"kernels/ops/.+",
    r"kernels/plans/(\w+)/ops/.+",
    # Tables of ops, of a CPU and of a GPU.
    r"kernels/backend/[^/]+",
    r"kernels/cuda/[^/]+",
    r"kernels/rows/[^/]+",
    r"kernels/plan/[^/]+",
    r"kernels/segment/[^/]+",
    r"kernels/(select|codec)/[^/]+",
    r"kernels/plans/(\w+)/[^/]+",
    # Tables of plans.
    r"kernels/plans/[^/]+",
    r"kernels/step/[^/]+",
    r"kernels/step/gpu/memory/[^/]+",
    r"kernels/step/gpu/frame/[^/]+",
    r"kernels/step/gpu/lists/[^/]+",
    r"kernels/blocks/[^/]+",
    r"kernels/plans/(\w+)/gpu/[^/]+",
    r"kernels/step/gpu/[^/]+",
]
# (who, what): includes that are forbidden wherever ALLOWED allows them.
FORBIDDEN = [
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
SYSTEM_FORBIDDEN = [
    (r"^(client/(?!cli|remote)|kernels|session|base)", r"^(grpc|google/protobuf|spdlog|jemalloc|torch)"),
    (r"^(?!.*\.(cu|cuh)$)(?!kernels/cuda/|tests/cuda/|bench/cuda/).*", r"^(cuda|cuda_runtime|cublas)"),
]
# Plans that a build may leave out (kernels/plan/built_plans.h).
OPTIONAL = {"mosaickv", "sekv"}
PLAN = re.compile(r"kernels/plans/(\w+)/")
# What lists types of plans, and which.
TABLES = {"kernels/cuda/cuda_ops.h": re.compile(r"\w+Batch")}
INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]', re.MULTILINE)


def folder_rule(path):
    matches = [f for f in ALLOWED if path == f or path.startswith(f + "/")]
    return max(matches, key=len) if matches else None


def reaches(path, folder, target):
    """Whether `folder`, from which the file at `path` may include, has the header `target`."""
    if not target.startswith(folder + "/"):
        return False
    return not path.startswith(folder + "/") or folder_rule(target) == folder


def floor(path):
    """(index, room) of the floor of KERNELS on which the file at `path` lies, with None for its only room; None:
    it lies on none."""
    for index, pattern in enumerate(KERNELS):
        if found := re.fullmatch(pattern, path):
            return index, found.group(1) if found.re.groups else None
    return None


def climbs(path, target):
    """Whether the file at `path`, in kernels, must not know the header `target`, which is there, too."""
    if floor(path) is None or floor(target) is None:
        return True
    (here, room), (there, other) = floor(path), floor(target)
    apart = None not in (room, other) and room != other
    both_plans = path.startswith("kernels/plans/") and target.startswith("kernels/plans/")
    return there > here or apart and (here == there or both_plans)


def violations(path, text):
    rule = folder_rule(path)
    if path.startswith("server/") and path.rpartition("/")[0] != rule:
        yield f"{path} lies in a room without a row in ALLOWED"
    if path.startswith("kernels/") and floor(path) is None:
        yield f"{path} lies on no floor of KERNELS"
    for kind, target in INCLUDE.findall(text):
        if kind == "<":
            for where, what in SYSTEM_FORBIDDEN:
                if re.search(where, path) and re.search(what, target):
                    yield f"{path} includes <{target}>"
            continue
        for where, what in FORBIDDEN:
            if re.search(where, path) and re.search(what, target):
                yield f"{path} includes \"{target}\""
        if path.startswith("kernels/") and target.startswith("kernels/") and climbs(path, target):
            yield f"{path} includes \"{target}\", which is no floor below it"
        allowed = ALLOWED.get(rule, ["*"])
        inside = target.split("/")[0] in {f.split("/")[0] for f in ALLOWED}
        if inside and "*" not in allowed:
            if not any(reaches(path, a, target) for a in [rule, *allowed]):
                yield f"{path} includes \"{target}\", not in {allowed}"


def types_of_plans(files):
    """type -> the plan whose headers alone declare it; files: path -> text."""
    declared = collections.defaultdict(set)
    for path, text in files.items():
        plan = PLAN.match(path)
        if path.endswith(".h") and not path.endswith("-inl.h") and not path.startswith(("tests/", "bench/")):
            for _, name in check_type_names.types(text):
                declared[name].add(plan.group(1) if plan else "")
    return {name: min(plans) for name, plans in declared.items() if len(plans) == 1 and "" not in plans}


def foreign_names(path, text, owners):
    """(type, plan) of what the file at `path` names and is another plan's."""
    if path.startswith(("tests/", "bench/")):
        return
    own, table = PLAN.match(path), TABLES.get(path)
    for name in sorted(set(re.findall(r"\w+", check_type_names.NOISE.sub(" ", text))) & owners.keys()):
        listed = table and table.fullmatch(name) and not (name.endswith("Batch") and owners[name] in OPTIONAL)
        if not (own and own.group(1) == owners[name]) and not listed:
            yield name, owners[name]


def sources(root):
    return [p for folder in ("base", "proto", "kernels", "session", "client", "server", "tests", "bench")
            for p in sorted((root / folder).rglob("*")) if p.suffix in (".h", ".cc", ".cu", ".cuh", ".c")]


def main(root):
    root = pathlib.Path(root)
    files = {str(file.relative_to(root)): file.read_text() for file in sources(root)}
    owners = types_of_plans(files)
    failed = 0
    for path, text in files.items():
        found = list(violations(path, text))
        found += [f"{path} names {name}, a type of kernels/plans/{plan}"
                  for name, plan in foreign_names(path, text, owners)]
        failed += bool(found)
        print("\n".join(found), end="\n" if found else "")
    print(f"{len(files) - failed} passed, {failed} failed")
    return 1 if failed or not files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
