// SPDX-License-Identifier: Apache-2.0
#include "server/tier/mooncake/mooncake_agent.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <stop_token>
#include <utility>

#include "base/check.h"
#include "server/telemetry/log.h"
#include "server/telemetry/thread_top.h"

namespace kvstrata {
namespace {

using mooncake::Kind;
using Clock = std::chrono::steady_clock;

constexpr const char* kAgentThread = "kvs-mooncake";
constexpr uint32_t kBreakerFailures = 8;

std::vector<std::string> WordsOf(const MooncakeAgentOptions& options, uint64_t bytes) {
  return {options.python, options.program,
          "--socket",     std::to_string(AgentProcess::kSocket),
          "--memory",     std::to_string(AgentProcess::kMemory),
          "--bytes",      std::to_string(bytes),
          "--master",     options.master,
          "--metadata",   options.metadata,
          "--protocol",   options.protocol,
          "--devices",    options.devices,
          "--interface",  options.interface};
}

// What an answer says of each entry.
void Count(Kind kind, std::span<const MooncakeAgent::Entry> entries,
           std::span<const int64_t> results, MooncakeAgentStats* stats) {
  MooncakeAnswers& answers = kind == Kind::kGet ? stats->gets : stats->exists;
  for (size_t i = 0; i < results.size(); ++i) {
    const int64_t result = results[i];
    if (kind == Kind::kPut && result == 0) stats->put_bytes += entries[i].bytes;
    if (kind != Kind::kGet && kind != Kind::kExist) continue;
    if (kind == Kind::kGet && result > 0) stats->got_bytes += static_cast<uint64_t>(result);
    const bool absent = result == mooncake::kMiss || result == mooncake::kNotWhole ||
                        (kind == Kind::kExist && result == 0);
    if (absent) {
      ++answers.absent;
    } else if (result >= 0) {
      ++answers.hits;
    } else {
      ++(result == mooncake::kLate ? answers.late : answers.refused);
    }
  }
}

// There was no answer, and why.
void CountNone(Kind kind, uint64_t MooncakeAnswers::*why, size_t entries,
               MooncakeAgentStats* stats) {
  if (kind == Kind::kGet) stats->gets.*why += entries;
  if (kind == Kind::kExist) stats->exists.*why += entries;
}

int MillisecondsUntil(Deadline due) {
  if (due == Deadline::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(due - Deadline::clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60'000));
}

}  // namespace

struct MooncakeAgent::Pending {
  mooncake::Kind kind;
  size_t entries = 0;
  std::shared_ptr<AgentBlock> block;
  Deadline sent{};
  bool ended = false;
  Status status;
  std::vector<int64_t> results;
};

Result<std::unique_ptr<MooncakeAgent>> MooncakeAgent::Start(const MooncakeAgentOptions& options) {
  KVS_ASSIGN_OR_RETURN(auto memory, AgentMemory::Map(options.memory_bytes));
  std::unique_ptr<MooncakeAgent> agent(new MooncakeAgent(options, std::move(memory)));
  if (!agent->wake_) return AgentError("eventfd", errno);
  agent->thread_ = std::thread([a = agent.get()] { a->Serve(); });
  pthread_setname_np(agent->thread_.native_handle(), kAgentThread);
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
      send(process_.socket(), message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  return sent < 0 ? AgentError("the agent takes no message", errno) : OkStatus();
}

Result<std::vector<int64_t>> MooncakeAgent::Call(Kind kind, std::span<const Entry> entries,
                                                 std::shared_ptr<AgentBlock> block,
                                                 const TierCall& terms) {
  KVS_CHECK(!entries.empty() && entries.size() <= mooncake::kMostEntries);
  const auto pending = std::make_shared<Pending>();
  pending->kind = kind;
  pending->entries = entries.size();
  pending->block = std::move(block);
  const std::stop_callback wake(terms.cancel, [this] {
    MutexLock lock(mu_);  // so that it is not between a look and its wait
    answered_.notify_all();
  });
  std::unique_lock<std::mutex> lock(mu_.native());
  return [&]() KVS_NO_THREAD_SAFETY_ANALYSIS -> Result<std::vector<int64_t>> {
    if (stopped_) return TierStopped();
    if (!stats_.ready) {
      const std::string why = failed_ ? ": " + stats_.last_error : "";
      return Unavailable("MOONCAKE_AGENT", "the agent is not ready" + why);
    }
    if (!breaker_.Allow(Clock::now())) {
      return Unavailable("MOONCAKE_LEFT_ALONE", "the store failed and is not asked for a moment");
    }
    const uint64_t number = next_call_++;
    pending->sent = Clock::now();
    calls_[number] = pending;
    ++stats_.calls;
    if (const Status sent = Send(kind, entries, number, terms.deadline); !sent.ok()) {
      calls_.erase(number);
      ++stats_.failures;
      stats_.last_error = sent.message();
      Blame();
      return sent;
    }
    answered_.wait_until(lock, terms.deadline, [&]() KVS_NO_THREAD_SAFETY_ANALYSIS {
      return pending->ended || terms.cancel.stop_requested();
    });
    if (!pending->ended && terms.cancel.stop_requested()) return TierCancelled();
    if (!pending->ended) {
      ++stats_.late;
      CountNone(kind, &MooncakeAnswers::late, entries.size(), &stats_);
      stats_.last_error = "no answer came by a call's deadline";
      Blame();
      return Status(Code::kDeadlineExceeded, "MOONCAKE_SLOW", "no answer came by its deadline");
    }
    if (!pending->status.ok()) {
      CountNone(kind, &MooncakeAnswers::lost, entries.size(), &stats_);
      return pending->status;
    }
    Count(kind, entries, pending->results, &stats_);
    stats_.times.Add(Clock::now() - pending->sent);
    breaker_.Succeeded();
    return std::move(pending->results);
  }();
}

void MooncakeAgent::Blame() {
  const bool before = LeftAlone();
  breaker_.Failed(Clock::now());
  stats_.openings += !before && LeftAlone();
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
  Heartbeat beat(kAgentThread);
  for (;;) {
    std::array<pollfd, 3> wait{};
    Deadline due{};
    {
      MutexLock lock(mu_);
      if (stopped_) break;
      wait = {pollfd{wake_.get(), POLLIN, 0}, pollfd{process_.socket(), POLLIN, 0},
              pollfd{process_.end(), POLLIN, 0}};
      due = NextDue();
    }
    (void)poll(wait.data(), wait.size(), MillisecondsUntil(due));
    const LoopIteration iteration(&beat);
    Survive(kAgentThread, [&] {
      MutexLock lock(mu_);
      const Deadline now = Clock::now();
      if (wait[1].revents != 0) ReadReplies();
      if (wait[2].revents != 0) Reap(now);
      DoWhatIsDue(now);
    });
  }
  MutexLock lock(mu_);
  process_.End();
  calls_.clear();
}

Deadline MooncakeAgent::NextDue() const {
  if (process_.pid() == 0) return next_start_;
  if (process_.socket() < 0) return Deadline::max();  // killed; its end is awaited
  if (!stats_.ready) return started_ + options_.start_timeout;
  // Calls wake nobody: it is looked for them as often as one may be unanswered.
  const Deadline sent = calls_.empty() ? Clock::now() : calls_.begin()->second->sent;
  return sent + options_.stall_timeout;
}

void MooncakeAgent::DoWhatIsDue(Deadline now) {
  if (stopped_ || NextDue() > now) return;
  if (process_.pid() == 0) return Spawn(now);
  Kill(stats_.ready ? "the agent left a call unanswered for too long" : "the agent was not ready");
}

void MooncakeAgent::Spawn(Deadline now) {
  started_ = now;
  ++stats_.starts;
  const Status spawned = process_.Start(WordsOf(options_, memory_->bytes()), memory_->fd());
  if (spawned.ok()) return;
  NoteLost();
  stats_.last_error = "it cannot be started: " + spawned.message();
  PauseBeforeNext(now);
}

void MooncakeAgent::ReadReplies() {
  alignas(8) std::array<std::byte, sizeof(mooncake::Reply) + 8 * mooncake::kMostEntries> message;
  while (process_.socket() >= 0) {
    const ssize_t size = recv(process_.socket(), message.data(), message.size(), MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (size <= 0) return Kill("");  // Reap tells how it ended
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
    LogEvent(LogLevel::kInfo, "mooncake_agent_ready", {{"pid", process_.pid()}});
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

void MooncakeAgent::NoteLost() {
  stats_.openings += !LeftAlone();
  failed_ = true;
  stats_.ready = false;
}

void MooncakeAgent::Kill(const std::string& why) {
  NoteLost();
  stats_.last_error = why;
  process_.Kill();
}

void MooncakeAgent::Reap(Deadline now) {
  const pid_t pid = process_.pid();
  const bool killed = process_.socket() < 0 && !stats_.last_error.empty();  // why is known
  const std::optional<std::string> end = process_.Reap();
  if (!end) return;
  if (!killed) stats_.last_error = *end;
  NoteLost();
  LogEvent(LogLevel::kWarn, "mooncake_agent_ended", {{"pid", pid}, {"why", stats_.last_error}});
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
  stats.pid = process_.pid();
  stats.left_alone = LeftAlone();
  stats.held_bytes = memory_->taken();
  stats.most_held_bytes = memory_->most_taken();
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
