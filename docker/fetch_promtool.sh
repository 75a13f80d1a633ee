#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Puts promtool, which checks rules and queries of docker/prometheus, at FILE: out of Debian's package
# `prometheus` (19 MB), which is not installed, because that would start a server.
# Usage: docker/fetch_promtool.sh FILE. No root where package lists are there.
set -eu
file=$1
[ -x "$file" ] && exit 0
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
apt-get -q download prometheus || {
  sudo=
  [ "$(id -u)" = 0 ] || sudo=sudo
  $sudo apt-get -q update
  apt-get -q download prometheus
}
dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool
cd - >/dev/null
mkdir -p "$(dirname "$file")"
install -m 755 "$folder/usr/bin/promtool" "$file"
