// SPDX-License-Identifier: Apache-2.0
// PlanesWorks: the work items of op attend_planes for a round of query tiles, and what they need
// until the op has run: addresses of groups, sums of raw rows' partials, flags of what is chosen.
//
// Ownership: groups and partials outlive Attend; what is added is kept until Clear. Threads: one
// call at a time. Cost: memory is kept from round to round; two addresses a group and item.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/backend/backend.h"

namespace kvstrata {

// What attending reads; rows are (position, KV head) pairs.
struct ReadCost {
  uint64_t rows = 0;         // at full resolution, in whatever form
  uint64_t coarse_rows = 0;  // coarsely: units as one row, or rows by some of their bits
  uint64_t bytes = 0;        // bytes of both

  void Add(uint64_t count, uint64_t bytes_each) { rows += count, bytes += count * bytes_each; }
  void AddCoarse(uint64_t count, uint64_t bytes_each) {
    coarse_rows += count, bytes += count * bytes_each;
  }
};

class PlanesWorks {
 public:
  void Clear();

  // Groups of an item: those that are added from FirstGroup() on until its Add.
  size_t FirstGroup() const { return upper_.size(); }
  void AddGroup(const std::byte* upper, const std::byte* lower) {
    upper_.push_back(upper);
    lower_.push_back(lower);
  }
  // Its partial is the first behind `pages` partials of raw rows, for the same queries. read: what
  // it reads is added there; may be null.
  void Add(AttendPlanesWork work, size_t first_group, int32_t pages, ReadCost* read);

  // REQUIRES: the partials of raw rows are there.
  void Attend(const Backend& backend, Executor& executor);

 private:
  struct Place {
    size_t first_group, first_flag, first_raw;
    int32_t pages;
    ReadCost* read;
  };

  void Resolve();
  // The partial of all raw rows, of each head of the first query token.
  void SumPages(size_t item);
  void CountReads(size_t item) const;

  std::vector<AttendPlanesWork> works_;
  std::vector<Place> places_;
  std::vector<const std::byte*> upper_, lower_;
  std::vector<uint8_t> flags_;  // an item's fine tokens, then its strips
  std::vector<float> raw_;      // m of an item's heads, then l
  size_t flag_end_ = 0, raw_end_ = 0;
};

}  // namespace kvstrata
