// SPDX-License-Identifier: Apache-2.0
// ParameterFiles: trained parameters that plans name (lowrank.parameters), from the folder of the
// daemon's configuration and from the one that comes with it, each loaded once per geometry and
// shared by all sequences.
//
// A name is a plain file in one of the folders, the configuration's first, with or without its
// ".safetensors": '/', '..' and a leading '.' are refused, links are not followed, and nothing but
// a regular file of at most kMaxBytes that begins as safetensors do is read, so that a client can
// neither reach anything else nor keep a thread busy. A file that
// changes later is not read again before a restart; one that was refused is, once it has changed.
// Thread-safety: all methods from any thread; the lock is not held while a file is read.
// Cost: Get reads and hashes a file, once a shape, a second a GiB: in a thread that may
// wait.
// Errors: PARAMETERS_NAME, PARAMETERS_INVALID (INVALID_ARGUMENT), PARAMETERS_MISSING (NOT_FOUND),
// PARAMETERS_UNREADABLE (PERMISSION_DENIED), and the parser's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "base/unique_fd.h"
#include "kernels/codec/codec.h"

struct stat;

namespace kvstrata {

// Null and "" when the plan names none.
struct Parameters {
  ParametersPtr values;
  std::string digest;  // SHA-256 of the file, for keys of artefacts
};

// Whether a file may be read now: only in a thread that may wait.
enum class Files : uint8_t { kKnown, kRead };
// The reason of UNAVAILABLE where one had to be and might not: to be asked again in such a thread.
inline constexpr std::string_view kFileUnread = "PARAMETERS_UNREAD";

class ParameterFiles {
 public:
  static constexpr uint64_t kMaxBytes = uint64_t{1} << 30;
  // Takes a file's bytes and its name.
  using Parser = std::function<Result<ParametersPtr>(std::span<const std::byte>, const std::string&,
                                                     const Geometry&, const Plan&)>;
  // Folders, searched in this order; "" is none. `parse` is kernels' ParseParameters; null:
  // none can be.
  ParameterFiles(std::vector<std::string> folders, Parser parse)
      : folders_(std::move(folders)), parse_(std::move(parse)) {}

  Result<Parameters> Get(const Plan& plan, const Geometry& geometry, Files files = Files::kRead)
      KVS_EXCLUDES(mu_);

 private:
  static constexpr size_t kMostRefusals = 256;
  // Identifies a file as it is: another one has another.
  using Identity = std::array<uint64_t, 6>;
  struct Refusal {
    Identity file{};
    Status why;
  };

  // What Get returns without reading anything; none: it has to.
  std::optional<Result<Parameters>> Known(const Plan& plan, const Geometry& geometry)
      KVS_EXCLUDES(mu_);
  static Identity IdentityOf(const struct stat& st);
  // The first file of the name; errno of the last one tried where there is none.
  UniqueFd Open(const std::string& name) const;
  Result<Parameters> Load(const Plan& plan, const Geometry& geometry, const std::string& key)
      KVS_EXCLUDES(mu_);
  Result<Parameters> Read(const Plan& plan, const Geometry& geometry, int fd, uint64_t bytes) const;

  const std::vector<std::string> folders_;
  const Parser parse_;
  Mutex mu_;
  std::map<std::string, Parameters> loaded_ KVS_GUARDED_BY(mu_);  // by name and shape
  std::map<std::string, Refusal> refused_ KVS_GUARDED_BY(mu_);    // likewise
};

}  // namespace kvstrata
