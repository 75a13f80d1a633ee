// SPDX-License-Identifier: Apache-2.0
// ReadTokens: token ids that an operator names by a file: the prompt and the steps of a trace
// (*.safetensors), or text, "-" stdin: numbers separated by white space, commas or brackets, as a
// JSON array has them. TOKENS_UNREADABLE (NOT_FOUND), TOKENS_TEXT (INVALID_ARGUMENT), those of
// trace.h. Cost: reads the file once.
#ifndef KVSTRATA_CLIENT_CLI_TOKEN_FILE_H_
#define KVSTRATA_CLIENT_CLI_TOKEN_FILE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace kvstrata::cli {

Result<std::vector<int32_t>> ReadTokens(const std::string& path);
Result<std::vector<int32_t>> ParseTokens(std::string_view text);

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_TOKEN_FILE_H_
