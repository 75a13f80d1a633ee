// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/gpu/memory/cuda_hot_rows.h"

#include <utility>

namespace kvstrata {

CudaHotRows::CudaHotRows(const Shape& shape, int32_t groups, std::shared_ptr<HotCacheBudget> budget)
    : shape_(shape), groups_(groups), budget_(std::move(budget)) {}

// Nothing can be done about an error here; the budget is right again either way.
CudaHotRows::~CudaHotRows() { (void)Free(); }

Result<std::shared_ptr<CudaHotRows>> CudaHotRows::Create(const cuda::CudaOps& ops,
                                                         const Shape& shape, int32_t groups,
                                                         std::shared_ptr<HotCacheBudget> budget) {
  std::shared_ptr<CudaHotRows> hot(new CudaHotRows(shape, groups, std::move(budget)));
  hot->held_ = static_cast<uint64_t>(groups);
  if (hot->budget_ != nullptr) hot->held_ = hot->budget_->Take(0, shape.group_bytes(), hot->held_);
  if (hot->held_ == 0) return hot;
  const Status status = hot->Reserve(ops);
  if (status.reason() == "GPU_MEMORY") {
    KVS_RETURN_IF_ERROR(hot->Free());
  } else if (!status.ok()) {
    return status;
  }
  return hot;
}

Status CudaHotRows::Reserve(const cuda::CudaOps& ops) {
  const uint64_t tags = held_ * shape_.tag_bytes();
  KVS_RETURN_IF_ERROR(tags_.Reserve(ops, tags));
  return copies_.Reserve(ops, tags * static_cast<uint64_t>(shape_.row_bytes));
}

Status CudaHotRows::Free() {
  const uint64_t groups = std::exchange(held_, 0);
  if (budget_ != nullptr) budget_->Give(groups * shape_.group_bytes());
  KVS_RETURN_IF_ERROR(tags_.Free());
  return copies_.Free();
}

cuda::HotSequence CudaHotRows::table() const {
  if (held_ == 0) return {};
  return {reinterpret_cast<uint64_t>(tags_.as<std::byte>()),
          reinterpret_cast<uint64_t>(copies_.as<std::byte>()), static_cast<int64_t>(held_)};
}

}  // namespace kvstrata
