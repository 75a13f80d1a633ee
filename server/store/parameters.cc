#include "server/store/parameters.h"

#include <openssl/sha.h>

#include <fstream>
#include <iterator>

namespace kvstrata {
namespace {

Status CheckName(const std::string& name) {
  const bool escapes = name.find('/') != name.npos || name.find("..") != name.npos ||
                       name.front() == '.' || name.find('\0') != name.npos || name.size() > 255;
  if (!escapes) return OkStatus();
  return InvalidArgument("PARAMETERS_NAME",
                         "parameters = '" + name +
                             "'; allowed: the name of a file in the daemon's parameters.directory, "
                             "without '/' and '..'");
}

// Files of another geometry or of other ranks are others.
std::string CacheKey(const Plan& plan, const Geometry& g) {
  std::string key = plan.parameters;
  for (const int32_t n :
       {g.layers, g.query_heads, g.kv_heads, g.head_dim, plan.d_route, plan.r_max}) {
    key += '/' + std::to_string(n);
  }
  return key;
}

Result<std::string> DigestOf(const std::string& path, const std::string& name) {
  std::ifstream in(path, std::ios::binary);
  if (!in) {
    return NotFound("PARAMETERS_MISSING",
                    "parameters = '" + name +
                        "': the daemon's parameters.directory has no such file, or it may not be "
                        "read");
  }
  const std::string bytes{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  std::string digest(SHA256_DIGEST_LENGTH, '\0');
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(),
         reinterpret_cast<unsigned char*>(digest.data()));
  return digest;
}

}  // namespace

Result<Parameters> ParameterFiles::Load(const Plan& plan, const Geometry& geometry) const {
  if (directory_.empty() || !load_) {
    return NotFound("PARAMETERS_MISSING",
                    "parameters = '" + plan.parameters +
                        "': the daemon's parameters.directory is not set; set it, or leave "
                        "`parameters` out for the untrained fallback");
  }
  const std::string path = directory_ + "/" + plan.parameters;
  Parameters parameters;
  KVS_ASSIGN_OR_RETURN(parameters.digest, DigestOf(path, plan.parameters));
  KVS_ASSIGN_OR_RETURN(SpanParameters values, load_(path, geometry, plan));
  parameters.values = std::make_shared<const SpanParameters>(std::move(values));
  return parameters;
}

Result<Parameters> ParameterFiles::Get(const Plan& plan, const Geometry& geometry) {
  if (plan.parameters.empty()) return Parameters{};
  KVS_RETURN_IF_ERROR(CheckName(plan.parameters));
  const std::string key = CacheKey(plan, geometry);
  {
    MutexLock lock(mu_);
    if (const auto found = loaded_.find(key); found != loaded_.end()) return found->second;
  }
  KVS_ASSIGN_OR_RETURN(Parameters parameters, Load(plan, geometry));
  MutexLock lock(mu_);
  return loaded_.try_emplace(key, std::move(parameters)).first->second;  // the first one stays
}

}  // namespace kvstrata
