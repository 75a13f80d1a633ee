// SPDX-License-Identifier: Apache-2.0
#include "server/tier/disk/files/tier_place.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string_view>

namespace kvstrata::disk {
namespace {

constexpr std::string_view kElsewhere = ", or choose another disk.path";

Status PathError(std::string message) { return InvalidArgument("DISK_PATH", std::move(message)); }
Status Denied(std::string message) {
  return {Code::kPermissionDenied, "DISK_PERMISSION", std::move(message)};
}

Status SystemError(const std::string& path, const char* what, int error) {
  const std::string message = "'" + path + "' of disk.path: " + what + ": " + std::strerror(error);
  switch (error) {
    case EROFS:
      return {Code::kFailedPrecondition, "DISK_READ_ONLY",
              message + "; mount it writable (mount -o remount,rw)" + std::string(kElsewhere)};
    case EACCES:
    case EPERM:
      return Denied(message + "; let this user (" + std::to_string(geteuid()) + ") write there" +
                    std::string(kElsewhere));
    case ELOOP:
      return PathError(message + "; a symbolic link is not followed here, give its target" +
                       std::string(kElsewhere));
    case ENOTDIR:
      return PathError(message + "; remove what lies there" + std::string(kElsewhere));
    default:
      return Internal("DISK_OPEN", message);
  }
}

// "/a/b/" is "/a/b": with the slash a link would be followed.
std::string WithoutSlashes(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

std::string ParentOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == 0 || slash == path.npos ? "/" : path.substr(0, slash);
}

Status NoParent(const std::string& path) {
  const std::string parent = ParentOf(path);
  return NotFound("DISK_PATH", "disk.path = '" + path + "': there is no folder '" + parent +
                                   "'; create it (mkdir -p " + parent + ")" +
                                   std::string(kElsewhere));
}

Status CheckFolder(const std::string& path, const struct stat& st) {
  if (st.st_uid != geteuid() && st.st_uid != 0) {
    return Denied("disk.path = '" + path + "' is a folder of user " + std::to_string(st.st_uid) +
                  ", who could replace its files; give it to this user (chown " +
                  std::to_string(geteuid()) + ")" + std::string(kElsewhere));
  }
  if ((st.st_mode & S_IWOTH) != 0) {
    return Denied("disk.path = '" + path +
                  "' may be written by everybody; chmod 700 it, or name a folder in it, which "
                  "kvstratad makes");
  }
  return OkStatus();
}

Status CheckFile(const std::string& path, const struct stat& st) {
  if (S_ISLNK(st.st_mode)) return SystemError(path, "open", ELOOP);
  if (!S_ISREG(st.st_mode)) {
    return PathError("'" + path + "' of disk.path is no plain file; remove it" +
                     std::string(kElsewhere));
  }
  if (st.st_uid != geteuid()) {
    return Denied("'" + path + "' of disk.path belongs to user " + std::to_string(st.st_uid) +
                  "; remove it, or chown it to " + std::to_string(geteuid()));
  }
  if (st.st_nlink != 1) {
    return Denied("'" + path + "' of disk.path has " + std::to_string(st.st_nlink) +
                  " names (hard links), and writing it would change the others; remove it" +
                  std::string(kElsewhere));
  }
  if ((st.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return Denied("'" + path + "' of disk.path may be written by others; remove it, or chmod 600");
  }
  return OkStatus();
}

// A view of the kernel's own things. Its permissions are no answer: root may write everywhere, and
// still no file can be made there.
bool KeepsNoFiles(const std::string& folder) {
  struct statfs fs {};
  if (statfs(folder.c_str(), &fs) != 0) return false;
  switch (static_cast<uint32_t>(fs.f_type)) {
    case PROC_SUPER_MAGIC:
    case SYSFS_MAGIC:
    case CGROUP_SUPER_MAGIC:
    case CGROUP2_SUPER_MAGIC:
    case DEVPTS_SUPER_MAGIC:
    case DEBUGFS_MAGIC:
    case TRACEFS_MAGIC:
    case SECURITYFS_MAGIC:
    case BPF_FS_MAGIC:
      return true;
    default:
      return false;
  }
}

Status CheckFileSystem(const std::string& path, const std::string& folder) {
  if (!KeepsNoFiles(folder)) return OkStatus();
  return PathError("disk.path = '" + path + "': '" + folder +
                   "' is a view of the kernel's, which keeps no files; name a folder on a disk");
}

// The name of a file that a tier opens.
bool IsOurs(std::string_view name) {
  const size_t dot = name.find('.');
  const std::string_view kind = name.substr(0, dot);
  if (dot == name.npos) return name == "lock";
  const std::string_view number = name.substr(dot + 1);
  return (kind == "segment" || kind == "checkpoint") && !number.empty() &&
         number.find_first_not_of("0123456789") == number.npos;
}

}  // namespace

std::string SegmentName(uint32_t i) { return "segment." + std::to_string(i); }
std::string CheckpointName(uint32_t i) { return "checkpoint." + std::to_string(i); }

Result<TierPlace> TierPlace::OpenExisting(const std::string& given) {
  const std::string path = WithoutSlashes(given);
  UniqueFd folder(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!folder) {
    const int error = errno;
    struct stat st {};
    if (error == ENOENT) return NoParent(path);
    const bool link = lstat(path.c_str(), &st) == 0 && S_ISLNK(st.st_mode);
    return SystemError(path, "open", link ? ELOOP : error);
  }
  struct stat st {};
  if (fstat(folder.get(), &st) != 0) return SystemError(path, "fstat", errno);
  KVS_RETURN_IF_ERROR(CheckFolder(path, st));
  return TierPlace(path, std::move(folder));
}

Result<TierPlace> TierPlace::Open(const std::string& given) {
  const std::string path = WithoutSlashes(given);
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    if (errno == ENOENT) return NoParent(path);
    return SystemError(path, "mkdir", errno);
  }
  return OpenExisting(path);
}

Status TierPlace::Check(const std::string& given) {
  const std::string path = WithoutSlashes(given);
  struct stat st {};
  if (lstat(path.c_str(), &st) != 0) {
    const std::string parent = ParentOf(path);
    if (errno != ENOENT) return SystemError(path, "stat", errno);
    if (stat(parent.c_str(), &st) != 0) return NoParent(path);
    if (!S_ISDIR(st.st_mode)) return SystemError(parent, "mkdir", ENOTDIR);
    KVS_RETURN_IF_ERROR(CheckFileSystem(path, parent));
    const bool writable = faccessat(AT_FDCWD, parent.c_str(), W_OK | X_OK, AT_EACCESS) == 0;
    return writable ? OkStatus() : SystemError(path, "mkdir", errno);
  }
  KVS_ASSIGN_OR_RETURN(const TierPlace place, OpenExisting(path));
  KVS_RETURN_IF_ERROR(CheckFileSystem(path, path));
  if (faccessat(place.folder_.get(), ".", W_OK | X_OK, AT_EACCESS) != 0) {
    return SystemError(path, "access", errno);
  }
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(opendir(path.c_str()), &closedir);
  if (entries == nullptr) return SystemError(path, "opendir", errno);
  while (const dirent* entry = readdir(entries.get())) {
    if (!IsOurs(entry->d_name)) continue;
    if (fstatat(place.folder_.get(), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0) continue;
    KVS_RETURN_IF_ERROR(CheckFile(place.PathOf(entry->d_name), st));
  }
  return OkStatus();
}

Result<UniqueFd> TierPlace::OpenFile(const std::string& name, bool* direct) const {
  // O_NONBLOCK: whatever lies there, opening it does not wait.
  constexpr int kFlags = O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
  const std::string path = PathOf(name);
  UniqueFd fd;
  if (direct != nullptr && *direct) {
    fd.Reset(openat(folder_.get(), name.c_str(), kFlags | O_DIRECT, 0600));
    if (!fd && errno == EINVAL) *direct = false;
  }
  if (!fd && (direct == nullptr || !*direct)) {
    fd.Reset(openat(folder_.get(), name.c_str(), kFlags, 0600));
  }
  // A FIFO and a socket say ENXIO, a directory EISDIR.
  if (!fd && (errno == ENXIO || errno == EISDIR)) {
    return PathError("'" + path + "' of disk.path is no plain file; remove it" +
                     std::string(kElsewhere));
  }
  if (!fd) return SystemError(path, "open", errno);
  struct stat st {};
  if (fstat(fd.get(), &st) != 0) return SystemError(path, "fstat", errno);
  KVS_RETURN_IF_ERROR(CheckFile(path, st));
  // io_uring answers EAGAIN where it would wait on a file that says O_NONBLOCK.
  const int flags = fcntl(fd.get(), F_GETFL);
  if (flags < 0 || fcntl(fd.get(), F_SETFL, flags & ~O_NONBLOCK) != 0) {
    return SystemError(path, "fcntl", errno);
  }
  return fd;
}

Result<UniqueFd> TierPlace::OpenToRead(const std::string& name) const {
  UniqueFd fd(openat(folder_.get(), name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd && errno == ENOENT) return fd;
  if (!fd) return SystemError(PathOf(name), "open", errno);
  struct stat st {};
  if (fstat(fd.get(), &st) != 0) return SystemError(PathOf(name), "fstat", errno);
  KVS_RETURN_IF_ERROR(CheckFile(PathOf(name), st));
  return fd;
}

uint64_t TierPlace::SizeOf(const std::string& name) const {
  struct stat st {};
  const bool there = fstatat(folder_.get(), name.c_str(), &st, AT_SYMLINK_NOFOLLOW) == 0;
  return there ? static_cast<uint64_t>(st.st_size) : 0;
}

bool TierPlace::Remove(const std::string& name) const {
  return unlinkat(folder_.get(), name.c_str(), 0) == 0;
}

Status TierPlace::Sync() const {
  return fsync(folder_.get()) == 0 ? OkStatus() : SystemError(path_, "fsync", errno);
}

}  // namespace kvstrata::disk
