// SPDX-License-Identifier: Apache-2.0
// ToyCodec: the smallest codec there can be, for the conformance suite of stored rows: fp32 rows of
// `kUnit` tokens an extent, each key beside its value. All of it is this file and a row in
// stored_codecs.cc.
//
// Threads: as StoredRows and Recompressor.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/codec/codec.h"
#include "kernels/codec/extent_bytes.h"

namespace kvstrata::testing {

class ToyRows final : public StoredRows {
 public:
  static constexpr int32_t kUnit = 24;

  explicit ToyRows(const Geometry& geometry) : StoredRows(false), g_(geometry) {}

  static Result<std::unique_ptr<StoredRows>> Parse(const SequenceView& view, const Geometry& g) {
    auto rows = std::make_unique<ToyRows>(g);
    for (int32_t i = 0; i < view.extent_count; ++i) {
      KVS_ASSIGN_OR_RETURN(const ExtentReader reader,
                           ExtentReader::Open(view.extents[i], g, ExtentKind::kRawRows));
      const auto* data = reader.Array<std::byte>(sizeof(ExtentHeader), Bytes(g));
      const Run unit{rows->end(), rows->end() + kUnit};
      if (data == nullptr || reader.tokens() != unit) return DamagedExtent(unit, "no unit");
      rows->units_.push_back(const_cast<std::byte*>(data));
      rows->EndAt(unit.end);
    }
    return Result<std::unique_ptr<StoredRows>>(std::move(rows));
  }
  static int64_t Bytes(const Geometry& g) {
    return int64_t{g.layers} * g.kv_heads * kUnit * 2 * g.head_dim * SizeOf(DType::kF32);
  }

  void PlanSlices(const Selection& selection, int32_t first_head, int32_t stored_end,
                  StoredPlan* plan) const override {
    const auto& lists = selection.runs;
    for (const Run& run : lists[ListOf(lists.size(), first_head, g_.query_heads)]) {
      const int32_t end = std::min(run.end, stored_end);
      for (int32_t t = run.begin; t < end;) {
        const int32_t unit = t / kUnit, stop = std::min(end, (unit + 1) * kUnit);
        plan->slices.push_back({0, unit, plan->runs.size(), 1});
        plan->runs.push_back({t - unit * kUnit, stop - unit * kUnit});
        t = stop;
      }
    }
  }
  void AddSlice(const Selection&, const StoredSlice& slice, std::span<const Run> runs,
                const QueryTile& tile, AttendWorks* works) const override {
    auto w = AttendWorks::ItemOf<AttendWork>(tile);
    w.k = Side(slice.source, tile.layer, tile.kv_head, 0);
    w.v = Side(slice.source, tile.layer, tile.kv_head, 1);
    w.position = kUnit;  // every query sees every row
    w.runs = runs.data();
    w.run_count = static_cast<int32_t>(runs.size());
    works->Add(w);
  }
  void CountReads(const HeadReads& reads, ReadCost* cost) const override {
    cost->Add(RowsIn(reads.runs, {0, reads.stored_end}), static_cast<uint64_t>(2 * RowBytes()));
  }
  void AppendUnits(std::span<const int32_t>, std::vector<Run>*) const override {}
  void AddScores(const KeyScores& scores, ScoreWorks* works) const override {
    for (int32_t t = scores.range.begin; t < scores.range.end;) {
      const int32_t unit = t / kUnit, stop = std::min(scores.range.end, (unit + 1) * kUnit);
      ScoreTokensWork w;
      w.rows = Side(unit, scores.layer, scores.kv_head, 0);
      w.run = {t - unit * kUnit, stop - unit * kUnit};
      w.q = scores.q;
      w.queries = scores.queries;
      w.scale = scores.scale;
      w.out = scores.out + (t - scores.range.begin);
      w.out_query = scores.out_query;
      works->Add(w);
      t = stop;
    }
  }
  int64_t KeyBytes(int, Run range) const override {
    return (range.end - range.begin) * g_.kv_heads * RowBytes();
  }

 private:
  int64_t RowBytes() const { return g_.head_dim * SizeOf(DType::kF32); }
  // Keys (0) or values (1) of a unit.
  PagedRows Side(int32_t unit, int layer, int kv_head, int64_t side) const {
    const int64_t head = (int64_t{layer} * g_.kv_heads + kv_head) * kUnit;
    return {&units_[static_cast<size_t>(unit)],
            (2 * head + side) * RowBytes(),
            2 * RowBytes(),
            kUnit,
            g_.head_dim,
            DType::kF32};
  }

  const Geometry g_;
  std::vector<std::byte*> units_;
};

class ToyRecompressor final : public Recompressor {
 public:
  explicit ToyRecompressor(const Geometry& geometry) : g_(geometry) {}

  bool Due(const RecompressInput& in) const override {
    return in.prompt_tokens >= 0 && (in.view.extent_count + 1) * ToyRows::kUnit <= in.view.tokens;
  }
  Result<RecompressOutput> Run(const RecompressInput& in) override {
    RecompressOutput out;
    for (int32_t i = 0; i < in.view.extent_count; ++i) {
      out.extents.push_back({i, {}, in.view.extents[i].tokens});
    }
    if (!Due(in)) return out;
    const int32_t begin = in.view.extent_count * ToyRows::kUnit;
    ExtentWriter writer;
    const uint64_t at = writer.Reserve(ToyRows::Bytes(g_));
    writer.Allocate();
    auto* to = writer.At<float>(at);
    for (int layer = 0; layer < g_.layers; ++layer) {
      for (int h = 0; h < g_.kv_heads; ++h) {
        const PagedRows k = KeysOf(in.view.pages, PageLayout::Of(g_), layer, h);
        const PagedRows v = ValuesOf(in.view.pages, PageLayout::Of(g_), layer, h);
        for (int32_t t = begin; t < begin + ToyRows::kUnit; ++t) {
          for (const PagedRows* side : {&k, &v}) {
            for (int c = 0; c < g_.head_dim; ++c) {
              *to++ = ToFloat(reinterpret_cast<const BF16*>(side->Row(t))[c]);
            }
          }
        }
      }
    }
    const kvstrata::Run tokens{begin, begin + ToyRows::kUnit};
    out.extents.push_back({-1, writer.Finish(ExtentKind::kRawRows, g_, tokens, 0), tokens});
    out.released = {{0, tokens.end}};
    return out;
  }
  RecompressReads Reads(const RecompressInput& in) const override {
    return {{0, in.view.tokens}, {}, false};
  }
  int64_t ReleasableBytes(const RecompressInput&) const override { return 0; }
  std::unique_ptr<Recompressor> Clone() const override {
    return std::make_unique<ToyRecompressor>(*this);
  }

 private:
  const Geometry g_;
};

inline constexpr std::string_view kToyArrays[] = {"units"};

inline constexpr Codec kToyCodec = {
    .recompressor = [](const Plan&, const Geometry& geometry, ParametersPtr)
        -> std::unique_ptr<Recompressor> { return std::make_unique<ToyRecompressor>(geometry); },
    .parse = ToyRows::Parse,
    .status =
        [](const CodecProgress& p) {
          return std::string(p.stored == nullptr ? "toy: nothing yet" : "toy");
        },
    .arrays = kToyArrays,
    .inspect = [](const SelectContext& context, std::string_view) -> Result<InspectArray> {
      return ArrayOf(InspectArray::Type::kI32,
                     std::vector<int32_t>{context.stored->end() / ToyRows::kUnit});
    },
};

}  // namespace kvstrata::testing
