// SPDX-License-Identifier: Apache-2.0
#include "server/work/importer.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "base/check.h"
#include "kernels/cpu/executor.h"
#include "kernels/segment/segmenter.h"
#include "server/telemetry/log.h"
#include "server/telemetry/thread_top.h"
#include "server/telemetry/traffic.h"
#include "server/work/block_rows.h"

namespace kvstrata {
namespace {

constexpr auto kReleaseTick = std::chrono::seconds(1);
constexpr uint32_t kImportPatience = 30;

Status ClosedMeanwhile(uint64_t sequence) {
  return Status(Code::kAborted, "SEQUENCE_CLOSED",
                "sequence " + std::to_string(sequence) + " was closed meanwhile");
}

// How many blocks make a piece.
size_t BlocksOfPiece(const ImportedTensors& tensors) {
  const Geometry& g = tensors.geometry();
  const auto block = static_cast<uint64_t>(g.page_bytes() / g.page_tokens * tensors.block_tokens());
  return std::max<size_t>(1, Importer::kPieceBytes / block);
}

// What may be told of a position is its number: token ids are users' text.
Status CheckTokens(std::span<const int32_t> known, uint32_t first, std::span<const int32_t> ids) {
  const size_t overlap = std::min(ids.size(), known.size() - first);
  for (size_t i = 0; i < overlap; ++i) {
    if (known[first + i] == ids[i]) continue;
    return InvalidArgument("BLOCKS_TOKENS", "tokens[" + std::to_string(i) + "], position " +
                                                std::to_string(first + i) +
                                                ", is another token than was held or sealed "
                                                "there; open a sequence for another text");
  }
  return OkStatus();
}

Status CheckSealed(const ImportedTensors& tensors, std::span<const int32_t> known,
                   const SealedBlocks& sealed) {
  KVS_RETURN_IF_ERROR(tensors.CheckComplete());
  KVS_RETURN_IF_ERROR(tensors.CheckBlocks(sealed.blocks, sealed.tokens.size()));
  const auto block_tokens = static_cast<size_t>(tensors.block_tokens());
  if (sealed.first > known.size() || sealed.first % block_tokens != 0) {
    return FailedPrecondition("BLOCKS_OUT_OF_ORDER",
                              "first is " + std::to_string(sealed.first) +
                                  "; allowed: multiples of a block's " +
                                  std::to_string(block_tokens) + " tokens up to " +
                                  std::to_string(known.size()) + ", the tokens held or sealed");
  }
  return CheckTokens(known, sealed.first, sealed.tokens);
}

Status NotFinite(const AppendWork& w, int32_t block) {
  const std::optional<AppendedElement> at = FirstNotFinite(w);
  KVS_CHECK(at.has_value());
  return InvalidArgument(
      "TENSOR_NOT_FINITE",
      "block " + std::to_string(block) + ", position " + std::to_string(w.position + at->token) +
          ": layer " + std::to_string(w.layer) + "'s " + (at->is_value ? "values" : "keys") +
          " have a NaN or an infinity in head " + std::to_string(at->head) + ", channel " +
          std::to_string(at->channel) +
          "; keys and values must be finite: it and what follows is not kept, look at the model's "
          "numerics");
}

}  // namespace

// What one session lends; the attach thread's.
class Importer::Session final : public SessionImport {
 public:
  Session(Importer* importer, uint64_t session, const TensorDevice& device, uint32_t uid)
      : importer_(importer), session_(session), device_(device), uid_(uid) {}
  ~Session() override {
    for (const auto& [id, record] : records_) importer_->Close(record.get());
  }

  Status Register(uint64_t model, int32_t layer, const LentTensor& keys,
                  const LentTensor& values) override {
    for (const LentTensor* tensor : {&keys, &values}) {
      if (tensor->handle.kind != TensorKind::kCudaIpc || uid_ == geteuid()) continue;
      return Status(Code::kPermissionDenied, "TENSOR_IPC_USER",
                    "a cudaIpc handle does not say whose memory it names: user " +
                        std::to_string(uid_) + " may pass none to a daemon of user " +
                        std::to_string(geteuid()) + "; pass a descriptor (kind 2)");
    }
    KVS_ASSIGN_OR_RETURN(const Geometry geometry,
                         importer_->store_->models().ModelGeometry(session_, model));
    std::shared_ptr<ImportedTensors> tensors = models_[model];
    if (tensors == nullptr) {
      tensors = std::make_shared<ImportedTensors>(
          geometry, device_,
          [importer = importer_](TensorMemory* memory) { importer->Release(memory); });
    }
    KVS_RETURN_IF_ERROR(tensors->Register(layer, keys, values));
    KVS_RETURN_IF_ERROR(importer_->store_->models().ImportModel(session_, model));
    models_[model] = std::move(tensors);
    return OkStatus();
  }

  void Opened(uint64_t sequence, uint64_t model, std::span<const int32_t> tokens) override {
    auto record = std::make_shared<Record>();
    record->session = session_;
    record->sequence = sequence;
    record->tensors = models_.at(model);
    record->tokens.assign(tokens.begin(), tokens.end());
    record->copied = static_cast<uint32_t>(tokens.size());
    record->waiting = waiting_;
    records_[sequence] = std::move(record);
  }
  void Closed(uint64_t sequence) override {
    const auto found = records_.find(sequence);
    if (found == records_.end()) return;
    importer_->Close(found->second.get());
    records_.erase(found);
  }
  Status Seal(const SealedBlocks& blocks) override {
    KVS_ASSIGN_OR_RETURN(const std::shared_ptr<Record> record, Find(blocks.sequence));
    return importer_->Seal(record, blocks);
  }
  Result<uint32_t> Acknowledged(uint64_t sequence) override {
    KVS_ASSIGN_OR_RETURN(const std::shared_ptr<Record> record, Find(sequence));
    return importer_->Acknowledged(record.get());
  }
  void Settle(uint64_t sequence, SettleDone done) override {
    const auto found = records_.find(sequence);
    if (found == records_.end()) return done(OkStatus());
    importer_->Settle(found->second.get(), std::move(done));
  }

 private:
  Result<std::shared_ptr<Record>> Find(uint64_t sequence) const {
    const auto found = records_.find(sequence);
    if (found != records_.end()) return found->second;
    return NotFound("SEQUENCE_UNKNOWN", "sequence " + std::to_string(sequence) +
                                            " is no imported sequence of this session: register "
                                            "its model's tensors, then open it");
  }

  Importer* const importer_;
  const uint64_t session_;
  const TensorDevice device_;
  const uint32_t uid_;
  const std::shared_ptr<uint64_t> waiting_ = std::make_shared<uint64_t>(0);  // the importer's
  std::map<uint64_t, std::shared_ptr<ImportedTensors>> models_;
  std::map<uint64_t, std::shared_ptr<Record>> records_;
};

Importer::Importer(const ImporterOptions& options, Store* store, const Backend* backend)
    : options_(options),
      store_(store),
      backend_(backend),
      releases_(options.release_deadline),
      bounce_(options.devices.empty() ? nullptr : options.devices.front().ops) {
  thread_ = StartThread("kvs-import", [this] { Run(); });
}

Importer::~Importer() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
  queue_.clear();
  releases_.Await(std::chrono::steady_clock::now() + std::chrono::seconds(1));
}

std::unique_ptr<SessionImport> Importer::NewSession(uint64_t session, uint32_t device,
                                                    const PeerIdentity& peer) {
  const bool gpu = device < options_.devices.size();
  return std::make_unique<Session>(this, session, gpu ? options_.devices[device] : TensorDevice{},
                                   peer.uid);
}

// --- the sessions' side --------------------------------------------------------------------------

void Importer::Close(Record* record) {
  Answers answers;
  {
    MutexLock lock(mu_);
    record->closed = true;
    Withdraw(record);
    Forget(record);
    answers = AnswersOf(record, ClosedMeanwhile(record->sequence));
  }
  answers.Tell();
}

Status Importer::Seal(const std::shared_ptr<Record>& record, const SealedBlocks& sealed) {
  {
    MutexLock lock(mu_);
    if (!record->failed.ok()) return std::exchange(record->failed, OkStatus());
    auto job = std::make_unique<Job>(Job{record, sealed.first, {}, sealed.ends_prompt});
    if (sealed.ends_prompt) {
      if (std::exchange(record->prompt_ended, true)) {
        return FailedPrecondition("PREFILL_DONE", "sequence " + std::to_string(record->sequence) +
                                                      " has ended its prompt already");
      }
    } else {
      KVS_RETURN_IF_ERROR(CheckSealed(*record->tensors, record->tokens, sealed));
      const auto block_tokens = static_cast<size_t>(record->tensors->block_tokens());
      const size_t overlap = record->tokens.size() - sealed.first;
      if (overlap >= sealed.tokens.size()) return OkStatus();
      const size_t known = overlap / block_tokens;  // whole blocks
      const std::span<const int32_t> fresh = sealed.blocks.subspan(known);
      const std::span<const int32_t> ids = sealed.tokens.subspan(overlap);
      if (*record->waiting + ids.size() > options_.waiting_tokens) {
        return ResourceExhausted(
            "IMPORT_QUEUE",
            std::to_string(*record->waiting) + " sealed tokens of this session wait, and " +
                std::to_string(ids.size()) + " more; allowed: " +
                std::to_string(options_.waiting_tokens) + "; wait until some are acknowledged");
      }
      job->first += static_cast<uint32_t>(known * block_tokens);
      job->blocks.assign(fresh.begin(), fresh.end());
      record->tokens.insert(record->tokens.end(), ids.begin(), ids.end());
      *record->waiting += ids.size();
    }
    ++record->jobs;
    queue_.push_back(std::move(job));
  }
  wake_.notify_one();
  return OkStatus();
}

Result<uint32_t> Importer::Acknowledged(Record* record) {
  MutexLock lock(mu_);
  if (!record->failed.ok()) return std::exchange(record->failed, OkStatus());
  return record->copied;
}

void Importer::Settle(Record* record, SettleDone done) {
  Status failed;
  {
    MutexLock lock(mu_);
    if (record->jobs > 0 && record->failed.ok()) {
      record->waiters.push_back(std::move(done));
      return;
    }
    failed = std::exchange(record->failed, OkStatus());
  }
  done(failed);
}

void Importer::Withdraw(Record* record) {
  std::erase_if(queue_, [record](const std::unique_ptr<Job>& job) {
    if (job->record.get() != record) return false;
    --record->jobs;
    if (job->ends_prompt) record->prompt_ended = false;
    return true;
  });
}

void Importer::Forget(Record* record) {
  *record->waiting -= record->tokens.size() - record->copied;
  record->tokens.resize(record->copied);
}

Importer::Answers Importer::AnswersOf(Record* record, const Status& status) {
  return {std::exchange(record->waiters, {}), status};
}

// --- the thread ----------------------------------------------------------------------------------

std::unique_ptr<Importer::Job> Importer::AwaitJob() {
  for (;;) {
    std::unique_lock<std::mutex> lock(mu_.native());
    const auto ready = [this]()
                           KVS_NO_THREAD_SAFETY_ANALYSIS { return stopping_ || !queue_.empty(); };
    // While tensors are being released somebody must look whether that hangs.
    if (releases_.pending() == 0) {
      wake_.wait(lock, ready);
    } else if (!wake_.wait_for(lock, kReleaseTick, ready)) {
      lock.unlock();
      ReportLateReleases();
      continue;
    }
    return [this]() KVS_NO_THREAD_SAFETY_ANALYSIS -> std::unique_ptr<Job> {
      if (stopping_) return nullptr;
      std::unique_ptr<Job> job = std::move(queue_.front());
      queue_.pop_front();
      return job;
    }();
  }
}

void Importer::ReportLateReleases() {
  const size_t late = releases_.GiveUpLate();
  if (late > late_releases_) {
    LogEvent(LogLevel::kError, "tensor_release_late",
             {{"memories", late},
              {"why",
               "the driver does not return from unmapping tensors of an engine that ended; "
               "their memory comes back when kvstratad restarts"}});
  }
  late_releases_ = late;
}

void Importer::Run() {
  Heartbeat beat("kvs-import", kImportPatience);
  while (const std::unique_ptr<Job> job = AwaitJob()) {
    const LoopIteration iteration(&beat);
    Status status = ResourceExhausted("MEMORY", "the daemon has no memory to copy these blocks");
    Survive("kvs-import", [&] { status = RunJob(*job); });
    Survive("kvs-import", [&] { Finish(*job, status); });
  }
}

Status Importer::RunJob(const Job& job) {
  Record& record = *job.record;
  if (job.ends_prompt) return store_->steps().PrefillDone(record.session, record.sequence);
  const auto block_tokens = static_cast<uint32_t>(record.tensors->block_tokens());
  const std::span<const int32_t> blocks(job.blocks);
  const size_t piece = BlocksOfPiece(*record.tensors);
  for (size_t i = 0; i < blocks.size(); i += piece) {
    std::span<const int32_t> ids = blocks.subspan(i, std::min(piece, blocks.size() - i));
    const uint32_t first = job.first + static_cast<uint32_t>(i) * block_tokens;
    const auto end_of = [&] { return first + static_cast<uint32_t>(ids.size()) * block_tokens; };
    std::vector<int32_t> tokens;
    {
      MutexLock lock(mu_);
      if (record.closed) return ClosedMeanwhile(record.sequence);
      tokens.assign(record.tokens.begin() + record.copied, record.tokens.begin() + end_of());
    }
    Status bad;
    KVS_RETURN_IF_ERROR(CopyPiece(record, first, tokens, &ids, &bad));
    MutexLock lock(mu_);
    if (record.closed) return ClosedMeanwhile(record.sequence);
    const uint32_t copied = std::max(record.copied, end_of());
    *record.waiting -= copied - record.copied;
    record.copied = copied;
    KVS_RETURN_IF_ERROR(bad);
  }
  return OkStatus();
}

void Importer::Finish(const Job& job, const Status& status) {
  Record* const record = job.record.get();
  Answers answers;
  {
    MutexLock lock(mu_);
    --record->jobs;
    if (!status.ok() && !record->closed) {
      Withdraw(record);
      Forget(record);
      if (job.ends_prompt) record->prompt_ended = false;
      LogEvent(LogLevel::kDebug, "import_failed",
               {{"session", record->session},
                {"sequence", record->sequence},
                {"reason", status.reason()},
                {"why", status.message()}});
      if (record->waiters.empty()) record->failed = status;
    }
    if (record->jobs == 0) answers = AnswersOf(record, status);
  }
  answers.Tell();
}

Status Importer::CopyPiece(const Record& record, uint32_t first, std::span<const int32_t> tokens,
                           std::span<const int32_t>* blocks, Status* bad) {
  const auto block_tokens = static_cast<uint32_t>(record.tensors->block_tokens());
  const auto end_of = [&] { return first + static_cast<uint32_t>(blocks->size()) * block_tokens; };
  KVS_ASSIGN_OR_RETURN(ImportJob job,
                       store_->imports().BeginImport(record.session, record.sequence,
                                                     static_cast<uint32_t>(tokens.size())));
  KVS_CHECK(job.tokens + tokens.size() == end_of());
  Status copied = ResourceExhausted("MEMORY", "the daemon has no memory to copy these blocks");
  Survive("kvs-import", [&] { copied = CopyLayers(record, job, first, blocks, bad); });
  const uint32_t end = end_of();
  if (!copied.ok() || end <= job.tokens) {
    store_->imports().AbandonImport(job);
    return copied;
  }
  uint32_t indexed = job.indexed_tokens;
  if (job.index.kind != IndexLayout::Kind::kNone) {
    SequenceView view;
    view.pages = job.pages.data();
    view.index_blocks = job.blocks.data();
    view.tokens = static_cast<int32_t>(end);
    SegmenterOf(job.plan.segmenter())
        .Update(job.geometry, job.index, view, static_cast<int32_t>(indexed),
                static_cast<int32_t>(end), *backend_, InlineExecutor());
    indexed = end;
  }
  return store_->imports().FinishImport(job, tokens.first(end - job.tokens), indexed);
}

// What is not finite ends the blocks that later layers copy.
Status Importer::CopyLayers(const Record& record, const ImportJob& job, uint32_t first,
                            std::span<const int32_t>* blocks, Status* bad) {
  for (int32_t layer = 0; layer < job.geometry.layers && !blocks->empty(); ++layer) {
    if (record.closed) return ClosedMeanwhile(record.sequence);
    KVS_ASSIGN_OR_RETURN(const size_t finite,
                         CopyLayer(*record.tensors, job, layer, first, *blocks, bad));
    *blocks = blocks->first(finite);
  }
  return OkStatus();
}

Result<size_t> Importer::CopyLayer(const ImportedTensors& tensors, const ImportJob& job,
                                   int32_t layer, uint32_t first, std::span<const int32_t> blocks,
                                   Status* bad) {
  const Geometry& g = job.geometry;
  const ImportedTensors::Layer& from = tensors.layer(layer);
  const BlockRows keys(from.keys.layout, g.row_bytes()), values(from.values.layout, g.row_bytes());
  const uint64_t key_bytes = keys.bytes() * blocks.size();
  const uint64_t bytes = key_bytes + values.bytes() * blocks.size();
  KVS_ASSIGN_OR_RETURN(std::byte* const bounce, bounce_.Reserve(bytes));
  const auto fetch = [&](const ImportedTensors::Side& side, const BlockRows& rows, std::byte* to) {
    std::vector<TensorMemory::Piece> pieces;
    for (const int32_t block : blocks) rows.AddPieces(block, &pieces);
    return side.memory->Read(pieces, to);
  };
  KVS_RETURN_IF_ERROR(fetch(from.keys, keys, bounce));
  KVS_RETURN_IF_ERROR(fetch(from.values, values, bounce + key_bytes));
  NoteBytes(BytePath::kEngineToMemory, bytes);
  const int32_t block_tokens = tensors.block_tokens();
  AppendWork w;
  w.pages = job.pages.data();
  w.layout = PageLayout::Of(g);
  w.layer = layer;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const int32_t begin = static_cast<int32_t>(first) + static_cast<int32_t>(i) * block_tokens;
    const int32_t slot = std::max(static_cast<int32_t>(job.tokens) - begin, 0);
    w.position = begin + slot;
    w.tokens = block_tokens - slot;
    w.k = keys.RowsOf(bounce + i * keys.bytes(), slot, g.dtype);
    w.v = values.RowsOf(bounce + key_bytes + i * values.bytes(), slot, g.dtype);
    if (backend_->append(&w, 1, InlineExecutor())) continue;
    *bad = NotFinite(w, blocks[i]);
    return i;
  }
  return blocks.size();
}

}  // namespace kvstrata
