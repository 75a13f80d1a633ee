// SPDX-License-Identifier: Apache-2.0
// RemoteSecret: what the daemons of a cluster share, and from which the keys of every tenant are
// derived (docs/remote_format.md, "Secret and keys").
//
// A secret is one line of 32 to 512 printable characters without spaces. It is the same on every
// node; a node with another one finds nothing. Its bytes are wiped when the object goes, and never
// logged or put into a message.
// Thread-safety: values; const methods from any thread. Cost: Keys 1.3 us.
// Errors of Read, which name remote.secret_file, the path, what was found and the next step:
// NOT_FOUND REMOTE_SECRET (no file), PERMISSION_DENIED REMOTE_SECRET (it cannot be read, others may
// read it, or it is another user's), INVALID_ARGUMENT REMOTE_SECRET (no plain file; not such a
// line).
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace kvstrata::remote {

inline constexpr size_t kMinSecretBytes = 32;
inline constexpr size_t kMaxSecretBytes = 512;

// remote.seal: what the servers see of values.
enum class Seal : uint32_t {
  kNone = 0,  // their bytes, authenticated headers, checksums
  kGcm = 1,   // AES-256-GCM
};
std::string_view SealName(Seal seal);  // "none", "gcm"

using DerivedKey = std::array<uint8_t, 32>;

// For one tenant and one Seal; one for each use. Wiped when they go.
struct TenantKeys {
  TenantKeys() = default;
  TenantKeys(const TenantKeys&) = default;
  TenantKeys& operator=(const TenantKeys&) = default;
  ~TenantKeys();

  DerivedKey place{};     // HMAC: names of places
  DerivedKey name{};      // HMAC: names of values
  DerivedKey envelope{};  // HMAC: Seal::kNone: tags of headers; kGcm: keys of stripes
};

class RemoteSecret {
 public:
  // Its owner is this user or root, its mode 0600 or stricter; links are followed. Root's may be
  // read by one group, too (0640, 0440), which is this process's and not `tenants`, that of clients
  // (SocketGroup): so Kubernetes mounts secrets for a pod with fsGroup.
  static Result<RemoteSecret> Read(const std::string& path, gid_t tenants);
  // From the line itself; for tests, too. `line` may end in a line feed, with or without a carriage
  // return before it. INVALID_ARGUMENT REMOTE_SECRET.
  static Result<RemoteSecret> Of(std::string_view line);

  RemoteSecret(const RemoteSecret&) = default;
  RemoteSecret& operator=(const RemoteSecret&) = default;
  ~RemoteSecret();

  TenantKeys Keys(std::string_view tenant, Seal seal) const;
  // 8 hex digits, for people who compare nodes: those of one secret and one Seal, who find each
  // other's values, have one. Tells nothing of the secret's bytes and of no key.
  std::string Fingerprint(Seal seal) const;

 private:
  RemoteSecret() = default;

  DerivedKey extracted_{};  // HKDF-Extract of the secret: all that is kept of it
};

}  // namespace kvstrata::remote
