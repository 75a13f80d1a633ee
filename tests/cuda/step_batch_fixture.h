// Sequences that a Step and a CudaStep run side by side: the same tokens on pages of the host and
// of the GPU, at the same places of two arenas, NaN wherever nothing was written; and, of codecs
// packed and lowrank, the same extents.
#ifndef KVSTRATA_TESTS_CUDA_STEP_BATCH_FIXTURE_H_
#define KVSTRATA_TESTS_CUDA_STEP_BATCH_FIXTURE_H_

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/codec/codec.h"
#include "kernels/step/cuda_step.h"
#include "kernels/step/step.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/elements.h"

namespace kvstrata::cuda {

// Pieces of equal size, scattered over an arena of the host and one of the GPU.
class TwinPieces {
 public:
  TwinPieces(Rng& rng, int count, int64_t bytes)
      : host_(static_cast<size_t>(count * bytes), std::byte{0xFF}), device_(host_.size()) {
    std::vector<int64_t> order(static_cast<size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    for (const int64_t i : order) {
      host_pieces.push_back(host_.data() + i * bytes);
      device_pieces.push_back(device_.get() + i * bytes);
    }
  }
  // All of it random, of deviation `scale`; a block repeats, at no multiple of a row.
  void Draw(Rng& rng, DType dtype, float scale) {
    std::vector<std::byte> block(static_cast<size_t>(65521 * SizeOf(dtype)));
    for (size_t i = 0; i < block.size(); i += static_cast<size_t>(SizeOf(dtype))) {
      StoreFloat(block.data() + i, dtype, scale * Normal(rng));
    }
    for (size_t at = 0; at < host_.size(); at += block.size()) {
      std::copy_n(block.begin(), std::min(block.size(), host_.size() - at), host_.begin() + at);
    }
    device_.Write(host_);
  }

  // The same pieces hold the same bytes. REQUIRES: the GPU is idle.
  void CopyFrom(const TwinPieces& other, int64_t bytes) {
    const auto size = static_cast<size_t>(bytes);
    for (size_t i = 0; i < host_pieces.size(); ++i) {
      std::memcpy(host_pieces[i], other.host_pieces[i], size);
      Check(cudaMemcpy(device_pieces[i], other.device_pieces[i], size, cudaMemcpyDefault),
            "copying a page");
    }
  }

  // The GPU's copy of piece `i` goes to the host's memory, or back; NaN stay where it was.
  // REQUIRES: the GPU is idle.
  void Move(size_t i, bool to_host, int64_t bytes) {
    if (far_ == nullptr) {
      void* far = nullptr;
      Check(cudaMallocHost(&far, host_.size()), "cudaMallocHost");
      far_.reset(static_cast<std::byte*>(far));
    }
    const auto offset = host_pieces[i] - host_.data();
    std::byte* const from = device_pieces[i];
    std::byte* const to = (to_host ? far_.get() : device_.get()) + offset;
    if (to == from) return;
    const auto size = static_cast<size_t>(bytes);
    Check(cudaMemcpy(to, from, size, cudaMemcpyDefault), "moving a page");
    Check(cudaMemset(from, 0xFF, size), "poisoning a page");
    Check(cudaDeviceSynchronize(), "moving a page");
    device_pieces[i] = to;
  }

  std::vector<std::byte*> host_pieces, device_pieces;

 private:
  struct FreePinned {
    void operator()(std::byte* memory) const { cudaFreeHost(memory); }
  };
  std::vector<std::byte> host_;
  DeviceArray<std::byte> device_;
  std::unique_ptr<std::byte, FreePinned> far_;
};

// The extents of a sequence, which its codec's Recompressor makes of the host's pages: on the
// host, and as copies on the GPU with descriptions, as a session reads them.
class TwinExtents {
 public:
  // Until nothing is due. surprisal: [prompt], of codec lowrank. REQUIRES: the GPU is idle.
  void Settle(const Plan& plan, const Geometry& g, SequenceView view, int32_t prompt,
              std::span<const float> surprisal) {
    if (recompressor_ == nullptr) recompressor_ = NewRecompressor(plan, g, nullptr);
    RecompressInput input;
    input.prompt_tokens = prompt;
    input.indexed_tokens = view.tokens;
    input.surprisal = surprisal;
    input.backend = FindBackend("ref").value();
    input.executor = &InlineExecutor();
    input.view = HostView(view);
    for (; recompressor_->Due(input); input.view = HostView(view)) {
      auto output = recompressor_->Run(input);
      ASSERT_TRUE(output.ok()) << output.status().ToString();
      std::vector<Extent> next;
      for (ExtentDraft& draft : output.value().extents) {
        if (draft.kept >= 0) {
          next.push_back(std::move(extents_[static_cast<size_t>(draft.kept)]));
        } else {
          next.emplace_back(std::move(draft));
        }
      }
      extents_ = std::move(next);
      ++version_;
    }
  }
  SequenceView HostView(SequenceView view) { return Viewed(view, false); }
  SequenceView DeviceView(SequenceView view) { return Viewed(view, true); }
  int32_t end() const { return extents_.empty() ? 0 : extents_.back().tokens.end; }
  size_t size() const { return extents_.size(); }
  // Of extent `i`, to be damaged.
  std::vector<std::byte>& description(size_t i) {
    ++version_;
    return extents_[i].description;
  }

 private:
  struct Extent {
    explicit Extent(ExtentDraft draft)
        : tokens(draft.tokens), bytes(std::move(draft.bytes)), device(bytes) {
      const std::span front(bytes.data(), std::min(bytes.size(), size_t{kExtentFrontBytes}));
      const int64_t size = DescriptionBytes(front, static_cast<int64_t>(bytes.size()));
      description.assign(bytes.begin(), bytes.begin() + size);
    }
    kvstrata::Run tokens;
    std::vector<std::byte> bytes, description;
    DeviceArray<std::byte> device;
  };

  SequenceView Viewed(SequenceView view, bool device) {
    std::vector<ExtentView>& views = views_[device ? 1 : 0];
    views.clear();
    for (const Extent& e : extents_) {
      const auto size = static_cast<int64_t>(e.bytes.size());
      views.push_back({device ? e.device.get() : e.bytes.data(), size, e.tokens});
      if (!device) continue;
      views.back().description = e.description.data();
      views.back().description_bytes = static_cast<int64_t>(e.description.size());
    }
    view.extents = views.data();
    view.extent_count = static_cast<int32_t>(views.size());
    view.version = version_;
    return view;
  }

  std::unique_ptr<Recompressor> recompressor_;
  std::vector<Extent> extents_;
  std::vector<ExtentView> views_[2];
  uint64_t version_ = 1;
};

// Tokens that one selection has and the other has not, and the other way round.
struct Difference {
  std::vector<int32_t> missing, extra;
  bool operator==(const Difference&) const = default;
};

struct TwinSequence {
  TwinSequence(Rng& rng, const Geometry& g, const std::string& plan_text, int32_t capacity)
      : TwinSequence(rng, g, ParsePlan(plan_text).value(), capacity) {}
  TwinSequence(Rng& rng, const Geometry& g, const Plan& plan_, int32_t capacity)
      : plan(plan_),
        on_host(std::make_unique<SequenceState>(g, plan, 0, 0)),
        on_device(std::make_unique<SequenceState>(g, plan, 0, 0)),
        pages(rng, capacity / g.page_tokens + 1, g.page_bytes()),
        blocks(rng, on_host->index().BlocksFor(capacity) + 1,
               std::max<int64_t>(on_host->index().block_bytes, 64)) {}

  SequenceView HostView() const {
    return extents->HostView({.pages = pages.host_pieces.data(),
                              .index_blocks = blocks.host_pieces.data(),
                              .tokens = on_host->tokens()});
  }
  SequenceView DeviceView() const {
    return extents->DeviceView({.pages = pages.device_pieces.data(),
                                .index_blocks = blocks.device_pieces.data(),
                                .tokens = on_device->tokens(),
                                .far_pages = far_pages.empty() ? nullptr : far_pages.data()});
  }
  // Page `i`, which is complete, goes to the host's memory, or back.
  void MovePage(const Geometry& g, size_t i, bool to_host) {
    far_pages.resize(pages.device_pieces.size());
    far_pages[i] = to_host ? 1 : 0;
    pages.Move(i, to_host, g.page_bytes());
    if (std::ranges::count(far_pages, 1) == 0) far_pages.clear();
  }
  int32_t CompletePages(const Geometry& g) const { return on_device->tokens() / g.page_tokens; }
  // Makes the extents that are due. Nobody may read the GPU's rows of them any more: they become
  // NaN.
  void Recompress(const Geometry& g, std::span<const float> surprisal = {}) {
    Check(cudaDeviceSynchronize(), "the steps before");
    extents->Settle(plan, g, HostView(), on_host->prompt_tokens(), surprisal);
    for (int32_t i = 0; i < extents->end() / g.page_tokens; ++i) {
      Check(cudaMemset(pages.device_pieces[static_cast<size_t>(i)], 0xFF,
                       static_cast<size_t>(g.page_bytes())),
            "poisoning a page");
    }
    Check(cudaDeviceSynchronize(), "poisoning pages");
  }
  // The prompt is complete.
  void ClosePrompt(const Backend& backend) {
    ASSERT_TRUE(on_host->Refresh(HostView()).ok());
    ASSERT_TRUE(on_host->PrefillDone(HostView(), backend, InlineExecutor()).ok());
    ASSERT_TRUE(on_device->ClosePrompt().ok());
  }
  // A fork on pages of its own. REQUIRES: the GPU is idle.
  std::unique_ptr<TwinSequence> Fork(Rng& rng, const Geometry& g, int32_t capacity) const {
    auto child = std::make_unique<TwinSequence>(rng, g, plan, capacity);
    child->pages.CopyFrom(pages, g.page_bytes());
    child->on_host = on_host->Clone();
    child->on_device = on_device->Clone();
    child->tied = tied;
    child->bounded = bounded;
    return child;
  }
  // Both hold `tokens`, as of a prefix that is held without an index.
  void Hold(const Geometry& g, int32_t tokens) {
    on_host = std::make_unique<SequenceState>(g, plan, tokens, 0);
    on_device = std::make_unique<SequenceState>(g, plan, tokens, 0);
    bounded = tokens;
  }
  // What was committed since the last report: one token in `every` ends a sentence.
  void ReportBoundaries(Rng& rng, int every) {
    std::vector<uint8_t> ends(static_cast<size_t>(on_host->tokens() - bounded));
    for (uint8_t& end : ends) end = Below(rng, every) == 0 ? 1 : 0;
    const auto count = static_cast<int32_t>(ends.size());
    for (SequenceState* state : {on_host.get(), on_device.get()}) {
      const Status reported = state->Report(bounded, count, nullptr, nullptr, ends.data());
      ASSERT_TRUE(reported.ok()) << reported.ToString();
    }
    bounded += count;
  }
  void ForgetIndex(const Geometry& g) { Hold(g, on_host->tokens()); }
  // Clones go on for both.
  void Clone() {
    on_host = on_host->Clone();
    on_device = on_device->Clone();
  }
  // An array that the selector keeps on the host.
  template <typename T>
  static std::vector<T> Inspected(const SequenceState& state, const SequenceView& view,
                                  const char* name) {
    const auto array = state.Inspect(view, *FindBackend("ref").value(), InlineExecutor(), name);
    EXPECT_TRUE(array.ok()) << array.status().ToString();
    std::vector<T> values(array.value().bytes.size() / sizeof(T));
    std::memcpy(values.data(), array.value().bytes.data(), array.value().bytes.size());
    return values;
  }

  Plan plan;
  std::unique_ptr<SequenceState> on_host, on_device;
  TwinPieces pages, blocks;
  std::unique_ptr<TwinExtents> extents = std::make_unique<TwinExtents>();
  // By layer: where near-ties made the last selection of selector vote another one; hits keep it.
  std::map<int, Difference> tied;
  int32_t bounded = 0;             // tokens whose boundaries were reported
  std::vector<uint8_t> far_pages;  // as of SequenceView; empty: none
};

// Whether two selections are the same but for units (selector vote: tokens) whose scores by `q`
// [query_heads][head_dim] are within 1 % of each other, or, of selector cascade, for pages that
// hang on scores within 1e-5 of their level's largest; *equal: they are the same. reused: both go
// on with an earlier selection.
class NearTies {
 public:
  NearTies(TwinSequence& sequence, const Geometry& g, int layer, const float* q, bool reused)
      : sequence_(sequence), g_(g), layer_(layer), q_(q), reused_(reused) {}

  bool Agree(const Selection& want, const Selection& got, bool* equal) const {
    *equal = want.runs == got.runs && want.units == got.units && want.full == got.full;
    if (sequence_.plan.selector == SelectorKind::kVote) return AgreeOnTokens(want, got);
    if (*equal) return true;
    if (sequence_.plan.selector == SelectorKind::kBucket) return AgreeOnSizes(want, got);
    if (want.full || got.full || want.units.size() != got.units.size()) return false;
    if (sequence_.plan.selector == SelectorKind::kZoom) return SpansAgree(want, got);
    if (sequence_.plan.selector == SelectorKind::kCascade) {
      return CascadeAgrees(want.units[0], got.units[0]);
    }
    for (int head = 0; head < g_.kv_heads; ++head) {
      const std::vector<int32_t>& a = want.units[head];
      const std::vector<int32_t>& b = got.units[head];
      if (a.size() != b.size()) return false;
      std::vector<int32_t> missing, extra;
      std::ranges::set_difference(a, b, std::back_inserter(missing));
      std::ranges::set_difference(b, a, std::back_inserter(extra));
      const std::vector<double> scores =
          sequence_.plan.codec == CodecKind::kPacked ? BlockScores(head) : Scores(want, head);
      for (const int32_t m : missing) {
        for (const int32_t e : extra) {
          if (scores[m] - scores[e] > 1e-2 * std::abs(scores[m])) return false;
        }
      }
    }
    return true;
  }

  // Selector bucket: whether a head of the prompt keeps the same tokens but for those whose
  // importance is within 0.1 % of each other's; *equal: they are the same.
  bool AgreeOnKept(int head, const std::vector<int32_t>& got, bool* equal) const {
    const auto inspected = [this](const char* name, auto value) {
      return TwinSequence::Inspected<decltype(value)>(*sequence_.on_host, sequence_.HostView(),
                                                      name);
    };
    const auto kept = inspected("kept", int32_t{}), offsets = inspected("kept_offsets", int32_t{});
    const auto importance = inspected("importance", float{});
    const auto row = static_cast<size_t>(layer_ * g_.kv_heads + head);
    const auto want = std::span(kept).subspan(static_cast<size_t>(offsets[row]),
                                              static_cast<size_t>(offsets[row + 1] - offsets[row]));
    std::vector<int32_t> missing, extra;
    std::ranges::set_difference(want, got, std::back_inserter(missing));
    std::ranges::set_difference(got, want, std::back_inserter(extra));
    *equal = missing.empty() && extra.empty();
    const size_t tokens = importance.size() / static_cast<size_t>(g_.layers * g_.kv_heads);
    for (const int32_t m : missing) {
      for (const int32_t e : extra) {
        const float a = importance[row * tokens + static_cast<size_t>(m)];
        const float b = importance[row * tokens + static_cast<size_t>(e)];
        if (a - b > 1e-3f * a) return false;
      }
    }
    return missing.size() == extra.size();
  }

 private:
  // Near-ties of scores in fp32 are too rare to ask for more; Twins counts them.
  static bool AgreeOnSizes(const Selection& want, const Selection& got) {
    return want.full == got.full && want.RowsPerHead() == got.RowsPerHead();
  }
  // What is expanded on one side only has one relevance.
  bool SpansAgree(const Selection& want, const Selection& got) const {
    const auto logits = TwinSequence::Inspected<float>(*sequence_.on_host, sequence_.HostView(),
                                                       "relevance_logits");
    const size_t spans = sequence_.on_host->spans()->spans().size();
    for (size_t head = 0; head < want.units.size(); ++head) {
      std::vector<int32_t> different;
      std::ranges::set_symmetric_difference(want.units[head], got.units[head],
                                            std::back_inserter(different));
      const float* of_head = &logits[(static_cast<size_t>(layer_ * g_.query_heads) + head) * spans];
      for (const int32_t u : different) {
        if (std::abs(of_head[u] - of_head[different[0]]) > 1e-3f) return false;
      }
    }
    return true;
  }
  bool CascadeAgrees(const std::vector<int32_t>& want, const std::vector<int32_t>& got) const {
    std::vector<int32_t> missing, extra;
    std::ranges::set_difference(want, got, std::back_inserter(missing));
    std::ranges::set_difference(got, want, std::back_inserter(extra));
    if (missing.size() != extra.size()) return false;
    const Plan& plan = sequence_.plan;
    for (const int32_t m : missing) {
      bool tie = false;
      int32_t pages = 1;  // of a unit
      for (const auto& [name, size] : {std::pair{"page_scores", plan.pages_per_chunk},
                                       {"chunk_scores", plan.chunks_per_grid},
                                       {"grid_scores", 1}}) {
        const auto scores =
            TwinSequence::Inspected<float>(*sequence_.on_host, sequence_.HostView(), name);
        float largest = 0;
        for (const float x : scores) largest = std::max(largest, std::abs(x));
        for (const int32_t e : extra) {
          const float a = scores[static_cast<size_t>(m / pages)];
          const float b = scores[static_cast<size_t>(e / pages)];
          tie |= m / pages != e / pages && std::abs(a - b) <= 1e-5f * largest;
        }
        pages *= size;
      }
      if (!tie) return false;
    }
    return true;
  }
  bool AgreeOnTokens(const Selection& want, const Selection& got) const {
    if (want.full || got.full) return want.full == got.full && want.runs == got.runs;
    const std::vector<int32_t> a = TokensOf(want), b = TokensOf(got);
    Difference d;
    std::ranges::set_difference(a, b, std::back_inserter(d.missing));
    std::ranges::set_difference(b, a, std::back_inserter(d.extra));
    if (reused_) return d == sequence_.tied[layer_];
    sequence_.tied[layer_] = d;
    if (a.size() != b.size()) return false;
    if (d.missing.empty()) return true;
    const std::vector<double> votes = Votes(want.tokens);
    for (const int32_t m : d.missing) {
      for (const int32_t e : d.extra) {
        if (votes[m] - votes[e] > 1e-2 * votes[m]) return false;
      }
    }
    return true;
  }
  static std::vector<int32_t> TokensOf(const Selection& s) {
    std::vector<int32_t> tokens;
    for (const Run& run : s.runs[0]) {
      for (int32_t t = run.begin; t < run.end; ++t) tokens.push_back(t);
    }
    return tokens;
  }
  // What the heads' softmax over the middle gives each token; 0 outside.
  std::vector<double> Votes(int32_t n) const {
    const Plan& plan = sequence_.plan;
    const int32_t first = plan.n_init, last = n - plan.n_local;
    std::vector<double> votes(static_cast<size_t>(n)), weights(votes.size());
    for (int head = 0; head < g_.query_heads; ++head) {
      double sum = 0;
      for (int32_t t = first; t < last; ++t) {
        sum += weights[static_cast<size_t>(t)] =
            std::exp(Dot(head, t) / std::sqrt(double{1} * g_.head_dim));
      }
      for (int32_t t = first; t < last; ++t) {
        votes[static_cast<size_t>(t)] += weights[static_cast<size_t>(t)] / sum;
      }
    }
    return votes;
  }
  double Dot(int head, int32_t token) const {
    const PageLayout layout = PageLayout::Of(g_);
    const std::byte* const page =
        sequence_.pages.host_pieces[static_cast<size_t>(token / g_.page_tokens)];
    const std::byte* const key =
        page + layout.KeyOffset(layer_, head / g_.group(), token % g_.page_tokens);
    double sum = 0;
    for (int c = 0; c < g_.head_dim; ++c) {
      sum += double{q_[int64_t{head} * g_.head_dim + c]} *
             LoadFloat(key + c * SizeOf(g_.dtype), g_.dtype);
    }
    return sum;
  }
  // Of the units that compete, by id.
  std::vector<double> Scores(const Selection& s, int head) const {
    const Plan& plan = sequence_.plan;
    const int32_t first = (plan.n_sink + plan.page - 1) / plan.page;
    const int32_t last = (s.tokens - plan.n_recent) / plan.page;
    std::vector<double> scores(static_cast<size_t>(last), 0);
    for (int i = 0; i < g_.group(); ++i) {
      const float* q = q_ + int64_t{head * g_.group() + i} * g_.head_dim;
      std::vector<double> bounds;
      for (int32_t u = first; u < last; ++u) bounds.push_back(Bound(head, u, q));
      const double top = *std::ranges::max_element(bounds);
      double sum = 0;
      for (double& x : bounds) {
        if (plan.group_softmax) sum += x = std::exp((x - top) / std::sqrt(g_.head_dim));
      }
      for (int32_t u = first; u < last; ++u) {
        const double x = bounds[static_cast<size_t>(u - first)];
        double& score = scores[static_cast<size_t>(u)];
        score = plan.group_softmax ? score + x / sum : i == 0 ? x : std::max(score, x);
      }
    }
    return scores;
  }
  // Of the blocks of packed rows, by id.
  std::vector<double> BlockScores(int head) const {
    const PackedStorage& packed = *sequence_.on_host->packed();
    const Backend& backend = *FindBackend("ref").value();
    std::vector<double> scores;
    for (size_t s = 0; s < packed.segments().size(); ++s) {
      const PackedHead& h = packed.head(static_cast<int>(s), layer_, head);
      const kvstrata::Run tokens = packed.segments()[s].tokens;
      const int32_t blocks = (tokens.end - tokens.begin + h.block - 1) / h.block;
      std::vector<float> rotated(static_cast<size_t>(g_.group() * g_.head_dim));
      const RotateWork rotate{
          h.r_k,       g_.head_dim, false,         q_ + int64_t{head} * g_.group() * g_.head_dim,
          g_.head_dim, g_.group(),  rotated.data()};
      backend.rotate(&rotate, 1, InlineExecutor());
      std::vector<float> out(static_cast<size_t>(blocks));
      ScorePackedWork score;
      score.rows = h.blocks;
      score.q = rotated.data();
      score.queries = g_.group();
      score.units = {0, blocks};
      score.out = out.data();
      backend.score_packed(&score, 1, InlineExecutor());
      scores.insert(scores.end(), out.begin(), out.end());
    }
    return scores;
  }
  double Bound(int head, int32_t unit, const float* q) const {
    const IndexLayout& index = sequence_.on_host->index();
    const auto* blocks = sequence_.blocks.host_pieces.data();
    const std::byte* low = index.Row(blocks, 0, layer_, 0, head, unit);
    const std::byte* high = index.Row(blocks, 0, layer_, 1, head, unit);
    const int64_t size = SizeOf(index.dtype);
    double sum = 0;
    for (int c = 0; c < g_.head_dim; ++c) {
      const double x = q[c];
      sum += std::max(x * LoadFloat(low + c * size, index.dtype),
                      x * LoadFloat(high + c * size, index.dtype));
    }
    return sum;
  }

  TwinSequence& sequence_;
  const Geometry& g_;
  const int layer_;
  const float* q_;
  const bool reused_;
};

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_TESTS_CUDA_STEP_BATCH_FIXTURE_H_
