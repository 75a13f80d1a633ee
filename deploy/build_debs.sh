#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Debian's packages of what `make build` made, judged by lintian: build_debs.sh BUILD OUT. Wants deploy/debian.apt.
set -euo pipefail
source=$(cd "$(dirname "$0")/.." && pwd)
build=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
rm -rf "${out:?}"/*
# From a copy, since debhelper writes into its source. A checkout's files, committed or not.
cd "$source"
mkdir "$out/kvstrata"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --no-dereference -t "$out/kvstrata"
cd "$out/kvstrata"
# Debian's tools alone, whatever Python comes first elsewhere.
PATH=/usr/sbin:/usr/bin:/sbin:/bin KVS_BUILD=$build dpkg-buildpackage --build=binary --no-sign --no-check-builddeps
cd ..
lintian --fail-on error,warning ./*.changes
rm -rf kvstrata
ls ./*.deb
