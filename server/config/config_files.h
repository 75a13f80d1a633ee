// SPDX-License-Identifier: Apache-2.0
// What the configuration's files give: FILE, then conf.d/*.toml beside it in the order of their
// names. A key's last value wins; every mistake names file, line and column.
//
// Functions without state; any thread. Cost: reads files of at most 1 MiB, at most
// kMostConfigFiles.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace kvstrata {

inline constexpr std::string_view kConfigFolder = "conf.d";
inline constexpr size_t kMostConfigFiles = 256;  // files of a folder

struct Given {
  std::string value;
  std::string_view origin = "default";  // as ConfigEntry
  std::string where;                    // for messages: "flag", "FILE:3:1"
  bool is_string = true;                // false: a TOML number or boolean
};
using GivenByKey = std::map<std::string, Given>;
using Mistakes = std::vector<Status>;
// Adds what is no success.
void Note(const Status& status, Mistakes* mistakes);

// plans.NAME
bool IsPlanKey(std::string_view key);

// INVALID_ARGUMENT CONFIG_KEY: there is no such key; what is meant instead.
Status AddGiven(std::string key, Given given, GivenByKey* out);

struct ConfigFiles {
  std::vector<std::string> read;  // in this order
  bool complete = true;           // false: one could not be read, or is no TOML
};
// Whether `file` itself is there is asked only if it `must_exist`. Appends what is wrong:
// CONFIG_FILE, CONFIG_SYNTAX, CONFIG_KEY.
ConfigFiles ReadConfigFiles(const std::string& file, bool must_exist, GivenByKey* out,
                            Mistakes* mistakes);

}  // namespace kvstrata
