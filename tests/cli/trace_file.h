// SPDX-License-Identifier: Apache-2.0
// TraceFile: builds .safetensors files for tests, right ones and wrong ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

namespace kvstrata::cli {

using Bytes64 = std::vector<std::byte>;

inline uint16_t ToBf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

struct TraceFile {
  std::map<std::string, std::string> metadata;
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  Bytes64 data;

  template <typename T>
  void Add(const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape,
           const std::vector<T>& values) {
    const size_t begin = data.size(), bytes = values.size() * sizeof(T);
    data.resize(begin + bytes);
    if (bytes > 0) std::memcpy(data.data() + begin, values.data(), bytes);
    header[name] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {begin, begin + bytes}}};
  }

  // Other values for a tensor of the same size.
  template <typename T>
  void Overwrite(const std::string& name, const std::vector<T>& values) {
    const size_t begin = header[name]["data_offsets"][0];
    std::memcpy(data.data() + begin, values.data(), values.size() * sizeof(T));
  }
  // Readers ignore tensors whose names they do not know.
  void Hide(const std::string& name) {
    header["hidden." + name] = header[name];
    header.erase(name);
  }

  Bytes64 File() const {
    nlohmann::ordered_json all = {{"__metadata__", metadata}};
    all.update(header);
    std::string text = all.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');
    const uint64_t length = text.size();
    Bytes64 out(8 + text.size() + data.size());
    std::memcpy(out.data(), &length, 8);
    std::memcpy(out.data() + 8, text.data(), text.size());
    if (!data.empty()) std::memcpy(out.data() + 8 + text.size(), data.data(), data.size());
    return out;
  }
};

// A trace of random normal keys, values and queries: 2 query heads, 1 KV head, dim 64.
inline TraceFile SmallTrace(int prompt, int steps, int tail, const std::vector<int>& layers,
                            uint32_t seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const auto rows = [&](int64_t n) {
    std::vector<uint16_t> out(static_cast<size_t>(n));
    for (uint16_t& value : out) value = ToBf16(normal(random));
    return out;
  };
  TraceFile file;
  std::string names;
  for (const int layer : layers) names += (names.empty() ? "" : ",") + std::to_string(layer);
  file.metadata = {{"format", "kvstrata-trace"},
                   {"format_version", "1"},
                   {"layers", "4"},
                   {"trace_layers", names},
                   {"query_heads", "2"},
                   {"kv_heads", "1"},
                   {"head_dim", "64"},
                   {"page_tokens", "16"},
                   {"keys", "post_rope"},
                   {"N0", std::to_string(prompt)},
                   {"T", std::to_string(steps)},
                   {"tail", std::to_string(tail)},
                   {"model", "random"}};
  const int64_t n = prompt + steps;
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * 7 % 1000);
  file.Add("tokens", "I32", {n}, tokens);
  file.Add("surprisal", "F32", {prompt}, std::vector<float>(static_cast<size_t>(prompt), 0.5f));
  file.Add("entropy", "F32", {steps}, std::vector<float>(static_cast<size_t>(steps), 1.0f));
  for (const int layer : layers) {
    const std::string suffix = "." + std::to_string(layer);
    file.Add("k" + suffix, "BF16", {n, 1, 64}, rows(n * 64));
    file.Add("v" + suffix, "BF16", {n, 1, 64}, rows(n * 64));
    file.Add("q" + suffix, "BF16", {tail + steps, 2, 64}, rows((tail + steps) * 2 * 64));
  }
  file.Add("boundary", "U8", {n}, std::vector<uint8_t>(static_cast<size_t>(n), 0));
  return file;
}

}  // namespace kvstrata::cli
