#include "server/store/value_info.h"

namespace kvstrata {

std::string_view NameOf(ValueKind kind) {
  constexpr std::string_view kNames[] = {"", "page", "index", "record", "extent", "pin"};
  return kNames[static_cast<size_t>(kind)];
}

std::string_view NameOf(ValueState state) {
  constexpr std::string_view kNames[] = {"sound", "corrupt", "gone", "unchecked"};
  return kNames[static_cast<size_t>(state)];
}

}  // namespace kvstrata
