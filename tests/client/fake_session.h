// SPDX-License-Identifier: Apache-2.0
// What the fake transport (fake_session.cc) saw, for tests of the C ABI's own work.
#pragma once

#include <string>
#include <vector>

#include "client/session.h"

namespace kvstrata::client::testing {

inline constexpr Geometry kFakeGeometry{2, 4, 2, 64, 16, DType::kF32};
inline constexpr uint64_t kFakeModel = 11;
inline constexpr uint64_t kFakeSequence = 7;

struct FakeLog {
  AttachOptions options;
  ModelSpec model;
  std::string plan;
  std::vector<int32_t> prompt;
  OpenOptions open;
  std::string opened_key, closed_key, truncated_key;
  uint32_t truncated_to = 0;
  std::vector<BatchMember> members;  // the last step's; their ids are gone
  std::vector<LateIds> late;
  bool late_on_gpu = false;
  std::string lookup_device;
  uint32_t lease_ms = 0;
  Rows k;
  MutableRows out;
  LentTensor keys;
  bool same_memory = false;
  bool append_fails = false;
  int begun = 0, committed = 0, dropped = 0, detached = 0;
};
FakeLog& Log();

}  // namespace kvstrata::client::testing
