// SPDX-License-Identifier: Apache-2.0
// kvstrata for C++20: a header-only wrapper over the C ABI (kvstrata.h, where every call is
// described). Owns what it names: a Session detaches, a Sequence closes, a Step aborts unless End
// was called. Nothing throws but std::bad_alloc: what can fail returns a Result.
//
//     auto session = kvs::Session::Attach();                     // the default daemon
//     if (!session) return Report(session.error());
//     auto model = session->Register({.name = "tiny", .digest = "sha256:...", .layers = 2, ...});
//     auto sequence = session->Open(*model, "quest{budget = 1024}", prompt);
//     auto step = session->Begin(*sequence, ids);
//     for (int layer = 0; layer < layers; ++layer) {
//       step->Append(layer, k, v);
//       step->Attend(layer, q, out);
//     }
//     if (auto done = step->End(); !done) return Report(done.error());
//
// Ownership: a Sequence or Step may outlive its Session; its calls then fail and its destructor
// does nothing. Threads: as kvstrata.h says. Cost: nothing but the calls.
#ifndef KVSTRATA_CLIENT_H_
#define KVSTRATA_CLIENT_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "kvstrata/kvstrata.h"

namespace kvs {

// Why a call failed.
struct Error {
  int code = KVS_OK;    // a kvs_code
  std::string reason;   // stable, for programs: "PLAN_UNKNOWN"
  std::string message;  // the field, its value, what to do

  // The calling thread's last failed kvs_ call.
  static Error Last(int code) { return {code, kvs_error_reason(), kvs_error_message()}; }
  std::string ToString() const {
    return std::string(kvs_code_name(code)) + " " + reason + ": " + message;
  }
};

// A T, or the Error that says why there is none. Reading the wrong one is undefined, as for
// std::expected.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<1>, std::move(value)) {}  // NOLINT: a return value
  Result(Error error) : state_(std::in_place_index<0>, std::move(error)) {}  // NOLINT: same

  explicit operator bool() const { return state_.index() == 1; }
  const Error& error() const { return *std::get_if<0>(&state_); }
  T& operator*() & { return *std::get_if<1>(&state_); }
  const T& operator*() const& { return *std::get_if<1>(&state_); }
  T&& operator*() && { return std::move(*std::get_if<1>(&state_)); }
  T* operator->() { return std::get_if<1>(&state_); }
  const T* operator->() const { return std::get_if<1>(&state_); }

 private:
  std::variant<Error, T> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}  // NOLINT: a return value
  // From a kvs_ function's return value.
  static Result Of(int code) { return code == KVS_OK ? Result() : Result(Error::Last(code)); }

  explicit operator bool() const { return error_.code == KVS_OK; }
  const Error& error() const { return error_; }

 private:
  Error error_;
};

using Model = kvs_model;

struct ModelDesc {
  std::string name, digest, adapter;
  int layers = 0, query_heads = 0, kv_heads = 0, head_dim = 0;
  int page_tokens = 16;
  kvs_dtype dtype = KVS_BF16;
  std::vector<int32_t> boundary_tokens;
  // Keys and queries come before rotary embedding; the others say of which (kvs_model_desc).
  bool keys_pre_rope = false;
  double rope_theta = 0;
  int rope_dim = 0;
  bool rope_interleaved = false;
  double scale = 0;  // factor of the logits; 0: 1 / sqrt(head_dim)
};

// [tokens][heads][head_dim], contiguous unless strides (bytes) are given.
struct Tensor : kvs_tensor {
  Tensor(const void* at, kvs_dtype type, int n_tokens, int n_heads, int dim,
         int64_t token_bytes = 0, int64_t head_bytes = 0)
      : kvs_tensor{at, type, n_heads, dim, n_tokens, token_bytes, head_bytes} {}
  Tensor(const float* at, int n_tokens, int n_heads, int dim)
      : Tensor(at, KVS_F32, n_tokens, n_heads, dim) {}
};

// A sequence of a session; closed with this object.
class Sequence {
 public:
  Sequence(kvs_session* session, const kvs_opened& opened)
      : session_(session), id_(opened.sequence), opened_(opened) {}
  Sequence(Sequence&& o) noexcept
      : session_(o.session_), id_(std::exchange(o.id_, 0)), opened_(o.opened_) {}
  Sequence& operator=(Sequence&& o) noexcept {
    std::swap(session_, o.session_);
    std::swap(id_, o.id_);
    std::swap(opened_, o.opened_);
    return *this;
  }
  ~Sequence() {
    if (id_ != 0) kvs_sequence_close(session_, id_);
  }

  kvs_sequence id() const { return id_; }
  // Leading tokens that were there already when it was opened.
  uint32_t held() const { return opened_.held; }
  // What else there was (kvs_opened); of a fork nothing.
  const kvs_opened& opened() const { return opened_; }

  Result<uint32_t> Tokens() const {
    uint32_t tokens = 0;
    if (const int rc = kvs_sequence_tokens(session_, id_, &tokens); rc != 0) return Error::Last(rc);
    return tokens;
  }
  Result<std::string> Status() const { return Text(kvs_sequence_status); }
  Result<std::string> Plan() const { return Text(kvs_sequence_plan); }
  Result<Sequence> Fork() const {
    kvs_sequence child = 0;
    if (const int rc = kvs_sequence_fork(session_, id_, &child); rc != 0) return Error::Last(rc);
    return Sequence(session_, kvs_opened{sizeof(kvs_opened), child, 0, 0, 0, 0});
  }
  // Takes back the tokens from position `tokens` on.
  Result<void> Truncate(uint32_t tokens) {
    return Result<void>::Of(kvs_sequence_truncate(session_, id_, tokens));
  }
  Result<void> PrefillDone() { return Result<void>::Of(kvs_prefill_done(session_, id_)); }
  Result<void> Settle() { return Result<void>::Of(kvs_settle(session_, id_)); }
  // What a plan ("": its own) keeps beside the committed tokens, made now.
  Result<kvs_build_result> Build(const std::string& plan = "") {
    kvs_build_result built{};
    built.size = sizeof(built);
    const char* const text = plan.empty() ? nullptr : plan.c_str();
    const int code = kvs_sequence_build(session_, id_, text, &built);
    if (code != KVS_OK) return Error::Last(code);
    return built;
  }
  Result<void> Recompress() { return Result<void>::Of(kvs_sequence_recompress(session_, id_)); }
  // Cancels builds and recompression, also while another thread waits for them.
  Result<void> CancelWork() { return Result<void>::Of(kvs_work_cancel(session_, id_)); }
  // Empty spans are not reported; the others have one value for each position from `first` on.
  Result<void> Report(uint32_t first, std::span<const float> surprisal,
                      std::span<const float> entropy, std::span<const uint8_t> boundary = {}) {
    const size_t n = std::max({surprisal.size(), entropy.size(), boundary.size()});
    for (const size_t m : {surprisal.size(), entropy.size(), boundary.size()}) {
      if (m == 0 || m == n) continue;
      return Error{KVS_INVALID_ARGUMENT, "REPORT_LENGTH", "the series have different lengths"};
    }
    const auto at = [](auto s) { return s.empty() ? nullptr : s.data(); };
    return Result<void>::Of(kvs_report(session_, id_, first, static_cast<uint32_t>(n),
                                       at(surprisal), at(entropy), at(boundary)));
  }
  // Imported mode (kvstrata.h).
  Result<void> Seal(uint32_t first, std::span<const int32_t> blocks,
                    std::span<const int32_t> tokens) {
    return Result<void>::Of(kvs_blocks_seal(session_, id_, first, blocks.data(), blocks.size(),
                                            tokens.data(), tokens.size()));
  }
  Result<uint32_t> Acknowledged() const {
    uint32_t tokens = 0;
    if (const int rc = kvs_blocks_acknowledged(session_, id_, &tokens); rc != 0) {
      return Error::Last(rc);
    }
    return tokens;
  }
  Result<void> Load(uint32_t first, std::span<const int32_t> blocks, void* stream = nullptr) {
    return Result<void>::Of(
        kvs_blocks_load(session_, id_, first, blocks.data(), blocks.size(), stream));
  }
  Result<void> Close() {
    return Result<void>::Of(kvs_sequence_close(session_, std::exchange(id_, 0)));
  }

 private:
  Result<std::string> Text(int (*call)(kvs_session*, kvs_sequence, char*, size_t)) const {
    std::array<char, 4096> text;
    if (const int rc = call(session_, id_, text.data(), text.size()); rc != 0) {
      return Error::Last(rc);
    }
    return std::string(text.data());
  }

  kvs_session* session_;
  kvs_sequence id_;
  kvs_opened opened_;
};

// An open step; dropped with this object unless End was called.
class Step {
 public:
  explicit Step(kvs_step* step) : step_(step) {}
  Step(Step&& o) noexcept : step_(std::exchange(o.step_, nullptr)) {}
  Step& operator=(Step&& o) noexcept {
    std::swap(step_, o.step_);
    return *this;
  }
  ~Step() { kvs_step_abort(step_); }

  Result<void> Append(int layer, const Tensor& k, const Tensor& v) {
    return Result<void>::Of(kvs_append(step_, layer, &k, &v));
  }
  Result<void> Select(int layer, const Tensor& q) {
    return Result<void>::Of(kvs_select(step_, layer, &q));
  }
  Result<void> Attend(int layer, const Tensor& q, const Tensor& out, float* lse = nullptr) {
    return Result<void>::Of(kvs_attend(step_, layer, &q, &out, lse));
  }
  // Commits. The step is over, also on error.
  Result<void> End() {
    return Result<void>::Of(kvs_step_end(std::exchange(step_, nullptr), nullptr));
  }
  // Positions (KVS_TOKENS) or units (KVS_UNITS) of the last layer selected or attended.
  Result<std::vector<int32_t>> Selection(uint32_t member, uint32_t group, int what) const {
    std::vector<int32_t> out;
    for (size_t n = 64;;) {
      out.resize(n);
      const size_t room = n;
      const int rc = kvs_selection(step_, member, group, what, out.data(), room, &n);
      if (rc != 0) return Error::Last(rc);
      out.resize(std::min(n, room));
      if (n <= room) return out;
    }
  }
  kvs_step* get() const { return step_; }

 private:
  kvs_step* step_;
};

struct AttachOptions {
  const char* socket = nullptr;
  std::string client_name, backend;
  std::string device_uuid;  // "": the daemon's first
  uint32_t threads = 0, timeout_ms = 0;
};

// kvs_open_options.
struct OpenOptions {
  uint32_t max_held = 0;  // 0: no limit
  bool only_reported = false, private_pages = false;
  uint32_t reserve_tokens = 0;  // 0: none
  std::string key;              // for Session::CloseKey; "": none
};

// kvs_plan_needs: KVS_NEEDS_*, and a line each.
struct PlanNeeds {
  uint32_t flags = 0;
  std::string text;
};

struct Member {
  kvs_sequence sequence = 0;
  std::span<const int32_t> tokens;  // ids of the new tokens
  uint32_t late = 0;                // in their place: so many, whose ids come by LateTokens
};

// An attachment to a daemon; detached with this object.
class Session {
 public:
  static Result<Session> Attach(const AttachOptions& options = {}) {
    kvs_attach_options raw{};
    raw.size = sizeof(raw);
    if (!options.client_name.empty()) raw.client_name = options.client_name.c_str();
    if (!options.device_uuid.empty()) raw.device_uuid = options.device_uuid.c_str();
    if (!options.backend.empty()) raw.backend = options.backend.c_str();
    raw.threads = options.threads;
    raw.timeout_ms = options.timeout_ms;
    kvs_session* session = nullptr;
    if (const int rc = kvs_attach(options.socket, &raw, &session); rc != 0) return Error::Last(rc);
    return Session(session);
  }
  explicit Session(kvs_session* session) : session_(session) {}
  Session(Session&& o) noexcept : session_(std::exchange(o.session_, nullptr)) {}
  Session& operator=(Session&& o) noexcept {
    std::swap(session_, o.session_);
    return *this;
  }
  ~Session() { kvs_detach(session_); }

  Result<void> Ping() { return Result<void>::Of(kvs_ping(session_)); }

  Result<Model> Register(const ModelDesc& m) {
    kvs_model_desc raw{};
    raw.size = sizeof(raw);
    raw.name = m.name.c_str();
    raw.digest = m.digest.c_str();
    raw.adapter = m.adapter.empty() ? nullptr : m.adapter.c_str();
    raw.layers = m.layers;
    raw.query_heads = m.query_heads;
    raw.kv_heads = m.kv_heads;
    raw.head_dim = m.head_dim;
    raw.page_tokens = m.page_tokens;
    raw.dtype = m.dtype;
    raw.keys_pre_rope = m.keys_pre_rope ? 1 : 0;
    raw.rope_theta = m.rope_theta;
    raw.rope_dim = m.rope_dim;
    raw.rope_interleaved = m.rope_interleaved ? 1 : 0;
    raw.scale = m.scale;
    raw.ranks = 1;
    raw.boundary_tokens = m.boundary_tokens.empty() ? nullptr : m.boundary_tokens.data();
    raw.boundary_count = m.boundary_tokens.size();
    Model model = 0;
    if (const int rc = kvs_model_register(session_, &raw, &model); rc != 0) return Error::Last(rc);
    return model;
  }

  // Both structs' sizes are filled in by the caller (kvstrata.h).
  Result<void> RegisterTensors(Model model, int layer, const kvs_block_tensor& keys,
                               const kvs_block_tensor& values) {
    return Result<void>::Of(kvs_tensors_register(session_, model, layer, &keys, &values));
  }

  Result<Sequence> Open(Model model, const std::string& plan, std::span<const int32_t> tokens = {},
                        const OpenOptions& o = {}) {
    const kvs_open_options raw{sizeof(raw),      o.max_held,      o.only_reported,
                               o.reserve_tokens, o.private_pages, o.key.c_str()};
    kvs_opened opened{};
    opened.size = sizeof(opened);
    const int rc = kvs_sequence_open_with(session_, model, plan.c_str(), tokens.data(),
                                          tokens.size(), &raw, &opened);
    if (rc != 0) return Error::Last(rc);
    return Sequence(session_, opened);
  }

  // The sequence that any session of this user opened with that key.
  Result<void> CloseKey(const std::string& key) {
    return Result<void>::Of(kvs_close_key(session_, key.c_str()));
  }
  // Likewise, before its owner's next call with it.
  Result<void> TruncateKey(const std::string& key, uint32_t tokens) {
    return Result<void>::Of(kvs_truncate_key(session_, key.c_str(), tokens));
  }

  // What an open of that plan, on that device ("": this session's), would find now; plan "": raw
  // pages, on whatever device. With a lease the daemon keeps that held so long (kvs_lookup).
  Result<kvs_lookup_result> Lookup(Model model, std::span<const int32_t> tokens,
                                   const std::string& plan = "",
                                   const std::string& device_uuid = "",
                                   uint32_t lease_ms = 0) const {
    const kvs_lookup_options raw{sizeof(raw), plan.empty() ? nullptr : plan.c_str(),
                                 device_uuid.empty() ? nullptr : device_uuid.c_str(), lease_ms, 0};
    kvs_lookup_result found{};
    found.size = sizeof(found);
    const int rc = kvs_lookup(session_, model, &raw, tokens.data(), tokens.size(), &found);
    if (rc != 0) return Error::Last(rc);
    return found;
  }

  // How many tokens of the model, with the plan's index, there is room for now.
  Result<kvs_capacity_result> Capacity(Model model, const std::string& plan = "full") const {
    kvs_capacity_result room{};
    room.size = sizeof(room);
    const int rc = kvs_capacity(session_, model, plan.c_str(), &room);
    if (rc != 0) return Error::Last(rc);
    return room;
  }

  Result<PlanNeeds> Needs(const std::string& plan) const {
    std::array<char, 4096> text;
    PlanNeeds needs;
    const int rc = kvs_plan_needs(session_, plan.c_str(), &needs.flags, text.data(), text.size());
    if (rc != 0) return Error::Last(rc);
    needs.text = text.data();
    return needs;
  }

  // padding: of the last so many members nothing is kept (kvs_step_options).
  Result<Step> Begin(std::span<const Member> members, uint32_t padding = 0) {
    std::vector<kvs_step_member> raw;
    for (const Member& m : members) {
      const auto n = static_cast<uint32_t>(m.tokens.size());
      raw.push_back({m.sequence, m.tokens.data(), n > 0 ? n : m.late});
    }
    const kvs_step_options options{sizeof(options), nullptr, padding, 0};
    kvs_step* step = nullptr;
    const int rc = kvs_step_begin_with(session_, raw.data(), raw.size(), &options, &step, nullptr);
    if (rc != 0) return Error::Last(rc);
    return Step(step);
  }
  // kvs_late_tokens of host memory.
  Result<void> LateTokens(std::span<const Member> members) {
    std::vector<kvs_step_member> raw;
    for (const Member& m : members) {
      raw.push_back({m.sequence, m.tokens.data(), static_cast<uint32_t>(m.tokens.size())});
    }
    const int rc = kvs_late_tokens(session_, raw.data(), raw.size(), 0);
    if (rc != 0) return Error::Last(rc);
    return {};
  }
  Result<Step> Begin(const Sequence& sequence, std::span<const int32_t> tokens) {
    const Member member{sequence.id(), tokens};
    return Begin({&member, 1});
  }

  kvs_session* get() const { return session_; }

 private:
  kvs_session* session_;
};

}  // namespace kvs

#endif  // KVSTRATA_CLIENT_H_
