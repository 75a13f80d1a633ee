# SPDX-License-Identifier: Apache-2.0
# The ring, attach and sequence opening: kvs_* on a real daemon.
if(KVS_SERVER)
  kvs_bench(ring_bench ring_bench.cc LIBS kvstrata_client kvs_store)
  add_dependencies(ring_bench kvstratad)
endif()
# Look-ups of prefixes, in a store of one's own.
if(KVS_SERVER)
  kvs_bench(lookup_bench lookup_bench.cc LIBS kvs_work kvs_store)
endif()
