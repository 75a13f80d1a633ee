// SPDX-License-Identifier: Apache-2.0
// LabelCap: at most so many values of a label, for what peers name: the first ones that come keep
// their names for good, all others are "other" together. So no peer makes series without end, and
// what a counter of "other" sums never leaves it.
//
// Thread-safety: any thread. Cost: a look-up in a set under a short lock.
#ifndef KVSTRATA_SERVER_WEB_LABEL_CAP_H_
#define KVSTRATA_SERVER_WEB_LABEL_CAP_H_

#include <cstddef>
#include <set>
#include <string>
#include <string_view>

#include "base/sync.h"

namespace kvstrata {

class LabelCap {
 public:
  static constexpr std::string_view kOther = "other";

  explicit LabelCap(size_t most) : most_(most) {}

  // `value`, or kOther.
  std::string_view Of(std::string_view value) KVS_EXCLUDES(mu_) {
    MutexLock lock(mu_);
    if (names_.contains(value)) return value;
    if (names_.size() == most_) return kOther;
    return *names_.emplace(value).first;
  }

 private:
  const size_t most_;
  Mutex mu_;
  std::set<std::string, std::less<>> names_ KVS_GUARDED_BY(mu_);
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_WEB_LABEL_CAP_H_
