// SPDX-License-Identifier: Apache-2.0
#include "tests/server/tier/redis_servers.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <thread>

#include "base/check.h"
#include "base/unique_fd.h"
#include "server/tier/redis/client/redis_connection.h"
#include "server/tier/redis/client/redis_resolver.h"

namespace kvstrata {
namespace {

using redis::RespReply;
using Clock = std::chrono::steady_clock;

constexpr const char* kProgram = "/usr/bin/redis-check-rdb";
constexpr std::chrono::seconds kPatience{60};

// A port that is free, and so is its cluster's bus, 10000 above.
uint16_t FreePort() {
  for (;;) {
    const UniqueFd one(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const UniqueFd bus(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    KVS_CHECK(bind(one.get(), any, sizeof(address)) == 0);
    KVS_CHECK(getsockname(one.get(), any, &size) == 0);
    const uint16_t port = ntohs(address.sin_port);
    if (port > 55535) continue;
    address.sin_port = htons(static_cast<uint16_t>(port + 10000));
    if (bind(bus.get(), any, sizeof(address)) == 0) return port;
  }
}

void Await(const char* what, const std::function<bool()>& so) {
  const Clock::time_point end = Clock::now() + kPatience;
  while (!so()) {
    if (Clock::now() > end) std::fprintf(stderr, "no %s\n", what);
    KVS_CHECK(Clock::now() < end);
    std::this_thread::yield();
    poll(nullptr, 0, 5);  // between questions
  }
}

bool Has(const RespReply& reply, const std::string& text) {
  return reply.text.find(text) != std::string::npos;
}

}  // namespace

RedisServers::RedisServers(const RedisServersOptions& options) : options_(options) {
  signal(SIGPIPE, SIG_IGN);  // Ask writes by OpenSSL
  if (options_.tls) MakeCertificates();
  servers_.resize(options_.masters * (1 + options_.replicas));
  for (Server& server : servers_) {
    server.port = FreePort();
    Spawn(&server);
  }
  for (size_t i = 0; i < servers_.size(); ++i) AwaitAnswer(i);
  if (options_.cluster) FormCluster();
}

RedisServers::~RedisServers() {
  for (size_t i = 0; i < servers_.size(); ++i) Kill(i);
}

std::vector<std::string> RedisServers::addresses() const {
  std::vector<std::string> all;
  for (size_t i = 0; i < servers_.size(); ++i) all.push_back(address(i));
  return all;
}

void RedisServers::Spawn(Server* server) {
  const std::string port = std::to_string(server->port), folder = dir_.path() + "/" + port;
  std::filesystem::create_directories(folder);
  std::vector<std::string> words = {"redis-server",
                                    "--bind",
                                    "127.0.0.1",
                                    "--dir",
                                    folder,
                                    "--save",
                                    "",
                                    "--appendonly",
                                    "no",
                                    "--logfile",
                                    folder + "/log",
                                    "--repl-diskless-sync-delay",
                                    "0"};
  const auto add = [&](const std::string& name, const std::string& value) {
    words.push_back("--" + name);
    words.push_back(value);
  };
  add(options_.tls ? "tls-port" : "port", port);
  if (options_.tls) {
    add("port", "0");
    add("tls-cert-file", dir_.path() + "/server.crt");
    add("tls-key-file", dir_.path() + "/server.key");
    add("tls-ca-cert-file", authority_file());
    add("tls-auth-clients", "no");
  }
  if (options_.max_memory != 0) add("maxmemory", std::to_string(options_.max_memory));
  add("maxmemory-policy", options_.policy);
  if (!options_.password.empty()) add("requirepass", options_.password);
  if (options_.cluster) {
    add("cluster-enabled", "yes");
    add("cluster-require-full-coverage", "no");
    add("cluster-node-timeout", "2000");
  }
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const pid_t parent = getpid();
  server->pid = fork();
  KVS_CHECK(server->pid >= 0);
  if (server->pid != 0) return;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  const int null = open("/dev/null", O_RDWR);
  dup2(null, 1);
  execv(kProgram, arguments.data());
  _exit(127);
}

void RedisServers::AwaitAnswer(size_t i) const {
  Await("answer to PING", [&] { return Has(Ask(i, {"PING"}), "PONG"); });
}

void RedisServers::Stop(size_t i) { KVS_CHECK(kill(servers_[i].pid, SIGSTOP) == 0); }
void RedisServers::Continue(size_t i) { KVS_CHECK(kill(servers_[i].pid, SIGCONT) == 0); }

void RedisServers::Kill(size_t i) {
  Server& server = servers_[i];
  if (server.pid == 0) return;
  kill(server.pid, SIGKILL);
  waitpid(server.pid, nullptr, 0);
  server.pid = 0;
}

void RedisServers::Start(size_t i) {
  Spawn(&servers_[i]);
  AwaitAnswer(i);
}

RespReply RedisServers::Ask(size_t i, const std::vector<std::string>& command) const {
  const RespReply none{RespReply::Kind::kError, 0, "no answer", {}};
  redis::RedisResolver resolver([] {});
  const auto address = resolver.Find({"127.0.0.1", port(i)});
  std::shared_ptr<redis::RedisTls> tls;
  if (options_.tls) tls = *redis::RedisTls::Load({true, authority_file(), "", "", ""});
  Result<redis::RedisSocket> socket =
      redis::RedisSocket::Connect(**address, tls.get(), "127.0.0.1");
  if (!socket.ok()) return none;
  redis::RedisConnection connection(std::move(*socket), {"", options_.password}, false,
                                    Clock::now());
  auto exchange = std::make_unique<redis::RedisExchange>();
  auto request = std::make_shared<redis::RedisRequest>();
  const std::vector<std::string_view> words(command.begin(), command.end());
  request->Add(words);
  exchange->request = request;
  redis::RedisConnection::Exchanges ended;
  const Clock::time_point end = Clock::now() + kPatience;
  while (ended.empty() && Clock::now() < end) {
    pollfd ready{connection.fd(),
                 static_cast<short>(POLLIN | (connection.wants_write() ? POLLOUT : 0)), 0};
    poll(&ready, 1, 1000);
    if (!connection.Move(Clock::now(), &ended).ok()) return none;
    if (connection.ready() && exchange != nullptr) {
      connection.Send(std::move(exchange), Clock::now());
    }
  }
  return ended.empty() ? none : ended.front()->replies.front();
}

std::string RedisServers::Dump(size_t i) const {
  Ask(i, {"CONFIG", "SET", "rdbcompression", "no"});
  KVS_CHECK(Has(Ask(i, {"SAVE"}), "OK"));
  std::ifstream file(dir_.path() + "/" + std::to_string(port(i)) + "/dump.rdb", std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void RedisServers::FormCluster() {
  const size_t masters = options_.masters;
  for (size_t i = 0; i < servers_.size(); ++i) {
    servers_[i].id = Ask(i, {"CLUSTER", "MYID"}).text;
    Ask(i, {"CLUSTER", "SET-CONFIG-EPOCH", std::to_string(i + 1)});
    if (i >= masters) continue;
    const size_t first = redis::kSlots * i / masters, end = redis::kSlots * (i + 1) / masters;
    Ask(i, {"CLUSTER", "ADDSLOTSRANGE", std::to_string(first), std::to_string(end - 1)});
  }
  for (size_t i = 1; i < servers_.size(); ++i) {
    Ask(0, {"CLUSTER", "MEET", "127.0.0.1", std::to_string(port(i))});
  }
  const std::string known = "cluster_known_nodes:" + std::to_string(servers_.size()) + "\r\n";
  for (size_t i = 0; i < servers_.size(); ++i) {
    Await("node that knows all", [&] { return Has(Ask(i, {"CLUSTER", "INFO"}), known); });
  }
  for (size_t i = masters; i < servers_.size(); ++i) {
    const std::string& master = servers_[(i - masters) % masters].id;
    Await("replica", [&] { return Has(Ask(i, {"CLUSTER", "REPLICATE", master}), "OK"); });
  }
  AwaitCluster();
}

void RedisServers::AwaitCluster() const {
  for (size_t i = 0; i < servers_.size(); ++i) {
    if (servers_[i].pid == 0) continue;
    Await("well cluster", [&] {
      if (!Has(Ask(i, {"CLUSTER", "INFO"}), "cluster_state:ok")) return false;
      const RespReply slots = Ask(i, {"CLUSTER", "SLOTS"});
      size_t servers = 0;
      for (const RespReply& range : slots.items) servers += range.items.size() - 2;
      return servers >= servers_.size();
    });
    const bool replica = i >= options_.masters;
    if (!replica) continue;
    Await("replica that follows", [&] {
      return Has(Ask(i, {"INFO", "replication"}), "master_link_status:up");
    });
  }
}

void RedisServers::BeginMove(uint16_t slot, size_t from, size_t to) {
  const std::string number = std::to_string(slot);
  Ask(to, {"CLUSTER", "SETSLOT", number, "IMPORTING", servers_[from].id});
  Ask(from, {"CLUSTER", "SETSLOT", number, "MIGRATING", servers_[to].id});
}

void RedisServers::MoveKeys(uint16_t slot, size_t from, size_t to, size_t most) {
  const RespReply keys =
      Ask(from, {"CLUSTER", "GETKEYSINSLOT", std::to_string(slot), std::to_string(most)});
  for (const RespReply& key : keys.items) {
    const RespReply moved =
        Ask(from, {"MIGRATE", "127.0.0.1", std::to_string(port(to)), key.text, "0", "10000"});
    KVS_CHECK(Has(moved, "OK"));
  }
}

void RedisServers::EndMove(uint16_t slot, size_t from, size_t to) {
  const std::string number = std::to_string(slot);
  for (const size_t i : {to, from}) {
    Ask(i, {"CLUSTER", "SETSLOT", number, "NODE", servers_[to].id});
  }
}

void RedisServers::MakeCertificates() const {
  const std::string folder = dir_.path() + "/";
  const std::string quiet = " >/dev/null 2>&1";
  const std::string key = "openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes ";
  KVS_CHECK(std::system((key + "-x509 -days 2 -subj /CN=authority -keyout " + folder +
                         "ca.key -out " + folder + "ca.crt" + quiet)
                            .c_str()) == 0);
  KVS_CHECK(std::system((key + "-subj /CN=server -addext subjectAltName=IP:127.0.0.1 -keyout " +
                         folder + "server.key -out " + folder + "server.csr" + quiet)
                            .c_str()) == 0);
  KVS_CHECK(std::system(("openssl x509 -req -days 2 -copy_extensions copy -in " + folder +
                         "server.csr -CA " + folder + "ca.crt -CAkey " + folder + "ca.key -out " +
                         folder + "server.crt" + quiet)
                            .c_str()) == 0);
}

}  // namespace kvstrata
