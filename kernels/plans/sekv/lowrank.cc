// SPDX-License-Identifier: Apache-2.0
// The reading side: parts of three extents each. Everything is held against sizes here, once, so
// that the accessors only add.
#include "kernels/plans/sekv/lowrank.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <string>

#include "kernels/codec/head_loop.h"
#include "kernels/plan/plan_needs.h"
#include "kernels/plans/sekv/lowrank_layout.h"
#include "kernels/plans/sekv/lowrank_recompressor.h"
#include "kernels/plans/sekv/span_rows.h"
#include "kernels/segment/span_rule.h"

namespace kvstrata {

// Addresses of one part.
struct SpanStorage::Layout {
  int32_t span_count = 0, raw_count = 0, routers = 0;
  const float* router = nullptr;
  const float* tau = nullptr;
  const float* inverse_norms = nullptr;
  const FactorEntry* entries = nullptr;
  const std::byte* factors = nullptr;  // the extent: entries hold offsets into it
  Addresses addresses = {};
  // Pages of the rows that PagedRows dresses: their addresses must stay.
  std::byte* k_mean_page = nullptr;
  std::byte* v_mean_page = nullptr;
  std::byte* raw_page = nullptr;
};

namespace {

std::byte* PageOf(const void* rows) {
  return const_cast<std::byte*>(static_cast<const std::byte*>(rows));  // PagedRows are read only
}

bool Ascends(const int32_t* values, int32_t count) {
  for (int32_t i = 0; i < count; ++i) {
    if (values[i] < 0 || (i > 0 && values[i] <= values[i - 1])) return false;
  }
  return true;
}

// `rows` as spans inside `range`; empty when they are none, though count > 0.
bool ReadSpans(const int32_t* pairs, int32_t count, Run range, std::vector<Run>* spans) {
  int32_t at = range.begin;
  for (int32_t i = 0; i < count; ++i) {
    const Run s = {pairs[2 * i], pairs[2 * i + 1]};
    if (s.begin < at || s.end <= s.begin || s.end > range.end) return false;
    spans->push_back(s);
    at = s.end;
  }
  return true;
}

bool FactorFits(const ExtentReader& reader, uint64_t at, int32_t n, int32_t rank, int32_t dim) {
  if (rank == -1) return reader.Array<BF16>(at, int64_t{n} * dim) != nullptr;
  if (rank < 1 || rank > std::min({n, dim, kMaxRank})) return false;
  return reader.Array<BF16>(at, int64_t{n} * rank) != nullptr &&
         reader.Array<BF16>(RightFactorAt(at, n, rank), int64_t{rank} * dim) != nullptr;
}

LowRankRows FactorAt(const std::byte* base, uint64_t at, int32_t n, int32_t rank) {
  const auto* left = reinterpret_cast<const BF16*>(base + at);
  if (rank < 0) return {left, nullptr, rank};
  return {left, reinterpret_cast<const BF16*>(base + RightFactorAt(at, n, rank)), rank};
}

// The summary's scalars and arrays; what belongs to the storage as a whole goes to the others.
struct Summary {
  std::vector<Run> spans;
  std::vector<int32_t> anchors;
  int32_t d_route = 0;
  bool trained = false;
};

struct SummaryAddresses {
  const int32_t* spans;
  const BF16* k_mean;
  const BF16* v_mean;
  const float* router;
  const float* tau;
  const float* inverse_norms;
  int32_t span_count, routers;
};

// W and tau, which only the first part holds. Untrained there is no W to read, whatever the extent
// has.
bool ReadRouters(const ExtentReader& reader, const SpanInfo& info, const Geometry& g, bool first,
                 bool trained, SummaryAddresses* out) {
  if (!first) return info.routers == 0;
  out->tau = reader.Array<float>(info.tau, int64_t{g.layers} * g.query_heads);
  if (!trained) return out->tau != nullptr;
  out->routers = info.routers;
  if (info.routers != g.query_heads) return false;
  if (info.d_route < 1 || info.d_route > g.head_dim) return false;
  out->router = reader.Array<float>(info.router,
                                    int64_t{g.layers} * info.routers * info.d_route * g.head_dim);
  return out->router != nullptr && out->tau != nullptr;
}

Status ReadSummary(const ExtentReader& reader, const Geometry& g, bool first, Summary* summary,
                   SummaryAddresses* out) {
  const auto damaged = [&](std::string_view what) { return DamagedExtent(reader.tokens(), what); };
  const uint32_t flags = reader.header().flags;
  const auto* at = reader.Read<SpanInfo>(kSpanInfoAt, 1);
  if (at == nullptr || (flags & ~kSpansTrained) != 0) return damaged("too short, or its flags");
  const SpanInfo info = *at;
  summary->trained = (flags & kSpansTrained) != 0;
  summary->d_route = summary->trained ? info.d_route : 0;
  const auto* pairs = reader.Read<int32_t>(info.spans, int64_t{info.span_count} * 2);
  if (pairs == nullptr || !ReadSpans(pairs, info.span_count, reader.tokens(), &summary->spans)) {
    return damaged("its spans lie outside");
  }
  out->spans = reader.Array<int32_t>(info.spans, int64_t{info.span_count} * 2);
  const auto* anchors = reader.Read<int32_t>(info.anchors, info.anchor_count);
  if (anchors == nullptr || !Ascends(anchors, info.anchor_count)) return damaged("its anchors");
  summary->anchors.assign(anchors, anchors + info.anchor_count);
  const int64_t means = HeadCount(g) * info.span_count * g.head_dim;
  out->span_count = info.span_count;
  out->k_mean = reader.Array<BF16>(info.k_mean, means);
  out->v_mean = reader.Array<BF16>(info.v_mean, means);
  const int64_t norms = summary->trained ? int64_t{g.layers} * g.query_heads * info.span_count : 0;
  out->inverse_norms = reader.Array<float>(info.inverse_norms, norms);
  if (out->k_mean == nullptr || out->v_mean == nullptr || out->inverse_norms == nullptr) {
    return damaged("its means lie outside");
  }
  return ReadRouters(reader, info, g, first, summary->trained, out) ? OkStatus()
                                                                    : damaged("its routers");
}

// Entries to be read here, and where they lie in the extent.
struct EntryArrays {
  const FactorEntry *readable, *in_extent;
  int32_t refused;
};

Result<EntryArrays> ReadFactors(const ExtentReader& reader, const Geometry& g,
                                const std::vector<Run>& spans) {
  const auto* info = reader.Read<FactorsInfo>(kSpanInfoAt, 1);
  const auto count = static_cast<int64_t>(spans.size());
  const FactorEntry* entries = nullptr;
  if (info != nullptr && info->span_count == count && reader.header().flags == 0) {
    entries = reader.Read<FactorEntry>(info->entries, HeadCount(g) * count);
  }
  if (entries == nullptr) return DamagedExtent(reader.tokens(), "its factors lie outside");
  for (int64_t i = 0; i < HeadCount(g) * count; ++i) {
    const Run s = spans[static_cast<size_t>(i % count)];
    const FactorEntry& e = entries[i];
    if (FactorFits(reader, e.k, s.end - s.begin, e.k_rank, g.head_dim) &&
        FactorFits(reader, e.v, s.end - s.begin, e.v_rank, g.head_dim)) {
      continue;
    }
    return DamagedExtent(reader.tokens(), "factors " + std::to_string(i) + " lie outside");
  }
  return EntryArrays{entries, reader.Array<FactorEntry>(info->entries, HeadCount(g) * count),
                     info->refused};
}

Status ReadRawRows(const ExtentReader& reader, const Geometry& g, const std::vector<Run>& spans,
                   SpanStorage::Part* part) {
  const auto* info = reader.Read<RawRowsInfo>(kSpanInfoAt, 1);
  if (info == nullptr || reader.header().flags != 0) {
    return DamagedExtent(reader.tokens(), "too short, or its flags");
  }
  part->raw_count = info->raw_count;
  part->raw_positions = reader.Read<int32_t>(info->positions, info->raw_count);
  part->raw_rows =
      reader.Array<std::byte>(info->rows, HeadCount(g) * 2 * info->raw_count * g.row_bytes());
  if (part->raw_positions == nullptr || part->raw_rows == nullptr) {
    return DamagedExtent(reader.tokens(), "its raw rows lie outside");
  }
  const std::vector<int32_t> wanted = PositionsBetween(reader.tokens(), spans);
  if (std::ranges::equal(wanted, std::span(part->raw_positions, size_t(part->raw_count)))) {
    return OkStatus();
  }
  return DamagedExtent(reader.tokens(), "its raw positions are not those between its spans");
}

}  // namespace

Result<std::unique_ptr<SpanStorage>> SpanStorage::Parse(const SequenceView& view,
                                                        const Geometry& geometry) {
  static std::atomic<uint64_t> parsed{0};
  auto storage = std::make_unique<SpanStorage>(geometry);
  storage->id_ = parsed.fetch_add(1, std::memory_order_relaxed) + 1;
  if (view.extent_count % kExtentsPerPart != 0) {
    return DamagedExtent({0, 0}, "the number of extents is no multiple of 3");
  }
  for (int32_t i = 0; i < view.extent_count; i += kExtentsPerPart) {
    KVS_RETURN_IF_ERROR(storage->ReadPart(view.extents + i));
  }
  return storage;
}

Status SpanStorage::ReadPart(const ExtentView* extents) {
  const Geometry& g = geometry_;
  KVS_ASSIGN_OR_RETURN(const ExtentReader coarse,
                       ExtentReader::Open(extents[0], g, ExtentKind::kSpanSummary));
  KVS_ASSIGN_OR_RETURN(const ExtentReader factors,
                       ExtentReader::Open(extents[1], g, ExtentKind::kSpanFactors));
  KVS_ASSIGN_OR_RETURN(const ExtentReader raw,
                       ExtentReader::Open(extents[2], g, ExtentKind::kRawRows));
  Part part;
  part.tokens = coarse.tokens();
  if (part.tokens.begin != end() || factors.tokens() != part.tokens ||
      raw.tokens() != part.tokens) {
    return DamagedExtent(part.tokens, "the three of a part do not follow what is before");
  }
  Summary summary;
  auto layout = std::make_shared<Layout>();
  SummaryAddresses at = {};
  KVS_RETURN_IF_ERROR(ReadSummary(coarse, g, parts_.empty(), &summary, &at));
  const bool first = parts_.empty();
  if (!first && (summary.trained != trained_ || summary.d_route != d_route_)) {
    return DamagedExtent(part.tokens, "its routers are not those of the first part");
  }
  KVS_ASSIGN_OR_RETURN(const EntryArrays entries, ReadFactors(factors, g, summary.spans));
  refused_ += entries.refused;
  layout->entries = entries.readable;
  layout->addresses = {at.spans, entries.in_extent, extents[1].data, at.router, at.tau, at.routers};
  KVS_RETURN_IF_ERROR(ReadRawRows(raw, g, summary.spans, &part));
  layout->span_count = at.span_count;
  layout->raw_count = part.raw_count;
  layout->routers = at.routers;
  layout->router = at.router;
  layout->tau = at.tau;
  layout->inverse_norms = at.inverse_norms;
  layout->factors = extents[1].data;
  layout->k_mean_page = PageOf(at.k_mean);
  layout->v_mean_page = PageOf(at.v_mean);
  layout->raw_page = PageOf(part.raw_rows);
  if (first) d_route_ = summary.d_route, trained_ = summary.trained;
  part.first_span = static_cast<int32_t>(spans_.size());
  part.span_count = static_cast<int32_t>(summary.spans.size());
  parts_.push_back(part);
  EndAt(part.tokens.end);
  for (const Run& s : summary.spans) {
    spans_.push_back(s);
    log_length_.push_back(static_cast<float>(std::log(static_cast<double>(s.end - s.begin))));
  }
  anchors_.insert(anchors_.end(), summary.anchors.begin(), summary.anchors.end());
  layouts_.push_back(std::move(layout));
  return OkStatus();
}

bool OutgrowsRows(const Plan& plan, int32_t tokens) {
  if (plan.zoom.rows >= 0) return tokens >= plan.zoom.rows;
  const double n = static_cast<double>(tokens) + 1;
  return plan.zoom.rows_share * n - 1e-9 <= n - 1;
}

std::string MaxLossText(const Plan& plan, const Geometry& geometry, const SpanStorage* spans) {
  if (spans == nullptr || spans->refused() == 0) return "";
  const int64_t all = 2 * HeadCount(geometry) * static_cast<int64_t>(spans->spans().size());
  return "of " + std::to_string(all) + " keys and values of spans, layers and KV heads " +
         std::to_string(spans->refused()) +
         " keep their rows: factors of r_max = " + std::to_string(plan.lowrank.r_max) +
         " lose more than max_loss there";
}

int32_t SpanStorage::raw_rows() const {
  int32_t rows = 0;
  for (const Part& p : parts_) rows += p.raw_count;
  return rows;
}

namespace {

// `count` rows of a (layer, KV head) as one page.
PagedRows OnePage(std::byte* const* page, int64_t index, int32_t count, int32_t dim, DType dtype) {
  const int64_t row = dim * SizeOf(dtype);
  return {page, index * count * row, row, std::max(count, 1), dim, dtype};
}

}  // namespace

PagedRows SpanStorage::KeyMeans(int part, int layer, int kv_head) const {
  const Layout& l = *layouts_[static_cast<size_t>(part)];
  return OnePage(&l.k_mean_page, int64_t{layer} * geometry_.kv_heads + kv_head, l.span_count,
                 geometry_.head_dim, DType::kBF16);
}

PagedRows SpanStorage::ValueMeans(int part, int layer, int kv_head) const {
  const Layout& l = *layouts_[static_cast<size_t>(part)];
  return OnePage(&l.v_mean_page, int64_t{layer} * geometry_.kv_heads + kv_head, l.span_count,
                 geometry_.head_dim, DType::kBF16);
}

PagedRows SpanStorage::RawKeys(int part, int layer, int kv_head) const {
  const Layout& l = *layouts_[static_cast<size_t>(part)];
  return OnePage(&l.raw_page, int64_t{layer} * 2 * geometry_.kv_heads + kv_head, l.raw_count,
                 geometry_.head_dim, geometry_.dtype);
}

PagedRows SpanStorage::RawValues(int part, int layer, int kv_head) const {
  const Layout& l = *layouts_[static_cast<size_t>(part)];
  return OnePage(&l.raw_page, (int64_t{layer} * 2 + 1) * geometry_.kv_heads + kv_head, l.raw_count,
                 geometry_.head_dim, geometry_.dtype);
}

LowRankSpan SpanStorage::Factors(int span, int layer, int kv_head) const {
  const auto part = std::ranges::upper_bound(parts_, span, {}, &Part::first_span) - 1;
  const Layout& l = *layouts_[static_cast<size_t>(part - parts_.begin())];
  const int64_t head = int64_t{layer} * geometry_.kv_heads + kv_head;
  const FactorEntry& e = l.entries[head * l.span_count + (span - part->first_span)];
  const Run tokens = spans_[static_cast<size_t>(span)];
  const int32_t n = tokens.end - tokens.begin;
  return {n, FactorAt(l.factors, e.k, n, e.k_rank), FactorAt(l.factors, e.v, n, e.v_rank)};
}

const float* SpanStorage::Router(int layer, int query_head) const {
  const int64_t router = int64_t{layer} * geometry_.query_heads + query_head;
  return layouts_.front()->router + router * d_route_ * geometry_.head_dim;
}

float SpanStorage::Threshold(int layer, int query_head) const {
  return layouts_.front()->tau[int64_t{layer} * geometry_.query_heads + query_head];
}

SpanStorage::Addresses SpanStorage::AddressesOf(int part) const {
  return layouts_[static_cast<size_t>(part)]->addresses;
}

const float* SpanStorage::InverseNorms(int part, int layer, int query_head) const {
  const Layout& l = *layouts_[static_cast<size_t>(part)];
  return l.inverse_norms + (int64_t{layer} * geometry_.query_heads + query_head) * l.span_count;
}

// --- the codec's row

namespace {

constexpr std::string_view kArrays[] = {"anchors", "raw",    "spans",     "k_mean",   "v_mean",
                                        "k_rank",  "v_rank", "k_longest", "v_longest"};
constexpr std::string_view kDeviceArrays[] = {"anchors", "raw", "spans", "k_rank", "v_rank"};

int64_t ArraysEnd(const ExtentFront& front) {
  const ExtentHeader h = front.header();
  switch (static_cast<ExtentKind>(h.kind)) {
    case ExtentKind::kSpanSummary: {
      const auto info = front.At<SpanInfo>(kSpanInfoAt);
      return std::max(front.EndOf(info.spans, info.span_count, 2 * sizeof(int32_t)),
                      front.EndOf(info.anchors, info.anchor_count, sizeof(int32_t)));
    }
    case ExtentKind::kSpanFactors: {
      const auto info = front.At<FactorsInfo>(kSpanInfoAt);
      int64_t entries = 0;
      const int64_t heads = int64_t{h.layers} * h.kv_heads;
      if (__builtin_mul_overflow(heads, int64_t{info.span_count}, &entries)) entries = -1;
      return front.EndOf(info.entries, entries, sizeof(FactorEntry));
    }
    case ExtentKind::kRawRows: {
      const auto info = front.At<RawRowsInfo>(kSpanInfoAt);
      return front.EndOf(info.positions, info.raw_count, sizeof(int32_t));
    }
    default:
      return 0;
  }
}

}  // namespace

constinit const Codec kLowRankCodec = {
    .needs = kNeedPrefillDone | kNeedSurprisal,
    .whole_units = true,
    .recompressor =
        [](const Plan& plan, const Geometry& geometry, ParametersPtr parameters) {
          return NewSpanRecompressor(plan, geometry,
                                     std::static_pointer_cast<const SpanParameters>(parameters));
        },
    .parameters = [](std::span<const std::byte> file, const std::string& name,
                     const Geometry& geometry, const Plan& plan) -> Result<ParametersPtr> {
      KVS_ASSIGN_OR_RETURN(SpanParameters values, ParseSpanParameters(file, name, geometry, plan));
      return ParametersPtr(std::make_shared<const SpanParameters>(std::move(values)));
    },
    .parse = ParseAs<SpanStorage>,
    .arrays_end = ArraysEnd,
    .why_raw = WhyNoSpans,
    .status =
        [](const CodecProgress& p) { return MaxLossText(p.plan, p.geometry, SpansOf(p.stored)); },
    .arrays = kArrays,
    .device_arrays = kDeviceArrays,
    .inspect = InspectSpans,
    .cost = [](const Plan&, const Geometry&) -> CodecCost {
      return {1, 28, 3420};
    },
};

}  // namespace kvstrata
