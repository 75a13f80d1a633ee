// SPDX-License-Identifier: Apache-2.0
// A CTA attends a share of the chosen blocks of one (sequence, KV head); the last CTA of an item
// merges the shares.
//
// Floor on an H100 (3.1 TB/s), 8 KV heads x 128, keep 32 of 96, blocks of 8, batch 1: a packed row
// is 80 bytes, so that 6.25 % of 128K / 1M tokens are 10.5 / 84 MB, 3.4 / 27 us, and as much again
// to score all blocks; memory brings a row every 6 cycles of an SM. What it takes, and where the
// time goes, is in bench/notes/cuda.md.
#include <algorithm>

#include "kernels/cuda/warps/last_arrival.cuh"
#include "kernels/cuda/warps/launch.cuh"
#include "kernels/plans/mosaickv/ops/attend_packed/run_sums.cuh"

namespace kvstrata::cuda {
namespace {

constexpr int32_t kStagedMost = 16384;  // entries of a list that each CTA of an item reads

struct Arguments {
  AttendPackedBatch work;
  WarpMemory memory;
  int32_t staged;   // entries of a list that fit into shared memory
  float scale;      // with log2(e)
  Partials splits;  // what an item's CTAs leave, in the workspace
};

template <int kDim, int kChannels>
struct Shared {
  int32_t segments;
  Shares shares;
  RotatedQueries<kDim, kChannels> queries;  // `rotated` serves as the sums of values at the end
  BlockPlaces<PackedShape<kDim, kChannels>::kThreadsMax> places;
  RunSums<kDim, kChannels> sums;
  bool is_last;
};

// Blocks [begin, end) of the chosen ones, to the total in `shared`. `staged`: the same blocks,
// whose list may lie where tiles will.
template <int kDim, int kChannels>
__device__ __forceinline__ void AttendShare(const Arguments& a, const SegmentTable& segments,
                                            ChosenBlocks chosen, int32_t begin, int32_t end,
                                            uint4* dynamic, Shared<kDim, kChannels>& shared) {
  const PackedLayer& layer = a.work.layer;
  const int group = a.work.queries.group, stored = StoredChannels(layer);
  auto* scratch = reinterpret_cast<float*>(dynamic);
  const auto tables = static_cast<uint32_t>(__cvta_generic_to_shared(dynamic));
  const uint32_t own = a.memory.PartOf(tables, threadIdx.x / 32);
  RowAttention<kChannels> attention(a.scale, tables, own);
  const auto thread = static_cast<int32_t>(threadIdx.x), threads = static_cast<int32_t>(blockDim.x);
  const auto opener = [&](int run) -> const PackedSegment& {
    return segments.at[shared.shares.begins[run]];
  };
  constexpr int kNone = -1;
  int open = kNone;             // run
  int32_t count = 0, done = 0;  // places in shared memory, and those done with
#pragma unroll 1
  while (true) {
    if (done == count && begin < end) {
      __syncthreads();  // the places before are used up
      count = min(end - begin, threads);
      done = 0;
      if (thread < count) {
        shared.places.Set(thread, chosen.At(begin + thread), segments, shared.shares, stored);
      }
      chosen.Unstage();
      begin += count;
      __syncthreads();
    }
    // The next run, and how many of the blocks lie in it.
    int run = kNone, n = 0;
    if (done < count && shared.places.runs[done] != shared.places.kNoRun) {
      run = shared.places.runs[done];
      n = __syncthreads_count(thread >= done && thread < count &&
                              shared.places.runs[thread] == run);
    }
    if (open != kNone && run != open) {
      shared.sums.Add(attention, opener(open).r_v, stored, group, scratch, shared.queries.rotated);
    }
    if (run == kNone) return;
    const PackedSegment& s = opener(run);
    const TileRows rows{shared.places.keys + done, shared.places.values + done, n,
                        31 - __clz(s.block)};
    if (run == open) {
      attention.Begin(rows);
    } else {
      open = run;
      FirstRows<kDim, kChannels> first_rows;  // before the many of keys and values
      first_rows.Load(s.r_k);
      attention.Open(RowFormat::Of(stored, s.keep, s.neighbours));
      attention.Begin(rows);
      shared.queries.Rotate(s.r_k, first_rows, group);
      __syncthreads();
      shared.queries.FillTables(reinterpret_cast<char*>(dynamic), group);
      __syncthreads();
    }
    attention.Run(rows, group);
    done += n;
  }
}

// The rotations of all runs to the L2, by all CTAs of an item.
template <int kDim, int kChannels>
__device__ __forceinline__ void PrefetchRotations(const SegmentTable& segments,
                                                  const Shares& shares) {
#pragma unroll 1
  for (int i = blockIdx.x; i < 2 * shares.runs; i += gridDim.x) {
    const PackedSegment& s = segments.at[shares.begins[i / 2]];
    PrefetchRotation<kDim, kChannels>(i % 2 == 0 ? s.r_k : s.r_v);
  }
}

// The `parts` splits of an item and the partials of other ops to its output, each by several
// threads. `scratch`: a WeightedRow a thread.
template <int kDim>
__device__ __forceinline__ void MergeItem(const Arguments& a, int32_t item, int32_t parts,
                                          WeightedRow* scratch) {
  constexpr int kColumns = kDim / 4;
  const AttendPackedBatch& w = a.work;
  const int group = w.queries.group, outputs = group * kColumns;
  const int slices = max(static_cast<int>(blockDim.x) / outputs, 1);
  const int32_t each = (parts + slices - 1) / slices;
  const int64_t rows = int64_t{w.queries.batch} * w.layer.kv_heads * group;
  const auto row_of = [&](int output) { return int64_t{item} * group + output / kColumns; };
  const auto store = [&](int output, const WeightedRow& sum) {
    StoreResult({}, w.to, w.partial, rows, row_of(output), kDim, output % kColumns, sum);
  };
  for (int i = threadIdx.x; i < slices * outputs; i += blockDim.x) {
    const int slice = i / outputs, output = i % outputs, column = output % kColumns;
    const int64_t first = min(slice * each, parts);
    const Partials some{a.splits.m + first * rows, a.splits.l + first * rows,
                        a.splits.o + first * rows * kDim,
                        static_cast<int32_t>(min(first + each, int64_t{parts}) - first)};
    WeightedRow sum;
    AddParts<4>(some, rows, row_of(output), kDim, column, sum);
    if (slice == slices - 1 && w.to.rows != nullptr) {
      AddParts(w.with, rows, row_of(output), kDim, column, sum);
    }
    if (slices == 1) {
      store(output, sum);
    } else {
      scratch[i] = sum;
    }
  }
  if (slices == 1) return;
  __syncthreads();
  if (static_cast<int>(threadIdx.x) >= outputs) return;
  WeightedRow sum = scratch[threadIdx.x];
  for (int slice = 1; slice < slices; ++slice) {
    const WeightedRow& x = scratch[slice * outputs + threadIdx.x];
    sum.Add(x.m, x.l, x.o);
  }
  store(threadIdx.x, sum);
}

// Grid (CTAs an item, kv_heads, batch).
template <int kDim, int kChannels>
__global__ void __launch_bounds__(PackedShape<kDim, kChannels>::kThreadsMax, 1)
    AttendPackedKernel(const __grid_constant__ Arguments a) {
  extern __shared__ uint4 all_dynamic[];
  __shared__ Shared<kDim, kChannels> shared;
  constexpr int kColumns = kDim / 4;
  const AttendPackedBatch& w = a.work;
  const SegmentTable segments(all_dynamic, shared.segments);
  uint4* const dynamic = SegmentTable::Behind(all_dynamic, w.layer);
  const int head = blockIdx.y, sequence = blockIdx.z, group = w.queries.group;
  if (!w.ahead) WaitForPrevious();
  segments.Load(w.layer, sequence, head);
  shared.sums.Clear();
  __syncthreads();
  if (threadIdx.x < 32) shared.shares.FindRuns(segments);
  __syncthreads();
  if (w.ahead) PrefetchRotations<kDim, kChannels>(segments, shared.shares);
  WaitForPrevious();
  LetNextStart();
  shared.queries.Load(w.queries, sequence, head);
  ChosenBlocks chosen = ChosenBlocks::Of(w.selection, sequence, head, segments.blocks());
  chosen.Stage(w.selection.list_stride, reinterpret_cast<int32_t*>(dynamic), a.staged);
  __syncthreads();
  shared.shares.Cut(chosen, segments);
  __syncthreads();
  const int32_t shares = shared.shares.count, cta = static_cast<int32_t>(blockIdx.x);
  const int32_t sharers = max(shares, 1);
  if (cta >= sharers) return;
  if (cta < shares) {
    const int2 blocks = shared.shares.At(cta);
    AttendShare(a, segments, chosen, blocks.x, blocks.y, dynamic, shared);
  }

  const int32_t item = sequence * w.layer.kv_heads + head;
  const int64_t rows = int64_t{w.queries.batch} * w.layer.kv_heads * group;
  for (int i = threadIdx.x; i < group * kColumns; i += blockDim.x) {
    const int of_head = i / kColumns, column = i % kColumns;
    const int64_t row = int64_t{item} * group + of_head;
    const WeightedRow x{shared.sums.total_m[of_head], shared.sums.total_l[of_head],
                        reinterpret_cast<const float4*>(shared.sums.total_o[of_head])[column]};
    if (sharers == 1) {
      StoreResult(w.with, w.to, w.partial, rows, row, kDim, column, x);
      continue;
    }
    const int64_t at = cta * rows + row;
    reinterpret_cast<float4*>(a.splits.o + at * kDim)[column] = x.o;
    if (column != 0) continue;
    a.splits.m[at] = x.m * kLn2;
    a.splits.l[at] = x.l;
  }
  if (sharers == 1) return;
  if (!ArrivesLast(w.counters + item, sharers, shared.is_last)) return;
  MergeItem<kDim>(a, item, sharers, reinterpret_cast<WeightedRow*>(dynamic));
}

// CTAs that share an item.
int32_t CtasOf(const AttendPackedBatch& w) {
  const int32_t items = w.layer.kv_heads * w.queries.batch;
  return std::max(1, DeviceAttribute(cudaDevAttrMultiProcessorCount) / std::max(items, 1));
}

int64_t SplitRows(const AttendPackedBatch& w) {
  return int64_t{CtasOf(w)} * w.queries.batch * w.layer.kv_heads * w.queries.group;
}

template <int kDim, int kChannels>
int Launch(const AttendPackedBatch& w, Stream stream) {
  const auto kernel = AttendPackedKernel<kDim, kChannels>;
  using Shape = PackedShape<kDim, kChannels>;
  const int tables =
      RotatedQueries<kDim, kChannels>::TablesOf(w.queries.group) * QueryTable<kChannels>::kBytes;
  const int segments = SegmentTable::BytesOf(w.layer);
  const WarpMemory memory = WarpMemory::Of(
      Shape::kThreadsMax, int{sizeof(Shared<kDim, kChannels>)} + segments, 1,
      2 * LargestFormat(w.layer).tile_bytes(), RowAttention<kChannels>::kOtherBytes, tables);
  // Where tables and tiles lie: before them a list, then sums of warps and products of rotations,
  // and at the end what is merged.
  constexpr int kFloat = sizeof(float);
  const int threads = memory.warps * 32;
  const int bytes = std::max(
      {memory.total(), RunSums<kDim, kChannels>::ScratchFloats(threads, w.queries.group) * kFloat,
       threads * int{sizeof(WeightedRow)}});
  if (const int error = AllowShared(kernel, segments + bytes); error != 0) return error;
  Arguments a{w, memory, std::min(bytes / kFloat, kStagedMost), w.scale * kLog2E, {}};
  a.splits.o = w.workspace;
  a.splits.m = w.workspace + SplitRows(w) * kDim;
  a.splits.l = a.splits.m + SplitRows(w);
  return LaunchDependent(kernel, dim3(CtasOf(w), w.layer.kv_heads, w.queries.batch), threads,
                         segments + bytes, stream, a);
}

bool IsValid(const AttendPackedBatch& w) {
  const DeviceSelection& s = w.selection;
  const bool chosen =
      s.unit_tokens == 1 && s.groups == w.layer.kv_heads && s.lists == nullptr && !s.shared;
  return IsValid(w.queries) && (s.unit_tokens == 0 || chosen) &&
         (w.to.rows != nullptr || w.partial.o != nullptr);
}

}  // namespace

int64_t AttendPackedWorkspaceBytes(const AttendPackedBatch& w) {
  return SplitRows(w) * (w.layer.head_dim + 2) * int64_t{sizeof(float)};
}

int AttendPackedCuda(const AttendPackedBatch& w, Stream stream) {
  if (!IsValid(w)) return cudaErrorInvalidValue;
  if (w.queries.batch == 0) return cudaSuccess;
  return ForPacked(w.layer,
                   [&]<int kDim, int kChannels>() { return Launch<kDim, kChannels>(w, stream); });
}

}  // namespace kvstrata::cuda
