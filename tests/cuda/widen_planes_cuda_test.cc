// SPDX-License-Identifier: Apache-2.0
// Op widen_planes on the GPU is op `ref`, bit for bit. Groups are any bytes: every code, minimum
// and step is one that a group may have.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/elements.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

struct WidenShape {
  PlanesFormat format{128, 64, 8};
  int kv_heads = 2, groups = 3, block_groups = 1, raw = 0, added = 0;
  DType dtype = DType::kBF16;
};

std::string TextOf(const WidenShape& s) {
  return "dim " + std::to_string(s.format.dim) + " unit " + std::to_string(s.format.tokens) +
         " keep " + std::to_string(s.format.keep) + " dtype " + std::string(NameOf(s.dtype)) +
         " groups " + std::to_string(s.groups) + " raw " + std::to_string(s.raw) + " added " +
         std::to_string(s.added);
}

// Random bytes, in which minima and steps are what numbers of size 1 have.
std::vector<std::byte> RandomRuns(const WidenShape& s, size_t runs, Rng& rng) {
  const PlanesFormat& f = s.format;
  std::vector<std::byte> bytes(runs * static_cast<size_t>(f.upper_bytes()));
  for (std::byte& x : bytes) x = static_cast<std::byte>(rng());
  for (size_t run = 0; run < runs; ++run) {
    std::byte* const upper = &bytes[run * static_cast<size_t>(f.upper_bytes())];
    for (int c = 0; c < 2 * f.dim; ++c) {
      StoreFloat(upper + 2 * c, DType::kF16, c < f.dim ? 3 * Normal(rng) : 0.02f);
    }
    for (int t = 0; t < 2 * f.tokens; ++t) {
      const float size = Below(rng, 9) == 0 ? 500 : 1;  // some beyond what fp16 holds
      StoreFloat(upper + f.value_minimum() + 2 * t, DType::kF16,
                 t < f.tokens ? 100 * size * Normal(rng) : 0.02f * size);
    }
  }
  return bytes;
}

// One sequence in blocks and pages at random places, twice: on the GPU and in host memory.
class WidenCase {
 public:
  WidenCase(const WidenShape& s, Rng& rng) : s_(s) {
    const PlanesFormat& f = s_.format;
    const size_t blocks = static_cast<size_t>(s_.groups / s_.block_groups + 1);
    const size_t runs = blocks * static_cast<size_t>(s_.kv_heads * s_.block_groups);
    upper_ = RandomRuns(s_, runs, rng);
    lower_.resize(runs * static_cast<size_t>(f.lower_bytes()));
    for (std::byte& x : lower_) x = static_cast<std::byte>(rng());
    row_ = int64_t{f.dim} * 2;
    raw_ = RandomElements(rng, s_.dtype, static_cast<size_t>(64 * 2 * s_.kv_heads * f.dim));
    new_ = RandomElements(rng, s_.dtype,
                          static_cast<size_t>((s_.added + 1) * 2 * s_.kv_heads * (f.dim + 8)));
    device_upper_ = DeviceArray<std::byte>(upper_);
    device_lower_ = DeviceArray<std::byte>(lower_);
    device_raw_ = DeviceArray<std::byte>(raw_);
    device_new_ = DeviceArray<std::byte>(new_);
    std::vector<size_t> places(blocks);
    for (size_t i = 0; i < blocks; ++i) places[i] = i;
    std::shuffle(places.begin(), places.end(), rng);
    for (const size_t at : places) {
      const auto distance = [&](int64_t run) {
        return static_cast<int64_t>(at) * s_.kv_heads * s_.block_groups * run;
      };
      upper_at_.push_back(static_cast<uint64_t>(distance(f.upper_bytes())));
      lower_at_.push_back(static_cast<uint64_t>(distance(f.lower_bytes())));
    }
    device_upper_at_ = DeviceArray<uint64_t>(upper_at_);
    device_lower_at_ = DeviceArray<uint64_t>(lower_at_);
    device_none_ = DeviceArray<uint64_t>(none_);
    const size_t bytes = static_cast<size_t>(Tokens() * s_.kv_heads * row_);
    device_keys_ = DeviceArray<std::byte>(bytes);
    device_values_ = DeviceArray<std::byte>(bytes);
  }

  WidenPlanesBatch Device() const {
    WidenPlanesBatch w = Work(device_upper_.get(), device_lower_.get(), device_raw_.get(),
                              device_new_.get(), device_none_.get());
    w.planes.upper.blocks = device_upper_at_.get();
    w.planes.lower.blocks = device_lower_at_.get();
    w.keys = device_keys_.get();
    w.values = device_values_.get();
    return w;
  }
  void ExpectReference() {
    std::vector<std::byte> keys(device_keys_.size()), values(device_values_.size());
    WidenPlanesBatch w = Work(upper_.data(), lower_.data(), raw_.data(), new_.data(), none_.data());
    w.planes.upper.blocks = upper_at_.data();
    w.planes.lower.blocks = lower_at_.data();
    w.keys = keys.data();
    w.values = values.data();
    WidenPlanesRef(w);
    ExpectSame("keys", device_keys_.Read(), keys);
    ExpectSame("values", device_values_.Read(), values);
  }

 private:
  int Tokens() const { return s_.groups * s_.format.tokens + s_.raw + s_.added; }

  WidenPlanesBatch Work(const std::byte* upper, const std::byte* lower, const std::byte* raw,
                        const std::byte* added, const uint64_t* none) const {
    const PlanesFormat& f = s_.format;
    WidenPlanesBatch w;
    w.planes.format = f;
    w.planes.upper = {nullptr, reinterpret_cast<int64_t>(upper), s_.block_groups * f.upper_bytes()};
    w.planes.lower = {nullptr, reinterpret_cast<int64_t>(lower), s_.block_groups * f.lower_bytes()};
    w.planes.block_groups = s_.block_groups;
    w.planes.kv_heads = s_.kv_heads;
    w.groups = s_.groups;
    w.raw_keys = {none,      1,   64, s_.kv_heads, f.dim, s_.dtype, reinterpret_cast<int64_t>(raw),
                  64 * row_, row_};
    w.raw_values = w.raw_keys;
    w.raw_values.offset += s_.kv_heads * 64 * row_;
    w.raw = s_.raw;
    const int64_t head = (f.dim + 8) * 2;
    w.new_k = {added, 2 * s_.kv_heads * head, head, s_.dtype};
    w.new_v = {added + s_.kv_heads * head, 2 * s_.kv_heads * head, head, s_.dtype};
    w.added = s_.added;
    w.dtype = s_.dtype;
    return w;
  }
  void ExpectSame(const char* name, const std::vector<std::byte>& got,
                  const std::vector<std::byte>& want) const {
    int different = 0, first = -1;
    for (size_t i = 0; i < want.size(); i += 2) {
      if (got[i] == want[i] && got[i + 1] == want[i + 1]) continue;
      if (different++ == 0) first = static_cast<int>(i / 2);
    }
    if (different == 0) return;
    const int row = s_.kv_heads * s_.format.dim;
    ADD_FAILURE() << name << ": " << different << " of " << want.size() / 2
                  << " elements differ; the first is token " << first / row << ", head "
                  << first % row / s_.format.dim << ", channel " << first % s_.format.dim
                  << ": want " << LoadFloat(&want[static_cast<size_t>(2 * first)], s_.dtype)
                  << ", got " << LoadFloat(&got[static_cast<size_t>(2 * first)], s_.dtype);
  }

  const WidenShape s_;
  int64_t row_ = 0;
  std::vector<std::byte> upper_, lower_, raw_, new_;
  std::vector<uint64_t> upper_at_, lower_at_, none_{0};
  DeviceArray<std::byte> device_upper_, device_lower_, device_raw_, device_new_;
  DeviceArray<std::byte> device_keys_, device_values_;
  DeviceArray<uint64_t> device_upper_at_, device_lower_at_, device_none_;
};

TEST(WidenPlanesCuda, IsTheReferenceForEveryShape) {
  Rng rng(TestSeed());
  for (const int dim : {64, 128, 256}) {
    for (const int keep : {4, 8}) {
      for (const int tokens : {16, 48, 64, 256}) {
        WidenShape s;
        s.format = {dim, tokens, keep};
        s.dtype = Below(rng, 2) == 0 ? DType::kBF16 : DType::kF16;
        s.block_groups = 1 << Below(rng, 3);
        s.raw = Below(rng, std::min(tokens, 64));
        s.added = Below(rng, 200);
        SCOPED_TRACE(TextOf(s));
        WidenCase c(s, rng);
        ASSERT_EQ(kvs_cuda_ops()->widen_planes(c.Device(), nullptr), 0);
        c.ExpectReference();
      }
    }
  }
}

TEST(WidenPlanesCuda, TakesRowsThatAreNotSealedAlone) {
  Rng rng(TestSeed());
  for (const auto& [raw, added] : {std::pair{0, 1}, {0, 64}, {1, 63}, {63, 1}, {63, 500}}) {
    WidenShape s;
    s.groups = Below(rng, 2);
    s.raw = raw;
    s.added = added;
    SCOPED_TRACE(TextOf(s));
    WidenCase c(s, rng);
    ASSERT_EQ(kvs_cuda_ops()->widen_planes(c.Device(), nullptr), 0);
    c.ExpectReference();
  }
}

TEST(WidenPlanesCuda, RefusesWhatItDoesNotTake) {
  Rng rng(TestSeed());
  WidenShape shape;
  shape.added = 3;
  WidenCase c(shape, rng);
  const auto refuses = [&](auto change) {
    WidenPlanesBatch work = c.Device();
    change(work);
    return kvs_cuda_ops()->widen_planes(work, nullptr) != 0;
  };
  EXPECT_FALSE(refuses([](WidenPlanesBatch&) {}));
  EXPECT_TRUE(refuses([](WidenPlanesBatch& w) { w.planes.format.tokens = 24; }));
  EXPECT_TRUE(refuses([](WidenPlanesBatch& w) { w.groups = -1; }));
  EXPECT_TRUE(refuses([](WidenPlanesBatch& w) { w.dtype = DType::kF32; }));
  EXPECT_TRUE(refuses([](WidenPlanesBatch& w) { w.new_k.row_stride = 8; }));
}

}  // namespace
}  // namespace kvstrata::cuda
