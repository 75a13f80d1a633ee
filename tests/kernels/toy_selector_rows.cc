// SPDX-License-Identifier: Apache-2.0
// The tables of selectors with the toy in the place of `window`, whose plan's text and options it
// borrows: instead of selector_rows.cc and cuda_selector_rows.cc. One row in each is the toy's.
#include <algorithm>
#include <array>

#include "kernels/step/gpu/frame/cuda_selector_rows.h"
#include "tests/kernels/every_nth_page.h"

namespace kvstrata {
namespace {

template <typename Row, size_t kCount>
constexpr std::array<const Row*, kCount> WithToy(const Row* const (&rows)[kCount], const Row& toy) {
  std::array<const Row*, kCount> all;
  std::ranges::copy(rows, all.begin());
  all[static_cast<size_t>(SelectorKind::kWindow)] = &toy;
  return all;
}

constexpr SelectorRow kRow = FixedRow<kEveryNthPage>();
constexpr CudaSelectorRow kCudaRow = {kOverRaw, "", ServesAll, MakeCudaFixed<kEveryNthPage>};
constexpr auto kRows = WithToy(kSelectorRows, kRow);
constexpr auto kCudaRows = WithToy(kCudaSelectorRows, kCudaRow);

}  // namespace

std::span<const SelectorRow* const> SelectorRows() { return kRows; }
std::span<const CudaSelectorRow* const> CudaSelectorRows() { return kCudaRows; }

}  // namespace kvstrata
