# Tests of the daemon's own parts.
kvs_test(server_ring_test ring_test.cc LIBS kvs_shm Threads::Threads)
kvs_test(server_attach_test attach_test.cc LIBS kvs_attach)
kvs_test(server_unix_listener_test unix_listener_test.cc LIBS kvs_attach)
kvs_test(server_config_test config_test.cc LIBS kvs_config)
kvs_test(server_daemon_test daemon_test.cc LIBS kvs_shm Threads::Threads LABELS rpc)
target_compile_definitions(server_daemon_test PRIVATE KVSTRATAD="$<TARGET_FILE:kvstratad>")
add_dependencies(server_daemon_test kvstratad)
kvs_test(server_recompress_test recompress_test.cc LIBS kvs_work)
