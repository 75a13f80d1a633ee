// SPDX-License-Identifier: Apache-2.0
// A worker of the store's recompressions, for tests without threads.
#pragma once

#include <memory>
#include <utility>

#include "kernels/codec/codec.h"
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

// The same until nothing is due, with the ops of `ref`; rows of a GPU are copied first.
inline Status RecompressAll(Store* store, uint64_t sequence) {
  for (;;) {
    Result<RecompressJob> job = store->recompression().TakeRecompression(sequence);
    if (!job.ok()) return job.status().reason() == "WORK_NOTHING" ? OkStatus() : job.status();
    job->input.backend = *FindBackend("ref");
    job->input.executor = &InlineExecutor();
    std::unique_ptr<Recompressor> next;
    RecompressOutput output;
    if (job->recompressor != nullptr) {
      next = job->recompressor->Clone();
      Status status = store->recompression().StageRecompression(&*job);
      if (status.ok()) {
        Result<RecompressOutput> ran = next->Run(job->input);
        status = ran.status();
        if (ran.ok()) output = std::move(*ran);
      }
      if (!status.ok()) {
        store->recompression().AbandonRecompression(std::move(*job), status);
        return status;
      }
    }
    KVS_RETURN_IF_ERROR(
        store->recompression()
            .PublishRecompression(std::move(*job), std::move(next), std::move(output))
            .status());
  }
}

}  // namespace kvstrata::testing
