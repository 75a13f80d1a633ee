// SPDX-License-Identifier: Apache-2.0
// The ops on the CPU, without a daemon: how close to the memory's bandwidth, how many GFLOP/s.
//
//   ops_bench [--json-out FILE] [Google Benchmark's flags]
//
// All cases of one run use the same arrays: 4 layers of 32K tokens, 8 KV heads x 128, bf16, 512 MiB
// together, rotated by layer so that no case finds its input in the L3. "read" reads a layer
// plainly with the same threads; a ratio to it is the fraction of the bandwidth reached. Packed
// cases read as many tokens in 40 MiB a layer.
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench/planes_case.h"
#include "bench/results.h"
#include "kernels/backend/backend.h"
#include "kernels/cpu/simd_target.h"
#include "kernels/plans/mosaickv/ops/packed_ops.h"

namespace kvstrata {
namespace {

constexpr int kThreads = 2;
constexpr int kTokens = 32768;
constexpr Geometry kGeometry{4, 32, 8, 128, 16, DType::kBF16};
constexpr int kGroup = 4;
constexpr int kDim = kGeometry.head_dim;

// What all cases read. Random, never zeros: pages of zeros may share one physical page.
struct Arrays {
  std::vector<std::byte> memory;
  std::vector<std::byte*> pages;
  std::vector<float> q;
  PageLayout layout = PageLayout::Of(kGeometry);
  std::unique_ptr<Executor> pool = NewThreadPool(kThreads);
  int next_layer = 0;

  Arrays() : memory(kTokens / kGeometry.page_tokens * kGeometry.page_bytes() + 4096) {
    uint64_t x = std::random_device()() | 1;
    auto* words = reinterpret_cast<uint64_t*>(memory.data());
    for (size_t i = 0; i < memory.size() / 8; ++i) {
      x ^= x << 13, x ^= x >> 7, x ^= x << 17;
      words[i] = (x & 0x807F807F807F807Full) | 0x3F003F003F003F00ull;  // bf16 in +-[0.5, 1)
    }
    auto base = reinterpret_cast<uintptr_t>(memory.data());
    base = (base + 4095) / 4096 * 4096;
    for (int i = 0; i < kTokens / kGeometry.page_tokens; ++i) {
      pages.push_back(reinterpret_cast<std::byte*>(base) + i * kGeometry.page_bytes());
    }
    std::shuffle(pages.begin(), pages.end(), std::mt19937(static_cast<uint32_t>(x)));
    std::mt19937 engine(static_cast<uint32_t>(x >> 32));
    std::normal_distribution<float> normal;
    q.resize(64 * kGeometry.query_heads * kDim);
    for (float& value : q) value = normal(engine);
  }
  int NextLayer() { return next_layer++ % kGeometry.layers; }
  PagedRows Keys(int layer, int head) const { return KeysOf(pages.data(), layout, layer, head); }
  PagedRows Values(int layer, int head) const {
    return ValuesOf(pages.data(), layout, layer, head);
  }
};

Arrays& Shared() {
  static Arrays arrays;
  return arrays;
}

const Backend& Simd() { return *FindBackend("simd").value(); }

// Times run(layer, i) for i = 0, 1, ..., which reads `bytes` of the layer.
template <typename Fn>
void Measure(benchmark::State& state, int64_t bytes, const Fn& run) {
  int i = 0;
  for ([[maybe_unused]] auto _ : state) run(Shared().NextLayer(), i++);
  state.SetBytesProcessed(state.iterations() * bytes);
}

using Wide = uint64_t __attribute__((vector_size(64), may_alias));

// Reads a layer's keys and values plainly; what attend_raw is measured against.
void Read(benchmark::State& state) {
  Arrays& a = Shared();
  constexpr int kPagesAtOnce = 64;
  const int64_t bytes = a.layout.layer_stride;
  Measure(state, static_cast<int64_t>(a.pages.size()) * bytes, [&](int layer, int) {
    a.pool->ParallelFor(static_cast<int64_t>(a.pages.size()) / kPagesAtOnce, [&](int64_t item) {
      Wide sum0{}, sum1{};
      for (int64_t p = item * kPagesAtOnce; p < (item + 1) * kPagesAtOnce; ++p) {
        const std::byte* from = a.pages[static_cast<size_t>(p)] + layer * bytes;
        for (int64_t at = 0; at < bytes; at += 128) {
          sum0 ^= *reinterpret_cast<const Wide*>(from + at);
          sum1 ^= *reinterpret_cast<const Wide*>(from + at + 64);
        }
      }
      sum0 ^= sum1;
      benchmark::DoNotOptimize(sum0);
    });
  });
}

// attend_raw and merge of one decode step and layer; every head attends `runs`.
class Step {
 public:
  // rotary: of keys that are stored before rotary embedding; null: they are used as they are.
  Step(std::vector<std::vector<Run>> slices, int queries, int position,
       const RotaryTable* rotary = nullptr)
      : slices_(std::move(slices)), queries_(queries), position_(position), rotary_(rotary) {
    const size_t rows = kGeometry.kv_heads * slices_.size() * queries * kGroup;
    m_.resize(rows), l_.resize(rows), o_.resize(rows * kDim);
    out_.resize(static_cast<size_t>(queries) * kGeometry.query_heads * kDim);
  }

  void RunLayer(const Backend& backend, int layer, Executor& executor) {
    const Arrays& a = Shared();
    const auto parts = static_cast<int32_t>(slices_.size());
    const int rows = queries_ * kGroup;
    attend_.clear(), merge_.clear();
    for (int h = 0; h < kGeometry.kv_heads; ++h) {
      const size_t first = static_cast<size_t>(h) * parts * rows;
      for (int s = 0; s < parts; ++s) {
        const size_t at = first + static_cast<size_t>(s) * rows;
        attend_.push_back({a.Keys(layer, h), a.Values(layer, h), a.q.data() + h * kGroup * kDim,
                           kGeometry.query_heads * kDim, queries_, kGroup, position_,
                           slices_[s].data(), static_cast<int32_t>(slices_[s].size()), 0.0884f,
                           &m_[at], &l_[at], &o_[at * kDim], rotary_, position_});
      }
      merge_.push_back({&m_[first], &l_[first], &o_[first * kDim], parts, rows, kGroup, kDim,
                        &out_[h * kGroup * kDim], kGeometry.query_heads * kDim, nullptr, 0});
    }
    backend.attend_raw(attend_.data(), static_cast<int64_t>(attend_.size()), executor);
    backend.merge(merge_.data(), static_cast<int64_t>(merge_.size()), executor);
  }

 private:
  std::vector<std::vector<Run>> slices_;
  int queries_, position_;
  const RotaryTable* rotary_;
  std::vector<AttendWork> attend_;
  std::vector<MergeWork> merge_;
  std::vector<float> m_, l_, o_, out_;
};

// Packed keys and values of all layers, heads and tokens of Arrays: 32 random channels of 96 each,
// 160 MiB together. As in a segment, the rows of a head follow each other.
struct PackedArrays {
  PackedRows format = PackedFormat(kDim, 32, 1, true);
  std::vector<std::byte> memory;
  std::vector<float> r_v;

  PackedArrays() : memory(2 * kGeometry.layers * HeadBytes() * kGeometry.kv_heads) {
    std::mt19937_64 engine(std::random_device{}());
    std::normal_distribution<float> normal;
    r_v.resize(kDim * kDim);
    for (float& x : r_v) x = normal(engine) / 11;
    for (size_t at = 0; at < memory.size(); at += format.stride) Fill(engine, &memory[at]);
  }
  int64_t HeadBytes() const { return int64_t{kTokens} * format.stride; }

  // Keys are field 0, values field 1.
  PackedRows Rows(int layer, int field, int head) const {
    PackedRows rows = format;
    rows.data =
        memory.data() + ((int64_t{layer} * 2 + field) * kGeometry.kv_heads + head) * HeadBytes();
    return rows;
  }

 private:
  void Fill(std::mt19937_64& engine, std::byte* row) const {
    for (int set = 0; set < format.keep;) {
      const auto bit = static_cast<int>(engine() % format.bits);
      std::byte& byte = row[bit / 8];
      const std::byte mask{static_cast<uint8_t>(1 << bit % 8)};
      set += (byte & mask) == std::byte{0} ? 1 : 0;
      byte |= mask;
    }
    for (int at = 0; at < 2 * format.keep; at += 8) {
      const uint64_t values = (engine() & 0x807F807F807F807Full) | 0x3F003F003F003F00ull;
      std::memcpy(row + format.value_offset + at, &values, 8);
    }
  }
};

const PackedArrays& SharedPacked() {
  static const PackedArrays arrays;
  return arrays;
}

// attend_packed of one decode step and layer, over the same tokens as attend_raw/full.
void DecodePacked(benchmark::State& state) {
  Arrays& a = Shared();
  const PackedArrays& packed = SharedPacked();
  constexpr int kSlices = kTokens / kPackedSliceRows;
  constexpr int kItems = kGeometry.kv_heads * kSlices;
  std::vector<float> m(kItems * kGroup), l(m.size()), o(m.size() * kDim);
  std::vector<float> out(kGeometry.query_heads * kDim);
  std::vector<Run> runs;
  for (int s = 0; s < kSlices; ++s) {
    runs.push_back({s * kPackedSliceRows, (s + 1) * kPackedSliceRows});
  }
  std::vector<AttendPackedWork> attend;
  std::vector<MergeWork> merge;
  Measure(state, 2 * kGeometry.kv_heads * packed.HeadBytes(), [&](int layer, int) {
    attend.clear(), merge.clear();
    for (int h = 0; h < kGeometry.kv_heads; ++h) {
      const int first = h * kSlices * kGroup;
      for (int s = 0; s < kSlices; ++s) {
        const int at = first + s * kGroup;
        attend.push_back({packed.Rows(layer, 0, h), packed.Rows(layer, 1, h), packed.r_v.data(),
                          a.q.data() + h * kGroup * kDim, kGeometry.query_heads * kDim, 1, kGroup,
                          &runs[s], 1, 0.0884f, &m[at], &l[at], &o[int64_t{at} * kDim]});
      }
      merge.push_back({&m[first], &l[first], &o[int64_t{first} * kDim], kSlices, kGroup, kGroup,
                       kDim, &out[h * kGroup * kDim], kGeometry.query_heads * kDim, nullptr, 0});
    }
    OpsOf<PackedOps>(Simd().packed).attend_packed(attend.data(), kItems, *a.pool);
    Simd().merge(merge.data(), kGeometry.kv_heads, *a.pool);
  });
}

// score_packed of 4096 block keys for all heads; packed keys stand in for them.
void ScorePackedBlocks(benchmark::State& state) {
  Arrays& a = Shared();
  const PackedArrays& packed = SharedPacked();
  constexpr int kBlocks = kTokens / 8;
  std::vector<float> out(kGeometry.kv_heads * kBlocks);
  std::vector<ScorePackedWork> work(kGeometry.kv_heads);
  const int64_t bytes = kGeometry.kv_heads * kBlocks * packed.format.stride;
  Measure(state, bytes, [&](int layer, int i) {
    const int begin = i * kBlocks % kTokens;
    for (int h = 0; h < kGeometry.kv_heads; ++h) {
      work[h] = {packed.Rows(layer, 0, h),
                 a.q.data() + h * kGroup * kDim,
                 kGroup,
                 {begin, begin + kBlocks},
                 1.0f,
                 &out[h * kBlocks],
                 0};
    }
    OpsOf<PackedOps>(Simd().packed).score_packed(work.data(), kGeometry.kv_heads, *a.pool);
  });
}

// [begin, end) in slices.
std::vector<std::vector<Run>> Slices(int begin, int end) {
  std::vector<std::vector<Run>> slices;
  for (int t = begin; t < end; t += kAttendSliceRows) {
    slices.push_back({{t, std::min(t + kAttendSliceRows, end)}});
  }
  return slices;
}

// `count` random units of `size` tokens, in slices.
std::vector<std::vector<Run>> RandomUnits(int count, int size) {
  std::vector<int> units(kTokens / size);
  for (size_t i = 0; i < units.size(); ++i) units[i] = static_cast<int>(i);
  std::shuffle(units.begin(), units.end(), std::mt19937(std::random_device()()));
  std::sort(units.begin(), units.begin() + count);
  std::vector<std::vector<Run>> slices;
  const int per_slice = kAttendSliceRows / size;
  for (int i = 0; i < count; ++i) {
    if (i % per_slice == 0) slices.emplace_back();
    slices.back().push_back({units[i] * size, (units[i] + 1) * size});
  }
  return slices;
}

const RotaryTable* SharedTable() {
  static const RotaryTable table({500000, kDim});
  return &table;
}

void Decode(benchmark::State& state, std::vector<std::vector<Run>> slices,
            const RotaryTable* rotary = nullptr) {
  int64_t rows = 0;
  for (const auto& slice : slices) {
    for (const Run& run : slice) rows += run.end - run.begin;
  }
  Step step(std::move(slices), 1, kTokens - 1, rotary);
  Measure(state, rows * kGeometry.kv_heads * 2 * kGeometry.row_bytes(),
          [&](int layer, int) { step.RunLayer(Simd(), layer, *Shared().pool); });
}

void DecodeFull(benchmark::State& state) { Decode(state, Slices(0, kTokens)); }
void DecodeQuest(benchmark::State& state) { Decode(state, RandomUnits(128, 16)); }
// 1 % of 32K, and the 16 + 1 pages that CHESS always keeps.
void DecodeChess(benchmark::State& state) { Decode(state, RandomUnits(27, 32)); }

void RotateFull(benchmark::State& state) { Decode(state, Slices(0, kTokens), SharedTable()); }
void RotateQuest(benchmark::State& state) { Decode(state, RandomUnits(128, 16), SharedTable()); }
// TokenSelect's: every row in another place.
void DecodeTokens(benchmark::State& state) { Decode(state, RandomUnits(2048, 1)); }
void RotateTokens(benchmark::State& state) { Decode(state, RandomUnits(2048, 1), SharedTable()); }

// 64 query tokens against 4096 rows, all heads; GFLOP/s of the two products.
void Prefill(benchmark::State& state, const RotaryTable* rotary) {
  Arrays& a = Shared();
  Step step(Slices(0, 4096), kAttendQueryTile, 4096 - kAttendQueryTile, rotary);
  Executor& executor = state.range(0) == 1 ? InlineExecutor() : *a.pool;
  for ([[maybe_unused]] auto _ : state) step.RunLayer(Simd(), a.NextLayer(), executor);
  const double flops =
      4.0 * kAttendQueryTile * (4096 - kAttendQueryTile / 2) * kGeometry.query_heads * kDim;
  state.counters["GFLOP/s"] = benchmark::Counter(
      flops * 1e-9 * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

void PrefillStored(benchmark::State& state) { Prefill(state, nullptr); }
void PrefillRotate(benchmark::State& state) { Prefill(state, SharedTable()); }

// Scores of 2048 units for all heads. Keys stand in for the minima, values for the maxima.
void ScoreUnits(benchmark::State& state, ScoreWork::Kind kind, int queries) {
  Arrays& a = Shared();
  constexpr int kUnits = 2048;
  std::vector<float> out(kGeometry.kv_heads * kUnits);
  std::vector<ScoreWork> work(kGeometry.kv_heads);
  const int fields = kind == ScoreWork::Kind::kMinMax ? 2 : 1;
  const int64_t bytes = int64_t{kGeometry.kv_heads} * kUnits * fields * kGeometry.row_bytes();
  Measure(state, bytes, [&](int layer, int i) {
    const int begin = i * kUnits % kTokens;
    for (int h = 0; h < kGeometry.kv_heads; ++h) {
      work[h] = {kind,
                 a.q.data() + h * kGroup * kDim,
                 queries,
                 a.Keys(layer, h),
                 a.layout.value_offset,
                 {begin, begin + kUnits},
                 &out[h * kUnits],
                 false};
    }
    Simd().score(work.data(), kGeometry.kv_heads, *a.pool);
  });
}
void ScoreMinMax(benchmark::State& state) { ScoreUnits(state, ScoreWork::Kind::kMinMax, kGroup); }
void ScoreDot(benchmark::State& state) { ScoreUnits(state, ScoreWork::Kind::kDot, 1); }

// All layers' keys in few bits (docs/spec/bits.md): groups of 64, a head's one after the other.
class QuantisedArrays {
 public:
  explicit QuantisedArrays(int bits) : format_{kDim, bits, 64} {
    const Arrays& a = Shared();
    memory_.resize(kGeometry.layers * kGeometry.kv_heads * HeadBytes());
    block_ = memory_.data();
    std::vector<QuantiseKeysWork> work;
    for (int layer = 0; layer < kGeometry.layers; ++layer) {
      for (int h = 0; h < kGeometry.kv_heads; ++h) {
        for (int g = 0; g < kTokens / format_.tokens; ++g) {
          const int64_t at = (int64_t{layer} * kGeometry.kv_heads + h) * HeadBytes();
          work.push_back({a.Keys(layer, h), g * format_.tokens, format_,
                          memory_.data() + at + g * format_.bytes()});
        }
      }
    }
    Simd().quantise_keys(work.data(), static_cast<int64_t>(work.size()), *a.pool);
  }
  QuantisedArrays(const QuantisedArrays&) = delete;

  int64_t HeadBytes() const { return kTokens / format_.tokens * format_.bytes(); }
  QuantisedRows Rows(int layer, int head) const {
    return {format_, &block_, (int64_t{layer} * kGeometry.kv_heads + head) * HeadBytes(),
            kTokens / format_.tokens};
  }

 private:
  QuantisedGroup format_;
  std::vector<std::byte> memory_;
  std::byte* block_;
};

// A decode step over planes; logits are range(0) tenths as large as without sharpening: with more,
// more strips are left out.
void AttendPlanesBy(const PlanesRule& rule, benchmark::State& state) {
  constexpr int kLayers = 2;
  Arrays& a = Shared();
  static std::vector<std::unique_ptr<PlanesCase>> layers;
  for (int layer = static_cast<int>(layers.size()); layer < kLayers; ++layer) {
    layers.push_back(std::make_unique<PlanesCase>(
        PlanesCase::Shape{kGeometry.kv_heads, kGroup, kTokens, {kDim, 64, 8}},
        [&](int h) { return a.Keys(layer, h); }, [&](int h) { return a.Values(layer, h); },
        *a.pool));
  }
  const float scale = 0.00884f * static_cast<float>(state.range(0));
  int64_t bytes = 0;
  for ([[maybe_unused]] auto _ : state) {
    PlanesCase& layer = *layers[static_cast<size_t>(a.NextLayer() % kLayers)];
    layer.Step(a.q.data(), scale, rule, *a.pool);
    bytes += layer.bytes();
  }
  state.SetBytesProcessed(bytes);
}

// 5 % of the tokens are fine.
void AttendPlanes(benchmark::State& state) { AttendPlanesBy({}, state); }
// The preset's rule. Logits deviate by 8: some 7 % of the tokens are fine, and four fifths of the
// strips are read.
void AttendPlanesAbove(benchmark::State& state) {
  AttendPlanesBy({.share = 0, .fine_above = 8, .sample = 16}, state);
}

// A prompt's last token, behind what others have computed.
void AttendPlanesInFull(benchmark::State& state) { AttendPlanesBy({.share = 1}, state); }

constexpr int kScoreTile = 2048;  // tokens of a work item, as selectors cut them

// Logits of 32K tokens for all heads; rows(layer, head): what `op` scores, of `bytes` a head.
template <typename Work, typename Rows>
void ScoreTiles(benchmark::State& state, void (*op)(const Work*, int64_t, Executor&), int64_t bytes,
                const Rows& rows) {
  Arrays& a = Shared();
  std::vector<float> out(int64_t{kGeometry.query_heads} * kTokens);
  std::vector<Work> work;
  Measure(state, kGeometry.kv_heads * bytes, [&](int layer, int) {
    work.clear();
    for (int h = 0; h < kGeometry.kv_heads; ++h) {
      for (int t = 0; t < kTokens; t += kScoreTile) {
        float* const to = out.data() + int64_t{h} * kGroup * kTokens + t;
        work.push_back({rows(layer, h),
                        {t, t + kScoreTile},
                        a.q.data() + h * kGroup * kDim,
                        kGroup,
                        0.0884f,
                        to,
                        kTokens});
      }
    }
    op(work.data(), static_cast<int64_t>(work.size()), *a.pool);
  });
}

// By their keys in range(0) bits.
void ScoreBits(benchmark::State& state) {
  static std::map<int, std::unique_ptr<QuantisedArrays>> made;
  auto& quantised = made[static_cast<int>(state.range(0))];
  if (quantised == nullptr) {
    quantised = std::make_unique<QuantisedArrays>(static_cast<int>(state.range(0)));
  }
  ScoreTiles(state, Simd().score_bits, quantised->HeadBytes(),
             [&](int layer, int head) { return quantised->Rows(layer, head); });
}

// By the keys themselves.
void ScoreTokens(benchmark::State& state) {
  ScoreTiles(state, Simd().score_tokens, kTokens * kGeometry.row_bytes(),
             [](int layer, int head) { return Shared().Keys(layer, head); });
}

// Votes of each KV head's queries on 32K tokens, from their logits: what follows either.
void VoteTokens(benchmark::State& state) {
  Arrays& a = Shared();
  std::vector<float> logits(int64_t{kGroup} * kTokens), votes(kTokens), max(kGroup), sum(kGroup);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = 2 * a.q[i % a.q.size()];
  for ([[maybe_unused]] auto _ : state) {
    for (int h = 0; h < kGeometry.kv_heads; ++h) {
      Simd().vote({logits.data(), kTokens, kGroup, kTokens, max.data(), sum.data(), votes.data()},
                  *a.pool);
    }
  }
}

// Keys of 512 new tokens in few bits, all heads of a layer.
void QuantiseKeys(benchmark::State& state) {
  Arrays& a = Shared();
  constexpr int kNew = 512;
  const QuantisedGroup format{kDim, static_cast<int>(state.range(0)), 64};
  std::vector<std::byte> out(kGeometry.kv_heads * kNew / format.tokens * format.bytes());
  std::vector<QuantiseKeysWork> work;
  Measure(state, int64_t{kGeometry.kv_heads} * kNew * kGeometry.row_bytes(), [&](int layer, int i) {
    const int begin = i * kNew % kTokens;
    work.clear();
    std::byte* to = out.data();
    for (int h = 0; h < kGeometry.kv_heads; ++h) {
      for (int t = begin; t < begin + kNew; t += format.tokens, to += format.bytes()) {
        work.push_back({a.Keys(layer, h), t, format, to});
      }
    }
    Simd().quantise_keys(work.data(), static_cast<int64_t>(work.size()), *a.pool);
  });
}

// Summaries of 512 new tokens in units of 16, all heads of a layer.
void Summarize(benchmark::State& state, SummarizeWork::Kind kind) {
  Arrays& a = Shared();
  constexpr int kNew = 512, kUnit = 16, kUnits = kNew / kUnit;
  std::vector<std::byte> out(kGeometry.kv_heads * kUnits * 2 * kGeometry.row_bytes());
  std::vector<SummarizeWork> work;
  Measure(state, int64_t{kGeometry.kv_heads} * kNew * kGeometry.row_bytes(), [&](int layer, int i) {
    const int begin = i * kNew % kTokens;
    work.clear();
    std::byte* to = out.data();
    for (int h = 0; h < kGeometry.kv_heads; ++h) {
      for (int u = 0; u < kUnits; ++u, to += 2 * kGeometry.row_bytes()) {
        const int t = begin + u * kUnit;
        work.push_back({.kind = kind,
                        .keys = a.Keys(layer, h),
                        .rows = {t, t + kUnit},
                        .out = to,
                        .out2 = to + kGeometry.row_bytes()});
      }
    }
    Simd().summarize(work.data(), static_cast<int64_t>(work.size()), *a.pool);
  });
}
void SummarizeMinMax(benchmark::State& state) { Summarize(state, SummarizeWork::Kind::kMinMax); }
void SummarizeMean(benchmark::State& state) { Summarize(state, SummarizeWork::Kind::kMean); }

void TopK(benchmark::State& state) {
  const auto n = static_cast<int32_t>(state.range(0)), k = static_cast<int32_t>(state.range(1));
  const Arrays& a = Shared();
  std::vector<int32_t> out(k);
  int round = 0;
  for ([[maybe_unused]] auto _ : state) {
    Simd().top_k({a.q.data() + round++ % 64 * kDim, n, k, out.data()});
  }
  state.SetItemsProcessed(state.iterations() * n);
}

// One case of the results file. `ratio_to` names another case whose time is divided by this one's.
struct Case {
  const char* id;
  void (*function)(benchmark::State&);
  std::vector<int64_t> arguments;
  const char* ratio_to = nullptr;
  double must = 0;
  double bytes_over = 1;  // this case's bytes over those of ratio_to
};

const std::vector<Case>& Cases() {
  static const std::vector<Case> cases = {
      {"read/32K", Read, {}},
      {"attend_raw/full/32K", DecodeFull, {}, "read/32K", 0.6},
      {"attend_raw/2048of32K/pages16", DecodeQuest, {}, "attend_raw/full/32K"},
      {"attend_raw/864of32K/pages32", DecodeChess, {}, "attend_raw/full/32K"},
      {"attend_packed/full/32K/keep32", DecodePacked, {}, "attend_raw/full/32K", 1.5},
      {"attend_planes/32K", AttendPlanes, {10}, "attend_raw/full/32K"},
      {"attend_planes/32K/sharp", AttendPlanes, {40}, "attend_raw/full/32K"},
      {"attend_planes/32K/above", AttendPlanesAbove, {105}, "attend_raw/full/32K"},
      {"attend_planes/32K/full", AttendPlanesInFull, {10}, "attend_raw/full/32K"},
      {"score_packed/4096blocks", ScorePackedBlocks, {}},
      {"attend_raw/prefill64x4096/1thread", PrefillStored, {1}},
      {"attend_raw/prefill64x4096/2threads", PrefillStored, {2}},
      {"attend_raw/full/32K/rotate", RotateFull, {}, "attend_raw/full/32K"},
      {"attend_raw/2048of32K/pages16/rotate", RotateQuest, {}, "attend_raw/2048of32K/pages16"},
      {"attend_raw/2048of32K/tokens", DecodeTokens, {}, "attend_raw/full/32K"},
      {"attend_raw/2048of32K/tokens/rotate", RotateTokens, {}, "attend_raw/2048of32K/tokens"},
      {"attend_raw/prefill64x4096/1thread/rotate",
       PrefillRotate,
       {1},
       "attend_raw/prefill64x4096/1thread"},
      {"score/minmax/2048units", ScoreMinMax, {}, "read/32K", 0, 1.0 / 16},
      {"score/dot/2048units", ScoreDot, {}, "read/32K", 0, 1.0 / 32},
      {"score_tokens/32K", ScoreTokens, {}, "read/32K", 0, 0.5},
      {"score_bits/2/32K", ScoreBits, {2}, "score_tokens/32K"},
      {"score_bits/3/32K", ScoreBits, {3}, "score_tokens/32K"},
      {"score_bits/4/32K", ScoreBits, {4}, "score_tokens/32K"},
      {"vote/8x32K", VoteTokens, {}},
      {"quantise_keys/2/512tokens", QuantiseKeys, {2}, "summarize/minmax/512tokens"},
      {"summarize/minmax/512tokens", SummarizeMinMax, {}},
      {"summarize/mean/512tokens", SummarizeMean, {}},
      {"pick/128of2048", TopK, {2048, 128}},
      {"pick/2048of32768", TopK, {32768, 2048}},
  };
  return cases;
}

// Keeps what each repetition measured, beside printing it.
class Collector final : public benchmark::ConsoleReporter {
 public:
  struct Samples {
    std::vector<double> microseconds;
    std::map<std::string, double> counters;  // counters of the last repetition
  };

  Collector() : ConsoleReporter(isatty(STDOUT_FILENO) ? OO_ColorTabular : OO_Tabular) {}

  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      if (run.run_type != Run::RT_Iteration || run.error_occurred) continue;
      Samples& samples = samples_[run.run_name.function_name];
      samples.microseconds.push_back(run.real_accumulated_time * 1e6 /
                                     static_cast<double>(run.iterations));
      for (const auto& [name, counter] : run.counters) samples.counters[name] = counter.value;
    }
    ConsoleReporter::ReportRuns(runs);
  }

  // What a case took; null: it was not run.
  const Samples* Find(const std::string& id) const {
    const auto found = samples_.find(id);
    return found == samples_.end() ? nullptr : &found->second;
  }

 private:
  std::map<std::string, Samples> samples_;
};

bench::Json RowOf(const Case& c, const Collector::Samples& samples,
                  const Collector::Samples* ratio_to) {
  const bench::Timing t = bench::TimingOf(samples.microseconds);
  bench::Json row = bench::RowOf(c.id, t);
  row["tokens"] = kTokens, row["batch"] = 1;
  for (const auto& [name, value] : samples.counters) {
    if (name == "bytes_per_second") row["gbps"] = value * 1e-9;
    if (name == "GFLOP/s") row["gflops"] = value;
  }
  if (ratio_to != nullptr) {
    const double base = bench::TimingOf(ratio_to->microseconds).median * c.bytes_over;
    row["baseline"] = {{"name", c.ratio_to}, {"value", base}};
    row["ratio"] = base / t.median;
    if (c.must > 0) row["must"] = c.must;
  }
  return row;
}

void WriteRows(int argc, char** argv, const Collector& collected) {
  bench::Json rows = bench::Json::array(), ceilings = bench::Json::object();
  for (const Case& c : Cases()) {
    const Collector::Samples* const samples = collected.Find(c.id);
    if (samples == nullptr) continue;
    rows.push_back(RowOf(c, *samples, c.ratio_to ? collected.Find(c.ratio_to) : nullptr));
  }
  if (const Collector::Samples* const read = collected.Find("read/32K")) {
    const double bytes = 2.0 * kTokens * kGeometry.kv_heads * kDim * 2;
    ceilings["read_gbps"] = bytes / bench::TimingOf(read->microseconds).median * 1e-3;
  }
  bench::WriteResults(argc, argv, "ops-cpu", bench::DeviceName(),
                      "build/bin/ops_bench --json-out bench/results/ops-cpu-<device>.json",
                      {{"cpu", bench::CpuName()},
                       {"threads", kThreads},
                       {"simd", NameOf(CurrentSimdTarget())},
                       {"notes",
                        "4 layers x 32K tokens x 8 KV heads x 128 bf16, 512 MiB, rotated by "
                        "layer"}},
                      rows, ceilings);
}

// Takes --json-out FILE out of the arguments; Google Benchmark gets the rest.
void TakeJsonOut(std::vector<char*>& arguments) {
  const auto at = std::ranges::find(arguments, std::string("--json-out"),
                                    [](const char* word) { return std::string(word); });
  arguments.erase(at, at + std::min<ptrdiff_t>(2, arguments.end() - at));
}

int Main(int argc, char** argv) {
  // Interleaved, so that a slow minute of the machine hits all cases of a ratio.
  char interleave[] = "--benchmark_enable_random_interleaving=true";
  char repeat[] = "--benchmark_repetitions=9", time[] = "--benchmark_min_time=0.1";
  std::vector<char*> arguments(argv, argv + argc);
  TakeJsonOut(arguments);
  arguments.insert(arguments.begin() + 1, {interleave, repeat, time});
  int count = static_cast<int>(arguments.size());
  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 2;
  for (const Case& c : Cases()) {
    auto* registered = benchmark::RegisterBenchmark(c.id, c.function);
    registered->UseRealTime()->Unit(benchmark::kMicrosecond);
    if (!c.arguments.empty()) registered->Args(c.arguments);
  }
  Collector collector;
  benchmark::RunSpecifiedBenchmarks(&collector);
  WriteRows(argc, argv, collector);
  return 0;
}

}  // namespace
}  // namespace kvstrata

int main(int argc, char** argv) { return kvstrata::Main(argc, argv); }
