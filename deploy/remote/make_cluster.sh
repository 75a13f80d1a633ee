#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# One cluster of servers, half of them replicas: make_cluster.sh PASSWORD_FILE HOST:PORT...
# Called again it changes nothing, but tells servers of each other whose addresses have all changed at once.
# Waits at most PATIENCE seconds (300) for servers that do not answer, and for the cluster.
set -eu
cli=${CLI:-valkey-cli}
# Both names: redis-cli reads the one, newer valkey-cli the other.
REDISCLI_AUTH=$(cat "$1")
VALKEYCLI_AUTH=$REDISCLI_AUTH
export REDISCLI_AUTH VALKEYCLI_AUTH
shift
waited=0
fail() { echo "make_cluster.sh: $1" >&2; exit 1; }
ask() { at=$1; shift; timeout 5 "$cli" --user admin -h "${at%:*}" -p "${at##*:}" "$@" 2>&1; }
pause() {
  waited=$((waited + 1))
  [ $waited -le "${PATIENCE:-300}" ] || fail "$1"
  sleep 1
}

servers=''
for name in "$@"; do
  # Servers are introduced to each other by their addresses: CLUSTER MEET takes no names.
  while ! { address=$(getent ahostsv4 "${name%:*}" | cut -d' ' -f1 | head -n 1) && [ -n "$address" ] &&
            [ "$(ask "$address:${name##*:}" ping)" = PONG ]; }; do
    pause "$name does not answer: $(ask "$name" ping)"
  done
  servers="$servers $address:${name##*:}"
done
first=${servers# } first=${first%% *}

# shellcheck disable=SC2086  # a list of addresses
if ask "$first" cluster info | grep -q '^cluster_slots_assigned:0'; then
  # Its own waits for the servers' agreement are without an end.
  timeout 120 "$cli" --user admin --cluster create $servers --cluster-replicas 1 --cluster-yes ||
    fail "no cluster was made; once servers are as they began (CLUSTER RESET HARD on each), call again"
else
  for server in $servers; do
    ask "$first" cluster meet "${server%:*}" "${server##*:}"
  done
fi
for server in $servers; do
  until ask "$server" cluster info | grep -q '^cluster_state:ok' &&
        [ "$(ask "$server" cluster info | tr -d '\r' | sed -n 's/^cluster_known_nodes://p')" = $# ] &&
        [ "$(ask "$server" cluster nodes | grep -c slave)" = $(($# / 2)) ] &&
        ! ask "$server" cluster nodes | grep -q 'fail'; do
    pause "$server sees no whole cluster: $(ask "$server" cluster nodes)"
  done
done
ask "$first" cluster nodes
