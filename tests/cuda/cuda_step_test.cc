// CudaStep against Step with backend `ref`, side by side on random tokens: selections equal but for
// near-ties, outputs and lse within rounding; eagerly, captured and replayed, with tensors of the
// device and of the host; what it refuses; when it leaves the epoch.
#include "kernels/step/cuda_step.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "tests/cuda/captured_graph.h"
#include "tests/cuda/relative_error.h"
#include "tests/cuda/seed.h"
#include "tests/cuda/step_batch_fixture.h"

namespace kvstrata::cuda {
namespace {

constexpr int32_t kCapacity = 1024;  // tokens a sequence may have

const Backend& RefBackend() { return *FindBackend("ref").value(); }

// Where a test's tensors lie.
enum class Memory { kDevice, kHost };

// A tensor [tokens][heads][dim] with `gap` bytes after each head and token, on host and GPU.
class Tensor {
 public:
  Tensor(DType dtype, int32_t tokens, int32_t heads, int32_t dim, int64_t gap)
      : dtype_(dtype), tokens_(tokens), heads_(heads), dim_(dim) {
    head_stride_ = dim * SizeOf(dtype) + gap;
    token_stride_ = heads * head_stride_ + gap;
    host_.assign(static_cast<size_t>(tokens * token_stride_), std::byte{0xFF});
    device_ = DeviceArray<std::byte>(host_.size());
  }
  void Draw(Rng& rng) {
    ForElements([&](std::byte* at) { StoreFloat(at, dtype_, Normal(rng)); });
    device_.Write(host_);
  }
  void Poison() {
    std::ranges::fill(host_, std::byte{0xFF});
    device_.Poison();
  }
  Rows On(Memory memory) const {
    return {memory == Memory::kHost ? host_.data() : device_.get(), token_stride_, head_stride_,
            dtype_};
  }
  MutableRows Out(Memory memory) {
    return {memory == Memory::kHost ? host_.data() : device_.get(), token_stride_, head_stride_,
            dtype_};
  }
  std::vector<float> Read(Memory memory) {
    if (memory == Memory::kDevice) {
      const std::vector<std::byte> bytes = device_.Read();
      std::ranges::copy(bytes, host_.begin());
    }
    std::vector<float> values;
    ForElements([&](const std::byte* at) { values.push_back(LoadFloat(at, dtype_)); });
    return values;
  }

 private:
  template <typename Fn>
  void ForElements(const Fn& fn) {
    for (int32_t t = 0; t < tokens_; ++t) {
      for (int32_t h = 0; h < heads_; ++h) {
        for (int32_t c = 0; c < dim_; ++c) {
          fn(host_.data() + t * token_stride_ + h * head_stride_ + c * SizeOf(dtype_));
        }
      }
    }
  }

  DType dtype_;
  int32_t tokens_, heads_, dim_;
  int64_t head_stride_ = 0, token_stride_ = 0;
  std::vector<std::byte> host_;
  DeviceArray<std::byte> device_;
};

struct Tensors {
  Tensors(const Geometry& g, int32_t tokens, DType dtype, int64_t gap)
      : k(dtype, tokens, g.kv_heads, g.head_dim, gap),
        v(dtype, tokens, g.kv_heads, g.head_dim, gap),
        q(dtype, tokens, g.query_heads, g.head_dim, gap),
        out(dtype, tokens, g.query_heads, g.head_dim, gap),
        lse(DType::kF32, tokens, g.query_heads, 1, 0) {}
  void Draw(Rng& rng) {
    for (Tensor* t : {&k, &v, &q}) t->Draw(rng);
    out.Poison();
    lse.Poison();
  }
  Tensor k, v, q, out, lse;
};

struct TensorKind {
  DType dtype = DType::kBF16;
  Memory memory = Memory::kDevice;
  int64_t gap = 0;  // bytes between rows
};

class Stream {
 public:
  Stream() { Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream"); }
  Stream(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// A batch that both kinds of step run.
class Twins {
 public:
  Twins(const Geometry& g, const std::vector<std::string>& plans, int32_t tokens = kCapacity)
      : geometry(g), capacity(tokens), workspace(*kvs_cuda_ops(), g) {
    for (const std::string& plan : plans) {
      sequences.push_back(std::make_unique<TwinSequence>(rng, g, plan, capacity));
    }
  }

  std::vector<StepMember> HostMembers(const std::vector<int32_t>& n) const {
    std::vector<StepMember> members;
    for (size_t i = 0; i < n.size(); ++i) {
      members.push_back({sequences[i]->on_host.get(), sequences[i]->HostView(), n[i]});
      EXPECT_TRUE(members.back().state->Refresh(members.back().view).ok());
    }
    return members;
  }
  std::vector<StepMember> DeviceMembers(const std::vector<int32_t>& n) const {
    std::vector<StepMember> members;
    for (size_t i = 0; i < n.size(); ++i) {
      members.push_back({sequences[i]->on_device.get(), sequences[i]->DeviceView(), n[i]});
      EXPECT_TRUE(members.back().state->Refresh(members.back().view).ok());
    }
    return members;
  }
  std::vector<int32_t> Each(int32_t n) const { return std::vector<int32_t>(sequences.size(), n); }
  std::unique_ptr<CudaStep> Begin(const std::vector<int32_t>& n, CudaStep::Exit exit = {}) {
    auto step = CudaStep::Begin(DeviceMembers(n), used, stream.get(), exit);
    EXPECT_TRUE(step.ok()) << step.status().ToString();
    return step.ok() ? std::move(step).value() : nullptr;
  }
  std::vector<Tensors> NewTensors(int32_t tokens, TensorKind kind) {
    std::vector<Tensors> tensors;
    for (int i = 0; i < geometry.layers; ++i) {
      tensors.emplace_back(geometry, tokens, kind.dtype, kind.gap);
      tensors.back().Draw(rng);
    }
    return tensors;
  }

  // One step of both, layer by layer.
  void Run(const std::vector<int32_t>& n, TensorKind kind = {}) {
    const int32_t tokens = std::accumulate(n.begin(), n.end(), 0);
    std::vector<Tensors> tensors = NewTensors(tokens, kind);
    RunWith(n, tensors, kind.memory);
  }
  void RunWith(const std::vector<int32_t>& n, std::vector<Tensors>& tensors, Memory memory) {
    Step host(HostMembers(n), RefBackend(), InlineExecutor());
    const auto device = Begin(n);
    ASSERT_NE(device, nullptr);
    for (int layer = 0; layer < geometry.layers; ++layer) {
      Tensors& t = tensors[static_cast<size_t>(layer)];
      ASSERT_NO_FATAL_FAILURE(Enqueue(*device, layer, t, memory));
      RunHost(host, layer, t);
      std::vector<bool> equal(n.size());
      for (size_t i = 0; i < n.size(); ++i) {
        equal[i] = CompareSelections(host, *device, layer, static_cast<int>(i));
      }
      ASSERT_NO_FATAL_FAILURE(CompareOutputs(n, equal, t, memory));
    }
    ASSERT_TRUE(device->End(stream.get()).ok());
    host.End();
    for (const auto& s : sequences) {
      ASSERT_EQ(s->on_device->tokens(), s->on_host->tokens());
      ASSERT_EQ(s->on_device->indexed_tokens(), s->on_host->indexed_tokens());
    }
    ASSERT_NO_FATAL_FAILURE(ReportBoundaries());
  }
  void ReportBoundaries() {
    for (const auto& s : sequences) {
      if (s->plan.selector != SelectorKind::kBucket || boundary_every == 0) continue;
      ASSERT_NO_FATAL_FAILURE(s->ReportBoundaries(rng, boundary_every));
    }
  }
  static void Enqueue(CudaStep& step, int layer, Tensors& t, Memory memory) {
    const Status appended = step.Append(layer, t.k.On(memory), t.v.On(memory));
    ASSERT_TRUE(appended.ok()) << appended.ToString();
    const Status attended = step.Attend(layer, t.q.On(memory), t.out.Out(memory),
                                        reinterpret_cast<float*>(t.lse.Out(memory).data));
    ASSERT_TRUE(attended.ok()) << attended.ToString();
  }
  void RunHost(Step& step, int layer, Tensors& t) {
    const Rows q = t.q.On(Memory::kHost);
    queries = t.q.Read(Memory::kHost);
    expected.assign(queries.size(), NAN);
    expected_lse.assign(queries.size() / static_cast<size_t>(geometry.head_dim), NAN);
    step.Append(layer, t.k.On(Memory::kHost), t.v.On(Memory::kHost));
    const int64_t row = geometry.head_dim * int64_t{sizeof(float)};
    step.Attend(layer, q,
                {reinterpret_cast<std::byte*>(expected.data()), geometry.query_heads * row, row,
                 DType::kF32},
                expected_lse.data());
  }
  // Whether they are equal; a failure if they differ by more than near-ties.
  bool CompareSelections(Step& host, CudaStep& device, int layer, int member) {
    const auto got = device.ReadSelection(member);
    EXPECT_TRUE(got.ok()) << got.status().ToString();
    if (!got.ok()) return false;
    TwinSequence& sequence = *sequences[static_cast<size_t>(member)];
    const Selection& want = host.selection(member);
    const bool prompt = sequence.on_host->prompt_tokens() < 0;
    const bool reused = !prompt && !want.full && want.scored_bytes == 0;
    const std::vector<float> query = QueryOf(host, member);
    const NearTies ties(sequence, geometry, layer, query.data(), reused);
    bool equal = false;
    if (sequence.plan.selector == SelectorKind::kBucket && !prompt && !want.full) {
      ++bucket_selections;
      if (!KeepTheSame(ties, device, member)) return false;  // of other tokens
    }
    EXPECT_TRUE(ties.Agree(want, got.value(), &equal))
        << "member " << member << " layer " << layer << " tokens "
        << host.member(member).view.tokens;
    if (sequence.plan.selector == SelectorKind::kVote) {
      EXPECT_EQ(got.value().scored_bytes, want.scored_bytes) << "a hit on one side only";
      hits += reused ? 1 : 0;
      misses += want.scored_bytes > 0 ? 1 : 0;
    }
    ++selections;
    unequal += equal ? 0 : 1;
    if (equal && host.member(member).new_tokens == 1) {
      const auto cost = device.ReadCost(member);
      EXPECT_TRUE(cost.ok());
      EXPECT_EQ(cost.value().rows, host.cost(member).rows);
      EXPECT_EQ(cost.value().attend_bytes, host.cost(member).attend_bytes);
      // Means of buckets are fp32 on a CPU and bf16 here.
      const uint64_t means = sequence.plan.selector == SelectorKind::kBucket ? 2 : 1;
      EXPECT_EQ(cost.value().select_bytes * means, host.cost(member).select_bytes);
    }
    return equal;
  }
  // Whether all heads of the prompt keep the same tokens; a failure if they differ by more than
  // near-ties.
  bool KeepTheSame(const NearTies& ties, const CudaStep& device, int member) {
    bool same = true;
    for (int head = 0; head < geometry.kv_heads; ++head) {
      const auto kept = device.ReadKept(member, head);
      if (!kept.ok()) {
        EXPECT_EQ(kept.status().reason(), "KEPT_NONE");  // of a short prompt
        continue;
      }
      bool equal = false;
      EXPECT_TRUE(ties.AgreeOnKept(head, kept.value(), &equal)) << "kept by head " << head;
      same = same && equal;
    }
    kept_ties += same ? 0 : 1;
    return same;
  }
  // Rows of a member's new tokens that share a selection (DECISIONS 4).
  std::vector<kvstrata::Run> ChunksOf(size_t member, int32_t n) const {
    const TwinSequence& s = *sequences[member];
    if (s.plan.selector != SelectorKind::kVote || s.on_host->prompt_tokens() >= 0) return {{0, n}};
    const int32_t start = s.on_host->tokens(), chunk = s.plan.chunk;
    std::vector<kvstrata::Run> chunks;
    for (int32_t begin = 0; begin < n; begin = chunks.back().end) {
      chunks.push_back({begin, std::min(n, ((start + begin) / chunk + 1) * chunk - start)});
    }
    return chunks;
  }
  // What the member's selection was made of: its first new token's query, or the mean of its last
  // chunk's.
  std::vector<float> QueryOf(const Step& host, int member) const {
    int64_t row = 0;
    for (int i = 0; i < member; ++i) row += host.member(i).new_tokens;
    const auto index = static_cast<size_t>(member);
    kvstrata::Run rows = ChunksOf(index, host.member(member).new_tokens).back();
    if (sequences[index]->on_host->prompt_tokens() >= 0) rows = {0, 1};
    const auto floats = static_cast<size_t>(geometry.query_heads * geometry.head_dim);
    std::vector<double> sum(floats);
    for (int64_t t = row + rows.begin; t < row + rows.end; ++t) {
      for (size_t c = 0; c < floats; ++c) sum[c] += queries[static_cast<size_t>(t) * floats + c];
    }
    std::vector<float> mean(floats);
    for (size_t c = 0; c < floats; ++c) {
      mean[c] = static_cast<float>(sum[c] / (rows.end - rows.begin));
    }
    return mean;
  }
  void CompareOutputs(const std::vector<int32_t>& n, const std::vector<bool>& equal, Tensors& t,
                      Memory memory) {
    const std::vector<float> out = t.out.Read(memory), lse = t.lse.Read(memory);
    const auto heads = static_cast<size_t>(geometry.query_heads);
    const size_t token = heads * static_cast<size_t>(geometry.head_dim);
    size_t row = 0;
    for (size_t i = 0; i < n.size(); row += static_cast<size_t>(n[i]), ++i) {
      const std::vector<kvstrata::Run> chunks = ChunksOf(i, n[i]);
      for (const kvstrata::Run& chunk : chunks) {
        const auto part = [&](const std::vector<float>& x, size_t size) {
          return std::span(x).subspan((row + static_cast<size_t>(chunk.begin)) * size,
                                      static_cast<size_t>(chunk.end - chunk.begin) * size);
        };
        const double error = RelativeError(part(out, token), part(expected, token));
        const double lse_error = RelativeError(part(lse, heads), part(expected_lse, heads));
        if (chunk.end < n[i]) {
          // Its selection cannot be read any more: a near-tie is counted as one.
          ASSERT_LT(error, 0.5) << "member " << i << " chunk at " << chunk.begin;
          ++selections;
          unequal += error < 5e-3 && lse_error < 5e-3 ? 0 : 1;
        } else if (equal[i]) {
          ASSERT_LT(error, 5e-3) << "member " << i;
          ASSERT_LT(lse_error, 5e-3) << "member " << i;
        }
      }
    }
  }
  // A step of the GPU's that is not ended.
  void GiveUp(const std::vector<int32_t>& n) {
    const int32_t tokens = std::accumulate(n.begin(), n.end(), 0);
    std::vector<Tensors> tensors = NewTensors(tokens, {});
    const auto device = Begin(n);
    ASSERT_NE(device, nullptr);
    for (int layer = 0; layer < geometry.layers; ++layer) {
      ASSERT_NO_FATAL_FAILURE(
          Enqueue(*device, layer, tensors[static_cast<size_t>(layer)], Memory::kDevice));
    }
    Check(cudaStreamSynchronize(stream.get()), "a step that is given up");
  }
  void Fork(size_t parent) {
    Check(cudaDeviceSynchronize(), "the steps of a parent");
    sequences.push_back(sequences[parent]->Fork(rng, geometry, capacity));
  }
  void Pack() {
    for (const auto& s : sequences) {
      if (s->plan.codec != CodecKind::kPacked) continue;
      ASSERT_NO_FATAL_FAILURE(s->Recompress(geometry));
    }
  }
  // About one complete page in `odds` of each sequence goes where it was not.
  void MovePages(int odds) {
    Check(cudaDeviceSynchronize(), "the steps before a move");
    for (const auto& s : sequences) {
      for (int32_t i = 0; i < s->CompletePages(geometry); ++i) {
        if (Below(rng, odds) != 0) continue;
        const auto page = static_cast<size_t>(i);
        s->MovePage(geometry, page, s->far_pages.empty() || s->far_pages[page] == 0);
      }
    }
  }
  void ClosePrompts() {
    for (const auto& s : sequences) ASSERT_NO_FATAL_FAILURE(s->ClosePrompt(RefBackend()));
  }
  // The entropy of each last token but for one in seven, which has none.
  void ReportEntropies() {
    for (const auto& s : sequences) {
      const float entropy = static_cast<float>(Below(rng, 2000)) * 1e-3f;
      const int32_t t = s->on_host->tokens() - 1;
      if (t % 7 == 3) continue;
      for (SequenceState* state : {s->on_host.get(), s->on_device.get()}) {
        const Status reported = state->Report(t, 1, nullptr, &entropy, nullptr);
        ASSERT_TRUE(reported.ok()) << reported.ToString();
      }
    }
  }
  // Near-ties are rare; if they were not, outputs would go unchecked.
  void ExpectFewTies() const { EXPECT_LE(unequal * 10, selections) << "of " << selections; }

  Rng rng{TestSeed()};
  const Geometry geometry;
  const int32_t capacity;  // tokens a sequence may have
  CudaWorkspace workspace;
  CudaWorkspace* used = &workspace;  // by Begin
  Stream stream;
  std::vector<std::unique_ptr<TwinSequence>> sequences;
  std::vector<float> queries, expected, expected_lse;  // of the last layer
  int selections = 0, unequal = 0;
  int hits = 0, misses = 0;  // of selector vote
  int boundary_every = 12;   // tokens of a sentence, about; 0: none is reported
  int bucket_selections = 0, kept_ties = 0;
};

Geometry Small(DType dtype = DType::kBF16, int32_t page_tokens = 16) {
  return {.layers = 2,
          .query_heads = 8,
          .kv_heads = 2,
          .head_dim = 64,
          .page_tokens = page_tokens,
          .dtype = dtype};
}

constexpr const char* kWindow = "window{n_sink = 4, n_recent = 60, min_tokens = 150}";
constexpr const char* kQuest = "quest{budget = 64, n_dense_layers = 1, min_tokens = 150}";
constexpr const char* kStrata = "strata{budget = 96, min_tokens = 0}";
constexpr const char* kChess =
    "chess{page = 16, pages_per_chunk = 2, chunks_per_grid = 3, window = 2, rho = [0.7, 0.6, 0.6], "
    "trigger = \"every\", every = 1, min_tokens = 150, n_dense_layers = 1}";
constexpr const char* kChessAlways =
    "chess{page = 32, pages_per_chunk = 1, chunks_per_grid = 2, sinks = 0, window = 1, "
    "rho = [0.6, 0.6, 0.9], trigger = \"always\", min_tokens = 0}";
constexpr const char* kChessEntropy =
    "chess{page = 8, pages_per_chunk = 3, chunks_per_grid = 2, sinks = 2, window = 1, "
    "rho = [0.8, 0.8, 0.5], thresholds = [1.0, 0.35], combine = \"or\", min_tokens = 0}";
// Of two random queries one in two is alike.
constexpr const char* kTokens =
    "tokenselect{k = 64, n_init = 4, n_local = 20, theta = 0, chunk = 48, min_tokens = 150}";
constexpr const char* kSentences =
    "sentencekv{tau = 48, r = 1.5, n_obs = 20, start = 5, recent = 12, max_length = 17, "
    "min_tokens = 150}";
// Dense layers; pools of nothing; sentences that end by their length.
constexpr const char* kLongSentences =
    "sentencekv{tau = 40, n_obs = 40, start = 0, recent = 1, pool = 1, max_length = 30, "
    "n_dense_layers = 1, min_tokens = 0}";
// All of the prompt is kept.
constexpr const char* kAllSentences =
    "sentencekv{tau = 64, r = 9, start = 33, recent = 20, max_length = 9, min_tokens = 0}";
constexpr const char* kSpans =
    "sekv{alpha = 1, l_min = 2, r_max = 8, d_route = 16, local = 30, rows_share = 0.6, "
    "min_tokens = 0}";
constexpr const char* kLongSpans =
    "sekv{alpha = 2, r_max = 40, d_route = 64, local = 20, rows = 0, min_tokens = 0, "
    "n_dense_layers = 1}";
constexpr const char* kPlans[] = {
    "full",  kWindow,    kQuest,         "quest{budget = 70, min_tokens = 0}",
    kStrata, kChess,     kChessAlways,   kChessEntropy,
    kTokens, kSentences, kLongSentences, kAllSentences};

// Prompts of these lengths, in three chunks each.
void Prefill(Twins& twins, const std::vector<int32_t>& lengths) {
  std::vector<int32_t> rest = lengths;
  for (const int32_t chunk : {70, 33}) {
    std::vector<int32_t> n;
    for (int32_t& r : rest) {
      n.push_back(std::min(chunk, r - 1));
      r -= n.back();
    }
    ASSERT_NO_FATAL_FAILURE(twins.Run(n));
  }
  ASSERT_NO_FATAL_FAILURE(twins.Run(rest));
  ASSERT_NO_FATAL_FAILURE(twins.ClosePrompts());
}

TEST(CudaStep, FollowsTheCpuStep) {
  for (const char* plan : kPlans) {
    for (const auto& [dtype, page, batch] :
         {std::tuple{DType::kBF16, 16, 1}, {DType::kBF16, 32, 5}, {DType::kF16, 16, 8}}) {
      SCOPED_TRACE(std::string(plan) + " batch " + std::to_string(batch));
      Twins twins(Small(dtype, page), std::vector<std::string>(static_cast<size_t>(batch), plan));
      std::vector<int32_t> lengths;
      for (int i = 0; i < batch; ++i) lengths.push_back(130 + Below(twins.rng, 200));
      ASSERT_NO_FATAL_FAILURE(Prefill(twins, lengths));
      for (int i = 0; i < 42; ++i) {
        ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1), {.dtype = dtype}));
      }
      // A chunk behind the prompt: the selection of its first token.
      std::vector<int32_t> n = twins.Each(1);
      n[0] = 19;
      ASSERT_NO_FATAL_FAILURE(twins.Run(n, {.dtype = dtype}));
      ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1), {.dtype = dtype}));
      twins.ExpectFewTies();
    }
  }
}

TEST(CudaStep, OtherShapesOfModels) {
  for (const auto& [query_heads, kv_heads, head_dim] :
       {std::tuple{32, 8, 128}, {8, 1, 128}, {4, 4, 64}, {8, 2, 256}}) {
    SCOPED_TRACE(std::to_string(query_heads) + "/" + std::to_string(kv_heads) + " x " +
                 std::to_string(head_dim));
    Geometry g = Small();
    g.query_heads = query_heads;
    g.kv_heads = kv_heads;
    g.head_dim = head_dim;
    Twins twins(g, {kQuest, kStrata, kChess, kTokens, kSentences});
    ASSERT_NO_FATAL_FAILURE(Prefill(twins, {200, 260, 230, 300, 310}));
    for (int i = 0; i < 4; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  }
}

TEST(CudaStep, MembersOfDifferentPlansAndStages) {
  Twins twins(Small(), {"full", kStrata, kTokens, kQuest, kWindow, kTokens, kStrata, kChess,
                        kChessAlways, kSentences, kSentences, kLongSentences, kSentences});
  ASSERT_NO_FATAL_FAILURE(
      twins.Run({200, 180, 300, 170, 151, 90, 180, 190, 260, 220, 160, 199, 110}));
  // Two prompts go on while the others decode.
  for (const size_t i : {0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11}) {
    ASSERT_NO_FATAL_FAILURE(twins.sequences[i]->ClosePrompt(RefBackend()));
  }
  for (int i = 0; i < 20; ++i) {
    ASSERT_NO_FATAL_FAILURE(twins.Run({1, 1, 1, i % 7 == 3 ? 4 : 1, 1, i % 3 == 0 ? 17 : 1, 1, 1, 1,
                                       1, i % 5 == 2 ? 3 : 1, 1, i % 4 == 0 ? 25 : 1}));
  }
  twins.ExpectFewTies();
}

TEST(CudaStep, SummarizesAPrefixThatIsHeldWithoutIndex) {
  Twins twins(Small(), {kStrata, kQuest, kChess});
  ASSERT_NO_FATAL_FAILURE(twins.Run({333, 280, 299}));
  for (const auto& s : twins.sequences) s->ForgetIndex(twins.geometry);
  ASSERT_NO_FATAL_FAILURE(twins.ClosePrompts());
  for (int i = 0; i < 3; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
}

TEST(CudaStep, TensorsOfTheHostAndOfAnyStride) {
  Twins twins(Small(), {kStrata, kQuest, kTokens});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {200, 210, 220}));
  for (const Memory memory : {Memory::kHost, Memory::kDevice}) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const int64_t gap : {0, 4, 16}) {
        SCOPED_TRACE(std::to_string(gap) + " bytes between rows");
        ASSERT_NO_FATAL_FAILURE(twins.Run({1, 1, 1}, {dtype, memory, gap}));
        ASSERT_NO_FATAL_FAILURE(twins.Run({3, 1, 2}, {dtype, memory, gap}));
      }
    }
  }
  twins.ExpectFewTies();
}

// Decodes by one graph, captured once and again when it is stale.
class Replays {
 public:
  explicit Replays(Twins& twins)
      : twins_(twins), n_(twins.Each(1)), tensors_(twins.NewTensors(Batch(), {})) {}

  void Step() {
    for (Tensors& t : tensors_) t.Draw(twins_.rng);
    kvstrata::Step host(twins_.HostMembers(n_), RefBackend(), InlineExecutor());
    const auto device = twins_.Begin(n_);
    ASSERT_NE(device, nullptr);
    if (graph_ == nullptr || generation_ != twins_.workspace.generation()) Capture(*device);
    graph_->Launch();
    const Status replayed = device->Replay();
    ASSERT_TRUE(replayed.ok()) << replayed.ToString();
    const int last = twins_.geometry.layers - 1;
    for (int layer = 0; layer <= last; ++layer) {
      twins_.RunHost(host, layer, tensors_[static_cast<size_t>(layer)]);
    }
    std::vector<bool> equal;
    for (int i = 0; i < Batch(); ++i) {
      equal.push_back(twins_.CompareSelections(host, *device, last, i));
    }
    ASSERT_NO_FATAL_FAILURE(twins_.CompareOutputs(n_, equal, tensors_.back(), Memory::kDevice));
    ASSERT_TRUE(device->End(twins_.stream.get()).ok());
    host.End();
    ASSERT_NO_FATAL_FAILURE(twins_.ReportBoundaries());
  }

  int captures = 0, refused = 0;

 private:
  int32_t Batch() const { return static_cast<int32_t>(n_.size()); }
  void Capture(CudaStep& device) {
    refused += device.Replay().ok() ? 0 : 1;
    graph_ = std::make_unique<CapturedGraph>(twins_.stream.get(), [&](cudaStream_t) {
      for (int layer = 0; layer < twins_.geometry.layers; ++layer) {
        Twins::Enqueue(device, layer, tensors_[static_cast<size_t>(layer)], Memory::kDevice);
      }
      return 0;
    });
    generation_ = twins_.workspace.generation();
    ++captures;
  }

  Twins& twins_;
  const std::vector<int32_t> n_;
  std::vector<Tensors> tensors_;
  std::unique_ptr<CapturedGraph> graph_;
  uint64_t generation_ = 0;
};

// Lengths grow, page and unit boundaries are crossed, tables grow, and steps of other shapes run in
// between.
void ServeLaterSteps(const std::vector<std::string>& plans) {
  Twins twins(Small(), plans, 2 * kCapacity);
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {140, 200, 333, 160, 149, 170}));
  ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));  // all buffers are there
  Replays replays(twins);
  for (int i = 0; i < 40; ++i) {
    ASSERT_NO_FATAL_FAILURE(replays.Step());
    if (i % 10 != 5) continue;
    ASSERT_NO_FATAL_FAILURE(twins.Run({1, 1, 9, 1, 3, 2}));
  }
  EXPECT_EQ(replays.captures, 1);
  // Beyond what the tables have room for: the graph is stale, and only then.
  ASSERT_NO_FATAL_FAILURE(twins.Run({1, 1, 700, 1, 1, 1}));
  for (int i = 0; i < 5; ++i) ASSERT_NO_FATAL_FAILURE(replays.Step());
  EXPECT_EQ(replays.captures, 2);
  EXPECT_EQ(replays.refused, 2);
  twins.ExpectFewTies();
}

TEST(CudaStep, CapturedLayersServeLaterSteps) {
  ServeLaterSteps({kQuest, kStrata, kStrata, "full", kWindow, kChess});
}

// Without kStrata, new rows are left to the captured attention.
TEST(CudaStep, CapturedAttentionTakesNewRows) {
  ServeLaterSteps({kQuest, kQuest, kQuest, "full", kWindow, kChess});
}

// What was left to an attention that never came is on its page when the step ends.
TEST(CudaStep, NewRowsThatNothingAttendsAreAppended) {
  Twins twins(Small(), {"full", kWindow});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {170, 133}));
  ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));  // all buffers are there
  std::vector<Tensors> tensors = twins.NewTensors(2, {});
  for (Tensors& t : tensors) t.Draw(twins.rng);
  kvstrata::Step host(twins.HostMembers({1, 1}), RefBackend(), InlineExecutor());
  const auto device = twins.Begin({1, 1});
  ASSERT_NE(device, nullptr);
  CapturedGraph graph(twins.stream.get(), [&](cudaStream_t) {
    for (int layer = 0; layer < twins.geometry.layers; ++layer) {
      const Tensors& t = tensors[static_cast<size_t>(layer)];
      EXPECT_TRUE(device->Append(layer, t.k.On(Memory::kDevice), t.v.On(Memory::kDevice)).ok());
    }
    return 0;
  });
  graph.Launch();
  ASSERT_TRUE(device->End(twins.stream.get()).ok());
  for (int layer = 0; layer < twins.geometry.layers; ++layer) {
    twins.RunHost(host, layer, tensors[static_cast<size_t>(layer)]);
  }
  host.End();
  ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));  // attends them
}

constexpr const char* kPromoting[] = {kQuest,  "strata{budget = 64, min_tokens = 0}",
                                      kTokens, kSentences,
                                      kChess,  kChessAlways,
                                      kWindow, "quest{budget = 32, page = 32, min_tokens = 0}",
                                      "full"};

// Pages come and go between memories; selections drift, slices are promoted and evicted.
TEST(CudaStep, PagesOfTheHostAreAttendedInPlaceOrPromoted) {
  for (const auto& [dtype, page] : {std::pair{DType::kBF16, 16}, {DType::kF16, 32}}) {
    for (const char* plan : kPromoting) {
      SCOPED_TRACE(std::string(plan) + " page " + std::to_string(page));
      Twins twins(Small(dtype, page), {plan, plan, plan});
      ASSERT_NO_FATAL_FAILURE(Prefill(twins, {333, 170, 260}));
      for (int i = 0; i < 40; ++i) {
        if (i % 8 == 2) twins.MovePages(i == 2 ? 1 : 3);
        ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1), {.dtype = dtype}));
        if (i % 8 != 6) continue;
        ASSERT_NO_FATAL_FAILURE(twins.Run({1, 3, 1}, {.dtype = dtype}));
      }
      twins.ExpectFewTies();
    }
  }
}

// The same query again reads nothing of the host's memory.
TEST(CudaStep, SelectedSlicesStayOnTheGpu) {
  for (const char* plan :
       {"quest{budget = 64, min_tokens = 0}", kStrata, kTokens,
        "sentencekv{tau = 48, n_obs = 20, start = 5, recent = 12, min_tokens = 0}", kWindow}) {
    SCOPED_TRACE(plan);
    Twins twins(Small(), {plan});
    ASSERT_NO_FATAL_FAILURE(Prefill(twins, {300}));
    twins.boundary_every = 0;  // buckets stay
    TwinSequence& s = *twins.sequences[0];
    const int32_t moved = s.CompletePages(twins.geometry);
    std::vector<Tensors> tensors = twins.NewTensors(1, {});
    for (int i = 0; i < 4; ++i) {
      ASSERT_NO_FATAL_FAILURE(twins.RunWith({1}, tensors, Memory::kDevice));
      Check(cudaDeviceSynchronize(), "a step");
      for (int32_t p = 0; p < moved && i < 2; ++p) {
        const auto page = static_cast<size_t>(p);
        if (i == 0) s.MovePage(twins.geometry, page, true);
        if (i == 1) {
          std::memset(s.pages.device_pieces[page], 0xFF,
                      static_cast<size_t>(twins.geometry.page_bytes()));
        }
      }
    }
  }
}

// A graph of steps that promote serves those that need not; of steps that do not it is stale where
// pages are the host's.
TEST(CudaStep, CapturedLayersPromote) {
  Twins twins(Small(), {kQuest, kTokens, kSentences, kStrata}, 2 * kCapacity);
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {140, 200, 333, 160}));
  ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  const auto replay = [&twins](Replays& replays, int steps) {
    for (int i = 0; i < steps; ++i) {
      ASSERT_NO_FATAL_FAILURE(replays.Step());
      if (i % 6 == 3) twins.MovePages(4);
    }
  };
  Replays before(twins);
  ASSERT_NO_FATAL_FAILURE(before.Step());
  twins.MovePages(1);
  Replays replays(twins);
  ASSERT_NO_FATAL_FAILURE(replay(replays, 40));
  EXPECT_EQ(replays.captures, 1);
  EXPECT_EQ(replays.refused, 1);
  for (const auto& s : twins.sequences) {
    for (size_t i = 0; i < s->far_pages.size(); ++i) s->MovePage(twins.geometry, i, false);
    EXPECT_TRUE(s->far_pages.empty());
  }
  ASSERT_NO_FATAL_FAILURE(replays.Step());
  EXPECT_EQ(replays.captures, 1);
  ASSERT_NO_FATAL_FAILURE(replay(replays, 30));
  // Tables that have to grow.
  const int captures = replays.captures;
  ASSERT_NO_FATAL_FAILURE(twins.Run({1, 1, 1, 900}));
  ASSERT_NO_FATAL_FAILURE(replay(replays, 20));
  EXPECT_EQ(replays.captures, captures + 1);
  twins.ExpectFewTies();
}

// Many more pages than slots: what is promoted is evicted and promoted again.
TEST(CudaStep, PromotedSlicesAreEvicted) {
  Twins twins(Small(),
              {"quest{budget = 32, min_tokens = 0}", "strata{budget = 16, min_tokens = 0}"});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {900, 800}));
  twins.MovePages(1);
  for (int i = 0; i < 40; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  Replays replays(twins);
  for (int i = 0; i < 20; ++i) ASSERT_NO_FATAL_FAILURE(replays.Step());
  EXPECT_EQ(replays.captures, 1);
  twins.ExpectFewTies();
}

TEST(CudaStep, AForkBeginsWithoutPromotedSlices) {
  Twins twins(Small(), {kQuest});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {260}));
  twins.MovePages(2);
  for (int i = 0; i < 3; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run({1}));
  twins.Fork(0);
  twins.MovePages(2);
  for (int i = 0; i < 20; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  twins.ExpectFewTies();
}

// TokenSelect. One layer, so that every selection can be read after a replay.
Geometry OneLayer() {
  Geometry g = Small();
  g.layers = 1;
  return g;
}

TEST(CudaStep, OneGraphServesHitsAndMisses) {
  // The third is shorter than min_tokens and grows beyond it.
  Twins twins(OneLayer(), {kTokens, kTokens, kTokens, "full", kTokens});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {200, 333, 130, 160, 250}));
  ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  Replays replays(twins);
  for (int i = 0; i < 60; ++i) {
    ASSERT_NO_FATAL_FAILURE(replays.Step());
    // Eager steps, chunks and steps that are given up in between.
    if (i % 10 != 5) continue;
    ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
    ASSERT_NO_FATAL_FAILURE(twins.GiveUp(twins.Each(1)));
    ASSERT_NO_FATAL_FAILURE(twins.Run({1, 3, 1, 1, 9}));
  }
  EXPECT_EQ(replays.captures, 1);
  EXPECT_GT(twins.hits, 50);
  EXPECT_GT(twins.misses, 50);
  twins.ExpectFewTies();
}

TEST(CudaStep, OptionsOfTokenSelect) {
  constexpr const char* kRest = ", k = 48, n_local = 20, chunk = 64, min_tokens = 0}";
  for (const auto& [options, hits, misses] :
       {std::tuple{"theta = 1, n_init = 4", false, true},
        {"theta = -1, n_init = 0, append_departed = true", true, true},
        {"theta = 0, n_init = 7, append_departed = true, n_dense_layers = 1", true, true},
        {"theta = -0.15, n_init = 16, cosine = \"head\"", true, true}}) {
    SCOPED_TRACE(options);
    Twins twins(Small(), {std::string("tokenselect{") + options + kRest});
    ASSERT_NO_FATAL_FAILURE(Prefill(twins, {330}));
    for (int i = 0; i < 40; ++i) {
      const DType dtype = i % 2 == 0 ? DType::kF32 : DType::kBF16;
      ASSERT_NO_FATAL_FAILURE(twins.Run({i % 9 == 4 ? 5 : 1}, {.dtype = dtype}));
    }
    EXPECT_EQ(twins.hits > 0, hits);
    EXPECT_EQ(twins.misses > 0, misses);
    twins.ExpectFewTies();
  }
}

// Parent and child go on from the same cached selections, and no longer share them.
TEST(CudaStep, AForkInheritsTheSelectionCache) {
  Twins twins(Small(), {kTokens});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {260}));
  for (int i = 0; i < 3; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run({1}));
  twins.Fork(0);
  twins.Fork(1);  // of a child that has not stepped
  for (int i = 0; i < 20; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  twins.Fork(2);
  twins.sequences.erase(twins.sequences.begin() + 2);
  for (int i = 0; i < 20; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  EXPECT_GT(twins.hits, 40);
  twins.ExpectFewTies();
}

// One graph serves steps that select anew and steps that do not, whoever has which place: sequences
// change places, a clone goes on for its original, and another workspace has a turn.
TEST(CudaStep, CascadesSelectBesideTheGraph) {
  Twins twins(Small(), {kChessEntropy, kChessEntropy, kChess});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {160, 311, 224}));
  ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  CudaWorkspace other(*kvs_cuda_ops(), twins.geometry);
  Replays replays(twins);
  for (int i = 0; i < 90; ++i) {
    SCOPED_TRACE("step " + std::to_string(i));
    ASSERT_NO_FATAL_FAILURE(replays.Step());
    ASSERT_NO_FATAL_FAILURE(twins.ReportEntropies());
    if (i % 7 == 3) std::swap(twins.sequences[0], twins.sequences[1]);
    if (i % 11 == 5) twins.sequences[0]->Clone();
    if (i % 13 == 8) {
      twins.used = &other;
      ASSERT_NO_FATAL_FAILURE(twins.Run({1, 21, 2}));
      twins.used = &twins.workspace;
    }
  }
  EXPECT_EQ(replays.captures, 1);
  for (const auto& s : twins.sequences) {
    const auto made = TwinSequence::Inspected<int32_t>(*s->on_host, s->HostView(), "selections");
    EXPECT_GT(made[0], 3);
    EXPECT_EQ(TwinSequence::Inspected<int32_t>(*s->on_device, s->HostView(), "selections"), made);
  }
  twins.ExpectFewTies();
}

// Levels of more units than a CTA has threads; random keys, and keys that all score the same.
TEST(CudaStep, CascadesOfLongSequences) {
  for (const char* shape :
       {"page = 16", "page = 16, pages_per_chunk = 1, chunks_per_grid = 1, rho = [0.9, 0.8, 0.7]",
        "page = 32, pages_per_chunk = 3, chunks_per_grid = 5, rho = [1.0, 0.4, 0.3]"}) {
    for (const float scale : {1.0f, 0.0f}) {
      SCOPED_TRACE(std::string(shape) + (scale == 0 ? ", equal scores" : ""));
      const std::string plan = "chess{" + std::string(shape) + "}";
      Twins twins(Small(), {plan, plan}, 41000);
      for (const auto& s : twins.sequences) {
        s->pages.Draw(twins.rng, twins.geometry.dtype, scale);
        s->Hold(twins.geometry, 33000 + Below(twins.rng, 7000));
      }
      ASSERT_NO_FATAL_FAILURE(twins.ClosePrompts());
      for (int i = 0; i < 2; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
      if (scale == 0) {
        EXPECT_EQ(twins.unequal, 0);
      }
      twins.ExpectFewTies();
    }
  }
}

// Small enough for racecheck (bench/cuda/run_gpu.sh): what only whole steps call, too.
TEST(CudaStep, AFewStepsOfEverySelector) {
  Twins twins(OneLayer(), {kTokens, kChess, kSentences});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {190, 170, 180}));
  for (int i = 0; i < 2; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
}

// SentenceKV: one graph serves steps over the ends of sentences, whoever has which place; steps
// that are given up, other shapes and another workspace in between. One prompt is short, and
// attended in full until it has grown.
TEST(CudaStep, SentencesEndBesideTheGraph) {
  Twins twins(Small(), {kSentences, kSentences, kLongSentences, kSentences});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {260, 311, 224, 120}));
  ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  CudaWorkspace other(*kvs_cuda_ops(), twins.geometry);
  Replays replays(twins);
  for (int i = 0; i < 90; ++i) {
    SCOPED_TRACE("step " + std::to_string(i));
    ASSERT_NO_FATAL_FAILURE(replays.Step());
    if (i % 5 == 1) {
      ASSERT_NO_FATAL_FAILURE(twins.GiveUp(twins.Each(1)));
    }
    if (i % 7 == 3) std::swap(twins.sequences[0], twins.sequences[1]);
    if (i % 13 == 5) twins.sequences[1]->Clone();
    if (i % 17 == 8) {
      twins.used = &other;
      ASSERT_NO_FATAL_FAILURE(twins.Run({1, 21, 2, 1}));
      twins.used = &twins.workspace;
    }
  }
  EXPECT_EQ(replays.captures, 1);
  EXPECT_GT(twins.bucket_selections, 300);
  EXPECT_LE(twins.kept_ties * 2, twins.bucket_selections);
  twins.ExpectFewTies();
}

// Parent and child go on from the same buckets and the same sentence.
TEST(CudaStep, AForkInheritsItsSentences) {
  Twins twins(Small(), {kSentences});
  ASSERT_NO_FATAL_FAILURE(twins.Run({100}));
  twins.Fork(0);  // in the middle of a prompt
  ASSERT_NO_FATAL_FAILURE(twins.Run({140, 170}));
  ASSERT_NO_FATAL_FAILURE(twins.ClosePrompts());
  for (int i = 0; i < 8; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run({1, 1}));
  twins.Fork(0);
  twins.Fork(2);  // of a child that has not stepped
  for (int i = 0; i < 40; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  EXPECT_GT(twins.bucket_selections, 200);
  EXPECT_LE(twins.kept_ties * 2, twins.bucket_selections);
  twins.ExpectFewTies();
}

// A prompt whose boundaries or last queries are missing is attended in full; boundaries that come
// later count from then on.
TEST(CudaStep, SentencesThatAreNotReported) {
  Twins twins(Small(), {kSentences, kSentences});
  twins.boundary_every = 0;
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {240, 280}));
  for (int i = 0; i < 5; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run({1, 1}));
  EXPECT_EQ(twins.bucket_selections, 0);
  twins.boundary_every = 12;
  ASSERT_NO_FATAL_FAILURE(twins.ReportBoundaries());
  for (int i = 0; i < 30; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run({1, 1}));
  EXPECT_EQ(twins.bucket_selections, 120);
  // As of a prefix that is held: no query of it was seen.
  for (const auto& s : twins.sequences) s->Hold(twins.geometry, s->on_host->tokens());
  for (const auto& s : twins.sequences) s->bounded = 0;
  ASSERT_NO_FATAL_FAILURE(twins.ReportBoundaries());
  ASSERT_NO_FATAL_FAILURE(twins.Run({15, 25}));  // of 20 queries that judge
  ASSERT_NO_FATAL_FAILURE(twins.ClosePrompts());
  twins.bucket_selections = 0;
  for (int i = 0; i < 30; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run({1, 1}));
  EXPECT_EQ(twins.bucket_selections, 60);
  twins.ExpectFewTies();
}

// More kept tokens and sentences than one round of a CTA takes.
TEST(CudaStep, SentencesOfALongPrompt) {
  Twins twins(OneLayer(), {"sentencekv", "sentencekv{pool = 1, max_length = 40}"}, 9000);
  for (const auto& s : twins.sequences) {
    s->pages.Draw(twins.rng, twins.geometry.dtype, 1.0f);
    s->Hold(twins.geometry, 8000 + Below(twins.rng, 700));
    s->bounded = 0;
  }
  twins.boundary_every = 27;
  ASSERT_NO_FATAL_FAILURE(twins.Run({32, 45}));
  ASSERT_NO_FATAL_FAILURE(twins.ClosePrompts());
  for (int i = 0; i < 20; ++i) ASSERT_NO_FATAL_FAILURE(twins.Run({1, 1}));
  EXPECT_EQ(twins.bucket_selections, 40);
}

// About exponential, as surprisal is.
std::vector<float> SurprisalOf(Rng& rng, int32_t n) {
  std::exponential_distribution<float> nats(1.0f);
  std::vector<float> surprisal(static_cast<size_t>(n));
  for (float& x : surprisal) x = nats(rng);
  return surprisal;
}

void Recompress(Twins& twins, size_t i) {
  TwinSequence& s = *twins.sequences[i];
  ASSERT_NO_FATAL_FAILURE(
      s.Recompress(twins.geometry, SurprisalOf(twins.rng, s.on_host->prompt_tokens())));
  ASSERT_GT(s.extents->size(), 0u);
}

// Plan sekv: before its spans are there it attends in full, and beside other plans.
TEST(CudaStep, AttendsSpans) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    Twins twins(Small(dtype), {kSpans, "full", kLongSpans, kSpans, kSpans});
    ASSERT_NO_FATAL_FAILURE(Prefill(twins, {400, 200, 333, 260, 290}));
    for (const size_t i : {0, 2, 3}) ASSERT_NO_FATAL_FAILURE(Recompress(twins, i));
    for (int i = 0; i < 5; ++i) {
      ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1), {.dtype = dtype}));
    }
    ASSERT_NO_FATAL_FAILURE(twins.Run({3, 1, 2, 1, 4}, {.dtype = dtype}));
    ASSERT_NO_FATAL_FAILURE(Recompress(twins, 4));
    ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1), {.dtype = dtype}));
    twins.ExpectFewTies();
  }
}

TEST(CudaStep, OneGraphServesSpans) {
  Twins twins(Small(), {kSpans, kSpans, kLongSpans});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {400, 250, 333}));
  for (const size_t i : {0, 2}) ASSERT_NO_FATAL_FAILURE(Recompress(twins, i));
  ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  Replays replays(twins);
  for (int i = 0; i < 12; ++i) {
    ASSERT_NO_FATAL_FAILURE(replays.Step());
    // Fewer spans than another member has: the tables have room.
    if (i != 6) continue;
    ASSERT_NO_FATAL_FAILURE(Recompress(twins, 1));
  }
  EXPECT_EQ(replays.captures, 1);
  twins.ExpectFewTies();
}

TEST(CudaStep, RefusesUnderCapture) {
  Twins twins(Small(), {kStrata});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {200}));
  std::vector<Tensors> tensors = twins.NewTensors(1, {.dtype = DType::kF32});
  auto step = twins.Begin({1});
  ASSERT_NE(step, nullptr);
  Tensors& t = tensors[0];
  EXPECT_EQ(step->ReadSelection(0).status().reason(), "SELECTION_NONE");
  CapturedGraph graph(twins.stream.get(), [&](cudaStream_t) {
    EXPECT_EQ(step->Append(0, t.k.On(Memory::kHost), t.v.On(Memory::kHost)).reason(),
              "CAPTURE_HOST_TENSOR");
    EXPECT_TRUE(step->Append(0, t.k.On(Memory::kDevice), t.v.On(Memory::kDevice)).ok());
    EXPECT_EQ(step->Attend(0, t.q.On(Memory::kHost), t.out.Out(Memory::kDevice), nullptr).reason(),
              "CAPTURE_HOST_TENSOR");
    // fp32 queries are copied, into memory that is not there yet.
    EXPECT_EQ(
        step->Attend(0, t.q.On(Memory::kDevice), t.out.Out(Memory::kDevice), nullptr).reason(),
        "CAPTURE_ALLOCATES");
    EXPECT_EQ(step->ReadSelection(0).status().reason(), "CAPTURE_READ");
    EXPECT_EQ(step->End(twins.stream.get()).reason(), "CAPTURE_END");
    const auto another =
        CudaStep::Begin(twins.DeviceMembers({1}), &twins.workspace, twins.stream.get(), {});
    EXPECT_EQ(another.status().reason(), "WORKSPACE_BUSY");
    CudaWorkspace own(*kvs_cuda_ops(), twins.geometry);
    EXPECT_EQ(
        CudaStep::Begin(twins.DeviceMembers({1}), &own, twins.stream.get(), {}).status().reason(),
        "CAPTURE_BEGIN");
    return 0;
  });
  EXPECT_EQ(step->Replay().reason(), "GRAPH_STALE");
}

// Codec packed. Lengths are multiples of a block: where a short one is chosen, the CPU may choose
// one more.
constexpr const char* kMosaic =
    "mosaickv{segment = 128, buffer = 16, share = 0.3, close_loss = 60, min_tokens = 150}";
constexpr const char* kMosaicDense =
    "mosaickv{segment = 64, buffer = 32, share = 0.2, block = 4, neighbours = 2, keep = 24, "
    "truncate = false, n_dense_layers = 1, min_tokens = 0}";

TEST(CudaStep, PackedSegmentsAndTheUpdateBuffer) {
  for (const char* plan : {kMosaic, kMosaicDense}) {
    for (const auto& [dtype, batch] : {std::pair{DType::kBF16, 1}, {DType::kF16, 5}}) {
      SCOPED_TRACE(std::string(plan) + " batch " + std::to_string(batch));
      Twins twins(Small(dtype), std::vector<std::string>(static_cast<size_t>(batch), plan));
      std::vector<int32_t> lengths;
      for (int i = 0; i < batch; ++i) lengths.push_back(128 + 8 * Below(twins.rng, 25));
      ASSERT_NO_FATAL_FAILURE(Prefill(twins, lengths));
      ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1), {.dtype = dtype}));  // nothing is packed
      const size_t first = twins.sequences[0]->extents->size();
      for (int i = 0; i < 42; ++i) {
        ASSERT_NO_FATAL_FAILURE(twins.Pack());
        ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1), {.dtype = dtype}));
      }
      EXPECT_GT(twins.sequences[0]->extents->size(), first);
      std::vector<int32_t> n = twins.Each(1);
      n[0] = 19;  // the selection of its first token
      ASSERT_NO_FATAL_FAILURE(twins.Run(n, {.dtype = dtype}));
      ASSERT_NO_FATAL_FAILURE(twins.Pack());
      ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1), {.dtype = DType::kF32, .gap = 16}));
      twins.ExpectFewTies();
    }
  }
}

TEST(CudaStep, PackedRowsOfOtherModels) {
  for (const auto& [query_heads, kv_heads, head_dim] :
       {std::tuple{12, 3, 128}, {8, 1, 128}, {8, 1, 256}}) {
    SCOPED_TRACE(std::to_string(query_heads) + "/" + std::to_string(kv_heads) + " x " +
                 std::to_string(head_dim));
    Geometry g = OneLayer();
    g.query_heads = query_heads;
    g.kv_heads = kv_heads;
    g.head_dim = head_dim;
    Twins twins(g, {"full", kMosaic});
    ASSERT_NO_FATAL_FAILURE(Prefill(twins, {160, 200}));
    for (int i = 0; i < 4; ++i) {
      ASSERT_NO_FATAL_FAILURE(twins.Pack());
      ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
    }
  }
}

// An engine that calls layer by layer with the same tensors: its calls become graphs of the
// library's own, which go when buffers grow and stay when steps of other shapes run in between.
TEST(CudaStep, RepeatedCallsBecomeGraphs) {
  for (const std::vector<std::string>& plans :
       {std::vector<std::string>{kQuest, kStrata, kStrata, "full"},
        {kTokens, kTokens, kChess},
        {kSentences, kQuest},
        {kMosaic}}) {
    SCOPED_TRACE(plans.front());
    Twins twins(Small(), plans, 2 * kCapacity);
    std::vector<int32_t> lengths;
    for (size_t i = 0; i < plans.size(); ++i) lengths.push_back(136 + 8 * Below(twins.rng, 25));
    ASSERT_NO_FATAL_FAILURE(Prefill(twins, lengths));
    std::vector<Tensors> tensors = twins.NewTensors(static_cast<int32_t>(plans.size()), {});
    const auto run = [&](int steps) {
      for (int i = 0; i < steps; ++i) {
        for (Tensors& t : tensors) t.Draw(twins.rng);
        ASSERT_NO_FATAL_FAILURE(twins.Pack());
        ASSERT_NO_FATAL_FAILURE(twins.RunWith(twins.Each(1), tensors, Memory::kDevice));
      }
    };
    ASSERT_NO_FATAL_FAILURE(run(20));
    const int graphs = twins.workspace.call_graphs();
    EXPECT_GT(graphs, 0);
    std::vector<int32_t> n = twins.Each(1);
    n[0] = 3;
    ASSERT_NO_FATAL_FAILURE(twins.Run(n));
    EXPECT_EQ(twins.workspace.call_graphs(), graphs);
    tensors = twins.NewTensors(static_cast<int32_t>(plans.size()), {});  // elsewhere
    ASSERT_NO_FATAL_FAILURE(run(6));
    n[0] = 1200;  // beyond what the tables have room for
    ASSERT_NO_FATAL_FAILURE(twins.Run(n));
    EXPECT_EQ(twins.workspace.call_graphs(), 0);
    ASSERT_NO_FATAL_FAILURE(run(12));  // what is packed of the chunk lets tables grow once more
    EXPECT_GT(twins.workspace.call_graphs(), 0);
    twins.ExpectFewTies();
  }
}

// One graph, from before anything is packed over flushes, joins and closings; one member's prompt
// is shorter than min_tokens.
TEST(CudaStep, AGraphStaysGoodWhileRowsArePacked) {
  Twins twins(OneLayer(), {kMosaic, "full", kMosaic, kMosaic});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {200, 160, 304, 128}));
  ASSERT_NO_FATAL_FAILURE(twins.Run(twins.Each(1)));
  Replays replays(twins);
  for (int i = 0; i < 60; ++i) {
    ASSERT_NO_FATAL_FAILURE(replays.Step());
    ASSERT_NO_FATAL_FAILURE(twins.Pack());
    if (i % 20 != 5) continue;
    ASSERT_NO_FATAL_FAILURE(twins.Run({1, 1, 3, 1}));
  }
  EXPECT_EQ(replays.captures, 1);
  twins.ExpectFewTies();
}

TEST(CudaStep, RefusesDamagedHeads) {
  Twins twins(Small(), {kMosaic});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {200}));
  ASSERT_NO_FATAL_FAILURE(twins.Pack());
  TwinSequence& s = *twins.sequences[0];
  const auto begin = [&]() -> Status {
    const SequenceView view = s.DeviceView();
    KVS_RETURN_IF_ERROR(s.on_device->Refresh(view));
    return CudaStep::Begin({{s.on_device.get(), view, 1}}, &twins.workspace, twins.stream.get(), {})
        .status();
  };
  // The magic, an entry's address of keys, and a strategy that is possible but not the plan's.
  for (const auto& [at, bit] : {std::pair{0, 1}, {128 + 24 + 7, 64}, {128 + 48, 1}}) {
    s.extents->description(0)[static_cast<size_t>(at)] ^= std::byte(bit);
    EXPECT_EQ(begin().reason(), "EXTENT_INVALID") << at;
    s.extents->description(0)[static_cast<size_t>(at)] ^= std::byte(bit);
  }
  const Status sound = begin();
  EXPECT_TRUE(sound.ok()) << sound.ToString();
}

TEST(CudaStep, RefusesPlansThatItDoesNotServe) {
  Twins twins(Small(), {"full", "mosaickv{strategy = \"search\"}"});
  const auto step =
      CudaStep::Begin(twins.DeviceMembers({1, 1}), &twins.workspace, twins.stream.get(), {});
  EXPECT_EQ(step.status().code(), Code::kUnimplemented);
  EXPECT_EQ(step.status().reason(), "CUDA_PLAN");
  for (const char* option : {"keep_rest", "per_query_head"}) {
    const Plan plan = ParsePlan("sentencekv{" + std::string(option) + " = true}").value();
    const Status refused = CudaServes(plan, Small());
    EXPECT_EQ(refused.reason(), "CUDA_PLAN");
    EXPECT_NE(refused.message().find(option), std::string::npos) << refused.message();
  }
  EXPECT_TRUE(CudaServes(ParsePlan("sentencekv").value(), Small()).ok());
}

// The reader's slot is written when the step has ended or was given up, behind all of its work.
TEST(CudaStep, LeavesTheEpochWhenTheGpuIsDone) {
  Twins twins(Small(), {kStrata});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {200}));
  alignas(4096) static uint64_t slots[512];
  Check(kvs_cuda_ops()->register_host(slots, sizeof(slots), false), "registering");
  std::atomic_ref<uint64_t> slot(slots[3]);
  std::vector<Tensors> tensors = twins.NewTensors(1, {});
  const auto wait = [&] { Check(cudaStreamSynchronize(twins.stream.get()), "the stream"); };

  slot = 17;
  auto step = twins.Begin({1}, {&slots[3], 0});
  for (int layer = 0; layer < 2; ++layer) {
    Twins::Enqueue(*step, layer, tensors[static_cast<size_t>(layer)], Memory::kDevice);
  }
  wait();
  EXPECT_EQ(slot.load(), 17u);
  ASSERT_TRUE(step->End(twins.stream.get()).ok());
  wait();
  EXPECT_EQ(slot.load(), 0u);
  step.reset();

  slot = 18;
  const int32_t tokens = twins.sequences[0]->on_device->tokens();
  step = twins.Begin({1}, {&slots[3], 5});
  step.reset();
  wait();
  EXPECT_EQ(slot.load(), 5u);
  EXPECT_EQ(twins.sequences[0]->on_device->tokens(), tokens);

  // Given up while a graph is captured: the graph has not run, and must not write the slot.
  slot = 19;
  step = twins.Begin({1}, {&slots[3], 6});
  CapturedGraph graph(twins.stream.get(), [&](cudaStream_t) {
    Twins::Enqueue(*step, 0, tensors[0], Memory::kDevice);
    step.reset();
    return 0;
  });
  EXPECT_EQ(slot.load(), 6u);
  slot = 20;
  graph.Launch();
  wait();
  EXPECT_EQ(slot.load(), 20u);
  Check(kvs_cuda_ops()->unregister_host(slots), "unregistering");
}

// The second of two steps, on another stream, does not begin before the first is done.
TEST(CudaStep, OrdersTheStreamsOfItsSteps) {
  Twins twins(Small(), {kStrata});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {200}));
  Stream other;
  std::atomic<bool> held = true;
  const auto hold = [](void* flag) {
    while (static_cast<std::atomic<bool>*>(flag)->load()) std::this_thread::yield();
  };
  auto first = twins.Begin({1});
  Check(cudaLaunchHostFunc(twins.stream.get(), hold, &held), "a function that holds the stream");
  ASSERT_TRUE(first->End(twins.stream.get()).ok());
  const auto second = CudaStep::Begin(twins.DeviceMembers({1}), &twins.workspace, other.get(), {});
  ASSERT_TRUE(second.ok());
  // Its copies would be done long before.
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
  cudaError_t state = cudaErrorNotReady;
  while (state == cudaErrorNotReady && std::chrono::steady_clock::now() < end) {
    state = cudaStreamQuery(other.get());
  }
  EXPECT_EQ(state, cudaErrorNotReady);
  held = false;
  Check(cudaStreamSynchronize(other.get()), "the second step");
}

// Steps on streams in turn see each other's tokens.
TEST(CudaStep, StreamsTakeTurns) {
  Twins twins(Small(), {kStrata, "full"});
  ASSERT_NO_FATAL_FAILURE(Prefill(twins, {200, 300}));
  Stream other;
  for (int i = 0; i < 6; ++i) {
    std::vector<Tensors> tensors = twins.NewTensors(2, {});
    Step host(twins.HostMembers({1, 1}), RefBackend(), InlineExecutor());
    const cudaStream_t stream = i % 2 == 0 ? other.get() : twins.stream.get();
    auto device = CudaStep::Begin(twins.DeviceMembers({1, 1}), &twins.workspace, stream, {});
    ASSERT_TRUE(device.ok()) << device.status().ToString();
    for (int layer = 0; layer < 2; ++layer) {
      Tensors& t = tensors[static_cast<size_t>(layer)];
      ASSERT_NO_FATAL_FAILURE(Twins::Enqueue(*device.value(), layer, t, Memory::kDevice));
      twins.RunHost(host, layer, t);
    }
    const std::vector<bool> equal = {twins.CompareSelections(host, *device.value(), 1, 0),
                                     twins.CompareSelections(host, *device.value(), 1, 1)};
    ASSERT_NO_FATAL_FAILURE(twins.CompareOutputs({1, 1}, equal, tensors[1], Memory::kDevice));
    ASSERT_TRUE(device.value()->End(stream).ok());
    host.End();
  }
}

}  // namespace
}  // namespace kvstrata::cuda
