// SPDX-License-Identifier: Apache-2.0
#include "server/tier/remote/remote_envelope.h"

#include <algorithm>

#include "server/tier/remote/remote_stripes.h"

namespace kvstrata::remote {

bool Begins(const Envelope& envelope, Seal seal) {
  return envelope.magic == Envelope::kMagic && envelope.version == Envelope::kVersion &&
         envelope.seal == seal;
}

bool Sound(const Envelope& envelope) {
  if (envelope.key_bytes == 0 || envelope.key_bytes > kMaxValueKeyBytes) return false;
  if (envelope.buffer_count == 0 || envelope.buffer_count > kMaxValueBuffers) return false;
  const uint64_t bytes = BytesOf(envelope.sizes_view());
  if (std::ranges::find(envelope.sizes_view(), 0u) != envelope.sizes_view().end()) return false;
  return bytes <= kMaxValueBytes && envelope.stripes == StripesOf(bytes) &&
         envelope.stripe < envelope.stripes;
}

}  // namespace kvstrata::remote
