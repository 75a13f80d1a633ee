// SPDX-License-Identifier: Apache-2.0
// StepMemory: what steps on a GPU keep there from one to the next, and how a step's numbers and
// addresses get there.
//
// Who needs memory declares it: a Column (one int32_t a member, new in every step), a WordTable
// (rows of 8-byte words, of which a step copies those that differ from the step before), or a
// DeviceBuffer (scores, lists, scratch). All of it only grows, in Fit and Reserve, and stays at its
// addresses with its strides meanwhile: a graph that was captured of a step serves later ones until
// `generation` changes.
//
// A step's columns and words go through page-locked memory in one of four slots. A slot is used
// again when the GPU has begun the step that it was filled for.
//
// Ownership: borrows the table of ops. Declared tables live as long as it does. Threads: one call
// at a time. The device is the one that is current in calls. Cost: growing waits for the GPU.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device_buffer.h"

namespace kvstrata {

// Room for `n` entries and a quarter more, in multiples: a growing sequence seldom outgrows it.
int32_t Generous(int32_t n, int32_t multiple);
// The least power of two that is no smaller; 0 for 0.
int32_t PowerOfTwo(int32_t n);
// Makes *room `larger` if `need` exceeds it; whether it did.
bool Raise(int32_t* room, int32_t need, int32_t larger);

// Rows of 8-byte words on the GPU, mostly addresses.
class WordTable {
 public:
  // Row `row`, as the table's structs.
  template <typename T>
  const T* Row(int64_t row) const {
    return reinterpret_cast<const T*>(device_.as<uint64_t>() + row * stride_);
  }
  int32_t stride() const { return stride_; }  // words of a row
  int64_t rows() const { return stride_ == 0 ? 0 : static_cast<int64_t>(host_.size()) / stride_; }

 private:
  friend class StepMemory;
  DeviceBuffer device_;
  std::vector<uint64_t> host_;  // what is there once all copies are done
  uint64_t staged_at_ = 0;      // bytes into a slot
  int32_t stride_ = 0;
};

// Page-locked memory that the copies of a step's Begin are made from, one of four slots a step.
class StagingSlots {
 public:
  explicit StagingSlots(const cuda::CudaOps& ops) : ops_(ops) {}
  StagingSlots(const StagingSlots&) = delete;
  StagingSlots& operator=(const StagingSlots&) = delete;
  ~StagingSlots();

  // Makes every slot of so many bytes, of which the first are zero. Waits for the GPU.
  Status Fit(uint64_t bytes, uint64_t zero_bytes);
  // Waits for the next slot, which is the open one then.
  Status Open();
  template <typename T>
  T* As() const {
    return reinterpret_cast<T*>(slots_[open_].data);
  }
  // The copies from the open slot have been enqueued.
  Status Close(cuda::Stream stream);
  // Waits for the last closed one's.
  Status Await() const { return AwaitOnHost(ops_, slots_[open_].done); }

  // Waits for an event. DEADLINE_EXCEEDED GPU_STUCK after 10 s.
  static Status AwaitOnHost(const cuda::CudaOps& ops, cuda::Event event);

 private:
  struct Slot {
    std::byte* data = nullptr;
    cuda::Event done = nullptr;
  };

  const cuda::CudaOps& ops_;
  std::array<Slot, 4> slots_;
  size_t open_ = 0;
};

class StepMemory {
 public:
  // One int32_t a member.
  struct Column {
    int32_t index = 0;
  };

  explicit StepMemory(const cuda::CudaOps& ops) : ops_(ops), slots_(ops) {}
  // Waits for the GPU.
  ~StepMemory();

  const cuda::CudaOps& ops() const { return ops_; }
  // Changes when anything has grown.
  uint64_t generation() const { return generation_; }
  // Members that columns have room for: a power of two.
  int32_t members() const { return members_; }

  // --- before the first step
  Column AddColumn() { return {columns_++}; }
  void Add(WordTable* table) { tables_.push_back(table); }

  // --- between steps; RESOURCE_EXHAUSTED GPU_MEMORY
  Status FitMembers(int32_t members, int32_t tokens);
  Status Fit(WordTable* table, int64_t rows, int32_t stride);
  Status Fit(DeviceBuffer* buffer, int64_t bytes);
  // The same, zeroed: for counters that lie where its use of now puts them.
  Status FitZeroed(DeviceBuffer* buffer, int64_t bytes);
  // Strides change: graphs hold the old ones.
  void NoteGrowth();
  // Called after all Fits, before a slot is opened.
  Status FitSlots();

  // --- in a step: also FAILED_PRECONDITION CAPTURE_ALLOCATES
  Status Reserve(DeviceBuffer* buffer, uint64_t bytes, cuda::Stream stream);

  // --- Begin
  // Orders `stream` behind the step before.
  Status Follow(cuda::Stream stream);
  // Open until all copies of the step are enqueued.
  StagingSlots& slots() { return slots_; }
  // What the step has in the slot: one a member; by member, and one more, their first token; of
  // each token, the positions that it sees.
  int32_t& At(Column column, int member) {
    return slots_.As<int32_t>()[int64_t{column.index} * members_ + member];
  }
  int32_t* StagedStarts() { return slots_.As<int32_t>() + StartsAt(); }
  int32_t* StagedVisible() { return slots_.As<int32_t>() + VisibleAt(); }
  // Enqueues the copy of all columns of a step of `tokens`.
  Status CopyColumns(int32_t tokens, cuda::Stream stream);
  // Enqueues a copy of what differs from the row's leading words. `words`: whole ones.
  Status Write(WordTable* table, int64_t row, std::span<const std::byte> words,
               cuda::Stream stream);
  // Keeps every kernel behind it from starting before those before it have ended.
  Status Separate(cuda::Stream stream);
  // What a step enqueued is complete; waits for that of the last one, or 10 s.
  Status MarkEnd(cuda::Stream stream);
  void AwaitEnd() const;

  // --- on the GPU
  const int32_t* On(Column column, int member) const {
    return ints_.as<int32_t>() + int64_t{column.index} * members_ + member;
  }
  const int32_t* starts() const { return ints_.as<int32_t>() + StartsAt(); }
  const int32_t* visible() const { return ints_.as<int32_t>() + VisibleAt(); }

 private:
  int64_t StartsAt() const { return int64_t{columns_} * members_; }
  int64_t VisibleAt() const { return StartsAt() + members_ + 1; }

  const cuda::CudaOps& ops_;
  uint64_t generation_ = 0;
  int32_t columns_ = 0, members_ = 0, tokens_ = 0;
  bool slots_fit_ = false;
  DeviceBuffer ints_;  // columns, starts, visible
  std::vector<WordTable*> tables_;
  StagingSlots slots_;
  cuda::Event last_work_ = nullptr;  // recorded after the last step
};

}  // namespace kvstrata
