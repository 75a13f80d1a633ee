// SPDX-License-Identifier: Apache-2.0
// A batch that a Step with backend `ref` and a CudaStep run side by side: selections are compared
// but for near-ties, outputs and lse within rounding.
#pragma once

#include "kernels/step/gpu/cuda_step.h"
#include "tests/cuda/near_ties.h"
#include "tests/cuda/relative_error.h"
#include "tests/cuda/seed.h"
#include "tests/cuda/step_batch_fixture.h"
#include "tests/cuda/step_costs.h"
#include "tests/cuda/step_tensors.h"
#include "tests/cuda/test_stream.h"

namespace kvstrata::cuda {

inline constexpr int32_t kCapacity = 1024;  // tokens a sequence may have

inline const Backend& RefBackend() { return *FindBackend("ref").value(); }

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
    RunWith(n, tensors, kind.tier);
  }
  void RunWith(const std::vector<int32_t>& n, std::vector<Tensors>& tensors, Tier tier) {
    Step host(HostMembers(n), RefBackend(), InlineExecutor());
    const auto device = Begin(n);
    ASSERT_NE(device, nullptr);
    for (int layer = 0; layer < geometry.layers; ++layer) {
      Tensors& t = tensors[static_cast<size_t>(layer)];
      ASSERT_NO_FATAL_FAILURE(Enqueue(*device, layer, t, tier));
      RunHost(host, layer, t);
      std::vector<bool> equal(n.size());
      for (size_t i = 0; i < n.size(); ++i) {
        equal[i] = CompareSelections(host, *device, layer, static_cast<int>(i));
      }
      ASSERT_NO_FATAL_FAILURE(CompareOutputs(n, equal, t, tier));
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
  static void Enqueue(CudaStep& step, int layer, Tensors& t, Tier tier) {
    const Status appended = step.Append(layer, t.k.On(tier), t.v.On(tier));
    ASSERT_TRUE(appended.ok()) << appended.ToString();
    const Status attended = step.Attend(layer, t.q.On(tier), t.out.Out(tier),
                                        reinterpret_cast<float*>(t.lse.Out(tier).data));
    ASSERT_TRUE(attended.ok()) << attended.ToString();
  }
  void RunHost(Step& step, int layer, Tensors& t) {
    const Rows q = t.q.On(Tier::kHost);
    queries = t.q.Read(Tier::kHost);
    expected.assign(queries.size(), NAN);
    expected_lse.assign(queries.size() / static_cast<size_t>(geometry.head_dim), NAN);
    EXPECT_TRUE(step.Append(layer, t.k.On(Tier::kHost), t.v.On(Tier::kHost)).ok());
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
      if (!KeepTheSame(ties, device, member)) return false;  // they kept other tokens
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
    unequal += equal || reused ? 0 : 1;  // a reused one keeps what an earlier near-tie chose
    if (equal && host.member(member).new_tokens == 1) {
      const auto cost = device.ReadCost(member);
      EXPECT_TRUE(cost.ok()) << cost.status().ToString();
      if (cost.ok()) ExpectCost(sequence, *cost, host.cost(member));
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
        EXPECT_EQ(kept.status().reason(), "KEPT_NONE");  // the prompt is short
        continue;
      }
      bool equal = false;
      EXPECT_TRUE(ties.AgreeOnKept(head, kept.value(), &equal)) << "kept by head " << head;
      same = same && equal;
    }
    kept_ties += same ? 0 : 1;
    return same;
  }
  // Rows of a member's new tokens that share a selection (ADR 3).
  std::vector<kvstrata::Run> ChunksOf(size_t member, int32_t n) const {
    const TwinSequence& s = *sequences[member];
    if (s.plan.selector != SelectorKind::kVote || s.on_host->prompt_tokens() >= 0) return {{0, n}};
    const int32_t start = s.on_host->tokens(), chunk = s.plan.vote.chunk;
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
                      Tier tier) {
    const std::vector<float> out = t.out.Read(tier), lse = t.lse.Read(tier);
    const auto heads = static_cast<size_t>(geometry.query_heads);
    const size_t token = heads * static_cast<size_t>(geometry.head_dim);
    size_t row = 0;
    for (size_t i = 0; i < n.size(); row += static_cast<size_t>(n[i]), ++i) {
      const bool decided = OpDecides(*sequences[i]);
      if (decided && n[i] > 1) continue;  // the first one's choice, and everything by all planes
      const std::vector<kvstrata::Run> chunks = ChunksOf(i, n[i]);
      for (const kvstrata::Run& chunk : chunks) {
        const auto part = [&](const std::vector<float>& x, size_t size) {
          return std::span(x).subspan((row + static_cast<size_t>(chunk.begin)) * size,
                                      static_cast<size_t>(chunk.end - chunk.begin) * size);
        };
        const double error = RelativeError(part(out, token), part(expected, token));
        const double lse_error = RelativeError(part(lse, heads), part(expected_lse, heads));
        if (chunk.end < n[i] || decided) {
          // What was chosen cannot be read: a near-tie is counted as one.
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
          Enqueue(*device, layer, tensors[static_cast<size_t>(layer)], Tier::kDevice));
    }
    Check(cudaStreamSynchronize(stream.get()), "a step that is given up");
  }
  void Fork(size_t parent) {
    Check(cudaDeviceSynchronize(), "the steps of a parent");
    sequences.push_back(sequences[parent]->Fork(rng, geometry, capacity));
  }
  void Pack() {
    for (const auto& s : sequences) {
      if (s->plan.codec != CodecKind::kPacked && s->plan.codec != CodecKind::kPlanes) continue;
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
        s->MovePage(geometry, page, s->host_pages.empty() || s->host_pages[page] == 0);
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
  TestStream stream;
  std::vector<std::unique_ptr<TwinSequence>> sequences;
  std::vector<float> queries, expected, expected_lse;  // the last layer's
  int selections = 0, unequal = 0;
  int hits = 0, misses = 0;  // selector vote's
  int boundary_every = 12;   // tokens of a sentence, about; 0: none is reported
  int bucket_selections = 0, kept_ties = 0;
};

inline Geometry Small(DType dtype = DType::kBF16, int32_t page_tokens = 16) {
  return {.layers = 2,
          .query_heads = 8,
          .kv_heads = 2,
          .head_dim = 64,
          .page_tokens = page_tokens,
          .dtype = dtype};
}

// One layer, so that every selection can be read after a replay.
inline Geometry OneLayer() {
  Geometry g = Small();
  g.layers = 1;
  return g;
}

// Prompts of these lengths, in three chunks each.
inline void Prefill(Twins& twins, const std::vector<int32_t>& lengths) {
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

}  // namespace kvstrata::cuda
