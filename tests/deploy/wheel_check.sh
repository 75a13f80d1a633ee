#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The wheel in an empty environment beside what vLLM's tests have of protobuf and gRPC, and LMCache: nobody's requirements
# are broken, a step is decoded, the daemon is asked by gRPC.
#   wheel_check.sh WHEEL BUILD
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
wheel=$(realpath "$1") build=$(realpath "$2")
requirements=$here/../../integrations/requirements-vllm.txt
folder=$(mktemp -d)
trap 'kill $daemon 2>/dev/null; rm -rf "$folder"' EXIT
daemon=
${PYTHON:-/usr/bin/python3} -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install $(grep -E '^(protobuf|grpcio|numpy|typing-extensions)==' "$requirements") "$wheel[grpc]"
pip install --no-deps lmcache==0.5.6
# Of LMCache's other requirements, torch among them, nothing is here: what is asked of protobuf, grpcio and numpy counts.
! "$folder/venv/bin/pip" check | grep -E 'kvstrata|has requirement (protobuf|grpcio|numpy)' || exit 1
mkfifo "$folder/ready"
"$build/bin/kvstratad" --socket "$folder/kvstratad.sock" --ready-fd 3 3> "$folder/ready" &
daemon=$!
read -r -n 1 -t 60 < "$folder/ready" || true
cd "$folder"  # no source tree around
env -u KVSTRATA_LIBRARY "$folder/venv/bin/python" "$here/decode.py" "$folder/kvstratad.sock" --grpc
kill "$daemon" && wait "$daemon"
echo "wheel: installed beside $(grep -E '^protobuf==' "$requirements"), decoded"
