// SPDX-License-Identifier: Apache-2.0
// The C ABI (include/kvstrata/kvstrata.h) over a Session: finds the handle, checks the arguments,
// calls, and keeps the thread's last error. The same for both transports. Sequences:
// abi_sequences.cc.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "client/abi/abi_call.h"
#include "client/include/kvstrata/kvstrata.h"
#include "client/session.h"

namespace kvstrata::client {

std::string DefaultSocket() {
  const auto env = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  if (std::string path = env("KVSTRATA_SOCKET"); !path.empty()) return path;
  if (const std::string dir = env("XDG_RUNTIME_DIR"); !dir.empty()) {
    return dir + "/kvstrata/kvstratad.sock";
  }
  if (geteuid() == 0) return "/run/kvstrata/kvstratad.sock";
  return "/tmp/kvstrata-" + std::to_string(geteuid()) + "/kvstratad.sock";
}

namespace {

constexpr uint64_t kMaxMembers = uint64_t{1} << 16;  // members of a batch

// Plain arrays: nothing to construct in a thread that never fails, nothing to destroy at its end.
thread_local char last_message[1024];
thread_local char last_reason[64];

template <size_t N>
void Keep(char (&to)[N], std::string_view text) {
  const size_t n = std::min(text.size(), N - 1);
  std::memcpy(to, text.data(), n);
  to[n] = '\0';
}

}  // namespace

int CodeOf(const Status& status) {
  if (status.ok()) return KVS_OK;
  Keep(last_message, status.message());
  Keep(last_reason, status.reason());
  return static_cast<int>(status.code());
}

Result<std::string_view> ReadView(std::string_view field, const char* text, size_t limit) {
  if (text == nullptr) return std::string_view();
  const size_t bytes = strnlen(text, limit + 1);
  KVS_RETURN_IF_ERROR(InRange(field, static_cast<int64_t>(bytes), 0, static_cast<int64_t>(limit)));
  return std::string_view(text, bytes);
}

Status CopyOut(std::string_view field, const std::string& from, char* text, size_t capacity) {
  KVS_RETURN_IF_ERROR(NotNull(field, text));
  if (capacity == 0) {
    return InvalidArgument("ARGUMENT_RANGE", "capacity 0; at least 1 byte is needed");
  }
  const size_t n = std::min(from.size(), capacity - 1);
  std::memcpy(text, from.data(), n);
  text[n] = '\0';
  return OkStatus();
}

namespace {

class StepUse {
 public:
  explicit StepUse(StepHandle* step)
      : step_(step), alone_(!step->busy.test_and_set(std::memory_order_acquire)) {}
  ~StepUse() {
    if (alone_) step_->busy.clear(std::memory_order_release);
  }
  StepUse(const StepUse&) = delete;
  StepUse& operator=(const StepUse&) = delete;
  bool alone() const { return alone_; }

 private:
  StepHandle* const step_;
  const bool alone_;
};

template <typename F>
int WithStep(kvs_step* handle, F body) {
  return Guarded([&]() -> Status {
    KVS_RETURN_IF_ERROR(NotNull("step", handle));
    KVS_ASSIGN_OR_RETURN(const std::shared_ptr<StepHandle> found, FindStep(handle));
    const StepUse use(found.get());
    if (!use.alone()) {
      return FailedPrecondition("STEP_BUSY", "another thread is inside this step; one at a time");
    }
    if (found->step == nullptr) return FindStep(handle).status();  // another thread ended it
    return body(*found);
  });
}

Status CheckLayer(const StepHandle& step, int32_t layer) {
  return InRange("layer", layer, 0, step.step->geometry().layers - 1);
}

TensorShape KeysOfStep(const SessionStep& s) {
  return {s.tokens(), s.geometry().kv_heads, s.geometry().head_dim};
}
TensorShape QueriesOfStep(const SessionStep& s) {
  return {s.tokens(), s.geometry().query_heads, s.geometry().head_dim};
}

// padding: of the last so many members nothing is kept, their ids neither.
Status CheckMembers(const kvs_step_member* members, size_t n, uint32_t padding, int32_t* codes,
                    std::vector<BatchMember>* batch) {
  KVS_RETURN_IF_ERROR(NotNull("members", members));
  KVS_RETURN_IF_ERROR(
      InRange("n", static_cast<int64_t>(std::min(n, size_t{1} << 62)), 1, kMaxMembers));
  KVS_RETURN_IF_ERROR(InRange("padding", padding, 0, static_cast<int64_t>(n)));
  Status failed;
  uint64_t total = 0;
  for (size_t i = 0; i < n; ++i) {
    const std::string name = "members[" + std::to_string(i) + "]";
    Status status = InRange(name + ".n", members[i].n, 1, kMaxTokens);
    total += members[i].n;
    if (status.ok())
      status = InRange("sum of members[].n", static_cast<int64_t>(total), 1, kMaxTokens);
    codes[i] = static_cast<int32_t>(status.code());
    if (!status.ok() && failed.ok()) failed = status;
    BatchMember& member = batch->emplace_back(BatchMember{members[i].sequence, {}});
    member.padding = i >= n - padding;
    if (members[i].tokens == nullptr || member.padding) {
      member.late = members[i].n;
    } else {
      member.tokens = {members[i].tokens, members[i].n};
    }
  }
  return failed;
}

Status CheckSelection(const StepHandle& step, uint32_t member) {
  if (!step.selected) {
    return FailedPrecondition("NOTHING_SELECTED",
                              "no layer of this step was selected or attended "
                              "yet; call kvs_select or kvs_attend first");
  }
  return InRange("member", member, 0, step.step->members() - 1);
}

// A prompt chunk selects from keys that the same step appended.
Status CheckAppended(const StepHandle& step, int32_t layer) {
  if (step.appended[static_cast<size_t>(layer)]) return OkStatus();
  return FailedPrecondition("LAYER_NOT_APPENDED", "layer " + std::to_string(layer) +
                                                      " has no new keys and values; call "
                                                      "kvs_append for it first");
}

// The first layer that lacks its append, or -1.
int MissingLayer(const StepHandle& step) {
  const auto at = std::find(step.appended.begin(), step.appended.end(), false);
  return at == step.appended.end() ? -1 : static_cast<int>(at - step.appended.begin());
}

Status FillArray(const InspectArray& from, kvs_array* out) {
  if (from.shape.size() > std::size(out->shape)) {
    return Internal("INSPECT_SHAPE", "the array has " + std::to_string(from.shape.size()) +
                                         " dimensions; kvs_array holds 4");
  }
  kvs_array array{};
  array.type = static_cast<int32_t>(from.type);
  array.dims = static_cast<int32_t>(from.shape.size());
  std::copy(from.shape.begin(), from.shape.end(), array.shape);
  array.bytes = from.bytes.size();
  array.data = std::malloc(std::max<size_t>(array.bytes, 1));
  if (array.data == nullptr) throw std::bad_alloc();
  if (array.bytes != 0) std::memcpy(array.data, from.bytes.data(), array.bytes);
  *out = array;
  return OkStatus();
}

}  // namespace
}  // namespace kvstrata::client

using namespace kvstrata;          // NOLINT: this file is the boundary
using namespace kvstrata::client;  // NOLINT

// ---- library ----

int kvs_abi_version(void) { return KVS_ABI_VERSION; }
const char* kvs_version(void) { return KVS_VERSION; }
const char* kvs_transport(void) { return Transport().data(); }
const char* kvs_code_name(int code) { return CodeName(static_cast<Code>(code)).data(); }
const char* kvs_error_message(void) { return last_message; }
const char* kvs_error_reason(void) { return last_reason; }

// ---- session ----

int kvs_attach(const char* socket, const kvs_attach_options* options, kvs_session** out) {
  return Guarded([&]() -> Status {
    KVS_RETURN_IF_ERROR(NotNull("out", out));
    KVS_ASSIGN_OR_RETURN(const AttachOptions read, ReadAttachOptions(socket, options));
    KVS_ASSIGN_OR_RETURN(std::unique_ptr<Session> session, Session::Attach(read));
    *out = AddSession(std::move(session));
    return OkStatus();
  });
}

void kvs_detach(kvs_session* session) {
  (void)Guarded([&]() -> Status {
    EndSession(session);
    return OkStatus();
  });
}

int kvs_ping(kvs_session* session) {
  return WithSession(session, [](Session& s) { return s.Ping(); });
}

int kvs_model_register(kvs_session* session, const kvs_model_desc* desc, kvs_model* out) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_RETURN_IF_ERROR(NotNull("desc", desc));
    KVS_RETURN_IF_ERROR(NotNull("out", out));
    KVS_ASSIGN_OR_RETURN(const ModelSpec spec, ReadModelDesc(*desc));
    KVS_ASSIGN_OR_RETURN(*out, s.RegisterModel(spec));
    return OkStatus();
  });
}

// ---- a step ----

int kvs_step_begin(kvs_session* session, const kvs_step_member* members, size_t n, void* stream,
                   kvs_step** out, int32_t* codes) {
  const kvs_step_options options{sizeof(options), stream, 0, 0};
  return kvs_step_begin_with(session, members, n, &options, out, codes);
}

int kvs_step_begin_with(kvs_session* session, const kvs_step_member* members, size_t n,
                        const kvs_step_options* options, kvs_step** out, int32_t* codes) {
  return Guarded([&]() -> Status {
    kvs_step_options known{};
    if (options != nullptr) {
      KVS_ASSIGN_OR_RETURN(known, Grown("kvs_step_options", options, sizeof(known)));
    }
    KVS_RETURN_IF_ERROR(InRange("reserved", known.reserved, 0, 0));
    KVS_RETURN_IF_ERROR(NotNull("session", session));
    KVS_RETURN_IF_ERROR(NotNull("out", out));
    KVS_ASSIGN_OR_RETURN(std::shared_ptr<SessionHandle> found, FindSession(session));
    std::vector<int32_t> own_codes;
    if (codes == nullptr) {
      own_codes.resize(std::min<size_t>(n, kMaxMembers));
      codes = own_codes.data();
    }
    std::vector<BatchMember> batch;
    KVS_RETURN_IF_ERROR(CheckMembers(members, n, known.padding, codes, &batch));
    KVS_ASSIGN_OR_RETURN(std::unique_ptr<SessionStep> step,
                         found->session->StepBegin(batch, known.stream, codes));
    *out = AddStep(std::move(found), std::move(step));
    return OkStatus();
  });
}

int kvs_late_tokens(kvs_session* session, const kvs_step_member* members, size_t n,
                    int32_t on_gpu) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_RETURN_IF_ERROR(ArrayOf("members", members, n, kMaxMembers));
    KVS_RETURN_IF_ERROR(InRange("on_gpu", on_gpu, 0, 1));
    std::vector<LateIds> late;
    for (size_t i = 0; i < n; ++i) {
      const std::string name = "members[" + std::to_string(i) + "]";
      KVS_RETURN_IF_ERROR(ArrayOf(name + ".tokens", members[i].tokens, members[i].n, kMaxTokens));
      late.push_back({members[i].sequence, members[i].tokens, members[i].n});
    }
    return s.LateTokens(late, on_gpu == 1);
  });
}

int kvs_append(kvs_step* step, int32_t layer, const kvs_tensor* k, const kvs_tensor* v) {
  return WithStep(step, [&](StepHandle& s) -> Status {
    KVS_RETURN_IF_ERROR(CheckLayer(s, layer));
    KVS_ASSIGN_OR_RETURN(const Rows keys, ReadTensor("k", k, KeysOfStep(*s.step)));
    KVS_ASSIGN_OR_RETURN(const Rows values, ReadTensor("v", v, KeysOfStep(*s.step)));
    s.appended[static_cast<size_t>(layer)] = false;  // what an earlier call wrote is overwritten
    KVS_RETURN_IF_ERROR(s.step->Append(layer, keys, values));
    s.appended[static_cast<size_t>(layer)] = true;
    return OkStatus();
  });
}

int kvs_select(kvs_step* step, int32_t layer, const kvs_tensor* q) {
  return WithStep(step, [&](StepHandle& s) -> Status {
    KVS_RETURN_IF_ERROR(CheckLayer(s, layer));
    KVS_RETURN_IF_ERROR(CheckAppended(s, layer));
    KVS_ASSIGN_OR_RETURN(const Rows queries, ReadTensor("q", q, QueriesOfStep(*s.step)));
    KVS_RETURN_IF_ERROR(s.step->Select(layer, queries));
    s.selected = true;
    return OkStatus();
  });
}

int kvs_attend(kvs_step* step, int32_t layer, const kvs_tensor* q, const kvs_tensor* out,
               float* lse) {
  return WithStep(step, [&](StepHandle& s) -> Status {
    KVS_RETURN_IF_ERROR(CheckLayer(s, layer));
    KVS_RETURN_IF_ERROR(CheckAppended(s, layer));
    const TensorShape shape = QueriesOfStep(*s.step);
    KVS_ASSIGN_OR_RETURN(const Rows queries, ReadTensor("q", q, shape));
    KVS_ASSIGN_OR_RETURN(const Rows to, ReadTensor("out", out, shape));
    KVS_RETURN_IF_ERROR(s.step->Attend(
        layer, queries,
        {const_cast<std::byte*>(to.data), to.token_stride, to.head_stride, to.dtype}, lse));
    s.selected = true;
    return OkStatus();
  });
}

int kvs_step_replay(kvs_step* step) {
  return WithStep(step, [](StepHandle& s) -> Status {
    KVS_RETURN_IF_ERROR(s.step->Replay());
    s.appended.assign(s.appended.size(), true);
    s.selected = true;
    return OkStatus();
  });
}

int kvs_step_end(kvs_step* step, void* stream) {
  return WithStep(step, [&](StepHandle& s) -> Status {
    const std::shared_ptr<StepHandle> taken = TakeStep(step);
    std::unique_ptr<SessionStep> ended = std::move(s.step);
    if (!ended->on_gpu()) KVS_RETURN_IF_ERROR(NoStream(stream));
    if (const int layer = MissingLayer(s); layer >= 0) {
      return FailedPrecondition("LAYER_MISSING", "layer " + std::to_string(layer) +
                                                     " was not appended; the step was dropped and "
                                                     "nothing committed");
    }
    return ended->End(stream);
  });
}

void kvs_step_abort(kvs_step* step) {
  (void)Guarded([&]() -> Status {
    (void)TakeStep(step);
    return OkStatus();
  });
}

// ---- imported mode ----

int kvs_tensors_register(kvs_session* session, kvs_model model, int32_t layer,
                         const kvs_block_tensor* keys, const kvs_block_tensor* values) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_ASSIGN_OR_RETURN(const LentTensor k, ReadBlockTensor("keys", keys));
    KVS_ASSIGN_OR_RETURN(const LentTensor v, ReadBlockTensor("values", values));
    return s.RegisterTensors(model, layer, k, v, keys->memory == values->memory);
  });
}

int kvs_blocks_seal(kvs_session* session, kvs_sequence sequence, uint32_t first,
                    const int32_t* blocks, size_t n_blocks, const int32_t* tokens,
                    size_t n_tokens) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_RETURN_IF_ERROR(ArrayOf("blocks", blocks, n_blocks, kMaxTokens));
    KVS_RETURN_IF_ERROR(ArrayOf("tokens", tokens, n_tokens, kMaxTokens));
    return s.SealBlocks(sequence, first, {blocks, n_blocks}, {tokens, n_tokens});
  });
}

int kvs_blocks_acknowledged(kvs_session* session, kvs_sequence sequence, uint32_t* tokens) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_RETURN_IF_ERROR(NotNull("tokens", tokens));
    KVS_ASSIGN_OR_RETURN(*tokens, s.Acknowledged(sequence));
    return OkStatus();
  });
}

int kvs_blocks_load(kvs_session* session, kvs_sequence sequence, uint32_t first,
                    const int32_t* blocks, size_t n_blocks, void* stream) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_RETURN_IF_ERROR(ArrayOf("blocks", blocks, n_blocks, kMaxTokens));
    return s.LoadBlocks(sequence, first, {blocks, n_blocks}, stream);
  });
}

int kvs_selection_groups(kvs_step* step, uint32_t member, uint32_t* groups) {
  return WithStep(step, [&](StepHandle& s) -> Status {
    KVS_RETURN_IF_ERROR(NotNull("groups", groups));
    KVS_RETURN_IF_ERROR(CheckSelection(s, member));
    KVS_ASSIGN_OR_RETURN(*groups, s.step->SelectionGroups(static_cast<int>(member)));
    return OkStatus();
  });
}

int kvs_selection(kvs_step* step, uint32_t member, uint32_t group, int what, int32_t* out,
                  size_t capacity, size_t* n) {
  return WithStep(step, [&](StepHandle& s) -> Status {
    KVS_RETURN_IF_ERROR(NotNull("n", n));
    KVS_RETURN_IF_ERROR(ArrayOf("out", out, capacity, UINT64_MAX));
    KVS_RETURN_IF_ERROR(CheckSelection(s, member));
    const auto m = static_cast<int>(member);
    KVS_ASSIGN_OR_RETURN(const uint32_t groups, s.step->SelectionGroups(m));
    KVS_RETURN_IF_ERROR(InRange("group", group, 0, int64_t{groups} - 1));
    KVS_RETURN_IF_ERROR(InRange("what", what, KVS_TOKENS, KVS_UNITS));
    const auto kind = what == KVS_TOKENS ? SelectionKind::kTokens : SelectionKind::kUnits;
    KVS_ASSIGN_OR_RETURN(*n, s.step->CopySelection(m, group, kind, {out, capacity}));
    return OkStatus();
  });
}

int kvs_attend_cost(kvs_step* step, uint32_t member, kvs_cost* out) {
  return WithStep(step, [&](StepHandle& s) -> Status {
    KVS_RETURN_IF_ERROR(NotNull("out", out));
    KVS_RETURN_IF_ERROR(StructSize("kvs_cost", out, out->size, sizeof(*out)));
    KVS_RETURN_IF_ERROR(CheckSelection(s, member));
    KVS_ASSIGN_OR_RETURN(const StepCost cost, s.step->Cost(static_cast<int>(member)));
    out->rows = cost.rows;
    out->coarse_rows = cost.coarse_rows;
    out->attend_bytes = cost.attend_bytes;
    out->select_bytes = cost.select_bytes;
    return OkStatus();
  });
}

// ---- page tables and intermediate arrays ----

int kvs_page_table(kvs_session* session, kvs_sequence sequence, kvs_page* out, size_t capacity,
                   size_t* n, uint64_t* version) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_RETURN_IF_ERROR(NotNull("n", n));
    KVS_RETURN_IF_ERROR(ArrayOf("out", out, capacity, UINT64_MAX));
    KVS_ASSIGN_OR_RETURN(const PageTable table, s.GetPageTable(sequence));
    for (size_t i = 0; i < std::min(capacity, table.pages.size()); ++i) {
      out[i] = {table.pages[i].address, table.pages[i].tier, table.pages[i].flags};
    }
    *n = table.pages.size();
    if (version != nullptr) *version = table.version;
    return OkStatus();
  });
}

int kvs_inspect(kvs_session* session, kvs_sequence sequence, const char* name, kvs_array* out) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_RETURN_IF_ERROR(NotNull("name", name));
    KVS_RETURN_IF_ERROR(NotNull("out", out));
    KVS_ASSIGN_OR_RETURN(const InspectArray array, s.Inspect(sequence, name));
    return FillArray(array, out);
  });
}

void kvs_array_free(kvs_array* array) {
  if (array == nullptr) return;
  std::free(array->data);
  *array = kvs_array{};
}
