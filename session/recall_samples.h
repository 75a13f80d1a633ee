// SPDX-License-Identifier: Apache-2.0
// Which steps of a sequence an audit of recall samples (docs/design.md, "Recall audits"), on either
// transport. What measures is the transport's: kernels/step/shadow_attention.h,
// kernels/step/gpu/cuda_shadow.h.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/step/step_batch.h"
#include "session/sequence_tables.h"

namespace kvstrata {

// The audits that sample a step, by member, 0: none; empty: none at all. sequences: pointers to the
// members. shadow(member) has the member measured, false: it cannot, and the sample is lost. So it
// is while what was packed is not all here: what a step misses then is not the plan's.
// REQUIRES: the members' tables are loaded, their epoch entered.
template <typename Sequences, typename Shadow>
std::vector<uint32_t> SampleRecall(const SequenceTables& tables, const StepBatch& batch,
                                   const Sequences& sequences, const Shadow& shadow) {
  std::vector<uint32_t> audits;
  for (int i = 0; i < batch.members(); ++i) {
    if (!batch.member(i).kept) continue;
    SessionSequence& s = *sequences[static_cast<size_t>(i)];
    const shm::RecallRequest request = tables.Recall(s);
    if (!request.Samples(batch.member(i).view.tokens) || !batch.Decodes(i)) continue;
    if (s.recall_audit != request.audit) s.recall_dropped = 0;
    s.recall_audit = request.audit;
    const StoredRows* const stored = s.state->stored();
    if ((stored != nullptr && stored->rest_due()) || !shadow(i)) {
      ++s.recall_dropped;
      continue;
    }
    audits.resize(static_cast<size_t>(batch.members()));
    audits[static_cast<size_t>(i)] = request.audit;
  }
  return audits;
}

}  // namespace kvstrata
