// SPDX-License-Identifier: Apache-2.0
// The folder of a disk tier and the files in it, as things that another user may have put there.
//
// What lies there holds users' caches and is written by number and offset: a link, another user's
// folder or file, one that has a second name, or one that others may write is refused, never used
// and never changed. Links on the way to the folder are the administrator's business.
// Thread-safety: values and functions without state. Cost: a few system calls each.
// Errors, which name the path, what was found and the next step: DISK_PATH (NOT_FOUND: no parent;
// INVALID_ARGUMENT: no folder, no plain file, a file system that keeps no files),
// PERMISSION_DENIED DISK_PERMISSION, FAILED_PRECONDITION
// DISK_READ_ONLY, INTERNAL DISK_OPEN.
#pragma once

#include <string>

#include "base/status.h"
#include "base/unique_fd.h"

namespace kvstrata::disk {

class TierPlace {
 public:
  TierPlace() = default;
  // Makes the folder, with mode 0700, if it is missing and its parent is there.
  static Result<TierPlace> Open(const std::string& path);
  static Result<TierPlace> OpenExisting(const std::string& path);
  // What Open and OpenFile of all files there would refuse. Changes nothing.
  static Status Check(const std::string& path);

  // Read and write, O_DIRECT where the file system has it, else `*direct` becomes false (null:
  // without); made with mode 0600 if it is missing.
  Result<UniqueFd> OpenFile(const std::string& name, bool* direct) const;
  // The file may be missing: then there is no descriptor. Changes nothing.
  Result<UniqueFd> OpenToRead(const std::string& name) const;
  // Bytes; 0: it is not there.
  uint64_t SizeOf(const std::string& name) const;
  bool Remove(const std::string& name) const;
  Status Sync() const;

  std::string PathOf(const std::string& name) const { return path_ + "/" + name; }

 private:
  TierPlace(std::string path, UniqueFd folder)
      : path_(std::move(path)), folder_(std::move(folder)) {}

  std::string path_;
  UniqueFd folder_;
};

std::string SegmentName(uint32_t i);
std::string CheckpointName(uint32_t i);

}  // namespace kvstrata::disk
