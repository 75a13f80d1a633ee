// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/gpu/memory/cuda_hot_pages.h"

#include <algorithm>
#include <utility>

#include "kernels/select/selection_rule.h"

namespace kvstrata {
int32_t CudaHotPages::SlotsOf(const Plan& plan, const Geometry& g, int32_t pages) {
  const SelectionRule list = SelectionRuleOf(plan, pages * g.page_tokens);
  const int32_t of_unit = std::max(list.unit_tokens / g.page_tokens, 1);
  const int32_t listed = list.units * of_unit * (list.unit_tokens > 1 ? 2 : 1);
  // Ranges begin and end inside pages.
  const int32_t always = list.always / g.page_tokens + 4;
  return std::min({listed + 2 * always, pages, cuda::kHotSlotsMax});
}

CudaHotPages::CudaHotPages(const Geometry& geometry, int32_t page_stride,
                           std::shared_ptr<HotCacheBudget> budget)
    : page_stride_(page_stride),
      rows_(int64_t{geometry.layers} * geometry.kv_heads),
      slot_bytes_(static_cast<uint64_t>(PageLayout::Of(geometry).layer_stride) *
                  static_cast<uint64_t>(geometry.layers)),
      budget_(std::move(budget)) {}

// Nothing can be done about an error here; the budget is right again either way.
CudaHotPages::~CudaHotPages() { (void)Free(); }

Result<std::shared_ptr<CudaHotPages>> CudaHotPages::Create(const cuda::CudaOps& ops,
                                                           const Geometry& geometry,
                                                           const Plan& plan, int32_t page_stride,
                                                           std::shared_ptr<HotCacheBudget> budget) {
  std::shared_ptr<CudaHotPages> hot(new CudaHotPages(geometry, page_stride, std::move(budget)));
  auto slots = static_cast<uint64_t>(SlotsOf(plan, geometry, page_stride));
  if (hot->budget_ != nullptr) {
    slots = hot->budget_->Take(hot->entry_bytes(), hot->slot_bytes_ + hot->owner_bytes(), slots);
  }
  hot->slot_count_ = static_cast<int32_t>(slots);
  if (slots == 0) return hot;
  const Status status = hot->Reserve(ops);
  if (status.reason() == "GPU_MEMORY") {
    KVS_RETURN_IF_ERROR(hot->Free());
  } else if (!status.ok()) {
    return status;
  }
  return hot;
}

uint64_t CudaHotPages::entry_bytes() const {
  return static_cast<uint64_t>(rows_ + 1) * static_cast<uint64_t>(page_stride_) * sizeof(uint64_t);
}

Status CudaHotPages::Reserve(const cuda::CudaOps& ops) {
  const auto slots = static_cast<uint64_t>(slot_count_);
  KVS_RETURN_IF_ERROR(slots_.Reserve(ops, slots * slot_bytes_));
  KVS_RETURN_IF_ERROR(entries_.Reserve(ops, entry_bytes()));
  return owners_.Reserve(ops, slots * owner_bytes());
}

Status CudaHotPages::Free() {
  const auto slots = static_cast<uint64_t>(std::exchange(slot_count_, 0));
  if (budget_ != nullptr && slots > 0) {
    budget_->Give(entry_bytes() + slots * (slot_bytes_ + owner_bytes()));
  }
  KVS_RETURN_IF_ERROR(owners_.Free());
  KVS_RETURN_IF_ERROR(entries_.Free());
  return slots_.Free();
}

cuda::HotPages CudaHotPages::table() const {
  if (owners_.bytes() == 0) return {};
  cuda::HotPages hot;
  hot.entries = entries_.as<uint64_t>();
  hot.pages = hot.entries + rows_ * page_stride_;
  hot.slots = reinterpret_cast<uint64_t>(slots_.as<std::byte>());
  hot.owners = owners_.as<int32_t>();
  hot.stamps = hot.owners + rows_ * slot_count_;
  hot.page_stride = page_stride_;
  hot.slot_count = slot_count_;
  return hot;
}

}  // namespace kvstrata
