// SPDX-License-Identifier: Apache-2.0
// What the end-to-end tests share: the two libraries as function tables (both transports in one
// process) and a toy engine that drives sequences through them.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/e2e/toy_model.h"

namespace kvstrata::testing {

// The C ABI of one library, by name. RTLD_LOCAL keeps the transports apart.
struct Abi {
#define KVS_ABI_FUNCTIONS(X) \
  X(kvs_attach)              \
  X(kvs_detach)              \
  X(kvs_ping)                \
  X(kvs_model_register)      \
  X(kvs_lookup)              \
  X(kvs_sequence_open)       \
  X(kvs_sequence_fork)       \
  X(kvs_sequence_close)      \
  X(kvs_sequence_open_with)  \
  X(kvs_close_key)           \
  X(kvs_sequence_tokens)     \
  X(kvs_prefill_done)        \
  X(kvs_report)              \
  X(kvs_report_verified)     \
  X(kvs_settle)              \
  X(kvs_sequence_build)      \
  X(kvs_sequence_recompress) \
  X(kvs_work_cancel)         \
  X(kvs_step_begin)          \
  X(kvs_append)              \
  X(kvs_select)              \
  X(kvs_attend)              \
  X(kvs_step_end)            \
  X(kvs_step_abort)          \
  X(kvs_selection_groups)    \
  X(kvs_selection)           \
  X(kvs_page_table)          \
  X(kvs_inspect)             \
  X(kvs_array_free)          \
  X(kvs_error_message)       \
  X(kvs_error_reason)        \
  X(kvs_transport)           \
  X(kvs_sequence_status)     \
  X(kvs_tensors_register) X(kvs_blocks_seal) X(kvs_blocks_acknowledged) X(kvs_blocks_load)
#define X(name) decltype(&::name) name = nullptr;
  KVS_ABI_FUNCTIONS(X)
#undef X

  explicit Abi(const char* library) {
    const auto build = std::filesystem::read_symlink("/proc/self/exe").parent_path().parent_path();
    void* handle = dlopen((build / "lib" / library).c_str(), RTLD_NOW | RTLD_LOCAL);
    EXPECT_NE(handle, nullptr) << dlerror();
#define X(name) name = reinterpret_cast<decltype(&::name)>(dlsym(handle, #name));
    KVS_ABI_FUNCTIONS(X)
#undef X
  }
};

inline const Abi& Linked() {
  static const Abi abi("libkvstrata.so");
  return abi;
}
inline const Abi& Remote() {
  static const Abi abi("libkvstrata_remote.so");
  return abi;
}

// Polls `done` until it holds; false after the deadline. For effects of another process that
// announces nothing (a kernel noticing a death).
inline bool Eventually(const std::function<bool()>& done, int deadline_ms = 10000) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(deadline_ms);
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

// One attached session and its toy model.
class Engine {
 public:
  Engine(const Abi& abi, const std::string& socket, ToyModel model = {})
      : abi_(abi), model_(std::move(model)) {
    kvs_attach_options options{};
    options.size = sizeof(options);
    options.client_name = "e2e";
    code_ = abi_.kvs_attach(socket.c_str(), &options, &session_);
    if (code_ != KVS_OK) return;
    const kvs_model_desc desc = model_.Desc();
    code_ = abi_.kvs_model_register(session_, &desc, &handle_);
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine() { abi_.kvs_detach(session_); }

  int code() const { return code_; }
  const Abi& abi() const { return abi_; }
  const ToyModel& model() const { return model_; }
  kvs_session* session() const { return session_; }
  kvs_model handle() const { return handle_; }
  std::string error() const {
    return std::string(abi_.kvs_error_reason()) + ": " + abi_.kvs_error_message();
  }

  kvs_sequence Open(const char* plan, const std::vector<int32_t>& prompt,
                    uint32_t* held = nullptr) {
    kvs_sequence s = 0;
    uint32_t h = 0;
    code_ = abi_.kvs_sequence_open(session_, handle_, plan, prompt.data(), prompt.size(), &s, &h);
    if (held != nullptr) *held = h;
    return code_ == KVS_OK ? s : 0;
  }

  // begin .. end over `ids` at position `first`; the outputs of every layer, [tokens][Hq][d] each.
  // Empty with code() set when something fails.
  std::vector<std::vector<float>> Run(kvs_sequence s, const std::vector<int32_t>& ids,
                                      uint32_t first) {
    kvs_step* step = Begin(s, ids);
    if (step == nullptr) return {};
    std::vector<std::vector<float>> outs;
    for (int layer = 0; layer < model_.layers; ++layer) {
      outs.push_back(Layer(step, layer, ids, first));
      if (code_ != KVS_OK) {
        abi_.kvs_step_abort(step);
        return {};
      }
    }
    code_ = abi_.kvs_step_end(step, nullptr);
    return code_ == KVS_OK ? outs : std::vector<std::vector<float>>{};
  }

  kvs_step* Begin(kvs_sequence s, const std::vector<int32_t>& ids) {
    const kvs_step_member member{s, ids.data(), static_cast<uint32_t>(ids.size())};
    kvs_step* step = nullptr;
    code_ = abi_.kvs_step_begin(session_, &member, 1, nullptr, &step, nullptr);
    return code_ == KVS_OK ? step : nullptr;
  }

  std::vector<float> Layer(kvs_step* step, int layer, const std::vector<int32_t>& ids,
                           uint32_t first, float* lse = nullptr) {
    const auto k = model_.Rows(ToyModel::kKey, layer, ids, first);
    const auto v = model_.Rows(ToyModel::kValue, layer, ids, first);
    const auto q = model_.Rows(ToyModel::kQuery, layer, ids, first);
    std::vector<float> out(q.size(), NAN);
    const kvs_tensor tk = TensorOf(k, model_.kv_heads, model_.dim);
    const kvs_tensor tv = TensorOf(v, model_.kv_heads, model_.dim);
    const kvs_tensor tq = TensorOf(q, model_.query_heads, model_.dim);
    const kvs_tensor to = TensorOf(out, model_.query_heads, model_.dim);
    code_ = abi_.kvs_append(step, layer, &tk, &tv);
    if (code_ == KVS_OK) code_ = abi_.kvs_attend(step, layer, &tq, &to, lse);
    return out;
  }

  // Opens `prompt`, runs what is not held, ends the prefill.
  kvs_sequence Prefill(const char* plan, const std::vector<int32_t>& prompt) {
    uint32_t held = 0;
    const kvs_sequence s = Open(plan, prompt, &held);
    if (s == 0) return 0;
    Run(s, {prompt.begin() + held, prompt.end()}, held);
    if (code_ == KVS_OK) code_ = abi_.kvs_prefill_done(session_, s);
    return code_ == KVS_OK ? s : 0;
  }

  // Decodes `id` after `history` and compares every layer with full attention in double precision.
  ::testing::AssertionResult DecodesRight(kvs_sequence s, std::vector<int32_t>* history,
                                          int32_t id) {
    const uint32_t first = history->size();
    history->push_back(id);
    const auto outs = Run(s, {id}, first);
    if (outs.empty()) return ::testing::AssertionFailure() << error();
    for (int layer = 0; layer < model_.layers; ++layer) {
      const std::vector<float> want = model_.Expected(layer, *history);
      for (size_t i = 0; i < want.size(); ++i) {
        if (!(std::abs(outs[layer][i] - want[i]) <= 1e-5)) {
          return ::testing::AssertionFailure() << "layer " << layer << " element " << i << ": "
                                               << outs[layer][i] << " for " << want[i];
        }
      }
    }
    return ::testing::AssertionSuccess();
  }

 private:
  const Abi& abi_;
  ToyModel model_;
  kvs_session* session_ = nullptr;
  kvs_model handle_ = 0;
  int code_ = KVS_OK;
};

inline std::vector<int32_t> Prompt(uint32_t n, int32_t seed) {
  std::vector<int32_t> ids(n);
  for (uint32_t i = 0; i < n; ++i)
    ids[i] = static_cast<int32_t>((i * 7919u + seed * 104729u) % 50021);
  return ids;
}

}  // namespace kvstrata::testing
