// Values of the configuration as text. Pure functions; any thread. false: no such value, and *out
// is undefined.
#ifndef KVSTRATA_SERVER_CONFIG_VALUES_H_
#define KVSTRATA_SERVER_CONFIG_VALUES_H_

#include <chrono>
#include <cstdint>
#include <string_view>

namespace kvstrata {

// Digits, and nothing else.
bool ParseNumber(std::string_view text, uint64_t* out);
// Units: "4GiB", "512 MiB", "1e6" is none, "1048576" is bytes; KiB MiB GiB TiB, KB MB GB TB, B.
bool ParseSize(std::string_view text, uint64_t* bytes);
// "50us", "500ms", "0.5s", "2 s", "0"; whole microseconds.
bool ParseDuration(std::string_view text, std::chrono::microseconds* out);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_CONFIG_VALUES_H_
