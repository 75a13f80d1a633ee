// SPDX-License-Identifier: Apache-2.0
// CopyVerified without a copy, for tests that ask only whether an extent's bytes are what was
// written.
#ifndef KVSTRATA_TESTS_KERNELS_VERIFY_EXTENT_H_
#define KVSTRATA_TESTS_KERNELS_VERIFY_EXTENT_H_

#include "kernels/codec/extent.h"

namespace kvstrata {

inline Status VerifyExtent(std::span<const std::byte> extent) {
  return CopyVerified(extent, [](std::span<const std::byte>) { return OkStatus(); });
}

}  // namespace kvstrata

#endif  // KVSTRATA_TESTS_KERNELS_VERIFY_EXTENT_H_
