// score_spans, expand_spans and attend_spans on the GPU: scores and outputs against ref
// (attend_coarse, attend_lowrank and attend_raw, merged), what is expanded against selector zoom's
// rule, on fresh random inputs. All that is not to be read is 0xFF: other layers, factors of spans
// that are not expanded, pages before the window; so is every output before it is written.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <string>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/ops/attend_coarse/attend_coarse.h"
#include "kernels/ops/attend_lowrank/attend_lowrank.h"
#include "kernels/ops/attend_raw/attend_raw.h"
#include "kernels/ops/merge/merge.h"
#include "kernels/select/ranking.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/elements.h"
#include "tests/cuda/relative_error.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

constexpr int kLayers = 2, kLayer = 1, kPage = 32;

struct PartShape {
  int32_t spans = 0, raw = 0;
};

struct Case {
  int dim = 128, group = 4, kv_heads = 2;
  DType dtype = DType::kBF16;
  std::vector<std::vector<PartShape>> parts = {};  // of each sequence
  int32_t longest = 40;                            // tokens of a span
  int32_t rank_max = 32;                           // 0: all raw; ranks are drawn up to it, some -1
  std::vector<int32_t> room = {};                  // of each sequence
  float tau = 0;
  bool trained = true;  // a router for each query head
  DType out_dtype = DType::kF32;
  bool equal_scores = false;
};

std::string Describe(const Case& c) {
  std::string text = "d" + std::to_string(c.dim) + " G" + std::to_string(c.group) + " Hkv" +
                     std::to_string(c.kv_heads) + " dtype" + std::to_string(int(c.dtype)) + " r" +
                     std::to_string(c.rank_max) + " longest" + std::to_string(c.longest) + " parts";
  for (size_t b = 0; b < c.parts.size(); ++b) {
    for (const PartShape& p : c.parts[b]) {
      text += " " + std::to_string(p.spans) + "/" + std::to_string(p.raw);
    }
    text += " room " + std::to_string(c.room[b]) + ";";
  }
  return text + " seed " + std::to_string(TestSeed());
}

uint64_t Aligned(uint64_t at) { return (at + 63) / 64 * 64; }

// The arrays of a part, in one piece of memory that begins with 0xFF.
class Part {
 public:
  Part(Rng& rng, const Case& c, PartShape shape) : case_(c), shape_(shape) {
    const auto heads = static_cast<uint64_t>(kLayers * c.kv_heads);
    const auto row = static_cast<uint64_t>(c.dim * 2), spans = static_cast<uint64_t>(shape.spans);
    spans_ = Reserve(spans * 8);
    k_mean_ = Reserve(heads * spans * row);
    v_mean_ = Reserve(heads * spans * row);
    norms_ = Reserve(heads * static_cast<uint64_t>(c.group) * spans * 4);
    entries_ = Reserve(heads * spans * sizeof(SpanFactors));
    raw_ = Reserve(2 * heads * static_cast<uint64_t>(shape.raw) * row);
    int32_t at = 0;
    for (int32_t u = 0; u < shape.spans; ++u) {
      at += Below(rng, 3);
      const int32_t n = 1 + Below(rng, c.longest);
      At<int32_t>(spans_)[2 * u] = at;
      At<int32_t>(spans_)[2 * u + 1] = at += n;
    }
    for (int h = 0; h < c.kv_heads; ++h) Fill(rng, h);
    Fill(rng, DType::kBF16, k_mean(0), int64_t{c.kv_heads} * shape.spans * c.dim);
    Fill(rng, DType::kBF16, v_mean(0), int64_t{c.kv_heads} * shape.spans * c.dim);
    Fill(rng, c.dtype, raw(0, 0), int64_t{2} * c.kv_heads * shape.raw * c.dim);
    if (c.equal_scores) std::fill_n(k_mean(0), c.kv_heads * shape.spans * c.dim * 2, std::byte{0});
    for (int h = 0; h < c.kv_heads * c.group; ++h) {
      for (int32_t u = 0; u < shape.spans; ++u)
        norms(h)[u] = 0.05f + 0.001f * float(Below(rng, 99));
    }
  }

  int32_t spans() const { return shape_.spans; }
  int32_t raw_count() const { return shape_.raw; }
  int32_t Length(int32_t u) const {
    return At<int32_t>(spans_)[2 * u + 1] - At<int32_t>(spans_)[2 * u];
  }
  std::byte* k_mean(int h) const { return At<std::byte>(k_mean_) + Head(h) * spans() * RowBytes(); }
  std::byte* v_mean(int h) const { return At<std::byte>(v_mean_) + Head(h) * spans() * RowBytes(); }
  float* norms(int query_head) const {
    return At<float>(norms_) +
           (int64_t{kLayer} * case_.kv_heads * case_.group + query_head) * spans();
  }
  std::byte* raw(int of_value, int h) const {
    return At<std::byte>(raw_) +
           ((int64_t{kLayer} * 2 + of_value) * case_.kv_heads + h) * raw_count() * RowBytes();
  }
  LowRankSpan Factors(int h, int32_t u) const {
    const SpanFactors& e = Entry(h, u);
    return {Length(u), RowsAt(e.k, Length(u), e.k_rank), RowsAt(e.v, Length(u), e.v_rank)};
  }
  void Poison(int h, int32_t u) {
    const SpanFactors e = Entry(h, u);
    for (const auto& [at, rank] : {std::pair{e.k, e.k_rank}, {e.v, e.v_rank}}) {
      std::fill_n(At<std::byte>(at), Bytes(Length(u), rank), std::byte{0xFF});
    }
  }
  void Upload() {
    if (device_.size() != bytes_.size()) device_ = DeviceArray<std::byte>(bytes_.size());
    device_.Write(bytes_);
  }
  SpanPart Device(int32_t first_span) const {
    const uint64_t at = device_.address();
    return {at + spans_,
            at + k_mean_,
            at + v_mean_,
            at + norms_,
            at + entries_,
            at,
            at + raw_,
            first_span,
            spans(),
            raw_count(),
            0};
  }

 private:
  int64_t RowBytes() const { return int64_t{case_.dim} * 2; }
  int64_t Head(int h) const { return int64_t{kLayer} * case_.kv_heads + h; }
  template <typename T>
  T* At(uint64_t offset) const {
    return reinterpret_cast<T*>(const_cast<std::byte*>(bytes_.data()) + offset);
  }
  SpanFactors& Entry(int h, int32_t u) const {
    return At<SpanFactors>(entries_)[Head(h) * spans() + u];
  }
  uint64_t Reserve(uint64_t bytes) {
    const uint64_t at = bytes_.size();
    bytes_.resize(Aligned(at + bytes + 1), std::byte{0xFF});
    return at;
  }
  uint64_t Bytes(int32_t n, int32_t rank) const {
    if (rank < 0) return static_cast<uint64_t>(n * RowBytes());
    return Aligned(static_cast<uint64_t>(n) * static_cast<uint64_t>(rank) * 2) +
           static_cast<uint64_t>(rank * RowBytes());
  }
  LowRankRows RowsAt(uint64_t at, int32_t n, int32_t rank) const {
    if (rank < 0) return {At<BF16>(at), nullptr, rank};
    const auto left = static_cast<uint64_t>(n) * static_cast<uint64_t>(rank) * 2;
    return {At<BF16>(at), At<BF16>(Aligned(at + left)), rank};
  }
  static void Fill(Rng& rng, DType dtype, std::byte* to, int64_t count, float scale = 1) {
    for (int64_t i = 0; i < count; ++i) StoreFloat(to + 2 * i, dtype, scale * Normal(rng));
  }
  void Fill(Rng& rng, int h) {
    for (int32_t u = 0; u < spans(); ++u) {
      SpanFactors e{0, 0, Rank(rng, u), Rank(rng, u), 0};
      for (auto [at, rank] : {std::pair{&e.k, e.k_rank}, {&e.v, e.v_rank}}) {
        *at = Reserve(Bytes(Length(u), rank));
        if (rank < 0) {
          Fill(rng, DType::kBF16, At<std::byte>(*at), int64_t{Length(u)} * case_.dim);
          continue;
        }
        Fill(rng, DType::kBF16, At<std::byte>(*at), int64_t{Length(u)} * rank,
             1 / std::sqrt(static_cast<float>(rank)));
        Fill(rng, DType::kBF16,
             At<std::byte>(Aligned(*at + static_cast<uint64_t>(Length(u) * rank * 2))),
             int64_t{rank} * case_.dim);
      }
      Entry(h, u) = e;
    }
  }
  int32_t Rank(Rng& rng, int32_t u) const {
    const int32_t most = std::min({Length(u), case_.dim, case_.rank_max});
    return most == 0 || Below(rng, 3) == 0 ? -1 : most - Below(rng, std::min(most, 4));
  }

  const Case case_;
  const PartShape shape_;
  std::vector<std::byte> bytes_;
  uint64_t spans_, k_mean_, v_mean_, norms_, entries_, raw_;
  DeviceArray<std::byte> device_;
};

class Problem {
 public:
  // ahead: of all three ops (launch.cuh); all inputs are complete before the first.
  Problem(Rng& rng, const Case& c, bool ahead = false) : case_(c), ahead_(ahead) {
    for (const auto& sequence : c.parts) {
      auto& parts = parts_.emplace_back();
      int32_t spans = 0;
      for (const PartShape& shape : sequence) {
        parts.emplace_back(rng, c, shape).Upload();
        spans += shape.spans;
      }
      part_stride_ = std::max(part_stride_, static_cast<int32_t>(parts.size()));
      span_stride_ = std::max(span_stride_, (spans + 31) / 32 * 32);
      window_begin_.push_back(Below(rng, 3 * kPage));
      tokens_.push_back(window_begin_.back() + 1 + Below(rng, 4 * kPage));
    }
    span_stride_ += 32;
    DrawQueries(rng);
    DrawPages(rng);
    Upload();
  }

  ScoreSpansBatch Scores() const {
    return {Layer(), Queries(), relevance_.get(), coarse_.get(), ahead_};
  }
  ExpandSpansBatch Expansion() const {
    return {Layer(),         batch(),     relevance_.get(),   coarse_.get(),
            d_room_.get(),   list_.get(), list_counts_.get(), chosen_.get(),
            counters_.get(), ahead_};
  }
  AttendSpansBatch Attention() const {
    AttendSpansBatch w;
    w.layer = Layer();
    w.queries = Queries();
    w.coarse = coarse_.get();
    w.list = list_.get();
    w.counts = list_counts_.get();
    w.pages = {d_pages_.get(), page_stride_, kPage,     case_.kv_heads, case_.dim, case_.dtype, 0,
               HeadsBytes(),   HeadBytes(),  RowBytes()};
    w.window_begin = d_window_.get();
    w.tokens = d_tokens_.get();
    w.to = {out_.get(), case_.out_dtype, lse_.get()};
    w.counters = counters_.get();
    w.workspace = workspace_.get();
    w.ahead = ahead_;
    return w;
  }
  // All three, each held to ref.
  void ExpectLikeRef() {
    SCOPED_TRACE(Describe(case_));
    Check(kvs_cuda_ops()->score_spans(Scores(), nullptr), "score_spans");
    ExpectScores();
    const std::vector<float> relevance = relevance_.Read();
    Check(kvs_cuda_ops()->expand_spans(Expansion(), nullptr), "expand_spans");
    ExpectExpansions(relevance);
    PoisonWhatIsCoarse();
    Check(kvs_cuda_ops()->attend_spans(Attention(), nullptr), "attend_spans");
    ExpectOutputs();
    for (uint32_t c : counters_.Read()) EXPECT_EQ(c, 0u);
  }
  int64_t expanded() const {
    return std::accumulate(
        expanded_.begin(), expanded_.end(), int64_t{0},
        [](int64_t sum, const auto& list) { return sum + static_cast<int64_t>(list.size()); });
  }
  void Enqueue(Stream stream) const {
    Check(kvs_cuda_ops()->score_spans(Scores(), stream), "score_spans");
    Check(kvs_cuda_ops()->expand_spans(Expansion(), stream), "expand_spans");
    Check(kvs_cuda_ops()->attend_spans(Attention(), stream), "attend_spans");
  }
  // Another step: a longer window and another room, known to the device alone.
  void Go(Rng& rng) {
    for (int b = 0; b < batch(); ++b) {
      auto& tokens = tokens_[static_cast<size_t>(b)];
      tokens = std::min(tokens + 1 + Below(rng, 5), page_stride_ * kPage);
      case_.room[static_cast<size_t>(b)] = Below(rng, 400);
    }
    d_tokens_.Write(tokens_);
    d_room_.Write(case_.room);
  }
  void ExpectReplayed(CapturedGraph& graph) {
    SCOPED_TRACE(Describe(case_));
    out_.Poison();
    graph.Replay();
    ExpectExpansions(relevance_.Read());
    ExpectOutputs();
  }

  int batch() const { return static_cast<int>(parts_.size()); }

 private:
  int query_heads() const { return case_.kv_heads * case_.group; }
  int64_t RowBytes() const { return int64_t{case_.dim} * 2; }
  int64_t HeadBytes() const { return RowBytes() * kPage; }
  int64_t HeadsBytes() const { return HeadBytes() * case_.kv_heads; }
  float Scale() const { return 1.0f / std::sqrt(static_cast<float>(case_.dim)); }
  int32_t Spans(int b) const {
    int32_t spans = 0;
    for (const Part& p : parts_[static_cast<size_t>(b)]) spans += p.spans();
    return spans;
  }
  SpanLayer Layer() const {
    return {d_parts_.get(), d_counts_.get(), d_routers_.get(), part_stride_, span_stride_,
            kLayer,         case_.kv_heads,  case_.group,      case_.dim,    case_.dtype};
  }
  SpanQueries Queries() const { return {q_.get(), query_heads() * RowBytes(), batch(), Scale()}; }

  void DrawQueries(Rng& rng) {
    const auto count = static_cast<size_t>(batch() * query_heads() * case_.dim);
    const std::vector<std::byte> bytes = RandomElements(rng, case_.dtype, count);
    q_ = DeviceArray<std::byte>(bytes);
    queries_ = Floats(case_.dtype, bytes);
    routers_ = case_.trained ? query_heads() : case_.kv_heads;
    d_route_ = 1 + Below(rng, std::min(case_.dim, 48));
    w_.resize(static_cast<size_t>(kLayers * routers_ * d_route_ * case_.dim), std::nanf(""));
    for (size_t i = w_.size() / kLayers; i < w_.size(); ++i) w_[i] = Normal(rng);
    tau_.assign(static_cast<size_t>(kLayers * query_heads()), std::nanf(""));
    std::fill_n(tau_.begin() + kLayer * query_heads(), query_heads(), case_.tau);
  }
  // Pages [keys, values][kv_heads][kPage][dim]; what lies before the window is poison.
  void DrawPages(Rng& rng) {
    for (const int32_t n : tokens_) page_stride_ = std::max(page_stride_, n / kPage + 2);
    const auto count = static_cast<size_t>(batch() * page_stride_);
    const auto bytes = static_cast<size_t>(2 * HeadsBytes());
    page_bytes_.assign(count * bytes, std::byte{0xFF});
    for (int b = 0; b < batch(); ++b) {
      for (int32_t t = window_begin_[static_cast<size_t>(b)]; t < page_stride_ * kPage; ++t) {
        for (int h = 0; h < 2 * case_.kv_heads; ++h) {
          std::byte* const row = HostPage(b, t / kPage) + h * HeadBytes() + t % kPage * RowBytes();
          for (int c = 0; c < case_.dim; ++c) StoreFloat(row + 2 * c, case_.dtype, Normal(rng));
        }
      }
    }
    d_page_bytes_ = DeviceArray<std::byte>(page_bytes_);
    std::vector<uint64_t> addresses;
    for (size_t i = 0; i < count; ++i) addresses.push_back(d_page_bytes_.address() + i * bytes);
    d_pages_ = DeviceArray<uint64_t>(addresses);
  }
  std::byte* HostPage(int b, int32_t page) const {
    return const_cast<std::byte*>(page_bytes_.data()) +
           (int64_t{b} * page_stride_ + page) * 2 * HeadsBytes();
  }
  void Upload() {
    std::vector<SpanPart> table(static_cast<size_t>(batch() * std::max(part_stride_, 1)));
    std::vector<int32_t> counts;
    std::vector<SpanRouter> routers;
    d_w_ = DeviceArray<float>(w_);
    d_tau_ = DeviceArray<float>(tau_);
    for (int b = 0; b < batch(); ++b) {
      int32_t first = 0;
      for (size_t i = 0; i < parts_[static_cast<size_t>(b)].size(); ++i) {
        const Part& part = parts_[static_cast<size_t>(b)][i];
        table[static_cast<size_t>(b * part_stride_) + i] = part.Device(first);
        first += part.spans();
      }
      counts.push_back(static_cast<int32_t>(parts_[static_cast<size_t>(b)].size()));
      routers.push_back({d_w_.address(), d_tau_.address(), routers_, d_route_});
    }
    d_parts_ = DeviceArray<SpanPart>(table);
    d_counts_ = DeviceArray<int32_t>(counts);
    d_routers_ = DeviceArray<SpanRouter>(routers);
    d_room_ = DeviceArray<int32_t>(case_.room);
    d_tokens_ = DeviceArray<int32_t>(tokens_);
    d_window_ = DeviceArray<int32_t>(window_begin_);
    const auto rows = static_cast<size_t>(batch() * query_heads());
    const auto stride = static_cast<size_t>(span_stride_);
    relevance_ = DeviceArray<float>(rows * stride);
    coarse_ = DeviceArray<float>(rows * stride);
    chosen_ = DeviceArray<uint32_t>(rows * stride / 32);
    list_ =
        DeviceArray<uint32_t>(static_cast<size_t>(batch() * case_.kv_heads * kSpanPieces) * stride);
    list_counts_ = DeviceArray<int32_t>(static_cast<size_t>(batch() * case_.kv_heads));
    counters_ = DeviceArray<uint32_t>(
        std::vector<uint32_t>(static_cast<size_t>(batch() * case_.kv_heads), 0));
    out_ = DeviceArray<std::byte>(rows * static_cast<size_t>(case_.dim * SizeOf(case_.out_dtype)));
    lse_ = DeviceArray<float>(rows);
    AttendSpansBatch w;
    w.layer = Layer();
    w.queries = Queries();
    workspace_ = DeviceArray<float>(
        static_cast<size_t>(kvs_cuda_ops()->attend_spans_workspace_bytes(w) / 4));
  }
  const float* Query(int b, int h) const {
    return &queries_[static_cast<size_t>((b * query_heads() + h) * case_.dim)];
  }

  // --- ref ---

  // W^T W q / sqrt(d') as selector zoom has it.
  std::vector<double> Pulled(const float* q, int h) const {
    const int router = case_.trained ? h : h / case_.group;
    const float* w = &w_[static_cast<size_t>((kLayer * routers_ + router) * d_route_ * case_.dim)];
    std::vector<double> pulled(static_cast<size_t>(case_.dim));
    for (int r = 0; r < d_route_; ++r, w += case_.dim) {
      double dot = 0;
      for (int c = 0; c < case_.dim; ++c) dot += double{w[c]} * q[c];
      for (int c = 0; c < case_.dim; ++c) pulled[static_cast<size_t>(c)] += dot * w[c];
    }
    for (double& x : pulled) x /= std::sqrt(double(d_route_));
    return pulled;
  }
  void ExpectScores() const {
    const std::vector<float> relevance = relevance_.Read(), coarse = coarse_.Read();
    std::vector<float> got, want, got_coarse, want_coarse;
    for (int b = 0; b < batch(); ++b) {
      for (int h = 0; h < query_heads(); ++h) {
        const std::vector<double> pulled = Pulled(Query(b, h), h);
        size_t at = static_cast<size_t>((b * query_heads() + h) * span_stride_);
        for (const Part& part : parts_[static_cast<size_t>(b)]) {
          for (int32_t u = 0; u < part.spans(); ++u, ++at) {
            double route = 0, dot = 0;
            for (int c = 0; c < case_.dim; ++c) {
              const double x = LoadFloat(
                  part.k_mean(h / case_.group) + (int64_t{u} * case_.dim + c) * 2, DType::kBF16);
              route += pulled[static_cast<size_t>(c)] * x;
              dot += Query(b, h)[c] * x;
            }
            const double rows = std::log(double(part.Length(u)));
            got.push_back(relevance[at]);
            want.push_back(float(route * part.norms(h)[u] + rows));
            got_coarse.push_back(coarse[at]);
            want_coarse.push_back(float(dot * Scale() + rows));
          }
        }
        for (int32_t u = Spans(b); u < span_stride_; ++u, ++at) {
          EXPECT_TRUE(std::isnan(relevance[at]) && std::isnan(coarse[at])) << u;
        }
      }
    }
    EXPECT_LE(RelativeError(got, want), 1e-4);
    EXPECT_LE(RelativeError(got_coarse, want_coarse), 1e-4);
  }
  // Selector zoom's rule on the scores of the device, which leave no near-ties.
  std::vector<int32_t> Expanded(int b, const float* relevance) const {
    std::vector<int32_t> lengths, expanded;
    for (const Part& part : parts_[static_cast<size_t>(b)]) {
      for (int32_t u = 0; u < part.spans(); ++u) lengths.push_back(part.Length(u));
    }
    int64_t room = case_.room[static_cast<size_t>(b)];
    if (room == kExpandAll) {
      expanded.resize(lengths.size());
      std::iota(expanded.begin(), expanded.end(), 0);
      return expanded;
    }
    const double tau = case_.tau;
    const double threshold = tau <= 0 ? -INFINITY : static_cast<float>(std::log(tau / (1 - tau)));
    VisitRanked(relevance, static_cast<int32_t>(lengths.size()), [&](int32_t span) {
      const int32_t more = lengths[static_cast<size_t>(span)] - 1;
      if (!(relevance[span] > threshold) || more > room) return false;
      expanded.push_back(span);
      room -= more;
      return true;
    });
    std::ranges::sort(expanded);
    return expanded;
  }
  void ExpectExpansions(const std::vector<float>& relevance) {
    expanded_.clear();
    const std::vector<int32_t> counts = list_counts_.Read();
    const std::vector<uint32_t> lists = list_.Read();
    const std::vector<float> coarse = coarse_.Read();
    for (int b = 0; b < batch(); ++b) {
      for (int h = 0; h < query_heads(); ++h) {
        const size_t row = static_cast<size_t>((b * query_heads() + h) * span_stride_);
        expanded_.push_back(Expanded(b, &relevance[row]));
        for (int32_t u = 0; u < Spans(b); ++u) {
          const bool is = std::ranges::binary_search(expanded_.back(), u);
          EXPECT_EQ(coarse[row + static_cast<size_t>(u)] == -INFINITY, is) << h << " " << u;
        }
      }
      for (int h = 0; h < case_.kv_heads; ++h) {
        const size_t item = static_cast<size_t>(b * case_.kv_heads + h);
        std::vector<uint32_t> want;
        for (int32_t u = 0; u < Spans(b); ++u) {
          const uint32_t heads = HeadsOf(b, h, u);
          if (heads == 0) continue;
          const int32_t pieces = std::min((LengthOf(b, u) + 31) / 32, kSpanPieces);
          want.insert(want.end(), static_cast<size_t>(pieces),
                      static_cast<uint32_t>(u) << 8 | heads);
        }
        const auto* from = &lists[item * static_cast<size_t>(kSpanPieces * span_stride_)];
        ASSERT_EQ(counts[item], static_cast<int32_t>(want.size()));
        EXPECT_EQ(std::vector<uint32_t>(from, from + want.size()), want);
      }
    }
  }
  int32_t LengthOf(int b, int32_t u) const {
    for (const Part& part : parts_[static_cast<size_t>(b)]) {
      if (u < part.spans()) return part.Length(u);
      u -= part.spans();
    }
    return 0;
  }
  // Heads of a group that read a span token by token.
  uint32_t HeadsOf(int b, int h, int32_t u) const {
    uint32_t heads = 0;
    for (int g = 0; g < case_.group; ++g) {
      const auto& list = expanded_[static_cast<size_t>(b * query_heads() + h * case_.group + g)];
      heads |= uint32_t{std::ranges::binary_search(list, u)} << g;
    }
    return heads;
  }
  void PoisonWhatIsCoarse() {
    for (int b = 0; b < batch(); ++b) {
      int32_t first = 0;
      for (Part& part : parts_[static_cast<size_t>(b)]) {
        for (int h = 0; h < case_.kv_heads; ++h) {
          for (int32_t u = 0; u < part.spans(); ++u) {
            if (HeadsOf(b, h, first + u) == 0) part.Poison(h, u);
          }
        }
        first += part.spans();
        part.Upload();
      }
    }
  }

  struct Partial {
    float m = 0, l = 0;
    std::vector<float> o;
  };
  template <typename Work, typename Op>
  void Add(Work w, Op op, std::vector<Partial>* partials) const {
    Partial& p = partials->emplace_back();
    p.o.resize(static_cast<size_t>(case_.dim));
    w.m = &p.m;
    w.l = &p.l;
    w.o = p.o.data();
    op(&w, 1, InlineExecutor());
  }
  PagedRows OnePage(std::byte* const* page, int32_t count, DType dtype) const {
    return {page, 0, RowBytes(), std::max(count, 1), case_.dim, dtype};
  }
  AttendWork RawWork(PagedRows k, PagedRows v, const float* q, const kvstrata::Run& run) const {
    AttendWork w;
    w.k = k;
    w.v = v;
    w.q = q;
    w.position = run.end;
    w.runs = &run;
    w.run_count = run.begin < run.end ? 1 : 0;
    w.scale = Scale();
    return w;
  }
  void AddPart(const Part& part, int h, const float* q, const std::vector<int32_t>& expanded,
               int32_t first, std::vector<Partial>* partials) const {
    const int kv_head = h / case_.group;
    std::byte* pages[] = {part.raw(0, kv_head), part.raw(1, kv_head), part.k_mean(kv_head),
                          part.v_mean(kv_head)};
    const kvstrata::Run raw{0, part.raw_count()};
    Add(RawWork(OnePage(&pages[0], part.raw_count(), case_.dtype),
                OnePage(&pages[1], part.raw_count(), case_.dtype), q, raw),
        AttendRawRef, partials);
    std::vector<kvstrata::Run> coarse;
    std::vector<LowRankSpan> spans;
    std::vector<float> rows;
    for (int32_t u = 0; u < part.spans(); ++u) {
      rows.push_back(std::log(static_cast<float>(part.Length(u))));
      if (std::ranges::binary_search(expanded, first + u)) {
        spans.push_back(part.Factors(kv_head, u));
      } else {
        coarse.push_back({u, u + 1});
      }
    }
    AttendCoarseWork means;
    means.k = OnePage(&pages[2], part.spans(), DType::kBF16);
    means.v = OnePage(&pages[3], part.spans(), DType::kBF16);
    means.q = q;
    means.runs = coarse.data();
    means.run_count = static_cast<int32_t>(coarse.size());
    means.log_count = rows.data();
    means.scale = Scale();
    Add(means, AttendCoarseRef, partials);
    AttendLowRankWork factors;
    factors.spans = spans.data();
    factors.span_count = static_cast<int32_t>(spans.size());
    factors.dim = case_.dim;
    factors.q = q;
    factors.scale = Scale();
    Add(factors, AttendLowRankRef, partials);
  }
  void ExpectOutputs() const {
    const std::vector<float> out = Floats(case_.out_dtype, out_.Read()), lse = lse_.Read();
    std::vector<float> want(out.size()), want_lse(lse.size());
    for (int b = 0; b < batch(); ++b) {
      std::vector<std::byte*> pages;
      for (int32_t i = 0; i < page_stride_; ++i) pages.push_back(HostPage(b, i));
      for (int h = 0; h < query_heads(); ++h) {
        const size_t row = static_cast<size_t>(b * query_heads() + h);
        const float* q = Query(b, h);
        std::vector<Partial> partials;
        int32_t first = 0;
        for (const Part& part : parts_[static_cast<size_t>(b)]) {
          AddPart(part, h, q, expanded_[row], first, &partials);
          first += part.spans();
        }
        const PagedRows k{pages.data(), h / case_.group * HeadBytes(), RowBytes(), kPage, case_.dim,
                          case_.dtype};
        PagedRows v = k;
        v.offset += HeadsBytes();
        const kvstrata::Run window{window_begin_[static_cast<size_t>(b)],
                                   tokens_[static_cast<size_t>(b)]};
        Add(RawWork(k, v, q, window), AttendRawRef, &partials);
        Merge(partials, &want[row * static_cast<size_t>(case_.dim)], &want_lse[row]);
      }
    }
    EXPECT_LE(RelativeError(out, want), 5e-3);
    EXPECT_LE(RelativeError(lse, want_lse), 1e-3);
  }
  void Merge(const std::vector<Partial>& partials, float* out, float* lse) const {
    std::vector<float> m, l, o;
    for (const Partial& p : partials) {
      m.push_back(p.m);
      l.push_back(p.l);
      o.insert(o.end(), p.o.begin(), p.o.end());
    }
    const auto parts = static_cast<int32_t>(partials.size());
    const MergeWork merge{m.data(), l.data(), o.data(), parts, 1, 1, case_.dim, out, 0, lse, 0};
    MergeRef(&merge, 1, InlineExecutor());
  }

  Case case_;
  const bool ahead_;
  std::vector<std::vector<Part>> parts_;
  int32_t part_stride_ = 0, span_stride_ = 0, page_stride_ = 0;
  std::vector<int32_t> window_begin_, tokens_;
  int routers_ = 0, d_route_ = 0;
  std::vector<float> queries_, w_, tau_;
  std::vector<std::byte> page_bytes_;
  std::vector<std::vector<int32_t>> expanded_;  // [batch][query_heads]
  DeviceArray<std::byte> q_, d_page_bytes_, out_;
  DeviceArray<uint64_t> d_pages_;
  DeviceArray<float> d_w_, d_tau_, relevance_, coarse_, lse_, workspace_;
  DeviceArray<SpanPart> d_parts_;
  DeviceArray<SpanRouter> d_routers_;
  DeviceArray<int32_t> d_counts_, d_room_, d_tokens_, d_window_, list_counts_;
  DeviceArray<uint32_t> list_, chosen_, counters_;
};

class AttendSpansCuda : public ::testing::Test {
 protected:
  Rng rng_{TestSeed()};
};

TEST_F(AttendSpansCuda, ShapesOfModels) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int dim : {64, 128, 256}) {
      for (const int group : {1, 2, 3, 4, 5, 7, 8}) {
        Case c{.dim = dim, .group = group, .kv_heads = 1 + Below(rng_, 3), .dtype = dtype};
        c.parts = {{{60, 21}, {33, 0}}, {}, {{1, 1}}, {{90, 40}, {1, 17}, {0, 9}}};
        for (int b = 0; b < 4; ++b) c.room.push_back(Below(rng_, 500));
        c.out_dtype = group % 2 == 0 ? dtype : DType::kF32;
        c.trained = group % 3 != 0;
        Problem(rng_, c).ExpectLikeRef();
      }
    }
  }
}

TEST_F(AttendSpansCuda, RanksAndLengths) {
  for (const int rank_max : {0, 1, 2, 15, 16, 17, 32, 33, 64, 128}) {
    for (const int longest : {1, 16, 40, 300}) {
      Case c{.group = 4, .rank_max = rank_max};
      c.longest = longest;
      c.parts = {{{25, 3}}};
      c.room = {kExpandAll};
      Problem(rng_, c).ExpectLikeRef();
      c.group = 6;
      c.dim = 64;
      Problem(rng_, c).ExpectLikeRef();
    }
  }
}

// Rooms from nothing to everything, thresholds, scores that are all the same.
TEST_F(AttendSpansCuda, Rooms) {
  for (const bool equal : {false, true}) {
    for (const int room : {0, 1, 37, 1000, 100000, 1 << 30}) {
      for (const float tau : {0.0f, 0.3f, 0.99f, 1.0f}) {
        Case c{.dim = 64, .parts = {{{700, 10}, {500, 3}}}, .room = {room}, .tau = tau};
        c.longest = 12;
        c.equal_scores = equal;
        Problem problem(rng_, c);
        problem.ExpectLikeRef();
        if (tau == 1.0f) {
          EXPECT_EQ(problem.expanded(), 0);
        } else if (tau == 0.0f && room > 99999) {
          EXPECT_EQ(problem.expanded(), 8 * 1200);
        }
      }
    }
  }
}

// More spans than fit into shared memory, and a batch of more items than SMs.
TEST_F(AttendSpansCuda, ManySpansAndManySequences) {
  Case c{.dim = 64, .group = 2, .kv_heads = 1, .parts = {{{30000, 100}, {26000, 0}}}};
  c.longest = 9;
  c.rank_max = 2;
  c.room = {4000};
  Problem(rng_, c).ExpectLikeRef();
  c.group = 1;
  c.kv_heads = 3;
  c.parts.assign(64, {{40, 20}});
  c.room.assign(64, 60);
  Problem(rng_, c).ExpectLikeRef();
}

TEST_F(AttendSpansCuda, OneGraphServesLaterSteps) {
  for (const bool ahead : {false, true}) {
    Case c{.parts = {{{300, 50}}, {{120, 0}, {77, 5}}}, .room = {100, 200}};
    Problem problem(rng_, c, ahead);
    CapturedGraph graph([&](cudaStream_t stream) {
      problem.Enqueue(stream);
      return 0;
    });
    for (int i = 0; i < 5; ++i) {
      problem.Go(rng_);
      problem.ExpectReplayed(graph);
    }
  }
}

// Few rows and many spans, and the other way round: CTAs that have no rows, and none but rows.
TEST_F(AttendSpansCuda, ReadAhead) {
  for (const PartShape shape : {PartShape{2000, 3}, {3, 3000}, {0, 40}, {900, 900}}) {
    Case c{.parts = {{shape}}, .room = {700}};
    Problem(rng_, c, true).ExpectLikeRef();
  }
}

// What op merge takes.
TEST_F(AttendSpansCuda, LeavesAPartial) {
  Case c{.parts = {{{80, 9}}}, .room = {50}};
  Problem problem(rng_, c);
  problem.Enqueue(nullptr);
  const size_t rows = 8;
  DeviceArray<float> m(rows), l(rows), o(rows * 128), lse(rows);
  DeviceArray<std::byte> out(rows * 128 * 4);
  AttendSpansBatch w = problem.Attention();
  const AttentionOutput direct = w.to;
  w.to = {};
  w.partial = {m.get(), l.get(), o.get(), 1};
  Check(kvs_cuda_ops()->attend_spans(w, nullptr), "attend_spans");
  const MergeBatch merge{w.partial, {out.get(), DType::kF32, lse.get()}, 1, 8, 128};
  Check(kvs_cuda_ops()->merge(merge, nullptr), "merge");
  std::vector<float> want(rows * 128);
  Check(cudaMemcpy(want.data(), direct.rows, want.size() * 4, cudaMemcpyDeviceToHost), "output");
  EXPECT_LE(RelativeError(Floats(DType::kF32, out.Read()), want), 1e-5);
}

TEST_F(AttendSpansCuda, RefusesOtherShapes) {
  const CudaOps& ops = *kvs_cuda_ops();
  const Case c{.parts = {{{8, 2}}}, .room = {5}};
  const Problem problem(rng_, c);
  AttendSpansBatch w = problem.Attention();
  w.layer.head_dim = w.pages.head_dim = 96;
  EXPECT_EQ(ops.attend_spans(w, nullptr), cudaErrorInvalidValue);
  w = problem.Attention();
  w.layer.group = 9;
  EXPECT_EQ(ops.attend_spans(w, nullptr), cudaErrorInvalidValue);
  ScoreSpansBatch s = problem.Scores();
  s.layer.part_stride = kSpanPartsMax + 1;
  EXPECT_EQ(ops.score_spans(s, nullptr), cudaErrorInvalidValue);
  ExpandSpansBatch e = problem.Expansion();
  e.layer.span_stride = 40;
  EXPECT_EQ(ops.expand_spans(e, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace kvstrata::cuda
