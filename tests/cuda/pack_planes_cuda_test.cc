// SPDX-License-Identifier: Apache-2.0
// Op pack_planes on the GPU is op `ref`, bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/ops/pack_planes/pack_planes.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/elements.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

struct PackShape {
  PlanesFormat format{128, 64, 8};
  int kv_heads = 2, batch = 2, layers = 2, groups = 5, page_tokens = 16, block_groups = 2;
  DType dtype = DType::kBF16;
  float size = 1;
  bool has_strange = false;  // NaN, infinities, what no fp16 holds
  bool by_entry = false;     // how far apart heads lie in a block is said by its entry
};

std::string TextOf(const PackShape& s) {
  return "dim " + std::to_string(s.format.dim) + " unit " + std::to_string(s.format.tokens) +
         " keep " + std::to_string(s.format.keep) + " page " + std::to_string(s.page_tokens) +
         " dtype " + std::string(NameOf(s.dtype)) + " size " + std::to_string(s.size) +
         (s.has_strange ? " with strange elements" : "");
}

// Pages [layer][keys, values][kv_head][slot][dim] and blocks of runs [layer][kv_head][group], both
// at random places.
class PackCase {
 public:
  PackCase(const PackShape& shape, Rng& rng) : s_(shape) {
    const PlanesFormat& f = s_.format;
    row_ = f.dim * SizeOf(s_.dtype);
    head_ = s_.page_tokens * row_;
    layer_ = 2 * s_.kv_heads * head_;
    page_ = s_.layers * layer_;
    pages_each_ = (s_.groups * f.tokens + s_.page_tokens - 1) / s_.page_tokens;
    blocks_each_ = (s_.groups + s_.block_groups - 1) / s_.block_groups;
    FillPages(rng);
    upper_ = Runs(f.upper_bytes(), upper_places_, rng);
    lower_ = Runs(f.lower_bytes(), lower_places_, rng);
    upper_table_ = Entries(upper_places_);
    lower_table_ = Entries(lower_places_);
    from_ = DeviceArray<int32_t>(static_cast<size_t>(s_.batch));
    to_ = DeviceArray<int32_t>(static_cast<size_t>(s_.batch));
  }

  PackPlanesBatch Work() const {
    PackPlanesBatch w;
    w.keys = {page_table_.get(), pages_each_, s_.page_tokens, s_.kv_heads, s_.format.dim,
              s_.dtype,          0,           head_,          row_};
    w.values = w.keys;
    w.values.offset = s_.kv_heads * head_;
    w.planes.format = s_.format;
    const int64_t groups = s_.by_entry ? 1 : s_.block_groups;
    w.planes.upper = {upper_table_.get(), 0, groups * s_.format.upper_bytes()};
    w.planes.lower = {lower_table_.get(), 0, groups * s_.format.lower_bytes()};
    w.planes.block_stride = blocks_each_;
    w.planes.block_groups = s_.block_groups;
    w.planes.kv_heads = s_.kv_heads;
    w.from = from_.get();
    w.to = to_.get();
    w.batch = s_.batch;
    w.groups_max = s_.groups;
    w.layers = s_.layers;
    w.row_layer_stride = layer_;
    w.upper_layer_stride = s_.kv_heads * w.planes.upper.head_stride;
    w.lower_layer_stride = s_.kv_heads * w.planes.lower.head_stride;
    return w;
  }
  void SetRange(const std::vector<int32_t>& from, const std::vector<int32_t>& to) {
    range_from_ = from;
    range_to_ = to;
    from_.Write(from);
    to_.Write(to);
  }
  void Poison() {
    upper_.Poison();
    lower_.Poison();
  }

  // Every byte of each group in range is the reference's, and no other one was touched.
  void ExpectReference() {
    const std::vector<std::byte> upper = upper_.Read(), lower = lower_.Read();
    const PlanesFormat& f = s_.format;
    std::vector<std::byte> want_upper(f.upper_bytes()), want_lower(f.lower_bytes());
    for (int b = 0; b < s_.batch; ++b) {
      for (int g = 0; g < s_.groups; ++g) {
        const bool is_made = g >= range_from_[b] / f.tokens && g < range_to_[b] / f.tokens;
        for (int i = 0; i < s_.layers * s_.kv_heads; ++i) {
          const int layer = i / s_.kv_heads, head = i % s_.kv_heads;
          std::ranges::fill(want_upper, std::byte{0xFF});
          std::ranges::fill(want_lower, std::byte{0xFF});
          if (is_made) Reference(b, g, layer, head, &want_upper, &want_lower);
          const std::string name = "sequence " + std::to_string(b) + " group " + std::to_string(g) +
                                   " layer " + std::to_string(layer) + " head " +
                                   std::to_string(head);
          ExpectRun(name + " upper", want_upper, At(upper, upper_, upper_places_, b, g, i));
          ExpectRun(name + " lower", want_lower, At(lower, lower_, lower_places_, b, g, i));
        }
      }
    }
  }

 private:
  void FillPages(Rng& rng) {
    const int pages = pages_each_ * s_.batch;
    std::vector<float> elements(static_cast<size_t>(pages * page_ / SizeOf(s_.dtype)));
    for (float& x : elements) x = s_.size * Normal(rng);
    if (s_.has_strange) {
      const float infinity = std::numeric_limits<float>::infinity();
      const float strange[] = {infinity, -infinity, std::nanf(""), 65504.0f, -65504.0f,
                               1e30f,    -70000.0f, 0.0f,          -0.0f,    1e-30f};
      for (size_t i = 0; i < elements.size() / 50; ++i) {
        elements[rng() % elements.size()] = strange[Below(rng, 10)];
      }
    }
    host_ = Encoded(elements, s_.dtype);
    memory_ = DeviceArray<std::byte>(host_);
    std::vector<int> order(static_cast<size_t>(pages));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    std::vector<uint64_t> table;
    for (const int at : order) {
      table.push_back(memory_.address() + static_cast<uint64_t>(at * page_));
      host_pages_.push_back(host_.data() + at * page_);
    }
    page_table_ = DeviceArray<uint64_t>(table);
  }
  DeviceArray<std::byte> Runs(int64_t run, std::vector<uint64_t>& places, Rng& rng) {
    const int64_t block = int64_t{s_.layers} * s_.kv_heads * s_.block_groups * run;
    DeviceArray<std::byte> memory(static_cast<size_t>(blocks_each_ * s_.batch * block));
    for (int i = 0; i < blocks_each_ * s_.batch; ++i) {
      places.push_back(memory.address() + static_cast<uint64_t>(i * block));
    }
    std::shuffle(places.begin(), places.end(), rng);
    return memory;
  }
  DeviceArray<uint64_t> Entries(std::vector<uint64_t> places) const {
    const int shift = s_.by_entry ? std::countr_zero(static_cast<unsigned>(s_.block_groups)) : 0;
    for (uint64_t& place : places) place += static_cast<uint64_t>(shift);
    return DeviceArray<uint64_t>(places);
  }
  // index: layer * kv_heads + head.
  const std::byte* At(const std::vector<std::byte>& bytes, const DeviceArray<std::byte>& memory,
                      const std::vector<uint64_t>& places, int b, int g, int index) const {
    const auto blocks = static_cast<int64_t>(places.size());
    const int64_t run =
        static_cast<int64_t>(bytes.size()) / blocks / (s_.layers * s_.kv_heads * s_.block_groups);
    const uint64_t block = places[static_cast<size_t>(b * blocks_each_ + g / s_.block_groups)];
    return bytes.data() + (block - memory.address()) +
           (index * s_.block_groups + g % s_.block_groups) * run;
  }
  void Reference(int b, int g, int layer, int head, std::vector<std::byte>* upper,
                 std::vector<std::byte>* lower) {
    PackPlanesWork w;
    w.keys = {&host_pages_[static_cast<size_t>(b * pages_each_)],
              layer * layer_ + head * head_,
              row_,
              s_.page_tokens,
              s_.format.dim,
              s_.dtype};
    w.values = w.keys;
    w.values.offset += s_.kv_heads * head_;
    w.begin = g * s_.format.tokens;
    w.format = s_.format;
    w.upper = upper->data();
    w.lower = lower->data();
    PackPlanesRef(&w, 1, InlineExecutor());
  }
  static void ExpectRun(const std::string& name, const std::vector<std::byte>& want,
                        const std::byte* got) {
    int different = 0, first = -1;
    for (size_t i = 0; i < want.size(); ++i) {
      if (want[i] == got[i]) continue;
      if (different++ == 0) first = static_cast<int>(i);
    }
    if (different == 0) return;
    ADD_FAILURE() << name << ": " << different << " of " << want.size()
                  << " bytes differ; the first is byte " << first << ": want "
                  << static_cast<int>(want[static_cast<size_t>(first)]) << ", got "
                  << static_cast<int>(got[first]);
  }

  const PackShape s_;
  int64_t row_ = 0, head_ = 0, layer_ = 0, page_ = 0;  // bytes
  int pages_each_ = 0, blocks_each_ = 0;               // a sequence's
  std::vector<std::byte> host_;
  std::vector<std::byte*> host_pages_;
  std::vector<uint64_t> upper_places_, lower_places_;
  std::vector<int32_t> range_from_, range_to_;
  DeviceArray<std::byte> memory_, upper_, lower_;
  DeviceArray<uint64_t> page_table_, upper_table_, lower_table_;
  DeviceArray<int32_t> from_, to_;
};

TEST(PackPlanesCuda, IsTheReferenceForEveryShape) {
  Rng rng(TestSeed());
  for (const int dim : {64, 128, 256}) {
    for (const int keep : {4, 8}) {
      for (const int tokens : {16, 32, 48, 64, 128, 256}) {
        PackShape s;
        s.format = {dim, tokens, keep};
        s.page_tokens = 16 << Below(rng, 3);
        s.dtype = Below(rng, 2) == 0 ? DType::kBF16 : DType::kF16;
        s.size = std::vector{1e-4f, 0.3f, 1.0f, 300.0f}[Below(rng, 4)];
        s.has_strange = Below(rng, 3) == 0;
        s.groups = tokens > 64 ? 2 : 4;
        s.block_groups = 1 << Below(rng, 3);
        s.by_entry = Below(rng, 2) == 0;
        SCOPED_TRACE(TextOf(s));
        PackCase pack(s, rng);
        pack.SetRange({0, tokens + Below(rng, tokens)},
                      {s.groups * tokens, s.groups * tokens - Below(rng, tokens)});
        pack.Poison();
        ASSERT_EQ(kvs_cuda_ops()->pack_planes(pack.Work(), nullptr), 0);
        pack.ExpectReference();
      }
    }
  }
}

TEST(PackPlanesCuda, CountsStrangeElementsAsThePageSays) {
  Rng rng(TestSeed());
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const float size : {0.0f, 1.0f, 30000.0f}) {
      PackShape s;
      s.dtype = dtype;
      s.size = size;
      s.has_strange = size != 0;
      SCOPED_TRACE(TextOf(s));
      PackCase pack(s, rng);
      pack.SetRange({0, 0}, {320, 320});
      pack.Poison();
      ASSERT_EQ(kvs_cuda_ops()->pack_planes(pack.Work(), nullptr), 0);
      pack.ExpectReference();
    }
  }
}

// As decoding goes on: a range of one token completes a group or none.
TEST(PackPlanesCuda, OneGraphServesEveryStep) {
  Rng rng(TestSeed());
  PackShape s;
  s.layers = 3;
  PackCase pack(s, rng);
  PackPlanesBatch work = pack.Work();
  work.groups_max = 1;
  CapturedGraph graph([&](Stream stream) { return kvs_cuda_ops()->pack_planes(work, stream); });
  for (const int32_t token : {0, 63, 64, 127, 255}) {
    SCOPED_TRACE(token);
    pack.SetRange({token, 319 - token}, {token + 1, 320 - token});
    pack.Poison();
    graph.Replay();
    pack.ExpectReference();
  }
}

TEST(PackPlanesCuda, RefusesWhatItDoesNotTake) {
  Rng rng(TestSeed());
  PackCase pack({}, rng);
  pack.SetRange({0, 0}, {320, 320});
  const auto refuses = [&](auto change) {
    PackPlanesBatch work = pack.Work();
    change(work);
    return kvs_cuda_ops()->pack_planes(work, nullptr) != 0;
  };
  EXPECT_FALSE(refuses([](PackPlanesBatch&) {}));
  EXPECT_TRUE(refuses([](PackPlanesBatch& w) { w.planes.format.tokens = 24; }));
  EXPECT_TRUE(refuses([](PackPlanesBatch& w) { w.planes.block_groups = 3; }));
  EXPECT_TRUE(refuses([](PackPlanesBatch& w) { w.values.head_dim = 64; }));
  EXPECT_TRUE(refuses([](PackPlanesBatch& w) { w.keys.page_rows = 8; }));
  EXPECT_TRUE(refuses([](PackPlanesBatch& w) { w.layers = 0; }));
}

}  // namespace
}  // namespace kvstrata::cuda
