#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# On a GPU machine: unpacks vLLM and kvstrata (pack.sh's OUT) and runs trial.py.
#
#   [VLLM=33] run.sh PACKED [arguments of trial.py]        rows, logs and the table to $OUT; without arguments it only unpacks
#
# PACKED: a site, and of programs.tar.xz (the daemon) and ops.tar.xz (plans over vLLM's blocks) what the call needs.
#
# VLLM: which of PACKED's, 32 (0.32) unless it is given. README.md has the calls that answer all that is asked.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd) packed=$(realpath "$1") version=${VLLM:-32}
work=${WORK:-/tmp/vllm-gpu-site$version}
shift
began=$(date +%s)
if [ ! -e "$work/done" ]; then
  mkdir -p "$work" && tar -C "$work" -xJf "$packed/site$version.tar.xz" & site=$!
  for part in programs ops; do
    [ ! -e "$packed/$part.tar.xz" ] || tar -C "$work" -xJf "$packed/$part.tar.xz" || exit 1
  done
  wait $site || { echo "$packed/site$version.tar.xz is not to be unpacked" >&2; exit 1; }
  python3 -m compileall -q -j 0 "$work/site" >/dev/null 2>&1
  touch "$work/done"
fi
integrations=$here/../../integrations
export PYTHONPATH=$work/site:$integrations/kvstrata/src:$integrations/kvstrata_vllm/src
export KVSTRATAD=$work/bin/kvstratad KVSTRATA_LIBRARY=$work/lib/libkvstrata.so.2 BUNDLE_LIB=$work/lib  # the daemon's
# The machine has no network; vLLM's process group of one is made over the loopback.
export VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=8
export VLLM_CACHE_ROOT=$work/cache TORCHINDUCTOR_CACHE_DIR=$work/inductor TRITON_CACHE_DIR=$work/triton
export OUT=${OUT:-$work/out} PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
echo "kvstrata $(cat "$work/commit"), unpacked after $(($(date +%s) - began)) s, $(nproc) cores"
[ $# -gt 0 ] || exit 0
python3 "$here/trial.py" --seconds $((${LIMIT:-560} - ($(date +%s) - began))) "$@"
