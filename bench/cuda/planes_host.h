// SPDX-License-Identifier: Apache-2.0
// A row of planes_bench: op attend_planes with lower runs in page-locked memory of the host, beside
// the same with all of it on the GPU. Queries drift as those of a decode do: they go around a
// circle in steps of which each leaves nine of ten fine tokens fine, so that every step has rows
// that no copy of the hot cache has. Timed as replays of CUDA graphs, one a step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <numbers>
#include <random>
#include <string>
#include <vector>

#include "bench/cuda/replay_timing.h"
#include "kernels/cuda/cuda_ops.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/page_locked_bytes.h"

namespace kvstrata::cuda {

// What all ways to read a cache have in common; one sequence.
struct PlanesOnGpu {
  std::function<AttendPlanesBatch(int layer)> planes;  // with report.fine
  int layers = 0, tokens = 0;
  uint64_t lower = 0, lower_bytes = 0;  // where lower runs lie
  std::vector<uint64_t> lower_table;
};

class PlanesOnHost {
 public:
  static constexpr int kHot = 8;  // rows of a group

  // factor: of queries that are random normal.
  PlanesOnHost(PlanesOnGpu on_gpu, float factor) : gpu_(std::move(on_gpu)) {
    CopyLowerRuns();
    MakeHotCache();
    FindSteps(factor);
  }

  void Time(const std::string& name, nlohmann::ordered_json* rows) {
    const double on_gpu = TimeSteps(false, false), uncached = TimeSteps(true, false);
    const double cold = TimeCold(), warm = TimeSteps(true, true);
    const auto [fetched, hot] = BytesOfALap();
    const double missed = fetched - hot;
    std::printf(
        "%-19s fine %5.2f %% stay %4.1f %% in %d steps | on the GPU %7.1f us | host: warm "
        "%7.1f us %.2f, cold %7.1f us %.2f, no cache %7.1f us %.2f | missed %.1f %% of fine "
        "bytes, %.0f KB a layer\n",
        name.c_str(), 100 * fine_, 100 * stay_, steps(), on_gpu, warm, on_gpu / warm, cold,
        on_gpu / cold, uncached, on_gpu / uncached, 100 * missed / fetched, missed / 1024);
    std::fflush(stdout);
    rows->push_back({{"id", "planes/" + name},
                     {"value", warm},
                     {"unit", "us"},
                     {"cold", cold},
                     {"no_cache", uncached},
                     {"fine", fine_},
                     {"stay", stay_},
                     {"missed", missed / fetched},
                     {"missed_bytes", missed},
                     {"hot_bytes_a_token", hot_bytes_a_token_},
                     {"n", kLaps * steps() / 2},
                     {"layers", gpu_.layers},
                     {"better", "smaller"},
                     {"ratio", on_gpu / warm},
                     {"must", 0.7},
                     {"baseline", {{"name", "lower planes on the GPU"}, {"value", on_gpu}}}});
  }

 private:
  static constexpr int kLaps = 3;
  static constexpr double kStay = 0.9;

  int steps() const { return static_cast<int>(queries_.size()); }

  void CopyLowerRuns() {
    lower_ = NewPageLocked(gpu_.lower_bytes);
    Check(cudaMemcpy(lower_.get(), reinterpret_cast<const void*>(gpu_.lower), gpu_.lower_bytes,
                     cudaMemcpyDeviceToHost),
          "lower runs to the host");
    std::vector<uint64_t> table = gpu_.lower_table;
    for (uint64_t& at : table) at += reinterpret_cast<uint64_t>(lower_.get()) - gpu_.lower;
    table_ = DeviceArray<uint64_t>(table);
  }

  void MakeHotCache() {
    const AttendPlanesBatch w = gpu_.planes(0);
    const int groups = w.planes.block_stride * w.planes.block_groups;
    const auto rows = static_cast<size_t>(gpu_.layers) * w.planes.kv_heads * groups * kHot;
    tags_ = DeviceArray<uint8_t>(rows);
    copies_ = DeviceArray<std::byte>(rows * static_cast<size_t>(w.planes.format.row_bytes()));
    sequence_ = DeviceArray<HotSequence>(
        std::vector<HotSequence>{{tags_.address(), copies_.address(), groups}});
    hot_bytes_ = DeviceArray<uint64_t>(static_cast<size_t>(w.planes.kv_heads));
    hot_bytes_a_token_ = static_cast<double>(tags_.size() + copies_.size()) /
                         (static_cast<double>(gpu_.layers) * w.planes.kv_heads * gpu_.tokens);
    ForgetCopies(nullptr);
  }
  int ForgetCopies(Stream stream) const {
    return cudaMemsetAsync(tags_.get(), 0, tags_.size(), static_cast<cudaStream_t>(stream));
  }

  AttendPlanesBatch Batch(int layer, int step, bool on_host, bool hot) const {
    AttendPlanesBatch w = gpu_.planes(layer);
    w.report = {};
    w.q = queries_[static_cast<size_t>(step)].get();
    w.q_dtype = DType::kBF16;
    if (on_host) w.planes.lower.blocks = table_.get();
    if (hot) w.hot = {sequence_.get(), kHot, layer * w.planes.kv_heads};
    return w;
  }
  int Enqueue(int step, bool on_host, bool hot, Stream stream) const {
    for (int layer = 0; layer < gpu_.layers; ++layer) {
      const int error = kvs_cuda_ops()->attend_planes(Batch(layer, step, on_host, hot), stream);
      if (error != 0) return error;
    }
    return 0;
  }

  // The least number of steps around the circle that leaves enough of what is fine.
  void FindSteps(float factor) {
    const AttendPlanesBatch w = gpu_.planes(0);
    const auto size = static_cast<size_t>(w.q_stride);
    std::mt19937 rng(std::random_device{}());
    std::normal_distribution<float> normal;
    std::vector<float> a(size), b(size);
    for (float& x : a) x = normal(rng);
    for (float& x : b) x = normal(rng);
    for (int count = 16; count <= 512; count *= 2) {
      queries_.clear();
      for (int step = 0; step < count; ++step) {
        const auto angle = static_cast<float>(2 * std::numbers::pi * step / count);
        std::vector<BF16> q;
        for (size_t i = 0; i < size; ++i) {
          q.push_back(FromFloat<BF16>(factor * (std::cos(angle) * a[i] + std::sin(angle) * b[i])));
        }
        queries_.emplace_back(q);
      }
      MeasureDrift();
      if (stay_ >= kStay) return;
    }
  }
  // How much is fine in the first steps, and how much of that is in the next step.
  void MeasureDrift() {
    constexpr int kSteps = 5;
    double stays = 0, of = 0, all = 0;
    std::vector<uint8_t> before;
    for (int step = 0; step < kSteps; ++step) {
      const std::vector<uint8_t> now = FineOf(step);
      for (size_t i = 0; i < before.size(); ++i) {
        of += before[i] == 1;
        stays += before[i] == 1 && now[i] == 1;
      }
      if (step == 0) all = static_cast<double>(now.size()) * (kSteps - 1);
      before = now;
    }
    stay_ = stays / of;
    fine_ = of / all;
  }
  std::vector<uint8_t> FineOf(int step) const {
    AttendPlanesBatch w = Batch(0, step, false, false);
    const PlanesReport report = gpu_.planes(0).report;
    w.report.fine = report.fine;
    w.report.stride = report.stride;
    Check(kvs_cuda_ops()->attend_planes(w, nullptr), "attend_planes");
    std::vector<uint8_t> fine(static_cast<size_t>(report.stride * w.planes.kv_heads));
    Check(cudaMemcpy(fine.data(), report.fine, fine.size(), cudaMemcpyDeviceToHost), "flags");
    return fine;
  }

  // A layer, once around.
  double TimeSteps(bool on_host, bool hot) {
    std::vector<std::unique_ptr<CapturedGraph>> graphs;
    std::vector<CapturedGraph*> lap;
    for (int step = 0; step < steps(); ++step) {
      graphs.push_back(std::make_unique<CapturedGraph>(
          [&](Stream stream) { return Enqueue(step, on_host, hot, stream); }));
      lap.push_back(graphs.back().get());
      lap.back()->Replay();
    }
    return TimeReplays(lap, gpu_.layers, kLaps * steps() / 2).median;
  }
  double TimeCold() {
    CapturedGraph graph([&](Stream stream) {
      const int error = ForgetCopies(stream);
      return error != 0 ? error : Enqueue(0, true, true, stream);
    });
    return TimeReplays(std::vector<CapturedGraph*>{&graph}, gpu_.layers, 20).median;
  }
  // What lower rows layer 0 fetches in a step, and what of it copies have. Warm.
  std::pair<double, double> BytesOfALap() {
    const std::vector<uint64_t> zeros(hot_bytes_.size(), 0);
    hot_bytes_.Write(zeros);
    uint64_t fine = 0;
    for (int step = 0; step < steps(); ++step) {
      AttendPlanesBatch w = Batch(0, step, true, true);
      w.report.hot = hot_bytes_.get();
      Check(kvs_cuda_ops()->attend_planes(w, nullptr), "attend_planes");
      const std::vector<uint8_t> flags = FineOf(step);
      fine += static_cast<uint64_t>(std::ranges::count(flags, uint8_t{1}));
    }
    uint64_t hot = 0;
    for (const uint64_t bytes : hot_bytes_.Read()) hot += bytes;
    fine *= static_cast<uint64_t>(gpu_.planes(0).planes.format.row_bytes());
    return {static_cast<double>(fine) / steps(), static_cast<double>(hot) / steps()};
  }

  const PlanesOnGpu gpu_;
  std::shared_ptr<std::byte[]> lower_;
  DeviceArray<uint64_t> table_, hot_bytes_;
  DeviceArray<uint8_t> tags_;
  DeviceArray<std::byte> copies_;
  DeviceArray<HotSequence> sequence_;
  std::vector<DeviceArray<BF16>> queries_;  // a lap's
  double fine_ = 0, stay_ = 0, hot_bytes_a_token_ = 0;
};

}  // namespace kvstrata::cuda
