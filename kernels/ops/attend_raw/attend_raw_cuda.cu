// Every row goes from memory to registers in 16-byte pieces and from there into tensor cores:
//
//   scores   S[16 rows][8 heads] = K Q^T. A is K: lane (g, t) loads 8 channels of rows g and g + 8.
//            Channels of a product may come in any order if Q's come in the same.
//   weights  P = exp2(S - m), transposed in registers to the B of the next product.
//   output   O^T[channels][8 heads] += V^T P^T. A is V^T: lane (g, t) loads 8 channels of rows 2t,
//            2t + 1, 2t + 8, 2t + 9, and byte permutes pair the rows.
//
// With at most 8 query heads a KV head, no column is wasted. The keys of the next tile are asked
// for as soon as this tile's are used up, then the values: all but a small part of the time a warp
// has 8 KiB (head_dim 64: 4 KiB) in flight; 12 warps an SM. Asking the L2 for the next strip as
// well made everything 6 % slower.
#include "kernels/cuda/launch.cuh"
#include "kernels/ops/attend_raw/attend_raw_cuda.h"
#include "kernels/ops/attend_raw/work_share.cuh"
#include "kernels/ops/merge/merge_row.cuh"

namespace kvstrata::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kHeads = 8;      // query heads of a product
constexpr int kTileRows = 16;  // rows of a product
constexpr int kCtasMax = 640;  // the most splits of an item; their weights must fit into Shared

struct Arguments {
  RowSource rows;
  const std::byte* q;
  int64_t q_stride;
  float scale;  // with log2(e)
  int32_t batch, group;
  Partials with;
  AttentionOutput to;
  Partials partial;
  uint32_t* counters;
  float2* split_ml;  // [slots][group], m in powers of two
  float* split_o;    // [slots][group][head_dim]
};

template <int kDim>
struct Shape {
  static constexpr int kChunk = kDim < 128 ? kDim : 128;  // channels of a tile in registers
  static constexpr int kChunks = kDim / kChunk;
  static constexpr int kKeyLoads = kChunk / 32;    // a row and lane
  static constexpr int kValueLoads = kChunk / 64;  // a row and lane
  static constexpr int kColumns = kDim / 4;        // float4 of a row
  static constexpr int kCtasPerSm = kDim == 256 ? 2 : kDim == 128 ? 3 : 4;
};

template <int kDim>
struct Shared {
  Turn turn;
  float m[kWarps][kHeads], l[kWarps][kHeads];
  float top[kHeads], sum[kHeads];
  bool is_last;
  union {
    alignas(16) float o[kWarps][kHeads][kDim];
    float weight[kHeads][kCtasMax];
  };
};

__device__ __forceinline__ uint64_t AddressOf(uint64_t lane_address, int lane) {
  return __shfl_sync(kAllLanes, lane_address, lane);
}

// Attention of one warp over its strips, for the query heads of one KV head.
template <typename T, int kDim>
class WarpAttention {
  using S = Shape<kDim>;

 public:
  __device__ __forceinline__ WarpAttention(const Arguments& a, int sequence, int kv_head)
      : lane_(threadIdx.x % 32),
        g_(lane_ / 4),
        t_(lane_ % 4),
        to_values_(a.rows.layer.value_offset - a.rows.layer.key_offset),
        scale_(a.scale) {
    const std::byte* q = a.q + sequence * a.q_stride + int64_t{kv_head * a.group + g_} * kDim * 2;
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      q_[i] = g_ < a.group ? reinterpret_cast<const uint4*>(q)[4 * i + t_] : uint4{0, 0, 0, 0};
    }
  }

  // The warp's share of strips [begin, end): every fourth; where there are but two, half of one.
  __device__ __forceinline__ void Run(const RowSource& from, const AttendedRows& rows, int sequence,
                                      int kv_head, int32_t begin, int32_t end) {
    const int warp = threadIdx.x / 32;
    const bool halves = 2 * (end - begin) <= kWarps;
    const int32_t first = begin + (halves ? warp / 2 : warp);
    if (first >= end || rows.tokens == 0) return;
    RowStream stream(from, rows, sequence, kv_head, first, kWarps, end);
    if (halves) return OneTile(stream, warp % 2 * kTileRows);
    LoadKeys(stream.key, 0, 0);
    LoadValues(stream.key, 0, 0);
    for (int32_t strip = first; strip < end; strip += kWarps) {
      const uint64_t key = stream.key;
      const uint32_t present = stream.present;
      Tile(present & 0xFFFFu, key, 0, key, kTileRows, true);
      stream.Advance();
      Tile(present >> kTileRows, key, kTileRows, stream.key, 0, strip + kWarps < end);
    }
  }

  // Sums l over lanes. Afterwards every lane has those of heads 2t and 2t + 1.
  __device__ __forceinline__ void SumWeights() {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      l_[0] += __shfl_xor_sync(kAllLanes, l_[0], step);
      l_[1] += __shfl_xor_sync(kAllLanes, l_[1], step);
    }
  }
  __device__ __forceinline__ void StoreSums(Shared<kDim>& shared, int warp) const {
    if (g_ != 0) return;
    for (int i = 0; i < 2; ++i) {
      shared.m[warp][2 * t_ + i] = m_[i];
      shared.l[warp][2 * t_ + i] = l_[i];
    }
  }
  // The output relative to the CTA's maxima.
  __device__ __forceinline__ void StoreOutput(Shared<kDim>& shared, int warp, int group) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = 2 * t_ + i;
      if (head >= group) continue;
      const float weight = WeightOf(m_[i], shared.top[head]);
#pragma unroll
      for (int j = 0; j < kDim / 64; ++j) {
        float4* o = reinterpret_cast<float4*>(&shared.o[warp][head][64 * j + 8 * g_]);
        const auto& x = o_[j];
        o[0] = {weight * x[0][i], weight * x[0][2 + i], weight * x[1][i], weight * x[1][2 + i]};
        o[1] = {weight * x[2][i], weight * x[2][2 + i], weight * x[3][i], weight * x[3][2 + i]};
      }
    }
  }

 private:
  __device__ __forceinline__ void OneTile(const RowStream& stream, int row) {
    LoadKeys(stream.key, row, 0);
    LoadValues(stream.key, row, 0);
    Tile(stream.present >> row & 0xFFFFu, stream.key, row, stream.key, row, false);
  }
  // Rows [row, row + 16) of the strip at `key`, then asks for those at next_key.
  __device__ __forceinline__ void Tile(uint32_t present, uint64_t key, int row, uint64_t next_key,
                                       int next_row, bool has_next) {
    float s[4] = {0, 0, 0, 0};
#pragma unroll
    for (int c = 0; c < S::kChunks; ++c) {
      AddScores(c, s);
      if (c + 1 < S::kChunks) {
        LoadKeys(key, row, c + 1);
      } else if (has_next) {
        LoadKeys(next_key, next_row, 0);
      }
    }
    uint32_t p0 = 0, p1 = 0;
    if (present != 0) Weigh(present, s, p0, p1);
#pragma unroll
    for (int c = 0; c < S::kChunks; ++c) {
      if (present != 0) AddValues(c, p0, p1);
      if (c + 1 < S::kChunks) {
        LoadValues(key, row, c + 1);
      } else if (has_next) {
        LoadValues(next_key, next_row, 0);
      }
    }
  }

  static __device__ __forceinline__ uint4 Load(uint64_t address) {
    return kDim < 128 ? LoadOnce128(address) : LoadOnce256(address);
  }
  __device__ __forceinline__ void LoadKeys(uint64_t key, int row, int chunk) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint64_t from = AddressOf(key, row + 8 * half + g_) + chunk * 256 + t_ * 16;
#pragma unroll
      for (int i = 0; i < S::kKeyLoads; ++i) k_[half][i] = Load(from + i * 64);
    }
  }
  __device__ __forceinline__ void LoadValues(uint64_t key, int row, int chunk) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint64_t from = AddressOf(key, row + 2 * t_ + (r & 1) + 8 * (r >> 1)) + to_values_ +
                            chunk * 256 + g_ * 16;
#pragma unroll
      for (int j = 0; j < S::kValueLoads; ++j) v_[r][j] = Load(from + j * 128);
    }
  }

  // s[0..3]: rows g and g + 8, heads 2t and 2t + 1.
  __device__ __forceinline__ void AddScores(int chunk, float (&s)[4]) {
    float odd[4] = {0, 0, 0, 0};  // two chains of products instead of one twice as long
#pragma unroll
    for (int i = 0; i < S::kKeyLoads; ++i) {
      const uint4 a = k_[0][i], b = k_[1][i], q = q_[chunk * S::kKeyLoads + i];
      MmaM16N8K16<T>(s, a.x, b.x, a.y, b.y, q.x, q.y);
      MmaM16N8K16<T>(odd, a.z, b.z, a.w, b.w, q.z, q.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] += odd[i];
  }

  // Scores to weights: p0, p1 are rows {2t, 2t + 1} and {2t + 8, 2t + 9} of head g.
  __device__ __forceinline__ void Weigh(uint32_t present, float (&s)[4], uint32_t& p0,
                                        uint32_t& p1) {
    const bool low = present >> g_ & 1, high = present >> (g_ + 8) & 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      s[i] = low ? s[i] * scale_ : -INFINITY;
      s[2 + i] = high ? s[2 + i] * scale_ : -INFINITY;
    }
    const bool higher = fmaxf(s[0], s[2]) > m_[0] || fmaxf(s[1], s[3]) > m_[1];
    if (__any_sync(kAllLanes, higher)) RaiseMaxima(s);
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = exp2f(s[i] - m_[i & 1]);
    l_[0] += s[0] + s[2];
    l_[1] += s[1] + s[3];
    p0 = Transpose8x8(Element<T>::Pack(s[0], s[1]));
    p1 = Transpose8x8(Element<T>::Pack(s[2], s[3]));
  }

  __device__ __forceinline__ void RaiseMaxima(const float (&s)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float top = fmaxf(m_[i], fmaxf(s[i], s[2 + i]));
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
      }
      const float weight = WeightOf(m_[i], top);
      m_[i] = top;
      l_[i] *= weight;
#pragma unroll
      for (int j = 0; j < kDim / 64; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          o_[j][e][i] *= weight;
          o_[j][e][2 + i] *= weight;
        }
      }
    }
  }

  // Product e of a 64-channel piece j holds channels 64j + 8g + 2e (rows g) and the next (g + 8).
  __device__ __forceinline__ void AddValues(int chunk, uint32_t p0, uint32_t p1) {
#pragma unroll
    for (int j = 0; j < S::kValueLoads; ++j) {
      auto& o = o_[chunk * S::kValueLoads + j];
      const uint4 a = v_[0][j], b = v_[1][j], c = v_[2][j], d = v_[3][j];
      AddPair(o[0], a.x, b.x, c.x, d.x, p0, p1);
      AddPair(o[1], a.y, b.y, c.y, d.y, p0, p1);
      AddPair(o[2], a.z, b.z, c.z, d.z, p0, p1);
      AddPair(o[3], a.w, b.w, c.w, d.w, p0, p1);
    }
  }
  __device__ __forceinline__ static void AddPair(float (&o)[4], uint32_t a, uint32_t b, uint32_t c,
                                                 uint32_t d, uint32_t p0, uint32_t p1) {
    MmaM16N8K16<T>(o, LowHalves(a, b), HighHalves(a, b), LowHalves(c, d), HighHalves(c, d), p0, p1);
  }

  const int lane_, g_, t_;
  const int64_t to_values_;
  const float scale_;
  uint4 q_[kDim / 32];  // head g, channels 32i + 8t ..
  uint4 k_[2][S::kKeyLoads];
  uint4 v_[4][S::kValueLoads];
  float m_[2] = {-INFINITY, -INFINITY}, l_[2] = {0, 0};  // heads 2t, 2t + 1
  float o_[kDim / 64][4][4] = {};
};

// The CTA's partial of an item, in shared memory: maxima, sums, and outputs of each warp.
template <typename T, int kDim>
__device__ __forceinline__ void AttendStrips(const Arguments& a, Shared<kDim>& shared) {
  const int warp = threadIdx.x / 32;
  const Turn& turn = shared.turn;
  WarpAttention<T, kDim> attention(a, turn.sequence, turn.head);
  attention.Run(a.rows, turn.rows, turn.sequence, turn.head, turn.begin, turn.end);
  attention.SumWeights();
  attention.StoreSums(shared, warp);
  __syncthreads();
  if (threadIdx.x < kHeads) {
    float top = -INFINITY, sum = 0;
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, shared.m[w][threadIdx.x]);
    for (int w = 0; w < kWarps; ++w) {
      sum += WeightOf(shared.m[w][threadIdx.x], top) * shared.l[w][threadIdx.x];
    }
    shared.top[threadIdx.x] = top;
    shared.sum[threadIdx.x] = sum;
  }
  __syncthreads();
  attention.StoreOutput(shared, warp, a.group);
  __syncthreads();
}

template <int kDim>
__device__ __forceinline__ WeightedRow CtaRow(const Shared<kDim>& shared, int head, int column) {
  WeightedRow row{shared.top[head], shared.sum[head], {0, 0, 0, 0}};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float4 o = reinterpret_cast<const float4*>(shared.o[w][head])[column];
    row.o = {row.o.x + o.x, row.o.y + o.y, row.o.z + o.z, row.o.w + o.w};
  }
  return row;
}

template <int kDim>
__device__ void StoreSplit(const Arguments& a, const Shared<kDim>& shared, int32_t slot) {
  constexpr int kColumns = Shape<kDim>::kColumns;
#pragma unroll 1
  for (int i = threadIdx.x; i < a.group * kColumns; i += kThreads) {
    const int head = i / kColumns, column = i % kColumns;
    const WeightedRow row = CtaRow(shared, head, column);
    const int64_t at = int64_t{slot} * a.group + head;
    reinterpret_cast<float4*>(a.split_o)[at * kColumns + column] = row.o;
    if (column == 0) a.split_ml[at] = {row.m, row.l};
  }
}

// True in the CTA that is the last of `count` to get here for this item. The counter wraps to 0.
// One thread's atomic, between barriers, orders what the whole CTA wrote before and reads after.
template <int kDim>
__device__ bool IsLast(uint32_t* counter, int32_t count, Shared<kDim>& shared) {
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(count - 1)
                 : "memory");
    shared.is_last = before == static_cast<uint32_t>(count - 1);
  }
  __syncthreads();
  return shared.is_last;
}

// Maxima and sums of an item's splits, and each split's weight, in shared memory.
template <int kDim>
__device__ void WeighSplits(const Arguments& a, const Sharers& sharers, Shared<kDim>& shared) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int head = threadIdx.x / 32; head < a.group; head += kWarps) {
    float top = -INFINITY, sum = 0;
#pragma unroll 2
    for (int i = lane; i < sharers.count; i += 32) {
      const float2 ml = __ldcg(&a.split_ml[int64_t{sharers.Slot(i)} * a.group + head]);
      const float higher = fmaxf(top, ml.x);
      sum = WeightOf(top, higher) * sum + WeightOf(ml.x, higher) * ml.y;
      top = higher;
      shared.weight[head][i] = ml.x;
    }
    const float own = top;
    for (int step = 16; step > 0; step /= 2) {
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
    }
    sum *= WeightOf(own, top);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
#pragma unroll 1
    for (int i = lane; i < sharers.count; i += 32) {
      shared.weight[head][i] = WeightOf(shared.weight[head][i], top);
    }
    if (lane == 0) shared.top[head] = top, shared.sum[head] = sum;
  }
  __syncthreads();
}

// Outputs of splits on their way: four channels of splits first, first + 1, ...
template <int kDim>
struct SplitLoads {
  static constexpr int kCount = 16;
  float4 o[kCount];

  __device__ __forceinline__ void Load(const Arguments& a, const Sharers& sharers, int i,
                                       int first) {
    const int32_t stride = a.group * Shape<kDim>::kColumns;  // from a slot to the next
    const auto* from = reinterpret_cast<const float4*>(a.split_o) + i;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      o[j] = {0, 0, 0, 0};
      if (first + j < sharers.count) o[j] = __ldcg(from + sharers.Slot(first + j) * stride);
    }
  }
  __device__ __forceinline__ void AddTo(float4& sum, const float* weights, int count) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (j >= count) continue;
      const float w = weights[j];
      sum = {sum.x + w * o[j].x, sum.y + w * o[j].y, sum.z + w * o[j].z, sum.w + w * o[j].w};
    }
  }
};

// Four channels of an item's query row, over all its rows, to the output or to the partial.
__device__ __forceinline__ void StoreResult(const Arguments& a, int64_t row, int dim, int column,
                                            WeightedRow sum) {
  if (a.to.rows != nullptr) {
    AddParts(a.with, int64_t{a.batch} * a.rows.layer.kv_heads * a.group, row, dim, column, sum);
    return StoreRow(a.to, row, dim, column, sum);
  }
  reinterpret_cast<float4*>(a.partial.o + row * dim)[column] = sum.o;
  if (column != 0) return;
  a.partial.m[row] = sum.m * kLn2;
  a.partial.l[row] = sum.l;
}

// The item's result from its splits, in their order. The first loads do not wait for weights.
template <int kDim>
__device__ __forceinline__ void MergeSplits(const Arguments& a, int32_t item,
                                            Shared<kDim>& shared) {
  constexpr int kColumns = Shape<kDim>::kColumns;
  using Loads = SplitLoads<kDim>;
  const Sharers sharers = shared.turn.sharers;
  const int first_value = threadIdx.x;
  Loads loads;
  loads.Load(a, sharers, min(first_value, a.group * kColumns - 1), 0);
  WeighSplits(a, sharers, shared);
#pragma unroll 1
  for (int i = first_value; i < a.group * kColumns; i += kThreads) {
    const int head = i / kColumns, column = i % kColumns;
    WeightedRow row{shared.top[head], shared.sum[head], {0, 0, 0, 0}};
#pragma unroll 1
    for (int split = 0; split < sharers.count; split += Loads::kCount) {
      if (i != first_value || split != 0) loads.Load(a, sharers, i, split);
      loads.AddTo(row.o, &shared.weight[head][split], sharers.count - split);
    }
    StoreResult(a, int64_t{item} * a.group + head, kDim, column, row);
  }
}

template <typename T, int kDim>
__device__ __forceinline__ void TakeTurn(const Arguments& a, Shared<kDim>& shared) {
  constexpr int kColumns = Shape<kDim>::kColumns;
  AttendStrips<T, kDim>(a, shared);
  const Turn& turn = shared.turn;
  const Sharers& sharers = turn.sharers;
  const int32_t item = turn.sequence * a.rows.layer.kv_heads + turn.head;
  if (sharers.count > 1) {
    StoreSplit(a, shared, sharers.Slot(CtaIndex() - sharers.first));
    if (IsLast(a.counters + item, sharers.count, shared)) MergeSplits(a, item, shared);
    return;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < a.group * kColumns; i += kThreads) {
    const int head = i / kColumns, column = i % kColumns;
    StoreResult(a, int64_t{item} * a.group + head, kDim, column, CtaRow(shared, head, column));
  }
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads, Shape<kDim>::kCtasPerSm)
    AttendKernel(const __grid_constant__ Arguments a) {
  __shared__ Shared<kDim> shared;
  WaitForPrevious();
  LetNextStart();
  if (a.batch == 1) {
    OnlyTurn(a.rows, shared.turn);
  } else {
    FirstTurn<kThreads>(a.rows, a.batch * a.rows.layer.kv_heads, shared.turn);
  }
  if (shared.turn.sequence < 0) return;
  do {
    TakeTurn<T, kDim>(a, shared);
  } while (a.batch > 1 && NextTurn(a.rows, shared.turn));
}

bool IsPowerOfTwo(int32_t x) { return x > 0 && (x & (x - 1)) == 0; }
int32_t Log2(int32_t x) { return x <= 1 ? 0 : 31 - __builtin_clz(static_cast<unsigned>(x)); }

bool IsValid(const AttendRawBatch& w) {
  const PagedLayer& l = w.layer;
  const DeviceSelection& s = w.selection;
  return (l.head_dim == 64 || l.head_dim == 128 || l.head_dim == 256) && l.dtype != DType::kF32 &&
         IsPowerOfTwo(l.page_tokens) && l.slot_stride % 16 == 0 && l.head_stride % 16 == 0 &&
         l.key_offset % 16 == 0 && l.value_offset % 16 == 0 && l.kv_heads > 0 && w.batch >= 0 &&
         w.group >= 1 && w.group <= kHeads && w.q_stride % 16 == 0 &&
         (s.unit_tokens == 0 || IsPowerOfTwo(s.unit_tokens)) &&
         (s.groups == 1 || s.groups == l.kv_heads) &&
         (w.to.rows != nullptr || w.partial.o != nullptr);
}

// CTAs that the current GPU holds at once.
template <int kDim>
int32_t ResidentCtas() {
  return min(DeviceAttribute(cudaDevAttrMultiProcessorCount) * Shape<kDim>::kCtasPerSm, kCtasMax);
}

int32_t ResidentCtas(int32_t head_dim) {
  return head_dim == 256   ? ResidentCtas<256>()
         : head_dim == 128 ? ResidentCtas<128>()
                           : ResidentCtas<64>();
}

// All CTAs that fit; of one sequence, as many for each KV head.
dim3 GridOf(const AttendRawBatch& w) {
  const int32_t ctas = ResidentCtas(w.layer.head_dim), heads = w.layer.kv_heads;
  return w.batch > 1 ? dim3(ctas) : dim3(ctas > heads ? ctas / heads : 1, heads);
}

int64_t SlotRows(int32_t group, int32_t head_dim) {
  return int64_t{2} * ResidentCtas(head_dim) * group;
}

Arguments ArgumentsOf(const AttendRawBatch& w) {
  Arguments a{};
  a.rows = {w.layer, w.selection, w.tokens, Log2(w.layer.page_tokens),
            Log2(w.selection.unit_tokens)};
  a.q = static_cast<const std::byte*>(w.q);
  a.q_stride = w.q_stride;
  a.scale = w.scale * kLog2E;
  a.batch = w.batch;
  a.group = w.group;
  a.with = w.with;
  a.to = w.to;
  a.partial = w.partial;
  a.counters = w.counters;
  a.split_o = w.workspace;
  a.split_ml = reinterpret_cast<float2*>(w.workspace +
                                         SlotRows(w.group, w.layer.head_dim) * w.layer.head_dim);
  return a;
}

template <int kDim>
int Launch(const AttendRawBatch& w, const Arguments& a, Stream stream) {
  return w.layer.dtype == DType::kBF16
             ? LaunchDependent(AttendKernel<__nv_bfloat16, kDim>, GridOf(w), kThreads, 0, stream, a)
             : LaunchDependent(AttendKernel<__half, kDim>, GridOf(w), kThreads, 0, stream, a);
}

}  // namespace

int64_t AttendRawWorkspaceBytes(int32_t group, int32_t head_dim) {
  return SlotRows(group, head_dim) * (head_dim + 2) * int64_t{sizeof(float)};
}

int AttendRawCuda(const AttendRawBatch& w, Stream stream) {
  if (!IsValid(w)) return cudaErrorInvalidValue;
  if (w.batch == 0) return cudaSuccess;
  const Arguments a = ArgumentsOf(w);
  switch (w.layer.head_dim) {
    case 64:
      return Launch<64>(w, a, stream);
    case 128:
      return Launch<128>(w, a, stream);
    default:
      return Launch<256>(w, a, stream);
  }
}

}  // namespace kvstrata::cuda
