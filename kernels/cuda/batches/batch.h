// SPDX-License-Identifier: Apache-2.0
// What every CUDA op takes: where the rows of a batch lie and which of them are attended. PODs of
// device addresses; no CUDA header, so that callers of the table (cuda_ops.h) need none either.
//
// Everything that changes from step to step (lengths, page addresses, selections, their counts) is
// read on the device; everything here is fixed when a graph is captured. Launch shapes depend on
// these fields alone, so one captured graph serves every step of a batch.
//
// Rows are counted in positions of a sequence; position t of sequence b lies in page
// pages[b * page_stride + t / page_tokens]. [x] on a pointer is its shape.
#pragma once

#include <cstdint>

#include "kernels/cuda/batches/hot_pages.h"
#include "kernels/pages/dtype.h"

namespace kvstrata::cuda {

using Stream = void*;  // cudaStream_t

// Keys and values of one layer of a batch, on pages. Addresses may be of another GPU, or of host
// memory registered with CUDA: kernels do not ask.
struct PagedLayer {
  const uint64_t* pages = nullptr;  // device [batch][page_stride], addresses of pages
  int32_t page_stride = 0;          // pages a sequence may have
  int32_t page_tokens = 16;         // 16, 32 or 64
  int32_t kv_heads = 0, head_dim = 0;
  DType dtype = DType::kBF16;  // kBF16 or kF16
  int64_t key_offset = 0;      // bytes from a page's start to this layer's keys
  int64_t value_offset = 0;    // the same to its values
  int64_t head_stride = 0;     // bytes from a KV head to the next
  int64_t slot_stride = 0;     // bytes from a token to the next, a multiple of 16
  // device [batch], of ops attend_raw and promote: a KV head of a sequence with `entries` finds its
  // pages there, in row hot_row + head, and not in `pages`. Null: none has.
  const HotPages* hot = nullptr;
  int32_t hot_row = 0;  // layer * kv_heads
};

// What the queries of a sequence attend, in order of position: positions [0, sink_end), the units
// of its list, positions [recent_begin, tokens). Lists are ascending and lie between the two.
//   unit_tokens 1: a list of tokens; 16, 32, ...: of pages; 0: no list, sink_end = recent_begin
struct DeviceSelection {
  int32_t unit_tokens = 0;
  int32_t groups = 1;                     // lists a sequence: 1, shared by heads, or kv_heads
  int32_t list_stride = 0;                // entries a list may have
  const int32_t* units = nullptr;         // device [batch][groups][list_stride]
  const int32_t* counts = nullptr;        // device [batch][groups]
  const int32_t* sink_end = nullptr;      // device [batch]
  const int32_t* recent_begin = nullptr;  // device [batch]
  const uint64_t* lists = nullptr;        // device [batch][groups], addresses of lists; null: units
  bool shared = false;                    // all sequences of the batch have that of the first
};

}  // namespace kvstrata::cuda
