// SPDX-License-Identifier: Apache-2.0
// Keys that engines give to sequences, so that another process of the user closes what one opened.
#include <algorithm>
#include <string>

#include "server/store/books/books.h"
#include "server/store/books/sequence.h"
#include "server/store/requests/opened_sequence.h"
#include "server/store/sequences/sequences.h"

namespace kvstrata {
namespace {

constexpr size_t kMaxKey = 63;

Status CheckKey(std::string_view key) {
  const auto control = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7F; };
  if (key.size() <= kMaxKey && std::ranges::none_of(key, control)) return OkStatus();
  return InvalidArgument("KEY_TEXT", "key has " + std::to_string(key.size()) +
                                         " bytes; allowed: at most " + std::to_string(kMaxKey) +
                                         " bytes of text without control characters");
}

}  // namespace

Status Sequences::EnterKey(uint64_t session_id, uint64_t sequence, std::string_view key) {
  StoreLock lock(books_.mu);
  KVS_ASSIGN_OR_RETURN(Sequence * s, catalog_.FindSequence(session_id, sequence));
  const auto [found, entered] =
      catalog_.SessionOf(session_id)->tenant->keys.try_emplace(std::string(key), sequence);
  if (entered) {
    s->key = key;
    return OkStatus();
  }
  const Sequence& owner = *catalog_.SequenceOf(found->second);
  return {Code::kAlreadyExists, "KEY_IN_USE",
          "key '" + std::string(key) + "' is sequence " + std::to_string(owner.id) +
              "'s, of session " + std::to_string(owner.session) +
              "; close that, or choose another key"};
}

Result<OpenedSequence> Sequences::GiveKey(uint64_t session, const Result<OpenedSequence>& opened,
                                          std::string_view key) {
  if (!opened.ok() || key.empty()) return opened;
  Status status = CheckKey(key);
  if (status.ok()) status = EnterKey(session, opened->sequence, key);
  if (status.ok()) return opened;
  (void)CloseSequence(session, opened->sequence);
  return status;
}

Result<uint64_t> Sequences::FindKey(uint64_t session_id, std::string_view key) {
  KVS_ASSIGN_OR_RETURN(Session * session, catalog_.FindSession(session_id));
  const auto found = session->tenant->keys.find(key);
  if (found != session->tenant->keys.end()) return found->second;
  return NotFound("KEY_UNKNOWN", "no live sequence of this user has key '" + std::string(key) +
                                     "'; kvstrata seq ls shows those that there are");
}

Status Sequences::CloseKey(uint64_t session_id, std::string_view key) {
  uint64_t owner = 0, sequence = 0;
  {
    StoreLock lock(books_.mu);
    KVS_ASSIGN_OR_RETURN(sequence, FindKey(session_id, key));
    owner = catalog_.SequenceOf(sequence)->session;
  }
  return CloseSequence(owner, sequence);
}

}  // namespace kvstrata
