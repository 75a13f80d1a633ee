// SPDX-License-Identifier: Apache-2.0
// TierWriter: puts sealed pages, index blocks and artefacts into a tier below memory, by policy.
//
// Its thread takes keys that were offered (write_queue.h), copies what is still in memory and puts
// it in batches; a page is held for the length of a copy into the buffers. Behind another tier a
// value goes when that one has it, and is read from there when it left memory. A value that changed
// (more was reported of a page's positions; an artefact was built again) is forgotten and put
// again. An artefact's record is put last, when all of its extents were taken. Nothing is tried
// twice: what failed is offered again by the next use.
//
// Ownership: borrows what it is given. Thread-safety: all methods, from any thread. Errors: only
// those of drains; the others are counted, and logged at most once a second.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <stop_token>
#include <thread>
#include <vector>

#include "base/sync.h"
#include "server/store/options/copy_rate.h"
#include "server/store/store.h"
#include "server/telemetry/status_log.h"
#include "server/telemetry/traffic.h"
#include "server/tier/tier_buffers.h"
#include "server/tier/value_tier.h"
#include "server/work/tiers/write_queue.h"

namespace kvstrata {

inline constexpr std::chrono::seconds kPutTimeout{10};

struct TierWriterOptions : WriteQueueOptions {
  uint64_t batch_bytes = uint64_t{64} << 20;  // bytes of a batch, but for its first value
  uint64_t rate = 0;                          // bytes a second; 0: no limit
  std::chrono::seconds patience{60};          // for the tier above to have it
};

// Values since start, but for bytes.
struct TierWriterCounters : WriteQueueCounters {
  uint64_t written = 0, written_bytes = 0;
  uint64_t dropped_above = 0;  // the tier above did not come to have it
  uint64_t gone = 0;           // left memory, and the tier above, before they were written
  uint64_t failed = 0;         // the tier did not take them
  uint64_t dropped() const { return dropped_full + dropped_rate + dropped_above + dropped_stop; }
};

// How a tier is written, whatever its operator wants.
struct TierWriterTerms {
  const char* thread;          // its name
  BytePath path;               // what is counted
  KnownKeys* known = nullptr;  // what a tier is known to have that is asked; null: this one answers
  ValueTier* above = nullptr;  // null: there is none
  std::function<Status(Deadline)> checkpoint;  // makes its next start quick; may be empty
};

class TierWriter {
 public:
  TierWriter(const TierWriterOptions& options, TierWriterTerms terms, Store* store, ValueTier* tier,
             TierBuffers* buffers);
  // Stop.
  ~TierWriter();
  // Drops what waits, cancels what is being put, and joins. Idempotent.
  void Stop();

  // Takes offers, and drains: when it is dry the tier makes a checkpoint, where it has one.
  WriteQueue& queue() { return queue_; }
  // Policy and rates, for what is offered, and written, from now on.
  void Configure(const TierWriterOptions& options);
  // Takes offers again, first of what memory has and the tier has not.
  void Resume();
  TierWriterCounters counters() const KVS_EXCLUDES(mu_);

 private:
  using Offered = WriteQueue::Offered;
  // Copies on their way to the tier.
  struct Batch {
    std::vector<TierPut> puts;
    std::vector<TierForget> changed;  // to be forgotten before
    uint64_t bytes = 0;
    bool whole = true;  // all that was to go into it, and into those before it, was taken

    void Add(TierPut put, uint64_t its_bytes) {
      puts.push_back(std::move(put));
      bytes += its_bytes;
    }
  };

  bool far() const { return terms_.known != nullptr; }
  bool Has(const PageKey& key) const;
  void Write();
  // Whether the tier above has it; else it waits on, or is dropped.
  bool IsAbove(const Offered& offered);
  // Copies into the batch what the tier needs of an offered key. An artefact has batches of its
  // own.
  void WriteOffered(const Offered& offered, Batch* batch);
  void AddFromAbove(const Offered& offered, Batch* batch);
  // Whether the one that is there is to be forgotten first.
  bool TakesAPlace(const Offered& offered, const SealedValue& value) const;
  // A put that the batch has room for, without its buffers.
  TierPut NewPut(const Offered& offered, const PageKey& key, uint64_t bytes, Batch* batch);
  // Puts the batch, which has no values afterwards.
  void PutAll(Batch* batch);
  void CountPuts(std::span<const TierPut> puts, Batch* batch);
  // The end of a drain, when nothing waits.
  void CheckpointIfDry();
  void Count(uint64_t TierWriterCounters::*what, uint64_t n) KVS_EXCLUDES(mu_);

  const uint64_t batch_bytes_;
  const std::chrono::seconds patience_;
  const TierWriterTerms terms_;
  CopyRate rate_;
  Store* const store_;
  ValueTier* const tier_;
  TierBuffers* const buffers_;
  WriteQueue queue_;
  std::stop_source end_writes_;

  mutable Mutex mu_;
  TierWriterCounters counters_ KVS_GUARDED_BY(mu_);
  StatusLog log_;
  std::thread thread_;
};

}  // namespace kvstrata
