#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# On a GPU machine: unpacks vLLM 0.26 (pack.py's OUT) and a bundle (bundle.sh's OUT), tries an operator, runs check.py.
#
#   run.sh PARTS BUNDLE [arguments of check.py]        report to $OUT; SITE: where vLLM goes, /tmp/v26/site
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd) parts=$(realpath "$1") bundle=$(realpath "$2") site=${SITE:-/tmp/v26/site}
shift 2
began=$(date +%s)
[ -d "$site" ] || "$here/install.sh" "$parts" "$site" || exit 1
[ -d "$bundle/bin" ] || tar -C "$bundle" -xJf "$bundle/programs.tar.xz" || exit 1
integrations=$here/../../../integrations
export PYTHONPATH=$site:$integrations/kvstrata/src:$integrations/kvstrata_vllm/src
export KVSTRATA_LIBRARY=$bundle/lib/libkvstrata.so.2 KVSTRATAD=$bundle/bin/kvstratad LD_LIBRARY_PATH=$bundle/lib
# The machine has no network; vLLM's process group of one is made over the loopback.
export VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo OMP_NUM_THREADS=2 TOKENIZERS_PARALLELISM=false
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
echo "kvstrata $(cat "$bundle/commit"), unpacked after $(($(date +%s) - began)) s"
python3 - <<'PROBE' 2>&1 | grep -v ' INFO ' &
import sys

import torch
import triton
import vllm
from vllm import _custom_ops

x, weight, out = (torch.randn(*shape, device="cuda", dtype=torch.float16) for shape in ((8, 1024), (1024,), (8, 1024)))
_custom_ops.rms_norm(out, x, weight, 1e-6)
want = torch.nn.functional.rms_norm(x.float(), (1024,), weight.float(), 1e-6)
print("probe: python", sys.version.split()[0], "torch", torch.__version__, "triton", triton.__version__, "vllm",
      vllm.__version__, "rms_norm is off by", float((out - want).norm() / want.norm()))
PROBE
python3 "$here/check.py" "$@"
code=$?
wait
echo "exit code $code after $(($(date +%s) - began)) s"
exit $code
