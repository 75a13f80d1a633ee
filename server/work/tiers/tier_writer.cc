// SPDX-License-Identifier: Apache-2.0
#include "server/work/tiers/tier_writer.h"

#include <pthread.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "server/telemetry/thread_top.h"
#include "server/tier/blocking_calls.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kReadTimeout{1};
constexpr size_t kResumed = 256;  // pages that are looked at under one hold of the store's lock
constexpr std::chrono::seconds kCheckpointTimeout{60};
constexpr uint32_t kWritePatience = 60;  // for requests that have deadlines of their own

uint64_t WholeBytes(std::span<const uint64_t> sizes) {
  uint64_t total = 0;
  for (const uint64_t bytes : sizes) total += WholeBlocks(bytes);
  return total;
}

bool MayHaveChanged(OfferedFor why) {
  return why == OfferedFor::kReported || why == OfferedFor::kArtefact;
}

// Buffers of these sizes, one behind the other in blocks of their own.
std::vector<std::span<std::byte>> BuffersIn(std::byte* memory, std::span<const uint64_t> sizes) {
  std::vector<std::span<std::byte>> to;
  for (const uint64_t bytes : sizes) {
    to.emplace_back(memory, bytes);
    memory += WholeBlocks(bytes);
  }
  return to;
}

}  // namespace

TierWriter::TierWriter(const TierWriterOptions& options, TierWriterTerms terms, Store* store,
                       ValueTier* tier, TierBuffers* buffers)
    : batch_bytes_(options.batch_bytes),
      patience_(options.patience),
      terms_(std::move(terms)),
      rate_(options.rate),
      store_(store),
      tier_(tier),
      buffers_(buffers),
      queue_(options, terms_.known),
      thread_([this] { Write(); }) {
  pthread_setname_np(thread_.native_handle(), terms_.thread);
}

TierWriter::~TierWriter() { Stop(); }

void TierWriter::Stop() {
  if (!queue_.Stop()) return;
  end_writes_.request_stop();
  thread_.join();
}

void TierWriter::Configure(const TierWriterOptions& options) {
  rate_.Set(options.rate);
  queue_.Configure(options);
}

TierWriterCounters TierWriter::counters() const {
  MutexLock lock(mu_);
  TierWriterCounters all = counters_;
  static_cast<WriteQueueCounters&>(all) = queue_.counters();
  return all;
}

void TierWriter::Count(uint64_t TierWriterCounters::*what, uint64_t n) {
  MutexLock lock(mu_);
  counters_.*what += n;
}

// --- what goes -----------------------------------------------------------------------------------

void TierWriter::Resume() {
  if (!queue_.Resume()) return;
  std::vector<ValueInfo> here = store_->values().ArtefactValues();
  std::erase_if(here, [](const ValueInfo& b) { return b.kind != ValueKind::kRecord; });
  for (uint64_t cursor = 0; cursor != kNoMoreValues;) {
    std::ranges::move(store_->values().PageValues(&cursor, kResumed), std::back_inserter(here));
    for (const ValueInfo& value : here) {
      TierOffer offer;
      std::ranges::copy(value.key, offer.key.begin());
      if (value.changed || !Has(offer.key)) queue_.Offer(offer);
    }
    here.clear();
  }
}

// A tier that is asked is not known to have anything.
bool TierWriter::Has(const PageKey& key) const {
  return !far() && !KnownSizes(tier_, TierNameOf(key)).empty();
}

bool TierWriter::TakesAPlace(const Offered& offered, const SealedValue& value) const {
  if (!far()) return value.changed;
  return MayHaveChanged(offered.why) && terms_.known->present.Contains(offered.key);
}

// --- the thread ----------------------------------------------------------------------------------

void TierWriter::Write() {
  WarmUpAllocator();
  Heartbeat beat(terms_.thread, kWritePatience);
  for (auto taken = queue_.Take(); taken; taken = queue_.Take()) {
    const LoopIteration iteration(&beat);
    const bool written = Survive(terms_.thread, [&] {
      Batch batch;
      for (const Offered& offered : *taken) {
        beat.Begin();
        if (queue_.stopping()) {
          queue_.NoteDropped(1);
        } else if (IsAbove(offered)) {
          WriteOffered(offered, &batch);
        }
      }
      PutAll(&batch);
    });
    if (!written) Count(&TierWriterCounters::failed, taken->size());
    queue_.NoteWritten();
    Survive(terms_.thread, [&] { CheckpointIfDry(); });
  }
}

bool TierWriter::IsAbove(const Offered& offered) {
  if (terms_.above == nullptr || !KnownSizes(terms_.above, TierNameOf(offered.key)).empty()) {
    return true;
  }
  if (Clock::now() - offered.since > patience_) {
    Count(&TierWriterCounters::dropped_above, 1);
  } else {
    queue_.PutBack(offered);
  }
  return false;
}

void TierWriter::WriteOffered(const Offered& offered, Batch* batch) {
  // Offered again while it was being written.
  const bool known = far() && terms_.known->present.Contains(offered.key);
  if (known && !MayHaveChanged(offered.why)) return;
  const std::vector<SealedValue> values = store_->values().Sealed(offered.key);
  if (values.empty() && Has(offered.key)) return;
  if (values.empty()) return AddFromAbove(offered, batch);
  Batch artefact;
  Batch* const to = values.size() == 1 ? batch : &artefact;
  for (size_t i = 0; i < values.size(); ++i) {
    const SealedValue& value = values[i];
    if (i != 0 && i + 1 == values.size()) {  // an artefact's record
      PutAll(to);
      if (!to->whole) return;
    }
    if (!value.changed && Has(value.key)) {
      store_->values().NoteStored({&value.key, 1});
      continue;
    }
    const uint64_t total = WholeBytes(value.sizes);
    TierPut put = NewPut(offered, value.key, total, to);
    put.keep = buffers_->Take(total);
    const auto copy = BuffersIn(static_cast<std::byte*>(put.keep.get()), value.sizes);
    const CopyFor whom = far() ? CopyFor::kRemoteTier : CopyFor::kLocalTier;
    if (!store_->values().CopySealed(offered.key, i, copy, whom)) {
      to->whole = false;
      Count(&TierWriterCounters::gone, 1);
      continue;
    }
    put.buffers.assign(copy.begin(), copy.end());
    if (TakesAPlace(offered, value)) to->changed.push_back({put.key, {}, put.place});
    to->Add(std::move(put), total);
  }
  PutAll(&artefact);
}

// For an artefact it would be the record alone, which is not told from other values here.
void TierWriter::AddFromAbove(const Offered& offered, Batch* batch) {
  const std::string name = TierNameOf(offered.key);
  const bool readable = terms_.above != nullptr && offered.why != OfferedFor::kArtefact;
  const ValueSizes sizes = readable ? KnownSizes(terms_.above, name) : ValueSizes();
  if (sizes.empty()) return Count(&TierWriterCounters::gone, 1);
  TierGet get = NewTierGet(name, sizes.all(), buffers_);
  GetAndWait(terms_.above, {&get, 1}, Clock::now() + kReadTimeout, end_writes_.get_token());
  if (!get.status.ok()) return Count(&TierWriterCounters::gone, 1);
  const uint64_t total = WholeBytes(sizes.all());
  TierPut put = NewPut(offered, offered.key, total, batch);
  put.buffers.assign(get.buffers.begin(), get.buffers.end());
  put.keep = std::move(get.keep);
  batch->Add(std::move(put), total);
}

TierPut TierWriter::NewPut(const Offered& offered, const PageKey& key, uint64_t bytes,
                           Batch* batch) {
  TierPut put;
  put.key = TierNameOf(key);
  put.place = TierNameOf(offered.place);
  put.header_room = true;
  // What goes at once is a second's worth, so that a rate is one of any ten seconds, too.
  const uint64_t rate = rate_.bytes_a_second();
  const uint64_t most = rate == 0 ? batch_bytes_ : std::min(batch_bytes_, rate);
  const bool full = !batch->puts.empty() && batch->bytes + bytes > most;
  const auto same = [&put](const TierPut& other) { return other.key == put.key; };
  if (full || std::ranges::any_of(batch->puts, same)) PutAll(batch);
  return put;
}

void TierWriter::PutAll(Batch* batch) {
  std::vector<TierPut> puts = std::exchange(batch->puts, {});
  std::vector<TierForget> changed = std::exchange(batch->changed, {});
  const uint64_t bytes = std::exchange(batch->bytes, 0);
  if (puts.empty()) return;
  const bool goes = rate_.bytes_a_second() == 0 || queue_.Pace(rate_.Begin(bytes, Clock::now()));
  const Deadline deadline = goes ? Clock::now() + kPutTimeout : Clock::now();
  // What cannot be forgotten stays as it was put: no later value takes its place.
  if (const Status gone = ForgetAndWait(tier_, std::span(changed), deadline); !gone.ok()) {
    log_.Warn(far() ? "remote_forget_failed" : "tier_forget_failed", gone);
  }
  AwaitedCall put({deadline, end_writes_.get_token(), nullptr});
  tier_->Put(puts, put.terms());
  put.Wait();
  CountPuts(puts, batch);
}

void TierWriter::CountPuts(std::span<const TierPut> puts, Batch* batch) {
  const bool stops = queue_.stopping();
  uint64_t dropped = 0, bytes = 0;
  std::vector<PageKey> stored;
  for (const TierPut& put : puts) {
    const Code code = put.status.code();
    const bool untimely = code == Code::kAborted || code == Code::kDeadlineExceeded;
    if (put.status.ok()) {
      for (const auto& buffer : put.buffers) bytes += buffer.size();
      std::ranges::copy(put.key, stored.emplace_back().begin());
    } else if (stops && untimely) {
      ++dropped;
    } else if (!put.status.reason().ends_with("_LEFT_ALONE")) {  // told once, when it was
      log_.Warn(far() ? "remote_write_failed" : "tier_write_failed", put.status);
    }
  }
  if (!far()) store_->values().NoteStored(stored);
  if (far()) terms_.known->NotePresent(stored);
  NoteBytes(terms_.path, bytes);
  queue_.NoteDropped(dropped);
  batch->whole = batch->whole && stored.size() == puts.size();
  MutexLock lock(mu_);
  counters_.written += stored.size();
  counters_.written_bytes += bytes;
  counters_.failed += puts.size() - stored.size() - dropped;
}

void TierWriter::CheckpointIfDry() {
  if (!queue_.dry()) return;
  const Status status =
      terms_.checkpoint ? terms_.checkpoint(Clock::now() + kCheckpointTimeout) : OkStatus();
  if (!status.ok()) log_.Warn("tier_checkpoint_failed", status);
  queue_.NoteCheckpoint(status);
}

}  // namespace kvstrata
