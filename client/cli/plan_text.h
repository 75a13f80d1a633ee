// SPDX-License-Identifier: Apache-2.0
// PlanText: what a plan's text with every option (kvs_sequence_plan) says about how a replay may
// measure it. Pure functions; the text is the daemon's, so nothing is refused here.
#pragma once

#include <string>
#include <string_view>

namespace kvstrata::cli {

// The value of an option as written, without quotes; "" when the text has no such option.
std::string PlanOption(std::string_view text, std::string_view key);

// Rows are stored as they were given: their bytes are those of keys and values.
bool StoresRaw(std::string_view text);

// Nothing but attended positions, stored raw, went into the softmax: the difference of two
// log-sum-exps is then the mass on them. Not so with coarse rows (`rest`, `tree`), a lossy codec,
// or rows that stand at other places than their positions (`compact`).
bool AttendsPositionsOnly(std::string_view text);

}  // namespace kvstrata::cli
