#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Several calls of run.sh at once, on the GPUs of one machine: what is compared is of one call, so of one GPU.
#
#   [VLLM=33] side_by_side.sh PACKED JOBS      said at the end; rows and logs in $OUT/side-by-side.tar, a folder a job
#
# JOBS is bash: `job GPUS LIMIT NAME [arguments of trial.py]` each, GPUS as 0 or 2,3. Jobs of the same GPUS run one after the
# other, all others at once. LIMIT: seconds from the begin of all by which the job has ended;
# leave 30 s to the command's own.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd) packed=$(realpath "$1") jobs=$(realpath "$2") version=${VLLM:-32}
site=/tmp/vllm-gpu-site$version out=/tmp/vllm-gpu-out began=$(date +%s)
gpus_there=$(nvidia-smi --list-gpus | wc -l)
cores_a_gpu=$(($(getconf _NPROCESSORS_ONLN) / gpus_there))
declare -A queues

job() {
  local gpus=$1
  shift
  queues[$gpus]+="call $gpus$(printf ' %q' "$@")"$'\n'
}

# Its own caches of compiled graphs: two processes that fill one can read what is half written.
call() {
  local gpus=$1 limit=$2 name=$3 first=${1%%,*} work=/tmp/vllm-gpu-work$version-$1 started
  shift 3
  mkdir -p "$work" "$out/$name"
  ln -sfn "$site"/{site,bin,lib,commit,done} "$work/"
  local count=$(($(tr -cd , <<<"$gpus" | wc -c) + 1))
  started=$(date +%s)
  CUDA_VISIBLE_DEVICES=$gpus WORK=$work OUT=$out/$name LIMIT=$((limit - (started - began))) \
    taskset -c $((first * cores_a_gpu))-$(((first + count) * cores_a_gpu - 1)) \
    "$here/run.sh" "$packed" --folder "/tmp/vllm-gpu-$gpus" "$@" >"$out/$name/said.txt" 2>&1
  echo "$name: exit code $?, $(($(date +%s) - started)) s" >>"$out/ended.txt"
  xz -T0 -f "$out/$name"/engines.txt 2>/dev/null
}

# Every half a minute, too: a command that ends before its jobs loses what they have said since.
keep() { tar -C "$out" -cf "$OUT/side-by-side.new" . && mv "$OUT/side-by-side.new" "$OUT/side-by-side.tar"; }

rm -rf "$out" && mkdir -p "$out"
WORK=$site "$here/run.sh" "$packed" >"$out/unpacked.txt" 2>&1 || { cat "$out/unpacked.txt"; exit 1; }
. "$jobs"
for gpus in "${!queues[@]}"; do
  [ "${gpus##*,}" -lt "$gpus_there" ] || { echo "$jobs: GPU ${gpus##*,}, and there are $gpus_there" >&2; exit 1; }
  (eval "${queues[$gpus]}") &
done
(while sleep 30; do keep; done) &
keeper=$!
for job in $(jobs -p); do [ "$job" = "$keeper" ] || wait "$job"; done
kill "$keeper"
head -n 3 "$out/unpacked.txt"
for said in "$out"/*/said.txt; do
  echo "=== $(basename "$(dirname "$said")")"
  grep -av "Writing model\|NVIDIA\|^kvstrata " "$said" | tail -n 40 | cut -c1-400
done
cat "$out/ended.txt"
keep
