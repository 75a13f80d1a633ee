#!/bin/bash
# Runs a bundle (bundle.sh) on a machine with a GPU: tests, then benchmarks, then a short table.
# Results go to $OUT, or to the bundle's folder. Exit code: that of the tests.
#
#   run_gpu.sh [tests] [memcheck] [bench] [selection] [steps] [chunk] [linked] [dense]   nothing named: all but memcheck
#   memcheck: the smallest tests again under compute-sanitizer
# ONLY restricts cuda_bench to ids with that prefix, DENSE_ONLY the baselines (1x128,8x32).
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here}
export LD_LIBRARY_PATH=$here/lib
steps=" ${*:-tests bench selection steps chunk linked dense} "
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
export KVSTRATA_COMMIT=$(cat "$here/commit")
stamp=(--commit "$KVSTRATA_COMMIT" --date "$(date +%F)")
spans=(--surprisal "$here/surprisal.safetensors")
if wants bench; then
  "$here/bin/cuda_bench" --json-out "$out/cuda.json" --only "${ONLY:-}" "${stamp[@]}" || failed=1
fi
if wants selection; then
  python3 "$here/selection_baseline.py" >"$out/topk.txt" || failed=1
  "$here/bin/selection_bench" --json-out "$out/cuda-selection-h100.json" --baseline "$out/topk.txt" || failed=1
fi
if wants steps; then
  "$here/bin/step_bench" --json-out "$out/steps.json" "${spans[@]}" "${stamp[@]}" || failed=1
fi
if wants chunk; then
  "$here/bin/chunk_bench" --json-out "$out/chunk.json" "${stamp[@]}" || failed=1
fi
if wants linked; then
  "$here/bin/linked_bench" --json-out "$out/linked.json" "${spans[@]}" "${stamp[@]}" || failed=1
fi
if wants dense && [ -f "$out/chunk.json" ]; then
  python3 "$here/dense_baselines.py" --json-out "$out/dense-chunk.json" --chunks 128,1024 || failed=1
  python3 "$here/compare.py" "$out/chunk.json" "$out/dense-chunk.json" --json-out "$out/cuda-chunk-h100.json"
fi
if wants dense; then
  python3 "$here/dense_baselines.py" --json-out "$out/dense.json" --only "${DENSE_ONLY:-}" || failed=1
  for suite in cuda steps linked; do
    [ -f "$out/$suite.json" ] || continue
    name=cuda-$suite-h100.json
    [ "$suite" = cuda ] && name=cuda-h100.json
    python3 "$here/compare.py" "$out/$suite.json" "$out/dense.json" --json-out "$out/$name"
  done
fi
exit $failed
