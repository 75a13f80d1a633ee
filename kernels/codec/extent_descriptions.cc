// SPDX-License-Identifier: Apache-2.0
#include "kernels/codec/extent_descriptions.h"

#include <algorithm>

namespace kvstrata {

Status ExtentDescriptions::Describe(const DeviceRead& read, ExtentView* extent) {
  const auto [known, fresh] =
      known_.try_emplace({extent->data, extent->tokens.begin, extent->tokens.end});
  std::vector<std::byte>& copy = known->second;
  if (fresh) {
    const auto copied = [&](int64_t bytes) {
      copy.resize(static_cast<size_t>(bytes));
      return read(copy.data(), extent->data, copy.size());
    };
    Status status = copied(std::min(extent->bytes, kExtentFrontBytes));
    if (status.ok()) status = copied(DescriptionBytes(copy, extent->bytes));
    if (!status.ok()) {
      known_.erase(known);
      return status;
    }
  }
  extent->description = copy.data();
  extent->description_bytes = static_cast<int64_t>(copy.size());
  return OkStatus();
}

void ExtentDescriptions::KeepOnly(std::span<const ExtentView> extents) {
  std::erase_if(known_, [extents](const auto& known) {
    const std::byte* const copy = known.second.data();
    return std::ranges::find(extents, copy, &ExtentView::description) == extents.end();
  });
}

}  // namespace kvstrata
