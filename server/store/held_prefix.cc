#include "server/store/held_prefix.h"

#include <algorithm>

#include "server/store/artefacts.h"
#include "server/store/sequence.h"

namespace kvstrata {

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

HeldPrefix FindHeld(const PrefixShape& shape, const std::vector<bool>& superfluous,
                    PrefixView* view) {
  HeldPrefix held;
  size_t rows_end = 0;  // pages up to here have a gap
  for (; held.pages < shape.pages; ++held.pages) {
    const bool may_miss = !superfluous.empty() && superfluous[held.pages];
    if (view->HasPage(held.pages, may_miss)) continue;
    if (!may_miss) break;
    rows_end = held.pages + 1;
  }
  if (shape.block_pages != 0) {
    const size_t most = held.pages / shape.block_pages;
    while (held.blocks < most && view->HasBlock(held.blocks)) ++held.blocks;
  }
  held.whole = rows_end == 0;
  if (held.whole) return held;
  const bool indexed = !shape.indexed || held.blocks * shape.block_pages >= rows_end;
  if (held.pages == shape.pages && indexed) return held;
  return FindHeld(shape, {}, view);
}

// A packed segment may reach beyond what the sequence holds, a span may not be cut.
std::vector<bool> SuperfluousPages(const Plan& plan, const RawFree& artefact, size_t pages,
                                   uint32_t page_tokens) {
  const auto page = static_cast<int32_t>(page_tokens);
  const int32_t held = static_cast<int32_t>(pages) * page;
  if (plan.codec != CodecKind::kPacked && artefact.end > held) return {};
  std::vector<bool> superfluous(pages);
  for (const Run& run : artefact.released) {
    const int32_t last = std::min(run.end, held) / page;
    for (int32_t i = (run.begin + page - 1) / page; i < last; ++i) {
      superfluous[static_cast<size_t>(i)] = true;
    }
  }
  return superfluous;
}

}  // namespace kvstrata
