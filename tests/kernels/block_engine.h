// SPDX-License-Identifier: Apache-2.0
// BlockEngine: an engine in miniature that keeps keys and values in blocks of its own and decodes
// by BlockAttention; and what each step has to give, computed from the rows themselves. For tests
// on a GPU and on a table of ops that is one in host memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/blocks/block_attention.h"
#include "kernels/step/break_even.h"
#include "tests/kernels/block_memory.h"
#include "tests/kernels/block_oracle.h"

namespace kvstrata {

struct BlockEngineOptions {
  std::string plan;
  int32_t block_tokens = 16, layers = 2, query_heads = 4, kv_heads = 2, head_dim = 64;
  bool slots_first = false;  // a token's heads lie side by side
  bool apart = false;        // layers lie at several distances
  int32_t blocks = 64, max_rows = 5, max_tokens = 1024;
  bool graphs = false;
  float tie = 1e-5f;  // scores that differ by less of themselves may be taken for each other
};

class BlockEngine {
 public:
  struct Row {
    int sequence = 0;
    int32_t added = 1;     // new tokens; several: of a prompt, and nothing is asked of it
    bool in_full = false;  // attends everything, whatever the plan
  };

  BlockEngine(const cuda::CudaOps& ops, Random* random, const BlockEngineOptions& options)
      : ops_(ops),
        memory_(ops),
        random_(*random),
        o_(options),
        plan_(ParsePlan(options.plan).value()) {
    shape_.geometry = {o_.layers, o_.query_heads, o_.kv_heads, o_.head_dim,
                       16,        DType::kBF16,   {},          0};
    shape_.block_tokens = o_.block_tokens;
    shape_.max_rows = shape_.max_decodes = o_.max_rows;
    shape_.max_tokens = o_.max_tokens;
    const int64_t row = 2 * shape_.geometry.row_bytes();  // a key and a value
    shape_.slot_stride = o_.slots_first ? row * o_.kv_heads : row;
    shape_.head_stride = o_.slots_first ? row : row * o_.block_tokens;
    shape_.value_offset = shape_.geometry.row_bytes();
    shape_.index_offset = row * o_.kv_heads * o_.block_tokens;
    shape_.block_stride = shape_.index_offset + BlockAttention::IndexBytes(plan_, shape_).value();
    oracle_ = BlockOracle(WithMinTokens(plan_, shape_.geometry, StepsOn::kGpu), o_.tie);
    attention_ = BlockAttention::Make(plan_, shape_, ops_).value();
    for (int l = 0; l < o_.layers; ++l) {
      const int64_t gap = o_.apart ? 4096 * (l + 1) * (l + 1) : 4096;
      layers_.push_back(static_cast<int64_t>(mirror_.size()));
      mirror_.resize(mirror_.size() + static_cast<size_t>(o_.blocks * shape_.block_stride + gap));
    }
    // Blocks hold what others left, which is no number.
    for (size_t i = 0; i + 1 < mirror_.size(); i += 2) StoreAs(DType::kBF16, &mirror_[i], kNaN);
    device_ = memory_.Allocate(mirror_.size());
    workspace_ = memory_.Allocate(static_cast<size_t>(attention_->workspace_bytes()));
    const size_t rows = static_cast<size_t>(o_.layers * o_.max_rows * o_.query_heads * o_.head_dim);
    queries_ = memory_.Allocate(static_cast<size_t>(o_.layers * o_.max_rows) * QueryStride());
    outputs_ = memory_.Allocate(2 * rows);
    memory_.Upload(device_, mirror_.data(), mirror_.size());
    memory_.Zero(workspace_, static_cast<size_t>(attention_->workspace_bytes()));
    std::vector<uint64_t> bases;
    for (const int64_t at : layers_) bases.push_back(reinterpret_cast<uint64_t>(device_ + at));
    EXPECT_TRUE(attention_->Bind(bases, workspace_).ok());
    for (int32_t b = o_.blocks - 1; b > 0; --b) free_.push_back(b);  // 0 is nobody's, as in vLLM
    for (size_t i = free_.size() - 1; i > 0; --i) {
      std::swap(free_[i], free_[random_.Below(static_cast<int>(i) + 1)]);
    }
  }
  ~BlockEngine() {
    for (const auto& [rows, graph] : graphs_) ops_.destroy_graph(graph);
  }

  int32_t TokensOf(int sequence) const { return sequences_[static_cast<size_t>(sequence)].tokens; }

  int Open() {
    sequences_.emplace_back();
    return static_cast<int>(sequences_.size()) - 1;
  }
  // Blocks that nobody else has are the next ones to be given away, with what is in them.
  void Close(int sequence) {
    Sequence& s = sequences_[static_cast<size_t>(sequence)];
    for (const int32_t block : s.blocks) {
      if (--users_[static_cast<size_t>(block)] == 0) free_.push_back(block);
    }
    s = {};
  }
  // A sequence on the full blocks of another.
  int Share(int sequence) {
    const int copy = Open();
    const Sequence& from = sequences_[static_cast<size_t>(sequence)];
    const int32_t blocks = from.tokens / o_.block_tokens;
    sequences_[static_cast<size_t>(copy)] = {{from.blocks.begin(), from.blocks.begin() + blocks},
                                             blocks * o_.block_tokens};
    for (int32_t i = 0; i < blocks; ++i) {
      ++users_[static_cast<size_t>(from.blocks[static_cast<size_t>(i)])];
    }
    return copy;
  }
  // A sequence of full blocks that were copied from elsewhere, and that Index is told of.
  int Load(int32_t blocks) {
    const int loaded = Open();
    Append(loaded, blocks * o_.block_tokens);
    const std::vector<int32_t>& ids = sequences_[static_cast<size_t>(loaded)].blocks;
    std::byte* const device = memory_.Keep(ids.data(), ids.size() * sizeof(int32_t));
    EXPECT_TRUE(attention_->Index(reinterpret_cast<int32_t*>(device), blocks, nullptr).ok());
    return loaded;
  }

  // A step of these rows, padded to `captured` rows: the largest relative error of a row that
  // decodes, over what its plan says; and of what an audit says of one of them. Rows whose choice
  // was a near tie are left out, and counted.
  double Step(const std::vector<Row>& rows, int32_t captured) {
    const int32_t sampled = RowToSample(rows);
    Begin(rows, sampled);
    const auto floats = static_cast<size_t>(captured * o_.query_heads * o_.head_dim);
    std::vector<std::byte> q(2 * floats * static_cast<size_t>(o_.layers)), out(q.size());
    for (size_t i = 0; i < q.size(); i += 2) {
      StoreAs(DType::kBF16, &q[i], random_.Normal());
      StoreAs(DType::kBF16, &out[i], kNaN);
    }
    UploadQueries(q);
    memory_.Upload(outputs_, out.data(), out.size());
    Attend(captured, 2 * floats);
    memory_.Download(out.data(), outputs_, out.size());
    double worst = 0;
    for (int layer = 0; layer < o_.layers; ++layer) {
      const size_t at = static_cast<size_t>(layer) * floats;
      for (size_t i = 0; i < rows.size(); ++i) {
        if (rows[i].added > 1) continue;
        const Sequence& s = sequences_[static_cast<size_t>(rows[i].sequence)];
        const size_t row = 2 * (at + i * static_cast<size_t>(o_.query_heads * o_.head_dim));
        worst =
            std::max(worst, oracle_.ErrorOf(RowsOf(s), layer, rows[i].in_full, &q[row], &out[row]));
      }
    }
    if (sampled >= 0)
      worst = std::max(worst, AuditError(rows[static_cast<size_t>(sampled)], sampled, q));
    memory_.EndStep();
    return worst;
  }

  const BlockOracle& oracle() const { return oracle_; }

 private:
  struct Sequence {
    std::vector<int32_t> blocks;
    int32_t tokens = 0;
  };

  // Bytes from a row's queries to the next's: keys and values lie between, as an engine's product
  // has them.
  size_t QueryStride() const {
    return static_cast<size_t>(2 * (o_.query_heads + 2 * o_.kv_heads) * o_.head_dim);
  }
  // q: row after row; between them there is no number.
  void UploadQueries(const std::vector<std::byte>& q) {
    const auto row = static_cast<size_t>(2 * o_.query_heads * o_.head_dim);
    std::vector<std::byte> spread(q.size() / row * QueryStride());
    for (size_t i = 0; i < spread.size(); i += 2) StoreAs(DType::kBF16, &spread[i], kNaN);
    for (size_t i = 0; i < q.size() / row; ++i) {
      std::memcpy(&spread[i * QueryStride()], &q[i * row], row);
    }
    memory_.Upload(queries_, spread.data(), spread.size());
  }

  BlockRows RowsOf(const Sequence& s) const {
    return {shape_, mirror_.data(), layers_.data(), s.blocks.data(), s.tokens};
  }

  // Random rows behind what it has, in blocks of its own.
  void Append(int sequence, int32_t tokens) {
    Sequence& s = sequences_[static_cast<size_t>(sequence)];
    for (; tokens > 0; --tokens, ++s.tokens) {
      if (s.tokens % o_.block_tokens == 0) {
        s.blocks.push_back(free_.back());
        users_[static_cast<size_t>(free_.back())] = 1;
        free_.pop_back();
      }
      for (int layer = 0; layer < o_.layers; ++layer) {
        for (int head = 0; head < o_.kv_heads; ++head) {
          const int64_t at = RowsOf(s).KeyAt(layer, head, s.tokens);
          for (int c = 0; c < 2 * o_.head_dim; ++c) {
            StoreAs(DType::kBF16, &mirror_[static_cast<size_t>(at + 2 * c)], random_.Normal());
          }
          memory_.Upload(device_ + at, &mirror_[static_cast<size_t>(at)],
                         static_cast<size_t>(4 * o_.head_dim));
        }
      }
    }
  }

  void Begin(const std::vector<Row>& rows, int32_t sampled) {
    const int32_t stride = shape_.BlocksOfRow();
    std::vector<int32_t> table(rows.size() * static_cast<size_t>(stride), -1), tokens, starts{0};
    std::vector<uint8_t> in_full;
    BlockBatch batch;
    // The step's own rows are written while it runs; here before, since nothing reads them sooner.
    for (size_t i = 0; i < rows.size(); ++i) {
      Append(rows[i].sequence, rows[i].added);
      const Sequence& s = sequences_[static_cast<size_t>(rows[i].sequence)];
      std::ranges::copy(s.blocks, &table[i * static_cast<size_t>(stride)]);
      tokens.push_back(s.tokens);
      starts.push_back(starts.back() + rows[i].added);
      in_full.push_back(rows[i].in_full ? 1 : 0);
      batch.new_tokens = std::max(batch.new_tokens, rows[i].added);
    }
    const auto ints = [this](const std::vector<int32_t>& of) {
      return reinterpret_cast<int32_t*>(memory_.Keep(of.data(), of.size() * sizeof(int32_t)));
    };
    batch.blocks = ints(table);
    batch.blocks_of_row = stride;
    batch.tokens = ints(tokens);
    batch.query_starts = ints(starts);
    batch.in_full = reinterpret_cast<uint8_t*>(memory_.Keep(in_full.data(), in_full.size()));
    batch.rows = static_cast<int32_t>(rows.size());
    batch.sampled = sampled;
    const Status status = attention_->Begin(batch, nullptr);
    EXPECT_TRUE(status.ok()) << status.message();
  }

  // All layers, by a graph of so many rows where graphs are wanted.
  void Attend(int32_t rows, size_t layer_bytes) {
    const auto enqueue = [&](cuda::Stream stream) {
      for (int layer = 0; layer < o_.layers; ++layer) {
        const auto at = static_cast<size_t>(layer);
        const Status status =
            attention_->Attend(layer,
                               {queries_ + at * static_cast<size_t>(rows) * QueryStride(),
                                static_cast<int64_t>(QueryStride())},
                               outputs_ + at * layer_bytes, rows, stream);
        EXPECT_TRUE(status.ok()) << status.message();
      }
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

  // One that decodes; in most steps none, as in an engine.
  int32_t RowToSample(const std::vector<Row>& rows) {
    const int32_t row = random_.Below(static_cast<int>(rows.size()));
    return random_.Below(2) == 0 && rows[static_cast<size_t>(row)].added == 1 ? row : -1;
  }
  // The largest error of an audit of it, over all layers. q: of all layers and rows.
  double AuditError(const Row& row, int32_t at, const std::vector<std::byte>& q) {
    const BlockRows own = RowsOf(sequences_[static_cast<size_t>(row.sequence)]);
    const auto floats = static_cast<size_t>(o_.query_heads * o_.head_dim);
    double worst = 0;
    for (int layer = 0; layer < o_.layers; ++layer) {
      std::vector<float> said(2 * floats + static_cast<size_t>(2 * o_.query_heads), kNaN);
      std::byte* const device = memory_.Keep(said.data(), said.size() * sizeof(float));
      auto* const rows = reinterpret_cast<float*>(device);
      EXPECT_TRUE(attention_->Audit(layer, {rows, rows + 2 * floats}, nullptr).ok());
      memory_.Download(said.data(), device, said.size() * sizeof(float));
      const size_t from = q.size() / static_cast<size_t>(o_.layers) * static_cast<size_t>(layer) +
                          2 * floats * static_cast<size_t>(at);
      worst = std::max(worst, oracle_.AuditErrorOf(own, layer, row.in_full, &q[from], said.data()));
    }
    return worst;
  }

  const cuda::CudaOps& ops_;
  BlockMemory memory_;
  Random& random_;
  const BlockEngineOptions o_;
  Plan plan_;
  BlockShape shape_;
  BlockOracle oracle_;
  std::unique_ptr<BlockAttention> attention_;
  std::vector<std::byte> mirror_;
  std::vector<int64_t> layers_;
  std::byte *device_ = nullptr, *workspace_ = nullptr, *queries_ = nullptr, *outputs_ = nullptr;
  std::map<int32_t, cuda::Graph> graphs_;  // by rows
  std::vector<int32_t> free_, users_ = std::vector<int32_t>(static_cast<size_t>(o_.blocks));
  std::vector<Sequence> sequences_;
};

}  // namespace kvstrata
