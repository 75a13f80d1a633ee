// SPDX-License-Identifier: Apache-2.0
// Where the daemon and its clients meet: sockets, descriptors, processes, GPUs, clocks.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/timex.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "base/unique_fd.h"
#include "server/attach/peers/peer.h"
#include "server/doctor/doctor.h"
#include "server/doctor/doctor_checks.h"
#include "server/sockets/unix_listener.h"

namespace kvstrata::doctor {
namespace {

constexpr int kBacklog = 256;

}  // namespace

Finding CheckSocket(const Config& config) {
  const std::string& path = config.socket;
  struct stat st {};
  if (stat(path.c_str(), &st) != 0) return Ok("socket", "'" + path + "' is free");
  const UniqueFd probe(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  if (connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    return Ok("socket", "'" + path + "' is served by a daemon");
  }
  if (errno == ECONNREFUSED) {
    return Warn("socket", "'" + path + "' was left behind by a daemon that is gone",
                "start kvstratad, which replaces it; or rm it");
  }
  return Warn("socket", "'" + path + "' cannot be connected to: " + std::strerror(errno),
              "look at who serves it: ss -xlp");
}

Finding CheckBacklog(const Config&) {
  const auto most = FirstWordOf("/proc/sys/net/core/somaxconn");
  const std::string is = "net.core.somaxconn is " + most.value_or("not known");
  if (!most || std::stoi(*most) >= kBacklog) return Ok("backlog", is);
  return Warn("backlog", is + "; " + std::to_string(kBacklog) + " connections may wait",
              "sysctl net.core.somaxconn=4096");
}

// A client's death frees its memory, and is seen by its pidfd.
Finding CheckProcessNamespaces(const Config&) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    return Warn("process_namespaces", std::string("socketpair: ") + std::strerror(errno), "");
  }
  const UniqueFd one(ends[0]), other(ends[1]);
  int pidfd = -1;
  socklen_t size = sizeof(pidfd);
  constexpr int kPeerPidfd = 77;  // SO_PEERPIDFD, of Linux 6.5
  if (getsockopt(one.get(), SOL_SOCKET, kPeerPidfd, &pidfd, &size) == 0) {
    close(pidfd);
    return Ok("process_namespaces", "clients of other process namespaces can attach");
  }
  if (const auto self = PeerOf(one.get()); !self.ok()) {
    return Fail("process_namespaces", self.status());
  }
  return Warn("process_namespaces",
              "this kernel does not name processes of other namespaces (SO_PEERPIDFD): clients in "
              "other containers are refused",
              "run Linux 6.5 or newer, or share the namespace: docker run --pid=container:...");
}

Finding CheckSharedMemory(const Config&) {
  const UniqueFd memory(memfd_create("kvstrata-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory || ftruncate(memory.get(), 4096) != 0 ||
      fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return Fail(
        "shared_memory",
        ResourceExhausted("MEMORY_EXHAUSTED",
                          std::string("a sealed memfd cannot be made: ") + std::strerror(errno)),
        "allow memfd_create and fcntl(F_ADD_SEALS) in the seccomp profile");
  }
  void* const at = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  if (at == MAP_FAILED) {
    return Fail("shared_memory",
                ResourceExhausted("MEMORY_EXHAUSTED",
                                  std::string("a memfd cannot be mapped: ") + std::strerror(errno)),
                "raise RLIMIT_AS");
  }
  munmap(at, 4096);
  return Ok("shared_memory", "sealed memfds can be made; /dev/shm is not used");
}

Finding CheckPassedDescriptors(const Config&) {
  const UniqueFd probe(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (LetPassDescriptors(probe.get(), false)) {
    return Ok("passed_descriptors", "clients cannot pass descriptors along with calls");
  }
  return Warn("passed_descriptors",
              "before Linux 6.16 a client can pass descriptors along with its calls and hold up "
              "gRPC until they are closed",
              "let only users connect that you trust (socket.group), or run a newer kernel");
}

Finding CheckGpu(const Config& config) {
  if (config.devices.emulated != 0) {
    return Ok("gpu", "none is configured (pool.device = \"" + config.device + "\")");
  }
  if (access("/proc/driver/nvidia/version", R_OK) != 0 && access("/dev/nvidiactl", F_OK) != 0) {
    return Fail("gpu", Unavailable("CUDA_NO_DEVICE", "NVIDIA's driver is not loaded here"),
                "load it (nvidia-smi); docker: --gpus all; systemd: DeviceAllow=char-nvidia*; or "
                "pool.device = \"emulated\"");
  }
  if (const Status gpus = CheckGpus(config); !gpus.ok()) return Fail("gpu", gpus);
  return Ok("gpu", "the configured GPUs answer (pool.device = \"" + config.device + "\")");
}

// Clients of one MPS server share its faults and its user; whoever has another directory is none.
Finding CheckMps(const Config& config) {
  if (config.devices.emulated != 0) return Ok("mps", "no GPU is configured");
  const char* const named = std::getenv("CUDA_MPS_PIPE_DIRECTORY");
  const std::string folder = named != nullptr ? named : "/tmp/nvidia-mps";  // NVIDIA's default
  const bool there = access((folder + "/control").c_str(), F_OK) == 0;
  if (!there && named == nullptr) {
    return Ok("mps",
              "CUDA_MPS_PIPE_DIRECTORY is not set and no MPS server is there: engines of the "
              "same GPU run without MPS too");
  }
  if (!there) {
    return Warn("mps",
                "CUDA_MPS_PIPE_DIRECTORY is '" + folder +
                    "' and no control daemon is there: CUDA "
                    "goes on without MPS",
                "unset it, or start nvidia-cuda-mps-control -d with the same directory");
  }
  return Warn(
      "mps",
      "MPS serves from '" + folder +
          "': a fatal fault of one client of a GPU ends all of "
          "them, the daemon and its pool among them; a server takes clients of one user",
      "run the daemon and its engines as one user with the same CUDA_MPS_PIPE_DIRECTORY, or "
      "all of them without MPS (docs/operations.md)");
}

Finding CheckClocks(const Config&) {
  const auto source =
      FirstWordOf("/sys/devices/system/clocksource/clocksource0/current_clocksource");
  if (source && (*source == "hpet" || *source == "acpi_pm" || *source == "jiffies")) {
    return Warn("clocks", "the kernel's clock source is " + *source + ", which takes a microsecond",
                "boot with clocksource=tsc, or look why the kernel distrusts it (dmesg)");
  }
  constexpr std::time_t kOldest = 1'735'689'600;  // 2025
  if (std::time(nullptr) < kOldest) {
    return Warn("clocks",
                "the wall clock is before 2025: times of the log, of events and of pins "
                "over a restart are wrong",
                "timedatectl set-ntp true");
  }
  timex state{};
  if (adjtimex(&state) == TIME_ERROR) {
    return Warn("clocks",
                "the wall clock is not synchronised: the log's times cannot be compared "
                "with other machines'",
                "timedatectl set-ntp true; in a container: on its host");
  }
  return Ok("clocks", "source " + source.value_or("not known") + ", synchronised");
}

}  // namespace kvstrata::doctor
