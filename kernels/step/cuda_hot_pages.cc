// Selected slices of pages in the host's memory, kept on a GPU: the cache of a sequence, and how
// steps follow where its pages are (cuda_hot_pages.h).
#include "kernels/step/cuda_hot_pages.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "kernels/step/cuda_step.h"

namespace kvstrata {
namespace {

struct ListedUnits {
  int32_t units = 0;        // of a list
  int32_t unit_tokens = 1;  // of each
  int32_t always = 0;       // tokens that are attended whatever is listed
};

ListedUnits ListOf(const Plan& plan, int32_t tokens) {
  switch (plan.selector) {
    case SelectorKind::kMinMax:
      return {plan.minmax.budget / plan.index.unit, plan.index.unit,
              plan.minmax.sinks + plan.minmax.recent};
    case SelectorKind::kCascade: {
      const double share = plan.cascade.rho[0] * plan.cascade.rho[1] * plan.cascade.rho[2];
      return {static_cast<int32_t>(share * tokens / plan.index.unit), plan.index.unit,
              (plan.cascade.sinks + plan.cascade.recent + plan.cascade.every) * plan.index.unit};
    }
    case SelectorKind::kVote:
      return {plan.vote.budget, 1, plan.vote.sinks + plan.vote.recent};
    case SelectorKind::kBucket:
      return {plan.bucket.budget, 1, plan.bucket.sinks + plan.bucket.recent};
    case SelectorKind::kWindow:
      return {0, 1, plan.window.sinks + plan.window.recent};
    default:
      return {0, 1, 0};
  }
}

}  // namespace

int32_t CudaHotPages::SlotsOf(const Plan& plan, const Geometry& g, int32_t pages) {
  const ListedUnits list = ListOf(plan, pages * g.page_tokens);
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

bool CudaStep::MayPromote(const StepMember& m) {
  const Plan& plan = m.state->plan();
  return m.view.far_pages != nullptr && plan.codec == CodecKind::kRaw &&
         plan.selector != SelectorKind::kFull;
}

// Tables of the members' caches; null where none is, as of a graph's member that has none now.
Status CudaStep::StageHotPages(const CudaWorkspace::StagingSlot& slot) {
  for (int i = 0; i < members(); ++i) {
    SequenceState& state = *members_[i].state;
    const bool may_promote = MayPromote(members_[i]);
    if (!may_promote) state.hot_pages_.reset();
    if (ws_.capacity_.far_pages == 0) continue;  // no member ever did
    if (may_promote && state.prompt_tokens() >= 0) KVS_RETURN_IF_ERROR(FollowPages(i, slot));
    const cuda::HotPages table =
        state.hot_pages_ == nullptr ? cuda::HotPages{} : state.hot_pages_->table();
    std::array<const std::byte*, CudaWorkspace::kHotEntries> words;
    std::memcpy(words.data(), &table, sizeof(table));
    KVS_RETURN_IF_ERROR(ws_.Upload(&ws_.hot_tables_, CudaWorkspace::kHotEntries, i, words.data(),
                                   CudaWorkspace::kHotEntries, slot, stream_));
  }
  return OkStatus();
}

// Entries of pages that came or moved are made anew.
Status CudaStep::FollowPages(int member, const CudaWorkspace::StagingSlot& slot) {
  const StepMember& m = members_[member];
  std::shared_ptr<CudaHotPages>& hot = m.state->hot_pages_;
  const int32_t page_tokens = geometry().page_tokens;
  const int32_t count = (m.view.tokens + m.new_tokens + page_tokens - 1) / page_tokens;
  if (hot == nullptr || count > hot->page_stride()) {
    hot.reset();  // gives back what the next one takes
    KVS_ASSIGN_OR_RETURN(hot, CudaHotPages::Create(ops_, geometry(), m.state->plan(),
                                                   ws_.capacity_.far_pages, ws_.hot_cache_budget_));
  }
  if (hot->table().entries == nullptr) return OkStatus();
  std::vector<uint64_t>& known = hot->pages;
  known.resize(static_cast<size_t>(count));
  int32_t first = count, last = 0;
  for (int32_t i = 0; i < count; ++i) {
    const uint64_t far = m.view.far_pages[i] != 0 ? cuda::kFarPage : 0;
    const uint64_t address = reinterpret_cast<uint64_t>(m.view.pages[i]) | far;
    if (known[static_cast<size_t>(i)] == address) continue;
    known[static_cast<size_t>(i)] = address;
    first = std::min(first, i);
    last = i + 1;
  }
  if (first >= last) return OkStatus();
  KVS_RETURN_IF_ERROR(ws_.Upload(&ws_.far_pages_, ws_.capacity_.far_pages, member,
                                 reinterpret_cast<const std::byte* const*>(known.data()), count,
                                 slot, stream_));
  cuda::RebaseBatch w;
  w.hot = hot->table();
  w.pages = ws_.far_pages_.device.as<uint64_t>() + int64_t{member} * ws_.capacity_.far_pages;
  w.first = first;
  w.last = last;
  w.layers = geometry().layers;
  w.kv_heads = geometry().kv_heads;
  w.layer_bytes = PageLayout::Of(geometry()).layer_stride;
  launched_ = true;
  return Check(ops_.rebase(w, stream_), "op rebase");
}

// Between a layer's selection and its attention, which reads what is promoted.
Status CudaStep::Promote(const Part& part, int layer, cuda::PagedLayer* pages) {
  pages->hot = ws_.hot_tables_.device.as<cuda::HotPages>() + part.first;
  pages->hot_row = layer * geometry().kv_heads;
  cuda::PromoteBatch w;
  w.layer = *pages;
  w.selection = SelectionOf(part, layer);
  w.batch = part.count;
  w.layer_bytes = PageLayout::Of(geometry()).layer_stride;
  w.tokens = ws_.visible() + first_row_[part.first];
  w.committed = ws_.Ints(PerMember::kTo) + part.first;
  w.counters = ws_.hot_counters_.as<uint32_t>();
  return Check(ops_.promote(w, stream_), "op promote");
}

}  // namespace kvstrata
