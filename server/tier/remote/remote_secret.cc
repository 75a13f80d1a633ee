// SPDX-License-Identifier: Apache-2.0
#include "server/tier/remote/remote_secret.h"

#include <fcntl.h>
#include <grp.h>
#include <openssl/crypto.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/unique_fd.h"
#include "server/tier/remote/hmac_key.h"

namespace kvstrata::remote {
namespace {

constexpr std::string_view kReason = "REMOTE_SECRET";
constexpr std::string_view kSalt = "kvstrata remote tier";
constexpr std::string_view kMakeOne =
    "make one with: (umask 077; openssl rand -hex 32 > FILE), and copy it to every node";

std::string Named(const std::string& path) { return "remote.secret_file = '" + path + "'"; }

Status Denied(std::string message) {
  return {Code::kPermissionDenied, kReason, std::move(message)};
}

Status OpenError(const std::string& path, int error) {
  const std::string message = Named(path) + ": " + std::strerror(error) + "; ";
  if (error == ENOENT) return NotFound(kReason, message + std::string(kMakeOne));
  if (error == EACCES || error == EPERM) {
    return Denied(message + "let this user (" + std::to_string(geteuid()) +
                  ") read it: chown it to that user, chmod 600");
  }
  return InvalidArgument(kReason, message + "name a plain file");
}

bool IsMember(gid_t group) { return getegid() == group || group_member(group) != 0; }

// A group that root chose for this daemon: as a Kubernetes secret comes with fsGroup. Members of
// `tenants` are clients, who could read and forge every node's values with it. A file of the
// daemon's own needs no group.
bool IsForTheDaemonsGroup(const struct stat& st, gid_t tenants) {
  return (st.st_mode & 077) == S_IRGRP && st.st_uid == 0 && geteuid() != 0 &&
         st.st_gid != tenants && IsMember(st.st_gid);
}

Status CheckFile(const std::string& path, const struct stat& st, gid_t tenants) {
  if (!S_ISREG(st.st_mode)) {
    return InvalidArgument(
        kReason, Named(path) + " is no plain file; name one, or " + std::string(kMakeOne));
  }
  if (st.st_uid != geteuid() && st.st_uid != 0) {
    return Denied(Named(path) + " belongs to user " + std::to_string(st.st_uid) +
                  ", who knows and may change it; chown it to " + std::to_string(geteuid()));
  }
  if ((st.st_mode & 077) == 0 || IsForTheDaemonsGroup(st, tenants)) return OkStatus();
  char mode[8];
  std::snprintf(mode, sizeof(mode), "%04o", static_cast<unsigned>(st.st_mode & 07777));
  const std::string whose =
      st.st_gid == tenants ? ", whose members may connect (socket.group)" : "";
  return Denied(Named(path) + " has mode " + mode + " and group " + std::to_string(st.st_gid) +
                whose +
                ", which lets others read or write it; chmod 600 it, or let root own it with mode "
                "440 and a group that this user has and clients have not; make a new secret if "
                "others may have read this one");
}

// As much of the file as tells that it is too long.
Result<std::string> Contents(const std::string& path, int fd) {
  std::string text(kMaxSecretBytes + 3, '\0');
  size_t bytes = 0;
  while (bytes < text.size()) {
    const ssize_t got = read(fd, text.data() + bytes, text.size() - bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return OpenError(path, errno);
    if (got == 0) break;
    bytes += static_cast<size_t>(got);
  }
  text.resize(bytes);
  return text;
}

void Wipe(std::string* text) { OPENSSL_cleanse(text->data(), text->size()); }

}  // namespace

std::string_view SealName(Seal seal) { return seal == Seal::kGcm ? "gcm" : "none"; }

TenantKeys::~TenantKeys() { OPENSSL_cleanse(this, sizeof(*this)); }
RemoteSecret::~RemoteSecret() { OPENSSL_cleanse(extracted_.data(), extracted_.size()); }

Result<RemoteSecret> RemoteSecret::Read(const std::string& path, gid_t tenants) {
  // O_NONBLOCK: a FIFO is refused, and not waited for.
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!fd) return OpenError(path, errno);
  struct stat st {};
  if (fstat(fd.get(), &st) != 0) return OpenError(path, errno);
  KVS_RETURN_IF_ERROR(CheckFile(path, st, tenants));
  KVS_ASSIGN_OR_RETURN(std::string line, Contents(path, fd.get()));
  Result<RemoteSecret> secret = Of(line);
  Wipe(&line);
  if (secret.ok()) return secret;
  return InvalidArgument(kReason, Named(path) + ": " + secret.status().message());
}

Result<RemoteSecret> RemoteSecret::Of(std::string_view line) {
  if (line.ends_with('\n')) line.remove_suffix(line.ends_with("\r\n") ? 2 : 1);
  const auto odd = std::ranges::find_if(line, [](char c) { return c < 0x21 || c > 0x7E; });
  if (odd != line.end()) {
    return InvalidArgument(
        kReason, "byte " + std::to_string(odd - line.begin()) +
                     " of the secret is a space, a control character or none of ASCII, and only "
                     "its one line may end; " +
                     std::string(kMakeOne));
  }
  if (line.size() < kMinSecretBytes || line.size() > kMaxSecretBytes) {
    const std::string found = line.size() > kMaxSecretBytes ? "more" : std::to_string(line.size());
    return InvalidArgument(kReason, "the secret has 32 to 512 characters, this one " + found +
                                        "; " + std::string(kMakeOne));
  }
  RemoteSecret secret;
  secret.extracted_ =
      HmacKey(std::span(reinterpret_cast<const uint8_t*>(kSalt.data()), kSalt.size())).Of(line);
  return secret;
}

TenantKeys RemoteSecret::Keys(std::string_view tenant, Seal seal) const {
  const HmacKey expand(extracted_);
  // HKDF-Expand of one block.
  const auto key = [&](std::string_view use) {
    std::string info = "kvstrata kv1 " + std::string(SealName(seal)) + " " + std::string(use);
    info.push_back('\0');
    info += tenant;
    info.push_back('\1');
    return expand.Of(info);
  };
  TenantKeys keys;
  keys.place = key("place");
  keys.name = key("name");
  keys.envelope = key("envelope");
  return keys;
}

// Another HMAC than any key's, whose info begins with "kvstrata kv1 "; 32 bits of it.
std::string RemoteSecret::Fingerprint(Seal seal) const {
  constexpr size_t kBytes = 4;
  const HmacKey::Digest digest =
      HmacKey(extracted_).Of("kvstrata secret fingerprint " + std::string(SealName(seal)));
  std::string text;
  for (const uint8_t byte : std::span(digest).first<kBytes>()) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

}  // namespace kvstrata::remote
