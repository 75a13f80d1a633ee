// SPDX-License-Identifier: Apache-2.0
// Notice: what the status of a sequence can say (docs/plans.md, "Status"). A plan that does not do
// what it is there for says which input it lacks, or which option holds it back, and what it does
// instead. Selectors and SequenceState make their texts here and nowhere else, so that the list in
// the documents is complete; what codecs lose for max_loss they say themselves, with what they
// measured.
//
// Threads: constant tables and pure functions; any.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

namespace kvstrata {

enum class Notice : uint8_t {
  kPromptOpen,
  kShort,
  kNeverPays,
  kNoSurprisal,
  kSpansPending,
  kPromptIsLocal,
  kWithinRows,
  kUntrained,
  kRowsTooFew,
  kNoBoundaries,
  kNoPromptQueries,
  kNoGeneratedBoundaries,
  kNoEntropy,
  kNoThresholds,
  kReadsAll,
  kWithinBudget,
  kRestDue,
  kNotices  // how many there are
};

// The notice's text, with {} where a number stands.
std::string_view TextOf(Notice notice);

// The text with its numbers, in order. REQUIRES: as many as the text has places.
std::string Say(Notice notice, std::initializer_list<int64_t> numbers = {});

}  // namespace kvstrata
