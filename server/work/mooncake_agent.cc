// SPDX-License-Identifier: Apache-2.0
#include "server/work/mooncake_agent.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "server/telemetry/heartbeat.h"
#include "server/telemetry/thread_top.h"

namespace kvstrata {
namespace {

using mooncake::Kind;

constexpr const char* kThread = "kvs-mooncake";
constexpr int kAgentSocket = 3, kAgentMemory = 4;  // descriptors of the agent
constexpr int kFirstDescriptor = 16;               // ours lie above those, so that none is overrun
constexpr uint32_t kBreakerFailures = 8;

Status SystemError(const char* call, int error) {
  return Unavailable("MOONCAKE_AGENT", std::string(call) + ": " + std::strerror(error));
}

// A descriptor like it that is none of those that the agent gets.
UniqueFd Above(const UniqueFd& fd) {
  return UniqueFd(fcntl(fd.get(), F_DUPFD_CLOEXEC, kFirstDescriptor));
}

// What posix_spawn is told, freed with the object.
class SpawnPlan {
 public:
  SpawnPlan(int socket, int memory) {
    posix_spawn_file_actions_init(&actions_);
    posix_spawnattr_init(&attributes_);
    posix_spawn_file_actions_addopen(&actions_, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions_, 1, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_adddup2(&actions_, socket, kAgentSocket);
    posix_spawn_file_actions_adddup2(&actions_, memory, kAgentMemory);
    posix_spawn_file_actions_addclosefrom_np(&actions_, kAgentMemory + 1);
    sigset_t none, all;
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawnattr_setsigmask(&attributes_, &none);
    posix_spawnattr_setsigdefault(&attributes_, &all);
    posix_spawnattr_setflags(&attributes_, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  }
  SpawnPlan(const SpawnPlan&) = delete;
  SpawnPlan& operator=(const SpawnPlan&) = delete;
  ~SpawnPlan() {
    posix_spawn_file_actions_destroy(&actions_);
    posix_spawnattr_destroy(&attributes_);
  }
  int Spawn(std::vector<std::string> words, pid_t* pid) const {
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    return posix_spawn(pid, argv.front(), &actions_, &attributes_, argv.data(), environ);
  }

 private:
  posix_spawn_file_actions_t actions_;
  posix_spawnattr_t attributes_;
};

std::vector<std::string> WordsOf(const MooncakeAgentOptions& options, uint64_t bytes) {
  return {options.python, options.program,
          "--socket",     std::to_string(kAgentSocket),
          "--memory",     std::to_string(kAgentMemory),
          "--bytes",      std::to_string(bytes),
          "--master",     options.master,
          "--metadata",   options.metadata,
          "--protocol",   options.protocol,
          "--devices",    options.devices,
          "--interface",  options.interface};
}

// How a process ended, in words.
std::string EndOf(int status) {
  if (WIFSIGNALED(status)) return "it was ended by signal " + std::to_string(WTERMSIG(status));
  const int code = WEXITSTATUS(status);
  if (code == 3) return "it could not set up the store (exit code 3; its reason is on stderr)";
  return "it ended with exit code " + std::to_string(code);
}

int MillisecondsUntil(Deadline due) {
  if (due == Deadline::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(due - Deadline::clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60'000));
}

}  // namespace

Result<std::unique_ptr<MooncakeAgent>> MooncakeAgent::Start(const MooncakeAgentOptions& options) {
  KVS_ASSIGN_OR_RETURN(auto memory, AgentMemory::Map(options.memory_bytes));
  std::unique_ptr<MooncakeAgent> agent(new MooncakeAgent(options, std::move(memory)));
  if (!agent->wake_) return SystemError("eventfd", errno);
  agent->thread_ = std::thread([a = agent.get()] { a->Serve(); });
  pthread_setname_np(agent->thread_.native_handle(), kThread);
  return agent;
}

MooncakeAgent::MooncakeAgent(const MooncakeAgentOptions& options,
                             std::shared_ptr<AgentMemory> memory)
    : options_(options),
      memory_(std::move(memory)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      breaker_(kBreakerFailures, options.first_pause, options.longest_pause),
      pause_(options.first_pause) {}

MooncakeAgent::~MooncakeAgent() { Stop(); }

void MooncakeAgent::Stop() {
  {
    MutexLock lock(mu_);
    stopped_ = true;
    EndCalls(TierStopped());
  }
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof(one));
  if (thread_.joinable()) thread_.join();
}

// --- calls ---------------------------------------------------------------------------------------

Status MooncakeAgent::Send(Kind kind, std::span<const Entry> entries, uint64_t call,
                           Deadline deadline) {
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline.time_since_epoch());
  std::vector<std::byte> message(sizeof(mooncake::Request) +
                                 entries.size() * sizeof(mooncake::RequestEntry));
  const mooncake::Request head{kind, static_cast<uint32_t>(entries.size()), call, ns.count()};
  std::memcpy(message.data(), &head, sizeof(head));
  std::byte* at = message.data() + sizeof(head);
  for (const Entry& entry : entries) {
    KVS_CHECK(entry.name.size() < mooncake::kNameBytes);
    mooncake::RequestEntry one{entry.offset, entry.bytes, {}};
    std::memcpy(one.name, entry.name.data(), entry.name.size());
    std::memcpy(at, &one, sizeof(one));
    at += sizeof(one);
  }
  const ssize_t sent =
      send(socket_.get(), message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  return sent < 0 ? SystemError("the agent takes no message", errno) : OkStatus();
}

Result<std::vector<int64_t>> MooncakeAgent::Call(Kind kind, std::span<const Entry> entries,
                                                 std::shared_ptr<AgentBlock> block,
                                                 Deadline deadline) {
  KVS_CHECK(!entries.empty() && entries.size() <= mooncake::kMostEntries);
  const auto pending = std::make_shared<Pending>();
  pending->kind = kind;
  pending->entries = entries.size();
  pending->block = std::move(block);
  std::unique_lock<std::mutex> lock(mu_.native());
  return [&]() KVS_NO_THREAD_SAFETY_ANALYSIS -> Result<std::vector<int64_t>> {
    ++stats_.calls;
    if (stopped_) return TierStopped();
    if (!stats_.ready) return Unavailable("MOONCAKE_AGENT", "the agent is not ready");
    if (!breaker_.Allow(Clock::now())) {
      return Unavailable("MOONCAKE_LEFT_ALONE", "the store failed and is not asked for a moment");
    }
    const uint64_t number = next_call_++;
    pending->sent = Clock::now();
    calls_[number] = pending;
    if (const Status sent = Send(kind, entries, number, deadline); !sent.ok()) {
      calls_.erase(number);
      ++stats_.failures;
      stats_.last_error = sent.message();
      breaker_.Failed(Clock::now());
      return sent;
    }
    const bool ended = answered_.wait_until(
        lock, deadline, [&]() KVS_NO_THREAD_SAFETY_ANALYSIS { return pending->ended; });
    if (!ended) {
      ++stats_.late;
      stats_.last_error = "no answer came by a call's deadline";
      breaker_.Failed(Clock::now());
      return Status(Code::kDeadlineExceeded, "MOONCAKE_SLOW", "no answer came by its deadline");
    }
    if (!pending->status.ok()) return pending->status;
    breaker_.Succeeded();
    return std::move(pending->results);
  }();
}

void MooncakeAgent::EndCalls(const Status& why) {
  for (auto& [number, pending] : calls_) {
    pending->ended = true;
    pending->status = why;
  }
  answered_.notify_all();
}

// --- the process ---------------------------------------------------------------------------------

void MooncakeAgent::Serve() {
  WarmUpAllocator();
  Heartbeat beat(kThread);
  for (;;) {
    std::array<pollfd, 3> wait{};
    Deadline due{};
    {
      MutexLock lock(mu_);
      if (stopped_) break;
      wait = {pollfd{wake_.get(), POLLIN, 0}, pollfd{socket_.get(), POLLIN, 0},
              pollfd{pidfd_.get(), POLLIN, 0}};
      due = NextDue();
    }
    (void)poll(wait.data(), wait.size(), MillisecondsUntil(due));
    const LoopIteration iteration(&beat);
    Survive(kThread, [&] {
      MutexLock lock(mu_);
      const Deadline now = Clock::now();
      if (wait[1].revents != 0) ReadReplies();
      if (wait[2].revents != 0) Reap(now);
      DoWhatIsDue(now);
    });
  }
  MutexLock lock(mu_);
  if (stats_.pid == 0) return;
  Kill("the daemon stops");
  (void)waitpid(stats_.pid, nullptr, 0);
  stats_.pid = 0;
  calls_.clear();
}

Deadline MooncakeAgent::NextDue() const {
  if (stats_.pid == 0) return next_start_;
  if (!socket_) return Deadline::max();  // killed; its end is awaited
  if (!stats_.ready) return started_ + options_.start_timeout;
  // Calls wake nobody: it is looked for them as often as one may be unanswered.
  const Deadline sent = calls_.empty() ? Clock::now() : calls_.begin()->second->sent;
  return sent + options_.stall_timeout;
}

void MooncakeAgent::DoWhatIsDue(Deadline now) {
  if (stopped_ || NextDue() > now) return;
  if (stats_.pid == 0) return Spawn(now);
  Kill(stats_.ready ? "the agent left a call unanswered for too long" : "the agent was not ready");
}

void MooncakeAgent::Spawn(Deadline now) {
  started_ = now;
  ++stats_.starts;
  const Status spawned = TrySpawn();
  if (spawned.ok()) return;
  failed_ = true;
  stats_.last_error = "it cannot be started: " + spawned.message();
  PauseBeforeNext(now);
}

Status MooncakeAgent::TrySpawn() {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
    return SystemError("socketpair", errno);
  }
  UniqueFd ours(pair[0]);
  const UniqueFd low(pair[1]);
  const UniqueFd theirs = Above(low);
  const UniqueFd memory(fcntl(memory_->fd(), F_DUPFD_CLOEXEC, kFirstDescriptor));
  if (!theirs || !memory) return SystemError("fcntl", errno);
  pid_t pid = 0;
  const SpawnPlan plan(theirs.get(), memory.get());
  if (const int error = plan.Spawn(WordsOf(options_, memory_->bytes()), &pid); error != 0) {
    return SystemError(options_.python.c_str(), error);
  }
  UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (!pidfd) {
    const int error = errno;
    kill(pid, SIGKILL);
    (void)waitpid(pid, nullptr, 0);
    return SystemError("pidfd_open", error);
  }
  socket_ = std::move(ours);
  pidfd_ = std::move(pidfd);
  stats_.pid = pid;
  return OkStatus();
}

void MooncakeAgent::ReadReplies() {
  alignas(8) std::array<std::byte, sizeof(mooncake::Reply) + 8 * mooncake::kMostEntries> message;
  while (socket_) {
    const ssize_t size = recv(socket_.get(), message.data(), message.size(), MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (size <= 0) return Kill("the agent closed its socket");
    if (!Take(std::span(message).first(static_cast<size_t>(size)))) {
      return Kill("what the agent sent is no answer");
    }
  }
}

bool MooncakeAgent::Take(std::span<const std::byte> message) {
  mooncake::Reply reply;
  if (message.size() < sizeof(reply)) return false;
  std::memcpy(&reply, message.data(), sizeof(reply));
  const std::span<const std::byte> results = message.subspan(sizeof(reply));
  if (results.size() != reply.entries * sizeof(int64_t)) return false;
  if (reply.kind == Kind::kReady) {
    if (stats_.ready || reply.call != mooncake::kVersion) return false;
    stats_.ready = true;
    failed_ = false;
    breaker_.Succeeded();
    return true;
  }
  const auto it = calls_.find(reply.call);
  if (it == calls_.end()) return false;
  const std::shared_ptr<Pending> pending = it->second;
  if (pending->kind != reply.kind || pending->entries != reply.entries) return false;
  pending->results.resize(reply.entries);
  std::memcpy(pending->results.data(), results.data(), results.size());
  calls_.erase(it);
  pending->block.reset();
  pending->ended = true;
  answered_.notify_all();
  return true;
}

void MooncakeAgent::Kill(const std::string& why) {
  failed_ = true;
  stats_.ready = false;
  stats_.last_error = why;
  socket_.Reset();
  (void)kill(stats_.pid, SIGKILL);  // it is not reaped yet, so that the number is its own
}

void MooncakeAgent::Reap(Deadline now) {
  int status = 0;
  if (waitpid(stats_.pid, &status, WNOHANG) != stats_.pid) return;
  if (socket_) stats_.last_error = EndOf(status);  // else why it was killed is known
  failed_ = true;
  stats_.ready = false;
  stats_.pid = 0;
  socket_.Reset();
  pidfd_.Reset();
  stats_.failures += calls_.size();
  EndCalls(Unavailable("MOONCAKE_AGENT", "the agent ended: " + stats_.last_error));
  calls_.clear();
  if (now - started_ > options_.longest_pause) pause_ = options_.first_pause;
  PauseBeforeNext(now);
}

void MooncakeAgent::PauseBeforeNext(Deadline now) {
  next_start_ = now + pause_;
  pause_ = std::min(2 * pause_, options_.longest_pause);
}

// --- what is told --------------------------------------------------------------------------------

MooncakeAgentStats MooncakeAgent::Stats() const {
  MutexLock lock(mu_);
  MooncakeAgentStats stats = stats_;
  stats.left_alone = breaker_.open() || !stats.ready;
  stats.held_bytes = memory_->taken();
  return stats;
}

std::string MooncakeAgent::Illness() const {
  MutexLock lock(mu_);
  if (failed_) return "remote tier: no agent of Mooncake serves: " + stats_.last_error;
  if (breaker_.open()) {
    return "remote tier: Mooncake failed repeatedly and is left alone; last: " + stats_.last_error;
  }
  return "";
}

}  // namespace kvstrata
