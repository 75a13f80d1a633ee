// SPDX-License-Identifier: Apache-2.0
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "server/config/pool_memory.h"
#include "server/daemon/tiers/remote_engine.h"
#include "server/doctor/doctor.h"
#include "server/memory/memory_resource.h"
#include "server/memory/numa_topology.h"
#include "server/nodes/node_credentials.h"
#include "server/sockets/unix_listener.h"
#include "server/tier/remote/remote_secret.h"

namespace kvstrata {
namespace {

Status CheckSocket(const Config& config) {
  if (!CheckSocketPath(config.socket).ok()) return OkStatus();  // told by the configuration
  return CheckSocketPlace(config.socket, config.socket_directory);
}

Status CheckNuma(const Config& config) {
  if (config.host_numa.kind != HostNuma::Kind::kNode) return OkStatus();
  const auto topology = NumaTopology::OfThisMachine();
  if (!topology.ok()) return OkStatus();  // a warning of the start
  return (*topology)->Choose(config.host_numa, {}).status();
}

// "0-3,6"
std::string Listed(const cpu_set_t& cpus) {
  std::string text;
  for (int first = 0; first < CPU_SETSIZE; ++first) {
    if (!CPU_ISSET(first, &cpus)) continue;
    int last = first;
    while (last + 1 < CPU_SETSIZE && CPU_ISSET(last + 1, &cpus)) ++last;
    text += (text.empty() ? "" : ",") + std::to_string(first);
    if (last > first) text += "-" + std::to_string(last);
    first = last;
  }
  return text;
}

Status CheckCpus(const Config& config) {
  cpu_set_t may;
  if (sched_getaffinity(0, sizeof(may), &may) != 0) return OkStatus();
  for (const int cpu : config.work.cpus) {
    if (CPU_ISSET(cpu, &may)) continue;
    return InvalidArgument("WORK_CPUS", "work.cpus names core " + std::to_string(cpu) +
                                            "; this process may run on " + Listed(may));
  }
  return OkStatus();
}

Status CheckParameters(const Config& config) {
  const std::string& directory = config.store.parameters_directory;
  if (directory.empty()) return OkStatus();
  struct stat st {};
  const bool there = stat(directory.c_str(), &st) == 0;
  if (there && S_ISDIR(st.st_mode) && access(directory.c_str(), X_OK) == 0) return OkStatus();
  const std::string why = there && !S_ISDIR(st.st_mode) ? "is no folder" : std::strerror(errno);
  return NotFound("PARAMETERS_DIRECTORY", "parameters.directory = '" + directory + "': " + why +
                                              "; create it, or leave the key out");
}

Status CheckRemoteSecret(const Config& config) {
  if (config.remote.secret_file.empty()) {
    const auto& [engine, servers] = *config.remote.servers.begin();
    return InvalidArgument("REMOTE_SECRET",
                           "remote." + engine + " = '" + servers +
                               "' needs remote.secret_file, which is not set; make one with: "
                               "(umask 077; openssl rand -hex 32 > FILE), copy it to every node, "
                               "and name it");
  }
  const gid_t tenants = SocketGroup(config.socket, config.socket_group);
  return remote::RemoteSecret::Read(config.remote.secret_file, tenants).status();
}

// Without a master there is no agent.
Status CheckAgentPython(const MooncakeAgentOptions& agent) {
  if (agent.master.empty() || access(agent.python.c_str(), X_OK) == 0) return OkStatus();
  return InvalidArgument("MOONCAKE_PYTHON", "remote.mooncake_python = '" + agent.python +
                                                "': " + std::strerror(errno) +
                                                "; name a Python that has Mooncake's package");
}

}  // namespace

std::vector<Status> CheckMachine(const Config& config) {
  std::vector<Status> mistakes;
  const auto note = [&mistakes](const Status& status) {
    if (!status.ok()) mistakes.push_back(status);
  };
  note(CheckStartMemory(config));
  note(CheckSocket(config));
  note(CheckPools(config));
  note(CheckNuma(config));
  note(CheckCpus(config));
  if (!config.disk.directory.empty()) note(DiskTier::CheckPlace(config.disk));
  note(CheckParameters(config));
  if (config.remote.on()) note(CheckRemoteSecret(config));
  note(CheckAgentPython(config.remote.agent));
  if (config.remote.servers.contains("redis")) {
    const Status files = RedisValueTier::Check(RedisOptionsOf(config.remote));
    note(files);
    // Both read the same certificates.
    if (files.ok()) note(NodeCredentials::Load(config.remote.tls, config.remote.announce).status());
  }
  return mistakes;
}

Status CheckGpus(const Config& config) {
  if (config.devices.emulated != 0) return OkStatus();
  return NewCudaDevices(config.devices.uuids).status();
}

}  // namespace kvstrata
