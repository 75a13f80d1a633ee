#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Debian's packages in a bare Debian 12: installed, the unit's command run, a step decoded by python3-kvstrata and by the
# wheel, seen in `kvstrata top`, /metrics and the status page; upgraded with a changed configuration, purged. Root; needs
# no systemd that runs, and mounts nothing outside.
#   debs_check.sh DEBS WHEEL FOLDER     FOLDER keeps the bare root's archive
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
debs=$(realpath "$1") wheel=$(realpath "$2")
mkdir -p "$3"
folder=$(realpath "$3")
if [ "${KVS_NAMESPACE:-}" != own ]; then
  exec env KVS_NAMESPACE=own unshare --mount --pid --fork --kill-child "$0" "$debs" "$wheel" "$folder"
fi
mount --make-rprivate /
root=$folder/root
rm -rf "$root" && mkdir -p "$root"
[ -f "$folder/debian12.tar" ] || { mmdebstrap --quiet --variant=minbase bookworm "$folder/part.tar" \
  http://deb.debian.org/debian && mv "$folder/part.tar" "$folder/debian12.tar"; }
tar -xf "$folder/debian12.tar" -C "$root"
for file in /etc/resolv.conf /etc/hosts /etc/apt/apt.conf.d; do [ ! -e $file ] || cp -rT $file "$root$file"; done
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mkdir -p "$root/tmp/debs" "$root/tmp/new" "$root/tmp/wheels"
cp "$debs"/*.deb "$root/tmp/debs"
cp "$wheel" "$root/tmp/wheels"
cp "$here/run_unit.py" "$here/decode.py" "$root/tmp"
python3 -m pip -q download --no-deps --only-binary :all: --python-version 3.11 -d "$root/tmp/wheels" numpy==2.2.6 xxhash==4.1.0
inside() { chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive "$@"; }
expect() { [ "$2" = "$3" ] || { echo "debs: $1 is '$2', not '$3'"; exit 1; }; }
socket=/run/kvstrata/kvstratad.sock

version=$(dpkg-deb -f "$debs"/kvstrata_*.deb Version)
# The next release of the same packages: another version, another default configuration.
for deb in "$debs"/*.deb; do
  tree=$(mktemp -d "$root/tmp/tree.XXXXXX")
  dpkg-deb -R "$deb" "$tree"
  sed -i "s/$version/&+next/g" "$tree/DEBIAN/control"
  [ ! -f "$tree/etc/kvstrata/kvstratad.toml" ] || echo '# of the next release' >> "$tree/etc/kvstrata/kvstratad.toml"
  dpkg-deb --root-owner-group -Znone -b "$tree" "$root/tmp/new" > /dev/null
  rm -rf "$tree"
done

inside apt-get -q update
inside sh -c 'apt-get -q install -y --no-install-recommends /tmp/debs/*.deb python3-grpcio python3-protobuf python3-venv'
expect "the user's shell" "$(inside getent passwd kvstrata | cut -d: -f6,7)" /var/lib/kvstrata:/usr/sbin/nologin
expect "the unit" "$(inside systemctl is-enabled kvstratad)" enabled
sed -i 's|^# path = .*|path = "/var/lib/kvstrata/disk"|; s|^# budget_bytes.*|budget_bytes = "300MiB"\nsegment_bytes = "64MiB"|
  s|^# listen = .*|listen = "127.0.0.1:9465"|' "$root/etc/kvstrata/kvstratad.toml"
inside python3 -m venv /tmp/venv
inside /tmp/venv/bin/pip -q install --no-index --find-links /tmp/wheels numpy xxhash kvstrata
inside python3 /tmp/run_unit.py "kvstrata --socket $socket status" \
  "python3 /tmp/decode.py $socket --grpc" \
  "/tmp/venv/bin/python /tmp/decode.py $socket --page 127.0.0.1:9465 -- kvstrata --socket $socket top --once" \
  "setpriv --reuid=kvstrata --regid=kvstrata --clear-groups kvstrata --socket $socket health" \
  "! setpriv --reuid=nobody --regid=nogroup --clear-groups kvstrata --socket $socket health"
expect "what the disk tier left" "$(inside stat -c %U:%a /var/lib/kvstrata/disk)" kvstrata:700

inside sh -c 'apt-get -q install -y --no-install-recommends -o Dpkg::Options::=--force-confold /tmp/new/*.deb'
# shellcheck disable=SC2016  # dpkg-query's own expansion
expect "the version" "$(inside dpkg-query -W -f '${Version}' kvstrata)" "$version+next"
expect "the changed configuration" "$(grep -c '300MiB\|next release' "$root/etc/kvstrata/kvstratad.toml")" 1
inside python3 /tmp/run_unit.py "/tmp/venv/bin/python /tmp/decode.py $socket"

inside apt-get -q purge -y kvstrata libkvstrata2 libkvstrata-remote2 libkvstrata-dev python3-kvstrata
left=$(cd "$root" && find etc usr lib/systemd var/lib -path var/lib/dpkg -prune -o -path var/lib/apt -prune -o -name '*kvstrat*' -print)
expect "what purging left" "$left" ""
rm -rf "$root"/tmp/*
echo "debs: installed, started, decoded, upgraded, purged"
