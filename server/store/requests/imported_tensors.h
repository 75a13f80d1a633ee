// SPDX-License-Identifier: Apache-2.0
// The tensors of one model that one session lends: for each layer the keys and the values, as paged
// blocks [block][slot][head][dim] of any strides, in memory of the engine's. K and V in one tensor
// ([2][block]..., [block][2]..., [block][slot][2]...) are two of these over the same memory.
//
// Everything is checked when it is registered, so that no block id of a complete registry leads
// outside of the memory. A memory that several tensors lie in is opened once: a memfd by its inode,
// a cudaIpc handle by its bytes, a GPU's descriptor by its number in the session.
// Ownership: the registry keeps its memories open; `release` says who destroys them.
// Thread-safety: none while it is filled; const methods from any thread afterwards.
// Errors: INVALID_ARGUMENT TENSOR_* that name the field, its value and what is allowed;
// ALREADY_EXISTS TENSORS_REGISTERED; those of OpenTensor.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/pages/page_view.h"
#include "server/memory/tensor_memory.h"

namespace kvstrata {

// Where the rows of one layer's keys or values lie. Bytes.
struct BlockTensor {
  uint64_t offset = 0;  // where (block 0, slot 0, head 0) is
  int64_t block_stride = 0, slot_stride = 0, head_stride = 0;
  int32_t dtype = 0;  // a DType, as it came
  int32_t blocks = 0, block_tokens = 0, heads = 0, head_dim = 0;
};

// What a client sent of one of them.
struct LentTensor {
  TensorHandle handle;
  uint32_t descriptor = 0;  // the number of handle.fd in the session
  BlockTensor layout;
};

class ImportedTensors {
 public:
  // Destroys memories in its own time and thread (TensorReleases).
  using Release = std::function<void(TensorMemory*)>;
  struct Side {
    std::shared_ptr<TensorMemory> memory;
    BlockTensor layout;
  };
  struct Layer {
    Side keys, values;
  };

  ImportedTensors(const Geometry& geometry, const TensorDevice& device, Release release);

  Status Register(int32_t layer, const LentTensor& keys, const LentTensor& values);

  // OK once all layers are there; FAILED_PRECONDITION TENSORS_MISSING names the first that is not.
  Status CheckComplete() const;
  // INVALID_ARGUMENT BLOCK_UNKNOWN: an id that some layer has no block of; BLOCKS_TOKENS: not as
  // many tokens as these blocks have.
  Status CheckBlocks(std::span<const int32_t> ids, size_t tokens) const;

  const Geometry& geometry() const { return geometry_; }
  int32_t block_tokens() const { return block_tokens_; }  // 0: nothing is registered
  const Layer& layer(int32_t i) const { return layers_[static_cast<size_t>(i)]; }

 private:
  Status CheckLayout(const std::string& field, const LentTensor& tensor) const;
  Result<std::shared_ptr<TensorMemory>> Open(const LentTensor& tensor);

  const Geometry geometry_;
  const TensorDevice device_;
  const Release release_;
  std::vector<Layer> layers_;  // a layer without memory is missing
  std::map<std::string, std::pair<std::shared_ptr<TensorMemory>, uint64_t>> open_;  // and its bytes
  int32_t block_tokens_ = 0;
  int32_t blocks_ = 0;  // that every layer has
};

}  // namespace kvstrata
