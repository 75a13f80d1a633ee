// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda_library.h"

#include <dlfcn.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

namespace kvstrata::cuda {
namespace {

constexpr char kFile[] = "libkvstrata_cuda.so";

// The folder, with its '/', of the file that this code was mapped from, which only the kernel
// knows: of a program dladdr tells what was typed, and of a library what dlopen was given. "" if it
// cannot be told.
std::string OwnFolder() {
  const auto here = reinterpret_cast<uintptr_t>(&OwnFolder);
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0, end = 0;
    const size_t path = line.find('/');
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR, &begin, &end) != 2) continue;
    if (here < begin || here >= end) continue;
    return path == line.npos ? std::string() : line.substr(path, line.rfind('/') + 1 - path);
  }
  return {};
}

std::vector<std::string> Candidates() {
  if (const char* path = std::getenv("KVSTRATA_CUDA_LIBRARY")) return {path};
  const std::string folder = OwnFolder();
  if (folder.empty()) return {kFile};
  return {folder + kFile, folder + "../lib/" + kFile, kFile};
}

std::string WithoutGpu() {
  return "do without a GPU: pool.device = \"emulated\" of a daemon, backend simd of an engine";
}

Result<const CudaOps*> Load() {
  std::string tried;
  void* library = nullptr;
  for (const std::string& path : Candidates()) {
    library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library != nullptr) break;
    tried += tried.empty() ? path : ", " + path;
  }
  if (library == nullptr) {
    return Unavailable("CUDA_LIBRARY", "no " + std::string(kFile) + " (tried " + tried +
                                           "); set KVSTRATA_CUDA_LIBRARY to its path, or " +
                                           WithoutGpu());
  }
  const auto table = reinterpret_cast<const CudaOps* (*)()>(dlsym(library, "kvs_cuda_ops"));
  if (table == nullptr || table()->version != kCudaOpsVersion) {
    return Unavailable("CUDA_LIBRARY", std::string(kFile) + " is of another version of kvstrata" +
                                           "; install the one of this release");
  }
  if (table()->device_count() == 0) {
    return Unavailable("CUDA_NO_DEVICE",
                       "no GPU is visible to this process; check nvidia-smi and "
                       "CUDA_VISIBLE_DEVICES, or " +
                           WithoutGpu());
  }
  return table();
}

}  // namespace

Result<const CudaOps*> LoadCudaOps() {
  static const Result<const CudaOps*> loaded = Load();
  return loaded;
}

}  // namespace kvstrata::cuda
