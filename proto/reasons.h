// SPDX-License-Identifier: Apache-2.0
// Reasons: every cause of an error or refusal by its stable name, what it means and what to do. One
// table: `kvstrata explain`, the next step of the CLI's errors, docs/reasons.md and the labels of
// counters are made from it. tests/tree/check_reasons.py proves that it has what the code says.
//
// Static data and pure functions; any thread.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string_view>

namespace kvstrata {

// Where one meets it.
enum class ReasonArea {
  kStart,     // kvstratad reads its configuration, or starts
  kConnect,   // a client connects or attaches
  kSequence,  // an engine opens, grows, commits
  kPlan,      // a plan's text, or what a build of it can
  kTensor,    // an engine's tensors and blocks
  kMemory,    // pools, arenas, GPUs
  kDisk,      // the disk tier
  kRemote,    // the tier of the cluster
  kWork,      // workers: recompression, builds
  kAdmin,     // an operator's verb
  kLibrary,   // libkvstrata itself, before it asks the daemon
  kProgram,   // the program kvstrata itself
};

struct Reason {
  std::string_view name;  // "POOL_EXHAUSTED"
  ReasonArea area;
  std::string_view meaning;  // sentences
  std::string_view next;     // commands or a step; "": the meaning, or the error's message, says it
};

// All, by name.
std::span<const Reason> AllReasons();

// "start", "connect", ...
std::string_view NameOf(ReasonArea area);
// Whether a daemon answers with reasons of that area, or has them in its log.
bool SaidByDaemon(ReasonArea area);

// Its place in AllReasons(). O(log n), no allocation.
std::optional<size_t> FindReason(std::string_view name);

}  // namespace kvstrata
