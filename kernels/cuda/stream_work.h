// SPDX-License-Identifier: Apache-2.0
// What a step needs of a stream besides ops: memory, copies, events, and a value that is written
// when the GPU gets there. Part of the table.
//
// Functions return 0 or a cudaError_t (CudaOps::error_text). Threads: any; the current device is
// the stream's. Allocation may wait for the whole device; nothing else waits, but Synchronize.
#pragma once

#include <cstdint>

#include "kernels/cuda/batches/batch.h"

namespace kvstrata::cuda {

using Event = void*;  // cudaEvent_t

// Memory of the current device, zeroed. Freeing waits for work that uses it.
int AllocateDevice(uint64_t bytes, void** at);
int FreeDevice(void* at);
// Host memory that copies reach without waiting.
int AllocatePageLocked(uint64_t bytes, void** at);
int FreePageLocked(void* at);

// Between host and device memory in either direction, in the stream's order. Host memory that is
// not page-locked is read before the call returns, or written before it does.
int CopyAsync(void* to, const void* from, uint64_t bytes, Stream stream);
// Zeroes device memory, in the stream's order.
int ZeroAsync(void* at, uint64_t bytes, Stream stream);
// Waits for everything on the stream.
int Synchronize(Stream stream);

// Makes GPU number `device` of this process the calling thread's current one; which one is.
int UseDevice(int device);
int DeviceInUse(int* device);
// A stream of the current device, of the lowest priority; waits for no other stream.
int CreateStream(Stream* stream);
int DestroyStream(Stream stream);

int CreateEvent(Event* event);
int DestroyEvent(Event event);
int RecordEvent(Event event, Stream stream);
// Whether the work before the last record is done; true before the first record.
int IsEventDone(Event event, bool* done);
// Later work on the stream begins after the event.
int AwaitEvent(Stream stream, Event event);

int IsCapturing(Stream stream, bool* capturing);

using Graph = void*;  // cudaGraphExec_t

// Work that is enqueued on *stream, a new one, up to EndCapture is not run but made a graph; null
// where it is less than two kernels or copies. EndCapture destroys the stream.
int BeginCapture(Stream* stream);
int EndCapture(Stream stream, Graph* graph);
int LaunchGraph(Graph graph, Stream stream);
// Launches that are under way complete.
int DestroyGraph(Graph graph);

// Whether kernels own the memory at `at`: of a GPU, or managed. False for all memory of the host.
int IsDeviceMemory(const void* at, bool* device);

// *address = value once everything before on the stream is done and its writes can be seen by the
// host (ADR 7). `address`: of host memory registered with CUDA, or of the device; a multiple
// of 8. One kernel of one thread.
int WriteValue(uint64_t* address, uint64_t value, Stream stream);

}  // namespace kvstrata::cuda
