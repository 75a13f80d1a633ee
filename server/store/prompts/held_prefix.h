// SPDX-License-Identifier: Apache-2.0
// FindHeld: how much of a prompt is held, and where. The one rule of that: a look-up asks it what
// an open would answer, a pin what it keeps, and an open whether its prompt's artefact is worth
// reading, what else to read from the tier below, what to copy from another device, and at last
// what to answer. Afterwards an open may answer less (OpeningEnds::LimitHit), and so may a lease
// (Leases). Chunks of engines have a rule of their own (ChunkLeases::Ask).
//
// The rule: a page is held where memory has it, else in the tier below; of the plan's shared index
// the leading blocks that end with held pages are. The prefix ends at the first page that neither
// has. A page that the prompt's artefact makes redundant is not fetched from the tier, and may be
// missing, as long as nothing else is: then all other pages of the prompt must be there, and the
// index up to the end of the last one that is missing, or the artefact is of no use and the prompt
// is held as far as its pages go.
//
// Thread-safety: none, values. Errors: none. Cost: a question or two a page to the view; a byte a
// page.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/plan/plan.h"
#include "server/store/options/session_types.h"
#include "server/store/pages/prefix_key.h"
#include "server/store/reports/value_info.h"

namespace kvstrata {

// The keys of what a prompt may be held for.
struct PromptKeys {
  std::vector<PageKey> pages;  // as many as UsablePages says
  PageKey artefact{};          // for all of its tokens; zeros: the plan has no codec
};
// `parameters`: the digest of those that the plan names; null: it has no codec. Hashes all tokens.
PromptKeys KeysOf(const KeyChain& chain, uint32_t page_tokens, const Plan& plan,
                  const std::string* parameters, std::span<const int32_t> tokens);

// What of a prompt can be held at all.
struct PrefixShape {
  PrefixShape(size_t pages, uint32_t page_tokens, const IndexLayout& index);

  size_t pages = 0;
  size_t block_pages = 0;  // pages of an index block that prompts share; 0: they share none
  bool indexed = false;    // the plan has an index
};

// Where a page is held. kArtefact: in no place of its own, its rows are what the prompt's artefact
// holds.
enum class HeldIn : uint8_t { kNothing, kDevice, kHost, kTier, kArtefact };
inline HeldIn InMemoryOf(Tier tier) {
  return tier == Tier::kDevice ? HeldIn::kDevice : HeldIn::kHost;
}

// What is there of a prompt, as somebody sees it. May be asked for a page or block again; asks for
// them begin at the first and leave none out.
class PrefixView {
 public:
  enum class Kind : uint8_t { kPage, kIndexBlock };
  virtual ~PrefixView() = default;
  // kDevice, kHost or kNothing.
  virtual HeldIn InMemory(Kind kind, size_t i) = 0;
  // Asked of what is not in memory.
  virtual bool InTier(Kind kind, size_t i) = 0;
};

struct HeldPrefix {
  std::vector<HeldIn> pages;  // where the leading ones are that are held
  size_t blocks = 0;
  bool whole = true;  // no page of it is kArtefact
};

// `redundant`: by page; empty: none is.
HeldPrefix FindHeld(const PrefixShape& shape, const std::vector<bool>& redundant, PrefixView* view);

// An artefact that a plan without raw rows can open on.
struct RawFree {
  std::vector<Run> released;  // tokens that need no raw rows
  int32_t end = 0;            // where its last extent ends
  Tier where = Tier::kDevice;
};

// Which of the first `pages` of its prompt are redundant. Empty: none is, or there is no
// artefact.
std::vector<bool> RedundantPages(const Plan& plan, const std::optional<RawFree>& artefact,
                                 size_t pages, uint32_t page_tokens);

}  // namespace kvstrata
