// SPDX-License-Identifier: Apache-2.0
// What the suites of quantised keys share: groups of random keys, quantised by ref, over scattered
// index blocks; and the bytes read back by a rule written from docs/spec/bits.md alone.
#pragma once

#include "kernels/ops/quantise_keys/quantise_keys.h"
#include "kernels/ops/score_bits/score_bits.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata {

inline float HalfIn(const std::byte* group, int64_t at) { return LoadAs(DType::kF16, group + at); }
inline float MinimumOf(const std::byte* group, int channel) { return HalfIn(group, 2 * channel); }
inline float StepOf(const QuantisedGroup& f, const std::byte* group, int channel) {
  return HalfIn(group, 2 * f.dim + 2 * channel);
}

// w bits of word i of a plane: of channel m * C + 4 i + c.
inline int CodeAt(const QuantisedGroup& f, const std::byte* group, int token, int channel) {
  constexpr int kByteOf[] = {0, 2, 1, 3};
  int code = 0, first = 0;
  const std::byte* plane = group + 4 * f.dim;
  for (int width : f.bits == 3 ? std::vector<int>{2, 1} : std::vector<int>{f.bits}) {
    const int run = f.dim * width / 8, m = channel / run, i = channel % run / 4, c = channel % 4;
    uint32_t word;
    std::memcpy(&word, plane + 4 * (i * f.tokens + token), 4);
    code |= static_cast<int>(word >> (8 * kByteOf[c] + width * m) & ((1u << width) - 1)) << first;
    first += width;
    plane += int64_t{f.tokens} * f.dim * width / 8;
  }
  return code;
}

inline double QuantisedAt(const QuantisedGroup& f, const std::byte* group, int token, int channel) {
  return MinimumOf(group, channel) +
         static_cast<double>(StepOf(f, group, channel)) * CodeAt(f, group, token, channel);
}

inline std::vector<QuantisedGroup> GroupFormats() {
  std::vector<QuantisedGroup> formats;
  for (int dim : kDims) {
    for (int bits : {2, 3, 4}) {
      for (int tokens : {16, 48, 64, 256}) formats.push_back({dim, bits, tokens});
    }
  }
  return formats;
}

inline std::string NameOf(const QuantisedGroup& f) {
  return "dim " + std::to_string(f.dim) + " bits " + std::to_string(f.bits) + " tokens " +
         std::to_string(f.tokens);
}

// The groups of `keys`, from its first row on, in blocks of a few groups in random order.
struct QuantisedFixture {
  std::vector<std::byte> memory;
  std::vector<std::byte*> blocks;
  QuantisedRows rows;

  QuantisedFixture(Random& random, const PagedFixture& keys, QuantisedGroup format, int groups,
                   int groups_per_block = 3) {
    constexpr int64_t kOffset = 192;  // where the (layer, head) begins in a block
    const int count = (groups + groups_per_block - 1) / groups_per_block;
    const int64_t block_bytes = kOffset + groups_per_block * format.bytes();
    memory.assign(static_cast<size_t>(count * block_bytes), std::byte{0xA5});
    for (int i = 0; i < count; ++i) blocks.push_back(memory.data() + i * block_bytes);
    for (int i = count - 1; i > 0; --i) std::swap(blocks[i], blocks[random.Below(i + 1)]);
    rows = {format, blocks.data(), kOffset, groups_per_block};
    for (int g = 0; g < groups; ++g) {
      const QuantiseKeysWork work{keys.rows, g * format.tokens, format,
                                  const_cast<std::byte*>(rows.Group(g))};
      QuantiseKeysRef(&work, 1, InlineExecutor());
    }
  }
  QuantisedFixture(const QuantisedFixture&) = delete;
};

}  // namespace kvstrata
