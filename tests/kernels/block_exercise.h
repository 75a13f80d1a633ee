// SPDX-License-Identifier: Apache-2.0
// Exercise: the life of an engine in miniature (block_engine.h), at random.
#pragma once

#include <algorithm>
#include <vector>

#include "tests/kernels/block_engine.h"

namespace kvstrata {

// Prompts in pieces, steps that mix them with decode, blocks given on, shared and loaded, rows that
// pad a step: the largest error of any of them.
inline double Exercise(BlockEngine* engine, Random* random, int steps) {
  double worst = 0;
  std::vector<int> running;
  for (int step = 0; step < steps; ++step) {
    const int chance = random->Below(8);
    if (running.size() < 3 || (running.size() < 4 && chance == 0)) {
      const bool parent = !running.empty() && engine->TokensOf(running[0]) > 0;
      running.push_back(chance == 1 && parent ? engine->Share(running[0])
                        : chance == 2         ? engine->Load(1 + random->Below(3))
                                              : engine->Open());
    } else if (chance == 3) {
      const size_t ends = static_cast<size_t>(random->Below(static_cast<int>(running.size())));
      engine->Close(running[ends]);
      running.erase(running.begin() + static_cast<int64_t>(ends));
      continue;
    }
    std::vector<BlockEngine::Row> rows;
    for (const int sequence : running) {
      const bool prompt = engine->TokensOf(sequence) < 100;
      rows.push_back({sequence, prompt ? 1 + random->Below(70) : 1, random->Below(9) == 0});
    }
    worst = std::max(worst, engine->Step(rows, static_cast<int32_t>(rows.size()) + step % 2));
  }
  return worst;
}

}  // namespace kvstrata
