// SPDX-License-Identifier: Apache-2.0
// The packer of codec planes on a GPU, for raw pages in its memory. Private to planes.
//
// Bytes are those that the host's recompressor writes, but for the header: nobody hashes them.
// Threads: any, several at once; runs wait for each other, on one stream of low priority. Cost:
// reads each row twice, copies groups that an extent takes over. Memory: extents until they are
// copied away, and 64 MiB of theirs for the next ones. Where the GPU has no room for that it packs
// nothing for some seconds, and the host does.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <vector>

#include "base/sync.h"
#include "kernels/codec/codec.h"
#include "kernels/codec/device_extents.h"
#include "kernels/plans/strata/planes_layout.h"

namespace kvstrata {

class CudaPlanesPacker final : public GpuPacker {
 public:
  // On GPU number `device` of this process; `ops` outlives it. CUDA_ERROR.
  static Result<std::unique_ptr<GpuPacker>> Make(const cuda::CudaOps& ops, int device);
  ~CudaPlanesPacker() override;

  // Whether it packs the raw rows of `tokens`, as they lie, into such groups.
  bool Packs(const RecompressInput& input, const Geometry& geometry, const PlanesFormat& format,
             Run tokens) const KVS_EXCLUDES(mu_);

  // Extents of `tokens`, one a part: the groups of `sources`, whose addresses the GPU may follow,
  // then those of raw rows. ABORTED when cancelled; FAILED_PRECONDITION when raw rows are missing;
  // GPU_MEMORY, CUDA_ERROR.
  Result<std::vector<ExtentDraft>> Seal(const RecompressInput& input, const Geometry& geometry,
                                        const PlanesFormat& format,
                                        std::span<const PlanesPart> parts, Run tokens,
                                        std::span<const PlanesExtent> sources) const
      KVS_EXCLUDES(mu_);

 private:
  CudaPlanesPacker(const cuda::CudaOps& ops, int device, cuda::Stream stream);

  Status Check(int code, const char* what) const { return CudaStatus(ops_, code, what); }
  // Where groups are written, and the extents that are.
  struct Target {
    PlanesExtent groups;
    std::byte* upper = nullptr;
    std::byte* lower = nullptr;
    std::vector<ExtentDraft> drafts;
  };

  Result<std::vector<ExtentDraft>> SealLocked(const RecompressInput& input,
                                              const Geometry& geometry, const PlanesFormat& format,
                                              std::span<const PlanesPart> parts, Run tokens,
                                              std::span<const PlanesExtent> sources) const
      KVS_REQUIRES(mu_);
  Status Take(const Geometry& geometry, const PlanesPart& part, Target* to) const KVS_REQUIRES(mu_);
  // All heads of one array of an extent, to their places in another.
  Status Copy(const std::byte* from, int64_t from_stride, std::byte* to, int64_t to_stride,
              int32_t heads) const;
  // The groups from position `begin` on.
  Status Pack(const RecompressInput& input, const Geometry& geometry, int32_t begin,
              const PlanesExtent& to) const KVS_REQUIRES(mu_);

  const cuda::CudaOps& ops_;
  const int device_;
  const cuda::Stream stream_;
  const std::shared_ptr<DeviceExtents> extents_;
  mutable Mutex mu_;
  mutable DeviceBuffer tables_ KVS_GUARDED_BY(mu_);  // addresses, and the range that is packed
  mutable PageLockedBuffer staging_ KVS_GUARDED_BY(mu_);
  mutable std::chrono::steady_clock::time_point short_until_ KVS_GUARDED_BY(mu_){};
};

}  // namespace kvstrata
