// SPDX-License-Identifier: Apache-2.0
// NamedModel: the model that an operator named by its number or its name. MODEL_UNKNOWN lists those
// there are. Blocks for one call.
#ifndef KVSTRATA_CLIENT_CLI_NAMED_MODEL_H_
#define KVSTRATA_CLIENT_CLI_NAMED_MODEL_H_

#include <string>

#include "client/cli/connection.h"

namespace kvstrata::cli {

Result<v1::Model> NamedModel(Connection* connection, const std::string& wanted);

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_NAMED_MODEL_H_
