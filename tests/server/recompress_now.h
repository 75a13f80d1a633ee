// SPDX-License-Identifier: Apache-2.0
// A worker of the store's recompressions, for tests without threads.
#pragma once

#include <memory>
#include <utility>

#include "server/store/store.h"

namespace kvstrata::testing {

// Does what a worker does, on this thread.
inline Result<RecompressResult> Recompress(Store* store, uint64_t sequence) {
  Result<RecompressJob> job = store->recompression().TakeRecompression(sequence);
  if (!job.ok()) return job.status();
  std::unique_ptr<Recompressor> next;
  RecompressOutput output;
  if (job->recompressor != nullptr) {
    next = job->recompressor->Clone();
    Result<RecompressOutput> ran = next->Run(job->input);
    if (!ran.ok()) {
      store->recompression().AbandonRecompression(std::move(*job), ran.status());
      return ran.status();
    }
    output = std::move(*ran);
  }
  return store->recompression().PublishRecompression(std::move(*job), std::move(next),
                                                     std::move(output));
}

}  // namespace kvstrata::testing
