// SPDX-License-Identifier: Apache-2.0
// Series: what an engine reports of a sequence's positions. Kept with a sequence, and in pieces
// with its sealed pages, so that whoever is held for a page has them too (ADR 5).
//
// A plain value. Cost: a copy of what is put, cut, encoded or parsed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace kvstrata {

// Reported by the engine, per position; NaN and 0 where nothing was.
struct Series {
  std::vector<float> surprisal, entropy;
  std::vector<uint8_t> boundary;

  bool empty() const { return surprisal.empty() && entropy.empty() && boundary.empty(); }
  // Values that were reported.
  size_t Count() const;
  // Positions from the first on that have a surprisal; the very first needs none.
  uint32_t LeadingSurprisals() const;
  // Takes what `part` has as positions `first` and on.
  void Put(uint32_t first, const Series& part);
  // Positions [first, first + n), as far as they were reported.
  Series Slice(uint32_t first, uint32_t n) const;
  // Forgets positions from `tokens` on.
  void Truncate(uint32_t tokens);

  // As docs/disk_format.md has it ("Series"). Parse: nothing when the bytes are no series.
  std::vector<std::byte> Encode() const;
  static std::optional<Series> Parse(std::span<const std::byte> bytes);
};

// Bit for bit, NaN included.
bool SameSeries(const Series& a, const Series& b);

}  // namespace kvstrata
