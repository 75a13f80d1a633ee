// SPDX-License-Identifier: Apache-2.0
// Lending: what the linked transport does with blocks of an engine's own tensors: has the daemon
// copy those that are sealed, and fills others from pages. Blocks of KVS_MEMORY_PROCESS are staged
// on the way (staged_blocks.h). linked_import.cc, linked_staging.cc.
//
// Ownership: borrows the session's state; free to make. Threads: of the call that uses the
// sequence. Errors: those of the requests, and what a method names.
#ifndef KVSTRATA_CLIENT_LINKED_LINKED_LENDING_H_
#define KVSTRATA_CLIENT_LINKED_LINKED_LENDING_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "client/linked/linked_session.h"

namespace kvstrata::client {

// Blocks of positions from `first` on, and their tokens.
struct SealedBlocks {
  uint32_t first = 0;
  std::span<const int32_t> blocks, tokens;
};

class Lending {
 public:
  explicit Lending(Session::State* session) : session_(*session) {}

  // The model's; made for its first tensor.
  Result<std::shared_ptr<StagedBlocks>> StagedFor(uint64_t model, const LentTensor& tensor,
                                                  const Geometry& geometry);
  Result<uint32_t> Acknowledged(uint64_t sequence);
  Status Seal(uint64_t sequence, const SealedBlocks& all);
  Status SealStaged(Sequence* s, const ImportedModel& model, const SealedBlocks& all);
  // Waits until the daemon reads none of them. What it has not copied by the deadline is never used
  // again.
  void AwaitStaged(Sequence* s);
  // Positions [first, end), which the daemon holds.
  Status CopyToBlocks(Sequence* s, const ImportedModel& model, uint32_t first, uint32_t end,
                      std::span<const int32_t> blocks, void* stream);

 private:
  // One to `most`, waiting for one. IMPORT_QUEUE.
  Result<std::vector<int32_t>> TakeStaged(Sequence* s, StagedBlocks* staged, size_t most);
  void ReleaseStagedOf(Sequence* s);
  void ReleaseStagedOfOthers(const Sequence* s);
  Status CopyPages(const Sequence& s, const ImportedModel& model, uint32_t first, uint32_t end,
                   std::span<const int32_t> blocks, void* stream);

  Session::State& session_;
};

// Releases what the daemon has copied.
void ReleaseStaged(Sequence* s, uint32_t acknowledged);

}  // namespace kvstrata::client

#endif  // KVSTRATA_CLIENT_LINKED_LINKED_LENDING_H_
