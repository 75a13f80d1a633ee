// SPDX-License-Identifier: Apache-2.0
// PromptValues: everything that a remote tier may have of a prompt.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/store/options/store_fwd.h"
#include "server/store/pages/page_tier.h"

namespace kvstrata {

struct PromptValues {
  std::string tenant;  // "uid:1000"
  uint32_t page_tokens = 0;
  std::vector<TierSearch::Key> keys;
};

// Its whole pages, and with a plan its index blocks and its artefact. Any thread; may read a plan's
// parameters; hashes all tokens. Errors: MODEL_UNKNOWN, SEQUENCE_TOO_LONG, PLAN_*, PARAMETERS_*.
Result<PromptValues> ValuesOfPrompt(Store* store, std::string_view tenant, uint64_t model,
                                    std::span<const int32_t> tokens, std::string_view plan);

}  // namespace kvstrata
