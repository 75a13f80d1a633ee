#include "kernels/select/selector_rows.h"

namespace kvstrata {

std::span<const SelectorRow> SelectorRows() { return kSelectorRows; }

}  // namespace kvstrata
