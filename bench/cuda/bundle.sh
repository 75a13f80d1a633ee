#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Makes a relocatable folder with the daemon, libkvstrata.so, libkvstrata_cuda.so, the GPU tests and
# benchmarks, and what they load besides glibc, for a machine that has a GPU and no build of ours
# (Ubuntu 24.04 will do). Programs and libraries are in one archive, which run_gpu.sh unpacks where
# it lies: half of them are gRPC, OpenSSL and protobuf, and shrink to a third.
#
#   bench/cuda/bundle.sh BUILD OUT [TRACE]        then, there: OUT/run_gpu.sh
# TRACE (docs/traces.md): its surprisal goes along, without which sekv is not measured.
set -euo pipefail
build=$1 out=$2
if grep -qs '^KVS_CUDA_OPTIMIZED:BOOL=OFF' "$build/CMakeCache.txt"; then
  echo "bundle: $build has kernels that are not optimised, for nobody to run; take make bundle" >&2
  exit 1
fi
root=$(cd "$(dirname "$0")/../.." && pwd)
rm -rf "$out" && mkdir -p "$out/bin" "$out/lib"
cp "$build"/lib/libkvstrata_cuda.so "$build"/lib/libkvstrata.so.2 "$out/lib/"
cp "$build"/bin/{gpu_tests,kvstratad,libsticky_error.so} "$build"/bin/{cuda,selection,step,chunk,linked}_bench "$out/bin/"
cp "$root"/bench/cuda/{dense_baselines.py,selection_baseline.py,llama_decode.py,compare.py,run_gpu.sh} "$out/"
mkdir -p "$out/tests" "$out/integrations/kvstrata/src/kvstrata"
cp "$root/tests/golden_runner.py" "$out/tests/"
cp "$root"/integrations/kvstrata/src/kvstrata/*.py "$out/integrations/kvstrata/src/kvstrata/"
[ -z "${3:-}" ] || python3 "$root/bench/cuda/surprisal_of.py" "$3" "$out/surprisal.safetensors"
git -C "$root" describe --always --dirty --abbrev=40 --exclude='*' >"$out/commit"
for program in "$out"/bin/*; do
  ldd "$program" | awk '$2 == "=>" && $3 ~ /^\// {print $3}'
done | sort -u | grep -vE '/(libc|libm|libpthread|libdl|librt|ld-linux[^/]*)\.so|libkvstrata' | awk -F/ '!seen[$NF]++' |
  xargs -r cp -L -t "$out/lib"
strip "$out"/bin/* "$out"/lib/*
# No driver, and no library of CUDA's but its runtime, may be needed.
if readelf -d "$out"/bin/* "$out"/lib/* | grep -E 'NEEDED.*lib(cuda\.so|cusolver|cublas|cusparse|nvrtc)'; then
  echo "bundle: one of these is not to be linked" >&2
  exit 1
fi
unpacked=$(du -sm "$out" | cut -f1)
tar -C "$out" -c bin lib | xz -T0 >"$out/programs.tar.xz"
rm -r "$out/bin" "$out/lib"
packed=$(du -sm "$out" | cut -f1)
echo "$out: $packed MB, unpacked $unpacked MB"
if [ "$packed" -gt 24 ]; then
  echo "bundle: more than the 24 MB that it may have" >&2
  exit 1
fi
