// SPDX-License-Identifier: Apache-2.0
#include "server/tier/disk/files/tier_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

namespace kvstrata::disk {
namespace {

Status OpenError(const std::string& path, const char* what) {
  return Internal("DISK_OPEN",
                  "'" + path + "' of disk.path: " + what + ": " + std::strerror(errno));
}

Status TooLarge(const std::string& path, uint64_t bytes) {
  rlimit most{};
  const bool limited = getrlimit(RLIMIT_FSIZE, &most) == 0 && most.rlim_cur < bytes;
  return ResourceExhausted(
      "DISK_OPEN", "'" + path + "' of disk.path: no file of " + std::to_string(bytes) +
                       " bytes can be made: " +
                       (limited ? "RLIMIT_FSIZE is " + std::to_string(most.rlim_cur) +
                                      "; raise it (ulimit -f unlimited, LimitFSIZE=infinity)"
                                : "the file system takes none; choose another disk.path") +
                       ", or lower disk.segment_bytes");
}

Status Reserve(int fd, const std::string& path, uint64_t bytes) {
  errno = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  if (errno == 0) return OkStatus();
  if (errno == EFBIG) return TooLarge(path, bytes);
  if (errno != ENOSPC && errno != EDQUOT) return OpenError(path, "fallocate");
  return ResourceExhausted("DISK_SPACE", path + ": no room for " + std::to_string(bytes) +
                                             " bytes; free some, or lower disk.budget_bytes");
}

struct OpenedFile {
  UniqueFd fd;
  bool longer = false;  // than `bytes`, and left so
};

// A file of at least `bytes`, all of them reserved. Sets `*direct` to false where there is no
// O_DIRECT.
Result<OpenedFile> OpenReserved(const TierPlace& place, const std::string& name, uint64_t bytes,
                                bool* direct) {
  KVS_ASSIGN_OR_RETURN(UniqueFd fd, place.OpenFile(name, direct));
  const std::string path = place.PathOf(name);
  struct stat info {};
  if (fstat(fd.get(), &info) != 0) return OpenError(path, "fstat");
  const auto size = static_cast<uint64_t>(info.st_size);
  if (size >= bytes) return OpenedFile{std::move(fd), size > bytes};
  const Status reserved = Reserve(fd.get(), path, bytes);
  if (!reserved.ok() && size == 0) place.Remove(name);
  if (!reserved.ok()) return reserved;
  return OpenedFile{std::move(fd)};
}

Result<UniqueFd> OpenCheckpoint(const TierPlace& place, uint32_t i, uint64_t bytes, bool* direct) {
  KVS_ASSIGN_OR_RETURN(OpenedFile file, OpenReserved(place, CheckpointName(i), bytes, direct));
  if (file.longer && ftruncate(file.fd.get(), static_cast<off_t>(bytes)) != 0) {
    return OpenError(place.PathOf(CheckpointName(i)), "truncate");
  }
  return std::move(file.fd);
}

// Opens segment `i`, the next one of `dir`.
Status AddSegment(uint32_t i, uint64_t bytes, TierDirectory* dir) {
  KVS_ASSIGN_OR_RETURN(OpenedFile file,
                       OpenReserved(dir->place, SegmentName(i), bytes, &dir->direct));
  if (file.longer) dir->longer.push_back(i);
  dir->segments.push_back(std::move(file.fd));
  return OkStatus();
}

}  // namespace

Result<TierDirectory> OpenTierDirectory(const std::string& path, uint32_t segments,
                                        uint64_t segment_bytes, uint64_t checkpoint_bytes) {
  TierDirectory dir;
  KVS_ASSIGN_OR_RETURN(dir.place, TierPlace::Open(path));
  KVS_ASSIGN_OR_RETURN(dir.lock, dir.place.OpenFile("lock", nullptr));
  if (flock(dir.lock.get(), LOCK_EX | LOCK_NB) != 0) {
    return FailedPrecondition("DISK_LOCKED", "disk.path = '" + path +
                                                 "' belongs to a running daemon; stop it, or "
                                                 "choose another disk.path");
  }
  for (uint32_t i = 0; i < 2; ++i) {
    KVS_ASSIGN_OR_RETURN(dir.checkpoints[i],
                         OpenCheckpoint(dir.place, i, checkpoint_bytes, &dir.direct));
  }
  for (uint32_t i = 0; i < segments; ++i) {
    const Status added = AddSegment(i, segment_bytes, &dir);
    if (added.reason() == "DISK_SPACE" && i > 0) {
      dir.degraded = added;
      break;
    }
    KVS_RETURN_IF_ERROR(added);
  }
  for (uint32_t i = segments; dir.place.Remove(SegmentName(i)); ++i) {
  }
  KVS_RETURN_IF_ERROR(dir.place.Sync());
  return dir;
}

Status GrowTierDirectory(uint32_t from, uint32_t to, uint64_t segment_bytes,
                         uint64_t checkpoint_bytes, TierDirectory* dir) {
  Status status;
  for (uint32_t i = 0; i < 2 && status.ok(); ++i) {
    const std::string name = dir->place.PathOf(CheckpointName(i));
    status = Reserve(dir->checkpoints[i].get(), name, checkpoint_bytes);
  }
  for (uint32_t i = from; i < to && status.ok(); ++i) {
    if (i < dir->segments.size()) {
      status = Reserve(dir->segments[i].get(), dir->place.PathOf(SegmentName(i)), segment_bytes);
    } else {
      status = AddSegment(i, segment_bytes, dir);
    }
  }
  if (!status.ok()) ShrinkTierDirectory(from, dir);
  return status;
}

void CutLongerSegments(uint64_t segment_bytes, TierDirectory* dir) {
  for (const uint32_t i : dir->longer) {
    // What it does not release is no harm: nobody reads it.
    (void)!ftruncate(dir->segments[i].get(), static_cast<off_t>(segment_bytes));
  }
}

void ShrinkTierDirectory(uint32_t segments, TierDirectory* dir) {
  for (size_t i = segments; i < dir->segments.size(); ++i) {
    // What it does not release is there at the next start, which deletes it.
    (void)!ftruncate(dir->segments[i].get(), 0);
  }
}

}  // namespace kvstrata::disk
