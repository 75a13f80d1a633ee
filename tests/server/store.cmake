# memory resources, the extent allocator, and the store.
kvs_test(memory_test memory_test.cc LIBS kvs_memory)
kvs_test(epochs_test epochs_test.cc LIBS kvs_store)
kvs_test(prefix_test prefix_test.cc LIBS kvs_store)
kvs_test(store_test store_test.cc LIBS kvs_store)
kvs_test(far_memory_test far_memory_test.cc LIBS kvs_store)
kvs_test(audit_test audit_test.cc LIBS kvs_store)
kvs_test(recall_audit_test recall_audit_test.cc LIBS kvs_store)
kvs_test(store_extents_test store_extents_test.cc LIBS kvs_store)
