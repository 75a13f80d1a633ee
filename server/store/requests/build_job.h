// SPDX-License-Identifier: Apache-2.0
// Building on request: what a plan keeps beside the rows of a sequence (index blocks; extents of
// its codec), made by a worker now instead of by the step that needs it first.
//
// The life of a build: a request is checked and offered to the workers (queued) -> a worker takes
// piece after piece: the rows that it reads are held, and copied to the host where they lie in a
// pool that the host cannot read (running) -> what the worker made is copied into pages of the
// daemon's and entered under its keys; of the sequence's own plan its table names them from then
// on. A piece holds complete index blocks, at most kPieceBytes of rows (but for one block), or all
// extents of a plan that is not the sequence's. What is made is a function of keys and reports
// alone, so that two who make the same bytes under one key never differ. A close cancels between
// pieces, and a codec's run between heads.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/codec/codec.h"
#include "server/store/pages/prefix_key.h"

namespace kvstrata {

struct BuildRequest {
  uint64_t session = 0;  // 0: an operator asks, of a sequence of any session
  uint64_t sequence = 0;
  std::string plan;  // "": the sequence's own
};

struct BuildResult {
  std::string plan;  // with every option
  uint32_t indexed_tokens = 0;
  uint32_t built_blocks = 0;
  uint32_t extents = 0;
  bool own = false;  // it is the sequence's own plan
  bool done = true;  // false: a worker goes on
};
using BuildDone = std::function<void(const Result<BuildResult>&)>;

// One piece. Ended by PublishBlocks, PublishExtents or AbandonBuild, exactly once.
struct BuildJob {
  static constexpr uint64_t kPieceBytes = uint64_t{32} << 20;

  uint64_t hold = 0;   // keeps its pages (page_references.h)
  uint64_t build = 0;  // the request's number
  uint64_t sequence = 0;
  Geometry geometry;
  Plan plan;
  IndexLayout index;

  // Index rows of [from, to) are to be written; `to` ends a block. Empty: extents are to be made.
  uint32_t from = 0, to = 0;
  std::vector<PageKey> keys;        // keys of the blocks
  std::vector<ExtentDraft> drafts;  // their bytes
  std::vector<std::byte*> blocks;   // by position; null before the first of them
  std::vector<std::byte*> pages;    // by position; null: not read
  std::vector<std::unique_ptr<std::byte[]>> staged;

  // Extents: a clone of this is run until nothing is due. Backend and executor are the worker's.
  std::shared_ptr<const Recompressor> recompressor;
  RecompressInput input;
  std::vector<float> surprisal;
  std::vector<uint8_t> boundary;
  std::shared_ptr<const std::atomic<bool>> cancelled;
};

// What a worker made of a job's extents.
struct BuiltExtents {
  std::vector<ExtentDraft> extents;  // none is `kept`
  std::vector<Run> released;
  std::unique_ptr<Recompressor> recompressor;
};

}  // namespace kvstrata
