// SPDX-License-Identifier: Apache-2.0
#include "client/cli/named_model.h"

namespace kvstrata::cli {

Result<v1::Model> NamedModel(Connection* connection, const std::string& wanted) {
  KVS_ASSIGN_OR_RETURN(const auto answer,
                       connection->Call(&v1::Control::Stub::ListModels, v1::ListModelsRequest()));
  std::string known;
  for (const v1::Model& model : answer.models()) {
    if (std::to_string(model.model()) == wanted || model.name() == wanted) return model;
    known +=
        (known.empty() ? "" : ", ") + std::to_string(model.model()) + " (" + model.name() + ")";
  }
  return NotFound("MODEL_UNKNOWN",
                  "model '" + wanted + "' is neither the number nor the name of one; " +
                      (known.empty() ? "no engine has registered any" : "there are " + known));
}

}  // namespace kvstrata::cli
