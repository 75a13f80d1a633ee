// SPDX-License-Identifier: Apache-2.0
// Safetensors: a read-only view of one .safetensors file.
//
// Every length and offset is checked against the file before anything is read by it: a truncated,
// foreign or hostile file is an error that names the field, never a fault. (A file that somebody
// shortens while it is mapped is beyond that: SIGBUS.)
//
// Ownership: the object owns the mapping; tensors point into it and live as long as it does.
// Threads: immutable after Open. Cost: Open reads the header only, pages come when touched.
// Errors, for a file called `what` ("trace"): TRACE_UNREADABLE, TRACE_TRUNCATED, TRACE_FOREIGN,
// TRACE_HEADER (INVALID_ARGUMENT; a missing file NOT_FOUND).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace kvstrata {

struct TensorView {
  std::string dtype;  // "BF16"
  std::vector<int64_t> shape;
  // Row-major, little-endian, aligned to the dtype within the file.
  std::span<const std::byte> bytes;
};

class Safetensors {
 public:
  static Result<Safetensors> Open(const std::string& path, std::string_view what);
  // Reads bytes in memory, which must outlive the object.
  static Result<Safetensors> Parse(std::span<const std::byte> file, std::string_view what);

  Safetensors(Safetensors&& other) noexcept;
  Safetensors& operator=(Safetensors&& other) = delete;
  ~Safetensors();

  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::map<std::string, TensorView>& tensors() const { return tensors_; }

 private:
  Safetensors() = default;
  Status Map(const std::string& path);
  Status Read(std::span<const std::byte> file);

  std::map<std::string, std::string> metadata_;
  std::map<std::string, TensorView> tensors_;
  void* mapping_ = nullptr;  // null: not ours
  size_t mapped_bytes_ = 0;
};

}  // namespace kvstrata
