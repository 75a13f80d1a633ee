// SPDX-License-Identifier: Apache-2.0
// Op cascade: one list of pages for all layers and heads of a sequence, from key-key affinity
// (docs/spec/chess.md 2 to 4), as kernels/plans/chess/affinity.h and cascade.cc choose them.
//
// The anchor is the mean page vector of the recent window; every page, chunk and grid is scored
// against it; the best grids, of their chunks the best, of their pages the best are kept,
// ascending. Vectors are all layers and heads in one, means as op summarize writes them; those of
// units that are still filling are made here and thrown away. Equal scores keep the lower index,
// NaN ranks below everything.
//
// A selection sees a sequence as it was at `tokens`, whatever was appended since; the rows of all
// units that were complete then must be written. The same input gives the same list, alone or in
// any batch.
#pragma once

#include <array>
#include <vector>

#include "kernels/cuda/batches/device_rows.h"

namespace kvstrata::cuda {

struct CascadeBatch {
  DeviceRows keys;               // keys of the first layer
  int64_t key_layer_stride = 0;  // bytes, a multiple of 16
  // Means of pages, chunks, grids, bf16, from the first layer on; the layers of a block lie one
  // behind the other, so that head h of layer l is head l * kv_heads + h.
  DeviceRows levels[3];
  int32_t layers = 0;
  int32_t page_tokens = 0, pages_per_chunk = 0, chunks_per_grid = 0;
  int32_t sinks = 0, window = 0;    // pages: never candidates
  double rho[3] = {};               // shares that are kept: of grids, of chunks, of pages
  const int32_t* tokens = nullptr;  // device [batch], 1 or more; below 0: nothing is selected, and
                                    // what is there stays
  int32_t batch = 0;
  int32_t pages_max = 0;      // complete pages a sequence may have: fixes the launch shape
  void* scratch = nullptr;    // device, batch * CascadeScratchBytes, 16-byte aligned, any content
  int32_t* units = nullptr;   // device [batch][list_stride], written: pages, ascending
  int32_t* counts = nullptr;  // device [batch], written
  int32_t list_stride = 0;    // at least pages_max
};

// Scores of a sequence's pages, chunks and grids, filling chunk and grid included.
using CascadeScores = std::array<std::vector<float>, 3>;

// The truth, products in double; all of the batch's memory is the host's. The first half scores,
// the second keeps and lists by the scores of each sequence; scratch is not used.
std::vector<CascadeScores> ScoreCascadeRef(const CascadeBatch& work);
void KeepCascadeRef(const CascadeBatch& work, const std::vector<CascadeScores>& scores);

}  // namespace kvstrata::cuda
