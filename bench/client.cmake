# The ring, attach and sequence opening: kvs_* on a real daemon.
if(KVS_SERVER)
  kvs_bench(ring_bench ring_bench.cc LIBS kvstrata_client kvs_store)
  add_dependencies(ring_bench kvstratad)
endif()
