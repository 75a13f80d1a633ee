// SPDX-License-Identifier: Apache-2.0
// Imported sequences as the store sees them: sequences whose engine keeps its keys and values in
// tensors of its own, and whose pages the daemon fills from there (server/work/importer.h).
//
// Their pages lie in the daemon's arenas, on `host` first, and clients map them read-only: the
// store refuses Grow, Commit and ForkSequence of the session. One ImportJob after another makes one
// longer: BeginImport takes pages and keeps them, and the sequence's other pages that the job
// reads, readable and writable without the lock, whatever becomes of the sequence meanwhile;
// FinishImport commits the tokens that were written, so that full pages are sealed, keyed, found
// and stored as those of any other sequence.
#ifndef KVSTRATA_SERVER_STORE_REQUESTS_IMPORT_JOB_H_
#define KVSTRATA_SERVER_STORE_REQUESTS_IMPORT_JOB_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/pages/page_view.h"
#include "kernels/plan/plan.h"

namespace kvstrata {

struct Page;

// Ended by FinishImport or AbandonImport, exactly once.
struct ImportJob {
  uint64_t hold = 0;  // keeps its pages (page_holds.h)
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

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_REQUESTS_IMPORT_JOB_H_
