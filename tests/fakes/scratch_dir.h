// SPDX-License-Identifier: Apache-2.0
// A directory of a test's own, removed with all it holds.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <string>

#include "base/check.h"

namespace kvstrata {

class ScratchDir {
 public:
  // `parent`: "/dev/shm" for speed, the build's own for a real file system.
  explicit ScratchDir(const std::string& parent = std::filesystem::temp_directory_path()) {
    path_ = parent + "/kvstrata-XXXXXX";
    KVS_CHECK(mkdtemp(path_.data()) != nullptr);
  }
  ScratchDir(const ScratchDir&) = delete;
  ScratchDir& operator=(const ScratchDir&) = delete;
  ~ScratchDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace kvstrata
