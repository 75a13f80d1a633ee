#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Packs vLLM (pack.py), the daemon of a build with the libraries that it loads besides glibc, and the CUDA ops, for run.sh.
#
#   pack.sh BUILD OUT [arguments of pack.py]        OUT: a folder that git ignores; its site32.tar.xz is made once
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd) build=$1 out=$2
shift 2
if grep -qs '^KVS_CUDA_OPTIMIZED:BOOL=OFF' "$build/CMakeCache.txt"; then
  echo "pack.sh: $build has kernels that are not optimised, for nobody to run; first: make build CUDA=1" >&2
  exit 1
fi
mkdir -p "$out"
python3 "$here/pack.py" "$out" "$@"
programs=$(mktemp -d)
trap 'rm -r "$programs"' EXIT
mkdir "$programs/bin" "$programs/lib"
cp "$build/bin/kvstratad" "$build/bin/kvstrata" "$programs/bin/"
cp -L "$build/lib/libkvstrata.so.2" "$programs/lib/"
ldd "$programs"/bin/* "$programs/lib/libkvstrata.so.2" | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u |
  grep -vE '/(libc|libm|libpthread|libdl|librt|ld-linux[^/]*)\.so|libkvstrata' | xargs -r cp -L -t "$programs/lib"
strip "$programs"/bin/* "$programs"/lib/*
git -C "$here" describe --always --dirty --abbrev=40 --exclude='*' >"$programs/commit"
tar -C "$programs" -c bin lib commit | xz -T0 >"$out/programs.tar.xz"
rm -r "$programs"/bin "$programs"/lib/*
cp -L "$build/lib/libkvstrata.so.2" "$build/lib/libkvstrata_cuda.so" "$programs/lib/"
strip "$programs"/lib/*
tar -C "$programs" -c lib commit | xz -T0 >"$out/ops.tar.xz"
du -m "$out"/*.tar.xz
