#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Proves docker/prometheus and docker/grafana: Prometheus' own promtool parses every rule and every query of the
dashboard, they ask for metrics and labels that the table has, every alert fires on its fault, and none does where all
is well.

Usage: rules_test.py ROOT PROMTOOL. Ends with `N passed, N failed`; without promtool it says SKIPPED.
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(sys.argv[1]).resolve()
PROMTOOL = sys.argv[2]
sys.path.insert(0, str(ROOT / "tests" / "tree"))

from check_metrics import read_table  # noqa: E402

RULES = [ROOT / "docker/prometheus/recording.yml", ROOT / "docker/prometheus/alerts.yml"]
DASHBOARD = ROOT / "docker/grafana/kvstrata.json"
INTERVAL_S = 15
HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")
ADDED = {"instance", "job", "le"}  # labels of a scrape, and of a histogram
OTHERS = {"up": set()}  # metrics of Prometheus itself
NAME = re.compile(r"\b(?:[a-z_]+:)?(?:kvstrata_\w+(?::\w+)?|process_\w+|up)\b(?!\()")
SELECTOR = re.compile(r"(\w+)\s*=?[=~!]+\s*\"")
BY = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")


def rules_of(path):
    """(name, kind, expr) of each rule: the files here have one `expr:` a rule, on a line or folded by >-."""
    rules, lines = [], path.read_text().splitlines()
    for i, line in enumerate(lines):
        if found := re.match(r"\s*- (record|alert): (\S+)", line):
            rules.append([found[2], found[1], ""])
        if found := re.match(r"(\s*)expr: (.*)", line):
            text, depth = found[2], len(found[1])
            if text == ">-":
                rest = lines[i + 1:]
                end = next((j for j, r in enumerate(rest) if len(r) - len(r.lstrip()) <= depth), len(rest))
                text = " ".join(r.strip() for r in rest[:end])
            rules[-1][2] = text
    return [tuple(r) for r in rules]


def queries_of(dashboard):
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield f"panel '{panel['title']}'", target["expr"].replace("$__rate_interval", "5m")


def labels_of_metrics():
    labels = {row[1]: set(row[4]) for row in read_table(ROOT)}
    for _, name, kind, _, own, _ in read_table(ROOT):
        if kind == "histogram":
            labels.update({name + part: set(own) for part in HISTOGRAM_PARTS})
    return {**labels, **OTHERS}


def unknown(where, expr, labels):
    """What the expression asks for and nobody tells."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', expr)
    names = {n for n in NAME.findall(bare)}
    for name in sorted(names - set(labels)):
        yield f"{where}: there is no metric {name}"
    known = ADDED.union(*(labels.get(n, set()) for n in names))
    asked = set(SELECTOR.findall(bare)) | {x.strip() for by in BY.findall(bare) for x in by.split(",")}
    for label in sorted(asked - known):
        yield f"{where}: no metric of it has a label {label}"
    if not names:
        yield f"{where}: asks for nothing"


def promtool(*words):
    done = subprocess.run([PROMTOOL, *map(str, words)], capture_output=True, text=True, timeout=120, check=False)
    return "" if done.returncode == 0 else f"promtool {words[0]} {words[1]}: {done.stdout}{done.stderr}"


def parse_all(exprs, folder):
    """Each expression as a rule of its own: promtool parses rules only."""
    rules = [{"record": f"query:{i}", "expr": expr} for i, (_, expr) in enumerate(exprs)]
    path = folder / "queries.yml"
    path.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    return promtool("check", "rules", path)


# Series of a daemon, as (metric with labels, values in promtool's notation).
I = 'instance="a",job="kvstrata"'
OPEN = f'kvstrata_duration_seconds_bucket{{{I},what="open",le='
WELL = [
    (f"up{{{I}}}", "1x400"), (f'kvstrata_degraded{{{I},what="disk"}}', "0x400"),
    (f"kvstrata_snapshot_age_seconds{{{I}}}", "0.5x400"),
    (f'kvstrata_refusals_total{{{I},reason="POOL_EXHAUSTED"}}', "3x400"),
    (f'kvstrata_refusals_total{{{I},reason="SEQUENCE_UNKNOWN"}}', "0+1x400"),
    (f'kvstrata_pool_used_bytes{{{I},tier="device",device="g"}}', "99x400"),
    (f'kvstrata_pool_retired_bytes{{{I},tier="device",device="g"}}', "0x400"),
    (f'kvstrata_pool_cached_bytes{{{I},tier="device",device="g"}}', "60x400"),
    (f'kvstrata_pool_capacity_bytes{{{I},tier="device",device="g"}}', "100x400"),
    (f"kvstrata_pins_used_bytes{{{I}}}", "10x400"), (f"kvstrata_pins_limit_bytes{{{I}}}", "100x400"),
    (f"kvstrata_disk_corrupt_values_total{{{I}}}", "2x400"), (f"kvstrata_disk_io_errors_total{{{I}}}", "2x400"),
    (f"kvstrata_disk_deadlines_total{{{I}}}", "0x400"), (f"kvstrata_disk_breaker_open{{{I}}}", "0x400"),
    (f'kvstrata_remote_breaker_open{{{I},server="s:1"}}', "0x400"),
    (f'kvstrata_remote_unwritten_values_total{{{I},why="failed"}}', "5x400"),
    (f'kvstrata_remote_unwritten_values_total{{{I},why="full"}}', "0+5x400"),
    (f"kvstrata_disk_stopped_segments{{{I}}}", "0x400"), (f"kvstrata_draining{{{I}}}", "1x100 0x300"),
    (f"kvstrata_lookup_tokens_total{{{I}}}", "0+100x400"), (f"kvstrata_lookup_hit_tokens_total{{{I}}}", "0+80x400"),
    (f'kvstrata_ring_full_total{{{I},ring="reply"}}', "0x50 7x350"),
    (OPEN + '"1.0"}', "0+100x400"), (OPEN + '"4.0"}', "0+100x400"), (OPEN + '"+Inf"}', "0+100x400"),
    (f'kvstrata_recall_ratio{{{I},plan="quest"}}', "0.9x400"), (f'kvstrata_recall_ratio{{{I},plan="chess"}}', "0x400"),
    (f'kvstrata_recall_samples_total{{{I},plan="quest"}}', "5x400"),
    (f'kvstrata_recall_samples_total{{{I},plan="chess"}}', "0x400"),
    (f"kvstrata_cgroup_charged_bytes{{{I}}}", "90x400"), (f"kvstrata_cgroup_limit_bytes{{{I}}}", "0x400"),
    (f"process_open_fds{{{I}}}", "100x400"), (f"process_max_fds{{{I}}}", "1000x400"),
]
# alert -> the series that differ, the minute at which it fires, its labels beside instance and job.
FAULTS = {
    "KvstrataDown": ([(f"up{{{I}}}", "1x20 0x380")], 10, {}),
    "KvstrataDegraded": ([(f'kvstrata_degraded{{{I},what="disk"}}', "0x20 1x380")], 10, {"what": "disk"}),
    "KvstrataNumbersOld": ([(f"kvstrata_snapshot_age_seconds{{{I}}}", "0+15x400")], 5, {}),
    "KvstrataOutOfMemory": ([(f'kvstrata_refusals_total{{{I},reason="POOL_EXHAUSTED"}}', "0x20 1x380")], 6,
                            {"reason": "POOL_EXHAUSTED"}),
    "KvstrataRefusals": ([(f'kvstrata_refusals_total{{{I},reason="SEQUENCE_UNKNOWN"}}', "0+60x400")], 20, {}),
    "KvstrataPoolNearlyFull": ([(f'kvstrata_pool_cached_bytes{{{I},tier="device",device="g"}}', "1x400")], 10,
                               {"tier": "device", "device": "g"}),
    "KvstrataPinsNearlyFull": ([(f"kvstrata_pins_used_bytes{{{I}}}", "95x400")], 10, {}),
    "KvstrataCorruptValue": ([(f"kvstrata_disk_corrupt_values_total{{{I}}}", "0x40 1x360")], 15, {}),
    "KvstrataHitMismatch": ([(f'kvstrata_verified_hits_total{{{I},result="mismatch"}}', "0x40 1x360")], 15,
                            {"result": "mismatch"}),
    "KvstrataDiskErrors": ([(f"kvstrata_disk_deadlines_total{{{I}}}", "0x40 2x360")], 15, {}),
    "KvstrataDiskLeftAlone": ([(f"kvstrata_disk_breaker_open{{{I}}}", "0x20 1x380")], 10, {}),
    "KvstrataRemoteServerLeftAlone": ([(f'kvstrata_remote_breaker_open{{{I},server="s:1"}}', "0x20 1x380")], 20,
                                      {"server": "s:1"}),
    "KvstrataRemoteWritesFail": ([(f'kvstrata_remote_unwritten_values_total{{{I},why="failed"}}', "0x20 0+3x380")], 20,
                                 {"why": "failed"}),
    "KvstrataDrainingLong": ([(f"kvstrata_draining{{{I}}}", "1x400")], 70, {}),
    "KvstrataHitsFell": ([(f"kvstrata_lookup_hit_tokens_total{{{I}}}", "0+80x300 24000+1x100")], 96, {}),
    "KvstrataRingFull": ([(f'kvstrata_ring_full_total{{{I},ring="reply"}}', "0+3x400")], 15, {"ring": "reply"}),
    "KvstrataSlowOpens": ([(OPEN + '"1.0"}', "0+90x400")], 30, {"what": "open"}),
    "KvstrataRecallLow": ([(f'kvstrata_recall_ratio{{{I},plan="quest"}}', "0.6x400")], 40, {"plan": "quest"}),
    "KvstrataMemoryNearLimit": ([(f"kvstrata_cgroup_limit_bytes{{{I}}}", "92x400")], 10, {}),
    "KvstrataDescriptorsNearLimit": ([(f"process_open_fds{{{I}}}", "900x400")], 10, {}),
}
# Sums over a daemon's series drop `job`.
WITHOUT_JOB = {"KvstrataRefusals", "KvstrataHitsFell", "KvstrataSlowOpens"}


def severity_of(alert):
    text = RULES[1].read_text()
    return re.search(r"alert: " + alert + r"\n.*?severity: (\w+)", text, re.DOTALL)[1]


def scenario(name, series, minutes, alerts):
    """alerts: name -> the labels that it fires with; None: it must not."""
    tests = [{"eval_time": f"{minutes}m", "alertname": alert, "exp_alerts": [] if labels is None else
              [{"exp_labels": {"severity": severity_of(alert), **labels}}]} for alert, labels in alerts.items()]
    return {"name": name, "interval": f"{INTERVAL_S}s",
            "input_series": [{"series": s, "values": v} for s, v in series.items()], "alert_rule_test": tests}


def fire_all(alerts, folder):
    """One scenario for each fault, in which no other alert fires, and one without."""
    # Annotations name values, which are the rules' own business.
    bare = folder / "alerts.yml"
    bare.write_text(re.sub(r"\n        annotations:(?:\n          .*)+", "", RULES[1].read_text()))
    tests = [scenario("all is well", dict(WELL), 90, dict.fromkeys(alerts))]
    for alert, (series, minutes, labels) in FAULTS.items():
        labels = {"instance": "a", "job": "kvstrata", **labels}
        if alert in WITHOUT_JOB:
            del labels["job"]
        expected = {**dict.fromkeys(alerts), alert: labels}
        tests.append(scenario(alert, {**dict(WELL), **dict(series)}, minutes, expected))
    path = folder / "tests.yml"
    path.write_text(json.dumps({"rule_files": [str(RULES[0]), str(bare)], "tests": tests}))
    return promtool("test", "rules", path)


def main():
    if not os.access(PROMTOOL, os.X_OK):
        print(f"SKIPPED: no promtool at {PROMTOOL}; docker/fetch_promtool.sh {PROMTOOL}")
        return 0
    rules = [rule for path in RULES for rule in rules_of(path)]
    queries = list(queries_of(json.loads(DASHBOARD.read_text())))
    labels = labels_of_metrics()
    # A recorded metric has any label that its expression names.
    labels.update({name: {"tier", "device", "what", "reason", "plan"} for name, kind, _ in rules if kind == "record"})
    exprs = [(name, expr) for name, _, expr in rules] + queries
    wrong = [w for where, expr in exprs for w in unknown(where, expr, labels)]
    alerts = [name for name, kind, _ in rules if kind == "alert"]
    wrong += [f"{a}: no fault here makes it fire" for a in alerts if a not in FAULTS]
    wrong += [f"{a}: there is no such alert" for a in FAULTS if a not in alerts]
    with tempfile.TemporaryDirectory() as folder:
        checks = [promtool("check", "rules", *RULES), parse_all(exprs, pathlib.Path(folder)),
                  promtool("check", "config", ROOT / "docker/prometheus/prometheus.yml"),
                  fire_all(alerts, pathlib.Path(folder))]
    wrong += [check for check in checks if check]
    print("\n".join(wrong))
    print(f"{len(exprs) + len(FAULTS) + len(checks) - len(wrong)} passed, {len(wrong)} failed")
    return 1 if wrong or not rules or not queries else 0


if __name__ == "__main__":
    sys.exit(main())
