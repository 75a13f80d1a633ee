#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The wheel in empty environments, one beside what vLLM's tests have of protobuf, gRPC and NumPy, one beside what LMCache
# asks of them: pip finds versions that suit both, the wheel's own daemon starts, a step is decoded, the daemon is asked by
# gRPC and by the wheel's CLI.
#   wheel_check.sh WHEEL
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
wheel=$(realpath "$1")
lmcache=lmcache==0.5.6
folder=$(mktemp -d)
daemon=
trap '[ -z "$daemon" ] || kill "$daemon"; rm -rf "$folder"' EXIT
names='protobuf|grpcio|numpy'
of_vllm=$(grep -E "^($names)==" "$here/../../integrations/requirements-vllm.txt")

new() { "${PYTHON:-/usr/bin/python3}" -m venv "$folder/$1"; }
install() { "$folder/$1/bin/pip" --quiet --disable-pip-version-check install "${@:2}"; }
cd "$folder"  # no source tree around
try() { env -u KVSTRATA_LIBRARY "$folder/$1/bin/python" "$here/decode.py" "$folder/kvstratad.sock" --grpc; }

new vllm
# shellcheck disable=SC2086  # a list on purpose
install vllm "${wheel}[grpc]" $of_vllm typing-extensions
mkfifo "$folder/ready"
"$folder/vllm/bin/kvstratad" --socket "$folder/kvstratad.sock" --ready-fd 3 3> "$folder/ready" &
daemon=$!
read -r -n 1 -t 60 < "$folder/ready" || true
try vllm
"$folder/vllm/bin/kvstrata" --socket "$folder/kvstratad.sock" health -q

new lmcache
# The package without what it asks for, torch among it; then of that what counts here.
install lmcache --no-deps $lmcache
"$folder/lmcache/bin/python" - "$names" > "$folder/asked" <<'EOF'
import importlib.metadata
import re
import sys
for line in importlib.metadata.requires("lmcache"):
    if re.match(rf"({sys.argv[1]})\b", line) and ";" not in line:
        print(line)
EOF
install lmcache "${wheel}[grpc]" typing-extensions -r "$folder/asked"
try lmcache

kill "$daemon" && wait "$daemon" && daemon=
echo "wheel: decoded beside vLLM's ${of_vllm//$'\n'/ } and $lmcache's $(tr '\n' ' ' < "$folder/asked")"
