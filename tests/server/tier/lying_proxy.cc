// SPDX-License-Identifier: Apache-2.0
#include "tests/server/tier/lying_proxy.h"

namespace kvstrata {

std::optional<std::string> LyingProxy::OnValue(const std::string& truth, bool* cut) {
  std::string value = truth;
  const uint64_t what = random_() % 100;
  if (what < 15) {
    value[8 + random_() % (value.size() - 10)] ^= static_cast<char>(1U << random_() % 8);
    ++flips_;
  } else if (what < 16) {
    value.resize(random_() % value.size());
    *cut = true;
    ++cuts_;
  } else if (what < 35 && !earlier_.empty()) {
    value = earlier_[random_() % earlier_.size()];
    swaps_ += value != truth;
  }
  if (earlier_.size() < 200) {
    earlier_.push_back(truth);
  } else {
    earlier_[random_() % 200] = truth;
  }
  return value;
}

}  // namespace kvstrata
