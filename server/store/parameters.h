// ParameterFiles: trained parameters that plans name (plan.parameters), from one folder of the
// daemon's configuration, each loaded once per geometry and shared by all sequences.
//
// A name is a file in the folder: '/', '..' and a leading '.' are refused, so that a client cannot
// reach anything else. A file that changes later is not read again before a restart.
// Thread-safety: all methods from any thread; the lock is not held while a file is read.
// Errors: PARAMETERS_NAME (INVALID_ARGUMENT), PARAMETERS_MISSING (NOT_FOUND), and the loader's.
#ifndef KVSTRATA_SERVER_STORE_PARAMETERS_H_
#define KVSTRATA_SERVER_STORE_PARAMETERS_H_

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "base/status.h"
#include "base/sync.h"
#include "kernels/codec/codec.h"

namespace kvstrata {

// Null and "" when the plan names none.
struct Parameters {
  std::shared_ptr<const SpanParameters> values;
  std::string digest;  // SHA-256 of the file, for keys of artefacts
};

class ParameterFiles {
 public:
  using Loader =
      std::function<Result<SpanParameters>(const std::string&, const Geometry&, const Plan&)>;
  // `directory` "": there are none. `load` is kernels' LoadSpanParameters; null: none can be read.
  ParameterFiles(std::string directory, Loader load)
      : directory_(std::move(directory)), load_(std::move(load)) {}

  Result<Parameters> Get(const Plan& plan, const Geometry& geometry) KVS_EXCLUDES(mu_);

 private:
  Result<Parameters> Load(const Plan& plan, const Geometry& geometry) const;

  const std::string directory_;
  const Loader load_;
  Mutex mu_;
  std::map<std::string, Parameters> loaded_ KVS_GUARDED_BY(mu_);  // by name and shape
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_PARAMETERS_H_
