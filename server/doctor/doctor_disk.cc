// SPDX-License-Identifier: Apache-2.0
// The disk tier's folder and the way to it.
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>

#include "base/unique_fd.h"
#include "server/doctor/doctor_checks.h"

namespace kvstrata::doctor {
namespace {

constexpr char kNone[] = "disk.path is not set";

// The folder, or the one in which a start would make it.
std::string FolderOf(const Config& config) {
  std::string path = config.disk.directory;
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  if (access(path.c_str(), F_OK) == 0) return path;
  const size_t slash = path.rfind('/');
  return slash == 0 || slash == std::string::npos ? "/" : path.substr(0, slash);
}

// Whether a daemon has the folder. It is locked for no longer than it takes to see that it can be.
bool IsLocked(const std::string& folder) {
  const UniqueFd lock(
      open((folder + "/lock").c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  return lock && flock(lock.get(), LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
}

// Whether this process runs under a seccomp filter.
bool IsFiltered() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("Seccomp:")) return line.find('2') != std::string::npos;
  }
  return false;
}

}  // namespace

Finding CheckIoUring(const Config& config) {
  const IoQueueChoice choice = NewIoQueue(8);
  if (choice.degraded.ok()) return Ok("io_uring", "is available");
  const auto disabled = FirstWordOf("/proc/sys/kernel/io_uring_disabled");
  std::string fix = "run Linux 5.6 or newer";
  if (disabled && *disabled != "0") {
    fix = "sysctl kernel.io_uring_disabled=0 (it is " + *disabled + ")";
  } else if (IsFiltered()) {
    fix = "allow io_uring_setup, io_uring_enter and io_uring_register in the seccomp profile";
  }
  const std::string what = choice.degraded.message();
  if (config.disk.directory.empty())
    return Ok("io_uring", what + "; without a disk tier no matter");
  return Warn("io_uring", what + "; threads do its work, slower", fix);
}

Finding CheckDirectIo(const Config& config) {
  if (config.disk.directory.empty()) return Ok("o_direct", kNone);
  const std::string folder = FolderOf(config);
  struct statfs fs {};
  if (statfs(folder.c_str(), &fs) == 0 && (fs.f_type == TMPFS_MAGIC || fs.f_type == RAMFS_MAGIC)) {
    return Warn("o_direct", "'" + folder + "' is memory (tmpfs), not a disk",
                "choose a disk.path on an SSD: tmpfs takes memory twice and loses it at a reboot");
  }
  const UniqueFd file(open(folder.c_str(), O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600));
  if (!file) {
    if (errno == EROFS) {
      return Fail("o_direct", {Code::kFailedPrecondition, "DISK_READ_ONLY",
                               "no file can be made in '" + folder + "': " + std::strerror(errno)});
    }
    if (errno == EACCES || errno == EPERM) {
      return Fail("o_direct", {Code::kPermissionDenied, "DISK_PERMISSION",
                               "no file can be made in '" + folder + "': " + std::strerror(errno)});
    }
    return Warn("o_direct", "'" + folder + "' does not take O_DIRECT: " + std::strerror(errno),
                "choose a disk.path on ext4 or xfs, else the kernel caches what the tier holds");
  }
  constexpr size_t kBlock = 4096;
  const std::unique_ptr<void, decltype(&std::free)> block(std::aligned_alloc(kBlock, kBlock),
                                                          &std::free);
  std::memset(block.get(), 0, kBlock);
  if (pwrite(file.get(), block.get(), kBlock, 0) == static_cast<ssize_t>(kBlock)) {
    return Ok("o_direct", "'" + folder + "' takes it, in blocks of 4 KiB");
  }
  return Warn("o_direct", "'" + folder + "' refuses a block of 4 KiB: " + std::strerror(errno),
              "choose a disk.path on ext4 or xfs with blocks of at most 4 KiB");
}

Finding CheckFreeDisk(const Config& config) {
  if (config.disk.directory.empty()) return Ok("disk_space", kNone);
  const std::string folder = FolderOf(config);
  struct statvfs fs {};
  if (statvfs(folder.c_str(), &fs) != 0) {
    return Warn("disk_space", "'" + folder + "': " + std::strerror(errno), "look at df -h");
  }
  const uint64_t free = uint64_t{fs.f_bavail} * fs.f_frsize;
  if (IsLocked(folder)) {
    bool denied = false;
    const auto its = DaemonsKey(config.socket, "disk.path", &denied);
    std::error_code unknown;
    if (!denied && !(its && std::filesystem::equivalent(*its, folder, unknown))) {
      return Fail("disk_space",
                  FailedPrecondition("DISK_LOCKED", "disk.path = '" + config.disk.directory +
                                                        "' belongs to a running daemon, and to "
                                                        "none at '" +
                                                        config.socket + "'"),
                  "stop that daemon, or choose another disk.path");
    }
  }
  const std::string is = "'" + folder + "' has " + MiBText(free) + " free; disk.budget_bytes is " +
                         MiBText(config.disk.budget_bytes);
  if (fs.f_files != 0 && fs.f_favail < 64) {
    return Warn("disk_space", is + ", and " + std::to_string(fs.f_favail) + " inodes",
                "remove files there, or choose another disk.path");
  }
  return Ok("disk_space", is);
}

}  // namespace kvstrata::doctor
