// SPDX-License-Identifier: Apache-2.0
// PlanesSequences: the requests of an engine whose blocks are planes: their rows, and which blocks
// and slots are whose. For tests.
#pragma once

#include <utility>
#include <vector>

#include "tests/kernels/planes_oracle.h"

namespace kvstrata {

class PlanesSequences {
 public:
  struct Room {
    int32_t blocks = 0, slots = 0;
  };
  struct Sequence {
    std::vector<int32_t> blocks;
    std::vector<HeadRows> rows;  // [layer][kv_head]
    int32_t tokens = 0, slot = 0;
  };

  PlanesSequences(Random* random, const Geometry& geometry, const PlanesOracle* oracle,
                  const Room& room)
      : random_(*random), g_(geometry), oracle_(*oracle), users_(At(room.blocks)) {
    Fill(room.blocks, &free_blocks_);
    Fill(room.slots, &free_slots_);
  }

  const Sequence& operator[](int sequence) const { return sequences_[At(sequence)]; }
  int32_t TokensOf(int sequence) const { return sequences_[At(sequence)].tokens; }

  int Open() {
    sequences_.push_back({});
    Sequence& s = sequences_.back();
    s.slot = free_slots_.back();
    free_slots_.pop_back();
    s.rows.resize(static_cast<size_t>(g_.layers * g_.kv_heads));
    return static_cast<int>(sequences_.size()) - 1;
  }
  // Its slot and the blocks that nobody else has are the next ones to be given away.
  void Close(int sequence) {
    Sequence& s = sequences_[At(sequence)];
    for (const int32_t block : s.blocks) {
      if (--users_[At(block)] == 0) free_blocks_.push_back(block);
    }
    free_slots_.push_back(s.slot);
    s = {};
  }
  // A new sequence takes over the full blocks of another, which both have from then on.
  void Share(int sequence, int with) {
    const Sequence& from = sequences_[At(with)];
    Sequence& to = sequences_[At(sequence)];
    to.tokens = from.tokens / kUnit * kUnit;
    to.blocks.assign(from.blocks.begin(), from.blocks.begin() + to.tokens / kUnit);
    for (const int32_t block : to.blocks) ++users_[At(block)];
    to.rows = from.rows;
    for (HeadRows& rows : to.rows) {
      rows.keys.resize(static_cast<size_t>(to.tokens * g_.row_bytes()));
      rows.values.resize(rows.keys.size());
    }
  }
  // Random rows behind what it has.
  void Append(int sequence, int32_t tokens) {
    Sequence& s = sequences_[At(sequence)];
    for (; tokens > 0; --tokens, ++s.tokens) {
      if (s.tokens % kUnit == 0) {
        s.blocks.push_back(free_blocks_.back());
        users_[At(free_blocks_.back())] = 1;
        free_blocks_.pop_back();
      }
      for (HeadRows& rows : s.rows) {
        for (auto* side : {&rows.keys, &rows.values}) {
          side->resize(side->size() + static_cast<size_t>(g_.row_bytes()));
          for (int c = 0; c < g_.head_dim; ++c) {
            StoreAs(g_.dtype, &side->back() + 1 - 2 * (g_.head_dim - c), random_.Normal());
          }
        }
      }
    }
    for (HeadRows& rows : s.rows) oracle_.Seal(&rows);
  }

 private:
  static constexpr int32_t kUnit = 64;

  static size_t At(int32_t i) { return static_cast<size_t>(i); }
  void Fill(int32_t count, std::vector<int32_t>* numbers) {
    for (int32_t i = 0; i < count; ++i) numbers->push_back(i);
    for (int32_t i = count - 1; i > 0; --i) {
      std::swap((*numbers)[At(i)], (*numbers)[At(random_.Below(i + 1))]);
    }
  }

  Random& random_;
  const Geometry g_;
  const PlanesOracle& oracle_;
  std::vector<int32_t> free_blocks_, free_slots_;
  std::vector<int32_t> users_;  // sequences that have a block
  std::vector<Sequence> sequences_;
};

}  // namespace kvstrata
