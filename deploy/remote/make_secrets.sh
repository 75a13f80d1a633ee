#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The secrets of a remote tier, in three folders, for those that read them: make_secrets.sh FOLDER
#   daemons/remote.secret, remote.password    every kvstratad's remote.secret_file and remote.password_file
#   servers/users.acl, replication.conf       every server's: hashes of passwords, and the replicas' own
#   admin/password                            of the user `admin`, who makes the cluster
# Files have mode 0400. By root they become DAEMONS' and SERVERS', USER:GROUP each: by default the images' users, as
# compose mounts them.
set -eu
if [ $# -ne 1 ] || [ -e "$1" ]; then
  echo "make_secrets.sh: name one folder that does not exist yet, not '${1:-}'" >&2
  exit 2
fi
daemons=${DAEMONS:-10001:10001} servers=${SERVERS:-10002:10002}
umask 077
new() { head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n'; }
hash() { printf %s "$1" | sha256sum | cut -d' ' -f1; }
kvstrata=$(new) replica=$(new) admin=$(new)
mkdir -p "$1/daemons" "$1/servers" "$1/admin"
new > "$1/daemons/remote.secret"
printf '%s\n' "$kvstrata" > "$1/daemons/remote.password"
printf '%s\n' "$admin" > "$1/admin/password"
cat > "$1/servers/users.acl" << END
user default reset off
user kvstrata reset on #$(hash "$kvstrata") ~kv1:* +get +set +getrange +strlen +unlink +scan +info +ping +cluster +readonly +asking
user replica reset on #$(hash "$replica") +psync +replconf +ping
user admin reset on #$(hash "$admin") ~* &* +@all
END
printf 'masteruser replica\nmasterauth %s\n' "$replica" > "$1/servers/replication.conf"
chmod 0400 "$1"/*/*
[ "$(id -u)" != 0 ] || { chmod 0711 "$1"; chown -R "$daemons" "$1/daemons"; chown -R "$servers" "$1/servers" "$1/admin"; }
