// SPDX-License-Identifier: Apache-2.0
// CopyVerified: an extent that came from disk or network is checked while it is copied. It is
// larger than a cache, so summing all of it first would read it from memory twice.
//
// Threads: pure but for `copy`. Cost: one pass over the extent, beside what `copy` takes.
#ifndef KVSTRATA_KERNELS_CODEC_EXTENT_COPY_H_
#define KVSTRATA_KERNELS_CODEC_EXTENT_COPY_H_

#include <cstddef>
#include <functional>
#include <span>

#include "base/status.h"

namespace kvstrata {

// Takes the next bytes, an empty piece among them.
using ExtentCopier = std::function<Status(std::span<const std::byte>)>;

// Hands all of `extent` to `copy`, in order, and answers as VerifyExtent does, or as `copy` did.
// What was copied counts only where the answer is OK.
Status CopyVerified(std::span<const std::byte> extent, const ExtentCopier& copy);

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_CODEC_EXTENT_COPY_H_
