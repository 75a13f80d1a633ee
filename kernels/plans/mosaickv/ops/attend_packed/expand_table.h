// SPDX-License-Identifier: Apache-2.0
// For targets without an expand instruction: where the bytes of 8 fp32 channels come from, by the 8
// mask bits of these channels. Entry m lists, channel by channel, the byte to move to each of four:
// an absent channel's are zero (index 0x80), a present one's upper two are the next bf16.
#pragma once

#include <cstdint>

namespace kvstrata {

struct ExpandTable {
  alignas(64) uint8_t bytes[256][32] = {};

  constexpr ExpandTable() {
    for (int mask = 0; mask < 256; ++mask) {
      int next = 0;
      for (int c = 0; c < 8; ++c) {
        const bool present = (mask >> c & 1) != 0;
        bytes[mask][4 * c] = bytes[mask][4 * c + 1] = 0x80;
        bytes[mask][4 * c + 2] = static_cast<uint8_t>(present ? 2 * next : 0x80);
        bytes[mask][4 * c + 3] = static_cast<uint8_t>(present ? 2 * next + 1 : 0x80);
        next += present ? 1 : 0;
      }
    }
  }
};

inline constexpr ExpandTable kExpandTable;

}  // namespace kvstrata
