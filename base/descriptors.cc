// SPDX-License-Identifier: Apache-2.0
#include "base/descriptors.h"

#include <dirent.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <string>

namespace kvstrata {
namespace {

constexpr const char* kFolder = "/proc/self/fd";

uint64_t CountEntries(uint64_t otherwise) {
  DIR* const folder = opendir(kFolder);
  if (folder == nullptr) return otherwise;  // no descriptor for it, or no /proc
  uint64_t entries = 0;
  while (readdir(folder) != nullptr) ++entries;
  closedir(folder);
  constexpr uint64_t kDotsAndItself = 3;
  return entries - kDotsAndItself;
}

}  // namespace

DescriptorUse CountDescriptors() {
  DescriptorUse use;
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return use;
  use.limit = limit.rlim_cur;
  struct stat folder {};
  // Its size is how many are open, where the kernel says so: one is, at least.
  const bool told = stat(kFolder, &folder) == 0 && folder.st_size > 0;
  use.open = told ? static_cast<uint64_t>(folder.st_size) : CountEntries(use.limit);
  return use;
}

Status CheckDescriptors(uint64_t wanted) {
  const DescriptorUse use = CountDescriptors();
  if (use.left() >= kDescriptorReserve + wanted) return OkStatus();
  return ResourceExhausted(
      "DESCRIPTORS", "the daemon has " + std::to_string(use.left()) +
                         " file descriptors left, of " + std::to_string(use.limit) + ", and " +
                         std::to_string(kDescriptorReserve) +
                         " are kept for operators and work under way; raise LimitNOFILE");
}

}  // namespace kvstrata
