// SPDX-License-Identifier: Apache-2.0
// What selectors keep choosing stays: when a sequence closes, its pages get credits that eviction
// takes from them before it takes them (PrefixIndex::Spare), one for each quarter, of all
// selections of its steps, that fell on the page or behind it. So of a prefix nothing goes before
// what lies behind it, which would be of no use without it, and a tail that nobody selected goes
// like any other page. Plans without a selector count no selections.
#include <algorithm>
#include <vector>

#include "server/store/books/sequence.h"
#include "server/store/sequences/sequences.h"

namespace kvstrata {
namespace {

constexpr uint64_t kMostCredits = 3;

}  // namespace

void Sequences::NoteSelected(const Session& session, const Sequence& s) {
  std::vector<uint64_t> behind(s.pages.size() + 1);  // selections of page i and those behind it
  for (size_t i = s.pages.size(); i-- > 0;) {
    behind[i] =
        behind[i + 1] + session.memory->ReadCount(s.access_counters, static_cast<uint32_t>(i));
  }
  if (behind.front() == 0) return;
  const auto give = [&behind](Page* page, size_t i) {
    const uint64_t quarters = 4 * behind[i] / behind.front();
    const auto credits = static_cast<uint8_t>(std::min(kMostCredits, quarters));
    page->credits = std::max(page->credits, credits);
  };
  for (size_t i = 0; i < s.pages.size(); ++i) {
    if (s.pages[i] != nullptr && s.pages[i]->sealed) give(s.pages[i], i);
  }
  if (!s.SharesIndex()) return;
  const size_t block_pages = static_cast<size_t>(s.index.block_tokens) / s.page_tokens();
  for (size_t i = 0; i < s.index_blocks.size(); ++i) {
    const size_t first = i * block_pages;
    if (s.index_blocks[i]->sealed && first < s.pages.size()) give(s.index_blocks[i], first);
  }
}

}  // namespace kvstrata
