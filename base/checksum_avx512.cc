// SPDX-License-Identifier: Apache-2.0
#include "base/checksum_kernels.h"

namespace kvstrata {

const ChecksumKernels kAvx512Checksums = {XXH3_64bits,  XXH3_64bits_update,  XXH3_64bits_digest,
                                          XXH3_128bits, XXH3_128bits_update, XXH3_128bits_digest};

}  // namespace kvstrata
