// SPDX-License-Identifier: Apache-2.0
// Imports: jobs that fill imported sequences from an engine's tensors.
//
// Ownership: a job's hold keeps its pages; it is released exactly once. Thread-safety: all
// methods, from any thread; one job of a sequence at a time. Cost: of copies of what lies in a pool
// that the host cannot reach.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "kernels/pages/page_view.h"
#include "kernels/plan/plan.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"

namespace kvstrata {

// Imported sequences as the store sees them: sequences whose engine keeps its keys and values in
// tensors of its own, and whose pages the daemon fills from there (server/work/importer.h).
//
// Their pages lie in the daemon's arenas, on `host` first, and clients map them read-only: the
// store refuses Grow, Commit and ForkSequence of the session. One ImportJob after another makes one
// longer: BeginImport takes pages and keeps them, and the sequence's other pages that the job
// reads, readable and writable without the lock, whatever becomes of the sequence meanwhile;
// FinishImport commits the tokens that were written, so that full pages are sealed, keyed, found
// and stored as those of any other sequence.

// Ended by FinishImport or AbandonImport, exactly once.
struct ImportJob {
  uint64_t hold = 0;  // keeps its pages (page_references.h)
  uint64_t session = 0, sequence = 0;
  Geometry geometry;
  Plan plan;
  IndexLayout index;
  uint32_t tokens = 0;          // committed: what follows is to be written
  uint32_t indexed_tokens = 0;  // index rows are valid up to here

  // By position, addresses that the CPU may follow; null: nothing there is read or written. Pages
  // from the index block of `indexed_tokens` on, for the plan's summaries.
  std::vector<std::byte*> pages, blocks;

  // Copies of what lies in a pool that the CPU cannot reach, written back by FinishImport.
  struct Staged {
    Page* page = nullptr;
    std::byte** address = nullptr;  // in `pages` or `blocks`
    bool written = false;           // by the job
    std::unique_ptr<std::byte[]> copy;
  };
  std::vector<Staged> staged;
};

class Imports {
 public:
  Imports(Books& books, SessionCatalog& catalog, Devices& devices, PageHolds& holds,
          StepEvents& steps)
      : books_(books), catalog_(catalog), devices_(devices), holds_(holds), steps_(steps) {}

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
