// SPDX-License-Identifier: Apache-2.0
// Op take: how many of the largest votes to take so that those that are left sum to at most
// `missed` (docs/spec/bits.md 4): what a plan's max_missed makes of votes.
//
// Votes are counted by bins of a sixteenth of an octave or less: the upper bits of the fp32. Each
// counts as the middle of its bin, at most 3.2 % off. Bins are left from the smallest on while they
// fit into `missed`, and of the next one as many votes as fit. So the answer is whole numbers and
// one short sum in fp64 in a fixed order: the same on every backend for the same votes. It is no
// more than most.
//
// Cost: reads the votes once; 16 KB of stack, no allocation. Any thread.
#pragma once

#include <bit>
#include <cstdint>

namespace kvstrata {

inline constexpr int32_t kTakeShift = 19;  // bits of an fp32 below those that name its bin
inline constexpr int32_t kTakeBins = 1 << (31 - kTakeShift);

// What a vote of the bin counts as. Bins of what is no finite number come last.
constexpr float MiddleOf(int32_t bin) {
  const auto first = static_cast<uint32_t>(bin) << kTakeShift;
  return std::bit_cast<float>(first | 1u << (kTakeShift - 1));
}

struct TakeWork {
  const float* votes = nullptr;  // [n], 0 or more
  int32_t n = 0;
  int32_t most = 0;   // to take, 0 or more
  double missed = 0;  // the sum that may be left
};

int32_t Take(const TakeWork& work);

}  // namespace kvstrata
