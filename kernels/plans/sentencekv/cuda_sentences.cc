// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/sentencekv/cuda_sentences.h"

#include <algorithm>

#include "kernels/plans/sentencekv/bucket_rule.h"
#include "kernels/plans/sentencekv/sentence_status.h"

namespace kvstrata {
namespace {

constexpr int32_t kWholeAtFirst = 64;

// Cuts arrays from a buffer; of none it only counts.
class Carver {
 public:
  explicit Carver(const DeviceBuffer* buffer)
      : base_(buffer == nullptr ? nullptr : buffer->as<std::byte>()) {}

  template <typename T>
  void Take(int64_t count, T** array) {
    *array = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += (static_cast<uint64_t>(count) * sizeof(T) + 15) / 16 * 16;
  }
  uint64_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  uint64_t bytes_ = 0;
};

void CarveQueries(const Geometry& g, int32_t n_obs, Carver* from, cuda::SentenceTable* t) {
  from->Take(int64_t{g.layers} * n_obs * g.query_heads * g.head_dim, &t->observed);
  from->Take(int64_t{t->rows} * 2 * cuda::QuerySumFloats(g.head_dim), &t->queries);
}

void CarvePrompt(const Geometry& g, Carver* from, cuda::SentenceTable* t) {
  const int64_t rows = t->rows;
  from->Take(rows * t->kept_stride, &t->kept);
  from->Take(rows * (t->bucket_stride + 1), &t->firsts);
  from->Take(rows, &t->counts);
  from->Take(rows * t->bucket_stride * g.head_dim, &t->means);
}

void CarveWhole(const Geometry& g, Carver* from, cuda::SentenceTable* t) {
  from->Take(int64_t{2} * t->whole_stride, &t->whole);
  from->Take(int64_t{t->whole_stride} * t->rows * g.head_dim, &t->whole_means);
  from->Take(int64_t{g.kv_heads} * t->score_stride(), &t->scores);
}

}  // namespace

CudaSentenceMemory::CudaSentenceMemory(const Geometry& geometry, int32_t n_obs)
    : geometry_(geometry), n_obs_(n_obs) {
  table_.rows = geometry.layers * geometry.kv_heads;
}

std::shared_ptr<CudaHistory> CudaSentences::Fork() {
  if (memory != nullptr) memory->shared = true;
  return std::make_shared<CudaSentences>(*this);
}

std::string CudaSentences::StatusText(const Plan& plan, const SelectContext& context) const {
  const int32_t prompt = context.prompt_tokens;
  return SentenceStatus(
      plan, context,
      ready || BucketsInFull(plan, prompt) || Observed(plan, *context.geometry, prompt));
}

bool CudaSentences::Truncate(int32_t tokens) {
  ends.Truncate(tokens);
  while (!whole.empty() && whole.back().end > tokens) whole.pop_back();
  whole_made = std::min(whole_made, static_cast<int32_t>(whole.size()));
  queries_from = tokens;
  return true;
}

bool CudaSentences::Observed(const Plan& plan, const Geometry& geometry,
                             int32_t prompt_tokens) const {
  for (int32_t layer = plan.n_dense_layers; layer < geometry.layers; ++layer) {
    if (!observed[static_cast<size_t>(layer)].Cover(prompt_tokens, plan.bucket.n_obs)) return false;
  }
  return true;
}

uint64_t CudaSentenceMemory::QueryBytes() const {
  cuda::SentenceTable table = table_;
  Carver counter(nullptr);
  CarveQueries(geometry_, n_obs_, &counter, &table);
  return counter.bytes();
}

uint64_t CudaSentenceMemory::PromptBytes() const {
  cuda::SentenceTable table = table_;
  Carver counter(nullptr);
  CarvePrompt(geometry_, &counter, &table);
  return counter.bytes();
}

uint64_t CudaSentenceMemory::WholeBytes() const {
  cuda::SentenceTable table = table_;
  Carver counter(nullptr);
  CarveWhole(geometry_, &counter, &table);
  return counter.bytes();
}

void CudaSentenceMemory::Place() {
  Carver queries(queries_.get()), prompt(prompt_.get()), whole(whole_.get());
  CarveQueries(geometry_, n_obs_, &queries, &table_);
  CarvePrompt(geometry_, &prompt, &table_);
  CarveWhole(geometry_, &whole, &table_);
}

Result<std::shared_ptr<CudaSentenceMemory>> CudaSentenceMemory::Create(const cuda::CudaOps& ops,
                                                                       const Geometry& geometry,
                                                                       int32_t n_obs) {
  std::shared_ptr<CudaSentenceMemory> memory(new CudaSentenceMemory(geometry, n_obs));
  memory->queries_ = std::make_unique<DeviceBuffer>();
  KVS_RETURN_IF_ERROR(memory->queries_->Reserve(ops, memory->QueryBytes()));
  memory->Place();
  return memory;
}

Result<std::shared_ptr<CudaSentenceMemory>> CudaSentenceMemory::CopyOf(
    const CudaSentenceMemory& other, const cuda::CudaOps& ops, cuda::Stream stream) {
  std::shared_ptr<CudaSentenceMemory> copy(new CudaSentenceMemory(other.geometry_, other.n_obs_));
  copy->table_ = other.table_;
  for (auto part :
       {&CudaSentenceMemory::queries_, &CudaSentenceMemory::prompt_, &CudaSentenceMemory::whole_}) {
    const DeviceBuffer* const from = (other.*part).get();
    if (from == nullptr) continue;
    std::unique_ptr<DeviceBuffer>& to = (*copy).*part;
    to = std::make_unique<DeviceBuffer>();
    KVS_RETURN_IF_ERROR(to->Reserve(ops, from->bytes()));
    KVS_RETURN_IF_ERROR(CudaStatus(
        ops, ops.copy_async(to->as<std::byte>(), from->as<std::byte>(), from->bytes(), stream),
        "copying the buckets of a sequence"));
  }
  copy->Place();
  return copy;
}

Status CudaSentenceMemory::FitPrompt(const cuda::CudaOps& ops, int32_t kept, int32_t buckets) {
  table_.kept_stride = kept;
  table_.bucket_stride = buckets;
  prompt_ = std::make_unique<DeviceBuffer>();
  KVS_RETURN_IF_ERROR(prompt_->Reserve(ops, PromptBytes()));
  Place();
  return OkStatus();
}

Status CudaSentenceMemory::FitWhole(const cuda::CudaOps& ops, int32_t count, int32_t written,
                                    cuda::Stream stream) {
  if (whole_ != nullptr && count <= table_.whole_stride) return OkStatus();
  const cuda::SentenceTable before = table_;
  auto larger = std::make_unique<DeviceBuffer>();
  table_.whole_stride = std::max(kWholeAtFirst, 2 * count);
  Status status = larger->Reserve(ops, WholeBytes());
  if (!status.ok()) {
    table_ = before;
    return status;
  }
  std::swap(whole_, larger);
  Place();
  if (written == 0) return OkStatus();
  const auto copy = [&](void* to, const void* from, int64_t bytes) {
    return CudaStatus(ops, ops.copy_async(to, from, static_cast<uint64_t>(bytes), stream),
                      "copying the buckets of a sequence");
  };
  constexpr int64_t kInt = sizeof(int32_t), kMean = sizeof(BF16);
  KVS_RETURN_IF_ERROR(copy(table_.whole, before.whole, written * 2 * kInt));
  return copy(table_.whole_means, before.whole_means,
              int64_t{written} * table_.rows * geometry_.head_dim * kMean);
}

}  // namespace kvstrata
