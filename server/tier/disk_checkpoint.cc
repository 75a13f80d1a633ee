// The index on disk: written to two files alternately, read at start.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "server/tier/disk_tier_impl.h"
#include "server/tier/guard.h"

namespace kvstrata {

using disk::CheckpointHeader;
using disk::kBlockBytes;
using disk::NamedEntry;
using Op = IoRequest::Op;

namespace {

// Zeroed memory of whole blocks that O_DIRECT takes.
std::shared_ptr<std::byte> AlignedBlocks(uint64_t bytes) {
  const uint64_t whole = disk::BlocksOf(bytes) * kBlockBytes;
  auto* data = static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, whole));
  KVS_CHECK(data != nullptr);
  std::memset(data, 0, whole);
  return {data, [](std::byte* p) { std::free(p); }};
}

// Requests carry 32-bit lengths.
std::vector<IoRequest> Requests(Op op, uint32_t file, uint64_t offset, std::byte* data,
                                uint64_t bytes) {
  constexpr uint64_t kMost = 1u << 30;
  std::vector<IoRequest> requests;
  for (uint64_t done = 0; done < bytes; done += kMost) {
    const auto part = static_cast<uint32_t>(std::min(bytes - done, kMost));
    requests.push_back({op, file, part, offset + done, data + done});
  }
  return requests;
}

}  // namespace

// All entries; describes them in `*header`, which is of the next checkpoint. The writer's side is
// held: meanwhile entries may leave, but none come, so buckets stay. Look-ups are let in between.
std::vector<std::byte> DiskTier::Impl::EncodeEntries(CheckpointHeader* header) {
  constexpr size_t kBuckets = 4096;  // at a time
  std::vector<std::byte> bytes;
  *header = {};
  for (size_t bucket = 0, buckets = kBuckets; bucket < buckets;) {
    MutexLock lock(mu_);
    buckets = index_.bucket_count();
    for (const size_t end = std::min(buckets, bucket + kBuckets); bucket < end; ++bucket) {
      for (auto it = index_.begin(bucket); it != index_.end(bucket); ++it) {
        disk::AppendEntry(it->first, it->second, &bytes);
        ++header->entries;
      }
    }
    header->sequence = checkpoint_sequence_ + 1;
    header->generation = generation_;
  }
  header->store = store_;
  header->entry_bytes = bytes.size();
  header->entry_checksum = disk::ChecksumOf(bytes.data(), bytes.size());
  return bytes;
}

Status DiskTier::Impl::Checkpoint(Deadline deadline) {
  const disk::HeldSide held_side(&writer_.lock, deadline);
  if (!held_side.held()) return disk::DeadlineExceeded("another writer");
  KVS_RETURN_IF_ERROR(MayAsk());
  OverwriteCondemned(deadline);
  KVS_RETURN_IF_ERROR(FlushWritten(deadline));
  CheckpointHeader header;
  const std::vector<std::byte> entries = EncodeEntries(&header);
  const uint64_t most = checkpoint_bytes_ - kBlockBytes;
  if (entries.size() > most) {
    return ResourceExhausted("DISK_CHECKPOINT", "the index has " + std::to_string(entries.size()) +
                                                    " bytes, its file " + std::to_string(most) +
                                                    "; the next start reads every header");
  }
  {
    // From here on the file may count as this checkpoint, whatever the writes below say.
    MutexLock lock(mu_);
    checkpoint_sequence_ = header.sequence;
    for (uint32_t i = 0; i < table_.size(); ++i) table_.at(i).dirty = false;
  }
  disk::Seal(&header);
  const std::shared_ptr<std::byte> blocks = AlignedBlocks(kBlockBytes + entries.size());
  std::memcpy(blocks.get(), &header, kBlockBytes);
  std::ranges::copy(entries, blocks.get() + kBlockBytes);  // there may be none
  const uint32_t file = checkpoint_file(header.sequence);
  const uint64_t bytes = disk::BlocksOf(entries.size()) * kBlockBytes;
  const std::vector<IoRequest> flush = {{Op::kFlush, file}};
  for (const auto& phase :
       {Requests(Op::kWrite, file, kBlockBytes, blocks.get() + kBlockBytes, bytes), flush,
        Requests(Op::kWrite, file, 0, blocks.get(), kBlockBytes), flush}) {
    if (phase.empty()) continue;
    const int error = writer_.transfers.RunOne(phase, blocks, deadline);
    if (error == 0) continue;
    if (error == ETIMEDOUT) {
      ObserveDeadline();
      return disk::DeadlineExceeded("the disk");
    }
    return {Code::kDataLoss, "DISK_IO", std::string("checkpoint: ") + std::strerror(error)};
  }
  return OkStatus();
}

// Entries of the newest checkpoint that is whole; raises checkpoint_sequence_ and generation_.
std::optional<DiskTier::Impl::Covered> DiskTier::Impl::LoadCheckpoint(Deadline deadline) {
  struct Candidate {
    uint32_t which = 0;
    CheckpointHeader header{};
  };
  std::vector<Candidate> candidates;
  const std::shared_ptr<std::byte> block = AlignedBlocks(kBlockBytes);
  for (uint32_t which = 0; which < 2; ++which) {
    const uint32_t file = segments_count_ + which;
    const auto read = Requests(Op::kRead, file, 0, block.get(), kBlockBytes);
    if (reader_.transfers.RunOne(read, block, deadline) != 0) continue;
    Candidate candidate{which};
    std::memcpy(&candidate.header, block.get(), kBlockBytes);
    if (disk::Look(candidate.header) != disk::Seen::kWhole) continue;
    if (candidate.header.store == store_) candidates.push_back(candidate);
  }
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return a.header.sequence > b.header.sequence;
  });
  for (const Candidate& candidate : candidates) {
    auto entries = LoadEntries(candidate.which, candidate.header, deadline);
    MutexLock lock(mu_);
    // Also of one that cannot be used: its number must not be given again.
    checkpoint_sequence_ = std::max(checkpoint_sequence_, candidate.header.sequence);
    if (!entries) continue;
    generation_ = std::max(generation_, candidate.header.generation);
    return Covered{std::move(*entries), candidate.header.sequence};
  }
  return std::nullopt;
}

std::optional<std::vector<NamedEntry>> DiskTier::Impl::LoadEntries(uint32_t which,
                                                                   const CheckpointHeader& header,
                                                                   Deadline deadline) {
  if (header.entry_bytes > checkpoint_bytes_ - kBlockBytes) return std::nullopt;
  const uint64_t bytes = disk::BlocksOf(header.entry_bytes) * kBlockBytes;
  const std::shared_ptr<std::byte> blocks = AlignedBlocks(bytes + kBlockBytes);
  const auto read = Requests(Op::kRead, segments_count_ + which, kBlockBytes, blocks.get(), bytes);
  if (!read.empty() && reader_.transfers.RunOne(read, blocks, deadline) != 0) return std::nullopt;
  const disk::Checksum is = disk::ChecksumOf(blocks.get(), header.entry_bytes);
  if (is != header.entry_checksum && Holds(Guard::kCheckpointChecksum)) return std::nullopt;
  auto entries = disk::ParseEntries({blocks.get(), header.entry_bytes}, header.entries);
  if (!entries) return std::nullopt;
  // A smaller budget than the checkpoint's: those files are gone.
  std::erase_if(*entries,
                [this](const NamedEntry& e) { return e.entry.at.segment >= segments_count_; });
  if (!Plausible(*entries)) return std::nullopt;
  return entries;
}

}  // namespace kvstrata
