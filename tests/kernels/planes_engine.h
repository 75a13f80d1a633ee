// SPDX-License-Identifier: Apache-2.0
// PlanesEngine: an engine in miniature whose blocks have the form of plan strata, and which decodes
// by BlockPlanes. Every step is held to planes_oracle.h: outputs, gathered rows and the bytes of
// blocks. For tests on a GPU and on a table of ops that is one in host memory.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/kernels/planes_step_rows.h"

namespace kvstrata {

struct PlanesEngineOptions {
  std::string plan;
  int32_t layers = 2, query_heads = 4, kv_heads = 2, head_dim = 64;
  DType dtype = DType::kBF16;
  bool apart = false;  // layers lie at several distances
  bool graphs = false;
  int32_t blocks = 64, slots = 6, max_rows = 5, max_tokens = 1024;
  double limit = 1e-2;  // for a relative error that is no near-tie's
};

inline std::vector<uint64_t> AddressesOf(const std::vector<std::byte*>& places) {
  std::vector<uint64_t> addresses;
  for (std::byte* const place : places) addresses.push_back(reinterpret_cast<uint64_t>(place));
  return addresses;
}

class PlanesEngine {
 public:
  PlanesEngine(const cuda::CudaOps& ops, Random* random, const PlanesEngineOptions& options)
      : ops_(ops),
        memory_(ops),
        random_(*random),
        o_(options),
        geometry_{o_.layers, o_.query_heads, o_.kv_heads, o_.head_dim, 16, o_.dtype, {}, 0},
        plan_(ParsePlan(options.plan).value()),
        oracle_(plan_, geometry_),
        sequences_(random, geometry_, &oracle_, {o_.blocks, o_.slots}),
        step_(geometry_, 128 * o_.max_rows, random, &memory_) {
    form_ = BlockPlanes::FormOf(plan_, geometry_).value();
    shape_ = {geometry_, form_.token_bytes * kUnit * o_.kv_heads + 96, o_.slots, o_.max_rows,
              o_.max_tokens};
    planes_ = BlockPlanes::Make(plan_, shape_, ops_).value();
    blocks_ = Placed(shape_.block_stride, false);
    if (form_.lower_token_bytes > 0) {
      lower_ = Placed(LowerStride(), true);
      EXPECT_TRUE(planes_->BindLower(AddressesOf(lower_)).ok());
    }
    workspace_ = memory_.Allocate(static_cast<size_t>(planes_->workspace_bytes()));
    memory_.Zero(workspace_, static_cast<size_t>(planes_->workspace_bytes()));
    outputs_ = Poisoned(OutputBytes() * static_cast<size_t>(o_.layers));
    const auto all = static_cast<size_t>(o_.max_tokens * o_.kv_heads * geometry_.row_bytes());
    all_k_ = Poisoned(all);
    all_v_ = Poisoned(all);
    EXPECT_TRUE(planes_->Bind(AddressesOf(blocks_), workspace_).ok());
  }
  ~PlanesEngine() {
    for (const auto& [rows, graph] : graphs_) ops_.destroy_graph(graph);
  }

  PlanesSequences& sequences() { return sequences_; }

  // A step of these rows, those that decode first: the largest relative error of a decoding row.
  // captured: what Decode is called for; more than there are: rows that pad.
  double Step(const std::vector<PlanesRow>& rows, int32_t captured) {
    const auto decodes = static_cast<int32_t>(
        std::ranges::count_if(rows, [](const PlanesRow& row) { return row.added == 1; }));
    std::vector<int32_t> starts{0};
    for (const PlanesRow& row : rows) starts.push_back(starts.back() + row.added);
    for (const bool shares : {false, true}) {
      for (const PlanesRow& row : rows) {
        if ((row.shares >= 0) == shares) Append(row);
      }
    }
    step_.Upload(rows, starts, sequences_);
    Begin(rows, starts, decodes);
    if (decodes == static_cast<int32_t>(rows.size())) {
      Decode(std::clamp(captured, decodes, o_.max_rows));
    } else {
      for (int layer = 0; layer < o_.layers; ++layer) {
        if (decodes > 0) DecodeLayer(layer, decodes, nullptr);
        for (size_t i = At(decodes); i < rows.size(); ++i) {
          Prompt(layer, rows[i], static_cast<int32_t>(i), starts[i]);
        }
        // A prompt's only token may have been in front of what fills its blocks.
        if (decodes > 0) DecodeLayer(layer, decodes, nullptr);
      }
    }
    EXPECT_EQ(ops_.synchronize(nullptr), 0);
    double worst = 0;
    for (int32_t i = 0; i < decodes; ++i) worst = std::max(worst, ErrorOf(rows[At(i)], i));
    for (const PlanesRow& row : rows) ExpectBlocks(row.sequence);
    memory_.EndStep();
    return worst;
  }

  const PlanesOracle& oracle() const { return oracle_; }

 private:
  static constexpr int32_t kUnit = 64;

  using Sequence = PlanesSequences::Sequence;

  static size_t At(int32_t i) { return static_cast<size_t>(i); }
  // To 32: the memory of a host is aligned to less.
  static std::byte* Aligned(std::byte* at) { return at + (-reinterpret_cast<uintptr_t>(at) & 31); }
  std::byte* Poisoned(size_t bytes, bool on_host = false) {
    const std::vector<std::byte> ones(bytes, std::byte{0xFF});
    std::byte* const at = on_host ? memory_.AllocateOnHost(bytes) : memory_.Allocate(bytes);
    memory_.Upload(at, ones.data(), bytes);
    return at;
  }
  // Where each layer's first block lies. Blocks hold what others left, which is no number.
  std::vector<std::byte*> Placed(int64_t stride, bool on_host) {
    std::vector<int64_t> starts;
    int64_t bytes = 0;
    for (int l = 0; l < o_.layers; ++l) {
      starts.push_back(bytes);
      bytes += o_.blocks * stride + (o_.apart ? 4096 * (l + 1) * (l + 1) : 4096);
    }
    std::byte* const at = Aligned(Poisoned(static_cast<size_t>(bytes) + 32, on_host));
    std::vector<std::byte*> layers;
    for (const int64_t start : starts) layers.push_back(at + start);
    return layers;
  }
  int64_t LowerStride() const { return form_.lower_token_bytes * kUnit * o_.kv_heads; }
  void Append(const PlanesRow& row) {
    if (row.shares >= 0) sequences_.Share(row.sequence, row.shares);
    sequences_.Append(row.sequence, row.added);
  }
  size_t OutputBytes() const { return static_cast<size_t>(o_.max_rows * step_.query_bytes()); }
  void Begin(const std::vector<PlanesRow>& rows, const std::vector<int32_t>& starts,
             int32_t decodes) {
    const int32_t stride = o_.max_tokens / kUnit;
    std::vector<int32_t> table(rows.size() * At(stride), -1), tokens, slots;
    std::vector<uint8_t> in_full;
    for (size_t i = 0; i < rows.size(); ++i) {
      const Sequence& s = sequences_[rows[i].sequence];
      std::ranges::copy(s.blocks, &table[i * At(stride)]);
      tokens.push_back(s.tokens);
      slots.push_back(s.slot);
      in_full.push_back(rows[i].in_full ? 1 : 0);
    }
    const auto ints = [this](const std::vector<int32_t>& from) {
      return reinterpret_cast<int32_t*>(memory_.Keep(from.data(), from.size() * sizeof(int32_t)));
    };
    BlockPlanesBatch batch;
    batch.blocks = ints(table);
    batch.blocks_of_row = stride;
    batch.tokens = ints(tokens);
    batch.query_starts = ints(starts);
    batch.slots = ints(slots);
    batch.in_full = reinterpret_cast<uint8_t*>(memory_.Keep(in_full.data(), in_full.size()));
    batch.rows = static_cast<int32_t>(rows.size());
    batch.decodes = decodes;
    const Status status = planes_->Begin(batch, nullptr);
    EXPECT_TRUE(status.ok()) << status.message();
  }

  void DecodeLayer(int layer, int32_t rows, cuda::Stream stream) {
    const DecodedRows step{step_.Queries(layer, 0), step_.Keys(layer, 0), step_.Values(layer, 0)};
    const Status status =
        planes_->Decode(layer, step, outputs_ + At(layer) * OutputBytes(), rows, stream);
    EXPECT_TRUE(status.ok()) << status.message();
  }
  // All layers, by a graph of so many rows where graphs are wanted.
  void Decode(int32_t rows) {
    const auto enqueue = [&](cuda::Stream stream) {
      for (int layer = 0; layer < o_.layers; ++layer) DecodeLayer(layer, rows, stream);
    };
    if (!o_.graphs) return enqueue(nullptr);
    if (!graphs_.contains(rows)) {
      cuda::Stream stream = nullptr;
      EXPECT_EQ(ops_.begin_capture(&stream), 0);
      enqueue(stream);
      EXPECT_EQ(ops_.end_capture(stream, &graphs_[rows]), 0);
    }
    EXPECT_EQ(ops_.launch_graph(graphs_[rows], nullptr), 0);
  }

  // A layer of a chunk of a prompt, and that the gathered rows are what they should be.
  void Prompt(int layer, const PlanesRow& row, int32_t at, int32_t start) {
    const Sequence& s = sequences_[row.sequence];
    const int32_t before = s.tokens - row.added;
    const PromptChunk chunk{at, before, row.added, step_.Keys(layer, start),
                            step_.Values(layer, start)};
    const Status status = planes_->Prompt(layer, chunk, {all_k_, all_v_}, nullptr);
    EXPECT_TRUE(status.ok()) << status.message();
    const auto row_bytes = static_cast<size_t>(geometry_.row_bytes());
    std::vector<std::byte> k(At(s.tokens * o_.kv_heads) * row_bytes), v(k.size());
    memory_.Download(k.data(), all_k_, k.size());
    memory_.Download(v.data(), all_v_, v.size());
    int wrong = 0;
    for (int head = 0; head < o_.kv_heads; ++head) {
      const HeadRows want = oracle_.Gathered(s.rows[At(layer * o_.kv_heads + head)], before);
      for (int32_t t = 0; t < s.tokens; ++t) {
        const size_t got = At(t * o_.kv_heads + head) * row_bytes;
        wrong += std::memcmp(&k[got], &want.keys[At(t) * row_bytes], row_bytes) != 0;
        wrong += std::memcmp(&v[got], &want.values[At(t) * row_bytes], row_bytes) != 0;
      }
    }
    EXPECT_EQ(wrong, 0) << "rows of " << s.tokens << " tokens, " << before
                        << " of which were there, layer " << layer;
  }

  // In one of the layers.
  double ErrorOf(const PlanesRow& row, int32_t at) {
    const Sequence& s = sequences_[row.sequence];
    const auto head_bytes = static_cast<size_t>(geometry_.group() * geometry_.row_bytes());
    const int layer = random_.Below(o_.layers);
    std::vector<std::byte> out(static_cast<size_t>(step_.query_bytes()));
    memory_.Download(out.data(), outputs_ + At(layer) * OutputBytes() + At(at) * out.size(),
                     out.size());
    const PlanesRule rule = oracle_.RuleOf(layer, row.in_full, s.tokens);
    const std::byte* const q = step_.QueriesOf(layer, at);
    double worst = 0;
    for (int head = 0; head < o_.kv_heads; ++head) {
      const size_t from = At(head) * head_bytes;
      worst = std::max(worst, oracle_.ErrorOf(s.rows[At(layer * o_.kv_heads + head)], rule,
                                              q + from, &out[from], o_.limit));
    }
    return worst;
  }

  // Every sealed group has the bytes that `ref` gives it.
  void ExpectBlocks(int sequence) {
    const Sequence& s = sequences_[sequence];
    const PlanesFormat& f = oracle_.format();
    const auto upper = static_cast<size_t>(f.upper_bytes());
    const auto lower = static_cast<size_t>(f.lower_bytes());
    std::vector<std::byte> uppers(At(o_.kv_heads) * upper), lowers(At(o_.kv_heads) * lower);
    int wrong = 0;
    for (int layer = 0; layer < o_.layers; ++layer) {
      for (int32_t g = 0; g < s.tokens / kUnit; ++g) {
        const std::byte* const block = blocks_[At(layer)] + s.blocks[At(g)] * shape_.block_stride;
        memory_.Download(uppers.data(), block, uppers.size());
        memory_.Download(lowers.data(),
                         lower_.empty() ? block + uppers.size()
                                        : lower_[At(layer)] + s.blocks[At(g)] * LowerStride(),
                         lowers.size());
        for (int32_t head = 0; head < o_.kv_heads; ++head) {
          const std::byte* const want = s.rows[At(layer * o_.kv_heads + head)].groups[At(g)].data();
          wrong += std::memcmp(&uppers[At(head) * upper], want, upper) != 0 ||
                   std::memcmp(&lowers[At(head) * lower], want + upper, lower) != 0;
        }
      }
    }
    EXPECT_EQ(wrong, 0) << "groups of " << s.tokens << " tokens are not what ref makes of them";
  }

  const cuda::CudaOps& ops_;
  BlockMemory memory_;
  Random& random_;
  const PlanesEngineOptions o_;
  const Geometry geometry_;
  const Plan plan_;
  PlanesOracle oracle_;
  PlanesSequences sequences_;
  PlanesStepRows step_;
  BlockPlanesForm form_;
  BlockPlanesShape shape_;
  std::unique_ptr<BlockPlanes> planes_;
  std::vector<std::byte*> blocks_, lower_;  // each layer's; lower runs on the host
  std::byte *workspace_ = nullptr, *outputs_ = nullptr;
  std::byte *all_k_ = nullptr, *all_v_ = nullptr;
  std::map<int32_t, cuda::Graph> graphs_;  // by rows
};

}  // namespace kvstrata
