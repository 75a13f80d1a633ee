// SPDX-License-Identifier: Apache-2.0
// CudaSentences: what selector bucket (SentenceKV) keeps of one sequence whose steps are CudaSteps,
// as BucketSelector does on a CPU: on the host which sentences are complete, and in the GPU's
// memory the prompt's last queries, buckets with their mean keys, and sums of the sentence's
// queries. It goes with the sequence, whatever batch, workspace or stream that is in.
//
// A copy, for a fork, shares the memory: from then on nobody writes it, and who steps next takes a
// copy of his own (CudaStep::Begin).
//
// Threads: as SequenceState. Cost: 2 * head_dim bytes of each bucket, layer and KV head: at most
// 136 MB with Llama-3.1-8B and the preset's 2080 kept tokens, and 64 KB for each generated
// sentence; of the prompt's queries 17 MB.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/device_buffer.h"
#include "kernels/plan/plan.h"
#include "kernels/plans/sentencekv/importance.h"
#include "kernels/plans/sentencekv/ops/sentence_table.h"
#include "kernels/select/cuda_history.h"
#include "kernels/select/sentence_ends.h"

namespace kvstrata {

// The GPU's part. `table` says where its arrays lie.
class CudaSentenceMemory {
 public:
  // Copies everything. REQUIRES: what wrote it is before `stream`'s next work.
  static Result<std::shared_ptr<CudaSentenceMemory>> CopyOf(const CudaSentenceMemory& other,
                                                            const cuda::CudaOps& ops,
                                                            cuda::Stream stream);
  // Room for the prompt's last queries and the sums.
  static Result<std::shared_ptr<CudaSentenceMemory>> Create(const cuda::CudaOps& ops,
                                                            const Geometry& geometry,
                                                            int32_t n_obs);
  // Room for the prompt's buckets; once.
  Status FitPrompt(const cuda::CudaOps& ops, int32_t kept, int32_t buckets);
  // Room for `count` whole buckets, of which `written` are there and stay.
  Status FitWhole(const cuda::CudaOps& ops, int32_t count, int32_t written, cuda::Stream stream);

  const cuda::SentenceTable& table() const { return table_; }
  std::atomic<bool> shared = false;  // by a fork: read only

 private:
  CudaSentenceMemory(const Geometry& geometry, int32_t n_obs);
  uint64_t QueryBytes() const;
  uint64_t PromptBytes() const;
  uint64_t WholeBytes() const;
  // Points the table into the buffers.
  void Place();

  Geometry geometry_;
  int32_t n_obs_;
  std::unique_ptr<DeviceBuffer> queries_, prompt_, whole_;
  cuda::SentenceTable table_;
};

struct CudaSentences final : CudaHistory {
  CudaSentences(const Plan& plan, const Geometry& geometry)
      : observed(static_cast<size_t>(geometry.layers)), ends(plan.bucket.max_length) {}

  // Whether the prompt's last queries passed through steps, in all layers that choose.
  bool Observed(const Plan& plan, const Geometry& geometry, int32_t prompt_tokens) const;
  std::shared_ptr<CudaHistory> Fork() override;
  // The sentence's queries are summed anew from there.
  bool Truncate(int32_t tokens) override;
  std::string StatusText(const Plan& plan, const SelectContext& context) const override;

  std::vector<ObservedRange> observed;  // by layer
  SentenceEnds ends;
  bool started = false;      // the prompt is complete
  bool ready = false;        // there are buckets, or this Begin makes them
  bool listed = false;       // the prompt's kept tokens are buckets, of which...
  bool made = false;         // ...the GPU has the rows
  std::vector<Run> whole;    // whole buckets, in order
  int32_t whole_made = 0;    // those that the GPU has the rows of
  int32_t queries_from = 0;  // queries behind these tokens belong to the sentence
  std::shared_ptr<CudaSentenceMemory> memory;
};

}  // namespace kvstrata
