#include "server/tier/tier_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

namespace kvstrata::disk {
namespace {

Status OpenError(const std::string& path, const char* what) {
  return Internal("DISK_OPEN", path + ": " + what + ": " + std::strerror(errno));
}

Status Reserve(int fd, const std::string& path, uint64_t bytes) {
  errno = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  if (errno == 0) return OkStatus();
  if (errno != ENOSPC && errno != EDQUOT) return OpenError(path, "fallocate");
  return ResourceExhausted("DISK_SPACE", path + ": no room for " + std::to_string(bytes) +
                                             " bytes; free some, or lower the tier's budget");
}

enum class Larger { kRefuse, kCut };

// Open and of `bytes`, all of them reserved. Sets `*direct` to false where there is no O_DIRECT.
Result<UniqueFd> OpenFile(const std::string& path, uint64_t bytes, Larger larger, bool* direct) {
  constexpr int kFlags = O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW;
  UniqueFd fd(open(path.c_str(), kFlags | O_DIRECT, 0600));
  if (!fd && errno == EINVAL) {
    fd.Reset(open(path.c_str(), kFlags, 0600));
    *direct = false;
  }
  if (!fd) return OpenError(path, "open");
  struct stat info {};
  if (fstat(fd.get(), &info) != 0) return OpenError(path, "fstat");
  const auto size = static_cast<uint64_t>(info.st_size);
  if (size > bytes && larger == Larger::kCut) {
    if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return OpenError(path, "truncate");
    return fd;
  }
  if (size > bytes) {
    return FailedPrecondition("DISK_SEGMENT_BYTES",
                              path + " has " + std::to_string(size) + " bytes, configured are " +
                                  std::to_string(bytes) + "; configure that, or delete the file");
  }
  if (size == bytes) return fd;
  const Status reserved = Reserve(fd.get(), path, bytes);
  if (!reserved.ok() && size == 0) unlink(path.c_str());
  if (!reserved.ok()) return reserved;
  return fd;
}

std::string SegmentPath(const std::string& path, uint32_t i) {
  return path + "/segment." + std::to_string(i);
}

}  // namespace

Result<TierDirectory> OpenTierDirectory(const std::string& path, uint32_t segments,
                                        uint64_t segment_bytes, uint64_t checkpoint_bytes) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return OpenError(path, "mkdir");
  TierDirectory dir;
  dir.lock.Reset(open((path + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!dir.lock) return OpenError(path + "/lock", "open");
  if (flock(dir.lock.get(), LOCK_EX | LOCK_NB) != 0) {
    return FailedPrecondition("DISK_LOCKED", path + " belongs to a running daemon");
  }
  for (uint32_t i = 0; i < 2; ++i) {
    const std::string name = path + "/checkpoint." + std::to_string(i);
    KVS_ASSIGN_OR_RETURN(dir.checkpoints[i],
                         OpenFile(name, checkpoint_bytes, Larger::kCut, &dir.direct));
  }
  for (uint32_t i = 0; i < segments; ++i) {
    Result<UniqueFd> fd =
        OpenFile(SegmentPath(path, i), segment_bytes, Larger::kRefuse, &dir.direct);
    if (!fd.ok() && fd.status().reason() == "DISK_SPACE" && i > 0) {
      dir.degraded = fd.status();
      break;
    }
    if (!fd.ok()) return fd.status();
    dir.segments.push_back(std::move(*fd));
  }
  for (uint32_t i = segments; unlink(SegmentPath(path, i).c_str()) == 0; ++i) {
  }
  const UniqueFd self(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!self || fsync(self.get()) != 0) return OpenError(path, "fsync");
  return dir;
}

Status GrowTierDirectory(const std::string& path, uint32_t from, uint32_t to,
                         uint64_t segment_bytes, uint64_t checkpoint_bytes, TierDirectory* dir) {
  Status status;
  for (uint32_t i = 0; i < 2 && status.ok(); ++i) {
    const std::string name = path + "/checkpoint." + std::to_string(i);
    status = Reserve(dir->checkpoints[i].get(), name, checkpoint_bytes);
  }
  for (uint32_t i = from; i < to && status.ok(); ++i) {
    const std::string name = SegmentPath(path, i);
    if (i < dir->segments.size()) {
      status = Reserve(dir->segments[i].get(), name, segment_bytes);
      continue;
    }
    Result<UniqueFd> fd = OpenFile(name, segment_bytes, Larger::kRefuse, &dir->direct);
    status = fd.status();
    if (fd.ok()) dir->segments.push_back(std::move(*fd));
  }
  if (!status.ok()) ShrinkTierDirectory(from, dir);
  return status;
}

void ShrinkTierDirectory(uint32_t segments, TierDirectory* dir) {
  for (size_t i = segments; i < dir->segments.size(); ++i) {
    // What it does not give back is there at the next start, which deletes it.
    (void)!ftruncate(dir->segments[i].get(), 0);
  }
}

}  // namespace kvstrata::disk
