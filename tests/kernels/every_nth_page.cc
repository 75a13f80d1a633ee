// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/every_nth_page.h"

namespace kvstrata {
namespace {

constexpr int32_t kNth = 3, kPage = 16;

FixedChoice Choose(const Plan& plan, int32_t n) {
  FixedChoice choice;
  const int32_t newest = n / kPage - 1;  // page
  if (n < plan.min_tokens || newest < kNth) return choice;
  for (int32_t page = 0; page < newest; page += kNth) choice.units.push_back(page);
  choice.recent_begin = newest * kPage;
  return choice;
}

SelectionRule Rule(const Plan&, int32_t tokens) {
  SelectionRule rule;
  rule.always = 2 * kPage;
  rule.unit_tokens = kPage;
  rule.units = tokens / kPage / kNth + 1;
  rule.rows = rule.always + rule.units * kPage;
  return rule;
}

}  // namespace

constinit const FixedSelection kEveryNthPage = {Choose, Rule, kPage};

}  // namespace kvstrata
