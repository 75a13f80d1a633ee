// Decode steps as an engine makes them: a daemon with a pool of the GPU's, libkvstrata.so, and a
// CUDA graph of all layers that the engine captured once.
//
//   linked_bench [--json-out FILE] [--only PREFIX] [--surprisal TRACE]
//                [--commit HASH] [--date DATE] [--suite pool | --suite moves [--promote-rate RATE]]
//
// --surprisal: a trace (docs/traces.md) whose surprisal is reported for plan sekv, over and over;
// without: no such row. Other suites: the memory of plans (pool_rows.h); moves between the
// tiers, at a move.promote_rate of choice, and a second process (move_rows.h, pool_rows.h).
//
// A step is kvs_step_begin, kvs_step_replay, the graph's launch, kvs_step_end, for one new token of
// each sequence; pages are where the daemon's allocator put them. Values: microseconds of a
// layer on the stream, from a step's first work to its last; a model has 32 layers, or as many as
// fit: a page holds all layers, so their number decides how far apart a layer's rows lie. Beside
// them the step's time on the CPU, with the stream idle, and that of one kvs_select and kvs_attend
// outside a graph, once the library knows the calls (rows .../call). Rows .../host are of sequences
// whose sealed pages were moved to the host's memory, after some steps with the same query. chess:
// the mean of a whole period of steps, its selection included; sentencekv: the same, the buckets of
// the sentences that end included. tokenselect_0.9: of ten steps, one of which turns its query away
// and selects. sekv: factors of rank 16 on the device, each query head expands spans of 2 % of the
// tokens; relevance varies by more than the spans' lengths do, so that heads choose apart, but for
// sekv_agreed, where those of a group have the same query.
#include <cuda_runtime_api.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "bench/cuda/move_rows.h"
#include "bench/cuda/pool_rows.h"
#include "bench/cuda/replay_timing.h"
#include "bench/cuda/trace_surprisal.h"
#include "client/include/kvstrata/kvstrata.h"
#include "kernels/dtype.h"
#include "kernels/segment/span_rule.h"
#include "kvstrata/v1/admin.grpc.pb.h"
#include "tests/cuda/device_array.h"
#include "tests/fakes/daemon_process.h"

namespace kvstrata::cuda {
namespace {

using nlohmann::ordered_json;

constexpr int kKvHeads = 8, kHeads = 32, kDim = 128, kPage = 16, kReplays = 60,
              kLayersOfAModel = 32;
constexpr int64_t kTokenBytes = int64_t{2} * kKvHeads * kDim * 2;  // of a layer
constexpr int64_t kMostBytes = int64_t{48} << 30;                  // of a sequence's pages
constexpr int32_t kChunk = 4096;                                   // tokens of a prefill step

void CheckKvs(int code, const char* what) {
  if (code == KVS_OK) return;
  std::fprintf(stderr, "%s: %s %s\n", what, kvs_error_reason(), kvs_error_message());
  std::exit(1);
}

struct Plan {
  const char* name;
  const char* text;
  int64_t (*rows_read)(int64_t tokens);  // of a layer, summaries included
  int period = 1;                        // steps, of which Begin selects in one
  int steps_a_query = 0;                 // the query turns away after so many steps; 0: it stays
  int most_layers = kLayersOfAModel;     // fewer where the daemon's CPUs pack the prompt first
  bool sentences = false;                // boundaries are reported, and the last queries observed
  bool spans = false;                    // surprisal is reported, and text ends with a budget
  bool agreed = false;                   // the query heads of a group have the same query
  bool surprisals = false;               // random ones are reported where none are given
};
constexpr int kObserved = 32;     // last prompt tokens, which go through attention
constexpr double kSentence = 27;  // median of its tokens (the paper's corpora: 25 to 30)
constexpr int64_t kTokenRows = 2048 + 128 + 512;  // that TokenSelect attends
constexpr int32_t kSpanWindow = 512, kShortestSpan = 4;
constexpr double kAnchorDeviations = 2;
// Defaults of the plan, but for the rank, the place of factors and the budget (SpanBudget).
constexpr char kSpanPlan[] =
    "sekv{r_max = 16, factors = \"device\", keep_raw = \"no\", min_tokens = 0, rows = ";
constexpr float kSpanQueryScale = 16;  // of normal queries: relevance outweighs ln n
const Plan kPlans[] = {
    {"full", "full", [](int64_t n) { return n; }},
    {"quest", "quest{budget = 2048, min_tokens = 0}", [](int64_t n) { return n / 16 + 2048; }},
    {"strata", "strata{budget = 2048, min_tokens = 0}", [](int64_t n) { return n / 32 + 2048; }},
    // 1 %, a sink and a window of 16 pages that is half of 320 tokens longer at the mean.
    {"chess", "chess{trigger = \"every\", every = 10, min_tokens = 0}",
     [](int64_t n) { return n / 100 + 17 * 32 + 160; }, 320},
    // Means, of 8 heads as large as a token: about 300 buckets of random keys.
    {"sentencekv", "sentencekv{min_tokens = 0}",
     [](int64_t) { return int64_t{1024 + 32 + 40 + 300}; }, 320, 0, kLayersOfAModel, true},
    {"tokenselect_miss", "tokenselect{theta = 1, min_tokens = 0}",
     [](int64_t n) { return n / 2 + kTokenRows; }},
    {"tokenselect_hit", "tokenselect{min_tokens = 0}", [](int64_t) { return kTokenRows; }},
    {"tokenselect_0.9", "tokenselect{min_tokens = 0}",
     [](int64_t n) { return n / 20 + kTokenRows; }, 1, 10},
    // A packed row has 5 of 16 of a raw one's bytes; block keys are as many bytes as what is taken.
    {"mosaickv", "mosaickv{share = 0.0625, min_tokens = 0}",
     [](int64_t n) { return (n / 16 + n / 16) * 5 / 16 + 32; }, 1, 0, 8},
    // Of 1000 tokens of GPL-3 65 raw ones and 43 means; factors of 20 rows are 17 rows' bytes, for
    // each of 4 heads, or for all.
    {.name = "sekv",
     .text = kSpanPlan,
     .rows_read = [](int64_t n) { return n * (65 + 43 + 4 * 17) / 1000 + kSpanWindow; },
     .most_layers = 4,
     .spans = true},
    {.name = "sekv_agreed",
     .text = kSpanPlan,
     .rows_read = [](int64_t n) { return n * (65 + 43 + 17) / 1000 + kSpanWindow; },
     .most_layers = 4,
     .spans = true,
     .agreed = true},
};
constexpr int kPeriods = 9, kEagerSteps = 5;
constexpr int kWarmSteps = 5;  // eager ones, behind which the library knows the calls
// Of the rows of pool_rows.h. The first one is what the others are compared with.
const std::vector<Plan> kPoolPlans = {
    {"full", "full", nullptr},
    {"quest", "quest{budget = 2048, min_tokens = 0}", nullptr},
    {"chess", "chess{trigger = \"every\", every = 10, min_tokens = 0}", nullptr},
    {"sentencekv", "sentencekv{min_tokens = 0}", nullptr, 1, 0, kLayersOfAModel, true},
    {"tokenselect", "tokenselect{min_tokens = 0}", nullptr},
    {"mosaickv", "mosaickv{keep_raw = \"no\", min_tokens = 0}", nullptr},
    {.name = "sekv",
     .text = "sekv{min_tokens = 0}",
     .rows_read = nullptr,
     .most_layers = 2,
     .surprisals = true},
};

// Rows that are read in any case, and 2 % of the tokens.
int32_t SpanBudget(const std::vector<float>& surprisal) {
  const auto tokens = static_cast<int32_t>(surprisal.size()), end = tokens - kSpanWindow;
  const double threshold = AnchorThreshold(surprisal, tokens, kAnchorDeviations);
  int32_t rows = tokens + tokens / 50;
  for (const Run& s : SpansIn(surprisal, {0, end}, threshold, kShortestSpan)) {
    rows -= s.end - s.begin - 1;
  }
  return rows;
}

// Of the model. The daemon's CPUs factor the spans of every layer: of so many tokens in 14 s (16
// cores).
int LayersOf(const Plan& plan, int batch, int64_t tokens) {
  constexpr int64_t kFactoredTokens = 512 * 1024;
  const int64_t most =
      plan.spans ? std::clamp<int64_t>(kFactoredTokens / (batch * tokens), 1, plan.most_layers)
                 : plan.most_layers;
  return static_cast<int>(
      std::clamp<int64_t>(kMostBytes / (batch * tokens * kTokenBytes), 1, most));
}

// `batch` sequences of `tokens` random rows in a model of their own, and a graph of their decode
// step.
class Steps {
 public:
  // surprisal: of each prompt token. digest: of the model, by default like no other's.
  Steps(kvs_session* session, const Plan& plan, int batch, int32_t tokens,
        std::vector<float> surprisal = {},
        const std::string& digest = std::to_string(std::random_device{}()))
      : session_(session),
        digest_(digest),
        steps_a_query_(plan.steps_a_query),
        layers_(LayersOf(plan, batch, tokens)),
        rows_(Random(int64_t{2} * kChunk * kKvHeads * kDim)),
        q_(plan.spans ? SpanQueries(batch, plan.agreed) : Random(int64_t{batch} * kHeads * kDim)),
        queries_(Random(int64_t{2} * batch * kHeads * kDim)),
        observed_(Random(int64_t{kObserved} * kHeads * kDim)),
        out_(static_cast<size_t>(std::max(batch, kObserved)) * kHeads * kDim),
        sentences_(plan.sentences),
        surprisal_(plan.surprisals ? RandomSurprisal(tokens) : std::move(surprisal)) {
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    const kvs_model model = RegisterModel();
    const std::vector<uint8_t> ends = NextBoundaries(tokens);
    const std::string text =
        plan.spans ? plan.text + std::to_string(SpanBudget(surprisal_)) + "}" : plan.text;
    for (int i = 0; i < batch; ++i) Open(model, text.c_str(), tokens, i, ends);
    reported_ = static_cast<uint32_t>(tokens);
    Step([this](kvs_step* step) { Layers(step, Batch(), true); });  // memory before the capture
    Capture();
  }
  ~Steps() {
    cudaGraphExecDestroy(graph_);
    for (const kvs_step_member& member : members_) {
      CheckKvs(kvs_sequence_close(session_, member.sequence), "kvs_sequence_close");
    }
    cudaStreamDestroy(stream_);
  }

  // All pages of the first sequence but the last go to the host's memory, and the graph is captured
  // anew.
  void Demote(const std::string& socket) {
    Check(cudaStreamSynchronize(stream_), "the steps before");
    const auto admin = v1::Admin::NewStub(
        grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials()));
    v1::MoveRequest request;
    request.set_sequence(members_[0].sequence);
    grpc::ClientContext context;
    v1::MoveResponse moved;
    if (const grpc::Status status = admin->Demote(&context, request, &moved); !status.ok()) {
      std::fprintf(stderr, "Demote: %s\n", status.error_message().c_str());
      std::exit(1);
    }
    Check(cudaGraphExecDestroy(graph_), "cudaGraphExecDestroy");
    Capture();
  }
  int layers() const { return layers_; }
  // That a launch makes.
  int steps() const { return std::max(steps_a_query_, 1); }
  cudaStream_t stream() const { return stream_; }
  kvs_sequence sequence() const { return members_.front().sequence; }
  uint32_t held() const { return held_; }  // tokens of the last prompt that were there already
  size_t tensor_bytes() const {
    return (rows_.size() + q_.size() + queries_.size() + observed_.size() + out_.size()) *
           sizeof(BF16);
  }
  void Launch() {
    if (steps_a_query_ > 0) TurnQuery();
    for (int i = 0; i < steps(); ++i) LaunchStep();
  }
  void LaunchStep() {
    Step([this](kvs_step* step) {
      CheckKvs(kvs_step_replay(step), "kvs_step_replay");
      Check(cudaGraphLaunch(graph_, stream_), "cudaGraphLaunch");
    });
  }
  // Microseconds of a layer, the mean of `period` steps that follow each other without a pause.
  bench::Timing TimePeriods(int period) {
    cudaEvent_t begin, end;
    Check(cudaEventCreate(&begin), "cudaEventCreate");
    Check(cudaEventCreate(&end), "cudaEventCreate");
    std::vector<double> us;
    for (int i = 0; i < kPeriods; ++i) {
      Launch();  // still running when the period's first step is enqueued
      Check(cudaEventRecord(begin, stream_), "cudaEventRecord");
      for (int step = 0; step < period; ++step) Launch();
      Check(cudaEventRecord(end, stream_), "cudaEventRecord");
      Check(cudaEventSynchronize(end), "a period");
      float ms = 0;
      Check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
      us.push_back(double{ms} * 1e3 / period / layers_);
    }
    Check(cudaEventDestroy(begin), "cudaEventDestroy");
    Check(cudaEventDestroy(end), "cudaEventDestroy");
    return bench::TimingOf(us);
  }
  // Microseconds of the CPU that a step takes.
  bench::Timing TimeOnCpu() {
    std::vector<double> us;
    for (int i = 0; i < kReplays; ++i) {
      Check(cudaStreamSynchronize(stream_), "a step");
      const auto begin = std::chrono::steady_clock::now();
      LaunchStep();
      us.push_back(
          std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
              .count());
    }
    return bench::TimingOf(us);
  }
  // Microseconds of the CPU that one kvs_select and kvs_attend take, called layer by layer with the
  // same tensors in every step.
  bench::Timing TimeCalls() {
    for (int i = 0; i < kWarmSteps; ++i) {
      Step([this](kvs_step* step) { Layers(step, Batch(), true); });
    }
    std::vector<double> us;
    for (int i = 0; i < kEagerSteps; ++i) {
      Check(cudaStreamSynchronize(stream_), "a step");
      Step([&](kvs_step* step) { Layers(step, Batch(), true, &us); });
    }
    return bench::TimingOf(us);
  }
  bool Sound() const {
    const std::vector<BF16> out = out_.Read();
    return std::all_of(out.begin(), out.begin() + int64_t{Batch()} * kHeads * kDim,
                       [](BF16 x) { return std::isfinite(ToFloat(x)); });
  }

 private:
  // Of the next `count` tokens. Lengths of sentences: lognormal, cut at the plan's 100.
  std::vector<uint8_t> NextBoundaries(int32_t count) {
    std::lognormal_distribution<double> length(std::log(kSentence), 0.5);
    std::vector<uint8_t> ends(static_cast<size_t>(count));
    for (uint8_t& end : ends) {
      if (--left_in_sentence_ > 0) continue;
      end = 1;
      left_in_sentence_ = std::max(1, static_cast<int>(length(rng_)));
    }
    return ends;
  }
  void Report(kvs_sequence sequence, uint32_t first, const std::vector<uint8_t>& ends) {
    CheckKvs(kvs_report(session_, sequence, first, static_cast<uint32_t>(ends.size()), nullptr,
                        nullptr, ends.data()),
             "kvs_report");
  }
  // Exponential: one in 20 is an anchor at alpha = 2, about as in prose.
  std::vector<float> RandomSurprisal(int32_t tokens) {
    std::exponential_distribution<float> surprisal;
    std::vector<float> nats(static_cast<size_t>(tokens));
    for (float& x : nats) x = surprisal(rng_);
    return nats;
  }
  // Two random queries by turns.
  void TurnQuery() {
    turned_ = !turned_;
    const size_t n = q_.size();
    Check(cudaMemcpyAsync(q_.get(), queries_.get() + (turned_ ? n : 0), n * sizeof(BF16),
                          cudaMemcpyDeviceToDevice, stream_),
          "another query");
  }
  std::vector<BF16> Random(int64_t n) {
    std::normal_distribution<float> normal;
    std::vector<BF16> values(static_cast<size_t>(n));
    for (BF16& x : values) x = FromFloat<BF16>(normal(rng_));
    return values;
  }
  std::vector<BF16> SpanQueries(int batch, bool agreed) {
    std::vector<BF16> q = Random(int64_t{batch} * kHeads * kDim);
    for (BF16& x : q) x = FromFloat<BF16>(kSpanQueryScale * ToFloat(x));
    constexpr size_t kGroup = kHeads / kKvHeads;
    for (size_t head = 0; agreed && head < q.size() / kDim; ++head) {
      std::copy_n(q.begin() + static_cast<int64_t>(head / kGroup * kGroup * kDim), kDim,
                  q.begin() + static_cast<int64_t>(head * kDim));
    }
    return q;
  }
  kvs_model RegisterModel() {
    kvs_model_desc desc{};
    desc.size = sizeof(desc);
    desc.name = "llama-3.1-8b";
    desc.digest = digest_.c_str();
    desc.layers = layers_;
    desc.query_heads = kHeads;
    desc.kv_heads = kKvHeads;
    desc.head_dim = kDim;
    desc.page_tokens = kPage;
    desc.dtype = KVS_BF16;
    desc.ranks = 1;
    kvs_model model = 0;
    CheckKvs(kvs_model_register(session_, &desc, &model), "kvs_model_register");
    return model;
  }
  // A sequence whose prompt is like no other's.
  void Open(kvs_model model, const char* plan, int32_t tokens, int32_t id,
            const std::vector<uint8_t>& ends) {
    const std::vector<int32_t> prompt(static_cast<size_t>(tokens), id);
    kvs_sequence sequence = 0;
    CheckKvs(
        kvs_sequence_open(session_, model, plan, prompt.data(), prompt.size(), &sequence, &held_),
        "kvs_sequence_open");
    const auto run = [&](int32_t n, bool attend) {
      StepOf({{sequence, prompt.data(), static_cast<uint32_t>(n)}},
             [&](kvs_step* step) { Layers(step, n, attend); });
    };
    const int32_t appended = sentences_ ? tokens - kObserved : tokens;
    for (auto done = static_cast<int32_t>(held_); done < appended; done += kChunk) {
      run(std::min(kChunk, appended - done), false);
    }
    if (sentences_) run(kObserved, true);
    if (sentences_) Report(sequence, 0, ends);
    if (!surprisal_.empty()) {
      CheckKvs(kvs_report(session_, sequence, 0, static_cast<uint32_t>(tokens), surprisal_.data(),
                          nullptr, nullptr),
               "kvs_report");
    }
    CheckKvs(kvs_prefill_done(session_, sequence), "kvs_prefill_done");
    CheckKvs(kvs_settle(session_, sequence), "kvs_settle");  // of a codec: all is packed
    members_.push_back({sequence, &id_, 1});
  }
  template <typename Fn>
  void StepOf(const std::vector<kvs_step_member>& members, const Fn& work) {
    kvs_step* step = nullptr;
    CheckKvs(kvs_step_begin(session_, members.data(), members.size(), stream_, &step, nullptr),
             "kvs_step_begin");
    work(step);
    CheckKvs(kvs_step_end(step, stream_), "kvs_step_end");
  }
  template <typename Fn>
  void Step(const Fn& work) {
    StepOf(members_, work);
    if (!sentences_) return;
    const std::vector<uint8_t> ends = NextBoundaries(1);
    for (const kvs_step_member& member : members_) Report(member.sequence, reported_, ends);
    ++reported_;
  }
  int32_t Batch() const { return static_cast<int32_t>(members_.size()); }
  // `tokens` new rows, of one sequence or of a batch. call_us: gets each layer's CPU time of its
  // selection and attention.
  void Layers(kvs_step* step, int32_t tokens, bool attend, std::vector<double>* call_us = nullptr) {
    const auto tensor = [tokens](BF16* data, int heads) {
      return kvs_tensor{data, KVS_BF16, heads, kDim, tokens, 0, 0};
    };
    // A prompt's chunks begin anywhere in them: were they all the same, units that are selected
    // would lie as regularly, at addresses that share channels of the memory.
    const int64_t first = attend ? 0 : static_cast<int64_t>(rng_() % kChunk);
    const kvs_tensor rows = tensor(rows_.get() + first * kKvHeads * kDim, kKvHeads),
                     q = tensor(tokens == kObserved ? observed_.get() : q_.get(), kHeads),
                     o = tensor(out_.get(), kHeads);
    for (int layer = 0; layer < layers_; ++layer) {
      CheckKvs(kvs_append(step, layer, &rows, &rows), "kvs_append");
      if (!attend) continue;
      const auto begin = std::chrono::steady_clock::now();
      if (call_us != nullptr) CheckKvs(kvs_select(step, layer, &q), "kvs_select");
      CheckKvs(kvs_attend(step, layer, &q, &o, nullptr), "kvs_attend");
      const std::chrono::duration<double, std::micro> took =
          std::chrono::steady_clock::now() - begin;
      if (call_us != nullptr) call_us->push_back(took.count());
    }
  }
  void Capture() {
    Step([this](kvs_step* step) {
      cudaGraph_t captured = nullptr;
      Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "BeginCapture");
      Layers(step, Batch(), true);
      Check(cudaStreamEndCapture(stream_, &captured), "EndCapture");
      Check(cudaGraphInstantiate(&graph_, captured, 0), "Instantiate");
      Check(cudaGraphDestroy(captured), "cudaGraphDestroy");
      Check(cudaGraphLaunch(graph_, stream_), "cudaGraphLaunch");
    });
  }

  kvs_session* const session_;
  const std::string digest_;
  const int steps_a_query_;
  const int layers_;
  std::mt19937 rng_{std::random_device{}()};
  DeviceArray<BF16> rows_, q_, queries_, observed_, out_;
  bool turned_ = false;
  const bool sentences_;
  const std::vector<float> surprisal_;
  uint32_t held_ = 0;
  int left_in_sentence_ = 1;
  uint32_t reported_ = 0;
  const int32_t id_ = 0;                  // of every new token
  std::vector<kvs_step_member> members_;  // of a decode step
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
};

std::string Option(int argc, char** argv, const char* name) {
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], name) == 0) return argv[i + 1];
  }
  return {};
}

std::string IdOf(const Plan& plan, int batch, int kilotokens) {
  return std::string("linked/") + plan.name + "/b" + std::to_string(batch) + "/" +
         std::to_string(kilotokens) + "K";
}

// With a daemon of its own: pages of closed sequences stay as prefixes until the pool is full, and
// what a step pays then is another thing.
// trace: of a recorded text.
void Measure(const Plan& plan, int batch, int kilotokens, const std::vector<float>& trace,
             ordered_json* rows) {
  const testing::DaemonProcess daemon(
      {"--set", "pool.device=cuda", "--set", "pool.device_bytes=64GiB", "--set",
       "pool.arena_bytes=1GiB", "--set", "pool.host_bytes=16MiB", "--set", "work.op_threads=16"});
  kvs_session* session = nullptr;
  kvs_attach_options options{};
  options.size = sizeof(options);
  options.timeout_ms = 300000;  // packing a prompt takes its time
  CheckKvs(kvs_attach(daemon.socket().c_str(), &options, &session), "kvs_attach");
  const std::unique_ptr<kvs_session, decltype(&kvs_detach)> detached(session, &kvs_detach);
  const std::string id = IdOf(plan, batch, kilotokens);
  std::vector<float> surprisal;
  for (size_t i = 0; plan.spans && i < static_cast<size_t>(kilotokens) * 1024; ++i) {
    surprisal.push_back(trace[i % trace.size()]);
  }
  Steps steps(session, plan, batch, kilotokens * 1024, std::move(surprisal));
  const bench::Timing t =
      plan.period > 1 ? steps.TimePeriods(plan.period)
                      : TimeReplays<Steps>({&steps}, steps.layers() * steps.steps(), kReplays);
  const bench::Timing cpu = steps.TimeOnCpu(), call = steps.TimeCalls();
  if (!steps.Sound()) {
    std::fprintf(stderr, "%s: an output is not a number\n", id.c_str());
    std::exit(1);
  }
  const double tbps =
      static_cast<double>(batch * plan.rows_read(int64_t{kilotokens} * 1024) * kTokenBytes) /
      t.median * 1e-6;
  std::printf(
      "%-28s %9.2f us  p10 %9.2f  p90 %9.2f  %5.2f TB/s  %2d layers, us of CPU: %6.1f a step, "
      "%5.1f a select and attend\n",
      id.c_str(), t.median, t.p10, t.p90, tbps, steps.layers(), cpu.median, call.median);
  std::fflush(stdout);
  rows->push_back({{"id", id},
                   {"plan", plan.text},
                   {"batch", batch},
                   {"tokens", kilotokens * 1024},
                   {"period", plan.period},
                   {"value", t.median},
                   {"unit", "us"},
                   {"p10", t.p10},
                   {"p90", t.p90},
                   {"n", t.n},
                   {"tbps", tbps},
                   {"layers", steps.layers()},
                   {"cpu_us_a_step", cpu.median}});
  if (kilotokens != 128 || batch != 1) return;
  rows->push_back({{"id", id + "/call"},
                   {"value", call.median},
                   {"unit", "us"},
                   {"p10", call.p10},
                   {"p90", call.p90},
                   {"n", call.n}});
}

// Plans that are measured with all cold pages in the host's memory, the query the same in each
// step, and what is selected promoted; against the same steps before, with all pages the GPU's.
constexpr const char* kFarPlans[] = {"quest", "strata", "sentencekv", "chess", "tokenselect_hit"};
constexpr int kFarLayers = 8;

void MeasureFar(Plan plan, ordered_json* rows) {
  const std::string id = IdOf(plan, 1, 128) + "/host";
  const testing::DaemonProcess daemon({"--set", "pool.device=cuda", "--set",
                                       "pool.device_bytes=8GiB", "--set", "pool.arena_bytes=1GiB",
                                       "--set", "pool.host_bytes=6GiB"});
  kvs_session* session = nullptr;
  kvs_attach_options options{};
  options.size = sizeof(options);
  options.timeout_ms = 300000;
  CheckKvs(kvs_attach(daemon.socket().c_str(), &options, &session), "kvs_attach");
  const std::unique_ptr<kvs_session, decltype(&kvs_detach)> detached(session, &kvs_detach);
  plan.most_layers = kFarLayers;
  Steps steps(session, plan, 1, 128 * 1024);
  const auto time = [&] {
    return plan.period > 1 ? steps.TimePeriods(plan.period)
                           : TimeReplays<Steps>({&steps}, steps.layers(), kReplays);
  };
  const bench::Timing near = time();
  steps.Demote(daemon.socket());
  const bench::Timing far = time(), cpu = steps.TimeOnCpu();
  if (!steps.Sound()) {
    std::fprintf(stderr, "%s: an output is not a number\n", id.c_str());
    std::exit(1);
  }
  std::printf(
      "%-28s %9.2f us  p10 %9.2f  p90 %9.2f  %5.3fx of %.2f us on the GPU, %.1f us of CPU\n",
      id.c_str(), far.median, far.p10, far.p90, far.median / near.median, near.median, cpu.median);
  std::fflush(stdout);
  rows->push_back({{"id", id},
                   {"plan", plan.text},
                   {"tokens", 128 * 1024},
                   {"value", far.median},
                   {"unit", "us"},
                   {"p10", far.p10},
                   {"p90", far.p90},
                   {"n", far.n},
                   {"on_device_us", near.median},
                   {"ratio", far.median / near.median},
                   {"layers", steps.layers()},
                   {"cpu_us_a_step", cpu.median}});
}

ordered_json PoolRows(const std::string& only) {
  ordered_json rows = ordered_json::array();
  MemoryRows<Steps>(kPoolPlans, kLayersOfAModel, only, &rows);
  return rows;
}

ordered_json MovesRows(const std::string& only, const std::string& promote_rate) {
  ordered_json rows = ordered_json::array();
  const auto wanted = [&only](const std::string& kind) {
    return kind.starts_with(only.substr(0, kind.size()));
  };
  if (wanted("second")) SecondRow<Steps>(kPoolPlans.front(), &rows);
  if (wanted("move")) {
    MoveRows<Steps>(std::vector(kPoolPlans.begin(), kPoolPlans.begin() + 2), kPoolPlans.front(),
                    promote_rate, &rows);
  }
  return rows;
}

int Main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "SKIPPED: no GPU is visible\n");
    return 77;
  }
  cudaDeviceProp device{};
  Check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
  const std::string only = Option(argc, argv, "--only"), file = Option(argc, argv, "--json-out");
  if (const std::string socket = Option(argc, argv, "--second"); !socket.empty()) {
    return RunSecond<Steps>(socket, kPoolPlans.front(), Option(argc, argv, "--digest"));
  }
  if (const std::string suite = Option(argc, argv, "--suite"); !suite.empty()) {
    const bool moves = suite == "moves";
    const ordered_json out = {
        {"suite", "cuda-" + suite},
        {"device", device.name},
        {"commit", Option(argc, argv, "--commit")},
        {"date", Option(argc, argv, "--date")},
        {"command", "bench/cuda/run_gpu.sh " + suite + " (make bundle)"},
        {"context", {{"notes", moves ? kMoveNotes : kPoolNotes}}},
        {"ceilings", ordered_json::object()},
        {"rows", moves ? MovesRows(only, Option(argc, argv, "--promote-rate")) : PoolRows(only)}};
    if (!file.empty()) std::ofstream(file) << out.dump(1) << "\n";
    return 0;
  }
  const std::vector<float> trace = SurprisalOf(Option(argc, argv, "--surprisal"));
  ordered_json rows = ordered_json::array();
  for (const auto& [batch, kilotokens] :
       {std::pair{1, 1}, {1, 4}, {1, 32}, {1, 128}, {1, 1024}, {8, 128}}) {
    for (const Plan& plan : kPlans) {
      if (kilotokens < 32 && std::strcmp(plan.name, "full") != 0) continue;
      if (!IdOf(plan, batch, kilotokens).starts_with(only)) continue;
      if (plan.spans && trace.empty()) continue;
      Measure(plan, batch, kilotokens, trace, &rows);
    }
  }
  for (const Plan& plan : kPlans) {
    if (std::ranges::find(kFarPlans, std::string_view(plan.name)) == std::end(kFarPlans)) continue;
    if (!(IdOf(plan, 1, 128) + "/host").starts_with(only)) continue;
    MeasureFar(plan, &rows);
  }
  const ordered_json out = {
      {"suite", "cuda-linked"},
      {"device", device.name},
      {"commit", Option(argc, argv, "--commit")},
      {"date", Option(argc, argv, "--date")},
      {"command", "bench/cuda/run_gpu.sh linked dense (make bundle)"},
      {"context",
       {{"notes",
         "one layer of kvs_step_begin, kvs_step_replay, a captured graph of "
         "all layers' append, select "
         "and attend, kvs_step_end, of chess the mean of 320 steps and their selection, of "
         "sentencekv of 320 steps and the sentences that end in them; its boundaries are "
         "reported "
         "for each token: lognormal lengths with a median of 27, at most 100; pages "
         "from the daemon's allocator; "
         "lengths grow a token a step; "
         "32 query heads, 8 KV heads x 128, bf16, pages of 16"}}},
      {"ceilings", ordered_json::object()},
      {"rows", rows}};
  if (!file.empty()) std::ofstream(file) << out.dump(1) << "\n";
  return 0;
}

}  // namespace
}  // namespace kvstrata::cuda

int main(int argc, char** argv) { return kvstrata::cuda::Main(argc, argv); }
