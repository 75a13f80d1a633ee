// SPDX-License-Identifier: Apache-2.0
#include "kernels/select/notice.h"

#include <iterator>

#include "base/check.h"

namespace kvstrata {
namespace {

constexpr std::string_view kTexts[] = {
    "the prompt is not marked complete: attends in full until prefill_done",
    "attends in full: {} tokens are fewer than min_tokens = {}",
    "attends in full at any length: min_tokens = {} is the largest there is, and what \"auto\" "
    "stands for where choosing is predicted never to pay",
    "surprisal was not reported for all of the prompt's {} tokens: no spans, attends in full",
    "the prompt's spans are not there yet: attends in full until workers have made them",
    "the prompt's {} tokens are no more than its local window of {}: no spans, attends in full",
    "the budget of rows holds all {} tokens: no spans yet, attends in full",
    "no trained parameters: spans are expanded by their coarse rows' own logits, and the budget "
    "alone limits what is expanded",
    "the budget of {} rows cannot hold the {} that are always read: reads {}, expands nothing; the "
    "smallest budget now is rows = {}",
    "sentence boundaries were reported for {} of the prompt's {} tokens: attends in full until "
    "they are",
    "the queries of the prompt's last {} tokens did not pass through a step: attends in full",
    "no sentence boundaries are reported for generated tokens: a sentence ends every {} tokens",
    "no entropy was reported: selects anew every {} pages",
    "thresholds are not set: reported entropies never cause a new selection; set thresholds, "
    "report none (every {} pages), or use trigger = \"every\"",
    "attends in full: its selector is full",
    "attends in full: what it always reads and its budget hold all {} tokens; it chooses from {} "
    "on",
    "the lower planes of {} packed tokens are on their way from a tier: attends their upper planes",
};  // by Notice
static_assert(std::size(kTexts) == static_cast<size_t>(Notice::kNotices));

constexpr std::string_view kPlace = "{}";

}  // namespace

std::string_view TextOf(Notice notice) { return kTexts[static_cast<size_t>(notice)]; }

std::string Say(Notice notice, std::initializer_list<int64_t> numbers) {
  std::string text(TextOf(notice));
  size_t at = 0;
  for (const int64_t number : numbers) {
    at = text.find(kPlace, at);
    KVS_CHECK(at != std::string::npos);
    const std::string digits = std::to_string(number);
    text.replace(at, kPlace.size(), digits);
    at += digits.size();
  }
  KVS_CHECK(text.find(kPlace, at) == std::string::npos);
  return text;
}

}  // namespace kvstrata
