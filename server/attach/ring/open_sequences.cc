// SPDX-License-Identifier: Apache-2.0
#include "server/attach/ring/open_sequences.h"

#include <algorithm>
#include <string>
#include <utility>

#include "server/telemetry/log.h"

namespace kvstrata {

void OpenSequences::NoteEvent(uint64_t sequence, const Status& status) {
  if (status.ok()) return;
  LogEvent(LogLevel::kDebug, "event_refused",
           {{"session", session_}, {"sequence", sequence}, {"reason", status.reason()}});
  const auto found = sequences_.find(sequence);
  if (found != sequences_.end() && found->second.error.ok()) found->second.error = status;
}

Status OpenSequences::TakeEventError(uint64_t sequence) {
  const auto found = sequences_.find(sequence);
  if (found == sequences_.end()) {
    return NotFound("SEQUENCE_UNKNOWN",
                    "sequence " + std::to_string(sequence) + " is not open in this session");
  }
  return std::exchange(found->second.error, OkStatus());
}

void OpenSequences::NoteTokens(uint64_t sequence, uint64_t tokens) {
  const auto found = sequences_.find(sequence);
  if (found == sequences_.end()) return;
  found->second.tokens = std::max(found->second.tokens, static_cast<uint32_t>(tokens));
}

uint32_t OpenSequences::TokensOf(uint64_t sequence) const {
  const auto found = sequences_.find(sequence);
  return found == sequences_.end() ? 0 : found->second.tokens;
}

uint64_t OpenSequences::WorkToClose(uint64_t of_sequence, uint64_t of_token) const {
  uint64_t work = 0;
  for (const auto& [id, sequence] : sequences_) work += of_sequence + of_token * sequence.tokens;
  return work;
}

}  // namespace kvstrata
