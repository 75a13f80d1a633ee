// SPDX-License-Identifier: Apache-2.0
// Memory of a GPU that two processes share: arenas of the driver's virtual memory management (VMM),
// passed as POSIX file descriptors, and host memory registered for copies. Part of the table.
//
// An arena is physical memory with one mapping in each process that has it. Whoever holds a mapping
// or a descriptor keeps the physical memory alive: an engine's pages outlive a killed daemon.
// Protection is each process's own: it maps what it only reads as read-only (ADR 4).
//
// Functions return 0 or a cudaError_t (CudaOps::error_text). They leave the current device as it
// was. Threads: any. Cost: create 1 ms, import 0.2 ms for 2 GiB, register 45 ms a GiB.
#pragma once

#include <cstdint>

namespace kvstrata::cuda {

// One GPU. Devices are named by UUID between processes: ordinals differ with CUDA_VISIBLE_DEVICES.
struct DeviceInfo {
  char uuid[41] = {};  // "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx", as nvidia-smi -L
  char name[64] = {};
  uint64_t total_bytes = 0;
  uint64_t free_bytes = 0;         // at this moment, for anyone
  uint64_t arena_granularity = 0;  // sizes of arenas are multiples of it
  int32_t major = 0, minor = 0;    // compute capability
  int32_t multiprocessors = 0;
};

struct DeviceArena {
  uint64_t address = 0;  // 0: none
  uint64_t bytes = 0;
};

// A device's UUID, without a context there: asking takes none of its memory.
struct DeviceName {
  char uuid[41] = {};
};
// `device` is an ordinal of this process, below device_count.
int NameDevice(int device, DeviceName* name);
int DescribeDevice(int device, DeviceInfo* info);

// New memory of `device`, zeroed, mapped to be read and written; *fd (the caller's, close-on-exec)
// is what other processes import. cudaErrorInvalidValue: bytes is no multiple of the granularity;
// cudaErrorMemoryAllocation: the GPU has no room.
int CreateArena(int device, uint64_t bytes, DeviceArena* arena, int* fd);

// Maps an arena of `bytes` that another process, or this one, created on the same GPU. The
// descriptor stays the caller's.
int ImportArena(int device, int fd, uint64_t bytes, bool writable, DeviceArena* arena);

// Unmaps; waits for the work of this process on the GPU first, so that no kernel of ours faults.
int ReleaseArena(int device, DeviceArena* arena);

// `rows` pieces of `width` bytes, `pitch` bytes apart at both ends, between memory of `device` and
// any that the GPU can reach; done when it returns. On a stream of its own: it waits for nobody
// else's.
struct Copied2D {
  uint64_t width = 0, pitch = 0, rows = 1;
};
int Copy2D(int device, void* to, const void* from, const Copied2D& shape);

// `count` of these, all on their way before the first is waited for; after an error, which of them
// were made is not known. Pieces of 2 MiB go at the full speed of PCIe, of 16 KiB at a tenth of it.
struct PageCopy {
  void* to = nullptr;
  const void* from = nullptr;
  Copied2D shape;
};
int CopyPages(int device, const PageCopy* copies, uint64_t count);

// Legacy IPC: memory of cudaMalloc (no arenas: those have descriptors), named by 64 bytes.
inline constexpr int kIpcHandleBytes = 64;

// Maps an allocation of another process (cudaErrorDeviceUninitialized: of this one); its size is
// the driver's answer, not the exporter's. Opened twice it is mapped once and counted. Peer access
// is enabled where the GPU is another than `device`.
int OpenIpc(int device, const uint8_t* handle, DeviceArena* memory);

// May wait for the driver without end when the exporter has died: never on a thread that others
// wait for.
int CloseIpc(int device, DeviceArena* memory);

// Makes [base, base + bytes) of this process's memory reachable by copy engines and kernels, at the
// same addresses. `read_only`: the mapping is. Already registered memory is cudaErrorHostMemory-
// AlreadyRegistered.
int RegisterHost(void* base, uint64_t bytes, bool read_only);
int UnregisterHost(void* base);

}  // namespace kvstrata::cuda
