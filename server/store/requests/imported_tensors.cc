// SPDX-License-Identifier: Apache-2.0
#include "server/store/requests/imported_tensors.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <limits>

namespace kvstrata {
namespace {

constexpr int32_t kMaxBlocks = 1 << 24, kMaxBlockTokens = 4096;
constexpr int64_t kMaxStride = int64_t{1} << 40;

Status Refuse(const char* reason, const std::string& field, int64_t value,
              const std::string& allowed) {
  return InvalidArgument(reason, field + " is " + std::to_string(value) + "; allowed: " + allowed);
}

Status CheckCount(const std::string& field, int32_t value, int32_t most) {
  if (value >= 1 && value <= most) return OkStatus();
  return Refuse("TENSOR_SHAPE", field, value, "1 to " + std::to_string(most));
}

Status CheckEqual(const std::string& field, int32_t value, int32_t want) {
  if (value == want) return OkStatus();
  return Refuse("TENSOR_SHAPE", field, value, "the model's, " + std::to_string(want));
}

Status CheckStride(const std::string& field, int64_t stride, int64_t row, int64_t element) {
  if (stride >= row && stride <= kMaxStride && stride % element == 0) return OkStatus();
  return Refuse("TENSOR_STRIDE", field, stride,
                "multiples of " + std::to_string(element) + " from a row, " + std::to_string(row) +
                    ", to 2^40 bytes");
}

// Blocks fill pages, or pages blocks: what a prefix hit ends with is then whole blocks or their
// whole parts.
bool Divides(int32_t a, int32_t b) { return a % b == 0 || b % a == 0; }

// What names a memory, so that it is opened once.
std::string IdentityOf(const LentTensor& tensor) {
  const TensorHandle& handle = tensor.handle;
  if (handle.kind == TensorKind::kCudaIpc) {
    return "ipc " + std::string(handle.ipc.begin(), handle.ipc.end());
  }
  struct stat st {};
  // Only what has seals lies in memory: of anything else fstat may ask somebody, and wait for him.
  if (handle.kind == TensorKind::kMemfd && fcntl(handle.fd, F_GET_SEALS) >= 0 &&
      fstat(handle.fd, &st) == 0) {
    return "memfd " + std::to_string(st.st_dev) + ":" + std::to_string(st.st_ino);
  }
  return "fd " + std::to_string(tensor.descriptor);
}

}  // namespace

ImportedTensors::ImportedTensors(const Geometry& geometry, const TensorDevice& device,
                                 Release release)
    : geometry_(geometry),
      device_(device),
      release_(std::move(release)),
      layers_(static_cast<size_t>(geometry.layers)) {}

Status ImportedTensors::CheckLayout(const std::string& field, const LentTensor& tensor) const {
  const BlockTensor& t = tensor.layout;
  if (t.dtype != static_cast<int32_t>(geometry_.dtype)) {
    return Refuse("TENSOR_DTYPE", field + ".dtype", t.dtype,
                  "the model's, " + std::to_string(static_cast<int32_t>(geometry_.dtype)) +
                      " (rows are copied bit by bit)");
  }
  KVS_RETURN_IF_ERROR(CheckEqual(field + ".heads", t.heads, geometry_.kv_heads));
  KVS_RETURN_IF_ERROR(CheckEqual(field + ".head_dim", t.head_dim, geometry_.head_dim));
  KVS_RETURN_IF_ERROR(CheckCount(field + ".blocks", t.blocks, kMaxBlocks));
  KVS_RETURN_IF_ERROR(CheckCount(field + ".block_tokens", t.block_tokens, kMaxBlockTokens));
  if (!Divides(t.block_tokens, geometry_.page_tokens)) {
    return Refuse("TENSOR_SHAPE", field + ".block_tokens", t.block_tokens,
                  "multiples and divisors of the model's page_tokens, " +
                      std::to_string(geometry_.page_tokens));
  }
  if (block_tokens_ != 0 && t.block_tokens != block_tokens_) {
    return Refuse("TENSOR_SHAPE", field + ".block_tokens", t.block_tokens,
                  "that of the tensors registered before, " + std::to_string(block_tokens_));
  }
  const int64_t row = geometry_.row_bytes(), element = SizeOf(geometry_.dtype);
  KVS_RETURN_IF_ERROR(CheckStride(field + ".block_stride", t.block_stride, row, element));
  KVS_RETURN_IF_ERROR(CheckStride(field + ".slot_stride", t.slot_stride, row, element));
  KVS_RETURN_IF_ERROR(CheckStride(field + ".head_stride", t.head_stride, row, element));
  // Below 2^24 * 2^40 * 3: it needs more than 64 bits.
  const auto last = static_cast<unsigned __int128>(t.blocks - 1) * t.block_stride +
                    static_cast<unsigned __int128>(t.block_tokens - 1) * t.slot_stride +
                    static_cast<unsigned __int128>(t.heads - 1) * t.head_stride + row;
  const uint64_t bytes = tensor.handle.bytes;
  if (t.offset > bytes || t.offset % element != 0 || last > bytes - t.offset) {
    const auto shown = static_cast<uint64_t>(
        std::min<unsigned __int128>(last, std::numeric_limits<uint64_t>::max()));
    return InvalidArgument("TENSOR_OFFSET",
                           field + ".offset is " + std::to_string(t.offset) + " and the tensor " +
                               std::to_string(shown) + " bytes long; allowed: multiples of " +
                               std::to_string(element) + " with all of it inside the memory's " +
                               std::to_string(bytes) + " bytes");
  }
  return OkStatus();
}

Result<std::shared_ptr<TensorMemory>> ImportedTensors::Open(const LentTensor& tensor) {
  const std::string identity = IdentityOf(tensor);
  if (const auto it = open_.find(identity); it != open_.end()) {
    if (tensor.handle.bytes <= it->second.second) return it->second.first;
    return Refuse("TENSOR_HANDLE", "bytes", static_cast<int64_t>(tensor.handle.bytes),
                  "at most what the same memory had before, " + std::to_string(it->second.second));
  }
  KVS_ASSIGN_OR_RETURN(std::unique_ptr<TensorMemory> opened, OpenTensor(tensor.handle, device_));
  std::shared_ptr<TensorMemory> memory(opened.release(), release_);
  open_.emplace(identity, std::pair(memory, tensor.handle.bytes));
  return memory;
}

Status ImportedTensors::Register(int32_t layer, const LentTensor& keys, const LentTensor& values) {
  if (layer < 0 || layer >= geometry_.layers) {
    return Refuse("TENSOR_LAYER", "layer", layer, "0 to " + std::to_string(geometry_.layers - 1));
  }
  Layer& to = layers_[static_cast<size_t>(layer)];
  if (to.keys.memory != nullptr) {
    return Status(Code::kAlreadyExists, "TENSORS_REGISTERED",
                  "layer " + std::to_string(layer) +
                      " has its tensors already; detach and attach anew to change them");
  }
  KVS_RETURN_IF_ERROR(CheckLayout("keys", keys));
  KVS_RETURN_IF_ERROR(CheckLayout("values", values));
  if (keys.layout.block_tokens != values.layout.block_tokens) {
    return Refuse("TENSOR_SHAPE", "values.block_tokens", values.layout.block_tokens,
                  "that of keys, " + std::to_string(keys.layout.block_tokens));
  }
  KVS_ASSIGN_OR_RETURN(std::shared_ptr<TensorMemory> key_memory, Open(keys));
  KVS_ASSIGN_OR_RETURN(std::shared_ptr<TensorMemory> value_memory, Open(values));
  const int32_t blocks = std::min(keys.layout.blocks, values.layout.blocks);
  blocks_ = block_tokens_ == 0 ? blocks : std::min(blocks_, blocks);
  block_tokens_ = keys.layout.block_tokens;
  to = {{std::move(key_memory), keys.layout}, {std::move(value_memory), values.layout}};
  return OkStatus();
}

Status ImportedTensors::CheckComplete() const {
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (layers_[i].keys.memory != nullptr) continue;
    return FailedPrecondition("TENSORS_MISSING", "layer " + std::to_string(i) + " of " +
                                                     std::to_string(layers_.size()) +
                                                     " has no tensors yet; register all layers "
                                                     "before blocks are sealed");
  }
  return OkStatus();
}

Status ImportedTensors::CheckBlocks(std::span<const int32_t> ids, size_t tokens) const {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && ids[i] < blocks_) continue;
    return Refuse("BLOCK_UNKNOWN", "blocks[" + std::to_string(i) + "]", ids[i],
                  "0 to " + std::to_string(blocks_ - 1));
  }
  const size_t want = ids.size() * static_cast<size_t>(block_tokens_);
  if (tokens == want) return OkStatus();
  return Refuse("BLOCKS_TOKENS", "the number of tokens", static_cast<int64_t>(tokens),
                std::to_string(want) + ", the " + std::to_string(block_tokens_) + " of each of " +
                    std::to_string(ids.size()) + " blocks");
}

}  // namespace kvstrata
