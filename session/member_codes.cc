// SPDX-License-Identifier: Apache-2.0
#include "session/member_codes.h"

#include <limits>
#include <string>

namespace kvstrata {

Status BatchMembers::Name(uint64_t sequence) {
  if (named_.insert(sequence).second) return OkStatus();
  return FailedPrecondition(
      "SEQUENCE_BUSY", "sequence " + std::to_string(sequence) + " is a member of the batch twice");
}

Status BatchMembers::Extend(const SessionSequence& s, size_t member, size_t new_tokens) {
  if (!model_) model_ = s.model;
  const int32_t have = s.state->tokens();
  if (new_tokens > static_cast<size_t>(std::numeric_limits<int32_t>::max() - have)) {
    return InvalidArgument("SEQUENCE_TOO_LONG", "members[" + std::to_string(member) + "] has " +
                                                    std::to_string(new_tokens) + " tokens after " +
                                                    std::to_string(have) +
                                                    "; a sequence has at most 2^31 - 1");
  }
  if (s.model == *model_) return OkStatus();
  return InvalidArgument("MODELS_MIXED", "sequence " + std::to_string(s.id) + " is of model " +
                                             std::to_string(s.model) + ", the batch of model " +
                                             std::to_string(*model_) + "; begin a step for each");
}

}  // namespace kvstrata
