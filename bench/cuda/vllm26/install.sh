#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Unpacks what pack.py packed into a folder that Python searches, and compiles it.
#
#   install.sh PARTS TO        PARTS: pack.py's OUT, or a folder that parts were copied to one by one
set -euo pipefail
parts=$1 to=$2
mkdir -p "$to"
cat "$parts"/part*/site.tar.xz | tar -C "$to" --strip-components 1 -xJ
python3 -m compileall -q -j 0 "$to" >"$to/compileall.log" 2>&1 || true
echo "$to: $(du -sm "$to" | cut -f1) MB"
