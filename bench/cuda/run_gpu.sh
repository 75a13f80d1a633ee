#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs a bundle (bundle.sh) on a machine with a GPU: tests, then benchmarks, then a short table.
# Results go to $OUT, or to the bundle's folder. Exit code: that of the tests.
#
#   run_gpu.sh [tests] [golden] [memcheck] [bench] [selection] [steps] [chunk] [linked] [pool] [moves] [remote] [dense] [decode]
#   nothing named: all but memcheck and decode
#   golden: the vectors of the folder $GOLDEN (tests/golden of a source tree: 10 MB that the bundle
#   has no room for); nothing without it
#   memcheck: the smallest tests again under compute-sanitizer: memcheck, racecheck, initcheck
#   dense: torch's dense attentions, and FlashInfer's paged decode where Python finds it (docs/testing.md)
# ONLY restricts cuda_bench to ids with that prefix, DENSE_ONLY the baselines (1x128,8x32).
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here}
[ -d "$here/bin" ] || tar -C "$here" -xJf "$here/programs.tar.xz"
export LD_LIBRARY_PATH=$here/lib
steps=" ${*:-tests golden bench selection steps chunk linked pool moves remote dense} "
failed=0
wants() { [[ $steps == *" $1 "* ]]; }

nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,temperature.gpu --format=csv,noheader
# Suites of the tests, each a process of its own: an error that sticks to the device ends one only.
suites() { "$here/bin/gpu_tests" --gtest_list_tests | grep -oE '^[A-Z][A-Za-z/]*\.$'; }
if wants tests; then
  for suite in $(suites); do
    log=$out/$(tr / - <<<"$suite")log
    "$here/bin/gpu_tests" --gtest_brief=1 --gtest_filter="$suite*" >"$log" 2>&1
    code=$?
    tail -n 1 "$log" | sed "s|^|$suite |"
    [ $code -eq 0 ] || { failed=1; grep -m 40 -E 'Failure|seed|Which|Expected|actual|error' "$log"; }
  done
fi
if wants golden && [ -n "${GOLDEN:-}" ]; then
  KVSTRATA_LIBRARY=$here/lib/libkvstrata.so.2 KVSTRATAD=$here/bin/kvstratad \
    python3 "$here/tests/golden_runner.py" "$GOLDEN" --backend cuda || failed=1
fi
# The cases of each op that take seconds even so; side by side, as the time goes into the CPU.
checked=(
  'AlwaysCuda.*'
  AppendCuda.StepGraphSeesOneLength
  AttendChunkCuda.EveryOutputType
  AttendPackedCuda.PartialsOfOtherOpsAreMerged
  AttendRawCuda.PartialsOfOtherOpsAreMerged
  AttendSpansCuda.LeavesAPartial
  'Observe.*:Importance.*'
  PickBuckets.OfFewBuckets
  'Shapes/Buckets.*/0'
  'CopyRowsCuda.*:MeanQueryCuda.*'
  CascadeCuda.SharesFromNothingToEverything
  CovarianceCuda.OfFewRows
  EigenCuda.EndsOnNaNs
  'PickBitsCuda.OneGraph*:PickBitsCuda.TakesTheSameInTheSecondRound'
  'PickCudaWays.BatchesOfSeveralSizesShareScratch/*'
  PickCuda.ClustersShareScratchWithOtherWays
  PromoteCuda.FollowsASmallBatch
  RotatePackCuda.TiesGoToTheLowerGroup
  ScoreCuda.FeedsPickInOneGraph
  SummarizeCuda.OneGraphServesEveryRange
  TakeCuda.PickTakesOfEachListWhatItSays
  VoteBitsCuda.MakesSharesOfAllAttention
  VoteCuda.VotesForUnitsByTheirBounds
  CudaStep.AFewStepsOfEverySelector
)
# check TOOL FILTER: one line, and what the tool found.
check() {
  local log found
  log=$(mktemp)
  timeout "${CHECK_SECONDS:-120}" compute-sanitizer --tool "$1" --error-exitcode 9 "$here/bin/gpu_tests" --gtest_brief=1 \
    --gtest_filter="$2" >"$log" 2>&1
  local code=$?
  found=$(grep -E 'SUMMARY' "$log" || echo "no summary, exit code $code")
  echo "$1 $2: ${found#=========}"
  [ $code -eq 0 ] || grep -m 20 -E '=========|FAILED|Failure' "$log"
  grep -qE '^\[  PASSED  \] [1-9]' "$log" || { echo "$2 names no test"; return 1; }
  return $code
}
if wants memcheck; then
  for tool in memcheck racecheck initcheck; do
    running=()
    for filter in "${checked[@]}"; do
      check $tool "$filter" & running+=($!)
    done
    for one in "${running[@]}"; do wait "$one" || failed=1; done
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
for suite in pool moves remote; do
  wants $suite || continue
  "$here/bin/linked_bench" --suite $suite --json-out "$out/cuda-$suite-h100.json" "${stamp[@]}" || failed=1
done
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
    python3 "$here/compare.py" "$out/$suite.json" "$out/dense.json" --json-out "$out/$name" \
      --dense-out "$out/cuda-dense-h100.json"
  done
fi
# A model's decode loop, with transformers' modules; batch 1 in the mode in which dense attention is fastest there.
if wants decode; then
  export PYTHONPATH=$here/integrations/kvstrata/src KVSTRATA_LIBRARY=$here/lib/libkvstrata.so.2 KVSTRATAD=$here/bin/kvstratad
  python3 "$here/llama_decode.py" --check || failed=1
  python3 "$here/llama_decode.py" --compiled max-autotune-no-cudagraphs --batches 1 --json-out "$out/decode-b1.json" "${stamp[@]}" || failed=1
  python3 "$here/llama_decode.py" --compiled default --json-out "$out/decode.json" "${stamp[@]}" || failed=1
fi
exit $failed
