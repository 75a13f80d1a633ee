// A client library without a daemon for replay tests: keeps what is appended, attends in double,
// and refuses what the C ABI's contract refuses. Plans: "full", and "first:K" (positions [0, K) and
// the query's own). The prompt of the second and later sequences is held up to its last full page.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "client/cli/trace.h"
#include "kvstrata/kvstrata.h"

struct kvs_session {
  kvs_model_desc model{};
};
struct FakeSequence {
  int first = -1;  // -1: full
  std::vector<int32_t> tokens;
  std::vector<std::vector<float>> k, v;  // per layer
  uint32_t reported = 0;
  bool prefill_done = false;
};
struct kvs_step {
  FakeSequence* sequence = nullptr;
  std::vector<int32_t> tokens;
  std::vector<bool> appended;
  std::vector<int32_t> positions;
};

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

std::vector<int32_t> Chosen(const FakeSequence& s, int32_t n) {
  std::vector<int32_t> out;
  for (int32_t i = 0; i < n; ++i) {
    if (s.first < 0 || i < s.first || i == n - 1) out.push_back(i);
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
  for (int c = 0; c < d; ++c) out[c] = static_cast<float>(sum[c] / l);
  return static_cast<float>(m + std::log(l));
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
  const std::string text = plan;
  if (text.starts_with("first:")) s.first = std::stoi(text.substr(6));
  if (s.first < 0 && text != "full") return Fail(KVS_INVALID_ARGUMENT, "PLAN_UNKNOWN", text);
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
int kvs_sequence_plan(kvs_session*, kvs_sequence, char* text, size_t capacity) {
  strncpy(text, "fake{}", capacity);
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
    step->positions = Chosen(*step->sequence, n);
    for (int h = 0; h < heads; ++h) {
      const int row = t * heads + h;
      const float sum = AttendHead(*step->sequence, layer, h / group,
                                   static_cast<const uint16_t*>(q->data) + row * d, step->positions,
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

int kvs_selection_groups(kvs_step*, uint32_t, uint32_t* groups) {
  *groups = 1;
  return KVS_OK;
}
int kvs_selection(kvs_step* step, uint32_t, uint32_t, int, int32_t* out, size_t capacity,
                  size_t* n) {
  *n = step->positions.size();
  std::copy_n(step->positions.begin(), std::min(*n, capacity), out);
  return KVS_OK;
}
int kvs_page_table(kvs_session*, kvs_sequence sequence, kvs_page* out, size_t capacity, size_t* n,
                   uint64_t*) {
  *n = (sequences[sequence].tokens.size() + 15) / 16;
  for (size_t i = 0; i < std::min(*n, capacity); ++i)
    out[i] = {nullptr, i == 0, 0};  // page 0: host
  return KVS_OK;
}
int kvs_inspect(kvs_session*, kvs_sequence sequence, const char*, kvs_array* out) {
  const FakeSequence& s = sequences[sequence];
  if (s.first < 0) return Fail(KVS_NOT_FOUND, "INSPECT_UNKNOWN", "full selects nothing");
  auto* value = new int32_t(static_cast<int32_t>(s.tokens.size()));  // "one selection a token"
  *out = {KVS_ARRAY_I32, 1, {1}, value, sizeof(*value)};
  return KVS_OK;
}
void kvs_array_free(kvs_array* array) { delete static_cast<int32_t*>(array->data); }

}  // extern "C"
