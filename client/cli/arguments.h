// SPDX-License-Identifier: Apache-2.0
// What operators write on the command line, and what it means. Pure functions, but for ReadTokens.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace kvstrata::cli {

// Page keys: lower-case hexadecimal.
std::string ToHex(std::string_view bytes);
// INVALID_ARGUMENT KEY_TEXT.
Result<std::string> FromHex(std::string_view text);

// Keys of values: 64 hexadecimal digits, of an engine's chunk behind "chunk/"; a pin's record has
// its name, "pin/" and 16 digits.
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

// A size, as the daemon's configuration takes them (base/quantities.h).
// 1 to 1 EiB; throws CLI::ValidationError otherwise.
uint64_t ParseBytes(const std::string& text);

// ReadTokens: token ids that an operator names by a file: the prompt and the steps of a trace
// (*.safetensors), or text, "-" stdin: numbers separated by white space, commas or brackets, as a
// JSON array has them. TOKENS_UNREADABLE (NOT_FOUND), TOKENS_TEXT (INVALID_ARGUMENT), those of
// trace.h. Cost: reads the file once.
Result<std::vector<int32_t>> ReadTokens(const std::string& path);
Result<std::vector<int32_t>> ParseTokens(std::string_view text);

}  // namespace kvstrata::cli
