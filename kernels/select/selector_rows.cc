// SPDX-License-Identifier: Apache-2.0
#include "kernels/select/selector_rows.h"

namespace kvstrata {

std::span<const SelectorRow* const> SelectorRows() { return kSelectorRows; }

}  // namespace kvstrata
