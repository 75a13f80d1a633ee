#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docker/grafana/kvstrata.json as Grafana would take it: the model of a dashboard (panels on a grid of 24 columns that
do not overlap, variables that exist, legends whose labels the query has), and that every panel shows something of a
real daemon: promtool evaluates its queries, recording rules included, over two looks at the daemon's own /metrics.
Between the looks every counter goes up by as much, so that rates and shares are there to be shown.

Usage: dashboard_test.py ROOT DAEMON PROMTOOL. Ends with `N passed, N failed`; without promtool it says SKIPPED.
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(sys.argv[1]).resolve()
sys.path.insert(0, str(ROOT / "tests/monitoring"))
sys.argv[1:], ARGUMENTS = sys.argv[2:], sys.argv[1:]

from page_test import UnixConnection, get, served  # noqa: E402

COLUMNS = 24
TYPES = {"row", "stat", "timeseries"}  # those that the checks below know
UNITS = {"none", "short", "bytes", "Bps", "s", "ops", "percentunit"}
LOOK_S, STEPS = 15, 40
# What a daemon without clients has no series of, and why.
NOT_SHOWN = {"Memory by user": "no user", "Sequences by user": "no user", "Refused by a user's limit": "no user",
             "Memory: its limit": "a cgroup without a limit"}


def variables_of(text):
    """Without Grafana's own."""
    return {name for name in re.findall(r"\$\{?(\w+)\}?", text) if not name.startswith("__")}


def model_faults(dashboard):
    for key, kind in (("title", str), ("uid", str), ("schemaVersion", int), ("panels", list), ("templating", dict)):
        if not isinstance(dashboard.get(key), kind):
            yield f"the dashboard has no {key}"
    names = [v["name"] for v in dashboard["templating"]["list"]]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] not in ("datasource", "query") or not variable.get("query"):
            yield f"variable {variable['name']}: neither a data source nor a query"
    for name in sorted(variables_of(json.dumps(dashboard)) - set(names)):
        yield f"${name} is no variable of the dashboard"
    ids = [panel["id"] for panel in dashboard["panels"]]
    if len(set(ids)) != len(ids):
        yield "two panels have one id"
    for panel in dashboard["panels"]:
        yield from (f"panel {panel['id']} '{panel['title']}': {fault}" for fault in panel_faults(panel))


def panel_faults(panel):
    place = panel["gridPos"]
    if any(not isinstance(place[k], int) or place[k] < 0 for k in "xywh") or place["x"] + place["w"] > COLUMNS:
        yield f"stands outside the grid: {place}"
    if panel["type"] not in TYPES:
        yield f"is of the unknown type {panel['type']}"
    if panel["type"] == "row":
        if place["w"] != COLUMNS or place["h"] != 1 or panel.get("targets") or panel["panels"]:
            yield "a row is a line of its own, and its panels follow it"
        return
    if not panel.get("description") or panel["datasource"] != {"type": "prometheus", "uid": "${datasource}"}:
        yield "has no description, or another data source"
    defaults = panel["fieldConfig"]["defaults"]
    if defaults["unit"] not in UNITS:
        yield f"has the unknown unit {defaults['unit']}"
    steps = [step["value"] for step in defaults.get("thresholds", {}).get("steps", [])]
    if steps and (steps[0] is not None or steps[1:] != sorted(steps[1:])):
        yield f"its thresholds do not begin with null and rise: {steps}"
    if panel["type"] == "stat" and not panel["options"]["reduceOptions"]["calcs"]:
        yield "says of no value which it shows"
    refs = [target["refId"] for target in panel["targets"]]
    if not refs or len(set(refs)) != len(refs):
        yield f"its queries are none, or of one name: {refs}"


def overlaps(panels):
    taken = {}
    for panel in panels:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                other = taken.setdefault((x, y), panel)
                if other is not panel:
                    yield f"panels '{other['title']}' and '{panel['title']}' overlap"
                    return


def page_of(daemon, folder):
    process, _ = served(daemon, folder, f"unix:{folder}/http.sock")
    try:
        return get(UnixConnection(f"{folder}/http.sock"))[1]
    finally:
        process.terminate()
        process.wait(30)


def series_of(page):
    """promtool's notation: the look, and from then on a look whose counters are 7 higher."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)", page, re.MULTILINE))
    for line in page.splitlines():
        found = re.fullmatch(r"([a-z_]+)(?:\{(.*)\})? (\S+)", line)
        if line.startswith("#") or not found:
            continue
        name, labels, value = found.groups()
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        rises = 7 if kinds.get(name) == "counter" or kinds.get(base) == "histogram" else 0
        own = ",".join(filter(None, ['instance="a"', 'job="kvstrata"', labels]))
        yield {"series": f"{name}{{{own}}}", "values": f"{value}x4 {float(value) + rises}x{STEPS}"}


def evaluate(promtool, series, queries, folder):
    """What promtool got for each query: it is told to expect nothing, and says what there was."""
    tests = [{"interval": f"{LOOK_S}s", "input_series": series,
              "promql_expr_test": [{"expr": query, "eval_time": "2m", "exp_samples": []}]} for query in queries]
    found = []
    for test in tests:
        path = pathlib.Path(folder) / "test.yml"
        path.write_text(json.dumps({"rule_files": [str(ROOT / "docker/prometheus/recording.yml")], "tests": [test]}))
        done = subprocess.run([promtool, "test", "rules", str(path)], capture_output=True, text=True, timeout=60,
                              check=False)
        said = done.stdout + done.stderr
        got = re.search(r"got:(.*?)(?:\n\n|\Z)", said, re.DOTALL)
        assert (done.returncode == 0) == (got is None), said
        found.append(got[1] if got else "")
    return found


def is_shown(got):
    values = re.findall(r"(?:\}|^\s*)\s*([-+.\w]+)\s*$", got, re.MULTILINE)
    return any(value.lower() != "nan" for value in values)


def query_of(target):
    return target["expr"].replace("$instance", "a").replace("$__rate_interval", "5m")


def query_faults(dashboard, daemon, promtool, folder):
    targets = [(panel, target) for panel in dashboard["panels"] for target in panel.get("targets", [])]
    series = list(series_of(page_of(daemon, folder)))
    assert len(series) > 200, series
    for (panel, target), got in zip(targets, evaluate(promtool, series, [query_of(t) for _, t in targets], folder)):
        title, legend = panel["title"], target["legendFormat"]
        may_be_empty = {title, f"{title}: {legend}"} & set(NOT_SHOWN)
        if not is_shown(got) and not may_be_empty:
            yield f"panel '{title}' ({legend}) shows nothing: {target['expr']}: {got}"
        for label in re.findall(r"\{\{\s*(\w+)\s*\}\}", legend):
            if got and f"{label}=" not in got:
                yield f"panel '{title}': its legend wants the label {label}, and the query has none: {got}"


def main():
    daemon, promtool = ARGUMENTS[1:]
    if not os.access(promtool, os.X_OK):
        print(f"SKIPPED: no promtool at {promtool}; docker/fetch_promtool.sh {promtool}")
        return 0
    dashboard = json.loads((ROOT / "docker/grafana/kvstrata.json").read_text())
    wrong = list(model_faults(dashboard)) + list(overlaps(dashboard["panels"]))
    with tempfile.TemporaryDirectory(prefix="kvs-board-") as folder:
        os.chmod(folder, 0o755)
        wrong += list(query_faults(dashboard, daemon, promtool, folder))
    print("\n".join(wrong))
    print(f"{len(dashboard['panels']) - len(wrong)} passed, {len(wrong)} failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
