// SPDX-License-Identifier: Apache-2.0
// Imports: jobs that fill imported sequences from an engine's tensors (import_job.h).
//
// Ownership: a job's hold keeps its pages; it is released exactly once. Thread-safety: all
// methods, from any thread; one job of a sequence at a time. Cost: of copies of what lies in a pool
// that the host cannot reach.
#ifndef KVSTRATA_SERVER_STORE_SEQUENCES_IMPORTS_H_
#define KVSTRATA_SERVER_STORE_SEQUENCES_IMPORTS_H_

#include <cstdint>
#include <span>

#include "base/status.h"
#include "server/store/options/store_lock.h"
#include "server/store/requests/import_job.h"

namespace kvstrata {

struct Books;
class Devices;
class PageHolds;
struct Sequence;
class SessionCatalog;
class StepEvents;

class Imports {
 public:
  Imports(Books& books, SessionCatalog& catalog, Devices& devices, PageHolds& holds,
          StepEvents& steps);

  // Room for `tokens` behind those that are committed. FAILED_PRECONDITION SEQUENCE_OWNED,
  // SEQUENCE_TOO_LONG, POOL_EXHAUSTED, MEMORY_EXHAUSTED, COPY_FAILED.
  Result<ImportJob> BeginImport(uint64_t session, uint64_t sequence, uint32_t tokens)
      KVS_EXCLUDES(store_lock);
  // Commits `tokens`, whose rows the job wrote, and index rows up to `indexed_tokens`. What fails
  // (the sequence was closed, say) commits nothing.
  Status FinishImport(const ImportJob& job, std::span<const int32_t> tokens,
                      uint32_t indexed_tokens) KVS_EXCLUDES(store_lock);
  void AbandonImport(const ImportJob& job) KVS_EXCLUDES(store_lock);

 private:
  void KeepPages(const Sequence& s, ImportJob* job) KVS_REQUIRES(store_lock);
  Status StageImport(ImportJob* job) KVS_EXCLUDES(store_lock);

  Books& books_;
  SessionCatalog& catalog_;
  Devices& devices_;
  PageHolds& holds_;
  StepEvents& steps_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_SEQUENCES_IMPORTS_H_
