// SPDX-License-Identifier: Apache-2.0
// LentBlocks: an engine's paged tensors in one memfd, for tests of imported sequences: keys and
// values of all layers in a layout of one's choice, everything that no token was put into poisoned.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"

namespace kvstrata::testing {

// Strides of one layer's keys or values, in bytes.
struct BlockStrides {
  int64_t offset = 0, block = 0, slot = 0, head = 0;
};

struct BlockShape {
  int32_t layers = 0, blocks = 0, block_tokens = 0, heads = 0;
  int64_t row = 0;  // bytes
  int64_t side() const { return int64_t{blocks} * block_tokens * heads * row; }
};

// What engines have. Offsets are of layer 0; layers lie side by side.
struct BlockLayout {
  const char* name;
  // The strides of the keys (side 0) or the values (side 1).
  BlockStrides (*of)(const BlockShape&, int side);
  friend void PrintTo(const BlockLayout& l, std::ostream* out) { *out << l.name; }
};

inline const BlockLayout kBlockLayouts[] = {
    {"SideBlockSlotHead",  // [2][block][slot][head][dim]
     [](const BlockShape& s, int side) {
       return BlockStrides{side * s.side(), s.block_tokens * s.heads * s.row, s.heads * s.row,
                           s.row};
     }},
    {"BlockSideSlotHead",  // [block][2][slot][head][dim]
     [](const BlockShape& s, int side) {
       const int64_t half = s.block_tokens * s.heads * s.row;
       return BlockStrides{side * half, 2 * half, s.heads * s.row, s.row};
     }},
    {"BlockSlotSideHead",  // [block][slot][2][head][dim]
     [](const BlockShape& s, int side) {
       const int64_t slot = 2 * s.heads * s.row;
       return BlockStrides{side * s.heads * s.row, s.block_tokens * slot, slot, s.row};
     }},
    {"BlockHeadSlot",  // [2][block][head][slot][dim], as pages have it
     [](const BlockShape& s, int side) {
       return BlockStrides{side * s.side(), s.block_tokens * s.heads * s.row, s.row,
                           s.block_tokens * s.row};
     }},
    {"HeadBlockSlot",  // [2][head][block][slot][dim]: heads far apart
     [](const BlockShape& s, int side) {
       return BlockStrides{side * s.side(), s.block_tokens * s.row, s.row,
                           s.blocks * s.block_tokens * s.row};
     }},
    {"SlotHeadBlock",  // [2][slot][head][block][dim]: every row by itself
     [](const BlockShape& s, int side) {
       return BlockStrides{side * s.side(), s.row, s.heads * s.blocks * s.row, s.blocks * s.row};
     }},
};

class LentBlocks {
 public:
  LentBlocks(const BlockShape& shape, const BlockLayout& layout, bool sealed = true)
      : shape_(shape),
        layout_(layout),
        bytes_(static_cast<uint64_t>(2 * shape.side()) * static_cast<uint64_t>(shape.layers)) {
    fd_.Reset(memfd_create("lent", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    EXPECT_EQ(ftruncate(fd_.get(), static_cast<off_t>(bytes_)), 0);
    const int seals = sealed ? F_SEAL_SHRINK : 0;
    EXPECT_EQ(fcntl(fd_.get(), F_ADD_SEALS, seals), 0);
    void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
    EXPECT_NE(at, MAP_FAILED);
    data_ = static_cast<std::byte*>(at);
    Poison();
  }
  LentBlocks(const LentBlocks&) = delete;
  LentBlocks& operator=(const LentBlocks&) = delete;
  ~LentBlocks() { munmap(data_, bytes_); }

  void Poison() { std::memset(data_, 0xFF, bytes_); }

  BlockStrides StridesOf(int32_t layer, int side) const {
    BlockStrides s = layout_.of(shape_, side);
    s.offset += layer * 2 * shape_.side();
    return s;
  }
  std::byte* Row(int32_t layer, int side, int32_t block, int32_t slot, int32_t head) const {
    const BlockStrides s = StridesOf(layer, side);
    return data_ + s.offset + block * s.block + slot * s.slot + head * s.head;
  }

  // Rows of positions [0, positions): position p in blocks[p / block_tokens]. `row` fills one.
  using RowOf =
      std::function<void(int32_t layer, int side, int32_t head, int32_t position, std::byte* to)>;
  void Put(const std::vector<int32_t>& blocks, int32_t positions, const RowOf& row) {
    ForEach(blocks, positions, row);
  }
  // How many of those rows are others than `row` says.
  int Differing(const std::vector<int32_t>& blocks, int32_t positions, const RowOf& row) const {
    int differing = 0;
    std::vector<std::byte> want(static_cast<size_t>(shape_.row));
    ForEach(blocks, positions,
            [&](int32_t layer, int side, int32_t head, int32_t p, std::byte* at) {
              row(layer, side, head, p, want.data());
              differing += std::memcmp(at, want.data(), want.size()) != 0;
            });
    return differing;
  }

  int fd() const { return fd_.get(); }
  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  const BlockShape& shape() const { return shape_; }

 private:
  void ForEach(const std::vector<int32_t>& blocks, int32_t positions, const RowOf& row) const {
    for (int32_t layer = 0; layer < shape_.layers; ++layer) {
      for (int side = 0; side < 2; ++side) {
        for (int32_t p = 0; p < positions; ++p) {
          const int32_t block = blocks[static_cast<size_t>(p / shape_.block_tokens)];
          for (int32_t h = 0; h < shape_.heads; ++h) {
            row(layer, side, h, p, Row(layer, side, block, p % shape_.block_tokens, h));
          }
        }
      }
    }
  }

  const BlockShape shape_;
  const BlockLayout layout_;
  const uint64_t bytes_;
  UniqueFd fd_;
  std::byte* data_ = nullptr;
};

}  // namespace kvstrata::testing
