// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/gpu/lists/cuda_lists.h"

#include <algorithm>

namespace kvstrata {
namespace {

constexpr int64_t kInt = sizeof(int32_t);

}  // namespace

Status CudaLists::Fit(StepMemory* memory, int32_t members, int32_t groups, int32_t stride) {
  groups_ = groups;
  stride_ = stride;
  const int64_t lists = int64_t{members} * groups;
  constexpr int64_t kLeast = 4;  // an address that an op may take, of no units even
  KVS_RETURN_IF_ERROR(memory->Fit(&units_, std::max(lists * stride, kLeast) * kInt));
  KVS_RETURN_IF_ERROR(memory->Fit(&counts_, lists * kInt));
  KVS_RETURN_IF_ERROR(memory->Fit(&sink_end_, members * kInt));
  return memory->Fit(&recent_begin_, members * kInt);
}

cuda::DeviceSelection CudaLists::SelectionOf(const CudaPart& part, int32_t unit_tokens) const {
  const int64_t list = int64_t{part.first} * groups_;
  cuda::DeviceSelection selection;
  selection.unit_tokens = unit_tokens;
  selection.groups = groups_;
  selection.list_stride = stride_;
  selection.units = units_.as<int32_t>() + list * stride_;
  selection.counts = counts_.as<int32_t>() + list;
  selection.sink_end = sink_end_.as<int32_t>() + part.first;
  selection.recent_begin = recent_begin_.as<int32_t>() + part.first;
  return selection;
}

void CudaLists::WriteTo(const CudaPart& part, cuda::PickBatch* pick) const {
  const int64_t list = int64_t{part.first} * groups_;
  pick->list_stride = stride_;
  pick->units = units_.as<int32_t>() + list * stride_;
  pick->counts = counts_.as<int32_t>() + list;
  pick->sink_end = sink_end_.as<int32_t>() + part.first;
  pick->recent_begin = recent_begin_.as<int32_t>() + part.first;
}

Result<CudaLists::Read> CudaLists::ReadMember(const CudaFrame& frame, int member) const {
  const int64_t list = int64_t{member} * groups_;
  Read read;
  read.counts.resize(static_cast<size_t>(groups_));
  read.units.resize(read.counts.size() * static_cast<size_t>(stride_));
  const auto copy = [&frame](std::vector<int32_t>* to, const int32_t* from) {
    return frame.CopyToHost(to->data(), from, to->size() * sizeof(int32_t));
  };
  KVS_RETURN_IF_ERROR(copy(&read.counts, counts_.as<int32_t>() + list));
  KVS_RETURN_IF_ERROR(copy(&read.units, units_.as<int32_t>() + list * stride_));
  KVS_RETURN_IF_ERROR(
      frame.CopyToHost(&read.sink_end, sink_end_.as<int32_t>() + member, sizeof(int32_t)));
  KVS_RETURN_IF_ERROR(
      frame.CopyToHost(&read.recent_begin, recent_begin_.as<int32_t>() + member, sizeof(int32_t)));
  return read;
}

int64_t PickScratchBytes(const cuda::CudaOps& ops, int32_t members, int32_t groups,
                         int32_t score_stride) {
  cuda::PickBatch pick;
  pick.score_stride = score_stride;
  pick.groups = groups;
  pick.scratch_lists = members * groups;
  int64_t bytes = 0;
  for (pick.batch = 1; pick.batch <= members; ++pick.batch) {
    bytes = std::max(bytes, ops.pick_scratch_bytes(pick));
  }
  return bytes;
}

int64_t VoteScratchBytes(const cuda::CudaOps& ops, const cuda::VoteBatch& shape, int32_t items) {
  cuda::VoteBatch vote = shape;
  int64_t bytes = 0;
  for (vote.batch = 1; vote.batch <= items; ++vote.batch) {
    bytes = std::max(bytes, ops.vote_scratch_bytes(vote));
  }
  return bytes;
}

}  // namespace kvstrata
