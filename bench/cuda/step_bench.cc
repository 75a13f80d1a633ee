// Decode steps on the GPU, op by op: what a layer costs from its new token to its output.
//
//   step_bench [--json-out FILE] [--only PREFIX] [--stages 1] [--commit HASH] [--date DATE]
// --stages: also what a step takes that ends after its first op, its second, ...
//
// One captured graph is one step of a model whose layers read more than the L2 holds: the lengths
// advance, and each layer appends (its index row too), selects and attends. Sequences grow by a
// token a replay. Values are medians of a step, divided by its layers: launches between the ops are
// in them, nothing of the host is. Llama-3.1-8B: 32 query heads, 8 KV heads x 128, bf16; pages of
// 16 tokens and index blocks lie in random order. Plan mosaickv: packed_step.h.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "bench/cuda/packed_step.h"
#include "bench/cuda/replay_timing.h"
#include "bench/machine.h"
#include "kernels/cuda/cuda_ops.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/device_array.h"

namespace kvstrata::cuda {
namespace {

using nlohmann::ordered_json;

constexpr int kKvHeads = 8, kGroup = 4, kHeads = kKvHeads * kGroup, kDim = 128, kPage = 16;
constexpr int64_t kRowBytes = kDim * 2, kHeadBytes = kPage * kRowBytes;
constexpr int64_t kLayerBytes = int64_t{2} * kKvHeads * kHeadBytes;  // of a page
constexpr int64_t kTokenBytes = kLayerBytes / kPage;
constexpr int64_t kRotatedBytes = int64_t{300} << 20;  // a step reads at least as much: 6 L2s
constexpr int64_t kMostBytes = int64_t{60} << 30;
constexpr int kWarmUps = 5, kReplays = 60;

// How a plan chooses. kind kFull: it does not; kKept: a list of an earlier step goes on (a hit of
// TokenSelect's cache).
struct Plan {
  enum class Kind { kFull, kBounds, kBoundVotes, kTokenVotes, kKept };
  const char* name;
  Kind kind;
  CandidateRule rule;

  bool has_index() const { return kind == Kind::kBounds || kind == Kind::kBoundVotes; }
  bool shared() const { return kind == Kind::kTokenVotes || kind == Kind::kKept; }
  int64_t attended() const {
    return int64_t{rule.take} * rule.unit_tokens + rule.sink_tokens + rule.recent_tokens;
  }
};

const Plan kPlans[] = {
    {"full", Plan::Kind::kFull, {}},
    {"quest", Plan::Kind::kBounds, {16, 0, 1, 128, 0}},
    {"strata", Plan::Kind::kBoundVotes, {32, 4, 64, 64, 0}},
    {"tokenselect_miss", Plan::Kind::kTokenVotes, {1, 128, 512, 2048, 0}},
    {"tokenselect_hit", Plan::Kind::kKept, {1, 128, 512, 2048, 0}},
};

// Bytes that a step of one layer must read.
int64_t BytesOf(const Plan& plan, int64_t batch, int64_t tokens) {
  switch (plan.kind) {
    case Plan::Kind::kFull:
      return batch * tokens * kTokenBytes;
    case Plan::Kind::kBounds:
    case Plan::Kind::kBoundVotes:
      return batch * (tokens / plan.rule.unit_tokens + plan.attended()) * kTokenBytes;
    case Plan::Kind::kTokenVotes:
      return batch * (tokens / 2 + plan.attended()) * kTokenBytes;
    case Plan::Kind::kKept:
      return batch * plan.attended() * kTokenBytes;
  }
  return 0;
}

// Memory of random bf16 in [-1, 1) cut into `count` pieces in random order.
class Pieces {
 public:
  Pieces(int64_t count, int64_t bytes, std::mt19937_64& rng)
      : memory_(static_cast<size_t>(count * bytes)) {
    std::vector<BF16> block(size_t{61} << 20 >> 1);
    for (BF16& x : block)
      x = FromFloat<BF16>(static_cast<float>(static_cast<int32_t>(rng())) * 0x1p-31f);
    for (size_t at = 0; at < memory_.size(); at += block.size() * 2) {
      Check(cudaMemcpy(memory_.get() + at, block.data(),
                       std::min(block.size() * 2, memory_.size() - at), cudaMemcpyHostToDevice),
            "fill");
    }
    std::vector<uint64_t> table;
    for (int64_t i = 0; i < count; ++i) {
      table.push_back(memory_.address() + static_cast<uint64_t>(i * bytes));
    }
    std::shuffle(table.begin(), table.end(), rng);
    table_ = DeviceArray<uint64_t>(table);
  }
  const uint64_t* table() const { return table_.get(); }

 private:
  DeviceArray<std::byte> memory_;
  DeviceArray<uint64_t> table_;
};

template <typename T>
DeviceArray<T> Zeros(size_t n) {
  return DeviceArray<T>(std::vector<T>(n));
}

// A batch of equally long sequences in a model of `layers` layers, and a step of it.
class Step {
 public:
  Step(const Plan& plan, int batch, int32_t tokens)
      : plan_(plan),
        batch_(batch),
        capacity_((tokens + 4 * kReplays) / 512 * 512 + 1024),
        layers_(LayersOf(plan, batch, tokens)),
        index_(IndexOf(plan, layers_)),
        pages_(int64_t{batch} * capacity_ / kPage, layers_ * kLayerBytes, rng_),
        blocks_(plan.has_index() ? int64_t{batch} * index_.BlocksFor(capacity_) : 1,
                plan.has_index() ? index_.block_bytes : 16, rng_),
        tokens_(std::vector<int32_t>(static_cast<size_t>(batch), tokens)),
        input_(1, int64_t{batch} * kHeads * kRowBytes, rng_),
        output_(static_cast<size_t>(int64_t{batch} * kHeads * kDim)),
        counters_(Zeros<uint32_t>(static_cast<size_t>(batch) * kKvHeads)),
        workspace_(static_cast<size_t>(Ops().attend_raw_workspace_bytes(kGroup, kDim)) / 4) {
    if (plan.kind == Plan::Kind::kFull) return;
    const int groups = plan.shared() ? 1 : kKvHeads;
    const auto lists = static_cast<size_t>(batch * groups);
    scores_ = DeviceArray<float>(lists * static_cast<size_t>(capacity_ / plan.rule.unit_tokens));
    units_ = DeviceArray<int32_t>(lists * static_cast<size_t>(plan.rule.take));
    counts_ = DeviceArray<int32_t>(lists);
    sink_ = DeviceArray<int32_t>(static_cast<size_t>(batch));
    recent_ = DeviceArray<int32_t>(static_cast<size_t>(batch));
    vote_scratch_ = DeviceArray<std::byte>(static_cast<size_t>(Ops().vote_scratch_bytes(Vote(0))));
    pick_scratch_ = Zeros<std::byte>(static_cast<size_t>(Ops().pick_scratch_bytes(Pick())));
    if (plan.kind == Plan::Kind::kKept) KeepRandomList(tokens);
  }

  int layers() const { return layers_; }

  // How many ops a layer has.
  int stages() const { return static_cast<int>(OpsOf(0).size()); }

  // The first `stages` ops of every layer.
  int Enqueue(int stages, Stream stream) const {
    int error = Ops().advance_tokens(tokens_.get(), nullptr, batch_, stream);
    for (int layer = 0; layer < layers_ && error == 0; ++layer) {
      error = Layer(layer, stages, stream);
    }
    return error;
  }
  // Whether every output is a number.
  bool Sound() const {
    const std::vector<BF16> out = output_.Read();
    return std::all_of(out.begin(), out.end(), [](BF16 x) { return std::isfinite(ToFloat(x)); });
  }

 private:
  static const CudaOps& Ops() { return *kvs_cuda_ops(); }
  static int LayersOf(const Plan& plan, int batch, int64_t tokens) {
    const int64_t read = BytesOf(plan, batch, tokens);
    const int64_t fit = kMostBytes / (batch * tokens * kTokenBytes * 9 / 8);
    return static_cast<int>(
        std::clamp<int64_t>((kRotatedBytes + read - 1) / read, 1, std::clamp<int64_t>(fit, 1, 32)));
  }
  static IndexLayout IndexOf(const Plan& plan, int layers) {
    const Geometry g{layers, kHeads, kKvHeads, kDim, kPage, DType::kBF16};
    return MakeIndexLayout(IndexLayout::Kind::kMinMax, g, &plan.rule.unit_tokens, 1);
  }

  int Layer(int layer, int stages, Stream stream) const {
    const auto ops = OpsOf(layer);
    int error = 0;
    for (int i = 0; i < stages && error == 0; ++i) error = ops[static_cast<size_t>(i)](stream);
    return error;
  }
  std::vector<std::function<int(Stream)>> OpsOf(int layer) const {
    using Kind = Plan::Kind;
    std::vector<std::function<int(Stream)>> ops;
    ops.push_back([=, this](Stream s) { return Ops().append(Append(layer), s); });
    if (plan_.kind == Kind::kBounds) {
      ops.push_back([=, this](Stream s) { return Ops().score(Score(layer), s); });
    }
    if (plan_.kind == Kind::kBoundVotes || plan_.kind == Kind::kTokenVotes) {
      ops.push_back([=, this](Stream s) { return Ops().vote(Vote(layer), s); });
    }
    if (ops.size() > 1) ops.push_back([=, this](Stream s) { return Ops().pick(Pick(), s); });
    ops.push_back([=, this](Stream s) { return Ops().attend_raw(Attend(layer), s); });
    return ops;
  }

  PagedLayer Paged(int layer) const {
    const int64_t keys = layer * kLayerBytes;
    return {pages_.table(), capacity_ / kPage, kPage, kKvHeads,
            kDim,           DType::kBF16,      keys,  keys + kKvHeads * kHeadBytes,
            kHeadBytes,     kRowBytes};
  }
  DeviceRows Bounds(int layer) const {
    return IndexRows(blocks_.table(), index_.BlocksFor(capacity_), index_, 0, layer, 0);
  }
  int64_t FieldStride() const {
    return index_.RowOffset(0, 0, 1, 0, 0) - index_.RowOffset(0, 0, 0, 0, 0);
  }
  const void* input() const { return reinterpret_cast<const void*>(input_address_); }

  AppendBatch Append(int layer) const {
    AppendBatch w;
    w.layer = Paged(layer);
    w.batch = w.rows_max = batch_;
    w.tokens = tokens_.get();
    w.k = w.v = {input(), kHeads * kRowBytes, kRowBytes, DType::kBF16};
    if (plan_.has_index()) {
      w.index = IndexOfLayer(index_, layer, blocks_.table(), index_.BlocksFor(capacity_));
    }
    return w;
  }
  ScoreBatch Score(int layer) const {
    ScoreBatch w;
    w.rows = Bounds(layer);
    w.fields = 2;
    w.field_stride = FieldStride();
    w.rule = plan_.rule;
    w.tokens = tokens_.get();
    w.q = input();
    w.batch = batch_;
    w.query_heads = kHeads;
    w.scores = scores_.get();
    w.unit_stride = capacity_ / plan_.rule.unit_tokens;
    return w;
  }
  VoteBatch Vote(int layer) const {
    VoteBatch w;
    w.rows = plan_.has_index() ? Bounds(layer) : KeyRows(Paged(layer));
    w.fields = plan_.has_index() ? 2 : 1;
    w.field_stride = plan_.has_index() ? FieldStride() : 0;
    w.scale = 1 / std::sqrt(float{kDim});
    w.rule = plan_.rule;
    w.tokens = tokens_.get();
    w.q = input();
    w.batch = batch_;
    w.query_heads = kHeads;
    w.output_rows = plan_.shared() ? 1 : kKvHeads;
    w.votes = scores_.get();
    w.candidate_stride = capacity_ / plan_.rule.unit_tokens;
    w.scratch = vote_scratch_.get();
    return w;
  }
  PickBatch Pick() const {
    PickBatch w;
    w.scores = scores_.get();
    w.score_stride = capacity_ / plan_.rule.unit_tokens;
    w.batch = batch_;
    w.groups = plan_.shared() ? 1 : kKvHeads;
    w.rule = plan_.rule;
    w.tokens = tokens_.get();
    w.units = units_.get();
    w.counts = counts_.get();
    w.sink_end = sink_.get();
    w.recent_begin = recent_.get();
    w.list_stride = plan_.rule.take;
    w.scratch = pick_scratch_.get();
    return w;
  }
  AttendRawBatch Attend(int layer) const {
    AttendRawBatch w;
    w.layer = Paged(layer);
    if (plan_.kind != Plan::Kind::kFull) {
      w.selection = {plan_.rule.unit_tokens, plan_.shared() ? 1 : kKvHeads,
                     plan_.rule.take,        units_.get(),
                     counts_.get(),          sink_.get(),
                     recent_.get()};
    }
    w.batch = batch_;
    w.group = kGroup;
    w.tokens = tokens_.get();
    w.q = input();
    w.q_stride = kHeads * kRowBytes;
    w.scale = 1 / std::sqrt(float{kDim});
    w.to = {output_.get(), DType::kBF16, nullptr};
    w.counters = counters_.get();
    w.workspace = workspace_.get();
    return w;
  }
  // What an earlier step chose: tokens at random.
  void KeepRandomList(int32_t tokens) {
    std::vector<int32_t> all, units;
    for (int32_t t = plan_.rule.sink_tokens; t < tokens - plan_.rule.recent_tokens; ++t) {
      all.push_back(t);
    }
    for (int b = 0; b < batch_; ++b) {
      std::sample(all.begin(), all.end(), std::back_inserter(units), plan_.rule.take, rng_);
    }
    const auto batch = static_cast<size_t>(batch_);
    units_.Write(units);
    counts_.Write(std::vector<int32_t>(batch, plan_.rule.take));
    sink_.Write(std::vector<int32_t>(batch, plan_.rule.sink_tokens));
    recent_.Write(std::vector<int32_t>(batch, tokens - plan_.rule.recent_tokens));
  }

  const Plan& plan_;
  const int batch_;
  const int32_t capacity_;  // tokens a sequence may have, a multiple of 512
  const int layers_;
  const IndexLayout index_;
  std::mt19937_64 rng_{std::random_device{}()};
  Pieces pages_, blocks_;
  DeviceArray<int32_t> tokens_;
  Pieces input_;  // queries, whose first heads serve as keys and values too
  const uint64_t input_address_ = DeviceWord(input_.table());
  DeviceArray<BF16> output_;
  DeviceArray<uint32_t> counters_;
  DeviceArray<float> workspace_, scores_;
  DeviceArray<int32_t> units_, counts_, sink_, recent_;
  DeviceArray<std::byte> vote_scratch_, pick_scratch_;

  static uint64_t DeviceWord(const uint64_t* at) {
    uint64_t word = 0;
    Check(cudaMemcpy(&word, at, sizeof(word), cudaMemcpyDeviceToHost), "an address");
    return word;
  }
};

// Microseconds of a layer.
template <typename AnyStep>
bench::Timing TimeStep(const AnyStep& step, int stages) {
  CapturedGraph graph([&](Stream stream) { return step.Enqueue(stages, stream); });
  return TimeReplays({&graph}, step.layers(), kReplays);
}

struct Row {
  std::string plan;
  int batch;
  int32_t tokens;
  int64_t bytes;

  std::string id() const {
    return "step/" + plan + "/b" + std::to_string(batch) + "/" + std::to_string(tokens / 1024) +
           "K";
  }
};

// Whether every output is a number.
template <typename AnyStep>
bool Measure(const Row& row, const AnyStep& step, bool stages, ordered_json* rows) {
  const std::string id = row.id();
  for (int i = 1; stages && i < step.stages(); ++i) {
    std::printf("%-34s %9.2f us  after op %d\n", id.c_str(), TimeStep(step, i).median, i);
  }
  const bench::Timing t = TimeStep(step, step.stages());
  const bool sound = step.Sound();
  if (!sound) std::printf("%s: an output is not a number\n", id.c_str());
  const double tbps = static_cast<double>(row.bytes) / t.median * 1e-6;
  std::printf("%-34s %9.2f us  p10 %9.2f  p90 %9.2f  %5.2f TB/s\n", id.c_str(), t.median, t.p10,
              t.p90, tbps);
  std::fflush(stdout);
  rows->push_back({{"id", id},
                   {"plan", row.plan},
                   {"batch", row.batch},
                   {"tokens", row.tokens},
                   {"value", t.median},
                   {"unit", "us"},
                   {"p10", t.p10},
                   {"p90", t.p90},
                   {"n", t.n},
                   {"tbps", tbps}});
  return sound;
}

std::string Option(int argc, char** argv, const char* name) {
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], name) == 0) return argv[i + 1];
  }
  return {};
}

// 1 when an output is not a number.
int Run(const std::string& only, bool stages, ordered_json* rows) {
  bool sound = true;
  for (const auto& [batch, kilotokens] : {std::pair{1, 32}, {1, 128}, {1, 1024}, {8, 128}}) {
    const int32_t tokens = kilotokens * 1024;
    for (const Plan& plan : kPlans) {
      const Row row{plan.name, batch, tokens, BytesOf(plan, batch, tokens)};
      if (!row.id().starts_with(only)) continue;
      sound &= Measure(row, Step(plan, batch, tokens), stages, rows);
    }
    const Row row{"mosaickv", batch, tokens, PackedStep::BytesOf(batch, tokens)};
    if (!row.id().starts_with(only)) continue;
    sound &= Measure(row, PackedStep(batch, tokens, kRotatedBytes), stages, rows);
  }
  return sound ? 0 : 1;
}

int Main(int argc, char** argv) {
  if (kvs_cuda_ops()->device_count() == 0) {
    std::fprintf(stderr, "SKIPPED: no GPU is visible\n");
    return 77;
  }
  cudaDeviceProp device{};
  Check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
  ordered_json rows = ordered_json::array();
  const int unsound =
      Run(Option(argc, argv, "--only"), !Option(argc, argv, "--stages").empty(), &rows);
  const ordered_json out = {
      {"suite", "cuda-steps"},
      {"device", device.name},
      {"commit", Option(argc, argv, "--commit")},
      {"date", Option(argc, argv, "--date")},
      {"command", "bench/cuda/run_gpu.sh steps dense (make bundle)"},
      {"context",
       {{"notes",
         "one layer: advance, append, select, attend in a captured graph, lengths grow a token a "
         "replay; 32 query heads, 8 KV heads x 128, bf16, pages of 16 scattered"}}},
      {"ceilings", ordered_json::object()},
      {"rows", rows}};
  const std::string file = Option(argc, argv, "--json-out");
  if (!file.empty()) std::ofstream(file) << out.dump(1) << "\n";
  return unsound;
}

}  // namespace
}  // namespace kvstrata::cuda

int main(int argc, char** argv) { return kvstrata::cuda::Main(argc, argv); }
