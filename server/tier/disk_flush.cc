// What the next start may believe: a segment's dirty mark is written before anything else is, and a
// flush covers all that was put and erased before it.
#include <cstring>

#include "server/tier/disk_tier_impl.h"
#include "server/tier/guard.h"

namespace kvstrata {

using disk::kBlockBytes;
using disk::Transfer;
using Op = IoRequest::Op;

// Returns errors for the segments that could not be marked.
DiskTier::Impl::Errors DiskTier::Impl::MarkDirty(const std::set<uint32_t>& segments,
                                                 Deadline deadline) {
  Errors failed;
  std::vector<uint32_t> to_mark;
  {
    MutexLock lock(mu_);
    for (const uint32_t i : segments) {
      disk::Segment& segment = table_.at(i);
      segment.written = true;
      const bool marked = segment.dirty || !Holds(Guard::kDirtyMark);
      if (!segment.formatted || !marked) to_mark.push_back(i);
    }
  }
  size_t next = 0;
  writer_.transfers.Run(
      [&]() -> std::optional<Transfer> {
        if (next == to_mark.size()) return std::nullopt;
        return MarkTransfer(to_mark[next++], &failed);
      },
      deadline);
  return failed;
}

Transfer DiskTier::Impl::MarkTransfer(uint32_t i, Errors* failed) {
  const std::shared_ptr<std::byte> scratch = writer_.scratch.Take();
  KVS_CHECK(scratch != nullptr);
  Transfer transfer;
  transfer.keep = scratch;
  MutexLock lock(mu_);
  disk::Segment& segment = table_.at(i);
  const uint32_t copies = segment.formatted ? 1 : 2;  // an empty one may lose both
  for (uint32_t copy = 0; copy < copies; ++copy) {
    std::byte* at = scratch.get() + copy * kBlockBytes;
    auto* block = new (at) disk::Superblock{};
    block->segment = i;
    block->store = store_;
    block->sequence = ++segment.sequence;
    block->dirty_after = checkpoint_sequence_;
    block->segment_bytes = options_.segment_bytes;
    block->slot_blocks = segment.slot_blocks;
    disk::Seal(block);
    const uint64_t offset = segment.sequence % 2 * kBlockBytes;
    transfer.requests.push_back({Op::kWrite, FileOf(i), kBlockBytes, offset, at});
  }
  transfer.done = [this, i, failed](int error) {
    Observe(error, i);
    MutexLock relock(mu_);
    if (error != 0) (*failed)[i] = error;
    table_.at(i).formatted = table_.at(i).dirty = error == 0;
  };
  return transfer;
}

Status DiskTier::Impl::Flush(Deadline deadline) {
  const disk::HeldSide held_side(&writer_.lock, deadline);
  if (!held_side.held()) return disk::DeadlineExceeded("another writer");
  KVS_RETURN_IF_ERROR(MayAsk());
  OverwriteCondemned(deadline);
  return FlushWritten(deadline);
}

Status DiskTier::Impl::FlushWritten(Deadline deadline) {
  std::vector<uint32_t> written;
  uint64_t generation = 0;
  {
    MutexLock lock(mu_);
    generation = generation_;
    for (uint32_t i = 0; i < table_.size(); ++i) {
      if (table_.at(i).written) written.push_back(i);
    }
  }
  Status outcome;
  size_t next = 0;
  const auto more = [&]() -> std::optional<Transfer> {
    if (next == written.size()) return std::nullopt;
    const uint32_t i = written[next++];
    return Transfer{{{Op::kFlush, FileOf(i)}}, nullptr, [&, i](int error) {
                      Observe(error, i);
                      MutexLock lock(mu_);
                      table_.at(i).written = false;
                      if (error == 0 || !Holds(Guard::kFailedFlush)) {
                        table_.at(i).flushed = generation;
                      } else {
                        LoseUnflushed(i);
                        outcome = {Code::kDataLoss, "DISK_FLUSH",
                                   "segment " + std::to_string(i) + ": " + std::strerror(error) +
                                       "; what was put to it since its last flush is given up"};
                      }
                    }};
  };
  writer_.transfers.Run(more, deadline);
  return outcome;
}

// Nothing that the failed flush covered may count as written, nor be flushed again.
void DiskTier::Impl::LoseUnflushed(uint32_t i) {
  ++stats_.lost_flushes;
  const std::vector<const std::string*> keys = table_.at(i).keys;
  for (const std::string* key : keys) {
    const auto it = key == nullptr ? index_.end() : index_.find(*key);
    if (it != index_.end() && it->second.generation > table_.at(i).flushed) Forget(it);
  }
  table_.Stop(i);
}

}  // namespace kvstrata
