// SPDX-License-Identifier: Apache-2.0
#include "server/store/options/parameters.h"

#include <fcntl.h>
#include <openssl/sha.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace kvstrata {
namespace {

Status CheckName(const std::string& name) {
  const bool escapes = name.find('/') != name.npos || name.find("..") != name.npos ||
                       name.front() == '.' || name.find('\0') != name.npos || name.size() > 255;
  if (!escapes) return OkStatus();
  return InvalidArgument("PARAMETERS_NAME",
                         "parameters = '" + name +
                             "'; allowed: the name of a file in the daemon's parameters.directory, "
                             "or of one that it comes with, without '/' and '..'");
}

// Files of another geometry or of other ranks are others.
std::string CacheKey(const Plan& plan, const Geometry& g) {
  std::string key = plan.lowrank.parameters;
  for (const int32_t n : {g.layers, g.query_heads, g.kv_heads, g.head_dim, plan.lowrank.d_route,
                          plan.lowrank.r_max}) {
    key += '/' + std::to_string(n);
  }
  return key;
}

Status Unreadable(const std::string& name, int error) {
  const std::string file = "parameters = '" + name + "': ";
  switch (error) {
    case ENOENT:
      return NotFound("PARAMETERS_MISSING",
                      file +
                          "neither the daemon's parameters.directory nor the folder that it "
                          "comes with (share/kvstrata/parameters) has such a file; name one of "
                          "theirs, or leave `parameters` out for the untrained fallback");
    case EACCES:
    case EPERM:
      return {Code::kPermissionDenied, "PARAMETERS_UNREADABLE",
              file + "the daemon's user may not read it; chmod it, or leave `parameters` out"};
    case ELOOP:
      return InvalidArgument("PARAMETERS_INVALID",
                             file +
                                 "is a symbolic link, which is not followed; put the file itself "
                                 "into the daemon's parameters.directory");
    default:
      return InvalidArgument("PARAMETERS_INVALID",
                             file + "cannot be read: " + std::strerror(error));
  }
}

Status Invalid(const std::string& name, const std::string& what) {
  return InvalidArgument("PARAMETERS_INVALID",
                         "parameters = '" + name + "': " + what +
                             "; name a safetensors file in the daemon's parameters.directory");
}

// Checks the file before anything of it is read.
Status CheckFile(const std::string& name, const struct stat& st) {
  if (S_ISDIR(st.st_mode)) return Invalid(name, "is a directory");
  if (!S_ISREG(st.st_mode)) return Invalid(name, "is no regular file");
  const auto bytes = static_cast<uint64_t>(st.st_size);
  if (bytes <= ParameterFiles::kMaxBytes) return OkStatus();
  return Invalid(name, "has " + std::to_string(bytes) + " bytes, at most " +
                           std::to_string(ParameterFiles::kMaxBytes) + " are allowed");
}

// The length of the header and its first byte, before the rest is read.
Status CheckBeginning(const std::string& name, int fd, uint64_t bytes) {
  std::array<char, sizeof(uint64_t) + 1> text{};
  uint64_t header = 0;
  const ssize_t n = pread(fd, text.data(), text.size(), 0);
  if (n < 0) return Unreadable(name, errno);
  std::memcpy(&header, text.data(), sizeof(header));
  const bool begins = n == static_cast<ssize_t>(text.size()) && text.back() == '{' &&
                      header <= bytes - sizeof(header);
  return begins ? OkStatus() : Invalid(name, "does not begin as a safetensors file does");
}

Result<std::vector<std::byte>> ReadAll(const std::string& name, int fd, uint64_t bytes) {
  std::vector<std::byte> file(bytes);
  for (uint64_t at = 0; at < bytes;) {
    const ssize_t n = pread(fd, file.data() + at, bytes - at, static_cast<off_t>(at));
    if (n < 0) return Unreadable(name, errno);
    if (n == 0) return Invalid(name, "was shortened while it was read");
    at += static_cast<uint64_t>(n);
  }
  return file;
}

}  // namespace

ParameterFiles::Identity ParameterFiles::IdentityOf(const struct stat& st) {
  return {
      st.st_dev,
      st.st_ino,
      static_cast<uint64_t>(st.st_size),
      static_cast<uint64_t>(st.st_mtim.tv_sec),
      static_cast<uint64_t>(st.st_mtim.tv_nsec),
      static_cast<uint64_t>(st.st_ctim.tv_sec) << 32 ^ static_cast<uint64_t>(st.st_ctim.tv_nsec)};
}

Result<Parameters> ParameterFiles::Read(const Plan& plan, const Geometry& geometry, int fd,
                                        uint64_t bytes) const {
  const std::string& name = plan.lowrank.parameters;
  KVS_RETURN_IF_ERROR(CheckBeginning(name, fd, bytes));
  // Into memory: a file that somebody shortens while it is mapped would end the daemon.
  KVS_ASSIGN_OR_RETURN(const std::vector<std::byte> file, ReadAll(name, fd, bytes));
  Parameters parameters;
  KVS_ASSIGN_OR_RETURN(parameters.values, parse_(file, name, geometry, plan));
  parameters.digest.resize(SHA256_DIGEST_LENGTH);
  SHA256(reinterpret_cast<const unsigned char*>(file.data()), file.size(),
         reinterpret_cast<unsigned char*>(parameters.digest.data()));
  return parameters;
}

UniqueFd ParameterFiles::Open(const std::string& name) const {
  errno = ENOENT;
  for (const std::string& folder : folders_) {
    for (const char* const ending : {"", ".safetensors"}) {
      if (folder.empty()) continue;
      const std::string path = folder + "/" + name + ending;
      // O_NONBLOCK: opening a FIFO would wait for its writer.
      UniqueFd fd(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
      if (fd || errno != ENOENT) return fd;
    }
  }
  return {};
}

Result<Parameters> ParameterFiles::Load(const Plan& plan, const Geometry& geometry,
                                        const std::string& key) {
  const std::string& name = plan.lowrank.parameters;
  const UniqueFd fd = Open(name);
  if (!fd) return Unreadable(name, errno);
  struct stat st {};
  if (fstat(fd.get(), &st) != 0) return Unreadable(name, errno);
  KVS_RETURN_IF_ERROR(CheckFile(name, st));
  const Identity file = IdentityOf(st);
  {
    MutexLock lock(mu_);
    const auto refused = refused_.find(key);
    if (refused != refused_.end() && refused->second.file == file) return refused->second.why;
  }
  Result<Parameters> read = Read(plan, geometry, fd.get(), static_cast<uint64_t>(st.st_size));
  if (!read.ok()) {
    MutexLock lock(mu_);
    if (refused_.size() >= kMostRefusals) refused_.clear();
    refused_[key] = {file, read.status()};
  }
  return read;
}

std::optional<Result<Parameters>> ParameterFiles::Known(const Plan& plan,
                                                        const Geometry& geometry) {
  if (plan.lowrank.parameters.empty()) return Parameters{};
  if (const Status status = CheckName(plan.lowrank.parameters); !status.ok()) return status;
  if (!parse_) return Unreadable(plan.lowrank.parameters, ENOENT);
  MutexLock lock(mu_);
  const auto found = loaded_.find(CacheKey(plan, geometry));
  if (found == loaded_.end()) return std::nullopt;
  return found->second;
}

Result<Parameters> ParameterFiles::Get(const Plan& plan, const Geometry& geometry, Files files) {
  if (auto known = Known(plan, geometry)) return *std::move(known);
  if (files == Files::kKnown) {
    return Unavailable(kFileUnread,
                       "parameters = '" + plan.lowrank.parameters + "' are not read yet");
  }
  const std::string key = CacheKey(plan, geometry);
  KVS_ASSIGN_OR_RETURN(Parameters parameters, Load(plan, geometry, key));
  MutexLock lock(mu_);
  return loaded_.try_emplace(key, std::move(parameters)).first->second;  // the first one stays
}

}  // namespace kvstrata
