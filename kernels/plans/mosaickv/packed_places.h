// SPDX-License-Identifier: Apache-2.0
// PackedPlaces: where the arrays of a kPackedSegment extent lie that is being made, and the front
// of it: header, scalars, entries and the losses of flushes. Private to mosaickv.
//
// AddHead for each head in order, then read entries. Allocate and Finish make an extent in host
// memory, Front the description of one elsewhere.
#pragma once

#include <span>
#include <vector>

#include "kernels/plans/mosaickv/packed_layout.h"
#include "kernels/plans/mosaickv/strategy.h"

namespace kvstrata {

class PackedPlaces {
 public:
  PackedPlaces(const Geometry& geometry, Run tokens, bool final, bool truncated,
               const PackedInfo& info);

  void AddHead(const Strategy& s, bool rotations);
  // Joins consecutive extents of one temporary segment; no row is packed again.
  static PackedPlaces OfJoined(const Geometry& geometry, std::span<const PackedExtent> extents);
  // What these rows have lost; `before`: the flushes before them (temporary only).
  void NoteLoss(double loss, std::span<const double> before);
  // See PackedInfo.
  void NoteWorst(double loss) { info_.worst_loss = loss; }

  const PackedEntry& entry(size_t head) const { return entries_[head]; }
  const PackedRows& format(size_t head) const { return formats_[head]; }
  const PackedInfo& info() const { return info_; }
  int64_t bytes() const { return writer_.bytes(); }

  // All zero.
  void Allocate();
  // REQUIRES: Allocate.
  template <typename T>
  T* At(uint64_t offset) {
    return writer_.At<T>(offset);
  }
  std::vector<std::byte> Finish();

  // The description; the extent counts as unhashed, and `build` names it.
  std::vector<std::byte> Front(uint64_t build) const;

 private:
  // Into `to`, which begins as the extent does: all that Front has but the header.
  void WriteFront(std::byte* to) const;

  const Geometry& geometry_;
  Run tokens_;
  uint32_t flags_;
  PackedInfo info_;
  ExtentWriter writer_;
  std::vector<double> flushes_;  // temporary
  std::vector<PackedEntry> entries_;
  std::vector<PackedRows> formats_;
};

}  // namespace kvstrata
