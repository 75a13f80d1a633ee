// SPDX-License-Identifier: Apache-2.0
// What the linked transport keeps for a session, a sequence and a step, beside what both transports
// keep (session/session_sequence.h). Internal to linked_*.cc and step.cc; nothing else includes it.
//
// Lock order: Sequence::mu, then SessionState::mu (maps only), then the ring client's.
// A Sequence's mu is held by the call that uses it, taken with try_lock: two threads on one
// sequence are refused, not queued. Between begin and end a step has the sequence by `in_step`
// instead.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "client/include/kvstrata/kvstrata.h"
#include "client/linked/attach.h"
#include "client/linked/gpu_session.h"
#include "client/linked/page_map.h"
#include "client/linked/ring_client.h"
#include "client/linked/staged_blocks.h"
#include "client/session.h"
#include "kernels/step/gpu/cuda_shadow.h"
#include "kernels/step/gpu/cuda_step.h"
#include "kernels/step/step.h"
#include "session/sequence_tables.h"

namespace kvstrata::client {

inline constexpr std::string_view kCudaBackend = "cuda";  // in a Welcome, and where callers choose

// LinkedMemory: the TableMemory of a linked session: arenas that this process mapped, and a table
// grows by a request over the ring.
//
// Ownership: borrows all. Threads: any. Trust: entries are checked against their arenas. Cost: the
// first use of an arena maps it; one whose descriptor is still on its way is waited for, at most
// `timeout`.
class LinkedMemory final : public TableMemory {
 public:
  LinkedMemory(PageMap* arenas, Connection* connection, RingClient* ring, const Gpu& gpu,
               std::chrono::milliseconds timeout)
      : arenas_(*arenas), connection_(*connection), ring_(*ring), gpu_(gpu), timeout_(timeout) {}

  // As PageMap::Resolve.
  Result<std::byte*> Resolve(const shm::PageEntry& entry, uint64_t bytes) override;
  bool Writable(const shm::PageEntry& entry) override { return arenas_.Writable(entry); }
  Status Grow(const TableClaim& claim) override;
  bool on_gpu() const override { return gpu_.ops != nullptr; }
  Status Read(std::byte* to, const std::byte* from, uint64_t bytes) override;

 private:
  PageMap& arenas_;
  Connection& connection_;
  RingClient& ring_;
  const Gpu gpu_;
  const std::chrono::milliseconds timeout_;
};

struct Sequence : SessionSequence {
  std::string plan_text;

  std::mutex mu;
  Status unanswered;      // Unanswered, of a truncation or a fork
  bool imported = false;  // its pages are filled by the daemon: it runs no steps
  // Blocks of it that the daemon may still read, in order, each up to position `end`.
  struct Staged {
    uint32_t end = 0;
    std::vector<int32_t> blocks;
    std::shared_ptr<StagedBlocks> home;
  };
  std::deque<Staged> staged;
  Status import_failed;          // found while looking after `staged`: the next seal's answer
  bool surprisal_begun = false;  // an imported one's: some was reported behind what was held
  bool in_step = false;
  CudaStep* gpu_step = nullptr;        // the open step, on a GPU
  int32_t step_tokens = 0;             // length after the open step
  bool forked_in_step = false;         // the pages that the step writes are shared since then
  std::unique_ptr<CudaShadow> shadow;  // for audited steps on a GPU; null before the first one
  bool shadow_waits = false;           // `deferred` has its sample

  // What the daemon is to be told once the GPU has finished a step, in order.
  struct Deferred {
    int reader_slot = -1;  // the step's to wait for (GpuSession); -1: none but those before
    uint64_t number = 0;
    shm::MessageType type = shm::kPad;  // kPad: nothing is told
    std::vector<std::byte> message;
    uint32_t missing = 0;  // token ids at the message's end that have not come (LateTokens)
    uint32_t audit = 0;    // not 0: told is what `shadow` measured for it of the step at `position`
    int32_t position = 0;
  };
  std::deque<Deferred> deferred;
  uint32_t late_tokens = 0;  // at the end of the committed ones: their ids have not come
};

// The tensors of a model that this session lends.
struct ImportedModel {
  struct Layer {
    LentTensor keys, values;
  };
  std::vector<Layer> layers;
  std::shared_ptr<StagedBlocks> staged;  // null: the daemon reads the tensors themselves
};

struct Session::State {
  // Constant after Attach.
  AttachOptions options;
  PageMap arenas;
  std::unique_ptr<Connection> connection;
  std::unique_ptr<RingClient> ring;
  const Backend* backend = nullptr;  // null with a GPU
  Executor* executor = nullptr;
  Gpu gpu;
  std::unique_ptr<GpuSession> gpu_session;  // null without a GPU
  std::unique_ptr<LinkedMemory> memory;
  std::unique_ptr<SequenceTables> tables;

  std::mutex mu;  // guards the maps
  struct RegisteredModel {
    Geometry geometry;
    std::shared_ptr<const std::vector<int32_t>> boundary_tokens;  // ascending
  };
  std::unordered_map<uint64_t, RegisteredModel> models;
  std::unordered_map<uint64_t, std::shared_ptr<Sequence>> sequences;
  std::unordered_map<std::string, Plan> plans;  // by text: PlanOf
  std::unordered_map<uint64_t, ImportedModel> imported_models;
  std::atomic<uint32_t> next_descriptor{1};  // not the map's

  Status ChooseBackend();
  // Makes what reads the session's tables; after the backend was chosen.
  void OpenTables();

  // SequenceTables::Enter; returns the reader slot, to be given to Leave or left by the GPU.
  Result<int> Enter(std::span<const TableClaim> claims, int32_t* codes);
  void Leave(int slot) { tables->Leave(slot); }
  // An epoch in which what is committed can be read; -1: nothing is to be left.
  Result<int> EnterToRead(Sequence* s);
  // Copies from the GPU, and waits for it.
  DeviceRead Reader() const;

  Result<std::shared_ptr<Sequence>> Find(uint64_t sequence);
  Status ClosePrompt(Sequence* s);
  Status Truncate(Sequence* s, uint32_t tokens);
  // What another session asked by the sequence's key, as if its owner had called Truncate: not in a
  // step, nor while ids are missing.
  Status TruncateAsAsked(Sequence* s);
  // Brings index rows and buckets up to the committed tokens.
  Status CatchUp(Sequence* s);
  Result<InspectArray> Inspect(const Sequence& s, std::string_view name);
  // ParsePlan, once for each of the few plans that an engine opens its many sequences with.
  Result<Plan> PlanOf(const std::string& text);
  // Takes over the sequence of an answer to an open or a fork: begin makes its state. Where that
  // fails it is closed.
  Result<Opened> Adopt(const std::vector<std::byte>& payload,
                       const std::function<Status(const HeldAtOpen&, Sequence*)>& begin);
  // Tells the daemon how far the index is valid, so that a fork inherits it.
  Status TellIndexed(Sequence* s);

  // A report's events.
  Status TellReport(Sequence* s, uint32_t first, uint32_t n, const float* surprisal,
                    const float* entropy, const uint8_t* boundary);
  // Posts an event of the sequence behind those that wait for the GPU.
  Status Tell(Sequence* s, shm::MessageType type,
              std::initializer_list<std::span<const std::byte>> parts);
  // Offers what an audited step measured. Where the ring has no room it is lost and counted, and
  // nobody waits. flags: shm::Recall's.
  void OfferRecall(Sequence* s, uint32_t audit, int32_t position, const ShadowSample& sample,
                   uint32_t flags);
  // As OfferRecall, for a step that the GPU has finished.
  void OfferShadow(Sequence* s, const Sequence::Deferred& event);
  // Whether the event still waits for the GPU.
  bool Waits(const Sequence::Deferred& event) const;
  // Posts what waits and need not any more.
  Status TellDone(Sequence* s);
  // Posts all that waits, as soon as the GPU has got there. DEADLINE; LATE_TOKENS: what is left
  // waits for ids alone.
  Status TellAll(Sequence* s, std::chrono::steady_clock::time_point deadline);
  std::chrono::steady_clock::time_point Deadline() const {
    return std::chrono::steady_clock::now() + options.timeout;
  }
};

// MODEL_UNKNOWN.
Result<Session::State::RegisteredModel> ModelOf(Session::State* session, uint64_t model);

// The use of a sequence by one call.
class SequenceUse {
 public:
  // SEQUENCE_UNKNOWN; SEQUENCE_BUSY when another thread uses it, or a step does and !in_step_too.
  // It may be one that is only good for a close.
  static Result<SequenceUse> Of(Session::State* session, uint64_t sequence, bool in_step_too);
  // The same, cut to what another session asked for. Also SEQUENCE_UNANSWERED, and what
  // Session::Truncate fails with.
  static Result<SequenceUse> Current(Session::State* session, uint64_t sequence, bool in_step_too);
  Sequence* operator->() const { return sequence_.get(); }
  Sequence* get() const { return sequence_.get(); }
  const std::shared_ptr<Sequence>& shared() const { return sequence_; }

 private:
  SequenceUse(std::shared_ptr<Sequence> sequence, std::unique_lock<std::mutex> lock)
      : sequence_(std::move(sequence)), lock_(std::move(lock)) {}

  std::shared_ptr<Sequence> sequence_;
  std::unique_lock<std::mutex> lock_;
};

// linked_late_tokens.cc: FAILED_PRECONDITION LATE_TOKENS, LATE_BOUNDARY where a step of `member`
// cannot begin for what is known of its ids and those before.
Status CheckIds(const Sequence& s, const BatchMember& member);
Status IdsMissing(const Sequence& s);
inline constexpr std::string_view kIdsMissing = "LATE_TOKENS";

// linked_import.cc: FAILED_PRECONDITION SEQUENCE_IMPORTED.
Status SequenceImported(uint64_t sequence);

// step.cc
Result<std::unique_ptr<SessionStep>> BeginStep(Session::State* session,
                                               std::span<const BatchMember> members, void* stream,
                                               int32_t* codes);

// Lending: what the linked transport does with blocks of an engine's own tensors: has the daemon
// copy those that are sealed, and fills others from pages. Blocks of KVS_MEMORY_PROCESS are staged
// on the way (staged_blocks.h). linked_import.cc, linked_staging.cc.
//
// Ownership: borrows the session's state; free to make. Threads: of the call that uses the
// sequence. Errors: those of the requests, and what a method names.

// Blocks of positions from `first` on, and their tokens.
struct SealedBlocks {
  uint32_t first = 0;
  std::span<const int32_t> blocks, tokens;
};

class Lending {
 public:
  explicit Lending(Session::State* session) : session_(*session) {}

  // The model's; made for its first tensor.
  Result<std::shared_ptr<StagedBlocks>> StagedFor(uint64_t model, const LentTensor& tensor,
                                                  const Geometry& geometry);
  Result<uint32_t> Acknowledged(uint64_t sequence);
  Status Seal(uint64_t sequence, const SealedBlocks& all);
  Status SealStaged(Sequence* s, const ImportedModel& model, const SealedBlocks& all);
  // Waits until the daemon reads none of them. What it has not copied by the deadline is never used
  // again.
  void AwaitStaged(Sequence* s);
  // Positions [first, end), which the daemon holds.
  Status CopyToBlocks(Sequence* s, const ImportedModel& model, uint32_t first, uint32_t end,
                      std::span<const int32_t> blocks, void* stream);

 private:
  // One to `most`, waiting for one. IMPORT_QUEUE.
  Result<std::vector<int32_t>> TakeStaged(Sequence* s, StagedBlocks* staged, size_t most);
  void ReleaseStagedOf(Sequence* s);
  void ReleaseStagedOfOthers(const Sequence* s);
  Status CopyPages(const Sequence& s, const ImportedModel& model, uint32_t first, uint32_t end,
                   std::span<const int32_t> blocks, void* stream);

  Session::State& session_;
};

// Releases what the daemon has copied.
void ReleaseStaged(Sequence* s, uint32_t acknowledged);

}  // namespace kvstrata::client
