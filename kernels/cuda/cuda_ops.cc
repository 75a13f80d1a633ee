// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda_ops.h"

#include <cuda_runtime_api.h>

#include "kernels/plans/mosaickv/ops/packed_cuda_ops.h"
#include "kernels/plans/sekv/ops/span_cuda_ops.h"

namespace kvstrata::cuda {
namespace {

const char* ErrorText(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

// After these, says cuda_runtime_api.h, a process must be started anew. The driver's numbers are
// the same.
bool IsSticky(int code) {
  switch (static_cast<cudaError_t>(code)) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorExternalDevice:
    case cudaErrorMpsClientTerminated:
      return true;
    default:
      return false;
  }
}

int DeviceCount() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

constexpr CudaOps kOps = {
    {
        .error_text = ErrorText,
        .is_sticky = IsSticky,
        .device_count = DeviceCount,
    },
    {
        .name_device = NameDevice,
        .describe_device = DescribeDevice,
        .create_arena = CreateArena,
        .import_arena = ImportArena,
        .release_arena = ReleaseArena,
        .open_ipc = OpenIpc,
        .close_ipc = CloseIpc,
        .copy_2d = Copy2D,
        .copy_pages = CopyPages,
        .register_host = RegisterHost,
        .unregister_host = UnregisterHost,
    },
    {
        .allocate_device = AllocateDevice,
        .free_device = FreeDevice,
        .allocate_page_locked = AllocatePageLocked,
        .free_page_locked = FreePageLocked,
        .copy_async = CopyAsync,
        .zero_async = ZeroAsync,
        .synchronize = Synchronize,
        .use_device = UseDevice,
        .device_in_use = DeviceInUse,
        .create_stream = CreateStream,
        .destroy_stream = DestroyStream,
        .create_event = CreateEvent,
        .destroy_event = DestroyEvent,
        .record_event = RecordEvent,
        .is_event_done = IsEventDone,
        .await_event = AwaitEvent,
        .is_capturing = IsCapturing,
        .begin_capture = BeginCapture,
        .end_capture = EndCapture,
        .launch_graph = LaunchGraph,
        .destroy_graph = DestroyGraph,
        .is_device_memory = IsDeviceMemory,
        .write_value = WriteValue,
    },
    {
        .summarize = SummarizeCuda,
        .score = ScoreCuda,
        .vote_scratch_bytes = VoteScratchBytes,
        .vote = VoteCuda,
        .pick_scratch_bytes = PickScratchBytes,
        .pick = PickCuda,
        .cascade = CascadeCuda,
        .mean_query = MeanQueryCuda,
        .observe = ObserveCuda,
        .importance = ImportanceCuda,
        .prompt_buckets = PromptBucketsCuda,
        .whole_buckets = WholeBucketsCuda,
        .pick_buckets = PickBucketsCuda,
        .rebase = RebaseCuda,
        .promote = PromoteCuda,
        .quantise_keys = QuantiseKeysCuda,
        .score_bits = ScoreBitsCuda,
        .pick_bits_scratch_bytes = PickBitsScratchBytes,
        .pick_bits = PickBitsCuda,
        .always = AlwaysCuda,
        .take = TakeCuda,
        .block_pages = BlockPagesCuda,
        .block_slots = BlockSlotsCuda,
    },
    {
        .append = AppendCuda,
        .copy_rows = CopyRowsCuda,
        .attend_raw_workspace_bytes = AttendRawWorkspaceBytes,
        .attend_raw = AttendRawCuda,
        .attend_chunk_workspace_bytes = AttendChunkWorkspaceBytes,
        .attend_chunk = AttendChunkCuda,
        .pack_planes = PackPlanesCuda,
        .widen_planes = WidenPlanesCuda,
        .attend_planes_workspace_bytes = AttendPlanesWorkspaceBytes,
        .attend_planes = AttendPlanesCuda,
    },
    {
        .eigen_workspace_bytes = EigenWorkspaceBytes,
        .eigen = EigenCuda,
        .lowrank = KVS_OF_SEKV(&kSpanCuda),
        .packed = KVS_OF_MOSAICKV(&kPackedCuda),
    },
};

}  // namespace
}  // namespace kvstrata::cuda

const kvstrata::cuda::CudaOps* kvs_cuda_ops() { return &kvstrata::cuda::kOps; }
