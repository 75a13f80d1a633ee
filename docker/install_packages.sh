#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs docker/packages.apt, or the list that is given, where something of it is missing. Root, or
# a user with sudo.
set -eu
list=${1:-$(dirname "$0")/packages.apt}
missing=
for package in $(sed 's/#.*//' "$list"); do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
sudo=
[ "$(id -u)" = 0 ] || sudo=sudo
echo "installing:$missing"
$sudo apt-get -q update
# shellcheck disable=SC2086  # a list of names on purpose
$sudo env DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends $missing
