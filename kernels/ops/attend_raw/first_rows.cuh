// The rows of a warp's first strip, on their way to shared memory while the kernels before this one
// still run: a lane copies the key and the value of its row, whole (cp.async.bulk).
//
// Not by loads: what an SM has asked of the memory by loads and by cp.async is answered in turn. A
// CTA of the kernel before that merges on the same SM reads words of the L2, and got those behind
// all the rows: 64 KB of loads on their way make such a read 4200 clocks long instead of 300, as
// many bulk copies of rows 900, and the rows come as fast (H100).
#ifndef KVSTRATA_KERNELS_OPS_ATTEND_RAW_FIRST_ROWS_CUH_
#define KVSTRATA_KERNELS_OPS_ATTEND_RAW_FIRST_ROWS_CUH_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/fragments.cuh"

namespace kvstrata::cuda {

// A warp's. Rows lie 16 bytes further apart than they are long, for the banks' sake.
template <int kDim>
struct FirstRowsStorage {
  static constexpr int kRows = kDim == 256 ? 16 : 32;
  static constexpr int kRowBytes = kDim * 2;

  alignas(16) std::byte keys[kRows][kRowBytes + 16];
  alignas(16) std::byte values[kRows][kRowBytes + 16];
};

// Used by whole warps, once a turn of their CTA at most.
template <int kDim>
class FirstRows {
 public:
  using Storage = FirstRowsStorage<kDim>;
  static constexpr int kRows = Storage::kRows;

  // `barrier`, in shared memory, is the warp's own from here on.
  __device__ __forceinline__ FirstRows(Storage* storage, uint64_t* barrier)
      : storage_(storage), barrier_(SharedAddress(barrier)) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 == 0) {
      asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier_) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
#endif
  }

  // Starts the copies of the rows of lanes [first, first + count), which become rows 0 .. count - 1
  // of the storage. Every lane has the address of a key, whose value is `to_values` behind it.
  // Whoever used the storage before is behind a barrier of the CTA.
  __device__ __forceinline__ void Ask(uint64_t key, int64_t to_values, int first, int count) {
    const int lane = threadIdx.x % 32, row = lane - first;
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (lane == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier_),
                   "r"(2 * count * Storage::kRowBytes)
                   : "memory");
    }
    if (row < 0 || row >= count) return;
    CopyRow(storage_->keys[row], key);
    CopyRow(storage_->values[row], key + to_values);
#else
    if (row >= 0 && row < count) {
      CopyRow(storage_->keys[row], key);
      CopyRow(storage_->values[row], key + to_values);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
  }

  // Until the rows that were asked for are there. For copies of this warp: no deadline.
  __device__ __forceinline__ void Await() {
#if __CUDA_ARCH__ >= 900
    uint32_t done = 0;
    while (done == 0) {
      asm volatile(
          "{\n .reg .pred p;\n"
          " mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
          " selp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(barrier_), "r"(parity_)
          : "memory");
    }
    parity_ ^= 1;
#else
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
#endif
  }

  // 16 bytes of a row, `at` bytes from its beginning.
  __device__ __forceinline__ uint4 Key(int row, int at) const {
    return *reinterpret_cast<const uint4*>(&storage_->keys[row][at]);
  }
  __device__ __forceinline__ uint4 Value(int row, int at) const {
    return *reinterpret_cast<const uint4*>(&storage_->values[row][at]);
  }

 private:
  static __device__ __forceinline__ uint32_t SharedAddress(const void* at) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(at));
  }
  __device__ __forceinline__ void CopyRow(std::byte* to, uint64_t from) const {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(SharedAddress(to)),
        "l"(from), "n"(Storage::kRowBytes), "r"(barrier_)
        : "memory");
#else
#pragma unroll
    for (int at = 0; at < Storage::kRowBytes; at += 16) {
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(SharedAddress(to) +
                                                                              at),
                   "l"(from + at)
                   : "memory");
    }
#endif
  }

  Storage* const storage_;
  const uint32_t barrier_;
  uint32_t parity_ = 0;
};

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_RAW_FIRST_ROWS_CUH_
