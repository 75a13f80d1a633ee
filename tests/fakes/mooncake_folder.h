// SPDX-License-Identifier: Apache-2.0
// MooncakeFolder: a store of files under the real agent (tests/fakes/mooncake_site). Sets this
// process's environment, which daemons and agents inherit: one at a time. Not thread-safe.
#pragma once

#include <fcntl.h>
#include <sys/file.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "base/check.h"
#include "base/unique_fd.h"
#include "tests/fakes/scratch_dir.h"

namespace kvstrata {

class MooncakeFolder {
 public:
  // `bytes`: what it takes before the oldest objects go; 0: all.
  explicit MooncakeFolder(uint64_t bytes = 0) {
    std::ofstream(dir_ / "hold") << "";
    const std::string most = std::to_string(bytes == 0 ? uint64_t{1} << 40 : bytes);
    setenv("FAKE_MOONCAKE", dir_.path().c_str(), 1);
    setenv("FAKE_MOONCAKE_BYTES", most.c_str(), 1);
    setenv("PYTHONPATH", KVS_SOURCE_DIR "/tests/fakes/mooncake_site", 1);
    setenv("PYTHONDONTWRITEBYTECODE", "1", 1);
  }

  // Until Release the store answers nothing.
  void Hold() {
    hold_.Reset(open((dir_ / "hold").c_str(), O_RDONLY | O_CLOEXEC));
    KVS_CHECK(flock(hold_.get(), LOCK_EX) == 0);
  }
  void Release() { hold_.Reset(); }
  // Agents cannot set it up.
  void Refuse() const { std::ofstream(dir_ / "no_setup") << ""; }
  void Admit() const { std::filesystem::remove(dir_ / "no_setup"); }

  // Objects that are there.
  uint64_t count() const {
    uint64_t objects = 0;
    for (const auto& entry : std::filesystem::directory_iterator(dir_.path())) {
      objects += entry.path().filename().string().starts_with(kObject);
    }
    return objects;
  }
  bool Has(const std::string& name) const { return std::filesystem::exists(PathOf(name)); }
  std::string Read(const std::string& name) const {
    std::ifstream file(PathOf(name), std::ios::binary);
    KVS_CHECK(file.good());
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void Write(const std::string& name, const std::string& bytes) const {
    std::ofstream(PathOf(name), std::ios::binary | std::ios::trunc) << bytes;
  }
  void Flip(const std::string& name, size_t at) const {
    std::string bytes = Read(name);
    bytes[at] = static_cast<char>(bytes[at] ^ 1);
    Write(name, bytes);
  }

 private:
  static constexpr const char* kObject = "object ";
  std::string PathOf(const std::string& name) const { return dir_ / kObject + name; }

  const ScratchDir dir_{"/dev/shm"};
  UniqueFd hold_;
};

}  // namespace kvstrata
