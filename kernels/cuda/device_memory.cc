// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/device_memory.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "kernels/cuda/batches/beside_captures.h"

namespace kvstrata::cuda {
namespace {

// The driver's functions, found at run time: this library does not link libcuda, so that it can be
// loaded, and answer that there is no device, on any machine.
struct Driver {
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) unreserve = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuMemExportToShareableHandle) export_handle = nullptr;
  decltype(&cuMemImportFromShareableHandle) import_handle = nullptr;
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuMemGetAddressRange) address_range = nullptr;
  bool complete = false;
};

template <typename F>
bool Find(const char* name, F* function) {
  void* at = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &at, 12000, cudaEnableDefault, &found);
  *function = reinterpret_cast<F>(at);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess;
}

const Driver& TheDriver() {
  static const Driver driver = [] {
    Driver d;
    d.complete = Find("cuMemCreate", &d.create) && Find("cuMemRelease", &d.release) &&
                 Find("cuMemAddressReserve", &d.reserve) &&
                 Find("cuMemAddressFree", &d.unreserve) && Find("cuMemMap", &d.map) &&
                 Find("cuMemUnmap", &d.unmap) && Find("cuMemSetAccess", &d.set_access) &&
                 Find("cuMemExportToShareableHandle", &d.export_handle) &&
                 Find("cuMemImportFromShareableHandle", &d.import_handle) &&
                 Find("cuMemGetAllocationGranularity", &d.granularity) &&
                 Find("cuMemGetAddressRange", &d.address_range);
    return d;
  }();
  return driver;
}

// The driver's errors in the runtime's numbers, which agree where both name an error.
int ErrorOf(CUresult result) { return static_cast<int>(result); }

// Makes `device` current, with a context, and the former one again at the end.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    error_ = cudaGetDevice(&former_);
    if (error_ == cudaSuccess) error_ = cudaSetDevice(device);
    if (error_ == cudaSuccess) error_ = cudaFree(nullptr);  // makes the context
    if (error_ == cudaSuccess && !TheDriver().complete) error_ = cudaErrorInsufficientDriver;
  }
  ~CurrentDevice() { (void)cudaSetDevice(former_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  int error() const { return error_; }

 private:
  const BesideCaptures beside_;
  int former_ = 0;
  cudaError_t error_;
};

CUmemAllocationProp ArenaProperties(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return properties;
}

// Maps a handle somewhere and lets go of it: the mapping keeps the memory.
CUresult MapHandle(int device, CUmemGenericAllocationHandle handle, uint64_t bytes, bool writable,
                   DeviceArena* arena) {
  const Driver& d = TheDriver();
  CUdeviceptr at = 0;
  CUresult result = d.reserve(&at, bytes, 0, 0, 0);
  if (result == CUDA_SUCCESS) {
    result = d.map(at, bytes, 0, handle, 0);
    if (result == CUDA_SUCCESS) {
      CUmemAccessDesc access{};
      access.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
      access.flags = writable ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
      result = d.set_access(at, bytes, &access, 1);
      if (result != CUDA_SUCCESS) (void)d.unmap(at, bytes);
    }
    if (result != CUDA_SUCCESS) (void)d.unreserve(at, bytes);
  }
  (void)d.release(handle);
  if (result == CUDA_SUCCESS) *arena = {at, bytes};
  return result;
}

void WriteUuid(const cudaUUID_t& uuid, char (&text)[41]) {
  const auto* id = reinterpret_cast<const unsigned char*>(uuid.bytes);
  char* out = text + std::snprintf(text, sizeof(text), "GPU-");
  for (int i = 0; i < 16; ++i) {
    const bool dash = i == 4 || i == 6 || i == 8 || i == 10;
    out += std::snprintf(out, 4, dash ? "-%02x" : "%02x", id[i]);
  }
}

int Discard(int error, int device, DeviceArena* arena) {
  (void)ReleaseArena(device, arena);
  return error;
}

}  // namespace

int NameDevice(int device, DeviceName* name) {
  cudaDeviceProp properties{};
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, device)) return error;
  WriteUuid(properties.uuid, name->uuid);
  return cudaSuccess;
}

int DescribeDevice(int device, DeviceInfo* info) {
  const CurrentDevice current(device);
  if (current.error() != cudaSuccess) return current.error();
  cudaDeviceProp properties{};
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, device)) return error;
  size_t free_bytes = 0, total_bytes = 0, granularity = 0;
  if (const cudaError_t error = cudaMemGetInfo(&free_bytes, &total_bytes)) return error;
  const CUmemAllocationProp arena = ArenaProperties(device);
  if (const CUresult result =
          TheDriver().granularity(&granularity, &arena, CU_MEM_ALLOC_GRANULARITY_MINIMUM)) {
    return ErrorOf(result);
  }
  *info = {};
  WriteUuid(properties.uuid, info->uuid);
  std::snprintf(info->name, sizeof(info->name), "%.63s", properties.name);
  info->total_bytes = total_bytes;
  info->free_bytes = free_bytes;
  info->arena_granularity = granularity;
  info->major = properties.major;
  info->minor = properties.minor;
  info->multiprocessors = properties.multiProcessorCount;
  return cudaSuccess;
}

int CreateArena(int device, uint64_t bytes, DeviceArena* arena, int* fd) {
  const CurrentDevice current(device);
  if (current.error() != cudaSuccess) return current.error();
  const Driver& d = TheDriver();
  const CUmemAllocationProp properties = ArenaProperties(device);
  CUmemGenericAllocationHandle handle = 0;
  if (const CUresult result = d.create(&handle, bytes, &properties, 0)) return ErrorOf(result);
  int exported = -1;
  if (const CUresult result =
          d.export_handle(&exported, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)) {
    (void)d.release(handle);
    return ErrorOf(result);
  }
  *fd = fcntl(exported, F_DUPFD_CLOEXEC, 0);  // the driver's own is inherited by children
  close(exported);
  if (const CUresult result = MapHandle(device, handle, bytes, true, arena)) {
    close(*fd);
    return ErrorOf(result);
  }
  // What the driver hands out may hold what another process left.
  cudaError_t error = cudaMemset(reinterpret_cast<void*>(arena->address), 0, bytes);
  if (error == cudaSuccess) error = cudaStreamSynchronize(cudaStreamLegacy);
  if (error == cudaSuccess) return error;
  close(*fd);
  return Discard(error, device, arena);
}

int ImportArena(int device, int fd, uint64_t bytes, bool writable, DeviceArena* arena) {
  const CurrentDevice current(device);
  if (current.error() != cudaSuccess) return current.error();
  CUmemGenericAllocationHandle handle = 0;
  void* const descriptor = reinterpret_cast<void*>(static_cast<intptr_t>(fd));
  if (const CUresult result = TheDriver().import_handle(&handle, descriptor,
                                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)) {
    return ErrorOf(result);
  }
  return ErrorOf(MapHandle(device, handle, bytes, writable, arena));
}

int ReleaseArena(int device, DeviceArena* arena) {
  if (arena->address == 0) return cudaSuccess;
  const CurrentDevice current(device);
  if (current.error() != cudaSuccess) return current.error();
  cudaError_t error = cudaDeviceSynchronize();
  const Driver& d = TheDriver();
  const CUresult unmapped = d.unmap(arena->address, arena->bytes);
  if (unmapped == CUDA_SUCCESS) (void)d.unreserve(arena->address, arena->bytes);
  *arena = {};
  return error != cudaSuccess ? static_cast<int>(error) : ErrorOf(unmapped);
}

int OpenIpc(int device, const uint8_t* handle, DeviceArena* memory) {
  static_assert(sizeof(cudaIpcMemHandle_t) == kIpcHandleBytes);
  const CurrentDevice current(device);
  if (current.error() != cudaSuccess) return current.error();
  cudaIpcMemHandle_t imported;
  std::memcpy(&imported, handle, sizeof(imported));
  void* at = nullptr;
  if (const cudaError_t error =
          cudaIpcOpenMemHandle(&at, imported, cudaIpcMemLazyEnablePeerAccess)) {
    (void)cudaGetLastError();  // not sticky: the caller has it
    return error;
  }
  CUdeviceptr base = 0;
  size_t bytes = 0;
  if (const CUresult result =
          TheDriver().address_range(&base, &bytes, reinterpret_cast<CUdeviceptr>(at))) {
    (void)cudaIpcCloseMemHandle(at);
    return ErrorOf(result);
  }
  *memory = {reinterpret_cast<uint64_t>(at), base + bytes - reinterpret_cast<CUdeviceptr>(at)};
  return cudaSuccess;
}

int CloseIpc(int device, DeviceArena* memory) {
  if (memory->address == 0) return cudaSuccess;
  const CurrentDevice current(device);
  if (current.error() != cudaSuccess) return current.error();
  const cudaError_t error = cudaIpcCloseMemHandle(reinterpret_cast<void*>(memory->address));
  *memory = {};
  return error;
}

int Copy2D(int device, void* to, const void* from, const Copied2D& shape) {
  const PageCopy copy{to, from, shape};
  return CopyPages(device, &copy, 1);
}

int CopyPages(int device, const PageCopy* copies, uint64_t count) {
  const CurrentDevice current(device);
  if (current.error() != cudaSuccess) return current.error();
  cudaStream_t stream = nullptr;
  cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error != cudaSuccess) return error;
  for (uint64_t i = 0; i < count && error == cudaSuccess; ++i) {
    const auto& [to, from, shape] = copies[i];
    error = shape.rows == 1 ? cudaMemcpyAsync(to, from, shape.width, cudaMemcpyDefault, stream)
                            : cudaMemcpy2DAsync(to, shape.pitch, from, shape.pitch, shape.width,
                                                shape.rows, cudaMemcpyDefault, stream);
  }
  // Also after an error: the caller may reuse what the copies before it still read.
  const cudaError_t finished = cudaStreamSynchronize(stream);
  if (error == cudaSuccess) error = finished;
  (void)cudaStreamDestroy(stream);
  return error;
}

int RegisterHost(void* base, uint64_t bytes, bool read_only) {
  const unsigned flags = cudaHostRegisterPortable | cudaHostRegisterMapped |
                         (read_only ? cudaHostRegisterReadOnly : 0u);
  const cudaError_t error = cudaHostRegister(base, bytes, flags);
  (void)cudaGetLastError();  // not sticky: the caller has it
  return error;
}

int UnregisterHost(void* base) { return cudaHostUnregister(base); }

}  // namespace kvstrata::cuda
