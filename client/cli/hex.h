// SPDX-License-Identifier: Apache-2.0
// Page keys as operators read and write them: lower-case hexadecimal. Pure functions.
#ifndef KVSTRATA_CLIENT_CLI_HEX_H_
#define KVSTRATA_CLIENT_CLI_HEX_H_

#include <string>
#include <string_view>

#include "base/status.h"

namespace kvstrata::cli {

std::string ToHex(std::string_view bytes);
// INVALID_ARGUMENT KEY_TEXT.
Result<std::string> FromHex(std::string_view text);

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_HEX_H_
