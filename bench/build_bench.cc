// SPDX-License-Identifier: Apache-2.0
// What the daemon's workers do to a segment when it is packed: covariance, eigen, rotate_pack; and
// the ops of the vote selector and of spans, on the CPU, without a daemon.
//
//   build_bench [--json-out FILE] [--threads N]
//
// One layer of 64K tokens, 8 KV heads x 128, bf16, keys and values: 256 MiB, so nothing stays in
// the L3. Every row is the median of several rounds, and each round runs all rows once, so that a
// slow minute of the machine hits them alike.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench/results.h"
#include "kernels/backend/backend.h"
#include "kernels/cpu/simd_target.h"
#include "kernels/plans/mosaickv/ops/packed_ops.h"
#include "kernels/plans/sekv/ops/span_ops.h"

namespace kvstrata {
namespace {

constexpr int kRounds = 7;
constexpr int kTokens = 65536;
constexpr int kItemRows = 4096;  // rows of a work item
constexpr int kBlock = 8, kKeep = 32;
constexpr int kQueryHeads = 32, kGroup = 4;
constexpr int kVoteTokens = 32768;
constexpr Geometry kGeometry{1, kQueryHeads, 8, 128, 16, DType::kBF16};
constexpr int kHeads = kGeometry.kv_heads, kDim = kGeometry.head_dim;
constexpr int kMatrices = 2 * kHeads;  // keys and values
constexpr double kRows = double{kTokens} * kMatrices;

// One layer, and all that is made of it.
class Layer {
 public:
  explicit Layer(int threads) : pool_(NewThreadPool(threads)) {
    Fill();
    covariance_.resize(size_t{kMatrices} * kDim * kDim);
    values_.resize(size_t{kMatrices} * kDim);
    rotations_.resize(covariance_.size());
    format_.dim = kDim, format_.keep = kKeep, format_.neighbours = 1;
    format_.bits = kDim - kDim / 4, format_.value_offset = 16, format_.stride = 16 + 2 * kKeep;
    packed_.resize(static_cast<size_t>(kRows) * format_.stride);
    blocks_.resize(size_t{kHeads} * kTokens / kBlock * format_.stride);
    logits_.resize(size_t{kQueryHeads} * kVoteTokens);
    votes_.resize(kVoteTokens);
    max_.resize(kQueryHeads), sum_.resize(kQueryHeads);
  }

  // Matrices of 4096-row items are added up in order, so an item is a whole head: 16 of them.
  void Covariance() {
    std::vector<CovarianceWork> work;
    for (int m = 0; m < kMatrices; ++m) {
      work.push_back({RowsOf(m), {0, kTokens}, &covariance_[size_t{kDim} * kDim * m], false});
    }
    OpsOf<PackedOps>(simd_.packed).covariance(work.data(), kMatrices, *pool_);
  }

  void Eigen() {
    std::vector<EigenWork> work;
    for (size_t m = 0; m < kMatrices; ++m) {
      work.push_back(
          {&covariance_[kDim * kDim * m], kDim, &values_[kDim * m], &rotations_[kDim * kDim * m]});
    }
    simd_.eigen(work.data(), kMatrices, *pool_);
  }

  void PackRows(bool losses) {
    std::vector<RotatePackWork> work;
    losses_.resize(3 * static_cast<size_t>(kRows) / kItemRows);
    double* loss = losses_.data();
    for (int m = 0; m < kMatrices; ++m) {
      for (int t = 0; t < kTokens; t += kItemRows, loss += 3) {
        std::byte* out = &packed_[(size_t{kTokens} * m + t) * format_.stride];
        work.push_back({RowsOf(m), {t, t + kItemRows}, RotationOf(m), format_, 0, out});
        if (losses) work.back().energy = loss, work.back().kept = loss + 1;
      }
    }
    OpsOf<PackedOps>(simd_.packed)
        .rotate_pack(work.data(), static_cast<int64_t>(work.size()), *pool_);
  }

  void PackBlocks() {
    std::vector<RotatePackWork> work;
    std::byte* out = blocks_.data();
    for (int h = 0; h < kHeads; ++h) {
      for (int t = 0; t < kTokens; t += kItemRows, out += kItemRows / kBlock * format_.stride) {
        work.push_back({RowsOf(h), {t, t + kItemRows}, RotationOf(h), format_, kBlock, out});
      }
    }
    OpsOf<PackedOps>(simd_.packed)
        .rotate_pack(work.data(), static_cast<int64_t>(work.size()), *pool_);
  }

  void Recompress() {
    Covariance();
    Eigen();
    PackRows(false);
    PackBlocks();
  }

  // The first 32K tokens or the second, in turn.
  void ScoreTokens() {
    std::vector<ScoreTokensWork> work;
    const int begin = round_++ % 2 * kVoteTokens;
    for (int h = 0; h < kHeads; ++h) {
      for (int t = 0; t < kVoteTokens; t += kItemRows) {
        work.push_back({RowsOf(h),
                        {begin + t, begin + t + kItemRows},
                        &queries_[h * kGroup * kDim],
                        kGroup,
                        0.0884f,
                        &logits_[size_t{kVoteTokens} * h * kGroup + t],
                        kVoteTokens});
      }
    }
    simd_.score_tokens(work.data(), static_cast<int64_t>(work.size()), *pool_);
  }

  void Vote() {
    simd_.vote({logits_.data(), kVoteTokens, kQueryHeads, kVoteTokens, max_.data(), sum_.data(),
                votes_.data()},
               *pool_);
  }

  // Keys of one round of ScoreTokens, read plainly.
  void Read() {
    const int begin = round_++ % 2 * kVoteTokens / kGeometry.page_tokens;
    constexpr int kPages = 64;
    pool_->ParallelFor(kVoteTokens / kGeometry.page_tokens / kPages, [&](int64_t item) {
      Wide sum0{}, sum1{};
      for (int64_t p = begin + item * kPages; p < begin + (item + 1) * kPages; ++p) {
        const std::byte* from = pages_[static_cast<size_t>(p)];
        for (int64_t at = 0; at < layout_.value_offset; at += 128) {
          sum0 ^= *reinterpret_cast<const Wide*>(from + at);
          sum1 ^= *reinterpret_cast<const Wide*>(from + at + 64);
        }
      }
      sum0 ^= sum1;
      asm volatile("" : : "m"(sum0));
    });
  }

  // `count` spans of n tokens at rank 32, of rows of normal numbers.
  void Svd(int n, int count) {
    const int rank = std::min(n, 32);
    const size_t u = size_t(n) * rank, vt = size_t(rank) * kDim;
    factors_.resize((u + rank + vt) * static_cast<size_t>(count));
    std::vector<SvdWork> work;
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
      float* to = &factors_[(u + rank + vt) * i];
      work.push_back({&normals_[i * 1000], n, kDim, rank, to, to + u, to + u + rank});
    }
    OpsOf<SpanOps>(simd_.lowrank).svd(work.data(), count, *pool_);
  }

 private:
  using Wide = uint64_t __attribute__((vector_size(64), may_alias));

  // Normal numbers whose channels shrink and mix, so that covariances are not diagonal.
  void Fill() {
    std::mt19937 engine(std::random_device{}());
    std::normal_distribution<float> normal;
    normals_.resize(1 << 20);
    for (float& x : normals_) x = normal(engine);
    queries_.assign(normals_.begin(), normals_.begin() + kQueryHeads * kDim);
    memory_.resize(static_cast<size_t>(kTokens / kGeometry.page_tokens * kGeometry.page_bytes()) +
                   4096);
    auto* base = memory_.data() + 4096 - reinterpret_cast<uintptr_t>(memory_.data()) % 4096;
    for (int i = 0; i < kTokens / kGeometry.page_tokens; ++i) {
      pages_.push_back(base + i * kGeometry.page_bytes());
    }
    std::shuffle(pages_.begin(), pages_.end(), engine);
    auto* elements = reinterpret_cast<BF16*>(base);
    for (int64_t row = 0; row < int64_t{kTokens} * kMatrices; ++row) {
      const uint32_t at = engine() % (1 << 19);
      const float shared = normals_[at + 1000];
      for (int c = 0; c < kDim; ++c) {
        const float x = normals_[at + c] * std::exp2(-static_cast<float>(c) / 24) + shared;
        elements[row * kDim + c] = FromFloat<BF16>(x);
      }
    }
  }
  PagedRows RowsOf(int m) const {
    return m < kHeads ? KeysOf(pages_.data(), layout_, 0, m)
                      : ValuesOf(pages_.data(), layout_, 0, m - kHeads);
  }
  const float* RotationOf(int m) const { return &rotations_[size_t{kDim} * kDim * m]; }

  const Backend& simd_ = *FindBackend("simd").value();
  std::unique_ptr<Executor> pool_;
  PageLayout layout_ = PageLayout::Of(kGeometry);
  std::vector<std::byte> memory_, packed_, blocks_;
  std::vector<std::byte*> pages_;
  std::vector<double> covariance_, values_, losses_;
  std::vector<float> rotations_, normals_, queries_, logits_, votes_, max_, sum_, factors_;
  PackedRows format_;
  int round_ = 0;
};

struct Case {
  const char* id;
  std::function<void(Layer&)> run;
  int repeat = 1;    // calls that are measured together
  double gmacs = 0;  // work of a call
  double bytes = 0;  // read by a call
  double must = 0;   // at most so many seconds
  const char* ratio_to = nullptr;
};

constexpr double kProducts = kRows * kDim * kDim * 1e-9;
constexpr double kKeyBytes = double{kVoteTokens} * kHeads * kDim * 2;

const std::vector<Case>& Cases() {
  static const std::vector<Case> cases = {
      {"recompress/64K x 8 heads, one layer", [](Layer& l) { l.Recompress(); }, 1, 0, 0, 3},
      {"covariance/64K x 8 heads, K and V", [](Layer& l) { l.Covariance(); }, 1, kProducts / 2},
      {"eigen/16 of 128", [](Layer& l) { l.Eigen(); }},
      {"rotate_pack/64K x 8 heads, K and V", [](Layer& l) { l.PackRows(false); }, 1,
       kProducts * 3 / 4},
      {"rotate_pack/the same with losses", [](Layer& l) { l.PackRows(true); }, 1, kProducts},
      {"rotate_pack/block keys of 8, 64K x 8 heads", [](Layer& l) { l.PackBlocks(); }},
      {"read keys/32K x 8 heads", [](Layer& l) { l.Read(); }, 4, 0, kKeyBytes},
      {"score_tokens/32K x 8 heads, 4 queries", [](Layer& l) { l.ScoreTokens(); }, 4, 0, kKeyBytes,
       0, "read keys/32K x 8 heads"},
      {"vote/32 heads x 32K", [](Layer& l) { l.Vote(); }, 4, 0, 0, 1e-3},
      {"svd/256 spans of 16", [](Layer& l) { l.Svd(16, 256); }},
      {"svd/64 spans of 64", [](Layer& l) { l.Svd(64, 64); }},
      {"svd/32 spans of 500", [](Layer& l) { l.Svd(500, 32); }},
  };
  return cases;
}

// Milliseconds of each round.
using Samples = std::vector<double>;

// CPU time of all threads together: on a machine that others use, what the work itself took.
double CpuMilliseconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

bench::Json RowOf(size_t i, const std::vector<Samples>& samples, double cpu_ms) {
  const Case& c = Cases()[i];
  const bench::Timing t = bench::TimingOf(samples[i]);
  const bool seconds = c.must >= 1;
  bench::Json row = bench::RowOf(c.id, t, seconds ? "s" : "ms", seconds ? 1e-3 : 1);
  row["tokens"] = kTokens, row["batch"] = 1, row["cpu_ms"] = cpu_ms;
  if (c.gmacs > 0) row["gmacs"] = c.gmacs / t.median * 1e3;
  if (c.bytes > 0) row["gbps"] = c.bytes / t.median * 1e-6;
  if (c.must > 0) row["must"] = seconds ? c.must : c.must * 1e3, row["better"] = "smaller";
  for (size_t j = 0; c.ratio_to != nullptr && j < Cases().size(); ++j) {
    if (std::strcmp(Cases()[j].id, c.ratio_to) != 0) continue;
    const double base = bench::TimingOf(samples[j]).median;
    row["baseline"] = {{"name", c.ratio_to}, {"value", base}};
    row["ratio"] = base / t.median;
  }
  return row;
}

// Times one round of a case.
void Measure(const Case& c, Layer& layer, Samples& wall, Samples& cpu) {
  const double cpu_before = CpuMilliseconds(), before = bench::NowUs();
  for (int i = 0; i < c.repeat; ++i) c.run(layer);
  wall.push_back((bench::NowUs() - before) * 1e-3 / c.repeat);
  cpu.push_back((CpuMilliseconds() - cpu_before) / c.repeat);
}

void Print(const Case& c, const bench::Timing& t, double cpu_ms) {
  std::printf("%-45s %9.3f ms (%.3f to %.3f), CPU %.3f ms", c.id, t.median, t.p10, t.p90, cpu_ms);
  if (c.gmacs > 0) std::printf("  %.1f GMAC/s", c.gmacs / t.median * 1e3);
  if (c.bytes > 0) std::printf("  %.1f GB/s", c.bytes / t.median * 1e-6);
  std::printf("\n");
}

int Main(int argc, char** argv) {
  const std::string given = bench::Option(argc, argv, "--threads");
  const int threads = given.empty() ? 2 : std::stoi(given);
  Layer layer(threads);
  std::vector<Samples> wall(Cases().size()), cpu(wall.size());
  for (const Case& c : Cases()) c.run(layer);  // touches all memory; some need others' results
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < wall.size(); ++i) Measure(Cases()[i], layer, wall[i], cpu[i]);
  }
  bench::Json rows = bench::Json::array();
  for (size_t i = 0; i < wall.size(); ++i) {
    const double cpu_ms = bench::TimingOf(cpu[i]).median;
    Print(Cases()[i], bench::TimingOf(wall[i]), cpu_ms);
    rows.push_back(RowOf(i, wall, cpu_ms));
  }
  bench::WriteResults(argc, argv, "recompress", bench::CpuName(),
                      "build/bin/build_bench --json-out bench/results/recompress-<device>.json",
                      {{"cpu", bench::CpuName()},
                       {"threads", threads},
                       {"simd", NameOf(CurrentSimdTarget())},
                       {"notes",
                        "one layer, 64K tokens x 8 KV heads x 128, bf16, keys and values, "
                        "256 MiB"}},
                      rows);
  return 0;
}

}  // namespace
}  // namespace kvstrata

int main(int argc, char** argv) { return kvstrata::Main(argc, argv); }
