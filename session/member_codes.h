// MemberCodes: which members of a batch cannot be, the code of each of them, and why the call that
// wanted them fails. The caller's array is written for members that fail only.
#ifndef KVSTRATA_SESSION_MEMBER_CODES_H_
#define KVSTRATA_SESSION_MEMBER_CODES_H_

#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace kvstrata {

class MemberCodes {
 public:
  // codes [members]: Code as int; null: nobody asks.
  explicit MemberCodes(int32_t* codes) : codes_(codes) {}

  void Add(size_t member, const Status& status) {
    if (codes_ != nullptr) codes_[member] = static_cast<int32_t>(status.code());
    if (first_.ok()) first_ = status;
  }
  // What the first member that was added failed with.
  const Status& first() const { return first_; }

 private:
  int32_t* const codes_;
  Status first_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SESSION_MEMBER_CODES_H_
