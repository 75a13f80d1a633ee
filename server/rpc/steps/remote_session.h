// SPDX-License-Identifier: Apache-2.0
// RemoteSession: what one OpenSession stream owns; runs kernels/step in the daemon, on its CPUs or
// on its GPU (step_runner.h), for a client that has no memory mapped. The gRPC services translate
// to and from it.
//
// Handles of steps count from 1 and are never used again in a session.
// Ownership: owns steps and sequences; End returns all of it to the store.
// Threads: constructor, `id` and Post from any thread; everything else inside tasks of Post, which
// run one after another. Cost: StepBegin resolves tables; Attend is the op itself; the rest are
// calls of the store. Errors: SEQUENCE_UNKNOWN, STEP_UNKNOWN (NOT_FOUND), SEQUENCE_BUSY
// (FAILED_PRECONDITION: in an open step), those of the store, and those that a method names. What
// fails changes nothing.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/rpc/steps/step_runner.h"
#include "server/rpc/steps/work_queue.h"
#include "server/store/store.h"
#include "session/access_counts.h"
#include "session/sequence_tables.h"

namespace kvstrata {

// RemoteMemory: the TableMemory of a remote session, in the daemon: all arenas are its own, and a
// table grows by a call of the store.
//
// Ownership: borrows the store and the session's device. Threads: one at a time (the session's
// strand). Cost: Resolve asks the store when an entry's arena is another one than the last; the
// first use of an arena of the host by a GPU registers it.
class RemoteMemory final : public TableMemory {
 public:
  RemoteMemory(Store* store, StepDevice* device, uint64_t session)
      : store_(*store), device_(*device), session_(session) {}

  // INTERNAL TABLE_INVALID, and what StepGpu::Reach fails with.
  Result<std::byte*> Resolve(const shm::PageEntry& entry, uint64_t bytes) override;
  bool Writable(const shm::PageEntry& entry) override;
  Status Grow(const TableClaim& claim) override;
  bool on_gpu() const override { return device_.gpu() != nullptr; }
  Status Read(std::byte* to, const std::byte* from, uint64_t bytes) override {
    return device_.Read(to, from, bytes);
  }

 private:
  Store& store_;
  StepDevice& device_;
  const uint64_t session_;
  uint32_t last_arena_ = 0;  // arena of the last Resolve
  std::byte* last_base_ = nullptr;
};

struct RemoteSequence : SessionSequence {
  uint64_t step = 0;  // the open step that it is in; 0: none
  Status lost;        // a commit that the store refused: state and store differ since
};

struct RemoteMember {
  uint64_t sequence = 0;
  std::span<const int32_t> tokens;  // ids of the new tokens; not empty
};

// An open step and what was done in it.
struct RemoteStep {
  std::vector<RemoteSequence*> sequences;    // members; the session keeps them while the step lives
  std::vector<std::vector<int32_t>> tokens;  // ids of the new tokens, per member
  std::vector<bool> appended;                // per layer
  std::vector<bool> in_place;                // the same: the client wrote the rows itself
  SequenceTables::EnteredEpoch entered;
  std::unique_ptr<StepRunner> step;  // after `entered`: it goes first
  std::vector<uint32_t> audits;  // that sample this step, per member; 0: none. Empty: none at all
  std::map<int, StepRunner::ReadSample> samples;  // those members'

  const Geometry& geometry() const { return sequences.front()->state->geometry(); }
};

class RemoteSession {
 public:
  RemoteSession(Store* store, const SessionSegments& segments, std::unique_ptr<StepDevice> device,
                WorkQueue* queue);

  uint64_t id() const { return session_; }

  // Runs `task` after those before it. SESSION_QUEUE_FULL (RESOURCE_EXHAUSTED), SESSION_UNKNOWN
  // after End; the task is dropped then.
  Status Post(WorkQueue::Task task);
  // Drops steps and sequences and ends the store's session, after what is queued; then calls `done`
  // (may be null). `self` stays until then. Called once.
  static void End(std::shared_ptr<RemoteSession> self, WorkQueue::Task done);

  // --- inside tasks only ---
  // Takes over a sequence that the store opened for this session. Opening it may wait for the disk,
  // which is for the caller to await (Openings::OpenSequence), outside of the session's strand.
  void AdoptOpened(const OpenedSequence& opened, uint64_t model, std::span<const int32_t> tokens);
  Result<OpenedSequence> ForkSequence(uint64_t sequence);
  Status TruncateSequence(uint64_t sequence, uint32_t tokens);
  // SEQUENCE_BUSY in an open step, unless that is to be aborted.
  Status CloseSequence(uint64_t sequence, bool abort_step = false);

  // MODELS_MIXED, SEQUENCE_BUSY (also twice in the batch), SEQUENCE_TOO_LONG, STEPS_OPEN, and what
  // Grow fails with. codes: per member, written on failure only.
  Result<uint64_t> StepBegin(std::span<const RemoteMember> members, std::vector<int32_t>* codes);
  Result<RemoteStep*> FindStep(uint64_t step);
  // The new rows of the layer (none: of all) are in the members' pages: the session's client wrote
  // them there (Sessions::PassArenas). NOT_WRITABLE; UNIMPLEMENTED IN_PLACE on a GPU.
  Status AppendInPlace(RemoteStep* step, std::optional<int> layer);
  // Attends and, on CPUs, counts accesses. REQUIRES: tensors were checked against the step.
  Status Attend(RemoteStep* step, int layer, const Rows& q, const MutableRows& out, float* lse);
  // Commits, or drops the new tokens; the step is over either way. LAYER_NOT_APPENDED;
  // TENSOR_NOT_FINITE of rows that the client wrote in place, which are looked at here. What a GPU
  // failed to finish is lost with the sequences: all their calls answer why, but CloseSequence.
  Status StepEnd(uint64_t step, bool abort);

  Status Report(uint64_t sequence, uint32_t first, uint32_t n, const float* surprisal,
                const float* entropy, const uint8_t* boundary);
  Status PrefillDone(uint64_t sequence);
  // Catches up with what was committed and recompressed. That workers are done with the sequence is
  // for the caller to await (Recompression::Settle), outside of the session's strand.
  Status Settle(uint64_t sequence);
  // SEQUENCE_UNKNOWN, SEQUENCE_BUSY, or why its last commit was refused.
  Status CheckIdle(uint64_t sequence) { return FindIdle(sequence).status(); }
  // Also in a step. Outside of one what another session asked by the sequence's key is done first.
  Result<RemoteSequence*> Find(uint64_t sequence);
  Result<InspectArray> Inspect(uint64_t sequence, std::string_view name);
  // SequenceState's, of the table as it is now.
  Result<std::string> StatusText(RemoteSequence* s);
  // A copy of the entries of the committed tokens' pages; *version is the table's.
  Result<std::vector<shm::PageEntry>> PageTable(uint64_t sequence, uint64_t* version);

 private:
  void DropAll();
  // The sequence as it is: a cut that another session asked for is not made first.
  Result<RemoteSequence*> Peek(uint64_t sequence);
  Result<RemoteSequence*> FindIdle(uint64_t sequence);
  Status Truncate(RemoteSequence* s, uint32_t tokens);
  Status CheckMembers(std::span<const RemoteMember> members,
                      std::vector<RemoteSequence*>* sequences, std::vector<int32_t>* codes);
  Status Commit(RemoteStep* step);
  void TellRecall(const RemoteStep& step);
  Status TellIndexed(RemoteSequence* s);

  Store* const store_;
  const uint64_t session_;
  const std::unique_ptr<StepDevice> device_;  // after everything of its steps and sequences
  const std::shared_ptr<Strand> strand_;

  RemoteMemory memory_;
  SequenceTables tables_;
  AccessCounts access_counts_;
  shm::StepCounts* const step_counts_;
  std::map<uint64_t, std::unique_ptr<RemoteSequence>> sequences_;
  std::map<uint64_t, std::unique_ptr<RemoteStep>> steps_;  // before sequences_ go, see DropAll
  uint64_t next_step_ = 1;
};

}  // namespace kvstrata
