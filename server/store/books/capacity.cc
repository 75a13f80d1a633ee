// SPDX-License-Identifier: Apache-2.0
#include "server/store/books/capacity.h"

#include <algorithm>

#include "server/store/books/sequence.h"

namespace kvstrata {
namespace {}  // namespace

TokenFit::TokenFit(const Sequence& s)
    : page_tokens_(s.page_tokens()),
      page_bytes_(
          RoundUp(static_cast<uint64_t>(s.model->desc.geometry.page_bytes()), kMemoryGranularity)) {
  if (s.index.kind == IndexLayout::Kind::kNone) return;
  block_tokens_ = static_cast<uint64_t>(s.index.block_tokens);
  block_bytes_ = RoundUp(static_cast<uint64_t>(s.index.block_bytes), kMemoryGranularity);
}

uint64_t TokenFit::PagesFor(uint64_t blocks) const {
  if (block_bytes_ >= page_bytes_) return blocks * RoundUp(block_bytes_, page_bytes_) / page_bytes_;
  const uint64_t in_page = page_bytes_ / block_bytes_;
  return RoundUp(blocks, in_page) / in_page;
}

uint64_t TokenFit::Tokens(const Slots& slots, uint64_t had_pages, uint64_t had_blocks) const {
  const auto fits = [&](uint64_t more) {
    if (block_tokens_ == 0) return more <= slots.pages;
    const uint64_t all = RoundUp((had_pages + more) * page_tokens_, block_tokens_) / block_tokens_;
    const uint64_t blocks = all - std::min(all, had_blocks);
    return blocks <= slots.blocks && more + PagesFor(blocks) <= slots.pages;
  };
  uint64_t least = 0, most = slots.pages;
  while (least < most) {
    const uint64_t middle = most - (most - least) / 2;
    if (fits(middle)) {
      least = middle;
    } else {
      most = middle - 1;
    }
  }
  return (had_pages + least) * page_tokens_;
}

}  // namespace kvstrata
