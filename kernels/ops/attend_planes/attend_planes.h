// SPDX-License-Identifier: Apache-2.0
// Op attend_planes: partial attention over the sealed groups of planes of one (layer, KV head)
// (docs/spec/planes.md, "A step").
//
// All sealed tokens are attended: those of the fine set by all planes that are stored, others by
// plane 0, and strips that are left out not at all. Raw rows (tokens of groups that are not sealed)
// are op attend_raw's, which comes first: their partial is part of what is compared here. Op merge
// makes one output of both.
//
// Fine set and strips are chosen by the first query token and hold for all of them. What is chosen
// is a function of the work item alone. Read are: the keys' part of the upper run of all groups,
// lower rows of the fine set, and the values' part of the upper run for strips that are not left
// out. Nothing else is touched.
// Work items are independent. Cost: the bytes that PlanesBytesRead counts.
//
// Precision: ref sums in double. simd is fp32, and rounds to 8 bits what meets plane 0 in whole
// numbers: a query times a group's steps (score_bits.h has the bound, with 3 for its B and 64 steps
// for one), and the weights of up to 64 tokens times their steps, by the largest. Fine keys, what
// a fine value adds, and variances are fp32. So simd may decide a near-tie otherwise than ref. With
// a `share` below 1, and with fine_above where `sample` is 1, it takes four bytes a token and query
// head of memory, and some ten a token.
#pragma once

#include "kernels/cpu/executor.h"
#include "kernels/ops/pack_planes/planes_format.h"
#include "kernels/pages/page_view.h"

namespace kvstrata {

// Sealed groups in order of position.
struct PlanesRows {
  PlanesFormat format;                      // REQUIRES: IsValid()
  const std::byte* const* upper = nullptr;  // [groups], each format.upper_bytes()
  const std::byte* const* lower = nullptr;  // [groups], each format.lower_bytes()
  int32_t groups = 0;

  int32_t tokens() const { return groups * format.tokens; }
  int32_t strips() const { return tokens() / kStripTokens; }
};

// Rule 2: the variance that digits which are not read add to a coarse logit, over the sum of the
// squares of scale * query * step of a group's channels.
constexpr double RoundingVariance(const PlanesFormat& format) {
  const double fine_cell = format.keep == 8 ? 1 : 16;
  return (64.0 * 64.0 - fine_cell * fine_cell) / 12;
}

// The options of the page, "Options".
struct PlanesRule {
  double share = 0.05;    // fine tokens among all; 1: everything is fine
  double fine_above = 0;  // over 0: in place of share
  double skip_below = 2;
  int32_t run = 1;     // divides format.tokens; 1 with fine_above
  int32_t sample = 1;  // at least 1
  int32_t sinks = 4;
  int32_t recent = 64;  // at least 1
};

inline constexpr PlanesRule kAllFine = {.share = 1};

struct AttendPlanesWork {
  PlanesRows rows;
  PlanesRule rule;
  int32_t tokens = 0;        // N: sealed ones, then raw ones, the first query token's own included
  const float* q = nullptr;  // query token i, head g of the group: q + i*q_token + g*dim
  int64_t q_token = 0;
  int32_t queries = 1;
  int32_t group = 1;
  float scale = 1.0f;
  // The partial of raw rows of query token 0: m and l of head g (attend_raw.h).
  const float* raw_m = nullptr;
  const float* raw_l = nullptr;
  float* m = nullptr;  // [queries * group], index i * group + g; NaN where the query has one
  float* l = nullptr;
  float* o = nullptr;         // [queries * group][dim], rotated back
  uint8_t* fine = nullptr;    // [rows.tokens()], written: 1 for the fine set
  uint8_t* strips = nullptr;  // [rows.strips()], written: 1 for those that are not left out
};

// The tokens that the rule chooses among (rule 1): none where start is stop.
struct PlanesCandidates {
  int32_t start = 0, stop = 0;
};
PlanesCandidates CandidatesOf(const AttendPlanesWork& work);
// What every backend requires of an item.
void CheckPlanesWork(const AttendPlanesWork& work);

// Logits of keys by all planes that are stored, of groups that follow each other in memory.
struct ScorePlanesWork {
  PlanesFormat format;               // REQUIRES: IsValid()
  const std::byte* upper = nullptr;  // the first group's
  const std::byte* lower = nullptr;
  Run run;                   // tokens, from the first group's on
  const float* q = nullptr;  // [queries][dim]
  int32_t queries = 1;
  float scale = 1.0f;
  float* out = nullptr;  // query i, token t: out[i * out_query + t - run.begin]
  int64_t out_query = 0;
};

// How many of n flags are 1; the others are 0.
int64_t CountFlags(const uint8_t* flags, int64_t n);
// Bytes of the groups that the rule reads for what an item chose.
int64_t PlanesBytesRead(const PlanesRows& rows, const uint8_t* fine, const uint8_t* strips);

void AttendPlanesRef(const AttendPlanesWork* work, int64_t n, Executor& executor);
void AttendPlanesSimd(const AttendPlanesWork* work, int64_t n, Executor& executor);

// One for all backends, in double: of what is chosen by other keys than plane 0's nothing decodes.
void ScorePlanes(const ScorePlanesWork* work, int64_t n, Executor& executor);

}  // namespace kvstrata
