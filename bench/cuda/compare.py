#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Joins the results of cuda_bench and dense_baselines.py: each row gets the best dense time at its shape.

    compare.py OURS.json... DENSE.json [--json-out FILE] [--keep OLD.json] [--dense-out FILE]
Several results of one program (a run for each plan, say) become one. ratio = best dense / ours.
Rows of lists are compared with dense attention over the whole sequence. --keep: rows of an earlier
result that were not measured anew stay, with their own commit and baselines. --dense-out: all dense
rows as a result of their own (suite cuda-dense), each against the best at its shape.
"""
import argparse
import json

# id -> what the row must reach: a ratio, microseconds, or GB/s.
MUST_RATIO = {f"attend_raw/full/b{b}/{k}K": 0.95 for b in (1, 8) for k in (128, 1024)}
for plan, ratios in {"full": (None, 0.95, 0.95), "quest": (2.2, 5.5, 11), "chess": (5, 12, 45),
                     "tokenselect_miss": (None, 1.4, 1.5), "tokenselect_0.9": (None, 6, 12),
                     "sentencekv": (None, 9, 70), "mosaickv": (None, 8, 16),
                     "bits": (None, 4, 7), "sekv": (None, 4, 5.5), "sekv_agreed": (None, 4, 5.5)}.items():
    for length, ratio in zip(("32K", "128K", "1024K"), ratios):
        if ratio:
            MUST_RATIO[f"step/{plan}/b1/{length}"] = MUST_RATIO[f"linked/{plan}/b1/{length}"] = ratio
MUST_RATIO["linked/full/b8/128K"] = MUST_RATIO["linked/full/b8/1024K"] = 0.95
MUST_RATIO["linked/bits/b8/128K"] = 6.5
MUST_RATIO["linked/sentencekv/b8/128K"] = 35  # its bytes grow with the batch
MUST_CALL_US = 12  # CPU time of a linked call outside a graph
MUST_HOST = {"linked/quest/b1/128K/host": 1 / 1.3, "linked/sentencekv/b1/128K/host": 1 / 1.3}
MUST_RATIO |= {"chunk/tokenselect/512of1024K": 20, "chunk/full/512of128K": 0.6}
MUST_US = {"linked/full/b1/1K": 10, "linked/full/b1/4K": 10,
           "attend_raw/full/b1/1K": 10, "attend_raw/full/b1/2K": 10, "attend_raw/full/b1/4K": 10,
           "attend_raw/pages/b1/2048of128K": 8, "attend_raw/tokens/b1/2688of128K": 8,
           "pack/64K": 60000, "flush/32": 15}
MUST_GBPS = {"gather/4KiB/128pages": 45, "gather/4KiB/512pages": 45}


def shape_of(row_id):
    parts = row_id.split("/")
    if parts[0] == "chunk":
        return f"chunk/{parts[2]}"
    return f"full/{parts[2]}/{parts[3].split('of')[-1]}" if len(parts) > 3 else ""


def joined(row, dense):
    row = dict(row)
    if row["id"].endswith("/host"):  # cold pages on the host, against the same steps before
        row["baseline"] = {"name": "all on the GPU", "value": row["on_device_us"]}
        row["ratio"] = row["on_device_us"] / row["value"]
        if row["id"] in MUST_HOST:
            row["must"] = MUST_HOST[row["id"]]
        return row
    best = min((d for d in dense if d["id"] == shape_of(row["id"])), key=lambda d: d["value"],
               default=None)
    if best and not row["id"].endswith(("replay", "call")):
        row["baseline"] = {"name": best["name"], "value": best["value"]}
        row["ratio"] = best["value"] / row["value"]
    if row["id"] in MUST_RATIO and best:
        row["must"] = MUST_RATIO[row["id"]]
    must_us = MUST_CALL_US if row["id"].endswith("call") else MUST_US.get(row["id"])
    if must_us:
        row.update(must=must_us, better="smaller")
        row.pop("ratio", None)
    if row["id"] in MUST_GBPS:
        row["must"] = MUST_GBPS[row["id"]]
    return row


def demand_of_batches(rows):
    """Batch 8 at 128K, where nothing else is said: 0.8 of the ratio that the plan has alone at 1M, or must have."""
    ratios = {row["id"]: row.get("ratio") for row in rows}
    for row in rows:
        alone = row["id"].replace("/b8/128K", "/b1/1024K")
        if row["id"].endswith("/b8/128K") and ratios.get(alone):
            row.setdefault("must", 0.8 * max(ratios[alone], MUST_RATIO.get(alone, 0)))


def with_kept(old, rows):
    """`rows`, and those of an earlier result that they have not, which keep the commit they were measured at."""
    new = {row["id"]: row for row in rows}
    stale = {row["id"]: row | {"commit": row.get("commit", old["commit"])} for row in old["rows"]}
    return list((stale | new).values())


def dense_result(ours, dense):
    rows = []
    for row in dense["rows"]:
        backend = row["name"].removeprefix("torch SDPA ").split()[0].lower()
        best = min((d for d in dense["rows"] if d["id"] == row["id"]), key=lambda d: d["value"])
        rows.append(row | {"id": row["id"].replace("full", backend, 1),
                           "baseline": {"name": best["name"], "value": best["value"]},
                           "ratio": best["value"] / row["value"]})
    context = {"torch": dense["torch"], "flashinfer": dense.get("flashinfer"),
               "notes": "dense attention of one layer, a graph of calls that wait for each other; 32 query heads, "
                        "8 KV heads x 128, bf16; FlashInfer over pages of 16 in random order"}
    return ours | {"suite": "cuda-dense", "device": dense["device"], "context": context, "rows": rows,
                   "command": "bench/cuda/run_gpu.sh dense (make bundle)"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("ours", nargs="+")
    parser.add_argument("dense")
    parser.add_argument("--json-out")
    parser.add_argument("--keep")
    parser.add_argument("--dense-out")
    args = parser.parse_args()
    parts, dense = [json.load(open(file)) for file in args.ours], json.load(open(args.dense))
    ours = parts[0] | {"rows": [row for part in parts for row in part["rows"]]}
    if args.dense_out:
        with open(args.dense_out, "w") as file:
            file.write(json.dumps(dense_result(ours, dense), indent=1) + "\n")
    ours["context"]["torch"] = dense["torch"]
    ours["rows"] = [joined(row, dense["rows"]) for row in ours["rows"]]
    if args.keep:
        ours["rows"] = with_kept(json.load(open(args.keep)), ours["rows"])
    demand_of_batches(ours["rows"])
    for row in ours["rows"]:
        base = row.get("baseline", {})
        against = f"{base['value']:9.2f} us {base['value'] / row['value']:6.2f}x" if base else ""
        rate = f"{row['tflops']:5.0f} TFLOP/s" if "tflops" in row else f"{row.get('tbps', 0):5.2f} TB/s"
        print(f"{row['id']:36} {row['value']:9.2f} {row['unit']} {rate}  {against}")
    if args.json_out:
        with open(args.json_out, "w") as file:
            file.write(json.dumps(ours, indent=1) + "\n")


if __name__ == "__main__":
    main()
