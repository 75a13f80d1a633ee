// SPDX-License-Identifier: Apache-2.0
// Codec lowrank: spans as coarse rows and low-rank factors (docs/spec/sekv.md; paper 3.1, 3.2).
//
// SpanStorage is the reading side. Spans are numbered from 0 over all kSpanSummary extents in order
// of position; a long prompt's are of several parts. Per part there are three extents:
// kSpanSummary, kSpanFactors, kRawRows. Rows of the range that lie in no span are raw rows,
// compacted in kRawRows; rows from end() on are on raw pages: the local window, generated tokens,
// and for a while what no part holds yet. Bytes: lowrank_layout.h, docs/extents.md. The writing
// side is the Recompressor of codec.h.
//
// Threads: immutable after Parse. Ownership: points into the extents; valid as long as they are.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/codec/extent.h"
#include "kernels/pages/inspect_array.h"
#include "kernels/plan/plan.h"
#include "kernels/plans/sekv/ops/span_ops.h"
#include "kernels/rows/select_context.h"
#include "kernels/rows/stored_rows.h"

namespace kvstrata {

class SpanStorage final : public StoredRows {
 public:
  // One range of positions with its spans.
  struct Part {
    Run tokens;
    int32_t first_span = 0, span_count = 0;
    int32_t raw_count = 0;                   // raw rows of the range
    const int32_t* raw_positions = nullptr;  // [raw_count], ascending
    const std::byte* raw_rows = nullptr;     // [layer][K|V][kv_head][raw_count][head_dim]
  };

  explicit SpanStorage(const Geometry& geometry) : StoredRows(true), geometry_(geometry) {}
  // DATA_LOSS EXTENT_INVALID.
  static Result<std::unique_ptr<SpanStorage>> Parse(const SequenceView& view,
                                                    const Geometry& geometry);

  // Slices of a part: its raw rows, which are always on, the spans that are expanded (units) and
  // those that are read as one row (coarse).
  void PlanSlices(const Selection& selection, int32_t first_head, int32_t stored_end,
                  StoredPlan* plan) const override;
  void AddSlice(const Selection& selection, const StoredSlice& slice, std::span<const Run> runs,
                const QueryTile& tile, AttendWorks* works) const override;
  void CountReads(const HeadReads& reads, ReadCost* cost) const override;
  void AppendUnits(std::span<const int32_t> units, std::vector<Run>* runs) const override;
  // Computes those of spans at once, in fp32.
  void AddScores(const KeyScores& scores, ScoreWorks* works) const override;
  int64_t KeyBytes(int layer, Run range) const override;

  const std::vector<Part>& parts() const { return parts_; }
  int32_t raw_rows() const;  // those of all parts
  // Keys or values of a span, layer and KV head that are rows since factors lost more than
  // max_loss.
  int64_t refused() const { return refused_; }
  const std::vector<Run>& spans() const { return spans_; }
  const std::vector<float>& log_length() const { return log_length_; }  // [spans] ln |S|
  bool trained() const { return trained_; }
  const std::vector<int32_t>& anchors() const { return anchors_; }  // positions

  // Coarse rows of one part: unit u of the rows is span first_span + u. bf16.
  PagedRows KeyMeans(int part, int layer, int kv_head) const;
  PagedRows ValueMeans(int part, int layer, int kv_head) const;
  // Raw rows of one part as one page: row i is raw_positions[i].
  PagedRows RawKeys(int part, int layer, int kv_head) const;
  PagedRows RawValues(int part, int layer, int kv_head) const;
  // Factors of a span.
  LowRankSpan Factors(int span, int layer, int kv_head) const;

  // Routing (docs/spec/sekv.md 6, 7): tau of a query head, 0 where nothing is trained.
  float Threshold(int layer, int query_head) const;
  // REQUIRES: trained(). W [d_route][head_dim] of a query head; 1 / |W k_mean| of span
  // `first_span + u` of a part at [u], 0 where |W k_mean| is 0.
  int32_t d_route() const { return d_route_; }
  const float* Router(int layer, int query_head) const;
  const float* InverseNorms(int part, int layer, int query_head) const;

  // For kernels: where in a part's extents the values are that the functions above return.
  struct Addresses {
    const void* spans;          // i32 [span_count][2]
    const void* entries;        // [layers][kv_heads][span_count], docs/extents.md kind 3
    const void* factors;        // what entries count from
    const float *router, *tau;  // for all parts, in the first; else null
    int32_t routers;            // query_heads; 0 (and no W) where nothing is trained
  };
  Addresses AddressesOf(int part) const;
  // Names this Parse in this process; never 0.
  uint64_t id() const { return id_; }

 private:
  struct Layout;  // lowrank.cc

  Status ReadPart(const ExtentView* extents);

  std::vector<Part> parts_;
  std::vector<Run> spans_;
  std::vector<float> log_length_;
  std::vector<int32_t> anchors_;
  std::vector<std::shared_ptr<const Layout>> layouts_;  // one a part
  const Geometry geometry_;
  int64_t refused_ = 0;
  int32_t d_route_ = 0;
  bool trained_ = false;
  uint64_t id_ = 0;
};

// Null where rows are not stored so.
inline const SpanStorage* SpansOf(const StoredRows* stored) {
  return dynamic_cast<const SpanStorage*>(stored);
}
inline const SpanStorage* SpansOf(const SelectContext& context) { return SpansOf(context.stored); }

// Whether a sequence of so many tokens has outgrown full attention over the plan's rows: only then
// are spans made (docs/spec/README.md: N counts the next token).
bool OutgrowsRows(const Plan& plan, int32_t tokens);

// What a sequence's status says of max_loss: how many matrices stayed rows; "" none. `spans` null:
// nothing is compressed.
std::string MaxLossText(const Plan& plan, const Geometry& geometry, const SpanStorage* spans);

// Arrays of tests/golden/README.md: "anchors", "raw", "spans", "k_mean", "v_mean", "k_rank",
// "v_rank", "k_longest", "v_longest".
Result<InspectArray> InspectSpans(const SelectContext& context, std::string_view name);

}  // namespace kvstrata
