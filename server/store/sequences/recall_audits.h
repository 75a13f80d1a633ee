// SPDX-License-Identifier: Apache-2.0
// RecallAudits: recall audits of sequences (recall_audit.h): asking for samples, taking them, and
// every way to end. And recall in the background: of the decode steps that select, about one in
// StoreSettings::recall_every is measured, whoever's it is, so that a plan that loses more than it
// should is seen without anybody asking. An operator's audit of that sequence goes first.
//
// Ownership: an audit is its sequence's until it ends, and its caller's. Thread-safety: methods
// that say so are called under the store's lock, all others from any thread; listeners are called
// without it. Cost: a store to shared memory; a copy of the samples.
#pragma once

#include <cstdint>
#include <random>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "proto/shm_layout.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/reports/recall_audit.h"
#include "server/store/reports/store_info.h"

namespace kvstrata {

// For the sequences of one preset, since the start.
struct SampledRecall {
  std::string_view plan;  // the name of a preset that selects; "other": of one's own
  uint64_t steps = 0;
  double recall = 0, error = 0;  // from the last one: means over layers and heads
};

class RecallAudits {
 public:
  RecallAudits(StoreMutex& mu, const StoreSettings& settings, Answers& answers,
               SessionCatalog& catalog, Inspection& inspection);

  // Asks the sequence's steps for samples until the audit has enough or ends. SEQUENCE_UNKNOWN;
  // INVALID_ARGUMENT RECALL_OPTION; FAILED_PRECONDITION RECALL_RUNNING (one audit of a sequence at
  // a time), RECALL_RAW_GONE. Ends that the store makes: OK; RECALL_RAW_GONE; ABORTED
  // SEQUENCE_CLOSED, SESSION_ENDED; DATA_LOSS RECALL_SAMPLE.
  Result<RecallStart> StartRecallAudit(uint64_t sequence, const RecallOptions& options,
                                       RecallAudit::Listener listener) KVS_EXCLUDES(store_lock);
  // Samples of an audit that has ended are ignored. Never an error of the sequence.
  void AddRecall(uint64_t session, uint64_t sequence, const RecallSamples& samples)
      KVS_EXCLUDES(store_lock);
  // Nothing if it has ended.
  void EndRecallAudit(uint64_t sequence, uint32_t audit, const Status& why)
      KVS_EXCLUDES(store_lock);
  void EndRecallAudits(const Status& why) KVS_EXCLUDES(store_lock);

  // A decode step of the sequence was committed.
  void NoteDecode(Session* session, Sequence* s) KVS_REQUIRES(store_lock);
  // Every preset, sampled or not.
  std::vector<SampledRecall> Sampled() const KVS_EXCLUDES(store_lock);

  // Hands the end to Answers: the listener is not called under the lock.
  void StopRecall(Sequence* s, const Status& why) KVS_REQUIRES(store_lock);

 private:
  uint32_t NextNumber() KVS_REQUIRES(store_lock);
  void AskRecall(Session* session, const Sequence& s, shm::RecallRequest request)
      KVS_REQUIRES(store_lock);
  void StopSample(Session* session, Sequence* s) KVS_REQUIRES(store_lock);
  void TakeSample(const Sequence& s, const RecallSamples& samples) KVS_REQUIRES(store_lock);

  StoreMutex& mu_;
  const StoreSettings& settings_ KVS_GUARDED_BY(store_lock);
  Answers& answers_;
  SessionCatalog& catalog_;
  Inspection& inspection_;
  uint32_t next_recall_ KVS_GUARDED_BY(store_lock) = 1;
  std::vector<SampledRecall> sampled_ KVS_GUARDED_BY(store_lock);
  std::minstd_rand random_ KVS_GUARDED_BY(store_lock);
  uint64_t until_sample_ KVS_GUARDED_BY(store_lock) = 0;  // decode steps
};

}  // namespace kvstrata
