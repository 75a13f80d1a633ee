// SPDX-License-Identifier: Apache-2.0
// Stands where somebody put it under the name of libkvstrata_cuda.so: tells that it was loaded, and
// from where. It has no table, so that whoever loads it goes no further.
#include <dlfcn.h>

#include <cstdio>

__attribute__((constructor)) static void Tell() {
  Dl_info info{};
  dladdr(reinterpret_cast<void*>(&Tell), &info);
  std::fprintf(stderr, "loaded: %s\n", info.dli_fname);
}
