// SPDX-License-Identifier: Apache-2.0
// Rows of linked_bench about moves between the tiers: what they carry, and what they cost a decode
// beside them. Templates on linked_bench's Plan and Steps.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "bench/cuda/pool_rows.h"

namespace kvstrata::cuda {

constexpr int32_t kMovedTokens = 16 * 1024, kBesideTokens = 64 * 1024;
constexpr char kMoveNotes[] =
    "Llama-3.1-8B's shape, 32 layers, bf16, pages of 16. move: prefetch and demote of a sequence "
    "of 16K tokens (2 GiB) as an operator asks for them, arenas made and registered before. "
    "decode: steps of a sequence of 64K tokens, one behind the other, that lie inside of moves "
    "against those that none touches, means. second: a layer of a captured step, 128K tokens, in a "
    "process that attached to the pages of the first one, which is idle meanwhile";

// Microseconds since the first call.
inline double ElapsedUs() {
  static const double start = bench::NowUs();
  return bench::NowUs() - start;
}

// When moves ran, and what they moved.
struct Moves {
  struct Run {
    double begin = 0, end = 0;
    uint64_t bytes = 0;
    double gb_a_second() const { return static_cast<double>(bytes) / (end - begin) * 1e-3; }
  };
  std::vector<Run> demotions, promotions;
  static bool During(const std::vector<Run>& runs, double begin, double end) {
    return std::any_of(runs.begin(), runs.end(),
                       [=](const Run& r) { return r.begin <= begin && end <= r.end; });
  }
  static bool Beside(const std::vector<Run>& runs, double begin, double end) {
    return std::none_of(runs.begin(), runs.end(),
                        [=](const Run& r) { return begin < r.end && r.begin < end; });
  }
  static bench::Timing Rate(const std::vector<Run>& runs) {
    std::vector<double> rates;
    for (const Run& run : runs) rates.push_back(run.gb_a_second());
    return bench::TimingOf(rates);
  }
};

// The first round is left out: it makes arenas and registers them. As many rounds as the time
// allows, two at least.
inline Moves MoveToAndFro(const PoolDaemon& daemon, uint64_t sequence) {
  constexpr int kRounds = 10;
  constexpr double kMostUs = 5e6;
  Moves moves;
  const double start = ElapsedUs();
  for (int round = 0; round <= kRounds; ++round) {
    if (round > 2 && ElapsedUs() - start > kMostUs) break;
    for (const bool up : {false, true}) {
      Moves::Run run;
      run.begin = ElapsedUs();
      run.bytes = daemon.Move(sequence, up);
      run.end = ElapsedUs();
      CheckPool(run.bytes > 0, "a move");
      if (round > 0) (up ? moves.promotions : moves.demotions).push_back(run);
      if (round == 0) Progress(up ? "move: promoted once" : "move: demoted once");
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // steps that nothing disturbs
    }
  }
  return moves;
}

inline void RateRow(const std::string& id, const std::vector<Moves::Run>& runs, double must,
                    bench::Json* rows) {
  const bench::Timing t = Moves::Rate(runs);
  std::printf("%-36s %9.2f GB/s  p10 %9.2f  p90 %9.2f\n", id.c_str(), t.median, t.p10, t.p90);
  std::fflush(stdout);
  rows->push_back(bench::RowOf(id, t, "GB/s"));
  rows->back()["bytes"] = runs.front().bytes;
  if (must > 0) rows->back()["must"] = must;
}

struct StepTimes {
  std::vector<double> begin, end, us;
};

// Steps, one always waiting behind the one that runs, until `stop`.
template <typename Steps>
StepTimes RunSteps(Steps* steps, const std::atomic<bool>& stop) {
  std::array<cudaEvent_t, 2> ends{};
  for (cudaEvent_t& event : ends) Check(cudaEventCreate(&event), "cudaEventCreate");
  StepTimes times;
  double last = 0;
  steps->Launch();
  Check(cudaEventRecord(ends[0], steps->stream()), "cudaEventRecord");
  for (size_t i = 1; !stop; ++i) {
    steps->Launch();
    cudaEvent_t before = ends[(i - 1) % 2], event = ends[i % 2];
    Check(cudaEventSynchronize(before), "a step");
    const double now = ElapsedUs();
    if (i > 1) {
      times.begin.push_back(last);
      times.end.push_back(now);
      times.us.push_back(now - last);
    }
    last = now;
    Check(cudaEventRecord(event, steps->stream()), "cudaEventRecord");
  }
  Check(cudaStreamSynchronize(steps->stream()), "a step");
  for (cudaEvent_t event : ends) Check(cudaEventDestroy(event), "cudaEventDestroy");
  return times;
}

// Mean of the steps that lie wholly inside of moves, against those that no move touches.
inline void BesideRow(const std::string& id, const StepTimes& steps,
                      const std::vector<Moves::Run>& runs, const Moves& all, double must,
                      bench::Json* rows) {
  std::vector<double> during, alone;
  for (size_t i = 0; i < steps.us.size(); ++i) {
    const double begin = steps.begin[i], end = steps.end[i];
    if (Moves::During(runs, begin, end)) during.push_back(steps.us[i]);
    if (Moves::Beside(all.demotions, begin, end) && Moves::Beside(all.promotions, begin, end)) {
      alone.push_back(steps.us[i]);
    }
  }
  CheckPool(!during.empty() && !alone.empty(), "no steps beside moves");
  const bench::Timing t = bench::TimingOf(during), base = bench::TimingOf(alone);
  std::printf("%-36s %9.1f us  alone %9.1f (medians %.1f, %.1f)  +%.2f %%  %zu and %zu steps\n",
              id.c_str(), t.mean, base.mean, t.median, base.median, (t.mean / base.mean - 1) * 100,
              t.n, base.n);
  std::fflush(stdout);
  rows->push_back(bench::RowOf(id, t));
  rows->back().update({{"value", t.mean},
                       {"median", t.median},
                       {"baseline", {{"name", "no move"}, {"value", base.mean}}},
                       {"ratio", base.mean / t.mean},
                       {"must", must}});
}

// promote_rate: of the daemon, a value of move.promote_rate, which the rows' ids tell; "": its
// default.
template <typename Steps, typename Plan>
void MoveRows(const std::vector<Plan>& decoding, const Plan& moved, const std::string& promote_rate,
              bench::Json* rows) {
  std::vector<std::string> settings = {"pool.device_bytes=32GiB", "pool.host_bytes=4GiB"};
  if (!promote_rate.empty()) settings.push_back("move.promote_rate=" + promote_rate);
  const std::string at = promote_rate.empty() ? "" : "/" + promote_rate;
  PoolDaemon daemon(settings);
  Progress("move: the daemon is ready");
  AttachedSession session(daemon.process.socket());
  Steps other(session.get(), moved, 1, kMovedTokens);
  Progress("move: what is moved is there");
  const Moves idle = MoveToAndFro(daemon, other.sequence());
  RateRow("move/promote/idle" + at, idle.promotions, 45, rows);
  RateRow("move/demote/idle" + at, idle.demotions, 0, rows);
  for (const Plan& plan : decoding) {
    Steps steps(session.get(), plan, 1, kBesideTokens);
    Progress("move: a decode begins");
    std::atomic<bool> stop{false};
    Moves moves;
    std::thread mover([&] {
      moves = MoveToAndFro(daemon, other.sequence());
      stop = true;
    });
    const StepTimes times = RunSteps(&steps, stop);
    mover.join();
    const std::string beside = std::string("/beside/") + plan.name + at;
    RateRow("move/promote" + beside, moves.promotions, 0, rows);
    RateRow("move/demote" + beside, moves.demotions, 0, rows);
    const std::string step = std::string("decode/") + plan.name + "/64K/beside_";
    BesideRow(step + "demotion" + at, times, moves.demotions, moves, 1 / 1.03, rows);
    BesideRow(step + "promotion" + at, times, moves.promotions, moves, 1 / 1.05, rows);
  }
  Progress("move: done");
}

}  // namespace kvstrata::cuda
