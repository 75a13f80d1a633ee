// SPDX-License-Identifier: Apache-2.0
// A toy selector, as small as one can be: every third page of sixteen tokens, the first among them,
// and the newest tokens, from the page before the last on. All that a selector is, for both
// machines, is in every_nth_page.cc; that file and a row in each of two tables register it
// (toy_selector_rows.cc).
#pragma once

#include "kernels/select/selector_rows.h"

namespace kvstrata {

extern const FixedSelection kEveryNthPage;

}  // namespace kvstrata
