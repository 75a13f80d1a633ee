#include "kernels/ops/merge/merge_row.cuh"

namespace kvstrata::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) MergeKernel(const __grid_constant__ MergeBatch w) {
  const int64_t rows = int64_t{w.batch} * w.query_heads;
  const int columns = w.head_dim / 4;
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= rows * columns) return;
  WeightedRow sum;
  AddParts(w.from, rows, at / columns, w.head_dim, static_cast<int>(at % columns), sum);
  StoreRow(w.to, at / columns, w.head_dim, static_cast<int>(at % columns), sum);
}

}  // namespace

int MergeCuda(const MergeBatch& w, Stream stream) {
  if (w.head_dim % 4 != 0 || w.from.parts < 1 || w.to.rows == nullptr) return cudaErrorInvalidValue;
  const int64_t work = int64_t{w.batch} * w.query_heads * (w.head_dim / 4);
  if (work == 0) return cudaSuccess;
  const auto blocks = static_cast<uint32_t>((work + kThreads - 1) / kThreads);
  MergeKernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(w);
  return cudaGetLastError();
}

}  // namespace kvstrata::cuda
