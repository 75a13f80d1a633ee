// SPDX-License-Identifier: Apache-2.0
// The CUDA backend: one table of functions, exported by libkvstrata_cuda.so under one name. The
// library holds everything that touches CUDA; daemon, client and tests reach it through here
// (cuda_library.h loads it) and link no CUDA themselves (ADR 10).
//
// An op enqueues its kernels on a stream and returns: no synchronisation, no allocation, nothing on
// the host that a captured graph would miss. It returns 0, or a cudaError_t that `error_text`
// names; errors of the kernels themselves show at the stream's next synchronisation.
// Threads: any; the current device is the stream's.
#pragma once

#include <cstdint>

#include "kernels/cuda/batches/batch.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/stream_work.h"
#include "kernels/ops/always/always_cuda.h"
#include "kernels/ops/append/append_cuda.h"
#include "kernels/ops/attend_chunk/attend_chunk_cuda.h"
#include "kernels/ops/attend_planes/attend_planes_cuda.h"
#include "kernels/ops/attend_raw/attend_raw_cuda.h"
#include "kernels/ops/block_pages/block_pages_cuda.h"
#include "kernels/ops/block_slots/block_slots_cuda.h"
#include "kernels/ops/copy_rows/copy_rows_cuda.h"
#include "kernels/ops/eigen/eigen_cuda.h"
#include "kernels/ops/pack_planes/pack_planes_cuda.h"
#include "kernels/ops/pick/pick_cuda.h"
#include "kernels/ops/plan_ops.h"
#include "kernels/ops/promote/promote_cuda.h"
#include "kernels/ops/quantise_keys/quantise_keys_cuda.h"
#include "kernels/ops/score/score_cuda.h"
#include "kernels/ops/score_bits/score_bits_cuda.h"
#include "kernels/ops/summarize/summarize_cuda.h"
#include "kernels/ops/take/take_cuda.h"
#include "kernels/ops/vote/vote_cuda.h"
#include "kernels/ops/widen_planes/widen_planes_cuda.h"
#include "kernels/plan/built_plans.h"
#include "kernels/plans/bits/ops/pick_bits/pick_bits_cuda.h"
#include "kernels/plans/chess/ops/cascade/cascade_cuda.h"
#include "kernels/plans/sentencekv/ops/buckets/buckets_cuda.h"
#include "kernels/plans/sentencekv/ops/importance/importance_cuda.h"
#include "kernels/plans/sentencekv/ops/observe/observe_cuda.h"
#include "kernels/plans/sentencekv/ops/pick_buckets/pick_buckets_cuda.h"
#include "kernels/plans/tokenselect/ops/mean_query/mean_query_cuda.h"

namespace kvstrata::cuda {

// This table's version, and which plans it lacks: loader and library must agree.
inline constexpr uint32_t kCudaOpsVersion =
    15 + (kHasSekv ? 0 : 1 << 16) + (kHasMosaicKv ? 0 : 1 << 17);

// What a loader asks first. The version stays at the table's beginning, in all versions.
struct RuntimeOps {
  uint32_t version = kCudaOpsVersion;
  const char* (*error_text)(int code) = nullptr;
  // Whether every later call of this process will answer this error, too: the context is lost.
  bool (*is_sticky)(int code) = nullptr;
  // GPUs that this process sees; 0 without a driver, whatever the reason.
  int (*device_count)() = nullptr;
};

// Memory that processes share: device_memory.h.
struct DeviceMemoryOps {
  int (*name_device)(int device, DeviceName* name) = nullptr;
  int (*describe_device)(int device, DeviceInfo* info) = nullptr;
  int (*create_arena)(int device, uint64_t bytes, DeviceArena* arena, int* fd) = nullptr;
  int (*import_arena)(int device, int fd, uint64_t bytes, bool writable,
                      DeviceArena* arena) = nullptr;
  int (*release_arena)(int device, DeviceArena* arena) = nullptr;
  int (*open_ipc)(int device, const uint8_t* handle, DeviceArena* memory) = nullptr;
  int (*close_ipc)(int device, DeviceArena* memory) = nullptr;
  int (*copy_2d)(int device, void* to, const void* from, const Copied2D& shape) = nullptr;
  int (*copy_pages)(int device, const PageCopy* copies, uint64_t count) = nullptr;
  int (*register_host)(void* base, uint64_t bytes, bool read_only) = nullptr;
  int (*unregister_host)(void* base) = nullptr;
};

// What a step (kernels/step/gpu/cuda_step.h) needs besides ops: stream_work.h.
struct StreamOps {
  int (*allocate_device)(uint64_t bytes, void** at) = nullptr;
  int (*free_device)(void* at) = nullptr;
  int (*allocate_page_locked)(uint64_t bytes, void** at) = nullptr;
  int (*free_page_locked)(void* at) = nullptr;
  int (*copy_async)(void* to, const void* from, uint64_t bytes, Stream stream) = nullptr;
  int (*zero_async)(void* at, uint64_t bytes, Stream stream) = nullptr;
  int (*synchronize)(Stream stream) = nullptr;
  int (*use_device)(int device) = nullptr;
  int (*device_in_use)(int* device) = nullptr;
  int (*create_stream)(Stream* stream) = nullptr;
  int (*destroy_stream)(Stream stream) = nullptr;
  int (*create_event)(Event* event) = nullptr;
  int (*destroy_event)(Event event) = nullptr;
  int (*record_event)(Event event, Stream stream) = nullptr;
  int (*is_event_done)(Event event, bool* done) = nullptr;
  int (*await_event)(Stream stream, Event event) = nullptr;
  int (*is_capturing)(Stream stream, bool* capturing) = nullptr;
  int (*begin_capture)(Stream* stream) = nullptr;
  int (*end_capture)(Stream stream, Graph* graph) = nullptr;
  int (*launch_graph)(Graph graph, Stream stream) = nullptr;
  int (*destroy_graph)(Graph graph) = nullptr;
  int (*is_device_memory)(const void* at, bool* device) = nullptr;
  int (*write_value)(uint64_t* address, uint64_t value, Stream stream) = nullptr;
};

// What chooses rows. Each op's header, in kernels/ops or a plan's folder, is its contract, here and
// below.
struct SelectionOps {
  int (*summarize)(const SummarizeBatch& work, Stream stream) = nullptr;
  int (*score)(const ScoreBatch& work, Stream stream) = nullptr;
  int64_t (*vote_scratch_bytes)(const VoteBatch& work) = nullptr;
  int (*vote)(const VoteBatch& work, Stream stream) = nullptr;
  int64_t (*pick_scratch_bytes)(const PickBatch& work) = nullptr;
  int (*pick)(const PickBatch& work, Stream stream) = nullptr;
  int (*cascade)(const CascadeBatch& work, Stream stream) = nullptr;
  int (*mean_query)(const MeanQueryBatch& work, Stream stream) = nullptr;
  int (*observe)(const ObserveBatch& work, Stream stream) = nullptr;
  int (*importance)(const ImportanceBatch& work, Stream stream) = nullptr;
  int (*prompt_buckets)(const PromptBucketsBatch& work, Stream stream) = nullptr;
  int (*whole_buckets)(const WholeBucketsBatch& work, Stream stream) = nullptr;
  int (*pick_buckets)(const PickBucketsBatch& work, Stream stream) = nullptr;
  int (*rebase)(const RebaseBatch& work, Stream stream) = nullptr;
  int (*promote)(const PromoteBatch& work, Stream stream) = nullptr;
  int (*quantise_keys)(const QuantiseKeysBatch& work, Stream stream) = nullptr;
  int (*score_bits)(const ScoreBitsBatch& work, Stream stream) = nullptr;
  int64_t (*pick_bits_scratch_bytes)(const PickBitsBatch& work) = nullptr;
  int (*pick_bits)(const PickBitsBatch& work, Stream stream) = nullptr;
  int (*always)(const AlwaysBatch& work, Stream stream) = nullptr;
  int (*take)(const TakeBatch& work, Stream stream) = nullptr;
  int (*block_pages)(const BlockPagesBatch& work, Stream stream) = nullptr;
  int (*block_slots)(const BlockSlotsBatch& work, Stream stream) = nullptr;
};

// What writes new rows, and attends raw and nested ones.
struct AttentionOps {
  int (*append)(const AppendBatch& work, Stream stream) = nullptr;
  int (*copy_rows)(const CopyRowsBatch& work, Stream stream) = nullptr;
  int64_t (*attend_raw_workspace_bytes)(int32_t group, int32_t head_dim) = nullptr;
  int (*attend_raw)(const AttendRawBatch& work, Stream stream) = nullptr;
  int64_t (*attend_chunk_workspace_bytes)(int32_t head_dim) = nullptr;
  int (*attend_chunk)(const AttendChunkBatch& work, Stream stream) = nullptr;
  int (*pack_planes)(const PackPlanesBatch& work, Stream stream) = nullptr;
  int (*widen_planes)(const WidenPlanesBatch& work, Stream stream) = nullptr;
  int64_t (*attend_planes_workspace_bytes)(const AttendPlanesBatch& work) = nullptr;
  int (*attend_planes)(const AttendPlanesBatch& work, Stream stream) = nullptr;
};

// What makes stored rows, and what the codecs of sekv and mosaickv alone use.
struct CodecOps {
  int64_t (*eigen_workspace_bytes)(const EigenBatch& work) = nullptr;
  int (*eigen)(const EigenBatch& work, Stream stream) = nullptr;
  const PlanOps* lowrank = nullptr;
  const PlanOps* packed = nullptr;
};

// The table: all of them, under one name.
struct CudaOps : RuntimeOps, DeviceMemoryOps, StreamOps, SelectionOps, AttentionOps, CodecOps {};

}  // namespace kvstrata::cuda

extern "C" [[gnu::visibility("default")]] const kvstrata::cuda::CudaOps* kvs_cuda_ops();
