// SPDX-License-Identifier: Apache-2.0
// StepWorks: attention of one layer, from tiles (step_tiles.h) to outputs: which member's rows each
// work item reads, with which queries, and where its partial lies until it is merged.
//
// A prefill chunk over a long history goes in several rounds, so that partials take 32 MiB of
// outputs at most.
//
// Ownership: borrows the backend and the executor. Threads: one call at a time. Cost: memory is
// kept from layer to layer.
#pragma once

#include <span>
#include <vector>

#include "kernels/rows/attend_works.h"
#include "kernels/step/step_tiles.h"

namespace kvstrata {

// A layer's tensors, packed as a batch: fp32, the heads of a token side by side.
struct LayerTensors {
  int layer = 0;
  const float* q = nullptr;
  int64_t q_token = 0;  // floats from a token to the next
  float* out = nullptr;
  int64_t out_token = 0;
  float* lse = nullptr;  // [tokens][query_heads], or null
  int32_t query_heads = 0;
  ReadCost* reads = nullptr;  // by member: what ops decided to read is added
};

class StepWorks {
 public:
  StepWorks(const Backend& backend, Executor& executor) : backend_(backend), executor_(executor) {}

  // first_row: of each member in the packed batch.
  void Attend(const StepTiles& tiles, std::span<const int32_t> first_row, const LayerTensors& t);

 private:
  void RunTiles(const StepTiles& tiles, std::span<const Tile> round,
                std::span<const int32_t> first_row, const LayerTensors& t);
  void AddSlices(const StepTiles& tiles, const Tile& tile, QueryTile* next);
  void AddLevels(const StepTiles& tiles, const Tile& tile, QueryTile* next);
  void AddMerge(const Tile& tile, const QueryTile& first, int64_t token, const LayerTensors& t);

  const Backend& backend_;
  Executor& executor_;
  AttendWorks works_;
  std::vector<float> partial_m_, partial_l_, partial_o_;  // [rows], [rows], [rows][head_dim]
};

}  // namespace kvstrata
