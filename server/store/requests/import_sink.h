// SPDX-License-Identifier: Apache-2.0
// Who fills imported sequences, as the attach server sees it (server/work/importer.h).
//
// Thread-safety: a SessionImport is one thread's (the attach server's); answers come from any.
// Nothing here waits: copies are made later, elsewhere.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/status.h"
#include "server/store/options/session_types.h"
#include "server/store/requests/imported_tensors.h"
#include "server/store/requests/recompress_job.h"

namespace kvstrata {

// Blocks that an engine writes no more until they are acknowledged.
struct SealedBlocks {
  uint64_t sequence = 0;
  uint32_t first = 0;               // position of the first token
  std::span<const int32_t> blocks;  // ids, in order of position
  std::span<const int32_t> tokens;  // ids of all tokens in them
  bool ends_prompt = false;         // PrefillDone, behind all that was sealed before
};

// What one session lends. Destroying it ends all of its copies, and closes its tensors in a thread
// of their own.
class SessionImport {
 public:
  virtual ~SessionImport() = default;
  // Tensors of one layer; those of ImportedTensors::Register, MODEL_UNKNOWN, and PERMISSION_DENIED
  // TENSOR_IPC_USER (a cudaIpc handle does not say whose memory it names: only the daemon's own
  // user may pass one).
  virtual Status Register(uint64_t model, int32_t layer, const LentTensor& keys,
                          const LentTensor& values) = 0;
  // A sequence of a model whose tensors are registered; `tokens` are those that are held.
  virtual void Opened(uint64_t sequence, uint64_t model, std::span<const int32_t> tokens) = 0;
  virtual void Closed(uint64_t sequence) = 0;
  // Queues the copy. Tokens that were sealed before are left out, if they are the same.
  // SEQUENCE_UNKNOWN, TENSORS_MISSING, BLOCK_UNKNOWN; BLOCKS_TOKENS: not as many tokens as the
  // blocks have, or others than were sealed there; BLOCKS_OUT_OF_ORDER: a gap; RESOURCE_EXHAUSTED
  // IMPORT_QUEUE: too much waits. Or why an earlier copy failed, told once: what was sealed behind
  // the acknowledged tokens is forgotten then.
  virtual Status Seal(const SealedBlocks& blocks) = 0;
  // Leading tokens whose blocks are copied, or why a copy failed, told once.
  virtual Result<uint32_t> Acknowledged(uint64_t sequence) = 0;
  // Calls `done` once nothing of the sequence waits: with why a copy failed, or with ABORTED
  // SEQUENCE_CLOSED. At once for a sequence that is not imported.
  virtual void Settle(uint64_t sequence, SettleDone done) = 0;
};

class ImportSink {
 public:
  virtual ~ImportSink() = default;
  // The session ends after its SessionImport, or knows no sequence by then.
  virtual std::unique_ptr<SessionImport> NewSession(uint64_t session, uint32_t device,
                                                    const PeerIdentity& peer) = 0;
};

}  // namespace kvstrata
