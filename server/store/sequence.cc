// SPDX-License-Identifier: Apache-2.0
#include "server/store/sequence.h"

#include <string>

namespace kvstrata {

bool Writable(const Sequence& s, const Page* page) {
  const uint64_t writer = s.imported ? kDaemon : s.session;
  return page != nullptr && !page->sealed && page->refs == 1 && page->arena->writer == writer;
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
