// SPDX-License-Identifier: Apache-2.0
#include "client/abi/reorder.h"

#include <algorithm>
#include <string>

namespace kvstrata::client {
namespace {

Status Check(std::span<const uint64_t> sequences, std::span<const uint32_t> parents) {
  for (size_t i = 0; i < parents.size(); ++i) {
    if (parents[i] < sequences.size()) continue;
    return InvalidArgument("REORDER_PARENT", "parents[" + std::to_string(i) + "] is " +
                                                 std::to_string(parents[i]) +
                                                 "; allowed: below the number of sequences, " +
                                                 std::to_string(sequences.size()));
  }
  std::vector<uint64_t> sorted(sequences.begin(), sequences.end());
  std::ranges::sort(sorted);
  const auto twice = std::ranges::adjacent_find(sorted);
  if (twice == sorted.end()) return OkStatus();
  return InvalidArgument("REORDER_REPEATED", "sequence " + std::to_string(*twice) +
                                                 " is named twice; name each once, and repeat it "
                                                 "in parents");
}

}  // namespace

Result<std::vector<uint64_t>> Reorder(Session* session, std::span<const uint64_t> sequences,
                                      std::span<const uint32_t> parents) {
  KVS_RETURN_IF_ERROR(Check(sequences, parents));
  std::vector<bool> continued(sequences.size());
  std::vector<uint64_t> out, forks;
  for (const uint32_t parent : parents) {
    if (!continued[parent]) {
      continued[parent] = true;
      out.push_back(sequences[parent]);
      continue;
    }
    const Result<Opened> fork = session->Fork(sequences[parent]);
    if (!fork.ok()) {
      for (const uint64_t made : forks) (void)session->Close(made);
      return fork.status();
    }
    forks.push_back(fork->sequence);
    out.push_back(fork->sequence);
  }
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (!continued[i]) KVS_RETURN_IF_ERROR(session->Close(sequences[i]));
  }
  return out;
}

}  // namespace kvstrata::client
