// SPDX-License-Identifier: Apache-2.0
// Listening Unix sockets at paths that others may have tampered with, and the lock that makes one
// daemon the owner of a path.
//
//   Lock    PATH.lock, flock'ed for the daemon's life and never removed (removing it would let two
//           daemons lock two files of one name). The kernel drops it when the daemon dies.
//   Listen  refuses everything at the path but a dead socket of our own, which it replaces. The
//           socket appears with mode 0660 or less at every moment, whatever the umask.
//
// Ownership: both objects own their descriptor; the listener unlinks its path when it goes, if what
// lies there is still its own socket. Thread-safety: none; made and destroyed by the daemon.
// Errors (docs/operations.md gives their exit codes): SOCKET_PATH (INVALID_ARGUMENT: length, kind
// of file), SOCKET_DIRECTORY (NOT_FOUND, PERMISSION_DENIED), SOCKET_IN_USE (ALREADY_EXISTS), and
// SOCKET_PERMISSION (PERMISSION_DENIED). Cost: a few system calls, once.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "base/unique_fd.h"

namespace kvstrata {

inline constexpr size_t kMaxSocketPath = 107;  // sun_path less its NUL
inline constexpr std::string_view kAttachSuffix = ".attach";
inline constexpr std::string_view kChunksSuffix = ".chunks";  // as long
inline constexpr std::string_view kLockSuffix = ".lock";

// OK, or why the daemon cannot serve at PATH: PATH.attach must fit kMaxSocketPath.
Status CheckSocketPath(const std::string& path);

// Makes the directory of a default socket path if it is missing, with `mode` and our owner. Its
// parent must exist. A directory that exists is left as it is.
Status MakeSocketDirectory(const std::string& path, mode_t mode);

// OK when nobody but us, root, or members of the directory's group can rename what we put there.
Status CheckSocketDirectory(const std::string& path);

// What a start with PATH would refuse, but for somebody who listens there or holds the lock; `made`
// as for MakeSocketDirectory, 0: its directory is not made. Changes nothing.
Status CheckSocketPlace(const std::string& path, mode_t made);

// The group whose members may connect to what Bind makes at PATH with `group`: in a directory that
// hands on its group (02000), that one's.
gid_t SocketGroup(const std::string& path, int64_t group);

// Locks PATH.lock until the descriptor is closed. SOCKET_IN_USE names the owner's process id.
Result<UniqueFd> LockSocketPath(const std::string& path);

// Whether peers may pass descriptors over a Unix socket; of a listening one, over those that it
// accepts later. False before Linux 6.16: they always may, and whoever receives or closes must
// cope.
bool LetPassDescriptors(int socket, bool let);

class UnixListener {
 public:
  // The socket is there, and refuses whoever connects until StartListening. Nobody may pass
  // descriptors yet (LetPassDescriptors). `type` is SOCK_STREAM or SOCK_SEQPACKET. `group`: gid of
  // the socket file, -1 for our own. REQUIRES: the caller holds the lock of the daemon's path.
  static Result<std::unique_ptr<UnixListener>> Bind(const std::string& path, int type,
                                                    int64_t group);
  // Both: for a path that no lock guards.
  static Result<std::unique_ptr<UnixListener>> Listen(const std::string& path, int type,
                                                      int64_t group);
  Status StartListening();
  ~UnixListener();

  // Hands up to 16 connections that wait to `admit`, non-blocking and close-on-exec. Returns errno
  // where the process has no descriptor or memory for the next one, else 0. Whoever polls fd()
  // leaves it alone then for a while: it stays readable.
  int Accept(const std::function<void(UniqueFd)>& admit) const;

  int fd() const { return fd_.get(); }  // non-blocking, close-on-exec
  const std::string& path() const { return path_; }
  // Whether a peer may pass descriptors to it.
  bool takes_descriptors() const { return takes_descriptors_; }

 private:
  UnixListener(UniqueFd fd, std::string path, dev_t device, ino_t inode, bool takes_descriptors)
      : fd_(std::move(fd)),
        path_(std::move(path)),
        device_(device),
        inode_(inode),
        takes_descriptors_(takes_descriptors) {}

  UniqueFd fd_;
  const std::string path_;
  const dev_t device_;
  const ino_t inode_;
  const bool takes_descriptors_;
};

}  // namespace kvstrata
