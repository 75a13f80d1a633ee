// SPDX-License-Identifier: Apache-2.0
// ExtentDescriptions: the descriptions (extent.h) of one sequence's extents that lie in a GPU's
// memory, copied when a table first names them and kept as long as one does.
//
// Ownership: owns the copies; views that were described point into them. Threads: one at a time.
// Cost: two short copies for each new extent, which Describe waits for.
#pragma once

#include <functional>
#include <map>
#include <span>
#include <tuple>
#include <vector>

#include "base/status.h"
#include "kernels/codec/extent.h"

namespace kvstrata {

// Copies bytes that the host cannot follow to the host; done when it returns.
using DeviceRead = std::function<Status(std::byte* to, const std::byte* from, uint64_t bytes)>;

class ExtentDescriptions {
 public:
  // Sets the view's description. What `read` failed with, nothing is known of it then.
  Status Describe(const DeviceRead& read, ExtentView* extent);
  // Forgets those that none of `extents` points to.
  void KeepOnly(std::span<const ExtentView> extents);
  // Extents of other tables may lie where these did.
  void Clear() { known_.clear(); }

 private:
  // Descriptions by address and tokens.
  std::map<std::tuple<const std::byte*, int32_t, int32_t>, std::vector<std::byte>> known_;
};

}  // namespace kvstrata
