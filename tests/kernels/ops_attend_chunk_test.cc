// SPDX-License-Identifier: Apache-2.0
// Ref of attend_chunk against attention written down: each query row over each position that the
// selection names and that it sees.
#include <algorithm>
#include <numeric>

#include "kernels/ops/attend_chunk/attend_chunk.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata::cuda {
namespace {

constexpr int kBefore = 70, kRows = 9, kTokens = kBefore + kRows;
constexpr int kHeads = 2, kGroup = 3, kDim = 64;

// Keys and values of two KV heads, each in pages of its own: heads lie one page array apart.
class Chunk {
 public:
  Chunk(Random& random, DType dtype)
      : dtype_(dtype), memory_(static_cast<size_t>(kPages * kPageBytes * SizeOf(dtype))) {
    for (size_t i = 0; i < memory_.size(); i += static_cast<size_t>(SizeOf(dtype))) {
      StoreAs(dtype, &memory_[i], random.Normal());
    }
    for (int i = 0; i < kPages; ++i) {
      pages_.push_back(reinterpret_cast<uint64_t>(memory_.data()) +
                       static_cast<uint64_t>((kPages - 1 - i) * kPageBytes * SizeOf(dtype)));
    }
    q_.resize(static_cast<size_t>(kRows * kHeads * kGroup * kDim * SizeOf(dtype)));
    for (size_t i = 0; i < q_.size(); i += static_cast<size_t>(SizeOf(dtype))) {
      StoreAs(dtype, &q_[i], random.Normal());
    }
    tokens_.resize(kRows);
    std::iota(tokens_.begin(), tokens_.end(), kBefore + 1);
    tokens_[kRows - 1] = kTokens;  // sees as much as it would; the one before it sees less
    tokens_[kRows - 2] = kBefore + 3;
    std::ranges::sort(tokens_);
  }
  float Element(bool value, int head, int t, int c) const {
    const int at = (value ? kHeads : 0) + head;
    return LoadAs(dtype_, reinterpret_cast<const std::byte*>(pages_[static_cast<size_t>(t / 16)]) +
                              ((at * 16 + t % 16) * kDim + c) * SizeOf(dtype_));
  }
  AttendChunkBatch Work() const {
    AttendChunkBatch w;
    const int64_t size = SizeOf(dtype_);
    w.layer = {pages_.data(),    kPages,     16, kHeads, kDim, dtype_, 0, kHeads * 16 * kDim * size,
               16 * kDim * size, kDim * size};
    w.rows = kRows;
    w.group = kGroup;
    w.tokens = tokens_.data();
    w.q = q_.data();
    w.q_stride = kHeads * kGroup * kDim * size;
    w.scale = 0.2f;
    return w;
  }
  // Attends what is_attended(head, position) names.
  template <typename IsAttended>
  void ExpectSame(const AttendChunkBatch& w, const std::vector<float>& out,
                  const std::vector<float>& lse, const IsAttended& is_attended) const {
    for (int row = 0; row < kRows * kHeads * kGroup; ++row) {
      const int token = row / (kHeads * kGroup), head = row / kGroup % kHeads;
      std::vector<double> sum(kDim);
      double l = 0;
      for (int t = 0; t < tokens_[static_cast<size_t>(token)]; ++t) {
        if (!is_attended(head, t)) continue;
        double dot = 0;
        for (int c = 0; c < kDim; ++c) {
          dot +=
              double{LoadAs(dtype_, &q_[static_cast<size_t>((row * kDim + c) * SizeOf(dtype_))])} *
              Element(false, head, t, c);
        }
        const double weight = std::exp(dot * double{w.scale});
        l += weight;
        for (int c = 0; c < kDim; ++c) {
          sum[static_cast<size_t>(c)] += weight * Element(true, head, t, c);
        }
      }
      ASSERT_NEAR(lse[static_cast<size_t>(row)], std::log(l), 1e-5) << row;
      for (int c = 0; c < kDim; ++c) {
        ASSERT_NEAR(out[static_cast<size_t>(row * kDim + c)], sum[static_cast<size_t>(c)] / l, 1e-5)
            << row;
      }
    }
  }

 private:
  static constexpr int kPages = kTokens / 16 + 1, kPageBytes = 2 * kHeads * 16 * kDim;  // elements

  const DType dtype_;
  std::vector<std::byte> memory_, q_;
  std::vector<uint64_t> pages_;
  std::vector<int32_t> tokens_;
};

TEST(AttendChunkRef, AllRowsAndSelections) {
  Random random;
  SCOPED_TRACE(random.Trace());
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const Chunk chunk(random, dtype);
    AttendChunkBatch w = chunk.Work();
    std::vector<float> out(kRows * kHeads * kGroup * kDim), lse(kRows * kHeads * kGroup);
    w.to = {out.data(), DType::kF32, lse.data()};
    AttendChunkRef(w);
    chunk.ExpectSame(w, out, lse, [](int, int) { return true; });
    // Sinks, pages of two lists, and a recent range that begins inside the chunk.
    const int32_t units[] = {1, 3, -9, 2, -9, -9}, counts[] = {2, 1}, sinks = 5, recent = 73;
    w.selection = {16, kHeads, 3, units, counts, &sinks, &recent};
    AttendChunkRef(w);
    chunk.ExpectSame(w, out, lse, [](int head, int t) {
      const int page = t / 16;
      return t < 5 || t >= 73 || (head == 0 ? page == 1 || page == 3 : page == 2);
    });
    // One list of tokens for all heads.
    const int32_t tokens[] = {7, 31, 70};
    const int32_t count = 3;
    w.selection = {1, 1, 3, tokens, &count, &sinks, &recent};
    AttendChunkRef(w);
    chunk.ExpectSame(w, out, lse,
                     [](int, int t) { return t < 5 || t == 7 || t == 31 || t == 70 || t >= 73; });
  }
}

}  // namespace
}  // namespace kvstrata::cuda
