// SPDX-License-Identifier: Apache-2.0
#include "server/store/books/sequence.h"

namespace kvstrata {

bool Writable(const Sequence& s, const Page* page) {
  const uint64_t writer = s.imported ? kDaemon : s.session;
  return page != nullptr && !page->sealed && page->refs == 1 && page->arena->writer == writer;
}

std::vector<size_t> ReleasedPages(const Sequence& s) {
  const size_t page = s.page_tokens();
  std::vector<size_t> positions;
  for (const Run& run : s.codec->released) {
    const size_t end = std::min<size_t>(static_cast<size_t>(run.end), s.summarised_tokens()) / page;
    for (size_t i = (static_cast<size_t>(run.begin) + page - 1) / page; i < end; ++i) {
      if (s.pages[i] != nullptr && s.pages[i]->sealed) positions.push_back(i);
    }
  }
  return positions;
}

void MakePrivate(Sequence* s) {
  if (!s->chain.is_private()) s->chain = s->chain.Private();
}

Status CheckOwned(const Sequence& s) {
  if (!s.imported) return OkStatus();
  return FailedPrecondition("SEQUENCE_IMPORTED",
                            "sequence " + std::to_string(s.id) +
                                " is imported: the daemon fills its pages from the tensors that "
                                "this session registered; seal blocks, and run steps on a sequence "
                                "of another session");
}

}  // namespace kvstrata
