// SPDX-License-Identifier: Apache-2.0
// Exercise: the life of an engine whose blocks are planes (planes_engine.h), at random.
#pragma once

#include <algorithm>
#include <vector>

#include "tests/kernels/planes_engine.h"

namespace kvstrata {

// Prompts in pieces, steps that mix them with decode, slots and blocks given on, prefixes shared,
// rows that pad a step: the largest error of any of them.
inline double ExercisePlanes(PlanesEngine* engine, Random* random, int steps) {
  double worst = 0;
  std::vector<int> running;
  for (int step = 0; step < steps; ++step) {
    const int chance = random->Below(16);
    if (running.size() < 2 || (running.size() < 5 && chance == 0)) {
      running.push_back(engine->sequences().Open());
      if (running.size() > 1 && random->Below(2) == 0) {
        engine->sequences().Share(running.back(), running[0]);
      }
    } else if (chance == 1) {
      const size_t ends = static_cast<size_t>(random->Below(static_cast<int>(running.size())));
      engine->sequences().Close(running[ends]);
      running.erase(running.begin() + static_cast<int64_t>(ends));
    }
    std::vector<PlanesRow> rows;
    for (const int sequence : running) {
      const int tokens = engine->sequences().TokensOf(sequence);
      const bool is_prompt = tokens == 0 || (tokens < 100 && random->Below(3) > 0);
      rows.push_back({sequence, is_prompt ? 2 + random->Below(99) : 1, random->Below(9) == 0});
    }
    std::ranges::stable_sort(
        rows, [](const auto& a, const auto& b) { return (a.added > 1) < (b.added > 1); });
    worst = std::max(worst, engine->Step(rows, static_cast<int32_t>(rows.size()) + step % 2));
  }
  return worst;
}

// Prefixes that are found while they are computed, in one step: by prompts of two tokens and of one
// behind another prompt, and behind `sequence`, as it fills a block. It decodes up to there.
inline double SharePlanes(PlanesEngine* engine, int sequence) {
  PlanesSequences& sequences = engine->sequences();
  const int first = sequences.Open(), second = sequences.Open(), third = sequences.Open(),
            fourth = sequences.Open();
  double worst = 0;
  while (sequences.TokensOf(sequence) % 64 != 63) {
    worst = std::max(worst, engine->Step({{sequence}}, 1));
  }
  const std::vector<PlanesRow> rows = {{sequence},
                                       {fourth, 1, false, first},
                                       {first, 130},
                                       {second, 2, false, first},
                                       {third, 3, false, sequence}};
  worst = std::max(worst, engine->Step(rows, 0));
  return std::max(worst, engine->Step({{second}, {third}, {fourth}, {sequence}, {first}}, 5));
}

// Two prompts in pieces of odd sizes, then so many steps of both; then one of them alone, by what
// was captured for two; then another request on the slot and the blocks of the first,
// whose blocks others share.
inline double DecodePlanes(PlanesEngine* engine, int steps) {
  const int first = engine->sequences().Open(), second = engine->sequences().Open();
  double worst = engine->Step({{first, 77}, {second, 3}}, 0);
  worst = std::max(worst, engine->Step({{first, 51}, {second, 126}}, 0));
  worst = std::max(worst, engine->Step({{second}, {first, 5}}, 0));
  for (int i = 0; i < steps; ++i) {
    worst = std::max(worst, engine->Step({{first}, {second}}, 2));
  }
  engine->sequences().Close(first);
  for (int i = 0; i < steps / 4; ++i) worst = std::max(worst, engine->Step({{second}}, 2));
  const int third = engine->sequences().Open();
  worst = std::max(worst, engine->Step({{second}, {third, 63}}, 0));
  for (int i = 0; i < steps / 2; ++i) {
    worst = std::max(worst, engine->Step({{third}, {second}}, 2));
  }
  return std::max(worst, SharePlanes(engine, third));
}

}  // namespace kvstrata
