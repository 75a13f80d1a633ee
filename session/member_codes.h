// SPDX-License-Identifier: Apache-2.0
// MemberCodes: which members of a batch cannot be, the code of each of them, and why the call that
// wanted them fails. The caller's array is written for members that fail only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_set>

#include "base/status.h"
#include "session/session_sequence.h"

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

// What check(member), a Status, says of each of so many members.
template <typename Check>
Status CheckEach(size_t members, int32_t* codes, const Check& check) {
  MemberCodes failed(codes);
  for (size_t i = 0; i < members; ++i) {
    if (const Status status = check(i); !status.ok()) failed.Add(i, status);
  }
  return failed.first();
}

// BatchMembers: what both transports refuse of a step's members, checked one after the other. What
// a transport alone knows of a sequence (a use by another thread, a step that it is in) it checks
// between the two functions.
class BatchMembers {
 public:
  // The next member is this sequence. FAILED_PRECONDITION SEQUENCE_BUSY: it is one already.
  Status Name(uint64_t sequence);
  // It adds so many tokens. INVALID_ARGUMENT: SEQUENCE_TOO_LONG; MODELS_MIXED: the batch has the
  // model of the first member that came here. member: its number in the batch.
  Status Extend(const SessionSequence& s, size_t member, size_t new_tokens);

 private:
  std::unordered_set<uint64_t> named_;
  std::optional<uint64_t> model_;
};

}  // namespace kvstrata
