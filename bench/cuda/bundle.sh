#!/bin/bash
# Makes a relocatable folder with the daemon, libkvstrata.so, libkvstrata_cuda.so, the GPU tests and
# benchmarks, and what they load besides glibc, for a machine that has a GPU and no build of ours
# (Ubuntu 24.04 will do).
#
#   bench/cuda/bundle.sh BUILD OUT [TRACE]        then, there: OUT/run_gpu.sh
# TRACE (docs/traces.md): its surprisal goes along, without which sekv is not measured.
set -euo pipefail
build=$1 out=$2
root=$(cd "$(dirname "$0")/../.." && pwd)
rm -rf "$out" && mkdir -p "$out/bin" "$out/lib"
cp "$build"/lib/libkvstrata_cuda.so "$build"/lib/libkvstrata.so.0 "$out/lib/"
cp "$build"/bin/{*_cuda,cuda_library,cuda_step}_test "$build"/bin/{cuda,selection,step,chunk,linked}_bench "$build"/bin/kvstratad \
  "$out/bin/"
cp "$root"/bench/cuda/{dense_baselines.py,selection_baseline.py,compare.py,run_gpu.sh} "$out/"
[ -z "${3:-}" ] || python3 "$root/bench/cuda/surprisal_of.py" "$3" "$out/surprisal.safetensors"
git -C "$root" describe --always --dirty --abbrev=40 --exclude='*' >"$out/commit"
for program in "$out"/bin/*; do
  ldd "$program" | awk '$2 == "=>" && $3 ~ /^\// {print $3}'
done | sort -u | grep -vE '/(libc|libm|libpthread|libdl|librt|ld-linux[^/]*)\.so|libkvstrata' |
  xargs -r cp -L -t "$out/lib"
strip "$out"/bin/* "$out"/lib/*
du -sh "$out"
