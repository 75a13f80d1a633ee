// SPDX-License-Identifier: Apache-2.0
#include "server/sockets/unix_listener.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>
#include <utility>

#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83  // Linux 6.16; newer than Debian 12's headers
#endif

namespace kvstrata {
namespace {

constexpr int kBacklog = 256;
constexpr int kMostAccepts = 16;
constexpr mode_t kSocketMode = 0660;

std::string DirectoryOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string Errno(int error) { return std::strerror(error); }

Status PathError(std::string message) { return InvalidArgument("SOCKET_PATH", std::move(message)); }

Status Denied(std::string_view reason, std::string message) {
  return {Code::kPermissionDenied, reason, std::move(message)};
}

Status InUse(std::string message) {
  return {Code::kAlreadyExists, "SOCKET_IN_USE", std::move(message)};
}

// What a failed system call at `path` means to the operator.
Status SystemError(const std::string& what, const std::string& path, int error) {
  const std::string message = what + " '" + path + "': " + Errno(error);
  switch (error) {
    case EACCES:
    case EPERM:
    case EROFS:
      return Denied("SOCKET_PERMISSION",
                    message + "; choose a directory that this user may write (--socket PATH)");
    case ENOENT:
    case ENOTDIR:
      return NotFound("SOCKET_DIRECTORY", message + "; create the directory first");
    case ELOOP:
      return PathError(message + "; a symbolic link is not followed here, remove it");
    default:
      return Internal("SOCKET_SYSTEM", message);
  }
}

sockaddr_un AddressOf(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

const char* KindOf(mode_t mode) {
  if (S_ISLNK(mode)) return "a symbolic link";
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISREG(mode)) return "a regular file";
  return "a device";
}

// Whether somebody listens at `path`. A socket of another type that lives counts too (EPROTOTYPE).
bool SomebodyListens(const std::string& path) {
  const UniqueFd probe(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const sockaddr_un address = AddressOf(path);
  if (connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    return true;
  }
  return errno != ECONNREFUSED && errno != ENOENT;
}

// OK when nothing lies at `path`, or a socket of our own: then `*there`.
Status CheckReplaceable(const std::string& path, bool* there) {
  struct stat st {};
  *there = false;
  if (lstat(path.c_str(), &st) != 0) {
    return errno == ENOENT ? OkStatus() : SystemError("cannot look at", path, errno);
  }
  if (!S_ISSOCK(st.st_mode)) {
    return PathError("'" + path + "' is " + KindOf(st.st_mode) +
                     ", not a socket; remove it or choose another path (--socket PATH)");
  }
  if (st.st_uid != geteuid()) {
    return Denied("SOCKET_PERMISSION", "'" + path + "' is a socket of user " +
                                           std::to_string(st.st_uid) +
                                           "; only that user may remove it");
  }
  *there = true;
  return OkStatus();
}

// Makes room at `path`: removes a dead socket of our own, refuses everything else.
Status RemoveStaleSocket(const std::string& path) {
  bool there = false;
  KVS_RETURN_IF_ERROR(CheckReplaceable(path, &there));
  if (!there) return OkStatus();
  if (SomebodyListens(path)) {
    return InUse("another program serves '" + path + "'; stop it or choose another path");
  }
  if (unlink(path.c_str()) != 0 && errno != ENOENT) {
    return SystemError("cannot remove the stale socket", path, errno);
  }
  return OkStatus();
}

// Binds with a mode that is never wider than 0660, then makes it exactly that.
Status BindTo(int fd, const std::string& path, int64_t group) {
  // The file's mode at bind is the socket's own mode, cut by the umask.
  if (fchmod(fd, kSocketMode) != 0) return SystemError("cannot prepare", path, errno);
  const sockaddr_un address = AddressOf(path);
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    if (errno == EADDRINUSE) return InUse("'" + path + "' appeared while we started");
    return SystemError("cannot bind", path, errno);
  }
  if (group >= 0 && lchown(path.c_str(), static_cast<uid_t>(-1), static_cast<gid_t>(group)) != 0) {
    const int error = errno;
    unlink(path.c_str());
    return Denied("SOCKET_PERMISSION", "cannot give '" + path + "' to group " +
                                           std::to_string(group) +
                                           " (socket.group): " + Errno(error));
  }
  if (chmod(path.c_str(), kSocketMode) != 0) return SystemError("cannot set mode of", path, errno);
  return OkStatus();
}

}  // namespace

Status CheckSocketPath(const std::string& path) {
  if (path.empty()) return PathError("socket.path is empty; give a file path");
  if (path.find('\0') != std::string::npos) return PathError("socket.path contains a NUL byte");
  if (path.back() == '/') {
    return PathError("socket.path '" + path + "' names a directory; give a file in it");
  }
  const size_t most = kMaxSocketPath - kAttachSuffix.size();
  if (path.size() > most) {
    return PathError("socket.path '" + path + "' has " + std::to_string(path.size()) +
                     " bytes; at most " + std::to_string(most) + ", so that PATH" +
                     std::string(kAttachSuffix) + " fits the kernel's limit of " +
                     std::to_string(kMaxSocketPath));
  }
  return OkStatus();
}

Status MakeSocketDirectory(const std::string& path, mode_t mode) {
  const std::string directory = DirectoryOf(path);
  if (mkdir(directory.c_str(), mode) == 0) {
    // Exactly the mode, whatever the umask took away.
    if (chmod(directory.c_str(), mode) == 0) return OkStatus();
  } else if (errno == EEXIST) {
    return OkStatus();
  }
  return SystemError("cannot create", directory, errno);
}

Status CheckSocketDirectory(const std::string& path) {
  const std::string directory = DirectoryOf(path);
  struct stat link {
  }, st{};
  if (lstat(directory.c_str(), &link) != 0 || stat(directory.c_str(), &st) != 0) {
    const int error = errno;
    return NotFound("SOCKET_DIRECTORY", "directory '" + directory + "' of socket.path: " +
                                            Errno(error) + "; create it (mkdir -p " + directory +
                                            ") or choose another path (--socket PATH)");
  }
  if (!S_ISDIR(st.st_mode)) return PathError("'" + directory + "' is not a directory");
  const auto foreign = [](uid_t uid) { return uid != 0 && uid != geteuid(); };
  if (S_ISLNK(link.st_mode) && foreign(link.st_uid)) {
    return Denied("SOCKET_DIRECTORY", "'" + directory + "' is a symbolic link of user " +
                                          std::to_string(link.st_uid) + "; give its target");
  }
  const bool sticky = (st.st_mode & S_ISVTX) != 0;
  if ((foreign(st.st_uid) || (st.st_mode & S_IWOTH) != 0) && !sticky) {
    return Denied("SOCKET_DIRECTORY",
                  "directory '" + directory + "' (owner " + std::to_string(st.st_uid) +
                      ") lets other users replace the socket; use one that this user or root owns "
                      "and others cannot write");
  }
  return OkStatus();
}

Status CheckSocketPlace(const std::string& path, mode_t made) {
  const std::string directory = DirectoryOf(path);
  struct stat st {};
  const auto writable = [](const std::string& folder) {
    return faccessat(AT_FDCWD, folder.c_str(), W_OK | X_OK, AT_EACCESS) == 0;
  };
  if (made != 0 && stat(directory.c_str(), &st) != 0 && errno == ENOENT) {
    if (writable(DirectoryOf(directory))) return OkStatus();
    return SystemError("cannot create", directory, errno);
  }
  KVS_RETURN_IF_ERROR(CheckSocketDirectory(path));
  if (!writable(directory)) return SystemError("cannot write to", directory, errno);
  bool there = false;
  KVS_RETURN_IF_ERROR(CheckReplaceable(path, &there));
  KVS_RETURN_IF_ERROR(CheckReplaceable(path + std::string(kAttachSuffix), &there));
  return CheckReplaceable(path + std::string(kChunksSuffix), &there);
}

gid_t SocketGroup(const std::string& path, int64_t group) {
  if (group >= 0) return static_cast<gid_t>(group);
  struct stat st {};
  const bool hands_on = stat(DirectoryOf(path).c_str(), &st) == 0 && (st.st_mode & S_ISGID) != 0;
  return hands_on ? st.st_gid : getegid();
}

Result<UniqueFd> LockSocketPath(const std::string& path) {
  const std::string name = path + std::string(kLockSuffix);
  UniqueFd fd(open(name.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600));
  if (!fd) return SystemError("cannot open the lock file", name, errno);
  struct stat st {};
  if (fstat(fd.get(), &st) != 0) return SystemError("cannot look at", name, errno);
  if (!S_ISREG(st.st_mode) || st.st_uid != geteuid() || st.st_nlink != 1) {
    return Denied("SOCKET_PERMISSION",
                  "lock file '" + name + "' is not a plain file of this user; remove it");
  }
  if (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    char owner[16] = "unknown";
    const ssize_t n = pread(fd.get(), owner, sizeof(owner) - 1, 0);
    if (n > 0) owner[n] = '\0';
    owner[std::strcspn(owner, "\n")] = '\0';
    return InUse("a kvstratad (pid " + std::string(owner) + ") already serves '" + path +
                 "'; stop it or choose another path (--socket PATH)");
  }
  const std::string pid = std::to_string(getpid()) + "\n";
  if (ftruncate(fd.get(), 0) != 0 ||
      pwrite(fd.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    return SystemError("cannot write the lock file", name, errno);
  }
  return fd;
}

bool LetPassDescriptors(int socket, bool let) {
  const int value = let ? 1 : 0;
  return setsockopt(socket, SOL_SOCKET, SO_PASSRIGHTS, &value, sizeof(value)) == 0;
}

Result<std::unique_ptr<UnixListener>> UnixListener::Bind(const std::string& path, int type,
                                                         int64_t group) {
  if (path.size() > kMaxSocketPath) {
    return PathError("'" + path + "' has " + std::to_string(path.size()) + " bytes; at most " +
                     std::to_string(kMaxSocketPath));
  }
  KVS_RETURN_IF_ERROR(CheckSocketDirectory(path));
  KVS_RETURN_IF_ERROR(RemoveStaleSocket(path));
  UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return SystemError("cannot make a socket for", path, errno);
  KVS_RETURN_IF_ERROR(BindTo(fd.get(), path, group));
  struct stat st {};
  if (lstat(path.c_str(), &st) != 0 || !S_ISSOCK(st.st_mode)) {
    return Denied("SOCKET_DIRECTORY", "'" + path + "' was replaced while we started");
  }
  const bool takes_descriptors = !LetPassDescriptors(fd.get(), false);
  return std::unique_ptr<UnixListener>(
      new UnixListener(std::move(fd), path, st.st_dev, st.st_ino, takes_descriptors));
}

Result<std::unique_ptr<UnixListener>> UnixListener::Listen(const std::string& path, int type,
                                                           int64_t group) {
  KVS_ASSIGN_OR_RETURN(auto listener, Bind(path, type, group));
  KVS_RETURN_IF_ERROR(listener->StartListening());
  return listener;
}

Status UnixListener::StartListening() {
  if (listen(fd_.get(), kBacklog) == 0) return OkStatus();
  return SystemError("cannot listen at", path_, errno);
}

int UnixListener::Accept(const std::function<void(UniqueFd)>& admit) const {
  for (int i = 0; i < kMostAccepts; ++i) {
    UniqueFd socket(accept4(fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      const bool out = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
      return out ? errno : 0;
    }
    admit(std::move(socket));
  }
  return 0;
}

UnixListener::~UnixListener() {
  struct stat st {};
  if (lstat(path_.c_str(), &st) == 0 && st.st_dev == device_ && st.st_ino == inode_) {
    unlink(path_.c_str());
  }
}

}  // namespace kvstrata
