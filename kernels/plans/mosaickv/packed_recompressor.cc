// SPDX-License-Identifier: Apache-2.0
// Prompt segments, flushes of the update buffer and closings, one unit a Run.
//
// All state lies in the extents: which rows are packed, with whose plans, and what the open segment
// has lost so far. So a clone, a restart and a sequence that found its prefix packed go on from
// the view alone, and when a worker lags, the same units follow each other later.
//
// The open segment's extents join like the digits of a counter in base 8, without packing
// a row twice: a reader meets few of them, and a flush copies few bytes.
//
// What would lose more than the plan's max_loss is packed by a milder strategy (loss_limit.h), and
// flushes follow the rows before them. Where the mildest loses too much, rows stay raw from there
// on.
#include "kernels/plans/mosaickv/packed_recompressor.h"

#include <algorithm>

#include "base/check.h"
#include "kernels/codec/head_loop.h"
#include "kernels/plans/mosaickv/loss_limit.h"
#include "kernels/plans/mosaickv/segment_packer.h"

namespace kvstrata {
namespace {

constexpr size_t kJoined = 8;
// Extents of a segment begin at multiples of every block size, whatever the heads' strategies.
constexpr int32_t kSplitTokens = 64;

// What the extents say.
struct PackedState {
  int32_t end = 0;          // rows [0, end) are packed
  int32_t final_end = 0;    // and [0, final_end) in final segments
  int32_t final_count = 0;  // extents of those; the open segment's follow
  Run plan_tokens;          // the last final segment, also where it is not yet packed
  int32_t plan = -1;        // the extent with its rotations
  double own_loss = 0;      // its mean relative error, once it is packed
  PackedInfo last = {};     // info of the last extent
};

Result<int32_t> FindPlanExtent(const SequenceView& view, int32_t count, int32_t begin) {
  const ExtentView* const end = view.extents + count;
  const ExtentView* const found = std::lower_bound(
      view.extents, end, begin, [](const ExtentView& e, int32_t t) { return e.tokens.begin < t; });
  if (found == end || found->tokens.begin != begin) {
    return DamagedExtent({begin, begin}, "is named by a later one and missing");
  }
  return static_cast<int32_t>(found - view.extents);
}

Result<PackedState> ReadState(const SequenceView& view, const Geometry& geometry) {
  PackedState state;
  if (view.extent_count == 0) return state;
  state.end = view.extents[view.extent_count - 1].tokens.end;
  for (int32_t i = view.extent_count - 1; i >= 0; --i) {
    KVS_ASSIGN_OR_RETURN(const PackedStub stub, ReadPackedStub(view.extents[i], geometry));
    if (i == view.extent_count - 1) state.last = stub.info;
    if (!stub.final) continue;
    state.final_end = stub.tokens.end;
    state.final_count = i + 1;
    state.plan_tokens = {stub.info.plan_begin, stub.info.plan_end};
    state.own_loss = stub.info.loss / (stub.info.plan_end - stub.info.plan_begin);
    KVS_ASSIGN_OR_RETURN(state.plan, FindPlanExtent(view, i + 1, stub.info.plan_begin));
    return state;
  }
  return DamagedExtent({0, state.end}, "no final segment comes before the temporary one");
}

enum class Unit { kNone, kPrompt, kRest, kFlush, kClose, kRelease };
struct Work {
  Unit unit = Unit::kNone;
  Run tokens;  // packed finally, or flushed
};

class PackedRecompressor final : public Recompressor {
 public:
  PackedRecompressor(const Plan& plan, const Geometry& geometry, int64_t extent_bytes)
      : plan_(plan), geometry_(geometry), extent_bytes_(extent_bytes) {
    // A flush holds whole blocks.
    KVS_CHECK(plan.packed.buffer > 0 && plan.packed.buffer % kSearchedBlocks.front() == 0);
    KVS_CHECK(plan.packed.segment > 0);
  }

  bool Due(const RecompressInput& input) const override {
    return NextWork(input).unit != Unit::kNone;
  }

  int64_t ReleasableBytes(const RecompressInput& input) const override {
    const Work work = NextWork(input);
    const bool releases =
        work.unit != Unit::kNone && work.unit != Unit::kFlush && work.unit != Unit::kRelease;
    return releases ? RawBytes(geometry_, work.tokens.end - work.tokens.begin) : 0;
  }

  Result<RecompressOutput> Run(const RecompressInput& input) override {
    KVS_ASSIGN_OR_RETURN(const PackedState state, ReadState(input.view, geometry_));
    const Work work = NextWork(input, state);
    released_ = released_ || input.prompt_tokens >= 0;
    const SegmentPacker* const on_gpu = OnGpu(input);
    const SegmentPacker& packer = on_gpu == nullptr ? HostPacker() : *on_gpu;
    switch (work.unit) {
      case Unit::kPrompt:
      case Unit::kClose:
        return PackFinally(input, state, work, packer);
      case Unit::kRest:
        return PackRest(input, state, work.tokens, packer);
      case Unit::kFlush:
        return Flush(input, state, work.tokens, packer);
      case Unit::kRelease:
      case Unit::kNone:
        break;
    }
    return RecompressOutput{KeepFirst(input.view, input.view.extent_count),
                            ReleasedRows(input, state.final_end)};
  }

  RecompressReads Reads(const RecompressInput& input) const override {
    const Result<PackedState> state = ReadState(input.view, geometry_);
    if (!state.ok()) return {};
    const Work work = NextWork(input, *state);
    if (work.unit == Unit::kNone || work.unit == Unit::kRelease) return {};
    if (PacksInPlace(input, *state, work)) return {.in_place = true};
    RecompressReads reads = {work.tokens, {}};
    if (work.unit == Unit::kPrompt || work.unit == Unit::kClose) return reads;
    reads.extents.push_back(state->plan);
    if (work.unit == Unit::kRest) {
      const auto first = ReadPackedExtent(input.view.extents[state->plan], geometry_);
      if (!first.ok()) return {};
      reads.rows.end = EndOfNext(PlansIn(*first), work.tokens);
      return reads;
    }
    for (int32_t i = state->final_count; i < input.view.extent_count; ++i) {
      reads.extents.push_back(i);
    }
    return reads;
  }

  std::unique_ptr<Recompressor> Clone() const override {
    return std::make_unique<PackedRecompressor>(*this);
  }

 private:
  using Tokens = kvstrata::Run;

  bool released_ = false;  // a Run has said since the end of the prompt what may go
  bool stopped_ = false;   // a Run has found rows that no strategy keeps within max_loss
  bool warned_ = false;    // a Run has said that a strategy was not taken

  // --- what comes next ---

  Work NextWork(const RecompressInput& input) const {
    if (!ReachesMinimum(input, plan_)) return {};
    const Result<PackedState> state = ReadState(input.view, geometry_);
    return state.ok() ? NextWork(input, *state) : Work{};
  }

  Work NextWork(const RecompressInput& input, const PackedState& s) const {
    if (!ReachesMinimum(input, plan_)) return {};
    if (stopped_) return Release(input, s);
    if (s.final_end < s.plan_tokens.end) return {Unit::kRest, {s.final_end, s.plan_tokens.end}};
    const bool is_open = s.end > s.final_end;
    if (is_open && (MustClose(s) || s.end < input.prompt_tokens)) {
      return {Unit::kClose, {s.final_end, s.end}};
    }
    const int32_t waiting = input.view.tokens - s.end;
    if (input.prompt_tokens < 0) {
      if (waiting < plan_.packed.segment) return {};
      return {Unit::kPrompt, {s.end, s.end + plan_.packed.segment}};
    }
    if (s.end < input.prompt_tokens) {
      return {Unit::kPrompt,
              {s.end, s.end + std::min(plan_.packed.segment, input.prompt_tokens - s.end)}};
    }
    if (const Work release = Release(input, s); release.unit != Unit::kNone) return release;
    if (waiting < plan_.packed.buffer) return {};
    // Without a prompt the first flush has no plans to be packed with: it makes them.
    return {s.plan < 0 ? Unit::kPrompt : Unit::kFlush, {s.end, s.end + plan_.packed.buffer}};
  }

  // Segments that were complete before the prompt was: their raw rows were still read then.
  Work Release(const RecompressInput& input, const PackedState& s) const {
    if (input.prompt_tokens < 0 || released_ || s.final_end == 0) return {};
    return {Unit::kRelease, {0, s.final_end}};
  }

  // That of this codec's row.
  static const SegmentPacker* OnGpu(const RecompressInput& input) {
    return input.gpu_packers == nullptr ? nullptr
                                        : input.gpu_packers->Of<SegmentPacker>(CodecKind::kPacked);
  }

  // Where plans and open extents are made already, they must lie there too. What is closed at once
  // may need more memory than a GPU has to spare.
  bool PacksInPlace(const RecompressInput& input, const PackedState& s, const Work& work) const {
    if (OnGpu(input) == nullptr || work.unit == Unit::kClose) return false;
    const auto is_on_device = [](const ExtentView& e) { return e.description != nullptr; };
    const ExtentView* const extents = input.view.extents;
    if (work.unit != Unit::kPrompt && !is_on_device(extents[s.plan])) return false;
    if (work.unit == Unit::kFlush &&
        !std::all_of(extents + s.final_count, extents + input.view.extent_count, is_on_device)) {
      return false;
    }
    return OnGpu(input)->Packs(input, geometry_, plan_, work.tokens);
  }

  bool MustClose(const PackedState& s) const {
    const int32_t length = s.end - s.final_end;
    if (length >= plan_.packed.segment) return true;
    if (plan_.packed.drift <= 0) return s.last.loss > plan_.packed.close_loss;
    return length >= plan_.packed.min_segment && s.last.recent > plan_.packed.drift * s.own_loss;
  }

  // --- final segments ---

  // Plans of their own for `work.tokens`. A prompt segment is packed extent by extent, so that its
  // raw rows go as it proceeds; a closed one is switched at once.
  Result<RecompressOutput> PackFinally(const RecompressInput& input, const PackedState& state,
                                       const Work& work, const SegmentPacker& packer) {
    KVS_ASSIGN_OR_RETURN(const SegmentPlans plans,
                         packer.FindPlans(input, geometry_, plan_, work.tokens));
    RecompressOutput output = {KeepFirst(input.view, state.final_count), {}};
    PackedRange range = {{work.tokens.begin, work.tokens.begin}, true, {}};
    range.info.plan_begin = work.tokens.begin;
    range.info.plan_end = work.tokens.end;
    do {
      KVS_ASSIGN_OR_RETURN(const bool packed, PackNext(input, plans, packer, &range, &output));
      if (!packed) return Stop(input, state, range);
    } while (work.unit == Unit::kClose && range.tokens.end < work.tokens.end);
    output.released = ReleasedRows(input, range.tokens.end);
    return output;
  }

  // One more extent of a segment whose plans lie in its first one.
  Result<RecompressOutput> PackRest(const RecompressInput& input, const PackedState& state,
                                    Tokens tokens, const SegmentPacker& packer) {
    KVS_ASSIGN_OR_RETURN(const PackedExtent first,
                         ReadPackedExtent(input.view.extents[state.plan], geometry_));
    if (!first.has_rotations()) return DamagedExtent(first.tokens, "has no rotations");
    RecompressOutput output = {KeepFirst(input.view, state.final_count), {}};
    PackedRange range = {{tokens.begin, tokens.begin}, true, {}};
    range.info.plan_begin = first.tokens.begin;
    range.info.plan_end = tokens.end;
    range.info.loss = state.last.loss;
    KVS_ASSIGN_OR_RETURN(const bool packed,
                         PackNext(input, PlansIn(first), packer, &range, &output));
    if (!packed) return Stop(input, state, range);
    output.released = ReleasedRows(input, range.tokens.end);
    return output;
  }

  // Where an extent of the first of `tokens`, as many as it may hold, ends.
  int32_t EndOfNext(const SegmentPlans& plans, Tokens tokens) const {
    const int64_t fitting = extent_bytes_ / PackedBytesPerToken(geometry_, plan_, plans);
    const int64_t rows = std::max<int64_t>(fitting / kSplitTokens, 1) * kSplitTokens;
    return static_cast<int32_t>(std::min<int64_t>(tokens.begin + rows, tokens.end));
  }

  // Packs as many tokens after range->tokens as an extent may hold, and moves the range there.
  // Whether that keeps max_loss; if not, range->info says what was lost, and nothing is added.
  Result<bool> PackNext(const RecompressInput& input, SegmentPlans plans,
                        const SegmentPacker& packer, PackedRange* range, RecompressOutput* output) {
    const int32_t begin = range->tokens.end;
    range->tokens = {begin, EndOfNext(plans, {begin, range->info.plan_end})};
    KVS_ASSIGN_OR_RETURN(LimitedPack limited,
                         PackWithinLimit(packer, input, geometry_, plan_, *range, {}, &plans));
    PackedBytes& packed = limited.packed;
    if (!limited.fits) {
      range->info = packed.info;
      return false;
    }
    Warn(range->tokens, packed.info, plans, output);
    range->info.loss = packed.info.loss;
    output->extents.push_back(
        {-1, std::move(packed.bytes), range->tokens, plan_.tier, std::move(packed.on_device)});
    return true;
  }

  // --- what loses too much ---

  // Everything stays as it is: the range, whose loss is in range.info, and what follows it are raw.
  Result<RecompressOutput> Stop(const RecompressInput& input, const PackedState& state,
                                const PackedRange& range) {
    stopped_ = true;
    RecompressOutput output = {KeepFirst(input.view, input.view.extent_count),
                               ReleasedRows(input, state.final_end)};
    if (!warned_) output.warning = DescribeRaw(plan_, range.tokens, range.info);
    warned_ = true;
    return output;
  }

  // Once a sequence.
  void Warn(Tokens tokens, const PackedInfo& info, const SegmentPlans& taken,
            RecompressOutput* output) {
    if (info.refused_loss == 0 || warned_) return;
    warned_ = true;
    output->warning = DescribeLoss(plan_, tokens, info.refused_loss,
                                   taken.heads.front().strategy.keep, info.worst_loss);
  }

  // --- the open segment ---

  struct OpenExtent {
    PackedExtent extent;
    int32_t kept = -1;   // number of an extent of the view, or
    PackedBytes packed;  // new
  };

  Result<RecompressOutput> Flush(const RecompressInput& input, const PackedState& state,
                                 Tokens tokens, const SegmentPacker& packer) {
    KVS_ASSIGN_OR_RETURN(const PackedExtent plan,
                         ReadPackedExtent(input.view.extents[state.plan], geometry_));
    if (!plan.has_rotations()) return DamagedExtent(plan.tokens, "has no rotations");
    KVS_ASSIGN_OR_RETURN(std::vector<OpenExtent> open, ReadOpen(input.view, state.final_count));
    PackedRange range = {tokens, false, {}};
    range.info.plan_begin = plan.tokens.begin;
    range.info.buffer = plan_.packed.buffer;
    range.info.loss = open.empty() ? 0 : state.last.loss;
    SegmentPlans plans = PlansIn(plan);
    if (!open.empty()) TakeStrategies(open.back().extent, &plans);
    RecompressOutput output = {KeepFirst(input.view, state.final_count),
                               ReleasedRows(input, state.final_end)};
    KVS_ASSIGN_OR_RETURN(LimitedPack limited, PackWithinLimit(packer, input, geometry_, plan_,
                                                              range, LossesOf(open), &plans));
    PackedBytes& packed = limited.packed;
    if (!limited.fits) {
      range.info = packed.info;
      return Stop(input, state, range);
    }
    Warn(tokens, packed.info, plans, &output);
    KVS_RETURN_IF_ERROR(AddOpen(std::move(packed), tokens, &open));
    while (CanJoin(open)) KVS_RETURN_IF_ERROR(JoinLast(packer, &open));
    for (OpenExtent& p : open) {
      output.extents.push_back({p.kept, std::move(p.packed.bytes), p.extent.tokens, plan_.tier,
                                std::move(p.packed.on_device)});
    }
    return output;
  }

  Result<std::vector<OpenExtent>> ReadOpen(const SequenceView& view, int32_t first) const {
    std::vector<OpenExtent> open;
    for (int32_t i = first; i < view.extent_count; ++i) {
      KVS_ASSIGN_OR_RETURN(PackedExtent extent, ReadPackedExtent(view.extents[i], geometry_));
      open.push_back({std::move(extent), i, {}});
    }
    return open;
  }

  static std::vector<double> LossesOf(const std::vector<OpenExtent>& open) {
    std::vector<double> losses;
    for (const OpenExtent& p : open) {
      const int32_t flushes = p.extent.rows() / p.extent.info.buffer;
      losses.insert(losses.end(), p.extent.flushes, p.extent.flushes + flushes);
    }
    return losses;
  }

  Status AddOpen(PackedBytes packed, Tokens tokens, std::vector<OpenExtent>* open) const {
    const auto front = static_cast<int64_t>(packed.bytes.size());
    ExtentView view = {packed.bytes.data(), front, tokens};
    if (packed.on_device.data != nullptr) {
      view = {packed.on_device.data.get(), static_cast<int64_t>(packed.on_device.size), tokens,
              packed.bytes.data(), front};
    }
    KVS_ASSIGN_OR_RETURN(PackedExtent extent, ReadPackedExtent(view, geometry_));
    open->push_back({std::move(extent), -1, std::move(packed)});
    return OkStatus();
  }

  bool CanJoin(const std::vector<OpenExtent>& open) const {
    if (open.size() < kJoined) return false;
    const int32_t rows = open.back().extent.rows();
    int64_t bytes = 0;
    for (auto p = open.end() - kJoined; p != open.end(); ++p) {
      if (p->extent.rows() != rows || !SameStrategies(p->extent, open.back().extent)) {
        return false;
      }
      bytes += p->extent.bytes;
    }
    return bytes <= extent_bytes_;
  }

  Status JoinLast(const SegmentPacker& packer, std::vector<OpenExtent>* open) const {
    const auto first = open->end() - kJoined;
    std::vector<PackedExtent> extents;
    for (auto p = first; p != open->end(); ++p) extents.push_back(p->extent);
    KVS_ASSIGN_OR_RETURN(PackedBytes joined, packer.Join(geometry_, extents));
    const Tokens tokens = {extents.front().tokens.begin, extents.back().tokens.end};
    open->erase(first, open->end());
    return AddOpen(std::move(joined), tokens, open);
  }

  Plan plan_;
  Geometry geometry_;
  int64_t extent_bytes_;
};

}  // namespace

std::unique_ptr<Recompressor> NewPackedRecompressor(const Plan& plan, const Geometry& geometry,
                                                    int64_t extent_bytes) {
  return std::make_unique<PackedRecompressor>(plan, geometry, extent_bytes);
}

}  // namespace kvstrata
