// SPDX-License-Identifier: Apache-2.0
// A client library without a daemon for replay tests: keeps what is appended, attends in double,
// and refuses what the C ABI's contract refuses. The prompt of the second and later sequences is
// held up to its last full page. Plans:
//   full
//   first:K    positions [0, K) and the query's own; one list for all heads
//   heads:K    query head h attends [0, K + 10 h) and its own: a list per query head
//   lossy:K    first:K from stored rows whose values came back 1.25 times too large: no pages, and
//              log-sum-exps that are ln 2 too large, as coarse rows make them; costs 80 bytes a row
//   rest:K     the same from raw rows
//   quest, chess, tokenselect (with any options) are first:256, :128 and :64; mosaickv{..} is lossy
#include "tests/cli/fake_client.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "client/cli/trace.h"
#include "kvstrata/kvstrata.h"

struct kvs_session {
  kvs_model_desc model{};
};
struct FakePlan {
  std::string text = "full{codec = \"raw\"}";
  int first = -1;  // -1: full
  bool per_head = false;
  bool pages = true;
  float values = 1, lse = 0;  // factor of outputs, added to log-sum-exps
  uint64_t coarse_rows = 0, row_bytes = 256;
};
struct FakeSequence {
  FakePlan plan;
  std::vector<int32_t> tokens;
  std::vector<std::vector<float>> k, v;  // per layer
  uint32_t reported = 0;
  bool prefill_done = false;
};
struct kvs_step {
  FakeSequence* sequence = nullptr;
  std::vector<int32_t> tokens;
  std::vector<bool> appended;
  std::vector<std::vector<int32_t>> positions;  // per group
};

FakeLibrary fake_library;

namespace {

thread_local std::string last_reason, last_message;
std::map<kvs_sequence, FakeSequence> sequences;
kvs_session the_session;
FakeSequence held_prompt;

int Fail(int code, const char* reason, const std::string& message) {
  last_reason = reason;
  last_message = message;
  return code;
}

int Row() { return the_session.model.kv_heads * the_session.model.head_dim; }

void Take(const kvs_tensor* t, std::vector<float>* to) {
  const auto* from = static_cast<const uint16_t*>(t->data);
  for (int i = 0; i < t->tokens * t->heads * t->head_dim; ++i) {
    to->push_back(kvstrata::cli::FromBf16(from[i]));
  }
}

FakePlan Lossy(int first, const std::string& text) {
  FakePlan plan{.text = text, .first = first};
  plan.values = 1.25f;
  plan.lse = std::log(2.0f);
  plan.coarse_rows = 3;
  plan.row_bytes = 80;
  return plan;
}

// False: unknown.
bool ParseFakePlan(const std::string& text, FakePlan* out) {
  const std::string raw = "{codec = \"raw\", min_tokens = 0}";
  const auto is = [&text](const char* name) { return text.starts_with(name); };
  const auto number = [&text] { return std::stoi(text.substr(text.find(':') + 1)); };
  *out = {};
  if (text == "full") return true;
  if (is("first:")) {
    *out = {.text = "first{codec = \"raw\", rest = \"drop\"}", .first = number()};
  } else if (is("heads:")) {
    *out = {.text = "heads{codec = \"raw\"}", .first = number(), .per_head = true};
  } else if (is("lossy:")) {
    *out = Lossy(number(), "lossy{codec = \"packed\"}");
    out->pages = false;
  } else if (is("rest:")) {
    *out = Lossy(number(), "rest{codec = \"raw\", rest = \"mean\"}");
  } else if (is("mosaickv")) {
    *out = Lossy(64, "mosaickv{codec = \"packed\", strategy = \"search\"}");
    out->pages = false;
  } else if (is("quest") || is("chess") || is("tokenselect")) {
    *out = {.text = text.substr(0, text.find('{')) + raw,
            .first = is("quest")   ? 256
                     : is("chess") ? 128
                                   : 64};
  } else {
    return false;
  }
  return true;
}

std::vector<int32_t> Chosen(const FakePlan& plan, int head, int32_t n) {
  const int first = plan.first + (plan.per_head ? 10 * head : 0);
  std::vector<int32_t> out;
  for (int32_t i = 0; i < n; ++i) {
    if (plan.first < 0 || i < first || i == n - 1) out.push_back(i);
  }
  return out;
}

// One query head over the chosen rows of its KV head.
float AttendHead(const FakeSequence& s, int layer, int kv_head, const uint16_t* q,
                 const std::vector<int32_t>& rows, float* out) {
  const int d = the_session.model.head_dim;
  std::vector<double> scores, sum(static_cast<size_t>(d));
  const auto at = [&](int32_t row) { return static_cast<size_t>(row * Row() + kv_head * d); };
  double m = -INFINITY, l = 0;
  for (const int32_t row : rows) {
    double dot = 0;
    for (int c = 0; c < d; ++c)
      dot += double{kvstrata::cli::FromBf16(q[c])} * s.k[layer][at(row) + c];
    scores.push_back(dot / std::sqrt(d));
    m = std::max(m, scores.back());
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    const double w = std::exp(scores[i] - m);
    l += w;
    for (int c = 0; c < d; ++c) sum[c] += w * s.v[layer][at(rows[i]) + c];
  }
  for (int c = 0; c < d; ++c) out[c] = static_cast<float>(sum[c] / l) * s.plan.values;
  return static_cast<float>(m + std::log(l)) + s.plan.lse;
}

}  // namespace

extern "C" {

const char* kvs_error_message(void) { return last_message.c_str(); }
const char* kvs_error_reason(void) { return last_reason.c_str(); }

int kvs_attach(const char*, const kvs_attach_options*, kvs_session** out) {
  sequences.clear();
  held_prompt = {};
  *out = &the_session;
  return KVS_OK;
}
void kvs_detach(kvs_session*) {}

int kvs_model_register(kvs_session* session, const kvs_model_desc* desc, kvs_model* out) {
  session->model = *desc;
  *out = 7;
  return KVS_OK;
}

int kvs_sequence_open(kvs_session*, kvs_model, const char* plan, const int32_t* tokens, size_t n,
                      kvs_sequence* out, uint32_t* held) {
  FakeSequence s;
  if (!fake_library.refused_plan.empty() &&
      std::string(plan).starts_with(fake_library.refused_plan)) {
    return Fail(KVS_UNIMPLEMENTED, "PLAN_UNIMPLEMENTED", std::string(plan) + ": not in this build");
  }
  if (!ParseFakePlan(plan, &s.plan)) return Fail(KVS_INVALID_ARGUMENT, "PLAN_UNKNOWN", plan);
  fake_library.opened.push_back(plan);
  fake_library.prompt_tokens.push_back(static_cast<unsigned>(n));
  const auto layers = static_cast<size_t>(the_session.model.layers);
  s.k.resize(layers);
  s.v.resize(layers);
  *held = held_prompt.tokens.empty() ? 0 : static_cast<uint32_t>((n - 1) / 16 * 16);
  s.tokens.assign(tokens, tokens + *held);
  for (size_t i = 0; i<layers&& * held> 0; ++i) {
    s.k[i].assign(held_prompt.k[i].begin(), held_prompt.k[i].begin() + *held * Row());
    s.v[i].assign(held_prompt.v[i].begin(), held_prompt.v[i].begin() + *held * Row());
  }
  *out = sequences.size() + 1;
  sequences[*out] = s;
  return KVS_OK;
}
int kvs_sequence_close(kvs_session*, kvs_sequence) { return KVS_OK; }
int kvs_sequence_plan(kvs_session*, kvs_sequence sequence, char* text, size_t capacity) {
  strncpy(text, sequences[sequence].plan.text.c_str(), capacity);
  return KVS_OK;
}
int kvs_sequence_status(kvs_session*, kvs_sequence, char* text, size_t capacity) {
  strncpy(text, "ok", capacity);
  return KVS_OK;
}
int kvs_prefill_done(kvs_session*, kvs_sequence sequence) {
  FakeSequence& s = sequences[sequence];
  s.prefill_done = true;
  if (held_prompt.tokens.empty()) held_prompt = s;
  return KVS_OK;
}
int kvs_settle(kvs_session*, kvs_sequence) { return KVS_OK; }
int kvs_report(kvs_session*, kvs_sequence sequence, uint32_t first, uint32_t n, const float*,
               const float*, const uint8_t*) {
  FakeSequence& s = sequences[sequence];
  if (first != s.reported || first + n > s.tokens.size()) {
    return Fail(KVS_INVALID_ARGUMENT, "REPORT_ORDER", "a gap");
  }
  s.reported = first + n;
  return KVS_OK;
}

int kvs_step_begin(kvs_session*, const kvs_step_member* members, size_t, void*, kvs_step** out,
                   int32_t*) {
  FakeSequence& s = sequences[members->sequence];
  const size_t end = s.tokens.size() + members->n;
  if (!s.prefill_done && s.tokens.size() / 512 != (end - 1) / 512) {
    return Fail(KVS_INVALID_ARGUMENT, "CHUNK", "crosses a multiple of 512");
  }
  auto* step = new kvs_step;
  step->sequence = &s;
  step->tokens.assign(members->tokens, members->tokens + members->n);
  step->appended.resize(static_cast<size_t>(the_session.model.layers));
  *out = step;
  return KVS_OK;
}
int kvs_append(kvs_step* step, int32_t layer, const kvs_tensor* k, const kvs_tensor* v) {
  if (step->appended[layer] || k->tokens != static_cast<int>(step->tokens.size())) {
    return Fail(KVS_INVALID_ARGUMENT, "APPEND", "twice, or another number of tokens");
  }
  step->appended[layer] = true;
  Take(k, &step->sequence->k[layer]);
  Take(v, &step->sequence->v[layer]);
  return KVS_OK;
}
int kvs_attend(kvs_step* step, int32_t layer, const kvs_tensor* q, const kvs_tensor* out,
               float* lse) {
  if (!step->appended[layer]) return Fail(KVS_FAILED_PRECONDITION, "ATTEND", "not appended");
  const int heads = the_session.model.query_heads, d = the_session.model.head_dim;
  const int group = heads / the_session.model.kv_heads;
  for (int t = 0; t < q->tokens; ++t) {
    const auto n = static_cast<int32_t>(step->sequence->tokens.size()) + t + 1;
    const FakePlan& plan = step->sequence->plan;
    step->positions.clear();
    for (int h = 0; h < (plan.per_head ? heads : 1); ++h) {
      step->positions.push_back(Chosen(plan, h, n));
    }
    for (int h = 0; h < heads; ++h) {
      const int row = t * heads + h;
      const auto& rows = step->positions[plan.per_head ? h : 0];
      const float sum = AttendHead(*step->sequence, layer, h / group,
                                   static_cast<const uint16_t*>(q->data) + row * d, rows,
                                   static_cast<float*>(const_cast<void*>(out->data)) + row * d);
      if (lse != nullptr) lse[row] = sum;
    }
  }
  return KVS_OK;
}
int kvs_step_end(kvs_step* step, void*) {
  const bool whole =
      std::find(step->appended.begin(), step->appended.end(), false) == step->appended.end();
  step->sequence->tokens.insert(step->sequence->tokens.end(), step->tokens.begin(),
                                step->tokens.end());
  delete step;
  return whole ? KVS_OK
               : Fail(KVS_FAILED_PRECONDITION, "LAYER_MISSING", "not every layer was appended");
}
void kvs_step_abort(kvs_step* step) { delete step; }

int kvs_selection_groups(kvs_step* step, uint32_t, uint32_t* groups) {
  *groups = static_cast<uint32_t>(step->positions.size());
  return KVS_OK;
}
int kvs_selection(kvs_step* step, uint32_t, uint32_t group, int, int32_t* out, size_t capacity,
                  size_t* n) {
  const std::vector<int32_t>& positions = step->positions[group];
  *n = positions.size();
  std::copy_n(positions.begin(), std::min(*n, capacity), out);
  if (fake_library.list_backwards) std::reverse(out, out + std::min(*n, capacity));
  return KVS_OK;
}
int kvs_attend_cost(kvs_step* step, uint32_t, kvs_cost* out) {
  if (out->size != sizeof(kvs_cost)) return Fail(KVS_INVALID_ARGUMENT, "SIZE", "cost.size");
  const FakePlan& plan = step->sequence->plan;
  out->rows = 0;
  for (const auto& list : step->positions) out->rows += list.size();
  out->coarse_rows = plan.coarse_rows;
  out->attend_bytes = plan.row_bytes * (out->rows + out->coarse_rows);
  out->select_bytes = plan.first < 0 ? 0 : 1000;
  return KVS_OK;
}
int kvs_page_table(kvs_session*, kvs_sequence sequence, kvs_page* out, size_t capacity, size_t* n,
                   uint64_t*) {
  static const char memory = 0;
  const FakeSequence& s = sequences[sequence];
  *n = (s.tokens.size() + 15) / 16;
  for (size_t i = 0; i < std::min(*n, capacity); ++i) {
    out[i] = {s.plan.pages ? &memory : nullptr, i == 0, 0};  // page 0: host
  }
  return KVS_OK;
}
int kvs_inspect(kvs_session*, kvs_sequence sequence, const char* name, kvs_array* out) {
  const FakeSequence& s = sequences[sequence];
  const std::string what = name;
  const auto give = [out](int type, std::vector<int64_t> shape, const void* data, size_t bytes) {
    *out = {type, static_cast<int32_t>(shape.size()), {}, std::malloc(bytes), bytes};
    std::copy(shape.begin(), shape.end(), out->shape);
    std::memcpy(out->data, data, bytes);
    return static_cast<int>(KVS_OK);
  };
  if (what == "selections" && s.plan.first >= 0) {
    const auto value = static_cast<int32_t>(s.tokens.size());  // one selection a token
    return give(KVS_ARRAY_I32, {1}, &value, sizeof(value));
  }
  const bool packed = s.plan.text.starts_with("mosaickv") && s.prefill_done;
  if (what == "strategies" && packed) {  // one segment, three layers
    const int32_t values[] = {16, 1, 8, 16, 1, 8, 24, 2, 16};
    return give(KVS_ARRAY_I32, {1, 3, 3}, values, sizeof(values));
  }
  if (what == "losses" && packed && !fake_library.losses.empty()) {
    const auto rows = static_cast<int64_t>(fake_library.losses.size() / 4);
    return give(KVS_ARRAY_F32, {rows, 4}, fake_library.losses.data(),
                fake_library.losses.size() * sizeof(float));
  }
  return Fail(KVS_NOT_FOUND, "INSPECT_UNKNOWN", "no array '" + what + "'");
}
void kvs_array_free(kvs_array* array) { std::free(array->data); }

}  // extern "C"
