// SPDX-License-Identifier: Apache-2.0
// The C ABI's sequences, plans, look-up and capacity (include/kvstrata/kvstrata.h), as abi.cc has
// the rest.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "client/abi/abi_call.h"
#include "client/include/kvstrata/kvstrata.h"
#include "client/session.h"
#include "kernels/plan/plan_needs.h"

namespace kvstrata::client {
namespace {

// Reorder: beams as forks. Both transports.

Status Check(std::span<const uint64_t> sequences, std::span<const uint32_t> parents) {
  for (size_t i = 0; i < parents.size(); ++i) {
    if (parents[i] < sequences.size()) continue;
    return InvalidArgument("REORDER_PARENT", "parents[" + std::to_string(i) + "] is " +
                                                 std::to_string(parents[i]) +
                                                 "; allowed: below the number of sequences, " +
                                                 std::to_string(sequences.size()));
  }
  std::vector<uint64_t> sorted(sequences.begin(), sequences.end());
  std::ranges::sort(sorted);
  const auto twice = std::ranges::adjacent_find(sorted);
  if (twice == sorted.end()) return OkStatus();
  return InvalidArgument("REORDER_REPEATED", "sequence " + std::to_string(*twice) +
                                                 " is named twice; name each once, and repeat it "
                                                 "in parents");
}

// For each parent, an index into `sequences`, a sequence that continues it: the first that names a
// parent gets the parent itself, later ones forks; sequences that are no parent are closed.
// INVALID_ARGUMENT REORDER_PARENT, REORDER_REPEATED (a sequence that is named twice); errors of
// Fork: then nothing has changed. Threads: all of them are this thread's. Cost: a message to the
// daemon for each fork and each close.
Result<std::vector<uint64_t>> Reorder(Session* session, std::span<const uint64_t> sequences,
                                      std::span<const uint32_t> parents) {
  KVS_RETURN_IF_ERROR(Check(sequences, parents));
  std::vector<bool> continued(sequences.size());
  std::vector<uint64_t> out, forks;
  for (const uint32_t parent : parents) {
    if (!continued[parent]) {
      continued[parent] = true;
      out.push_back(sequences[parent]);
      continue;
    }
    const Result<Opened> fork = session->Fork(sequences[parent]);
    if (!fork.ok()) {
      for (const uint64_t made : forks) (void)session->Close(made);
      return fork.status();
    }
    forks.push_back(fork->sequence);
    out.push_back(fork->sequence);
  }
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (!continued[i]) KVS_RETURN_IF_ERROR(session->Close(sequences[i]));
  }
  return out;
}

constexpr size_t kMaxReordered = size_t{1} << 16;

constexpr bool Same(uint32_t abi, uint32_t ours) { return abi == ours; }
static_assert(Same(KVS_NEEDS_TOKEN_IDS, kNeedTokenIds) &&
              Same(KVS_NEEDS_PREFILL_DONE, kNeedPrefillDone) &&
              Same(KVS_NEEDS_SURPRISAL, kNeedSurprisal) && Same(KVS_NEEDS_ENTROPY, kNeedEntropy) &&
              Same(KVS_NEEDS_BOUNDARY, kNeedBoundary) &&
              Same(KVS_NEEDS_PROMPT_QUERIES, kNeedPromptQueries));

Result<std::string_view> ReadPlan(const char* plan) {
  KVS_RETURN_IF_ERROR(NotNull("plan", plan));
  return ReadView("bytes of plan", plan, kMaxPlanBytes);
}

Result<Opened> Open(Session& s, kvs_model model, const char* plan, const int32_t* tokens, size_t n,
                    const OpenOptions& options) {
  KVS_ASSIGN_OR_RETURN(const std::string_view text, ReadPlan(plan));
  KVS_RETURN_IF_ERROR(ArrayOf("tokens", tokens, n, kMaxTokens));
  return s.Open(model, text, {tokens, n}, options);
}

// "": it is null.
Result<std::string_view> ReadKey(const char* key) {
  constexpr size_t kMaxKey = 63;
  return ReadView("bytes of key", key, kMaxKey);
}

Result<OpenOptions> ReadOpenOptions(const kvs_open_options* options) {
  if (options == nullptr) return OpenOptions{};
  KVS_ASSIGN_OR_RETURN(
      const kvs_open_options known,
      Grown("kvs_open_options", options, offsetof(kvs_open_options, reserve_tokens)));
  KVS_RETURN_IF_ERROR(InRange("only_reported", known.only_reported, 0, 1));
  KVS_RETURN_IF_ERROR(InRange("private_pages", known.private_pages, 0, 1));
  KVS_ASSIGN_OR_RETURN(const std::string_view key, ReadKey(known.key));
  return OpenOptions{known.max_held, known.only_reported == 1, known.reserve_tokens,
                     known.private_pages == 1, key};
}

constexpr size_t kMaxDeviceBytes = 63;

Result<LookupQuery> ReadLookupOptions(const kvs_lookup_options* caller) {
  LookupQuery query;
  if (caller == nullptr) return query;
  KVS_ASSIGN_OR_RETURN(const kvs_lookup_options options,
                       Grown("kvs_lookup_options", caller, offsetof(kvs_lookup_options, lease_ms)));
  KVS_ASSIGN_OR_RETURN(query.plan, ReadView("bytes of plan", options.plan, kMaxPlanBytes));
  KVS_ASSIGN_OR_RETURN(query.device_uuid,
                       ReadView("bytes of device_uuid", options.device_uuid, kMaxDeviceBytes));
  query.lease_ms = options.lease_ms;
  return query;
}

void Write(const Room& room, kvs_room* out) { *out = {room.tokens, room.bytes}; }

void Write(const PoolCapacity& pool, kvs_pool_capacity* out) {
  Write(pool.free, &out->free);
  Write(pool.after_eviction, &out->after_eviction);
  Write(pool.limit, &out->limit);
}

}  // namespace
}  // namespace kvstrata::client

using namespace kvstrata;          // NOLINT: this file is the boundary
using namespace kvstrata::client;  // NOLINT

// ---- sequences ----

int kvs_sequence_open(kvs_session* session, kvs_model model, const char* plan,
                      const int32_t* tokens, size_t n, kvs_sequence* out, uint32_t* held) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_RETURN_IF_ERROR(NotNull("out", out));
    KVS_ASSIGN_OR_RETURN(const Opened opened, Open(s, model, plan, tokens, n, {}));
    *out = opened.sequence;
    if (held != nullptr) *held = opened.held_tokens;
    return OkStatus();
  });
}

int kvs_sequence_open_with(kvs_session* session, kvs_model model, const char* plan,
                           const int32_t* tokens, size_t n, const kvs_open_options* options,
                           kvs_opened* out) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_RETURN_IF_ERROR(NotNull("out", out));
    KVS_RETURN_IF_ERROR(StructSize("kvs_opened", out, out->size, sizeof(*out)));
    KVS_ASSIGN_OR_RETURN(const OpenOptions read, ReadOpenOptions(options));
    KVS_ASSIGN_OR_RETURN(const Opened opened, Open(s, model, plan, tokens, n, read));
    out->sequence = opened.sequence;
    out->held = opened.held_tokens;
    out->indexed = opened.indexed_tokens;
    out->surprisal_tokens = opened.surprisal_tokens;
    out->boundary_tokens = opened.boundary_tokens;
    return OkStatus();
  });
}

int kvs_close_key(kvs_session* session, const char* key) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_RETURN_IF_ERROR(NotNull("key", key));
    KVS_ASSIGN_OR_RETURN(const std::string_view known, ReadKey(key));
    return s.CloseKey(known);
  });
}

int kvs_truncate_key(kvs_session* session, const char* key, uint32_t tokens) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_RETURN_IF_ERROR(NotNull("key", key));
    KVS_ASSIGN_OR_RETURN(const std::string_view known, ReadKey(key));
    return s.TruncateKey(known, tokens);
  });
}

int kvs_sequence_fork(kvs_session* session, kvs_sequence sequence, kvs_sequence* out) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_RETURN_IF_ERROR(NotNull("out", out));
    KVS_ASSIGN_OR_RETURN(const Opened opened, s.Fork(sequence));
    *out = opened.sequence;
    return OkStatus();
  });
}

int kvs_sequence_truncate(kvs_session* session, kvs_sequence sequence, uint32_t tokens) {
  return WithSession(session, [&](Session& s) { return s.Truncate(sequence, tokens); });
}

int kvs_sequences_reorder(kvs_session* session, const kvs_sequence* sequences, size_t n,
                          const uint32_t* parents, size_t n_parents, kvs_sequence* out) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_RETURN_IF_ERROR(ArrayOf("sequences", sequences, n, kMaxReordered));
    KVS_RETURN_IF_ERROR(ArrayOf("parents", parents, n_parents, kMaxReordered));
    KVS_RETURN_IF_ERROR(ArrayOf("out", out, n_parents, kMaxReordered));
    KVS_ASSIGN_OR_RETURN(const std::vector<uint64_t> all,
                         Reorder(&s, {sequences, n}, {parents, n_parents}));
    std::copy(all.begin(), all.end(), out);
    return OkStatus();
  });
}

int kvs_sequence_close(kvs_session* session, kvs_sequence sequence) {
  return WithSession(session, [&](Session& s) { return s.Close(sequence); });
}

int kvs_sequence_tokens(kvs_session* session, kvs_sequence sequence, uint32_t* tokens) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_RETURN_IF_ERROR(NotNull("tokens", tokens));
    KVS_ASSIGN_OR_RETURN(*tokens, s.Tokens(sequence));
    return OkStatus();
  });
}

int kvs_sequence_status(kvs_session* session, kvs_sequence sequence, char* text, size_t capacity) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_ASSIGN_OR_RETURN(const std::string status, s.StatusText(sequence));
    return CopyOut("text", status, text, capacity);
  });
}

int kvs_sequence_plan(kvs_session* session, kvs_sequence sequence, char* text, size_t capacity) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_ASSIGN_OR_RETURN(const std::string plan, s.PlanText(sequence));
    return CopyOut("text", plan, text, capacity);
  });
}

int kvs_prefill_done(kvs_session* session, kvs_sequence sequence) {
  return WithSession(session, [&](Session& s) { return s.PrefillDone(sequence); });
}

int kvs_report_verified(kvs_session* session, kvs_sequence sequence, uint32_t first, uint32_t n,
                        int32_t equal) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_RETURN_IF_ERROR(InRange("equal", equal, 0, 1));
    return s.ReportVerified(sequence, first, n, equal == 1);
  });
}

int kvs_report(kvs_session* session, kvs_sequence sequence, uint32_t first, uint32_t n,
               const float* surprisal, const float* entropy, const uint8_t* boundary) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_RETURN_IF_ERROR(InRange("first", first, 0, INT32_MAX));
    KVS_RETURN_IF_ERROR(InRange("first + n", int64_t{first} + n, 0, INT32_MAX));
    return s.Report(sequence, first, n, surprisal, entropy, boundary);
  });
}

int kvs_settle(kvs_session* session, kvs_sequence sequence) {
  return WithSession(session, [&](Session& s) { return s.Settle(sequence); });
}

int kvs_plan_needs(kvs_session* session, const char* plan, uint32_t* needs, char* text,
                   size_t capacity) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_RETURN_IF_ERROR(NotNull("needs", needs));
    KVS_ASSIGN_OR_RETURN(const std::string_view given, ReadPlan(plan));
    KVS_ASSIGN_OR_RETURN(const std::string whole, s.CanonicalPlan(given));
    KVS_ASSIGN_OR_RETURN(const Plan parsed, ParsePlan(whole));
    const uint32_t found = NeedsOf(parsed);
    if (text != nullptr) {
      KVS_RETURN_IF_ERROR(CopyOut("text", DescribeNeeds(found), text, capacity));
    }
    *needs = found;
    return OkStatus();
  });
}

int kvs_sequence_build(kvs_session* session, kvs_sequence sequence, const char* plan,
                       kvs_build_result* out) {
  return WithSession(session, [&](Session& s) -> Status {
    if (out != nullptr) {
      KVS_RETURN_IF_ERROR(StructSize("kvs_build_result", out, out->size, sizeof(*out)));
    }
    KVS_ASSIGN_OR_RETURN(const std::string_view text, ReadPlan(plan == nullptr ? "" : plan));
    KVS_ASSIGN_OR_RETURN(const Built built, s.Build(sequence, text));
    if (out == nullptr) return OkStatus();
    out->indexed_tokens = built.indexed_tokens;
    out->built_blocks = built.built_blocks;
    out->extents = built.extents;
    return OkStatus();
  });
}

int kvs_sequence_recompress(kvs_session* session, kvs_sequence sequence) {
  return WithSession(session, [&](Session& s) { return s.Recompress(sequence); });
}

int kvs_work_cancel(kvs_session* session, kvs_sequence sequence) {
  return WithSession(session, [&](Session& s) { return s.CancelWork(sequence); });
}

// ---- what there is of a prompt, and room ----

int kvs_lookup(kvs_session* session, kvs_model model, const kvs_lookup_options* options,
               const int32_t* tokens, size_t n, kvs_lookup_result* out) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_RETURN_IF_ERROR(NotNull("out", out));
    KVS_RETURN_IF_ERROR(StructSize("kvs_lookup_result", out, out->size, sizeof(*out)));
    KVS_RETURN_IF_ERROR(ArrayOf("tokens", tokens, n, kMaxTokens));
    KVS_ASSIGN_OR_RETURN(const LookupQuery query, ReadLookupOptions(options));
    KVS_ASSIGN_OR_RETURN(const LookedUp found, s.Lookup(model, query, {tokens, n}));
    out->held = found.held_tokens;
    out->indexed = found.indexed_tokens;
    out->device_tokens = found.device_tokens;
    out->host_tokens = found.host_tokens;
    out->disk_tokens = found.disk_tokens;
    return OkStatus();
  });
}

int kvs_capacity(kvs_session* session, kvs_model model, const char* plan,
                 kvs_capacity_result* out) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_RETURN_IF_ERROR(NotNull("plan", plan));
    KVS_RETURN_IF_ERROR(NotNull("out", out));
    KVS_RETURN_IF_ERROR(StructSize("kvs_capacity_result", out, out->size, sizeof(*out)));
    KVS_ASSIGN_OR_RETURN(const std::string_view text,
                         ReadView("bytes of plan", plan, kMaxPlanBytes));
    KVS_ASSIGN_OR_RETURN(const Capacity room, s.CountCapacity(model, text));
    Write(room.device, &out->device);
    Write(room.host, &out->host);
    out->open_tokens = room.open_tokens;
    return OkStatus();
  });
}
