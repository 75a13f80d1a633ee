// SPDX-License-Identifier: Apache-2.0
// The hot cache of one sequence in a GPU's memory: copies of slices, the keys and values of one
// page, layer and KV head, whose pages lie in the host's memory (ADR 6). Ops rebase and
// promote (ops/promote) write it, op attend_raw reads `entries`. A POD of device addresses; no CUDA
// header.
//
// A row is a (layer, KV head): layer * kv_heads + head. A slot of a layer is as large as a layer of
// a page, and a head's slice lies in it where it lies in the page; heads use slots independently.
// An entry is the address of a page in whose stead the slot is: an op adds the same offsets to it
// as to a page's own address.
#pragma once

#include <cstdint>

namespace kvstrata::cuda {

struct HotPages {
  uint64_t* entries = nullptr;  // [rows][page_stride]; null: no cache, all is attended in place
  uint64_t* pages = nullptr;    // [page_stride], addresses of pages, with kHostPage
  uint64_t slots = 0;           // address of [layers][slot_count][layer of a page]
  int32_t* owners = nullptr;    // [rows][slot_count], 1 + the page whose slice is there; 0: none
  int32_t* stamps = nullptr;    // [rows][slot_count], tokens of the last step that selected it
  int32_t page_stride = 0, slot_count = 0;
};

// Added to the address of a page in the host's memory.
inline constexpr uint64_t kHostPage = 1;
// Slots a row may have.
inline constexpr int32_t kHotSlotsMax = 4096;

}  // namespace kvstrata::cuda
