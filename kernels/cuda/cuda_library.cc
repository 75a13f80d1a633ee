#include "kernels/cuda/cuda_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace kvstrata::cuda {
namespace {

constexpr char kFile[] = "libkvstrata_cuda.so";

// The folder of the library or program that holds this function; "" if it cannot be told.
std::string OwnFolder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&OwnFolder), &info) == 0 || info.dli_fname == nullptr) {
    return {};
  }
  const std::string file = info.dli_fname;
  const size_t slash = file.rfind('/');
  return slash == std::string::npos ? std::string() : file.substr(0, slash + 1);
}

std::vector<std::string> Candidates() {
  if (const char* path = std::getenv("KVSTRATA_CUDA_LIBRARY")) return {path};
  const std::string folder = OwnFolder();
  return {folder + kFile, folder + "../lib/" + kFile, kFile};
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
    return Unavailable("CUDA_LIBRARY",
                       "no " + std::string(kFile) + " (tried " + tried +
                           "); set KVSTRATA_CUDA_LIBRARY to its path, or use backend simd");
  }
  const auto table = reinterpret_cast<const CudaOps* (*)()>(dlsym(library, "kvs_cuda_ops"));
  if (table == nullptr || table()->version != kCudaOpsVersion) {
    return Unavailable("CUDA_LIBRARY", std::string(kFile) + " is of another version of kvstrata" +
                                           "; install the one of this release");
  }
  if (table()->device_count() == 0) {
    return Unavailable("CUDA_NO_DEVICE",
                       "no GPU is visible to this process; check nvidia-smi and "
                       "CUDA_VISIBLE_DEVICES, or use backend simd");
  }
  return table();
}

}  // namespace

Result<const CudaOps*> LoadCudaOps() {
  static const Result<const CudaOps*> loaded = Load();
  return loaded;
}

}  // namespace kvstrata::cuda
