// SPDX-License-Identifier: Apache-2.0
#include "server/store/prompts/held_prefix.h"

#include <algorithm>

#include "kernels/codec/codec.h"
#include "server/store/books/sequence.h"
#include "server/store/pages/artefacts.h"

namespace kvstrata {
namespace {

using Kind = PrefixView::Kind;

HeldIn FindIn(PrefixView* view, Kind kind, size_t i, bool redundant) {
  const HeldIn memory = view->InMemory(kind, i);
  if (memory != HeldIn::kNothing) return memory;
  if (redundant) return HeldIn::kArtefact;
  return view->InTier(kind, i) ? HeldIn::kTier : HeldIn::kNothing;
}

}  // namespace

PromptKeys KeysOf(const KeyChain& chain, uint32_t page_tokens, const Plan& plan,
                  const std::string* parameters, std::span<const int32_t> tokens) {
  PromptKeys keys;
  keys.pages = chain.Pages(PageKey{}, tokens);
  if (parameters != nullptr) {
    const PageKey last = keys.pages.empty() ? PageKey{} : keys.pages.back();
    keys.artefact = Artefacts::KeyOf(chain, last, tokens.subspan(keys.pages.size() * page_tokens),
                                     FormatPlan(plan), *parameters);
  }
  keys.pages.resize(UsablePages(tokens.size(), page_tokens, &plan));
  return keys;
}

PrefixShape::PrefixShape(size_t pages_, uint32_t page_tokens, const IndexLayout& index)
    : pages(pages_), indexed(index.kind != IndexLayout::Kind::kNone) {
  const auto block_tokens = static_cast<uint32_t>(index.block_tokens);
  if (indexed && block_tokens % page_tokens == 0) block_pages = block_tokens / page_tokens;
}

HeldPrefix FindHeld(const PrefixShape& shape, const std::vector<bool>& redundant,
                    PrefixView* view) {
  HeldPrefix held;
  size_t rows_end = 0;  // pages up to here have a gap
  held.pages.reserve(shape.pages);
  for (size_t i = 0; i < shape.pages; ++i) {
    const HeldIn where = FindIn(view, Kind::kPage, i, !redundant.empty() && redundant[i]);
    if (where == HeldIn::kNothing) break;
    if (where == HeldIn::kArtefact) rows_end = i + 1;
    held.pages.push_back(where);
  }
  const size_t most = shape.block_pages == 0 ? 0 : held.pages.size() / shape.block_pages;
  while (held.blocks < most &&
         FindIn(view, Kind::kIndexBlock, held.blocks, false) != HeldIn::kNothing) {
    ++held.blocks;
  }
  held.whole = rows_end == 0;
  if (held.whole) return held;
  const bool indexed = !shape.indexed || held.blocks * shape.block_pages >= rows_end;
  if (held.pages.size() == shape.pages && indexed) return held;
  return FindHeld(shape, {}, view);
}

// Where units are read whole, the last may not reach beyond what the sequence holds.
std::vector<bool> RedundantPages(const Plan& plan, const std::optional<RawFree>& artefact,
                                 size_t pages, uint32_t page_tokens) {
  if (!artefact) return {};
  const auto page = static_cast<int32_t>(page_tokens);
  const int32_t held = static_cast<int32_t>(pages) * page;
  if (CodecOf(plan).whole_units && artefact->end > held) return {};
  std::vector<bool> redundant(pages);
  for (const Run& run : artefact->released) {
    const int32_t last = std::min(run.end, held) / page;
    for (int32_t i = (run.begin + page - 1) / page; i < last; ++i) {
      redundant[static_cast<size_t>(i)] = true;
    }
  }
  return redundant;
}

}  // namespace kvstrata
