// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/mosaickv/packed_places.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "kernels/codec/head_loop.h"

namespace kvstrata {
namespace {

// Mean relative error of the last kRecentTokens of a segment, from the losses of its flushes.
double RecentLoss(std::span<const double> flushes, int32_t buffer) {
  const auto wanted = static_cast<size_t>((kRecentTokens + buffer - 1) / buffer);
  const auto last = flushes.last(std::min(wanted, flushes.size()));
  const double sum = std::accumulate(last.begin(), last.end(), 0.0);
  return sum / (static_cast<double>(last.size()) * buffer);
}

}  // namespace

PackedPlaces::PackedPlaces(const Geometry& geometry, Run tokens, bool final, bool truncated,
                           const PackedInfo& info)
    : geometry_(geometry),
      tokens_(tokens),
      flags_((final ? kPackedFinal : 0) | (truncated ? kPackedTruncated : 0)),
      info_(info) {
  KVS_CHECK(writer_.Reserve(sizeof(PackedInfo)) == kPackedInfoAt);
  KVS_CHECK(writer_.Reserve(HeadCount(geometry) * static_cast<int64_t>(sizeof(PackedEntry))) ==
            kPackedEntriesAt);
  if (info_.buffer == 0) return;
  flushes_.resize(static_cast<size_t>((tokens.end - tokens.begin) / info_.buffer));
  info_.flushes = writer_.Reserve(static_cast<int64_t>(flushes_.size() * sizeof(double)));
}

void PackedPlaces::AddHead(const Strategy& s, bool rotations) {
  const PackedRows format =
      PackedFormat(geometry_.head_dim, s.keep, s.neighbours, (flags_ & kPackedTruncated) != 0);
  const int64_t square = int64_t{geometry_.head_dim} * geometry_.head_dim * 4;
  const int64_t rows = tokens_.end - tokens_.begin;
  PackedEntry e = {};
  e.r_k = rotations ? writer_.Reserve(square) : 0;
  e.r_v = rotations ? writer_.Reserve(square) : 0;
  e.eigenvalues = rotations ? writer_.Reserve(int64_t{geometry_.head_dim} * 4) : 0;
  e.keys = writer_.Reserve(rows * format.stride);
  e.values = writer_.Reserve(rows * format.stride);
  e.blocks = writer_.Reserve((rows + s.block - 1) / s.block * format.stride);
  e.keep = s.keep;
  e.neighbours = s.neighbours;
  e.block = s.block;
  entries_.push_back(e);
  formats_.push_back(format);
}

PackedPlaces PackedPlaces::OfJoined(const Geometry& geometry,
                                    std::span<const PackedExtent> extents) {
  const PackedExtent& last = extents.back();
  PackedInfo info = last.info;
  for (const PackedExtent& extent : extents) {
    info.refused_loss = std::max(info.refused_loss, extent.info.refused_loss);
    info.worst_loss = std::max(info.worst_loss, extent.info.worst_loss);
  }
  PackedPlaces places(geometry, {extents.front().tokens.begin, last.tokens.end}, false,
                      last.truncated, info);
  for (const PackedHead& h : last.heads) {
    places.AddHead({h.keys.keep, h.keys.neighbours, h.block}, false);
  }
  auto flushes = places.flushes_.begin();
  for (const PackedExtent& extent : extents) {
    flushes = std::copy_n(extent.flushes, extent.rows() / extent.info.buffer, flushes);
  }
  return places;
}

void PackedPlaces::NoteLoss(double loss, std::span<const double> before) {
  info_.loss += loss;
  if (flushes_.empty()) return;
  KVS_CHECK(flushes_.size() == 1);
  flushes_.front() = loss;
  std::vector<double> all(before.begin(), before.end());
  all.push_back(loss);
  info_.recent = RecentLoss(all, info_.buffer);
}

void PackedPlaces::Allocate() { writer_.Allocate(); }

void PackedPlaces::WriteFront(std::byte* to) const {
  std::memcpy(to + kPackedInfoAt, &info_, sizeof(info_));
  std::memcpy(to + kPackedEntriesAt, entries_.data(), entries_.size() * sizeof(PackedEntry));
  if (flushes_.empty()) return;
  std::memcpy(to + info_.flushes, flushes_.data(), flushes_.size() * sizeof(double));
}

std::vector<std::byte> PackedPlaces::Finish() {
  WriteFront(At<std::byte>(0));
  return writer_.Finish(ExtentKind::kPackedSegment, geometry_, tokens_, flags_);
}

std::vector<std::byte> PackedPlaces::Front(uint64_t build) const {
  ExtentHeader h =
      HeaderOf(ExtentKind::kPackedSegment, geometry_, tokens_, flags_ | kExtentUnhashed, bytes());
  h.checksum = build;
  const size_t entries = kPackedEntriesAt + entries_.size() * sizeof(PackedEntry);
  const size_t flushes = info_.flushes + flushes_.size() * sizeof(double);
  std::vector<std::byte> front(
      std::max({entries, flushes, static_cast<size_t>(kExtentFrontBytes)}));
  std::memcpy(front.data(), &h, sizeof(h));
  WriteFront(front.data());
  return front;
}

}  // namespace kvstrata
