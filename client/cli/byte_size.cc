#include "client/cli/byte_size.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <string_view>
#include <utility>

namespace kvstrata::cli {

uint64_t ParseBytes(const std::string& text) {
  constexpr std::pair<std::string_view, uint64_t> kUnits[] = {{"", 1},
                                                              {"B", 1},
                                                              {"KiB", uint64_t{1} << 10},
                                                              {"MiB", uint64_t{1} << 20},
                                                              {"GiB", uint64_t{1} << 30},
                                                              {"TiB", uint64_t{1} << 40},
                                                              {"KB", 1000},
                                                              {"MB", 1000'000},
                                                              {"GB", 1000'000'000},
                                                              {"TB", 1000'000'000'000}};
  uint64_t number = 0;
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, number);
  std::string_view name(end, last);
  if (name.starts_with(' ')) name.remove_prefix(1);
  const auto* const unit =
      std::ranges::find(kUnits, name, &std::pair<std::string_view, uint64_t>::first);
  if (error != std::errc() || unit == std::end(kUnits) || number == 0 ||
      number > (uint64_t{1} << 60) / unit->second) {
    throw CLI::ValidationError("bytes '" + text + "'",
                               "allowed are such as 4096, 200MiB, 1GiB or 16GB");
  }
  return number * unit->second;
}

}  // namespace kvstrata::cli
