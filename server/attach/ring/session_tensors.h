// SPDX-License-Identifier: Apache-2.0
// SessionTensors: the tensors that one session's engine lends, and which of its sequences are
// copied from them (server/store/requests/import_sink.h).
//
// Ownership: owns the session's import; null where engines lend none. Thread-safety: whoever serves
// the session.
#ifndef KVSTRATA_SERVER_ATTACH_RING_SESSION_TENSORS_H_
#define KVSTRATA_SERVER_ATTACH_RING_SESSION_TENSORS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <utility>

#include "base/status.h"
#include "proto/ring_messages.h"
#include "server/sockets/descriptor_closer.h"
#include "server/store/requests/import_sink.h"
#include "server/store/store.h"

namespace kvstrata {

class SessionTensors {
 public:
  // A descriptor that the client has sent under this number; -1: it has not. Null: none came.
  using TakeDescriptor = std::function<PassedFd(uint32_t)>;

  SessionTensors(std::unique_ptr<SessionImport> import, TakeDescriptor take_descriptor)
      : import_(std::move(import)), take_descriptor_(std::move(take_descriptor)) {}

  // Those of SessionImport::Register; UNIMPLEMENTED IMPORT_NONE, TENSOR_KIND, TENSOR_HANDLE.
  Status Register(const shm::RegisterTensors& in);
  // Whether tensors of the model are registered.
  bool LendsFor(uint64_t model) const { return models_.contains(model); }

  // A sequence begins or ends. Notes it if it is imported; else nothing happens.
  void Opened(uint64_t model, std::span<const int32_t> tokens, const OpenedSequence& opened);
  void Closed(uint64_t sequence);
  bool Imports(uint64_t sequence) const { return sequences_.contains(sequence); }

  // Those of SessionImport; SEQUENCE_UNKNOWN without one.
  Status Seal(const SealedBlocks& blocks);
  Result<uint32_t> Acknowledged(uint64_t sequence);
  // Calls `then` when what the sequence sealed is copied, or with why it was not.
  void AwaitCopies(uint64_t sequence, SettleDone then);

  // Ends all copies. Nothing is lent any more.
  void End();

 private:
  std::unique_ptr<SessionImport> import_;
  const TakeDescriptor take_descriptor_;
  std::set<uint64_t> sequences_;
  std::set<uint64_t> models_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_ATTACH_RING_SESSION_TENSORS_H_
