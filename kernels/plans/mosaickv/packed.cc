// SPDX-License-Identifier: Apache-2.0
// The reading side: one kPackedSegment extent after the other, each with the rotations of the
// extent that holds them.
#include "kernels/plans/mosaickv/packed.h"

#include <algorithm>
#include <atomic>

#include "kernels/plan/plan_needs.h"
#include "kernels/plans/mosaickv/cuda_packer.h"
#include "kernels/plans/mosaickv/loss_limit.h"
#include "kernels/plans/mosaickv/packed_layout.h"
#include "kernels/plans/mosaickv/packed_recompressor.h"

namespace kvstrata {
namespace {

using Extents = std::vector<PackedExtent>;

// The extent whose rotations `extent` uses: its own, or those of a final one before it.
const PackedExtent* PlanOf(const Extents& before, const PackedExtent& extent) {
  if (extent.final && extent.has_rotations()) return &extent;
  const auto found = std::ranges::lower_bound(before, extent.info.plan_begin, {},
                                              [](const PackedExtent& e) { return e.tokens.begin; });
  const bool fits = found != before.end() && found->tokens.begin == extent.info.plan_begin &&
                    found->final && found->has_rotations();
  return fits ? &*found : nullptr;
}

Result<Extents> ReadAll(const SequenceView& view, const Geometry& geometry) {
  Extents extents;
  extents.reserve(static_cast<size_t>(std::max(view.extent_count, 0)));
  for (int32_t i = 0; i < view.extent_count; ++i) {
    KVS_ASSIGN_OR_RETURN(PackedExtent next, ReadPackedExtent(view.extents[i], geometry));
    const int32_t end = extents.empty() ? 0 : extents.back().tokens.end;
    if (next.tokens.begin != end) {
      return DamagedExtent(next.tokens, "the one before it ends at " + std::to_string(end));
    }
    const PackedExtent* plan = PlanOf(extents, next);
    if (plan == nullptr) return DamagedExtent(next.tokens, "the rotations that it names are none");
    for (size_t h = 0; h < next.heads.size(); ++h) {
      next.heads[h].r_k = plan->heads[h].r_k;
      next.heads[h].r_v = plan->heads[h].r_v;
    }
    extents.push_back(std::move(next));
  }
  return extents;
}

}  // namespace

Result<std::unique_ptr<PackedStorage>> PackedStorage::Parse(const SequenceView& view,
                                                            const Geometry& geometry) {
  KVS_ASSIGN_OR_RETURN(const Extents extents, ReadAll(view, geometry));
  static std::atomic<uint64_t> parsed{0};
  auto storage = std::make_unique<PackedStorage>(geometry);
  storage->id_ = parsed.fetch_add(1, std::memory_order_relaxed) + 1;
  storage->heads_.reserve(storage->Index(static_cast<int>(extents.size()), 0));
  storage->EndAt(extents.empty() ? 0 : extents.back().tokens.end);
  for (const PackedExtent& e : extents) {
    storage->segments_.push_back(
        {e.tokens, e.final, e.info.plan_begin, e.info.worst_loss, e.info.refused_loss});
    for (const PackedHead& h : e.heads) {
      storage->keep_max_ = std::max(storage->keep_max_, h.keys.keep);
    }
    storage->heads_.insert(storage->heads_.end(), e.heads.begin(), e.heads.end());
    storage->bytes_ += e.bytes;
  }
  return storage;
}

namespace {

// Where milder strategies than the plan's were taken.
std::string MilderText(const Plan& plan, const PackedStorage& packed) {
  if (plan.stored.max_loss >= 1) return "";
  const auto& segments = packed.segments();
  const auto is_refused = [](const PackedStorage::Segment& s) { return s.refused_loss > 0; };
  const auto first = std::ranges::find_if(segments, is_refused);
  if (first == segments.end()) return "";
  const int32_t keep = packed.head(static_cast<int>(first - segments.begin()), 0, 0).keys.keep;
  const std::string text =
      DescribeLoss(plan, first->tokens, first->refused_loss, keep, first->worst_loss);
  const auto more = std::count_if(first + 1, segments.end(), is_refused);
  return more == 0 ? text : text + "; so do " + std::to_string(more) + " later ranges";
}

}  // namespace

std::string PackedText(const Plan& plan, int32_t due, const PackedStorage* packed) {
  if (plan.codec != CodecKind::kPacked) return "";
  const std::string why = plan.stored.max_loss >= 1
                              ? " (workers have not come to it yet, or were told to end)"
                              : " (workers have not come to it yet, or were told to end, or more "
                                "than max_loss would be lost, which the daemon's log says)";
  if (packed == nullptr || packed->segments().empty()) {
    return "nothing is packed: attends in full" + why;
  }
  std::string text = MilderText(plan, *packed);
  if (packed->end() >= due) return text;
  text += (text.empty() ? "" : "; ") + std::string("nothing is packed from token ") +
          std::to_string(packed->end()) + " on" + why;
  return text;
}

int32_t PackedStorage::BlockCount(int layer, int kv_head) const {
  int32_t count = 0;
  for (size_t s = 0; s < segments_.size(); ++s) {
    const int32_t block = head(static_cast<int>(s), layer, kv_head).block;
    const Run tokens = segments_[s].tokens;
    count += (tokens.end - tokens.begin + block - 1) / block;
  }
  return count;
}

// --- the codec's row

namespace {

constexpr std::string_view kArrays[] = {"eigenvalues", "rotated_rows", "packed_rows", "segments",
                                        "strategies"};
constexpr std::string_view kDeviceArrays[] = {"segments", "strategies"};

int64_t ArraysEnd(const ExtentFront& front) {
  const ExtentHeader h = front.header();
  if (static_cast<ExtentKind>(h.kind) != ExtentKind::kPackedSegment) return 0;
  const auto info = front.At<PackedInfo>(kPackedInfoAt);
  const int64_t heads = int64_t{h.layers} * h.kv_heads;
  const int64_t entries = front.EndOf(kPackedEntriesAt, heads, sizeof(PackedEntry));
  if (info.buffer <= 0) return entries;
  const int32_t flushes = (h.end - h.begin) / info.buffer;
  return std::max(entries, front.EndOf(info.flushes, flushes, sizeof(double)));
}

// Generated tokens wait for a whole buffer, and that for its turn.
std::string StatusOf(const CodecProgress& p) {
  const int32_t due = std::max(p.prompt_tokens, p.tokens - 2 * p.plan.packed.buffer);
  return PackedText(p.plan, due, PackedOf(p.stored));
}

// Bytes of a packed row over those of a raw one: elements, and a bit for each channel.
CodecCost CostOfRow(const Plan& plan, const Geometry& g) {
  const double dim = g.head_dim;
  const double keep = plan.packed.search || plan.packed.keep == 0 ? dim / 4 : plan.packed.keep;
  return {(2 * keep + dim / 8) / (2 * dim), 34, 3420};
}

}  // namespace

constinit const Codec kPackedCodec = {
    .needs = kNeedPrefillDone,
    .recompressor = [](const Plan& plan, const Geometry& geometry,
                       ParametersPtr) { return NewPackedRecompressor(plan, geometry); },
    .gpu_packer = [](const cuda::CudaOps& ops, int device) -> Result<std::unique_ptr<GpuPacker>> {
      KVS_ASSIGN_OR_RETURN(std::unique_ptr<GpuPacker> packer, NewCudaPacker(ops, device));
      return packer;
    },
    .parse = ParseAs<PackedStorage>,
    .arrays_end = ArraysEnd,
    // Other selectors attend in full by themselves until rows are packed.
    .why_raw =
        [](const Plan& plan, const SelectContext&) {
          return plan.selector == SelectorKind::kBlock ? PackedText(plan, 0, nullptr) : "";
        },
    .status = StatusOf,
    .arrays = kArrays,
    .device_arrays = kDeviceArrays,
    .inspect = InspectPacked,
    .cost = CostOfRow,
};

}  // namespace kvstrata
