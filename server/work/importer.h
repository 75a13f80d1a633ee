// SPDX-License-Identifier: Apache-2.0
// Importer: the thread ("kvs-import") that copies what engines seal in tensors of their own into
// the daemon's pages. A piece of at most kPieceBytes at a time: pages are taken
// (Imports::BeginImport), rows fetched by pread or by copy engine, layer by layer, and put where
// pages have them by op append, the plan's summaries computed on the CPU, the tokens committed
// (Imports::FinishImport). From then on they are acknowledged, and to everybody else pages as any.
//
// Pieces are copied in the order in which blocks were sealed, of all sessions in one queue. A copy
// that fails forgets what its sequence has sealed behind it. So does a block with a NaN or an
// infinity: those before it are pages, it and those behind it are not. The death of an engine in
// the middle of a piece costs that piece: its memory is kept until the piece's end, the pages are
// the store's to free. Ownership: borrows the store and the backend, which outlive it; outlives all
// SessionImports. Thread-safety: NewSession from any thread. One lock, never around a call of the
// store.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "base/sync.h"
#include "kernels/backend/backend.h"
#include "server/store/requests/import_sink.h"
#include "server/store/store.h"
#include "server/work/tensor_releases.h"

namespace kvstrata {

struct ImporterOptions {
  // Where handles of a GPU's memory are opened, by the store's number of the device; empty:
  // nowhere.
  std::vector<TensorDevice> devices;
  uint64_t waiting_tokens = 1 << 22;  // waiting tokens of one session
  std::chrono::milliseconds release_deadline{10'000};
};

class Importer final : public ImportSink {
 public:
  static constexpr uint64_t kPieceBytes = uint64_t{16} << 20;  // bytes of pages, but for one block

  Importer(const ImporterOptions& options, Store* store, const Backend* backend);
  // Ends after the piece under way, and waits for tensors' release, a second at most.
  ~Importer() override;

  std::unique_ptr<SessionImport> NewSession(uint64_t session, uint32_t device,
                                            const PeerIdentity& peer) override;

 private:
  class Session;
  // An imported sequence. What follows the constants is guarded by mu_.
  struct Record {
    uint64_t session = 0, sequence = 0;
    std::shared_ptr<const ImportedTensors> tensors;

    std::atomic<bool> closed{false};
    std::vector<int32_t> tokens;        // ids: held ones, then sealed ones
    uint32_t copied = 0;                // how many of them are copied
    std::shared_ptr<uint64_t> waiting;  // tokens in the queue, of all of the session's sequences
    size_t jobs = 0;                    // queued, or running
    bool prompt_ended = false;
    Status failed;  // why a copy failed; not told yet
    std::vector<SettleDone> waiters;
  };
  struct Job {
    std::shared_ptr<Record> record;
    uint32_t first = 0;  // position of the first block's first token
    std::vector<int32_t> blocks;
    bool ends_prompt = false;
  };
  // What a job has still to say when the lock is released.
  struct Answers {
    std::vector<SettleDone> waiters;
    Status status;
    void Tell() const {
      for (const SettleDone& done : waiters) done(status);
    }
  };

  // What Session calls.
  void Close(Record* record) KVS_EXCLUDES(mu_);
  Status Seal(const std::shared_ptr<Record>& record, const SealedBlocks& blocks) KVS_EXCLUDES(mu_);
  Result<uint32_t> Acknowledged(Record* record) KVS_EXCLUDES(mu_);
  void Settle(Record* record, SettleDone done) KVS_EXCLUDES(mu_);
  void Release(TensorMemory* memory) { releases_.Put(memory); }

  void Run() KVS_EXCLUDES(mu_);
  // Nothing: the end.
  std::unique_ptr<Job> AwaitJob() KVS_EXCLUDES(mu_);
  void ReportLateReleases();
  Status RunJob(const Job& job) KVS_EXCLUDES(mu_);
  // Copies a piece; *blocks becomes those that are pages now, and what is wrong with the next one
  // is *bad. first: position of the first block. tokens: ids that are not copied yet.
  Status CopyPiece(const Record& record, uint32_t first, std::span<const int32_t> tokens,
                   std::span<const int32_t>* blocks, Status* bad) KVS_EXCLUDES(mu_);
  Status CopyLayers(const Record& record, const ImportJob& job, uint32_t first,
                    std::span<const int32_t>* blocks, Status* bad);
  // Fetches one layer of the blocks and appends it to the job's pages; returns how many blocks lie
  // before the first that is not finite, which *bad names then.
  Result<size_t> CopyLayer(const ImportedTensors& tensors, const ImportJob& job, int32_t layer,
                           uint32_t first, std::span<const int32_t> blocks, Status* bad);
  void Finish(const Job& job, const Status& status) KVS_EXCLUDES(mu_);
  // Takes the queue's jobs of a record away.
  void Withdraw(Record* record) KVS_REQUIRES(mu_);
  // Makes it forget tokens that are not copied.
  void Forget(Record* record) KVS_REQUIRES(mu_);
  Answers AnswersOf(Record* record, const Status& status) KVS_REQUIRES(mu_);

  const ImporterOptions options_;
  Store* const store_;
  const Backend* const backend_;
  TensorReleases releases_;
  size_t late_releases_ = 0;  // the thread's
  HostBuffer bounce_;         // the thread's

  Mutex mu_;
  std::condition_variable wake_;
  std::deque<std::unique_ptr<Job>> queue_ KVS_GUARDED_BY(mu_);
  bool stopping_ KVS_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace kvstrata
