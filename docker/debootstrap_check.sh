#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Executes the Dockerfile's steps in a debootstrap root, where no Docker engine runs: installs the
# package list in a bare Debian 12, builds this checkout there, starts the daemon and asks its health.
# Root; about 10 minutes. Usage: docker/debootstrap_check.sh [FOLDER]
set -euo pipefail
source_dir=$(cd "$(dirname "$0")/.." && pwd)
root=${1:-$(mktemp -d /var/tmp/kvstrata-root.XXXXXX)}
# Where this machine has its packages from; either of the two forms of a sources file may be missing.
mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null |
  sed -n 's/^URIs: *//p; s/^deb \(\[[^]]*\] \)\?\(http[^ ]*\) bookworm main.*/\2/p' |
  sed -n '/\/debian$/{p;q}' || true)
command -v debootstrap >/dev/null || apt-get -q install -y debootstrap
debootstrap --variant=minbase bookworm "$root" "${mirror:-http://deb.debian.org/debian}"
for f in /etc/resolv.conf /etc/hosts; do cp "$f" "$root$f"; done
cp -r /etc/apt/apt.conf.d/. "$root/etc/apt/apt.conf.d/"
[ -f /etc/pip.conf ] && cp /etc/pip.conf "$root/etc/pip.conf"
mkdir -p "$root/src" "$root/run/kvstrata"
git -C "$source_dir" archive HEAD | tar -x -C "$root/src"
for m in proc dev; do mount --rbind "/$m" "$root/$m"; done
trap 'umount -R -l "$root/proc" "$root/dev"' EXIT
chroot "$root" /src/docker/install_packages.sh
# pip trusts whom this machine trusts: a proxy's authority, for example.
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
chroot "$root" make -C /src build
chroot "$root" /bin/bash -euc '
  /src/build/bin/kvstratad --socket /run/kvstrata/kvstratad.sock --ready-fd 3 3> >(read -r -n 1 -t 10 && echo ready) &
  daemon=$!
  for attempt in $(seq 50); do
    /src/build/bin/kvstrata --socket /run/kvstrata/kvstratad.sock --timeout 1s health -q && break
  done
  /src/build/bin/kvstrata --socket /run/kvstrata/kvstratad.sock status
  kill "$daemon" && wait "$daemon"'
echo "debootstrap: built, started, healthy, stopped"
