// SPDX-License-Identifier: Apache-2.0
// Rows of linked_bench about the daemon's pools: what a sequence holds of the GPU's memory, and
// what a second process reads; move_rows.h has those of moves. Templates on linked_bench's Plan and
// Steps.
#pragma once

#include <grpcpp/grpcpp.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/abi_calls.h"
#include "bench/cuda/replay_timing.h"
#include "bench/results.h"
#include "client/include/kvstrata/kvstrata.h"
#include "kvstrata/v1/admin.grpc.pb.h"
#include "tests/fakes/daemon_process.h"

namespace kvstrata::cuda {

constexpr int32_t kPoolTokens = 128 * 1024;
constexpr char kPoolNotes[] =
    "Llama-3.1-8B's shape, 32 layers, bf16, pages of 16, one sequence of 128K tokens. memory: used "
    "bytes of the daemon's device pool once all work is settled, and what else is taken of the GPU "
    "since before the attach, without arenas and the engine's tensors (workspace, tables, caches, "
    "code), after a captured decode step; pool bytes of plans that were packed with fewer layers "
    "are scaled to 32, the rest is not; surprisals of sekv are exponential";

inline void CheckPool(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

class AttachedSession {
 public:
  explicit AttachedSession(const std::string& socket) {
    kvs_attach_options options{};
    options.size = sizeof(options);
    options.timeout_ms = 300000;  // packing a prompt takes its time
    bench::Must(kvs_attach(socket.c_str(), &options, &session_), "kvs_attach");
  }
  AttachedSession(const AttachedSession&) = delete;
  AttachedSession& operator=(const AttachedSession&) = delete;
  ~AttachedSession() { kvs_detach(session_); }
  kvs_session* get() const { return session_; }

 private:
  kvs_session* session_ = nullptr;
};

// Seconds since the first call, and what has been done by now: whoever ends a run that hangs sees
// where it was.
inline void Progress(const char* what) {
  static const double start = bench::NowUs();
  std::fprintf(stderr, "[%6.2f s] %s\n", (bench::NowUs() - start) * 1e-6, what);
}

// The rows' daemon: no page is ever short of room.
class PoolDaemon {
 public:
  // settings: KEY=VALUE, beside and instead of these.
  explicit PoolDaemon(const std::vector<std::string>& settings = {}) : process(Flags(settings)) {}

  testing::DaemonProcess process;

  v1::GetStatusResponse Status() const {
    return Call<v1::GetStatusResponse>(&v1::Admin::Stub::GetStatus, v1::GetStatusRequest());
  }
  // Moves to the host, or `up`; returns the bytes that were moved.
  uint64_t Move(uint64_t sequence, bool up) const {
    v1::MoveRequest request;
    request.set_sequence(sequence);
    return Call<v1::MoveResponse>(up ? &v1::Admin::Stub::Prefetch : &v1::Admin::Stub::Demote,
                                  request)
        .bytes();
  }

 private:
  static std::vector<std::string> Flags(const std::vector<std::string>& settings) {
    std::vector<std::string> flags;
    for (const char* setting :
         {"pool.device=cuda", "pool.device_bytes=56GiB", "pool.host_bytes=24GiB",
          "pool.arena_bytes=256MiB", "work.op_threads=16"}) {
      flags.insert(flags.end(), {"--set", setting});
    }
    for (const std::string& setting : settings) flags.insert(flags.end(), {"--set", setting});
    return flags;
  }

  template <typename Response, typename Request>
  Response Call(grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*, const Request&,
                                                        Response*),
                const Request& request) const {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    Response response;
    const grpc::Status status = (admin_.get()->*method)(&context, request, &response);
    if (status.ok()) return response;
    std::fprintf(stderr, "admin: %s\n", status.error_message().c_str());
    std::exit(1);
  }

  const std::unique_ptr<v1::Admin::Stub> admin_ = v1::Admin::NewStub(
      grpc::CreateChannel("unix:" + process.socket(), grpc::InsecureChannelCredentials()));
};

// --- memory --------------------------------------------------------------------------------------

struct HeldMemory {
  double pool = 0, host = 0, client = 0;  // bytes of a model of kLayersOfAModel layers
  int layers = 0;                         // that were measured
  double total() const { return pool + client; }
};

inline uint64_t FreeOnGpu() {
  size_t free_bytes = 0, total = 0;
  Check(cudaMemGetInfo(&free_bytes, &total), "cudaMemGetInfo");
  return free_bytes;
}

// Pools hold a share of each layer; what the client holds beside its tensors is taken as it is.
template <typename Steps, typename Plan>
HeldMemory MeasureHeld(const Plan& plan, int layers_of_a_model) {
  PoolDaemon daemon;
  Check(cudaFree(nullptr), "a context");
  const uint64_t before = FreeOnGpu();
  AttachedSession session(daemon.process.socket());
  Steps steps(session.get(), plan, 1, kPoolTokens);
  for (int i = 0; i < 4; ++i) steps.Launch();
  Check(cudaStreamSynchronize(steps.stream()), "a step");
  HeldMemory held;
  held.layers = steps.layers();
  const double scale = static_cast<double>(layers_of_a_model) / steps.layers();
  uint64_t arenas = 0;
  const v1::GetStatusResponse status = daemon.Status();
  for (const v1::Pool& pool : status.pools()) {
    const auto used = static_cast<double>(pool.used_bytes() - pool.cached_bytes());
    (pool.tier() == "device" ? held.pool : held.host) = used * scale;
    if (pool.tier() == "device") arenas = pool.arenas() * pool.arena_bytes();
  }
  held.client = static_cast<double>(before) - static_cast<double>(FreeOnGpu()) -
                static_cast<double>(arenas) - static_cast<double>(steps.tensor_bytes());
  return held;
}

template <typename Steps, typename Plan>
void MemoryRows(const std::vector<Plan>& plans, int layers_of_a_model, const std::string& only,
                bench::Json* rows) {
  const std::map<std::string, double> must = {{"mosaickv", 3.0}, {"sekv", 1 / 0.47}};
  double full = 0;
  for (const Plan& plan : plans) {
    const std::string id = std::string("memory/") + plan.name + "/128K";
    // The first plan is what the others are compared with.
    if (full != 0 && !id.starts_with(only)) continue;
    const HeldMemory held = MeasureHeld<Steps>(plan, layers_of_a_model);
    constexpr double kMiB = 1 << 20;
    if (full == 0) full = held.total() / kMiB;
    const double value = held.total() / kMiB;
    std::printf("%-28s %9.1f MiB  pool %9.1f  client %7.1f  host %9.1f  %2d layers\n", id.c_str(),
                value, held.pool / kMiB, held.client / kMiB, held.host / kMiB, held.layers);
    std::fflush(stdout);
    rows->push_back({{"id", id},
                     {"plan", plan.text},
                     {"tokens", kPoolTokens},
                     {"value", value},
                     {"unit", "MiB"},
                     {"pool_mib", held.pool / kMiB},
                     {"client_mib", held.client / kMiB},
                     {"host_mib", held.host / kMiB},
                     {"layers", held.layers},
                     {"baseline", {{"name", "full"}, {"value", full}}},
                     {"ratio", full / value}});
    if (must.contains(plan.name)) rows->back()["must"] = must.at(plan.name);
  }
}

// --- a second process ----------------------------------------------------------------------------

constexpr int kSecondReplays = 60;

// What the second process does: it is held for the prompt that the first one wrote.
template <typename Steps, typename Plan>
int RunSecond(const std::string& socket, const Plan& plan, const std::string& digest) {
  AttachedSession session(socket);
  Steps steps(session.get(), plan, 1, kPoolTokens, {}, digest);
  const bench::Timing t = TimeReplays<Steps>({&steps}, steps.layers(), kSecondReplays);
  std::printf("%u %.17g %.17g %.17g\n", steps.held(), t.median, t.p10, t.p90);
  return steps.Sound() ? 0 : 1;
}

// What it printed: the tokens that it was held for, and its time.
inline uint32_t AwaitSecond(const std::string& socket, const std::string& digest,
                            bench::Timing* time) {
  std::array<int, 2> ends{};
  CheckPool(pipe(ends.data()) == 0, "pipe");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  const std::array<const char*, 6> argv = {"/proc/self/exe", "--second",     socket.c_str(),
                                           "--digest",       digest.c_str(), nullptr};
  pid_t child = 0;
  CheckPool(posix_spawn(&child, argv[0], &actions, nullptr, const_cast<char* const*>(argv.data()),
                        environ) == 0,
            "posix_spawn");
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  FILE* const from = fdopen(ends[0], "r");
  uint32_t held = 0;
  const int read =
      std::fscanf(from, "%u %lf %lf %lf", &held, &time->median, &time->p10, &time->p90);
  std::fclose(from);
  int status = 0;
  waitpid(child, &status, 0);
  CheckPool(read == 4 && status == 0, "the second process");
  time->n = kSecondReplays;
  return held;
}

template <typename Steps, typename Plan>
void SecondRow(const Plan& plan, bench::Json* rows) {
  PoolDaemon daemon;
  AttachedSession session(daemon.process.socket());
  const std::string digest = "second-" + std::to_string(getpid());
  Steps steps(session.get(), plan, 1, kPoolTokens, {}, digest);
  Progress("second: the first process has its pages");
  const auto time = [&] { return TimeReplays<Steps>({&steps}, steps.layers(), kSecondReplays); };
  const bench::Timing before = time();
  bench::Timing second;
  const uint32_t held = AwaitSecond(daemon.process.socket(), digest, &second);
  const bench::Timing after = time();
  const double own = (before.median + after.median) / 2;
  std::printf("second/%s/128K %9.2f us  own %.2f, %.2f  ratio %.3f  held for %u tokens\n",
              plan.name, second.median, before.median, after.median, own / second.median, held);
  std::fflush(stdout);
  rows->push_back(bench::RowOf(std::string("second/") + plan.name + "/128K", second));
  rows->back().update({{"plan", plan.text},
                       {"tokens", kPoolTokens},
                       {"held_tokens", held},
                       {"baseline", {{"name", "the first process"}, {"value", own}}},
                       {"ratio", own / second.median},
                       {"must", 0.97}});
}

}  // namespace kvstrata::cuda
