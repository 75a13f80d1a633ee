// SPDX-License-Identifier: Apache-2.0
// What libstdc++.a of Debian 12 wants of glibc 2.36, so that libkvstrata runs with 2.35 too: images
// of vLLM have that (Ubuntu 22.04). std::random_device calls it; nothing outside this library sees
// it (version.script).
#include <stdlib.h>
#include <sys/random.h>

#include <cstdint>

#include "base/check.h"

// As its manual says: four bytes of the kernel's generator; never fails.
extern "C" uint32_t arc4random() noexcept {
  uint32_t value = 0;
  KVS_CHECK(getrandom(&value, sizeof(value), 0) == sizeof(value));
  return value;
}
