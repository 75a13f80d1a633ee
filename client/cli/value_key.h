// SPDX-License-Identifier: Apache-2.0
// Keys of values as operators read and write them: 64 hexadecimal digits, of an engine's chunk
// behind "chunk/"; a pin's record has its name, "pin/" and 16 digits. Pure functions.
#ifndef KVSTRATA_CLIENT_CLI_VALUE_KEY_H_
#define KVSTRATA_CLIENT_CLI_VALUE_KEY_H_

#include <string>
#include <string_view>

#include "base/status.h"

namespace kvstrata::cli {

inline constexpr char kValueKeyForm[] =
    "64 hexadecimal digits, chunk/ and 64, or pin/ and 16, as value ls prints them; or a beginning "
    "of at least 4 digits that one value alone has";

std::string ValueKeyText(std::string_view key);

// What a person wrote of a key, in lower case.
struct WrittenKey {
  std::string text;    // all of it
  bool whole = false;  // else the beginning of some
};
// INVALID_ARGUMENT KEY_TEXT: it is no such text, or has fewer than 4 digits.
Result<WrittenKey> ParseValueKey(std::string_view text);
// REQUIRES: the text of a whole key.
std::string ValueKeyBytes(std::string_view text);

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_VALUE_KEY_H_
