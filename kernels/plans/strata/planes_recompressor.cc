// SPDX-License-Identifier: Apache-2.0
// Groups are sealed as they fill, an extent a Run.
//
// Which groups an extent holds follows from how many are sealed: extents join like the digits of a
// counter in base 8. So a worker that lags, a clone and a restart end at the same extents, a reader
// meets few of them, and no group is packed twice.
#include "kernels/plans/strata/planes_recompressor.h"

#include <algorithm>
#include <cstring>

#include "kernels/codec/head_loop.h"
#include "kernels/plan/plan_needs.h"
#include "kernels/plans/strata/cuda_planes_packer.h"
#include "kernels/plans/strata/planes.h"
#include "kernels/plans/strata/planes_layout.h"

namespace kvstrata {
namespace {

constexpr int32_t kJoined = 8;

class PlanesRecompressor final : public Recompressor {
 public:
  PlanesRecompressor(const Plan& plan, const Geometry& geometry, int64_t extent_bytes)
      : plan_(plan),
        geometry_(geometry),
        format_{geometry.head_dim, plan.planes.unit, plan.planes.keep},
        parts_(PlanesPartsOf(plan)) {
    const int64_t group = HeadCount(geometry) * (format_.upper_bytes() + format_.lower_bytes());
    while (most_ < kMostGroups && most_ * kJoined * group <= extent_bytes) most_ *= kJoined;
  }

  bool Due(const RecompressInput& input) const override {
    return NextWork(input).any() || OwesRelease(input);
  }

  int64_t ReleasableBytes(const RecompressInput& input) const override {
    const Work work = NextWork(input);
    return work.any() && input.prompt_tokens >= 0
               ? RawBytes(geometry_, work.tokens.end - EndOf(input.view))
               : 0;
  }

  Result<RecompressOutput> Run(const RecompressInput& input) override {
    const Work work = NextWork(input);
    RecompressOutput output;
    if (work.any()) {
      KVS_ASSIGN_OR_RETURN(std::vector<ExtentDraft> sealed, Seal(input, work));
      output.extents = KeepFirst(input.view, work.kept);
      for (size_t i = 0; i < parts_.size(); ++i) {
        sealed[i].tier = parts_[i].TierOf(plan_);
        output.extents.push_back(std::move(sealed[i]));
      }
    } else {
      output.extents = KeepFirst(input.view, input.view.extent_count);
    }
    released_ = released_ || input.prompt_tokens >= 0;
    output.released = ReleasedRows(input, std::max(work.tokens.end, EndOf(input.view)));
    return output;
  }

  RecompressReads Reads(const RecompressInput& input) const override {
    const Work work = NextWork(input);
    if (!work.any()) return {};
    if (PacksInPlace(input, work)) return {.in_place = true};
    RecompressReads reads = {{EndOf(input.view), work.tokens.end}, {}};
    for (int32_t i = work.kept; i < input.view.extent_count; ++i) reads.extents.push_back(i);
    return reads;
  }

  std::unique_ptr<Recompressor> Clone() const override {
    return std::make_unique<PlanesRecompressor>(*this);
  }

 private:
  using Tokens = kvstrata::Run;
  static constexpr int32_t kMostGroups = 1 << 12;

  // The next extents, of the same tokens, which take the place of those from number `kept` on.
  struct Work {
    int32_t kept = 0;
    Tokens tokens;

    bool any() const { return tokens.end > tokens.begin; }
  };

  static int32_t EndOf(const SequenceView& view) {
    return view.extent_count == 0 ? 0 : view.extents[view.extent_count - 1].tokens.end;
  }

  Work NextWork(const RecompressInput& input) const {
    if (!ReachesMinimum(input, plan_)) return {};
    const int32_t unit = format_.tokens, groups = input.view.tokens / unit;
    const auto parts = static_cast<int32_t>(parts_.size());
    Work work;
    for (int32_t at = 0; at < groups; work.kept += parts) {
      int32_t size = 1;
      while (size < most_ && at % (size * kJoined) == 0 && at + size * kJoined <= groups) {
        size *= kJoined;
      }
      work.tokens = {at * unit, (at + size) * unit};
      const bool there = work.kept + parts <= input.view.extent_count &&
                         input.view.extents[work.kept].tokens == work.tokens;
      if (!there) return work;
      at += size;
    }
    return {};
  }

  // What was sealed before the prompt was complete: its raw rows were still read then.
  bool OwesRelease(const RecompressInput& input) const {
    return !released_ && input.prompt_tokens >= 0 && EndOf(input.view) > 0;
  }

  // Groups that are written.
  struct Target {
    PlanesExtent extent;
    std::byte* upper;
    std::byte* lower;
  };

  static const CudaPlanesPacker* OnGpu(const RecompressInput& input) {
    return input.gpu_packers == nullptr
               ? nullptr
               : input.gpu_packers->Of<CudaPlanesPacker>(CodecKind::kPlanes);
  }

  // Groups that are sealed already must lie there, too.
  bool PacksInPlace(const RecompressInput& input, const Work& work) const {
    const CudaPlanesPacker* const packer = OnGpu(input);
    if (packer == nullptr) return false;
    for (int32_t i = work.kept; i < input.view.extent_count; ++i) {
      const PlanesPart& part = parts_[static_cast<size_t>(i) % parts_.size()];
      const bool on_device = input.view.extents[i].description != nullptr;
      if (!on_device && part.TierOf(plan_) == Tier::kDevice) return false;
    }
    return packer->Packs(input, geometry_, format_, {EndOf(input.view), work.tokens.end});
  }

  // Groups that an extent has are copied, the others packed.
  Result<std::vector<ExtentDraft>> Seal(const RecompressInput& input, const Work& work) const {
    KVS_ASSIGN_OR_RETURN(const std::vector<PlanesExtent> sources, Sources(input.view, work));
    if (const CudaPlanesPacker* const packer = OnGpu(input); packer != nullptr) {
      return packer->Seal(input, geometry_, format_, parts_, work.tokens, sources);
    }
    const int32_t end = EndOf(input.view);
    KVS_RETURN_IF_ERROR(CheckRawRows(input, geometry_, {end, work.tokens.end}));
    Target to = {{work.tokens, format_, (work.tokens.end - work.tokens.begin) / format_.tokens},
                 nullptr,
                 nullptr};
    std::vector<ExtentWriter> writers(parts_.size());
    for (size_t i = 0; i < parts_.size(); ++i) {
      ExtentWriter& writer = writers[i];
      const PlanesInfo info =
          ReservePlanes(geometry_, format_, to.extent.groups, parts_[i], &writer);
      writer.Allocate();
      *writer.At<PlanesInfo>(kPlanesInfoAt) = info;
      if (parts_[i].upper) to.upper = writer.At<std::byte>(info.upper);
      if (parts_[i].lower) to.lower = writer.At<std::byte>(info.lower);
    }
    KVS_RETURN_IF_ERROR(ForEachHead(input, geometry_, [&](const HeadIndex& head) {
      for (const PlanesExtent& from : sources) Copy(from, head, to);
      Pack(input, head, end, to);
    }));
    std::vector<ExtentDraft> drafts;
    for (size_t i = 0; i < parts_.size(); ++i) {
      drafts.push_back(
          {-1, writers[i].Finish(parts_[i].kind, geometry_, work.tokens, 0), work.tokens});
    }
    return drafts;
  }

  // The extents whose place the next one takes.
  Result<std::vector<PlanesExtent>> Sources(const SequenceView& view, const Work& work) const {
    std::vector<PlanesExtent> sources;
    std::span rest(view.extents + work.kept, static_cast<size_t>(view.extent_count - work.kept));
    while (!rest.empty()) {
      KVS_ASSIGN_OR_RETURN(const PlanesExtent extent, ReadPlanesExtent(&rest, geometry_));
      if (extent.format != format_ || extent.tokens.end > work.tokens.end) {
        return DamagedExtent(extent.tokens, "is none of the plan's");
      }
      sources.push_back(extent);
    }
    return sources;
  }

  void Copy(const PlanesExtent& from, const HeadIndex& head, const Target& to) const {
    const auto h = static_cast<int64_t>(head.flat);
    const int32_t first = (from.tokens.begin - to.extent.tokens.begin) / format_.tokens;
    std::memcpy(to.upper + to.extent.UpperAt(h, first), from.Upper(h, 0),
                static_cast<size_t>(from.groups * format_.upper_bytes()));
    std::memcpy(to.lower + to.extent.LowerAt(h, first), from.Lower(h, 0),
                static_cast<size_t>(from.groups * format_.lower_bytes()));
  }

  // The groups from position `begin` on.
  void Pack(const RecompressInput& input, const HeadIndex& head, int32_t begin,
            const Target& to) const {
    const auto h = static_cast<int64_t>(head.flat);
    const PageLayout layout = PageLayout::Of(geometry_);
    std::vector<PackPlanesWork> works;
    for (int32_t t = begin; t < to.extent.tokens.end; t += format_.tokens) {
      const int32_t group = (t - to.extent.tokens.begin) / format_.tokens;
      works.push_back({KeysOf(input.view.pages, layout, head.layer, head.kv_head),
                       ValuesOf(input.view.pages, layout, head.layer, head.kv_head), t, format_,
                       to.upper + to.extent.UpperAt(h, group),
                       to.lower + to.extent.LowerAt(h, group)});
    }
    input.backend->pack_planes(works.data(), static_cast<int64_t>(works.size()), InlineExecutor());
  }

  const Plan plan_;
  const Geometry geometry_;
  const PlanesFormat format_;
  const std::span<const PlanesPart> parts_;  // that a range of groups lies in
  int32_t most_ = 1;                         // groups of an extent
  bool released_ = false;  // a Run has said since the end of the prompt what may go
};

}  // namespace

std::unique_ptr<Recompressor> NewPlanesRecompressor(const Plan& plan, const Geometry& geometry,
                                                    int64_t extent_bytes) {
  return std::make_unique<PlanesRecompressor>(plan, geometry, extent_bytes);
}

// --- the codec's row

namespace {
constexpr std::string_view kArrays[] = {"upper", "lower"};
}

constinit const Codec kPlanesCodec = {
    .needs = kNeedPrefillDone,
    .whole_units = true,
    .drops_last = true,
    .serves_prompts_on_gpu = true,
    .recompressor = [](const Plan& plan, const Geometry& geometry,
                       ParametersPtr) { return NewPlanesRecompressor(plan, geometry); },
    .rest_waits = [](const Plan& plan) { return plan.planes.open_on_upper; },
    .gpu_packer = CudaPlanesPacker::Make,
    .parse = ParseAs<PlanesStorage>,
    .arrays_end = [](const ExtentFront&) -> int64_t { return 0; },  // its numbers are in the front
    // Rows that wait are attended.
    .why_raw = [](const Plan&, const SelectContext&) { return std::string(); },
    .status = [](const CodecProgress&) { return std::string(); },
    .arrays = kArrays,
    .inspect = InspectPlanes,
    .cost = PlanesCost,
};

}  // namespace kvstrata
