#include "server/store/blocks.h"

namespace kvstrata {

std::string_view NameOf(BlockKind kind) {
  constexpr std::string_view kNames[] = {"", "page", "index", "record", "part", "pin"};
  return kNames[static_cast<size_t>(kind)];
}

std::string_view NameOf(BlockState state) {
  constexpr std::string_view kNames[] = {"sound", "corrupt", "gone", "unchecked"};
  return kNames[static_cast<size_t>(state)];
}

}  // namespace kvstrata
