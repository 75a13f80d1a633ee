// SPDX-License-Identifier: Apache-2.0
// MooncakeFolder: a store of files under the real agent (tests/fakes/mooncake_site), and tiers on
// it. Sets this process's environment, which agents inherit: one at a time. Not thread-safe.
#ifndef KVSTRATA_TESTS_SERVER_TIER_MOONCAKE_STORE_H_
#define KVSTRATA_TESTS_SERVER_TIER_MOONCAKE_STORE_H_

#include <fcntl.h>
#include <sys/file.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>

#include "base/check.h"
#include "base/unique_fd.h"
#include "server/work/mooncake_value_tier.h"
#include "tests/server/tier/scratch_dir.h"
#include "tests/server/tier/tier_values.h"

namespace kvstrata {

class MooncakeFolder {
 public:
  // `bytes`: what it takes before the oldest objects go; 0: all.
  explicit MooncakeFolder(uint64_t bytes = 0) {
    std::ofstream(dir_.path() + "/hold") << "";
    const std::string most = std::to_string(bytes == 0 ? uint64_t{1} << 40 : bytes);
    setenv("FAKE_MOONCAKE", dir_.path().c_str(), 1);
    setenv("FAKE_MOONCAKE_BYTES", most.c_str(), 1);
    setenv("PYTHONPATH", KVS_SOURCE_DIR "/tests/fakes/mooncake_site", 1);
    setenv("PYTHONDONTWRITEBYTECODE", "1", 1);
  }

  // Until Release the store answers nothing.
  void Hold() {
    hold_.Reset(open((dir_.path() + "/hold").c_str(), O_RDONLY | O_CLOEXEC));
    KVS_CHECK(flock(hold_.get(), LOCK_EX) == 0);
  }
  void Release() { hold_.Reset(); }
  // Agents cannot set it up.
  void Refuse() const { std::ofstream(dir_.path() + "/no_setup") << ""; }
  void Admit() const { std::filesystem::remove(dir_.path() + "/no_setup"); }

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
  std::string PathOf(const std::string& name) const { return dir_.path() + "/object " + name; }

  const ScratchDir dir_{"/dev/shm"};
  UniqueFd hold_;
};

// Of the agent as it is shipped; pauses and patience are those of tests.
inline MooncakeTierOptions TestMooncake() {
  MooncakeTierOptions options;
  options.agent.python = "/usr/bin/python3";
  options.agent.program = KVS_SOURCE_DIR "/integrations/mooncake_agent/agent.py";
  options.agent.master = "127.0.0.1:50051";
  options.agent.metadata = "P2PHANDSHAKE";
  options.agent.protocol = "tcp";
  options.agent.interface = "lo";
  options.agent.first_pause = std::chrono::milliseconds(5);
  options.agent.longest_pause = std::chrono::milliseconds(50);
  options.agent.stall_timeout = std::chrono::minutes(10);  // tests wait while it is stalled
  return options;
}

template <typename Condition>
bool Becomes(const Condition& condition) {
  const Deadline end = Soon();
  while (!condition() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  return condition();
}

inline std::unique_ptr<MooncakeValueTier> OpenMooncake(const MooncakeTierOptions& options,
                                                       remote::RemoteFormat format) {
  auto opened = MooncakeValueTier::Open(options, std::move(format));
  KVS_CHECK(opened.ok());
  return std::move(*opened);
}
inline bool AwaitReady(const MooncakeValueTier& tier) {
  return Becomes([&] { return tier.Agent().ready; });
}

}  // namespace kvstrata

#endif  // KVSTRATA_TESTS_SERVER_TIER_MOONCAKE_STORE_H_
