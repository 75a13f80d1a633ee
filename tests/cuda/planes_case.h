// SPDX-License-Identifier: Apache-2.0
// A call of op attend_planes on the GPU, and what it is held to (planes_rule.h).
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/placed_runs.h"
#include "tests/cuda/planes_rule.h"

namespace kvstrata::cuda {

class PlanesCase {
 public:
  PlanesCase(const PlanesShape& shape, Rng& rng) : in_(shape, rng), s_(in_.shape()) {
    Place(rng);
    Allocate();
  }

  // N of each sequence, and by how many groups those that seal them lag.
  void SetTokens(const std::vector<int32_t>& tokens, int lag = 0) {
    in_.SetTokens(tokens, lag);
    device_tokens_.Write(in_.tokens());
    device_groups_.Write(in_.groups());
  }
  void AttendInFull(size_t sequence) {
    in_.AttendInFull(sequence);
    device_tokens_.Write(in_.tokens());
  }
  void SetQueries(const std::vector<float>& q) {
    in_.SetQueries(q);
    device_q_.Write(Encoded(q, s_.q_dtype));
  }

  // Lower runs become other numbers.
  void PoisonLower() { lower_->Poison(); }
  // The second sequence has the first one's groups, whatever its own are.
  void ShareBlocks() {
    upper_->Share(work_.planes.block_stride);
    lower_->Share(work_.planes.block_stride);
  }

  AttendPlanesBatch work() const { return work_; }
  void PoisonOutputs() {
    out_.Poison();
    lse_.Poison();
    partial_.Poison();
    fine_.Poison();
    strips_.Poison();
    fetched_.Write(std::vector<uint64_t>(in_.Items(), 0));
    hot_bytes_.Write(std::vector<uint64_t>(in_.Items(), 0));
  }
  int Run(Stream stream = nullptr) {
    PoisonOutputs();
    return kvs_cuda_ops()->attend_planes(work_, stream);
  }
  void Read() {
    got_ = {s_.merges ? out_.Read() : partial_.Read(),
            lse_.Read(),
            fine_.Read(),
            strips_.Read(),
            fetched_.Read(),
            hot_bytes_.Read()};
  }
  const PlanesInputs& inputs() const { return in_; }
  const PlanesOutputs& got() const { return got_; }

  // Reads what a run made and holds it to the rule. Returns the largest error of an output. A logit
  // is off by at most half a unit of fp16's last place of what it is the sum of.
  double ExpectRule(double tolerance = 5e-3, double margin = 0.02) {
    Read();
    PlanesOracle oracle(in_, got_);
    double worst = 0;
    for (size_t item = 0; item < in_.Items(); ++item) {
      const PlanesItemErrors e = oracle.Compare(item, margin);
      worst = std::max(worst, e.output);
      EXPECT_LE(e.output, tolerance) << in_.Name(item) << ": output";
      EXPECT_LE(e.lse, 4e-3 + 0x1p-12 * e.logit) << in_.Name(item) << ": lse";
      EXPECT_TRUE(e.wrong_fine == 0 && e.wrong_strips == 0)
          << in_.Name(item) << ": " << e.wrong_fine << " tokens and " << e.wrong_strips
          << " strips of " << in_.Sealed(item) << " tokens chosen otherwise; the first is token "
          << e.first_wrong << " of weight " << e.weight << " / N, limit " << e.limit << ", start "
          << in_.Start(item) << ", stop " << in_.Stop(item);
    }
    counts_ = oracle.counts();
    return worst;
  }
  const PlanesCounts& counts() const { return counts_; }

  // Bytes that were fetched over those that the rule reads for what was chosen.
  double FetchedOverRule() const {
    double fetched = 0, rule = 0;
    for (size_t item = 0; item < in_.Items(); ++item) {
      const PlanesRows rows{.format = in_.format(), .groups = in_.Sealed(item) / 64};
      fetched += static_cast<double>(got_.fetched[item]);
      rule += static_cast<double>(PlanesBytesRead(rows, &got_.fine[item * in_.Stride()],
                                                  &got_.strips[item * in_.Stride() / 16]));
    }
    return fetched / rule;
  }

  // A host work item of ops `ref`, which decide for themselves.
  AttendPlanesWork HostWork(size_t item, std::vector<const std::byte*>* upper,
                            std::vector<const std::byte*>* lower) const {
    const int32_t groups = in_.Sealed(item) / 64;
    for (int g = 0; g < groups; ++g) {
      upper->push_back(in_.Upper(item, g));
      lower->push_back(in_.Lower(item, g));
    }
    AttendPlanesWork w;
    w.rows = {in_.format(), upper->data(), lower->data(), groups};
    w.rule = s_.rule;
    w.tokens = in_.Tokens(item);
    w.q = &in_.q()[item * s_.group * s_.dim];
    w.group = s_.group;
    w.scale = work_.scale;
    return w;
  }

 private:
  // Groups to blocks at random places.
  void Place(Rng& rng) {
    const int blocks = (s_.groups_max + s_.block_groups - 1) / s_.block_groups;
    std::vector<int> places(static_cast<size_t>(blocks) * s_.batch);
    std::iota(places.begin(), places.end(), 0);
    std::shuffle(places.begin(), places.end(), rng);
    const int rows = s_.hot_in_blocks;
    const int64_t record =
        rows == 0 ? 0 : DevicePlanes::HotRecordBytes(rows, in_.format().row_bytes());
    upper_ = std::make_unique<PlacedRuns>(in_, places, false, false, record);
    lower_ = std::make_unique<PlacedRuns>(in_, places, true, s_.lower_on_host);
    work_.planes.format = in_.format();
    work_.planes.upper = upper_->runs();
    work_.planes.lower = lower_->runs();
    work_.planes.block_stride = blocks;
    work_.planes.block_groups = s_.block_groups;
    work_.planes.kv_heads = s_.kv_heads;
    if (rows == 0) return;
    work_.planes.hot_offset = upper_->runs().offset + s_.kv_heads * upper_->runs().head_stride;
    work_.planes.hot_head_stride = record;
  }

  void Allocate() {
    const size_t rows = in_.Rows();
    device_q_ = DeviceArray<std::byte>(Encoded(in_.q(), s_.q_dtype));
    device_m_ = DeviceArray<float>(in_.raw().m);
    device_l_ = DeviceArray<float>(in_.raw().l);
    device_o_ = DeviceArray<float>(in_.raw().o);
    device_tokens_ = DeviceArray<int32_t>(static_cast<size_t>(s_.batch));
    device_groups_ = DeviceArray<int32_t>(static_cast<size_t>(s_.batch));
    out_ = DeviceArray<float>(rows * s_.dim);
    lse_ = DeviceArray<float>(rows);
    partial_ = DeviceArray<float>(rows * (s_.dim + 2));
    fine_ = DeviceArray<uint8_t>(in_.Items() * in_.Stride());
    strips_ = DeviceArray<uint8_t>(in_.Items() * in_.Stride() / 16);
    fetched_ = DeviceArray<uint64_t>(in_.Items());
    AttendPlanesBatch& w = work_;
    w.rule = s_.rule;
    w.batch = s_.batch;
    w.group = s_.group;
    w.tokens = device_tokens_.get();
    w.groups = device_groups_.get();
    w.q = device_q_.get();
    w.q_dtype = s_.q_dtype;
    w.q_stride = int64_t{s_.kv_heads} * s_.group * s_.dim;
    w.scale = in_.scale();
    w.ahead = s_.ahead;
    w.with = {device_m_.get(), device_l_.get(), device_o_.get(), s_.raw_parts};
    if (s_.merges) w.to = {out_.get(), DType::kF32, lse_.get()};
    float* const o = partial_.get();
    w.partial = {o + rows * s_.dim, o + rows * (s_.dim + 1), o, 1};
    hot_bytes_ = DeviceArray<uint64_t>(in_.Items());
    w.report = {fine_.get(), strips_.get(), static_cast<int64_t>(in_.Stride()), fetched_.get(),
                hot_bytes_.get()};
    counters_ = DeviceArray<uint32_t>(std::vector<uint32_t>(in_.Items()));
    w.counters = counters_.get();
    workspace_ = DeviceArray<std::byte>(
        static_cast<size_t>(kvs_cuda_ops()->attend_planes_workspace_bytes(w)));
    workspace_.Poison();
    w.workspace = workspace_.get();
  }

  PlanesInputs in_;
  const PlanesShape& s_;
  AttendPlanesBatch work_;
  std::unique_ptr<PlacedRuns> upper_, lower_;
  PlanesOutputs got_;
  DeviceArray<std::byte> device_q_, workspace_;
  DeviceArray<uint64_t> fetched_, hot_bytes_;
  DeviceArray<float> device_m_, device_l_, device_o_, out_, lse_, partial_;
  DeviceArray<int32_t> device_tokens_, device_groups_;
  DeviceArray<uint8_t> fine_, strips_;
  DeviceArray<uint32_t> counters_;
  PlanesCounts counts_;
};

}  // namespace kvstrata::cuda
