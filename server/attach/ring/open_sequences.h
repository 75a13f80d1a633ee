// SPDX-License-Identifier: Apache-2.0
// OpenSequences: the sequences that one session has open, as its ring knows them: the first error
// of each one's events, and about how many tokens it covers.
//
// Events have no answer: the first error of a sequence's events is the answer to the next request
// on it that could fail, so that nothing is lost silently. Thread-safety: whoever serves the
// session.
#ifndef KVSTRATA_SERVER_ATTACH_RING_OPEN_SEQUENCES_H_
#define KVSTRATA_SERVER_ATTACH_RING_OPEN_SEQUENCES_H_

#include <cstdint>
#include <map>

#include "base/status.h"

namespace kvstrata {

class OpenSequences {
 public:
  // `session` is for the log.
  explicit OpenSequences(uint64_t session) : session_(session) {}

  void Open(uint64_t sequence) { sequences_.try_emplace(sequence); }
  void Close(uint64_t sequence) { sequences_.erase(sequence); }
  void CloseAll() { sequences_.clear(); }

  void NoteEvent(uint64_t sequence, const Status& status);
  // The error of the sequence's events, told once; SEQUENCE_UNKNOWN when it is not open here.
  Status TakeEventError(uint64_t sequence);

  // Its table covers as many tokens, or more.
  void NoteTokens(uint64_t sequence, uint64_t tokens);
  uint32_t TokensOf(uint64_t sequence) const;
  // What closing all of them takes, at so much a sequence and a token.
  uint64_t WorkToClose(uint64_t of_sequence, uint64_t of_token) const;

 private:
  struct Sequence {
    Status error;         // the first of its events since it was told
    uint32_t tokens = 0;  // that its table covers, about: what closing or forking it costs
  };

  const uint64_t session_;
  std::map<uint64_t, Sequence> sequences_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_ATTACH_RING_OPEN_SEQUENCES_H_
