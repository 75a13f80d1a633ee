// SPDX-License-Identifier: Apache-2.0
// Trace: what a model wrote into its cache and asked of it, recorded (docs/traces.md).
//
// Open proves the whole file before anybody uses a part of it: metadata, names, dtypes, shapes,
// finite values. Ownership: owns the file's mapping; keys, values and queries point into it.
// Threads: immutable. Cost: Open reads every byte once.
// Errors: those of safetensors.h, TRACE_VERSION, TRACE_METADATA, TRACE_TENSOR, TRACE_VALUE.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/safetensors.h"
#include "base/status.h"

namespace kvstrata::cli {

// TraceRotary: the rotary embedding that a trace's keys and queries still lack (docs/traces.md,
// `keys = pre_rope`), for oracles that attend as the daemon does. Pure; double precision.

// Pair i of dim / 2 is rotated by position * theta^(-2i / dim).
struct TraceRotary {
  double theta = 0;
  int32_t dim = 0;  // channels that are rotated; 0: rows hold it already, and Rotate does nothing
  bool interleaved = false;  // pairs (2i, 2i + 1), else (i, i + dim / 2)

  // Rotates a row of one head to its position, in place.
  void Rotate(int64_t position, std::span<double> row) const;
};

struct TraceShape {
  int32_t layers = 0;  // how many the model has; TraceLayer::layer says which are there
  int32_t query_heads = 0, kv_heads = 0, head_dim = 0, page_tokens = 0;
  int32_t prompt = 0, steps = 0, tail = 0;  // N0, T, tail
  TraceRotary rotary;                       // that of keys = pre_rope

  int32_t tokens() const { return prompt + steps; }
  int64_t kv_row() const { return int64_t{kv_heads} * head_dim; }  // values of one token
  int64_t q_row() const { return int64_t{query_heads} * head_dim; }
};

// bf16 bit patterns, row-major.
struct TraceLayer {
  int32_t layer = 0;
  const uint16_t* k = nullptr;  // [N0 + T][kv_heads][head_dim]
  const uint16_t* v = nullptr;  // [N0 + T][kv_heads][head_dim]
  const uint16_t* q = nullptr;  // [tail + T][query_heads][head_dim]
};

class Trace {
 public:
  static Result<Trace> Open(const std::string& path);
  static Result<Trace> FromFile(Safetensors file);

  // As if the prompt had ended after `prompt` tokens: the steps append the rows that follow there
  // and ask the recorded decode queries, which come from later positions. For timing, not for
  // quality. REQUIRES: 1 <= prompt <= N0.
  Trace Prefix(int32_t prompt) const;

  const TraceShape& shape() const { return shape_; }
  const std::vector<TraceLayer>& layers() const { return layers_; }
  const std::vector<int32_t>& tokens() const { return tokens_; }
  // Empty when the trace has none.
  const std::vector<float>& surprisal() const { return surprisal_; }            // [N0]
  const std::vector<float>& step_surprisal() const { return step_surprisal_; }  // [T]
  const std::vector<float>& entropy() const { return entropy_; }
  const std::vector<uint8_t>& boundary() const { return boundary_; }
  // "" when the key is absent.
  std::string Metadata(const std::string& key) const;

 private:
  explicit Trace(Safetensors file) : file_(std::make_shared<Safetensors>(std::move(file))) {}
  Status ReadMetadata();
  Status ReadRotary();
  Result<std::vector<int32_t>> LayerNumbers() const;
  Result<int32_t> Number(const std::string& key, int32_t least, int32_t most) const;
  Result<const TensorView*> Tensor(const std::string& name, const std::string& dtype,
                                   const std::vector<int64_t>& shape) const;
  Result<const uint16_t*> Rows(const std::string& name, const std::vector<int64_t>& shape) const;
  Result<std::vector<float>> Series(const std::string& name, int64_t n) const;
  Status ReadSurprisal();
  Status ReadTensors();

  std::shared_ptr<const Safetensors> file_;
  TraceShape shape_;
  std::vector<TraceLayer> layers_;
  std::vector<int32_t> tokens_;
  std::vector<float> surprisal_, step_surprisal_, entropy_;
  std::vector<uint8_t> boundary_;
};

inline float FromBf16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  __builtin_memcpy(&value, &wide, sizeof(value));
  return value;
}

}  // namespace kvstrata::cli
