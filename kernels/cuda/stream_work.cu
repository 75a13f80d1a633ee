// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include "kernels/cuda/batches/beside_captures.h"
#include "kernels/cuda/stream_work.h"

namespace kvstrata::cuda {
namespace {

cudaStream_t Of(Stream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t EventOf(Event event) { return static_cast<cudaEvent_t>(event); }

// On a stream of its own: the legacy one would wait for streams that are captured.
cudaError_t Zero(void* at, uint64_t bytes) {
  cudaStream_t stream = nullptr;
  if (const cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) {
    return error;
  }
  cudaError_t error = cudaMemsetAsync(at, 0, bytes, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  (void)cudaStreamDestroy(stream);
  return error;
}

__global__ void WriteValueKernel(uint64_t* address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

}  // namespace

int AllocateDevice(uint64_t bytes, void** at) {
  const BesideCaptures beside;
  if (const cudaError_t error = cudaMalloc(at, bytes)) {
    (void)cudaGetLastError();  // not sticky: the caller has it
    return error;
  }
  const cudaError_t error = Zero(*at, bytes);
  if (error == cudaSuccess) return error;
  (void)cudaFree(*at);
  *at = nullptr;
  return error;
}

int FreeDevice(void* at) {
  const BesideCaptures beside;
  return cudaFree(at);
}

int AllocatePageLocked(uint64_t bytes, void** at) {
  const BesideCaptures beside;
  return cudaHostAlloc(at, bytes, cudaHostAllocPortable);
}

int FreePageLocked(void* at) {
  const BesideCaptures beside;
  return cudaFreeHost(at);
}

int CopyAsync(void* to, const void* from, uint64_t bytes, Stream stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, Of(stream));
}

int ZeroAsync(void* at, uint64_t bytes, Stream stream) {
  return cudaMemsetAsync(at, 0, bytes, Of(stream));
}

int Synchronize(Stream stream) { return cudaStreamSynchronize(Of(stream)); }

int UseDevice(int device) { return cudaSetDevice(device); }

int DeviceInUse(int* device) { return cudaGetDevice(device); }

int CreateStream(Stream* stream) {
  int lowest = 0, highest = 0;
  cudaError_t error = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
  cudaStream_t made = nullptr;
  if (error == cudaSuccess) {
    error = cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, lowest);
  }
  *stream = made;
  return error;
}

int DestroyStream(Stream stream) { return cudaStreamDestroy(Of(stream)); }

int CreateEvent(Event* event) {
  cudaEvent_t made = nullptr;
  const cudaError_t error = cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
  *event = made;
  return error;
}

int DestroyEvent(Event event) { return cudaEventDestroy(EventOf(event)); }

int RecordEvent(Event event, Stream stream) { return cudaEventRecord(EventOf(event), Of(stream)); }

int IsEventDone(Event event, bool* done) {
  const BesideCaptures beside;
  const cudaError_t error = cudaEventQuery(EventOf(event));
  *done = error == cudaSuccess;
  return error == cudaErrorNotReady ? cudaSuccess : error;
}

int AwaitEvent(Stream stream, Event event) {
  return cudaStreamWaitEvent(Of(stream), EventOf(event), 0);
}

int IsCapturing(Stream stream, bool* capturing) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(Of(stream), &status);
  *capturing = status != cudaStreamCaptureStatusNone;
  return error;
}

int BeginCapture(Stream* stream) {
  const BesideCaptures beside;
  *stream = nullptr;
  cudaStream_t made = nullptr;
  cudaError_t error = cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking);
  if (error != cudaSuccess) return error;
  error = cudaStreamBeginCapture(made, cudaStreamCaptureModeRelaxed);
  if (error == cudaSuccess) {
    *stream = made;
  } else {
    (void)cudaStreamDestroy(made);
  }
  return error;
}

int EndCapture(Stream stream, Graph* graph) {
  const BesideCaptures beside;
  *graph = nullptr;
  cudaGraph_t captured = nullptr;
  cudaError_t error = cudaStreamEndCapture(Of(stream), &captured);
  (void)cudaStreamDestroy(Of(stream));
  size_t nodes = 0;
  if (error == cudaSuccess) error = cudaGraphGetNodes(captured, nullptr, &nodes);
  cudaGraphExec_t made = nullptr;
  if (error == cudaSuccess && nodes > 1) error = cudaGraphInstantiate(&made, captured, 0);
  if (captured != nullptr) (void)cudaGraphDestroy(captured);
  if (error != cudaSuccess) (void)cudaGetLastError();  // not sticky: the caller has it
  *graph = made;
  return error;
}

int LaunchGraph(Graph graph, Stream stream) {
  return cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), Of(stream));
}

int DestroyGraph(Graph graph) {
  const BesideCaptures beside;
  return cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph));
}

int IsDeviceMemory(const void* at, bool* device) {
  cudaPointerAttributes attributes{};
  const cudaError_t error = cudaPointerGetAttributes(&attributes, at);
  *device = attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
  return error;
}

int WriteValue(uint64_t* address, uint64_t value, Stream stream) {
  WriteValueKernel<<<1, 1, 0, Of(stream)>>>(address, value);
  return cudaGetLastError();
}

}  // namespace kvstrata::cuda
