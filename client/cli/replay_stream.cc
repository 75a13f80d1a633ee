// SPDX-License-Identifier: Apache-2.0
#include "client/cli/replay_stream.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>

namespace kvstrata::cli {
namespace {

constexpr int32_t kChunk = 512;  // prefill chunks split at its multiples (ADR 3)

double Milliseconds(std::chrono::steady_clock::duration d) {
  return std::chrono::duration<double, std::milli>(d).count();
}

template <typename T>
std::vector<T> ValuesOf(const std::vector<std::byte>& bytes) {
  std::vector<T> out(bytes.size() / sizeof(T));
  if (!out.empty()) std::memcpy(out.data(), bytes.data(), out.size() * sizeof(T));
  return out;
}

}  // namespace

std::vector<int32_t> InspectedArray::Integers() const {
  return type == KVS_ARRAY_I32 ? ValuesOf<int32_t>(bytes) : std::vector<int32_t>();
}

std::vector<float> InspectedArray::Floats() const {
  return type == KVS_ARRAY_F32 ? ValuesOf<float>(bytes) : std::vector<float>();
}

ReplayStream::ReplayStream(const ReplaySession& session, const Trace& trace,
                           const std::vector<TraceLayer>& layers)
    : session_(session.session()),
      model_(session.model()),
      trace_(trace),
      layers_(layers),
      results_(layers.size()) {
  for (LayerResult& result : results_) {
    result.out.resize(static_cast<size_t>(trace.shape().q_row()));
    result.lse.resize(static_cast<size_t>(trace.shape().query_heads));
  }
}

ReplayStream::~ReplayStream() {
  if (sequence_ != 0) kvs_sequence_close(session_, sequence_);
}

Status ReplayStream::Open(const std::string& plan) {
  KVS_RETURN_IF_ERROR(
      FromAbi(kvs_sequence_open(session_, model_, plan.c_str(), trace_.tokens().data(),
                                static_cast<size_t>(trace_.shape().prompt), &sequence_, &held_)));
  position_ = static_cast<int32_t>(held_);
  return OkStatus();
}

Result<ReplayStream::StepHandle> ReplayStream::Begin(int32_t first, int32_t n) {
  const kvs_step_member member{sequence_, trace_.tokens().data() + first, static_cast<uint32_t>(n)};
  kvs_step* step = nullptr;
  KVS_RETURN_IF_ERROR(FromAbi(kvs_step_begin(session_, &member, 1, nullptr, &step, nullptr)));
  return StepHandle(step);
}

kvs_tensor ReplayStream::Rows(const uint16_t* base, int64_t first, int32_t n, int32_t heads) const {
  const int32_t d = trace_.shape().head_dim;
  return {.data = base + first * heads * d,
          .dtype = KVS_BF16,
          .heads = heads,
          .head_dim = d,
          .tokens = n};
}

Status ReplayStream::Append(kvs_step* step, const TraceLayer& layer, int32_t first, int32_t n) {
  const auto index = static_cast<int32_t>(&layer - layers_.data());
  const kvs_tensor k = Rows(layer.k, first, n, trace_.shape().kv_heads);
  const kvs_tensor v = Rows(layer.v, first, n, trace_.shape().kv_heads);
  return FromAbi(kvs_append(step, index, &k, &v));
}

// Plans may watch the prompt's last queries (observation windows); what they attend to is dropped.
Status ReplayStream::AttendTail(kvs_step* step, int32_t index, int32_t first, int32_t n) {
  const TraceShape& shape = trace_.shape();
  const int64_t row = first - (shape.prompt - shape.tail);
  std::vector<float> dropped(static_cast<size_t>(n * shape.q_row()));
  const kvs_tensor q = Rows(layers_[static_cast<size_t>(index)].q, row, n, shape.query_heads);
  const kvs_tensor out{dropped.data(), KVS_F32, shape.query_heads, shape.head_dim, n, 0, 0};
  return FromAbi(kvs_attend(step, index, &q, &out, nullptr));
}

Status ReplayStream::PrefillChunk() {
  const TraceShape& shape = trace_.shape();
  const int32_t tail_first = shape.prompt - shape.tail;
  const bool in_tail = position_ >= tail_first;
  int32_t end = std::min(shape.prompt, (position_ / kChunk + 1) * kChunk);
  if (!in_tail) end = std::min(end, tail_first);
  const int32_t n = end - position_;
  const auto start = Clock::now();
  KVS_ASSIGN_OR_RETURN(StepHandle step, Begin(position_, n));
  for (const TraceLayer& layer : layers_) {
    KVS_RETURN_IF_ERROR(Append(step.get(), layer, position_, n));
    if (!in_tail) continue;
    const auto index = static_cast<int32_t>(&layer - layers_.data());
    KVS_RETURN_IF_ERROR(AttendTail(step.get(), index, position_, n));
  }
  KVS_RETURN_IF_ERROR(FromAbi(kvs_step_end(step.release(), nullptr)));
  position_ = end;
  if (prefilled()) KVS_RETURN_IF_ERROR(EndPrompt());
  prefill_ms_ += Milliseconds(Clock::now() - start);
  return OkStatus();
}

Status ReplayStream::EndPrompt() {
  const auto data = [](const auto& series) { return series.empty() ? nullptr : series.data(); };
  KVS_RETURN_IF_ERROR(
      FromAbi(kvs_report(session_, sequence_, 0, static_cast<uint32_t>(trace_.shape().prompt),
                         data(trace_.surprisal()), nullptr, data(trace_.boundary()))));
  KVS_RETURN_IF_ERROR(FromAbi(kvs_prefill_done(session_, sequence_)));
  // Workers may still segment or compress; a replay measures the plan, not the wait for it.
  return FromAbi(kvs_settle(session_, sequence_));
}

Status ReplayStream::ReadPositions(kvs_step* step, int32_t tokens, LayerResult* result) {
  const TraceShape& shape = trace_.shape();
  uint32_t groups = 0;
  KVS_RETURN_IF_ERROR(FromAbi(kvs_selection_groups(step, 0, &groups)));
  const auto n = static_cast<int64_t>(groups);
  if (n != 1 && n != shape.kv_heads && n != shape.query_heads) {
    return Internal("REPLAY_GROUPS", "the library selects for " + std::to_string(n) +
                                         " groups of heads; known are 1, kv_heads = " +
                                         std::to_string(shape.kv_heads) +
                                         " and query_heads = " + std::to_string(shape.query_heads));
  }
  result->positions.resize(groups);
  for (uint32_t g = 0; g < groups; ++g) {
    KVS_RETURN_IF_ERROR(ReadGroup(step, g, tokens, &result->positions[g]));
  }
  return OkStatus();
}

// What follows indexes the trace's rows by these positions.
Status ReplayStream::ReadGroup(kvs_step* step, uint32_t group, int32_t tokens,
                               std::vector<int32_t>* out) {
  out->resize(static_cast<size_t>(tokens));
  size_t n = 0;
  KVS_RETURN_IF_ERROR(
      FromAbi(kvs_selection(step, 0, group, KVS_TOKENS, out->data(), out->size(), &n)));
  out->resize(std::min(n, out->size()));
  const bool ascending = std::ranges::adjacent_find(*out, std::greater_equal<>()) == out->end();
  if (n <= static_cast<size_t>(tokens) && ascending &&
      (out->empty() || (out->front() >= 0 && out->back() < tokens))) {
    return OkStatus();
  }
  return Internal("REPLAY_POSITIONS",
                  "group " + std::to_string(group) + " lists " + std::to_string(n) +
                      " positions that do not ascend within 0 .. " + std::to_string(tokens - 1));
}

Status ReplayStream::ReadCost(kvs_step* step, LayerResult* result) {
  result->cost = {};
  result->cost.size = sizeof(result->cost);
  return FromAbi(kvs_attend_cost(step, 0, &result->cost));
}

Status ReplayStream::Step(int32_t t, bool want_positions) {
  const TraceShape& shape = trace_.shape();
  const int32_t position = shape.prompt + t;
  auto start = Clock::now();
  KVS_ASSIGN_OR_RETURN(StepHandle step, Begin(position, 1));
  Clock::duration spent = Clock::now() - start;
  for (size_t i = 0; i < layers_.size(); ++i) {
    LayerResult& result = results_[i];
    const kvs_tensor q = Rows(layers_[i].q, shape.tail + t, 1, shape.query_heads);
    const kvs_tensor out{result.out.data(), KVS_F32, shape.query_heads, shape.head_dim, 1, 0, 0};
    start = Clock::now();
    KVS_RETURN_IF_ERROR(Append(step.get(), layers_[i], position, 1));
    KVS_RETURN_IF_ERROR(
        FromAbi(kvs_attend(step.get(), static_cast<int32_t>(i), &q, &out, result.lse.data())));
    spent += Clock::now() - start;
    KVS_RETURN_IF_ERROR(ReadCost(step.get(), &result));
    if (want_positions) KVS_RETURN_IF_ERROR(ReadPositions(step.get(), position + 1, &result));
  }
  start = Clock::now();
  KVS_RETURN_IF_ERROR(FromAbi(kvs_step_end(step.release(), nullptr)));
  step_ms_ = Milliseconds(spent + (Clock::now() - start));
  position_ = position + 1;
  return ReportStep(t);
}

// What the step's logits gave; counts at the next begin.
Status ReplayStream::ReportStep(int32_t t) {
  const auto position = static_cast<size_t>(trace_.shape().prompt + t);
  const float* entropy =
      trace_.entropy().empty() ? nullptr : trace_.entropy().data() + static_cast<size_t>(t);
  const uint8_t* boundary =
      trace_.boundary().empty() ? nullptr : trace_.boundary().data() + position;
  const float* surprisal = trace_.step_surprisal().empty()
                               ? nullptr
                               : trace_.step_surprisal().data() + static_cast<size_t>(t);
  if (entropy == nullptr && boundary == nullptr && surprisal == nullptr) return OkStatus();
  return FromAbi(kvs_report(session_, sequence_, static_cast<uint32_t>(position), 1, surprisal,
                            entropy, boundary));
}

Result<std::string> ReplayStream::PlanText() const {
  std::array<char, 4096> text{};
  KVS_RETURN_IF_ERROR(FromAbi(kvs_sequence_plan(session_, sequence_, text.data(), text.size())));
  return std::string(text.data());
}

Result<std::string> ReplayStream::StatusText() const {
  std::array<char, 4096> text{};
  KVS_RETURN_IF_ERROR(FromAbi(kvs_sequence_status(session_, sequence_, text.data(), text.size())));
  return std::string(text.data());
}

Result<InspectedArray> ReplayStream::Inspect(const char* name) const {
  kvs_array array{};
  KVS_RETURN_IF_ERROR(FromAbi(kvs_inspect(session_, sequence_, name, &array)));
  InspectedArray out{array.type, {}, std::vector<std::byte>(array.bytes)};
  out.shape.assign(array.shape, array.shape + std::clamp(array.dims, 0, 4));
  if (array.bytes > 0) std::memcpy(out.bytes.data(), array.data, array.bytes);
  kvs_array_free(&array);
  return out;
}

std::optional<int64_t> ReplayStream::Selections() const {
  const auto array = Inspect("selections");
  if (!array.ok()) return std::nullopt;
  const std::vector<int32_t> values = array->Integers();
  if (values.empty()) return std::nullopt;
  return values.back();
}

Result<std::vector<PageTier>> ReplayStream::Pages() const {
  const TraceShape& shape = trace_.shape();
  std::vector<kvs_page> pages(static_cast<size_t>(shape.tokens() / shape.page_tokens + 1024));
  size_t n = 0;
  uint64_t version = 0;
  KVS_RETURN_IF_ERROR(
      FromAbi(kvs_page_table(session_, sequence_, pages.data(), pages.size(), &n, &version)));
  pages.resize(std::min(n, pages.size()));
  std::vector<PageTier> tiers;
  for (const kvs_page& page : pages) {
    tiers.push_back(page.address == nullptr ? PageTier::kAbsent
                    : page.tier == 1        ? PageTier::kHost
                                            : PageTier::kDevice);
  }
  return tiers;
}

Status FromAbi(int code) {
  if (code == KVS_OK) return OkStatus();
  return {static_cast<Code>(code), kvs_error_reason(), kvs_error_message()};
}

Result<ReplaySession> ReplaySession::Attach(const std::string& socket,
                                            std::chrono::milliseconds timeout, const Trace& trace,
                                            size_t layers, bool keep) {
  kvs_attach_options attach{};
  attach.size = sizeof(attach);
  attach.client_name = "kvstrata replay";
  attach.timeout_ms = static_cast<uint32_t>(timeout.count());
  kvs_session* session = nullptr;
  KVS_RETURN_IF_ERROR(FromAbi(kvs_attach(socket.c_str(), &attach, &session)));
  ReplaySession out(session);
  KVS_RETURN_IF_ERROR(out.Register(trace.shape(), layers, keep));
  return out;
}

// A digest of its own per session: pages of one replay are never taken for another's, or for a
// model's.
Status ReplaySession::Register(const TraceShape& shape, size_t layers, bool keep) {
  std::random_device random;
  const std::string digest = std::string(keep ? "" : "session:") +
                             "replay:" + std::to_string(getpid()) + ":" + std::to_string(random()) +
                             ":" + std::to_string(random());
  const std::string name = "replay";
  kvs_model_desc desc{};
  desc.size = sizeof(desc);
  desc.name = name.c_str();
  desc.digest = digest.c_str();
  desc.layers = static_cast<int32_t>(layers);
  desc.query_heads = shape.query_heads;
  desc.kv_heads = shape.kv_heads;
  desc.head_dim = shape.head_dim;
  desc.page_tokens = shape.page_tokens;
  desc.dtype = KVS_BF16;
  desc.keys_pre_rope = shape.rotary.dim > 0 ? 1 : 0;
  desc.rope_theta = shape.rotary.theta;
  desc.rope_dim = shape.rotary.dim;
  desc.rope_interleaved = shape.rotary.interleaved ? 1 : 0;
  desc.ranks = 1;
  return FromAbi(kvs_model_register(session_.get(), &desc, &model_));
}

}  // namespace kvstrata::cli
