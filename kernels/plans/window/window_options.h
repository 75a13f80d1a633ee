// SPDX-License-Identifier: Apache-2.0
// Options of selector `window` (StreamingLLM): tokens that are always attended. Rows: window.cc.
#pragma once

#include <cstdint>

namespace kvstrata {

struct WindowOptions {
  int32_t sinks = 4, recent = 2044;  // `n_sink`, `n_recent`

  bool operator==(const WindowOptions&) const = default;
};

}  // namespace kvstrata
