// SPDX-License-Identifier: Apache-2.0
// Decode steps of a batch (step_twins.h) by one captured graph.
#pragma once

#include "tests/cuda/captured_graph.h"
#include "tests/cuda/step_twins.h"

namespace kvstrata::cuda {

// Decodes by one graph, captured once and again when it is stale.
class Replays {
 public:
  explicit Replays(Twins& twins)
      : twins_(twins), n_(twins.Each(1)), tensors_(twins.NewTensors(Batch(), {})) {}

  void Step() {
    for (Tensors& t : tensors_) t.Draw(twins_.rng);
    kvstrata::Step host(twins_.HostMembers(n_), RefBackend(), InlineExecutor());
    const auto device = twins_.Begin(n_);
    ASSERT_NE(device, nullptr);
    if (graph_ == nullptr || !device->Replay().ok()) Capture(*device);
    graph_->Launch();
    const Status replayed = device->Replay();
    ASSERT_TRUE(replayed.ok()) << replayed.ToString();
    const int last = twins_.geometry.layers - 1;
    for (int layer = 0; layer <= last; ++layer) {
      twins_.RunHost(host, layer, tensors_[static_cast<size_t>(layer)]);
    }
    std::vector<bool> equal;
    for (int i = 0; i < Batch(); ++i) {
      equal.push_back(twins_.CompareSelections(host, *device, last, i));
    }
    ASSERT_NO_FATAL_FAILURE(twins_.CompareOutputs(n_, equal, tensors_.back(), Tier::kDevice));
    ASSERT_TRUE(device->End(twins_.stream.get()).ok());
    host.End();
    ASSERT_NO_FATAL_FAILURE(twins_.ReportBoundaries());
  }

  int captures = 0, refused = 0;

 private:
  int32_t Batch() const { return static_cast<int32_t>(n_.size()); }
  void Capture(CudaStep& device) {
    refused += device.Replay().ok() ? 0 : 1;
    graph_ = std::make_unique<CapturedGraph>(twins_.stream.get(), [&](cudaStream_t) {
      for (int layer = 0; layer < twins_.geometry.layers; ++layer) {
        Twins::Enqueue(device, layer, tensors_[static_cast<size_t>(layer)], Tier::kDevice);
      }
      return 0;
    });
    ++captures;
  }

  Twins& twins_;
  const std::vector<int32_t> n_;
  std::vector<Tensors> tensors_;
  std::unique_ptr<CapturedGraph> graph_;
};

}  // namespace kvstrata::cuda
