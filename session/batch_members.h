// SPDX-License-Identifier: Apache-2.0
// BatchMembers: what both transports refuse of a step's members, checked one after the other. What
// a transport alone knows of a sequence (a use by another thread, a step that it is in) it checks
// between the two functions.
#ifndef KVSTRATA_SESSION_BATCH_MEMBERS_H_
#define KVSTRATA_SESSION_BATCH_MEMBERS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_set>

#include "session/session_sequence.h"

namespace kvstrata {

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

#endif  // KVSTRATA_SESSION_BATCH_MEMBERS_H_
