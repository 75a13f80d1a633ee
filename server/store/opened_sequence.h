// What an open of a sequence asks for, and what it answers. Plain values.
#ifndef KVSTRATA_SERVER_STORE_OPENED_SEQUENCE_H_
#define KVSTRATA_SERVER_STORE_OPENED_SEQUENCE_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "base/status.h"
#include "kernels/page_view.h"
#include "kernels/plan.h"
#include "server/store/hold_limits.h"

namespace kvstrata {

struct OpenedSequence {
  uint64_t sequence = 0;
  uint32_t slot = 0;
  uint32_t held_tokens = 0;
  uint32_t indexed_tokens = 0;
  uint32_t surprisal_tokens = 0;  // leading ones whose surprisal was stored with held pages
  uint32_t bounded_tokens = 0;    // leading ones of which it is known whether they end a sentence
  Plan plan;
  Geometry geometry;
  std::vector<int32_t> boundary_tokens;  // of the model
  std::vector<uint8_t> boundary;         // sentence ends of leading tokens, stored with held pages
  bool imported = false;                 // import_job.h
};

struct OpenOptions {
  HoldLimits hold;
  // Pages and index blocks for so many tokens, the prompt's among them, are taken at open, or it is
  // refused. 0, or fewer than the prompt has: those for the prompt.
  uint32_t reserve_tokens = 0;
};

using OpenDone = std::function<void(const Result<OpenedSequence>&)>;

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_OPENED_SEQUENCE_H_
