// SPDX-License-Identifier: Apache-2.0
#include "server/attach/ring/session_tensors.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

namespace kvstrata {
namespace {

Status CheckKind(const char* field, const shm::BlockTensor& tensor) {
  if (tensor.kind >= shm::BlockTensor::kMemfd && tensor.kind <= shm::BlockTensor::kCudaIpc) {
    return OkStatus();
  }
  return InvalidArgument("TENSOR_KIND", std::string(field) + ".kind is " +
                                            std::to_string(tensor.kind) +
                                            "; allowed: 1 (memfd), 2 (descriptor of a GPU's "
                                            "memory), 3 (cudaIpc handle)");
}

LentTensor LentOf(const shm::BlockTensor& in, int fd) {
  LentTensor out;
  out.handle.kind = static_cast<TensorKind>(in.kind);
  out.handle.fd = fd;
  std::copy(std::begin(in.ipc), std::end(in.ipc), out.handle.ipc.begin());
  out.handle.bytes = in.bytes;
  out.descriptor = in.descriptor;
  out.layout = {in.offset, in.block_stride, in.slot_stride, in.head_stride, in.dtype,
                in.blocks, in.block_tokens, in.heads,       in.head_dim};
  return out;
}

Status NoImport() { return NotFound("SEQUENCE_UNKNOWN", "this daemon has no imported sequences"); }

}  // namespace

Status SessionTensors::Register(const shm::RegisterTensors& in) {
  if (import_ == nullptr) {
    return Unimplemented("IMPORT_NONE", "this daemon copies from no engine's tensors");
  }
  KVS_RETURN_IF_ERROR(CheckKind("keys", in.keys));
  KVS_RETURN_IF_ERROR(CheckKind("values", in.values));
  // Both may lie in one memory.
  std::map<uint32_t, PassedFd> taken;
  const auto descriptor = [&](const shm::BlockTensor& tensor) -> Result<int> {
    if (tensor.kind == shm::BlockTensor::kCudaIpc) return -1;
    PassedFd& fd = taken[tensor.descriptor];
    if (!fd && take_descriptor_) fd = take_descriptor_(tensor.descriptor);
    if (fd) return fd.get();
    return InvalidArgument("TENSOR_HANDLE", "no descriptor " + std::to_string(tensor.descriptor) +
                                                " has come by the attach socket; send it first");
  };
  KVS_ASSIGN_OR_RETURN(const int key_fd, descriptor(in.keys));
  KVS_ASSIGN_OR_RETURN(const int value_fd, descriptor(in.values));
  KVS_RETURN_IF_ERROR(
      import_->Register(in.model, in.layer, LentOf(in.keys, key_fd), LentOf(in.values, value_fd)));
  models_.insert(in.model);
  return OkStatus();
}

void SessionTensors::Opened(uint64_t model, std::span<const int32_t> tokens,
                            const OpenedSequence& opened) {
  if (!opened.imported) return;
  sequences_.insert(opened.sequence);
  import_->Opened(opened.sequence, model, tokens.first(opened.held_tokens));
}

void SessionTensors::Closed(uint64_t sequence) {
  if (sequences_.erase(sequence) != 0) import_->Closed(sequence);
}

Status SessionTensors::Seal(const SealedBlocks& blocks) {
  return import_ == nullptr ? NoImport() : import_->Seal(blocks);
}

Result<uint32_t> SessionTensors::Acknowledged(uint64_t sequence) {
  if (import_ == nullptr) return NoImport();
  return import_->Acknowledged(sequence);
}

void SessionTensors::AwaitCopies(uint64_t sequence, SettleDone then) {
  if (!sequences_.contains(sequence)) return then(OkStatus());
  import_->Settle(sequence, std::move(then));
}

void SessionTensors::End() {
  sequences_.clear();
  import_.reset();
}

}  // namespace kvstrata
