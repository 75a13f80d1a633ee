// SPDX-License-Identifier: Apache-2.0
#include "kernels/ops/take/take.h"

#include <algorithm>
#include <cmath>

namespace kvstrata {

int32_t Take(const TakeWork& work) {
  int32_t counts[kTakeBins] = {};
  for (int32_t i = 0; i < work.n; ++i) {
    ++counts[(std::bit_cast<uint32_t>(work.votes[i]) & 0x7FFFFFFFu) >> kTakeShift];
  }
  int32_t taken = work.n;
  double room = work.missed;
  for (int32_t bin = 0; taken > 0; ++bin) {
    const double most = std::floor(room / MiddleOf(bin));
    // Also where a vote is no number, or is endless.
    if (!(most >= counts[bin])) {
      taken -= most > 0 ? static_cast<int32_t>(most) : 0;
      break;
    }
    taken -= counts[bin];
    room -= counts[bin] * static_cast<double>(MiddleOf(bin));
  }
  return std::min(taken, work.most);
}

}  // namespace kvstrata
