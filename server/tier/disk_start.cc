// The start of a disk tier: whose segments these are, and the index from checkpoint and slots.
#include <sys/random.h>

#include <cerrno>
#include <cstring>

#include "server/tier/disk_tier_impl.h"
#include "server/tier/guard.h"

namespace kvstrata {

using disk::kBlockBytes;
using disk::NamedEntry;
using disk::Seen;
using disk::SlotHeader;
using disk::SlotId;
using disk::Superblock;
using disk::Transfer;
using Op = IoRequest::Op;

namespace {

Status Unread(int error) {
  if (error == ETIMEDOUT) return disk::DeadlineExceeded("the disk");
  return {Code::kDataLoss, "DISK_IO", std::strerror(error)};
}

}  // namespace

Result<std::unique_ptr<DiskTier>> DiskTier::Open(const DiskTierOptions& options,
                                                 Deadline deadline) {
  KVS_RETURN_IF_ERROR(Check(options));
  KVS_RETURN_IF_ERROR(CheckPlace(options));
  const uint64_t checkpoint = disk::CheckpointBytes(options.budget_bytes);
  KVS_ASSIGN_OR_RETURN(disk::TierDirectory directory,
                       disk::OpenTierDirectory(options.directory, disk::SegmentsOf(options),
                                               options.segment_bytes, checkpoint));
  IoQueueChoice reads = options.new_queue(options.depth);
  IoQueueChoice writes = options.new_queue(options.depth);
  auto impl =
      std::make_unique<Impl>(options, std::move(directory), std::move(reads), std::move(writes));
  KVS_RETURN_IF_ERROR(impl->AddFiles());
  KVS_RETURN_IF_ERROR(impl->Start(deadline));
  return std::unique_ptr<DiskTier>(new DiskTier(std::move(impl)));
}

DiskTier::Impl::Impl(const DiskTierOptions& options, disk::TierDirectory directory,
                     IoQueueChoice reads, IoQueueChoice writes)
    : options_(options),
      directory_(std::move(directory)),
      segments_count_(static_cast<uint32_t>(directory_.segments.size())),
      checkpoint_bytes_(disk::CheckpointBytes(options.budget_bytes)),
      queue_name_(reads.queue->name()),
      degraded_(directory_.degraded.ok() ? reads.degraded : directory_.degraded),
      reader_(std::move(reads.queue), options.depth),
      writer_(std::move(writes.queue), options.depth),
      table_(segments_count_, options.segment_bytes / kBlockBytes) {}

// Segment i is file i of both queues, the checkpoints follow.
Status DiskTier::Impl::AddFiles() {
  for (disk::Side* side : {&reader_, &writer_}) {
    IoQueue& queue = side->transfers.queue();
    for (const UniqueFd& fd : directory_.segments) {
      KVS_RETURN_IF_ERROR(queue.AddFile(fd.get()).status());
    }
    for (const UniqueFd& fd : directory_.checkpoints) {
      KVS_RETURN_IF_ERROR(queue.AddFile(fd.get()).status());
    }
  }
  added_ = directory_.segments.size();
  return OkStatus();
}

Status DiskTier::Impl::Start(Deadline deadline) {
  std::vector<Superblocks> all(segments_count_);
  KVS_RETURN_IF_ERROR(ReadSuperblocks(&all, deadline));
  KVS_RETURN_IF_ERROR(ChooseStore(all));
  AdoptSegments(all);
  std::optional<Covered> checkpoint = LoadCheckpoint(deadline);
  std::set<uint32_t> to_scan;
  for (uint32_t i = 0; i < segments_count_; ++i) {
    if (!all[i].valid || all[i].newest.slot_blocks == 0) continue;
    const bool unchanged = checkpoint && (all[i].newest.dirty_after < checkpoint->sequence ||
                                          !Holds(Guard::kDirtyMark));
    if (!all[i].both || !unchanged) to_scan.insert(i);
  }
  std::vector<NamedEntry> found;
  KVS_RETURN_IF_ERROR(ScanSegments(to_scan, &found, deadline));
  if (checkpoint) {
    for (NamedEntry& named : checkpoint->entries) {
      const Superblocks& seen = all[named.entry.at.segment];
      if (seen.valid && !to_scan.contains(named.entry.at.segment)) EnterFound(std::move(named));
    }
  }
  for (NamedEntry& named : found) EnterFound(std::move(named));
  FreeUnheld();
  // Not before it is certain whose they are.
  disk::CutLongerSegments(options_.segment_bytes, &directory_);
  MutexLock lock(mu_);
  // Above that of any header that a lost mark hides from us.
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  generation_ = std::max(
      generation_,
      static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count()));
  stats_.scanned_segments = to_scan.size();
  stats_.cut_segments = directory_.longer.size();
  for (uint32_t i = 0; i < segments_count_; ++i) {
    table_.at(i).flushed = generation_;  // what was found is on the disk
    table_.at(i).dirty = all[i].both && table_.at(i).dirty_after == checkpoint_sequence_;
  }
  return OkStatus();
}

Status DiskTier::Impl::ReadSuperblocks(std::vector<Superblocks>* all, Deadline deadline) {
  uint32_t next = 0;
  bool late = false;
  reader_.transfers.Run(
      [&]() -> std::optional<Transfer> {
        if (next == segments_count_) return std::nullopt;
        const uint32_t i = next++;
        const std::shared_ptr<std::byte> scratch = reader_.scratch.Take();
        KVS_CHECK(scratch != nullptr);
        const auto done = [&, i, scratch](int error) {
          late |= error == ETIMEDOUT;
          const auto* copies = reinterpret_cast<const Superblock*>(scratch.get());
          uint32_t whole = 0;
          for (uint32_t copy = 0; copy < 2 && error == 0; ++copy) {
            const Superblock& block = copies[copy];
            if (disk::Look(block) == Seen::kDamaged || block.segment != i) continue;
            ++whole;
            Superblock& newest = (*all)[i].newest;
            if (!(*all)[i].valid || block.sequence > newest.sequence) newest = block;
            (*all)[i].valid = true;
          }
          (*all)[i].both = whole == 2;
        };
        return Transfer{{{Op::kRead, i, 2 * kBlockBytes, 0, scratch.get()}}, scratch, done};
      },
      deadline);
  return late ? disk::DeadlineExceeded("the disk") : OkStatus();
}

// The store that most segments belong to; a new one when there is none.
Status DiskTier::Impl::ChooseStore(std::span<const Superblocks> all) {
  std::map<disk::StoreId, uint32_t> votes;
  for (const Superblocks& seen : all) {
    if (!seen.valid) continue;
    KVS_RETURN_IF_ERROR(disk::CheckGeometry(seen.newest, options_));
    ++votes[seen.newest.store];
  }
  if (votes.empty()) {
    KVS_CHECK(getrandom(store_.data(), store_.size(), 0) == static_cast<ssize_t>(store_.size()));
    return OkStatus();
  }
  uint32_t most = 0;
  for (const auto& [store, count] : votes) {
    if (count > most) store_ = store;
    most = std::max(most, count);
  }
  return OkStatus();
}

void DiskTier::Impl::AdoptSegments(std::span<const Superblocks> all) {
  MutexLock lock(mu_);
  for (uint32_t i = 0; i < all.size(); ++i) {
    const Superblock& block = all[i].newest;
    if (!all[i].valid || block.store != store_) continue;
    if (block.slot_blocks >= 2 && table_.SlotsOf(block.slot_blocks) > 0) {
      table_.Adopt(i, block.slot_blocks);
    }
    checkpoint_sequence_ = std::max(checkpoint_sequence_, block.dirty_after);
    table_.at(i).sequence = block.sequence;
    table_.at(i).dirty_after = block.dirty_after;
  }
}

// Whether entries of a checkpoint can be true of these segments.
bool DiskTier::Impl::Plausible(std::span<const NamedEntry> entries) const {
  return std::all_of(entries.begin(), entries.end(), [&](const NamedEntry& named) {
    return named.entry.at.segment < segments_count_ && !named.key.empty() &&
           !named.entry.sizes.empty();
  });
}

Status DiskTier::Impl::ScanSegments(const std::set<uint32_t>& segments,
                                    std::vector<NamedEntry>* found, Deadline deadline) {
  auto segment = segments.begin();
  uint32_t slot = 0;
  Status outcome;
  const auto more = [&]() -> std::optional<Transfer> {
    MutexLock lock(mu_);
    while (segment != segments.end() && slot >= table_.at(*segment).keys.size()) {
      ++segment;
      slot = 0;
    }
    if (segment == segments.end()) return std::nullopt;
    const SlotId at{*segment, slot++};
    const disk::Place place = PlaceOf(at);
    const std::shared_ptr<std::byte> scratch = reader_.scratch.Take();
    KVS_CHECK(scratch != nullptr);
    const auto done = [&, at, place, scratch](int error) {
      MutexLock relock(mu_);
      if (error == ETIMEDOUT) outcome = Unread(error);
      if (error != 0) unreadable_.insert(at);
      const auto* header = reinterpret_cast<const SlotHeader*>(scratch.get());
      if (error != 0 || !disk::HeaderCounts(*header, place)) return;
      generation_ = std::max(generation_, header->generation);
      if (header->state != disk::SlotState::kValue) return;
      disk::Entry entry{at, header->generation, {}};
      for (uint32_t i = 0; i < header->buffer_count; ++i) {
        entry.sizes.push_back(header->buffers[i].bytes);
      }
      found->push_back({std::string(header->key_view()), std::move(entry)});
    };
    const uint64_t offset = uint64_t{place.block} * kBlockBytes;
    return Transfer{{{Op::kRead, at.segment, kBlockBytes, offset, scratch.get()}}, scratch, done};
  };
  reader_.transfers.Run(more, deadline);
  return outcome;
}

void DiskTier::Impl::EnterFound(NamedEntry found) {
  MutexLock lock(mu_);
  const SlotId at = found.entry.at;
  disk::Segment& segment = table_.at(at.segment);
  if (at.slot >= segment.keys.size() || segment.keys[at.slot] != nullptr) return;
  if (disk::SlotBlocks(found.entry.sizes) != segment.slot_blocks) return;
  const auto it = index_.find(found.key);
  if (it != index_.end()) {
    const bool newer = found.entry.generation > it->second.generation;
    if (newer != Holds(Guard::kNewest)) return condemned_.push_back({at, true});
    condemned_.push_back({Forget(it), true});
  }
  const auto entered = index_.emplace(std::move(found.key), std::move(found.entry)).first;
  segment.keys[at.slot] = &entered->first;
}

// Slots that nobody claimed, but for those that wait for their header to be overwritten.
void DiskTier::Impl::FreeUnheld() {
  MutexLock lock(mu_);
  std::set<SlotId> held = unreadable_;
  for (const Condemned& slot : condemned_) held.insert(slot.at);
  for (uint32_t i = 0; i < table_.size(); ++i) {
    for (uint32_t slot = static_cast<uint32_t>(table_.at(i).keys.size()); slot-- > 0;) {
      if (table_.at(i).keys[slot] == nullptr && !held.contains({i, slot})) table_.Free({i, slot});
    }
  }
  unreadable_.clear();
}

}  // namespace kvstrata
