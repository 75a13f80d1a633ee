// SPDX-License-Identifier: Apache-2.0
#include "server/memory/cgroup.h"

#include <charconv>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>

namespace kvstrata {
namespace {

namespace fs = std::filesystem;

// The names of the same things in both versions.
struct Names {
  const char *limit, *charged, *inactive, *active;
};
constexpr Names kV2{"memory.max", "memory.current", "inactive_file", "active_file"};
constexpr Names kV1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
                    "total_active_file"};
constexpr uint64_t kNoLimit = uint64_t{1} << 60;  // v1 says "none" by a number above that

std::optional<uint64_t> ReadNumber(const fs::path& file) {
  std::ifstream in(file);
  std::string text;
  uint64_t n = 0;
  if (!(in >> text)) return std::nullopt;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;  // "max"
  return n;
}

uint64_t SumOf(const fs::path& stat, const Names& names) {
  std::ifstream in(stat);
  uint64_t sum = 0, n = 0;
  for (std::string name; in >> name >> n;) {
    if (name == names.inactive || name == names.active) sum += n;
  }
  return sum;
}

bool HasWord(std::string_view list, std::string_view word) {
  std::istringstream words{std::string(list)};
  for (std::string w; std::getline(words, w, ',');) {
    if (w == word) return true;
  }
  return false;
}

// This process's cgroup, of v2 ("0::PATH") or of v1's memory controller ("N:...memory...:PATH").
std::optional<std::string> OwnPath(const fs::path& proc, bool v2) {
  std::ifstream in(proc / "cgroup");
  for (std::string line; std::getline(in, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (v2 ? controllers.empty() : HasWord(controllers, "memory")) return line.substr(second + 1);
  }
  return std::nullopt;
}

struct Mount {
  std::string root, point;  // the hierarchy's root, and where that lies
};

// A line: id parent major:minor ROOT POINT options [fields] - TYPE source OPTIONS.
std::optional<Mount> MountOf(const fs::path& proc, bool v2) {
  std::ifstream in(proc / "mountinfo");
  for (std::string line; std::getline(in, line);) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream before(line.substr(0, dash)), after(line.substr(dash + 3));
    std::string skipped, type, options;
    Mount mount;
    before >> skipped >> skipped >> skipped >> mount.root >> mount.point;
    after >> type >> skipped >> options;
    if (v2 ? type == "cgroup2" : type == "cgroup" && HasWord(options, "memory")) return mount;
  }
  return std::nullopt;
}

std::optional<CgroupMemory> Read(const std::string& root, bool v2) {
  const Names& names = v2 ? kV2 : kV1;
  const fs::path proc = root + "/proc/self";
  const std::optional<std::string> path = OwnPath(proc, v2);
  const std::optional<Mount> mount = MountOf(proc, v2);
  if (!path || !mount) return std::nullopt;
  const fs::path top = root + mount->point;
  // In a container the mount may begin at the cgroup itself, or below what /proc tells.
  std::string below = *path;
  if (mount->root != "/" && below.starts_with(mount->root)) below.erase(0, mount->root.size());
  fs::path directory = fs::path(top.string() + below).lexically_normal();
  if (!fs::exists(directory / names.charged)) directory = top;
  std::optional<CgroupMemory> found;
  for (;; directory = directory.parent_path()) {
    const std::optional<uint64_t> limit = ReadNumber(directory / names.limit);
    const std::optional<uint64_t> charged = ReadNumber(directory / names.charged);
    const bool lower = limit && *limit < kNoLimit && (!found || *limit < found->limit);
    if (lower && charged) {
      found = CgroupMemory{(directory / names.limit).string(), *limit, *charged,
                           SumOf(directory / "memory.stat", names)};
    }
    if (directory == top || !directory.has_relative_path()) return found;
  }
}

std::string MiB(uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

}  // namespace

std::optional<CgroupMemory> ReadCgroupMemory(const std::string& root) {
  const std::optional<CgroupMemory> v2 = Read(root, true);
  return v2 ? v2 : Read(root, false);
}

uint64_t DefaultPoolBytes(const CgroupMemory& cgroup, uint64_t wanted, int pools) {
  const uint64_t most = cgroup.available() / 4 * 3 / static_cast<uint64_t>(pools) >> 20 << 20;
  return most == 0 ? wanted : std::min(wanted, most);
}

Status CheckCgroupBudget(const CgroupMemory& cgroup, uint64_t host_bytes,
                         uint64_t emulated_device_bytes) {
  const uint64_t wanted = host_bytes + emulated_device_bytes;
  if (wanted <= cgroup.available()) return OkStatus();
  const std::string device =
      emulated_device_bytes == 0
          ? ""
          : " and pool.device_bytes (" + MiB(emulated_device_bytes) + ", emulated)";
  return ResourceExhausted(
      "POOL_BEYOND_CGROUP",
      "pool.host_bytes (" + MiB(host_bytes) + ")" + device + " are more than the " +
          MiB(cgroup.available()) + " that the cgroup has left: " + cgroup.file + " says " +
          MiB(cgroup.limit) + ", " + MiB(cgroup.charged) + " are charged, " +
          MiB(cgroup.reclaimable) +
          " of them reclaimable; lower the pools, or raise the cgroup's limit");
}

}  // namespace kvstrata
