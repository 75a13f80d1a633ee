// SPDX-License-Identifier: Apache-2.0
// The surprisal of a recorded text, for benchmarks whose spans are to be like real ones.
#pragma once

#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace kvstrata::cuda {

// Tensor `surprisal` of a trace (docs/traces.md), nats; empty: no such file.
inline std::vector<float> SurprisalOf(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  uint64_t header = 0;
  if (!in.read(reinterpret_cast<char*>(&header), sizeof(header))) return {};
  std::string text(header, ' ');
  in.read(text.data(), static_cast<std::streamsize>(header));
  const auto offsets = nlohmann::json::parse(text)["surprisal"]["data_offsets"];
  const int64_t begin = offsets[0], end = offsets[1];
  std::vector<float> values(static_cast<size_t>(end - begin) / sizeof(float));
  in.seekg(static_cast<std::streamoff>(sizeof(header) + header) + begin);
  in.read(reinterpret_cast<char*>(values.data()), end - begin);
  return values;
}

}  // namespace kvstrata::cuda
