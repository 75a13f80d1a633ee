// SPDX-License-Identifier: Apache-2.0
#include "server/chunks/chunk_tiers.h"

#include <algorithm>
#include <atomic>
#include <stop_token>
#include <string>
#include <utility>

#include "base/checksum.h"
#include "server/telemetry/thread_top.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

// Calls that read from a tier at a time: it has the next one while chunks of others are summed.
constexpr int kReadsAtOnce = 4;

ChunkDone DoneOf(const ChunkWork& work, bool ok, uint8_t below) {
  ChunkDone done;
  done.kind = work.kind;
  done.chunk = work.chunk;
  done.key = work.key;
  done.below = below;
  done.ok = ok;
  return done;
}

bool HasRow(const ValueSizes& sizes, uint64_t row_bytes) {
  return sizes.all().size() == 1 && sizes.all().front() == row_bytes;
}

// What keeps a chunk for a tier, which may use its bytes for longer than until a call's `done`.
struct Kept {
  Kept(const ChunkWork& work, std::shared_ptr<ChunkInbox> to, const ChunkDone& then)
      : memory(work.keep), inbox(std::move(to)), done(then) {}
  ~Kept() {
    done.ok = ok;
    if (tells) inbox->Put(done);
  }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;

  const std::shared_ptr<void> memory;
  const std::shared_ptr<ChunkInbox> inbox;
  ChunkDone done;
  std::atomic<bool> ok = true, tells = true;
};

}  // namespace

// What calls under way share; they may outlive ChunkTiers.
struct ChunkTiers::Calls : std::enable_shared_from_this<ChunkTiers::Calls> {
  struct Reads {
    uint8_t tier = kNowhere;
    std::vector<ChunkWork> work;
    std::vector<TierGet> gets;
    std::vector<std::shared_ptr<Kept>> kept;
  };
  using ReadsPtr = std::shared_ptr<Reads>;
  // Calls of one tier that wait for their turn.
  struct Line {
    std::deque<ReadsPtr> waiting;
    int begun = 0;
    bool begins = false;  // a thread begins those whose turn it is
  };
  struct Writes {
    std::vector<TierPut> puts;
    std::vector<std::shared_ptr<Kept>> kept;
  };
  struct Probes {
    std::vector<ChunkWork> work;
    std::vector<std::string> names;
    std::vector<TierProbe> probes;
  };

  Calls(const ChunkTiersOptions& with, std::shared_ptr<ChunkInbox> to)
      : options(with), inbox(std::move(to)) {}

  ValueTier* TierOf(uint8_t one) const { return one == kDisk ? options.disk : options.remote; }
  TierCall CallFor(std::chrono::microseconds timeout, std::function<void()> done) const {
    TierCall call;
    call.deadline = Clock::now() + timeout;
    call.cancel = stop.get_token();
    call.done = std::move(done);
    return call;
  }

  void Read(uint8_t tier, std::vector<ChunkWork> work) KVS_EXCLUDES(mu);
  void BeginReads(uint8_t tier) KVS_EXCLUDES(mu);
  // A call has ended.
  void OnRead(Reads* reads) KVS_EXCLUDES(mu);
  void Tell(Reads* reads);
  // Nothing that waits is begun any more.
  void Stop() KVS_EXCLUDES(mu);
  void Write(std::span<const ChunkWork> work);
  void Probe(std::vector<ChunkWork> work);
  void OnProbed(const Probes& probes) const;

  const ChunkTiersOptions options;
  const std::shared_ptr<ChunkInbox> inbox;
  std::stop_source stop;
  Mutex mu;
  Line lines[kRemote + 1] KVS_GUARDED_BY(mu);  // by tier
};

ChunkTiers::ChunkTiers(const ChunkTiersOptions& options, std::shared_ptr<ChunkInbox> inbox)
    : options_(options), calls_(std::make_shared<Calls>(options, std::move(inbox))) {}

ChunkTiers::~ChunkTiers() { calls_->Stop(); }

void ChunkTiers::Find(std::span<ChunkFind> finds) const {
  if (options_.remote != nullptr) {
    for (ChunkFind& find : finds) find.maybe = kRemote;
  }
  if (options_.disk == nullptr) return;
  std::vector<std::string> names;
  std::vector<TierProbe> probes;
  names.reserve(finds.size());
  for (const ChunkFind& find : finds) {
    names.push_back(TierKeyOf(find.key));
    probes.push_back({names.back(), {}, {}});
  }
  TierCall call;  // its deadline is past: what is known, at once
  call.done = [] {};
  options_.disk->Probe(probes, std::move(call));
  for (size_t i = 0; i < finds.size(); ++i) {
    if (HasRow(probes[i].sizes, finds[i].row_bytes)) finds[i].there = kDisk;
  }
}

void ChunkTiers::Start(std::vector<ChunkWork> work) const {
  std::vector<ChunkWork> reads[kRemote + 1], writes, probes;
  for (ChunkWork& one : work) {
    if (one.kind == ChunkWork::Kind::kWrite)
      writes.push_back(std::move(one));
    else if (one.kind == ChunkWork::Kind::kProbe)
      probes.push_back(std::move(one));
    else
      reads[(one.below & kDisk) != 0 ? kDisk : kRemote].push_back(std::move(one));
  }
  for (const uint8_t tier : {kDisk, kRemote}) {
    if (!reads[tier].empty()) calls_->Read(tier, std::move(reads[tier]));
  }
  if (!writes.empty()) calls_->Write(writes);
  if (!probes.empty()) calls_->Probe(std::move(probes));
}

// -- reads

void ChunkTiers::Calls::Read(uint8_t tier, std::vector<ChunkWork> work) {
  for (size_t at = 0; at < work.size();) {
    auto reads = std::make_shared<Reads>();
    reads->tier = tier;
    for (uint64_t bytes = 0; at < work.size() && bytes < options.read_bytes; ++at) {
      ChunkWork& one = work[at];
      bytes += one.bytes.size();
      ChunkDone let_go = DoneOf(one, false, tier);
      let_go.let_go = true;
      reads->kept.push_back(std::make_shared<Kept>(one, inbox, let_go));
      TierGet get;
      get.key = TierKeyOf(one.key);
      get.buffers = {one.bytes};
      get.keep = reads->kept.back();
      reads->gets.push_back(std::move(get));
      reads->work.push_back(std::move(one));
    }
    MutexLock lock(mu);
    lines[tier].waiting.push_back(std::move(reads));
  }
  BeginReads(tier);
}

void ChunkTiers::Calls::BeginReads(uint8_t tier) {
  for (bool first = true;; first = false) {
    ReadsPtr reads;
    {
      MutexLock lock(mu);
      Line& line = lines[tier];
      // A call may end before Get returns: then whoever is here already goes on.
      if (first && line.begins) return;
      line.begins = line.begun < kReadsAtOnce && !line.waiting.empty() && !stop.stop_requested();
      if (!line.begins) return;
      reads = std::move(line.waiting.front());
      line.waiting.pop_front();
      ++line.begun;
    }
    TierCall call = CallFor(options.read_timeout,
                            [self = shared_from_this(), reads] { self->OnRead(reads.get()); });
    TierOf(tier)->Get(reads->gets, std::move(call));
  }
}

void ChunkTiers::Calls::OnRead(Reads* reads) {
  const uint8_t tier = reads->tier;
  const bool late = std::ranges::any_of(
      reads->gets, [](const TierGet& get) { return get.status.code() == Code::kDeadlineExceeded; });
  std::deque<ReadsPtr> given_up;
  {
    MutexLock lock(mu);
    --lines[tier].begun;
    if (late) given_up.swap(lines[tier].waiting);
  }
  BeginReads(tier);
  Tell(reads);
  for (const ReadsPtr& waiting : given_up) {
    for (TierGet& get : waiting->gets) get.status = TierLate();
    Tell(waiting.get());
  }
}

void ChunkTiers::Calls::Stop() {
  stop.request_stop();
  std::deque<ReadsPtr> dropped[kRemote + 1];
  MutexLock lock(mu);
  for (const uint8_t tier : {kDisk, kRemote}) dropped[tier].swap(lines[tier].waiting);
}

void ChunkTiers::Calls::Tell(Reads* reads) {
  const int wanting = options.write_shown | options.write_reused;
  std::vector<ChunkWork> elsewhere;
  for (size_t i = 0; i < reads->work.size(); ++i) {
    const ChunkWork& work = reads->work[i];
    const Code code = reads->gets[i].status.code();
    // Behind those two the tier may write to the chunk yet.
    const bool let_go = code != Code::kDeadlineExceeded && code != Code::kAborted;
    const bool again =
        let_go && code != Code::kOk && reads->tier == kDisk && options.remote != nullptr;
    reads->kept[i]->tells = code != Code::kOk && !again;
    if (again) {
      elsewhere.push_back(work);
      continue;
    }
    ChunkDone done = DoneOf(work, code == Code::kOk, reads->tier);
    // The tier has checked the bytes; the sum is for those that are to get them, too.
    if (done.ok && (wanting & ~reads->tier) != 0) done.sum = ChecksumOf(work.bytes);
    inbox->Put(done);
  }
  reads->gets.clear();
  reads->kept.clear();
  if (!elsewhere.empty()) Read(kRemote, std::move(elsewhere));
}

// -- writes

void ChunkTiers::Calls::Write(std::span<const ChunkWork> work) {
  std::shared_ptr<Writes> to[kRemote + 1];
  for (const ChunkWork& one : work) {
    const auto kept = std::make_shared<Kept>(one, inbox, DoneOf(one, true, one.below));
    for (const uint8_t tier : {kDisk, kRemote}) {
      if ((one.below & tier) == 0) continue;
      if (to[tier] == nullptr) to[tier] = std::make_shared<Writes>();
      TierPut put;
      put.key = TierKeyOf(one.key);
      put.buffers = {one.bytes};
      put.keep = kept;
      to[tier]->puts.push_back(std::move(put));
      to[tier]->kept.push_back(kept);
    }
  }
  for (const uint8_t tier : {kDisk, kRemote}) {
    if (to[tier] == nullptr) continue;
    TierCall call = CallFor(options.write_timeout, [writes = to[tier]] {
      for (size_t i = 0; i < writes->puts.size(); ++i) {
        if (!writes->puts[i].status.ok()) writes->kept[i]->ok = false;
      }
      writes->puts.clear();
      writes->kept.clear();
    });
    TierOf(tier)->Put(to[tier]->puts, std::move(call));
  }
}

// -- probes

void ChunkTiers::Calls::Probe(std::vector<ChunkWork> work) {
  auto probes = std::make_shared<Probes>();
  probes->work = std::move(work);
  probes->names.reserve(probes->work.size());
  for (const ChunkWork& one : probes->work) {
    probes->names.push_back(TierKeyOf(one.key));
    probes->probes.push_back({probes->names.back(), {}, {}});
  }
  TierCall call = CallFor(options.probe_timeout,
                          [self = shared_from_this(), probes] { self->OnProbed(*probes); });
  options.remote->Probe(probes->probes, std::move(call));
}

void ChunkTiers::Calls::OnProbed(const Probes& probes) const {
  for (size_t i = 0; i < probes.work.size(); ++i) {
    const ChunkWork& work = probes.work[i];
    const bool there = HasRow(probes.probes[i].sizes, work.chunk.row_bytes);
    inbox->Put(DoneOf(work, true, there ? kRemote : kNowhere));
  }
}

ChunkSums::ChunkSums(std::shared_ptr<ChunkInbox> inbox)
    : inbox_(std::move(inbox)), thread_(StartThread("kvs-chunk-sums", [this] { Run(); })) {}

ChunkSums::~ChunkSums() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void ChunkSums::Add(ChunkWork work) {
  {
    MutexLock lock(mu_);
    waiting_.push_back(std::move(work));
  }
  wake_.notify_one();
}

bool ChunkSums::Next(ChunkWork* work) KVS_NO_THREAD_SAFETY_ANALYSIS {
  std::unique_lock<std::mutex> lock(mu_.native());
  while (!stopping_ && waiting_.empty()) wake_.wait(lock);
  if (stopping_) return false;
  *work = std::move(waiting_.front());
  waiting_.pop_front();
  return true;
}

void ChunkSums::Run() {
  ChunkWork work;
  while (Next(&work)) {
    Survive("kvs-chunk-sums", [&] {
      inbox_->Put(
          {work.kind, work.chunk, work.key, work.below, true, false, ChecksumOf(work.bytes)});
    });
    work.keep.reset();
  }
}

}  // namespace kvstrata
