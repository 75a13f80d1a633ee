// SPDX-License-Identifier: Apache-2.0
#include "server/tier/disk/checkpoint_files.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "server/tier/guard.h"

namespace kvstrata::disk {

using Op = IoRequest::Op;

namespace {

// Zeroed memory of whole blocks that O_DIRECT takes.
std::shared_ptr<std::byte> AlignedBlocks(uint64_t bytes) {
  const uint64_t whole = BlocksOf(bytes) * kBlockBytes;
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
std::vector<std::byte> CheckpointFiles::EncodeEntries(CheckpointHeader* header) {
  constexpr size_t kBuckets = 4096;  // at a time
  std::vector<std::byte> bytes;
  *header = {};
  for (size_t bucket = 0, buckets = kBuckets; bucket < buckets;) {
    MutexLock lock(state_->mu);
    buckets = state_->index.bucket_count();
    for (const size_t end = std::min(buckets, bucket + kBuckets); bucket < end; ++bucket) {
      for (auto it = state_->index.begin(bucket); it != state_->index.end(bucket); ++it) {
        AppendEntry(it->first, it->second, &bytes);
        ++header->entries;
      }
    }
    header->sequence = state_->checkpoint_sequence + 1;
    header->generation = state_->generation;
  }
  header->store = state_->store;
  header->entry_bytes = bytes.size();
  header->entry_checksum = ChecksumOf(bytes);
  return bytes;
}

Status CheckpointFiles::Write(Deadline deadline) {
  const HeldSide held_side(&files_->writer().lock, deadline);
  if (!held_side.held()) return DeadlineExceeded("another writer");
  KVS_RETURN_IF_ERROR(state_->MayAsk());
  erasure_->OverwriteCondemned(deadline);
  KVS_RETURN_IF_ERROR(marks_->FlushWritten(deadline));
  CheckpointHeader header;
  const std::vector<std::byte> entries = EncodeEntries(&header);
  const uint64_t most = files_->checkpoint_bytes() - kBlockBytes;
  if (entries.size() > most) {
    return ResourceExhausted("DISK_CHECKPOINT", "the index has " + std::to_string(entries.size()) +
                                                    " bytes, its file " + std::to_string(most) +
                                                    "; the next start reads every header");
  }
  {
    // From here on the file may count as this checkpoint, whatever the writes below say.
    MutexLock lock(state_->mu);
    state_->checkpoint_sequence = header.sequence;
    for (uint32_t i = 0; i < state_->table.size(); ++i) state_->table.at(i).dirty = false;
  }
  Seal(&header);
  const std::shared_ptr<std::byte> blocks = AlignedBlocks(kBlockBytes + entries.size());
  std::memcpy(blocks.get(), &header, kBlockBytes);
  std::ranges::copy(entries, blocks.get() + kBlockBytes);  // there may be none
  const uint32_t file = files_->FileOfCheckpoint(header.sequence);
  const uint64_t bytes = BlocksOf(entries.size()) * kBlockBytes;
  const std::vector<IoRequest> flush = {{Op::kFlush, file}};
  for (const auto& phase :
       {Requests(Op::kWrite, file, kBlockBytes, blocks.get() + kBlockBytes, bytes), flush,
        Requests(Op::kWrite, file, 0, blocks.get(), kBlockBytes), flush}) {
    if (phase.empty()) continue;
    const IoOutcome outcome = files_->writer().transfers.RunOne(phase, blocks, deadline);
    if (outcome.error == 0) continue;
    if (outcome.error == ETIMEDOUT) {
      state_->ObserveDeadline();
      return DeadlineExceeded("the disk");
    }
    const std::string name = CheckpointName(static_cast<uint32_t>(header.sequence % 2));
    const Status why = IoError(outcome, name);
    return {Code::kDataLoss, "DISK_IO", why.message()};
  }
  return OkStatus();
}

std::optional<CheckpointFiles::Covered> CheckpointFiles::Load(Deadline deadline) {
  struct Candidate {
    uint32_t which = 0;
    CheckpointHeader header{};
  };
  std::vector<Candidate> candidates;
  const std::shared_ptr<std::byte> block = AlignedBlocks(kBlockBytes);
  for (uint32_t which = 0; which < 2; ++which) {
    const uint32_t file = files_->FileOfCheckpoint(which);
    const auto read = Requests(Op::kRead, file, 0, block.get(), kBlockBytes);
    if (files_->reader().transfers.RunOne(read, block, deadline).error != 0) continue;
    Candidate candidate{which};
    std::memcpy(&candidate.header, block.get(), kBlockBytes);
    if (Look(candidate.header) != Seen::kWhole) continue;
    if (candidate.header.store == state_->store) candidates.push_back(candidate);
  }
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return a.header.sequence > b.header.sequence;
  });
  for (const Candidate& candidate : candidates) {
    auto entries = LoadEntries(candidate.which, candidate.header, deadline);
    MutexLock lock(state_->mu);
    // Also of one that cannot be used: its number must not be given again.
    state_->checkpoint_sequence = std::max(state_->checkpoint_sequence, candidate.header.sequence);
    if (!entries) continue;
    state_->generation = std::max(state_->generation, candidate.header.generation);
    return Covered{std::move(*entries), candidate.header.sequence};
  }
  return std::nullopt;
}

std::optional<std::vector<NamedEntry>> CheckpointFiles::LoadEntries(uint32_t which,
                                                                    const CheckpointHeader& header,
                                                                    Deadline deadline) {
  if (header.entry_bytes > files_->checkpoint_bytes() - kBlockBytes) return std::nullopt;
  const uint64_t bytes = BlocksOf(header.entry_bytes) * kBlockBytes;
  const std::shared_ptr<std::byte> blocks = AlignedBlocks(bytes + kBlockBytes);
  const auto read =
      Requests(Op::kRead, files_->FileOfCheckpoint(which), kBlockBytes, blocks.get(), bytes);
  TransferQueue& transfers = files_->reader().transfers;
  if (!read.empty() && transfers.RunOne(read, blocks, deadline).error != 0) return std::nullopt;
  const Checksum is = ChecksumOf({blocks.get(), header.entry_bytes});
  if (is != header.entry_checksum && Holds(Guard::kCheckpointChecksum)) return std::nullopt;
  auto entries = ParseEntries({blocks.get(), header.entry_bytes}, header.entries);
  if (!entries) return std::nullopt;
  // A smaller budget than the checkpoint's: those files are gone.
  std::erase_if(*entries, [this](const NamedEntry& e) {
    return e.entry.at.segment >= files_->first_segments();
  });
  if (!Plausible(*entries)) return std::nullopt;
  return entries;
}

// Whether entries of a checkpoint can be true of these segments.
bool CheckpointFiles::Plausible(std::span<const NamedEntry> entries) const {
  return std::all_of(entries.begin(), entries.end(), [&](const NamedEntry& named) {
    return named.entry.at.segment < files_->first_segments() && !named.key.empty() &&
           !named.entry.sizes.empty();
  });
}

}  // namespace kvstrata::disk
