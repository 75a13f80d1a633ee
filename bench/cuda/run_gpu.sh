#!/bin/bash
# Runs a bundle (bundle.sh) on a machine with a GPU: tests, then benchmarks, then a short table.
# Results go to $OUT, or to the bundle's folder. Exit code: that of the tests.
#
#   run_gpu.sh [tests] [memcheck] [bench] [dense]      nothing named: tests bench dense
#   memcheck: the smallest tests again under compute-sanitizer
# ONLY restricts cuda_bench to ids with that prefix, DENSE_ONLY the baselines (1x128,8x32).
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here}
export LD_LIBRARY_PATH=$here/lib
steps=" ${*:-tests bench dense} "
failed=0
wants() { [[ $steps == *" $1 "* ]]; }

nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,temperature.gpu --format=csv,noheader
if wants tests; then
  for test in "$here"/bin/*_test; do
    log=$out/$(basename "$test").log
    "$test" --gtest_brief=1 >"$log" 2>&1
    code=$?
    tail -n 1 "$log" | sed "s/^/$(basename "$test"): /"
    [ $code -eq 0 ] || { failed=1; grep -m 40 -E 'Failure|seed|Which|Expected|actual|error' "$log"; }
  done
fi
if wants memcheck; then
  for test in "$here"/bin/*_test; do
    compute-sanitizer --tool memcheck --error-exitcode 9 "$test" --gtest_brief=1 \
      --gtest_filter='*Edge*:*EveryOutput*:*Replays*:*RaggedAndLong*:*StepGraph*' 2>&1 |
      grep -E 'Invalid|ERROR SUMMARY|FAILED|PASSED' | head -20
    [ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
  done
fi
if wants bench; then
  "$here/bin/cuda_bench" --json-out "$out/cuda.json" --only "${ONLY:-}" \
    --commit "$(cat "$here/commit")" --date "$(date +%F)" || failed=1
fi
if wants dense; then
  python3 "$here/dense_baselines.py" --json-out "$out/dense.json" --only "${DENSE_ONLY:-}" || failed=1
  [ -f "$out/cuda.json" ] &&
    python3 "$here/compare.py" "$out/cuda.json" "$out/dense.json" --json-out "$out/cuda-h100.json"
fi
exit $failed
