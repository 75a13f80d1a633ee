// SPDX-License-Identifier: Apache-2.0
// Rows of linked_bench about the remote transport: what a layer's Append, Select and Attend take
// over gRPC with inline tensors, of a daemon on the GPU and of one on CPUs.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace kvstrata::cuda {

inline constexpr char kRemoteNotes[] =
    "remote: microseconds of one call of Compute over the Unix socket, from the request to its "
    "answer, medians; one new token behind 32K tokens, two layers of 32 query heads and 8 KV heads "
    "x 128, bf16; Append carries k and v, Select answers positions and units, Attend carries q and "
    "the output, without the selection; ping: the same without work";

// Makes the rows whose id begins with `only`, or all.
void RemoteRows(const std::string& only, nlohmann::ordered_json* rows);

}  // namespace kvstrata::cuda
