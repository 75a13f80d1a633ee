// SPDX-License-Identifier: Apache-2.0
// Verified hits: positions of held prompts that engines computed anew and compared with what they
// were held for. One that differs means that two models, or two ways to compute, share an identity.
//
// Thread-safety: any thread. Cost: an increment; of one that differs a line in the log
// ("hit_mismatch"), at most kMismatchBurst of them in ten seconds.
#pragma once

#include <cstdint>

namespace kvstrata {

struct VerifiedHit {
  uint64_t session = 0, sequence = 0;
  uint32_t first = 0, tokens = 0;  // positions [first, first + tokens)
  bool equal = false;              // within the engine's tolerance
};

inline constexpr uint32_t kMismatchBurst = 5;

void NoteVerifiedHit(const VerifiedHit& hit);
// So far, in this process.
uint64_t VerifiedHits(bool equal);

}  // namespace kvstrata
