// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/gpu/memory/step_memory.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

namespace kvstrata {
namespace {

constexpr std::chrono::seconds kStuck{10};
// In the host's copy of a table: a word that the device may have as anything. No table holds it.
constexpr uint64_t kUnknown = ~uint64_t{0};
constexpr uint64_t kWord = sizeof(uint64_t);

}  // namespace

int32_t Generous(int32_t n, int32_t multiple) {
  const int64_t most = int64_t{n} + n / 4;
  return static_cast<int32_t>((most + multiple - 1) / multiple * multiple);
}

int32_t PowerOfTwo(int32_t n) {
  return n == 0 ? 0 : static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(n)));
}

bool Raise(int32_t* room, int32_t need, int32_t larger) {
  if (need <= *room) return false;
  *room = larger;
  return true;
}

// --- StagingSlots --------------------------------------------------------------------------------

StagingSlots::~StagingSlots() {
  for (const Slot& slot : slots_) {
    if (slot.done != nullptr) (void)ops_.destroy_event(slot.done);
    if (slot.data != nullptr) (void)ops_.free_page_locked(slot.data);
  }
}

Status StagingSlots::Fit(uint64_t bytes, uint64_t zero_bytes) {
  for (Slot& slot : slots_) {
    if (slot.done == nullptr) {
      KVS_RETURN_IF_ERROR(CudaStatus(ops_, ops_.create_event(&slot.done), "making an event"));
    }
    KVS_RETURN_IF_ERROR(AwaitOnHost(ops_, slot.done));
    void* data = std::exchange(slot.data, nullptr);
    if (data != nullptr) {
      KVS_RETURN_IF_ERROR(
          CudaStatus(ops_, ops_.free_page_locked(data), "freeing page-locked memory"));
    }
    KVS_RETURN_IF_ERROR(
        CudaStatus(ops_, ops_.allocate_page_locked(bytes, &data), "allocating page-locked memory"));
    slot.data = static_cast<std::byte*>(data);
    std::memset(data, 0, zero_bytes);
  }
  return OkStatus();
}

Status StagingSlots::Open() {
  const size_t next = (open_ + 1) % slots_.size();
  KVS_RETURN_IF_ERROR(AwaitOnHost(ops_, slots_[next].done));
  open_ = next;
  return OkStatus();
}

Status StagingSlots::Close(cuda::Stream stream) {
  return CudaStatus(ops_, ops_.record_event(slots_[open_].done, stream), "marking a begun step");
}

Status StagingSlots::AwaitOnHost(const cuda::CudaOps& ops, cuda::Event event) {
  const auto deadline = std::chrono::steady_clock::now() + kStuck;
  for (;;) {
    bool done = false;
    KVS_RETURN_IF_ERROR(CudaStatus(ops, ops.is_event_done(event, &done), "asking for an event"));
    if (done) return OkStatus();
    if (std::chrono::steady_clock::now() > deadline) break;
    std::this_thread::yield();
  }
  return {Code::kDeadlineExceeded, "GPU_STUCK",
          "the GPU has not finished earlier steps for 10 s; look for a kernel that hangs on the "
          "engine's stream"};
}

// --- StepMemory ----------------------------------------------------------------------------------

StepMemory::~StepMemory() {
  AwaitEnd();  // page-locked memory must outlive its copies
  if (last_work_ != nullptr) (void)ops_.destroy_event(last_work_);
}

void StepMemory::NoteGrowth() {
  ++generation_;
  slots_fit_ = false;
}

Status StepMemory::FitMembers(int32_t members, int32_t tokens) {
  int32_t most_members = members_, most_tokens = tokens_;
  const bool more_members = Raise(&most_members, members, PowerOfTwo(members));
  const bool more_tokens = Raise(&most_tokens, tokens, PowerOfTwo(tokens));
  if (!more_members && !more_tokens) return OkStatus();
  NoteGrowth();
  members_ = tokens_ = 0;  // until it is there
  const int64_t ints = int64_t{columns_ + 1} * most_members + 1 + most_tokens;
  KVS_RETURN_IF_ERROR(ints_.Reserve(ops_, static_cast<uint64_t>(ints) * sizeof(int32_t)));
  members_ = most_members;
  tokens_ = most_tokens;
  return OkStatus();
}

Status StepMemory::Fit(WordTable* table, int64_t rows, int32_t stride) {
  const bool fits = rows <= table->rows() && stride <= table->stride_;
  if (fits || (stride == 0 && table->stride_ == 0)) return OkStatus();
  const int64_t most_rows = std::max(rows, table->rows());
  const int32_t larger = std::max(stride, table->stride_);
  NoteGrowth();
  table->host_.clear();
  table->stride_ = 0;  // until it is there
  const auto words = static_cast<uint64_t>(most_rows) * static_cast<uint64_t>(larger);
  KVS_RETURN_IF_ERROR(table->device_.Reserve(ops_, words * kWord));
  table->host_.assign(words, kUnknown);
  table->stride_ = larger;
  return OkStatus();
}

Status StepMemory::Fit(DeviceBuffer* buffer, int64_t bytes) {
  if (static_cast<uint64_t>(bytes) <= buffer->bytes()) return OkStatus();
  NoteGrowth();
  return buffer->Reserve(ops_, static_cast<uint64_t>(bytes));
}

Status StepMemory::FitZeroed(DeviceBuffer* buffer, int64_t bytes) {
  KVS_RETURN_IF_ERROR(buffer->Free());
  NoteGrowth();
  return buffer->Reserve(ops_, static_cast<uint64_t>(bytes));
}

Status StepMemory::FitSlots() {
  if (slots_fit_) return OkStatus();
  uint64_t bytes = (static_cast<uint64_t>(VisibleAt() + tokens_) * sizeof(int32_t) + 15) / 16 * 16;
  for (WordTable* const table : tables_) {
    table->staged_at_ = bytes;
    bytes += table->host_.size() * kWord;
  }
  if (last_work_ == nullptr) {
    KVS_RETURN_IF_ERROR(CudaStatus(ops_, ops_.create_event(&last_work_), "making an event"));
  }
  KVS_RETURN_IF_ERROR(slots_.Fit(bytes, static_cast<uint64_t>(VisibleAt()) * sizeof(int32_t)));
  slots_fit_ = true;
  return OkStatus();
}

Status StepMemory::Reserve(DeviceBuffer* buffer, uint64_t bytes, cuda::Stream stream) {
  if (bytes <= buffer->bytes()) return OkStatus();
  bool capturing = false;
  KVS_RETURN_IF_ERROR(
      CudaStatus(ops_, ops_.is_capturing(stream, &capturing), "asking for a capture"));
  if (capturing) {
    return FailedPrecondition(
        "CAPTURE_ALLOCATES",
        "this step needs more memory of the GPU, which cannot be had while a "
        "graph is captured; run one step of this shape before it is captured");
  }
  ++generation_;
  return buffer->Reserve(ops_, bytes + bytes / 4);
}

Status StepMemory::Follow(cuda::Stream stream) {
  return CudaStatus(ops_, ops_.await_event(stream, last_work_), "ordering two streams");
}

Status StepMemory::CopyColumns(int32_t tokens, cuda::Stream stream) {
  const auto bytes = static_cast<uint64_t>(VisibleAt() + tokens) * sizeof(int32_t);
  return CudaStatus(ops_,
                    ops_.copy_async(ints_.as<int32_t>(), slots_.As<std::byte>(), bytes, stream),
                    "copying the lengths of a step");
}

Status StepMemory::Write(WordTable* table, int64_t row, std::span<const std::byte> words,
                         cuda::Stream stream) {
  const int64_t begin = row * table->stride_;
  uint64_t* const known = table->host_.data() + begin;
  if (words.empty() || std::memcmp(known, words.data(), words.size()) == 0) {
    return OkStatus();  // as most steps find it
  }
  const auto is_known = [&](size_t i) {
    return std::memcmp(known + i, words.data() + i * kWord, kWord) == 0;
  };
  size_t first = 0, last = words.size() / kWord;
  while (is_known(first)) ++first;
  while (is_known(last - 1)) --last;
  const std::span<const std::byte> changed = words.subspan(first * kWord, (last - first) * kWord);
  const uint64_t at = static_cast<uint64_t>(begin) + first;
  std::byte* const staged = slots_.As<std::byte>() + table->staged_at_ + at * kWord;
  std::memcpy(staged, changed.data(), changed.size());
  KVS_RETURN_IF_ERROR(CudaStatus(
      ops_, ops_.copy_async(table->device_.as<uint64_t>() + at, staged, changed.size(), stream),
      "copying a page table"));
  std::memcpy(known + first, changed.data(), changed.size());
  return OkStatus();
}

Status StepMemory::Separate(cuda::Stream stream) {
  // A copy of what is there does, and nothing less.
  return CudaStatus(
      ops_, ops_.copy_async(ints_.as<int32_t>(), slots_.As<std::byte>(), sizeof(int32_t), stream),
      "separating a step's ops from its begin");
}

void StepMemory::AwaitEnd() const {
  if (last_work_ != nullptr) (void)StagingSlots::AwaitOnHost(ops_, last_work_);
}

Status StepMemory::MarkEnd(cuda::Stream stream) {
  return CudaStatus(ops_, ops_.record_event(last_work_, stream), "marking the end of a step");
}

}  // namespace kvstrata
