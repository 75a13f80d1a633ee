// SPDX-License-Identifier: Apache-2.0
// Session: what the C ABI (abi.cc) calls. Two implementations, chosen when a library is linked:
// linked_session.cc (libkvstrata.so: mapped memory, ops in this process) and remote_session.cc
// (libkvstrata_remote.so: every call over gRPC). A class whose state each of them defines itself,
// so nothing is virtual and nothing is forwarded.
//
// What abi.cc has done before it calls: pointers are not null, counts are sane, strings are text,
// tensors fit the step (dtype, heads, head_dim, tokens, strides; strides are filled in), layers are
// in range, handles of sessions and steps are alive, this process is the one that attached. It also
// keeps which layers were appended and selected. What is left to a transport: whether a sequence or
// model exists in this session, and everything that the daemon decides.
//
// Ownership: a Step keeps its Session alive only through abi.cc; it is destroyed first.
// Threads: Session from any thread; one Step, and one sequence, from one thread at a time (a
// violation that is noticed is FAILED_PRECONDITION SEQUENCE_BUSY).
// Errors: SEQUENCE_UNKNOWN, MODEL_UNKNOWN, DAEMON_GONE (UNAVAILABLE), DEADLINE (DEADLINE_EXCEEDED),
// and those that a method names. Cost: a method that says "local" does not cross to the daemon on
// the linked transport; all others wait for it at most AttachOptions::timeout.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "kernels/pages/page_view.h"
#include "kernels/select/selector.h"
#include "kernels/step/step.h"

namespace kvstrata::client {

struct AttachOptions {
  std::string socket;       // PATH; never empty (DefaultSocket was applied)
  std::string device_uuid;  // "" any
  std::string client_name;  // never empty; at most 63 bytes
  std::string backend;      // "" KVSTRATA_BACKEND, else the daemon's
  uint32_t threads = 0;     // 0: all cores
  std::chrono::milliseconds timeout{5000};
};

struct ModelSpec {
  std::string name, digest, adapter;  // at most 63, 79, 63 bytes
  Geometry geometry;                  // valid (kernels' Validate); rotary: keys come before it
  int32_t rank = 0, ranks = 1;
  std::vector<int32_t> boundary_tokens;
};

// kvs_open_options.
struct OpenOptions {
  uint32_t max_held = 0;  // 0: no limit
  bool only_reported = false;
  uint32_t reserve_tokens = 0;
  bool private_pages = false;
  std::string_view key;  // key of the caller's choosing; "": none
};

// Whether a call ended because the daemon did not answer in time. It may do all the same what it
// was asked for, later.
inline bool TimedOut(const Status& status) {
  return status.code() == Code::kDeadlineExceeded && status.reason() == "DEADLINE";
}
// What steps and others that need to know what a sequence holds answer once `what` of it timed out.
inline Status Unanswered(uint64_t sequence, std::string_view what) {
  return FailedPrecondition("SEQUENCE_UNANSWERED",
                            "the daemon did not answer " + std::string(what) + " of sequence " +
                                std::to_string(sequence) +
                                " in time and may have done it; close it and open another");
}

// kvs_capacity_result.
struct Room {
  uint64_t tokens = 0, bytes = 0;
};
struct PoolCapacity {
  Room free, after_eviction, limit;
};
struct Capacity {
  PoolCapacity device, host;
  uint32_t open_tokens = 0;
};

// The open that a look-up is to answer for; texts of the caller's.
struct LookupQuery {
  std::string_view plan;         // "": raw pages of any device
  std::string_view device_uuid;  // that of the session that will open; "": this one's
  uint32_t lease_ms = 0;         // with a plan: what is answered stays held so long
};

// The tokens of one tier need not be consecutive.
struct LookedUp {
  uint32_t held_tokens = 0, indexed_tokens = 0;
  uint32_t device_tokens = 0, host_tokens = 0, disk_tokens = 0;
};

struct Opened {
  uint64_t sequence = 0;
  uint32_t held_tokens = 0;
  uint32_t indexed_tokens = 0;
  uint32_t surprisal_tokens = 0, boundary_tokens = 0;  // leading ones of which they are known
};

struct BatchMember {
  uint64_t sequence = 0;
  std::span<const int32_t> tokens;  // ids of the new tokens; valid during StepBegin only
  uint32_t late = 0;                // in their place: so many, whose ids come by LateTokens
  bool padding = false;             // computed, and not kept

  uint32_t n() const { return static_cast<uint32_t>(tokens.size()) + late; }
};

// Ids that kvs_late_tokens brings.
struct LateIds {
  uint64_t sequence = 0;
  const int32_t* tokens = nullptr;
  uint32_t n = 0;
};

// The keys or the values of one layer in tensors of the engine's (kvs_block_tensor). What of it the
// daemon checks is not checked here. Strides in bytes.
struct LentTensor {
  int32_t kind = 0;  // kvs_memory_kind
  int fd = -1;
  std::array<uint8_t, 64> ipc{};
  uint64_t bytes = 0, offset = 0;
  std::byte* address = nullptr;
  int32_t dtype = 0, blocks = 0, block_tokens = 0, heads = 0, head_dim = 0;
  int64_t block_stride = 0, slot_stride = 0, head_stride = 0, dim_stride = 0;
};

struct Built {
  uint32_t indexed_tokens = 0, built_blocks = 0, extents = 0;
};

struct PageAddress {
  const void* address = nullptr;  // null: released, extents hold its rows
  uint32_t tier = 0;              // 0 device, 1 host
  uint32_t flags = 0;             // shm::PageFlags
};
struct PageTable {
  uint64_t version = 0;
  std::vector<PageAddress> pages;
};

enum class SelectionKind { kTokens, kUnits };

// "linked" or "remote": of the library that this code was linked into.
std::string_view Transport();

// KVSTRATA_SOCKET, else $XDG_RUNTIME_DIR/kvstrata/kvstratad.sock, else /run/kvstrata/kvstratad.sock
// for root, else /tmp/kvstrata-UID/kvstratad.sock. Defined in abi.cc, for both transports.
std::string DefaultSocket();

// UNIMPLEMENTED STREAM unless it is null: what a session without a GPU says.
inline Status NoStream(const void* stream) {
  if (stream == nullptr) return OkStatus();
  return Unimplemented("STREAM",
                       "stream is not NULL, but this session's pages are no GPU's; pass NULL");
}

// The open step of a batch. Destroying it without End drops the new tokens.
class SessionStep {
 public:
  struct State;  // the transport's
  explicit SessionStep(std::unique_ptr<State> state);
  ~SessionStep();
  // In a child of fork(): forgets everything, touches nothing shared. Destroy it afterwards.
  void AbandonAfterFork();

  const Geometry& geometry() const;
  int32_t tokens() const;  // sum of new tokens
  int members() const;

  // Shapes as in kernels/step/step.h. All four are local.
  Status Append(int layer, const Rows& k, const Rows& v);
  Status Select(int layer, const Rows& q);
  Status Attend(int layer, const Rows& q, const MutableRows& out, float* lse);
  // The caller launches a graph that it captured of a step of this shape: all layers are appended
  // and attended. FAILED_PRECONDITION GRAPH_STALE.
  Status Replay();
  // Commits. Called at most once, when every layer was appended; destroy the step afterwards.
  Status End(void* stream);

  // Whether tensors may be a GPU's memory, and the step runs on the stream of its begin.
  bool on_gpu() const;

  // These tell of the last layer selected or attended; on a GPU they wait for it. REQUIRES: there
  // is one, and member < members().
  Result<uint32_t> SelectionGroups(int member) const;
  // Writes at most out.size() of the list and returns its length. REQUIRES: group < groups.
  Result<size_t> CopySelection(int member, uint32_t group, SelectionKind kind,
                               std::span<int32_t> out) const;
  // The cost of the last layer attended. REQUIRES: as SelectionGroups.
  Result<StepCost> Cost(int member) const;

 private:
  std::unique_ptr<State> state_;
};

class Session {
 public:
  struct State;  // the transport's
  // DAEMON_UNREACHABLE (UNAVAILABLE), SOCKET_INVALID, VERSION_MISMATCH, BACKEND_UNKNOWN, or what
  // the daemon refused with.
  static Result<std::unique_ptr<Session>> Attach(const AttachOptions& options);
  explicit Session(std::unique_ptr<State> state);
  // Detaches; waits for the daemon's answer at most the timeout.
  ~Session();
  // In a child of fork(): closes descriptors, tells the daemon nothing. Destroy it afterwards.
  void AbandonAfterFork();

  Status Ping();
  Result<uint64_t> RegisterModel(const ModelSpec& spec);

  Result<Opened> Open(uint64_t model, std::string_view plan, std::span<const int32_t> tokens,
                      const OpenOptions& options);
  // PLAN_*, PARAMETERS_*, DEVICE_UNKNOWN.
  Result<LookedUp> Lookup(uint64_t model, const LookupQuery& query,
                          std::span<const int32_t> tokens);
  // PLAN_*.
  Result<Capacity> CountCapacity(uint64_t model, std::string_view plan);
  // The committed content, also while a step of the sequence is open.
  Result<Opened> Fork(uint64_t sequence);
  // Not in an open step. TRUNCATE_* (kvs_sequence_truncate).
  Status Truncate(uint64_t sequence, uint32_t tokens);
  // SEQUENCE_BUSY while a step with it is open.
  Status Close(uint64_t sequence);
  // The key may be of any session of this user. KEY_UNKNOWN.
  Status CloseKey(std::string_view key);
  // As CloseKey; done before its owner's next call with it. KEY_UNKNOWN, TRUNCATE_*.
  Status TruncateKey(std::string_view key, uint32_t tokens);
  Result<uint32_t> Tokens(uint64_t sequence);         // local
  Result<std::string> StatusText(uint64_t sequence);  // local
  Result<std::string> PlanText(uint64_t sequence);    // local
  // A plan's text with every option; the configuration's named plans are known too. PLAN_*.
  Result<std::string> CanonicalPlan(std::string_view plan);
  Status PrefillDone(uint64_t sequence);  // local
  Status ReportVerified(uint64_t sequence, uint32_t first, uint32_t n, bool equal);
  Status Report(uint64_t sequence, uint32_t first, uint32_t n, const float* surprisal,
                const float* entropy, const uint8_t* boundary);  // local
  Status Settle(uint64_t sequence);
  // plan "": its own. What the daemon refuses with; SEQUENCE_BUSY in a step.
  Result<Built> Build(uint64_t sequence, std::string_view plan);
  // Waits as Settle does.
  Status Recompress(uint64_t sequence);
  // May be called while another thread waits for the work.
  Status CancelWork(uint64_t sequence);

  // Imported mode (kvstrata.h); remote: UNIMPLEMENTED REMOTE_IMPORT. same_memory: both tensors lie
  // in the memory of `keys`.
  Status RegisterTensors(uint64_t model, int32_t layer, const LentTensor& keys,
                         const LentTensor& values, bool same_memory);
  Status SealBlocks(uint64_t sequence, uint32_t first, std::span<const int32_t> blocks,
                    std::span<const int32_t> tokens);
  Result<uint32_t> Acknowledged(uint64_t sequence);
  Status LoadBlocks(uint64_t sequence, uint32_t first, std::span<const int32_t> blocks,
                    void* stream);

  // REQUIRES: members not empty. Members of two models: MODELS_MIXED; twice the same sequence:
  // SEQUENCE_BUSY. codes (not null) [members.size()]: per member, a Code as int. Local when the
  // published table has room. `stream`: of the GPU that holds the pages; without one, NoStream.
  Result<std::unique_ptr<SessionStep>> StepBegin(std::span<const BatchMember> members, void* stream,
                                                 int32_t* codes);
  // kvs_late_tokens. on_gpu: the ids lie there. Remote: UNIMPLEMENTED.
  Status LateTokens(std::span<const LateIds> members, bool on_gpu);

  Result<PageTable> GetPageTable(uint64_t sequence);                       // local
  Result<InspectArray> Inspect(uint64_t sequence, std::string_view name);  // local

 private:
  std::unique_ptr<State> state_;
};

}  // namespace kvstrata::client
