# One suite for both recompressors, and the pure rules behind them.
kvs_test(codec_test codec_test.cc LIBS kvs_kernels)
