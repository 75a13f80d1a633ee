// SPDX-License-Identifier: Apache-2.0
#include <errno.h>

#include <string>

#include "client/abi/abi_call.h"

namespace kvstrata::client {
namespace {

constexpr size_t kMaxBoundaryTokens = 1 << 16;
constexpr int64_t kMaxStride = int64_t{1} << 40;

std::string Name(std::string_view field) { return std::string(field); }

// Text of at most `limit` bytes. TEXT_INVALID names the field, never the text.
Result<std::string> ReadText(std::string_view field, const char* text, size_t limit,
                             bool required) {
  if (text == nullptr) {
    if (required) return NotNull(field, text);
    return std::string();
  }
  const size_t n = strnlen(text, limit + 1);
  if (n > limit || (n == 0 && required)) {
    return InvalidArgument(
        "TEXT_INVALID",
        Name(field) + " has " + (n > limit ? "more than " + std::to_string(limit) : "0") +
            " bytes; allowed: " + (required ? "1" : "0") + ".." + std::to_string(limit));
  }
  if (std::any_of(text, text + n, [](char c) { return static_cast<unsigned char>(c) < 0x20; })) {
    return InvalidArgument("TEXT_INVALID", Name(field) + " has control characters; use plain text");
  }
  return std::string(text, n);
}

Status CheckStride(const std::string& field, int64_t stride, int64_t row_bytes, int64_t element) {
  if (stride >= row_bytes && stride <= kMaxStride && stride % element == 0) return OkStatus();
  return InvalidArgument("TENSOR_STRIDE", field + " " + std::to_string(stride) +
                                              " bytes; allowed: 0 (contiguous), "
                                              "or a multiple of " +
                                              std::to_string(element) + " from " +
                                              std::to_string(row_bytes) + " to 2^40");
}

}  // namespace

Status NotNull(std::string_view field, const void* pointer) {
  if (pointer != nullptr) return OkStatus();
  return InvalidArgument("ARGUMENT_NULL", Name(field) + " is NULL; it must point to something");
}

Status ArrayOf(std::string_view field, const void* data, uint64_t n, uint64_t limit) {
  if (n > limit) {
    return InvalidArgument("ARGUMENT_RANGE", Name(field) + " has " + std::to_string(n) +
                                                 " elements; allowed: 0.." + std::to_string(limit));
  }
  if (n > 0 && data == nullptr) {
    return InvalidArgument("ARGUMENT_NULL",
                           Name(field) + " is NULL, but its count is " + std::to_string(n));
  }
  return OkStatus();
}

Status InRange(std::string_view field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return OkStatus();
  return InvalidArgument("ARGUMENT_RANGE", Name(field) + " " + std::to_string(value) +
                                               "; allowed: " + std::to_string(low) + ".." +
                                               std::to_string(high));
}

Status StructSize(std::string_view name, const void* caller, size_t size, size_t ours) {
  constexpr size_t kMaxStruct = 4096;
  if (size < ours || size > kMaxStruct) {
    return InvalidArgument("STRUCT_SIZE", Name(name) + ".size " + std::to_string(size) +
                                              "; set it to sizeof(" + Name(name) + "), here " +
                                              std::to_string(ours));
  }
  const auto* bytes = static_cast<const unsigned char*>(caller);
  if (std::any_of(bytes + ours, bytes + size, [](unsigned char b) { return b != 0; })) {
    return InvalidArgument("STRUCT_SIZE", Name(name) +
                                              " sets fields that this library (version " KVS_VERSION
                                              ") does not know; install a newer one");
  }
  return OkStatus();
}

Result<AttachOptions> ReadAttachOptions(const char* socket, const kvs_attach_options* options) {
  AttachOptions out;
  KVS_ASSIGN_OR_RETURN(out.socket, ReadText("socket", socket, 4096, false));
  if (out.socket.empty()) out.socket = DefaultSocket();
  out.client_name = program_invocation_short_name;
  if (options != nullptr) {
    KVS_RETURN_IF_ERROR(StructSize("kvs_attach_options", options, options->size, sizeof(*options)));
    KVS_ASSIGN_OR_RETURN(out.device_uuid, ReadText("device_uuid", options->device_uuid, 63, false));
    KVS_ASSIGN_OR_RETURN(std::string name,
                         ReadText("client_name", options->client_name, 63, false));
    if (!name.empty()) out.client_name = std::move(name);
    KVS_ASSIGN_OR_RETURN(out.backend, ReadText("backend", options->backend, 15, false));
    KVS_RETURN_IF_ERROR(InRange("threads", options->threads, 0, 1024));
    out.threads = options->threads;
    if (options->timeout_ms != 0) out.timeout = std::chrono::milliseconds(options->timeout_ms);
  }
  if (out.client_name.empty()) out.client_name = "unnamed";
  if (out.client_name.size() > 63) out.client_name.resize(63);
  return out;
}

Result<ModelSpec> ReadModelDesc(const kvs_model_desc& caller) {
  KVS_ASSIGN_OR_RETURN(const kvs_model_desc desc,
                       Grown("kvs_model_desc", &caller, offsetof(kvs_model_desc, scale)));
  ModelSpec out;
  KVS_ASSIGN_OR_RETURN(out.name, ReadText("name", desc.name, 63, true));
  KVS_ASSIGN_OR_RETURN(out.digest, ReadText("digest", desc.digest, 79, true));
  KVS_ASSIGN_OR_RETURN(out.adapter, ReadText("adapter", desc.adapter, 63, false));
  if (!IsDType(desc.dtype)) {
    return InvalidArgument(
        "MODEL_DTYPE", "dtype " + std::to_string(desc.dtype) + "; allowed: " + AllDTypes("KVS"));
  }
  out.geometry = {desc.layers,   desc.query_heads, desc.kv_heads,
                  desc.head_dim, desc.page_tokens, static_cast<DType>(desc.dtype)};
  out.geometry.scale = static_cast<float>(desc.scale);
  KVS_RETURN_IF_ERROR(Validate(out.geometry));
  KVS_RETURN_IF_ERROR(InRange("keys_pre_rope", desc.keys_pre_rope, 0, 1));
  KVS_ASSIGN_OR_RETURN(out.geometry.rotary, ReadRotary({desc.keys_pre_rope == 1, desc.rope_theta,
                                                        desc.rope_dim, desc.rope_interleaved},
                                                       desc.head_dim));
  KVS_RETURN_IF_ERROR(InRange("ranks", desc.ranks, 1, 1 << 16));
  KVS_RETURN_IF_ERROR(InRange("rank", desc.rank, 0, desc.ranks - 1));
  if (desc.ranks > 1) {
    return Unimplemented("TENSOR_PARALLEL", "ranks " + std::to_string(desc.ranks) +
                                                ": tensor parallel does not exist yet; pass 1");
  }
  KVS_RETURN_IF_ERROR(
      ArrayOf("boundary_tokens", desc.boundary_tokens, desc.boundary_count, kMaxBoundaryTokens));
  out.boundary_tokens.assign(desc.boundary_tokens, desc.boundary_tokens + desc.boundary_count);
  return out;
}

Result<Rows> ReadTensor(std::string_view field, const kvs_tensor* tensor, const TensorShape& want) {
  KVS_RETURN_IF_ERROR(NotNull(field, tensor));
  const std::string name(field);
  const auto mismatch = [&](const char* reason, const char* what, int64_t got, int64_t expected) {
    return InvalidArgument(reason, name + "." + what + " " + std::to_string(got) + "; expected " +
                                       std::to_string(expected));
  };
  if (!IsDType(tensor->dtype)) {
    return InvalidArgument("TENSOR_DTYPE", name + ".dtype " + std::to_string(tensor->dtype) +
                                               "; allowed: " + AllDTypes("KVS"));
  }
  if (tensor->heads != want.heads) {
    return mismatch("TENSOR_HEADS", "heads", tensor->heads, want.heads);
  }
  if (tensor->head_dim != want.head_dim) {
    return mismatch("TENSOR_HEAD_DIM", "head_dim", tensor->head_dim, want.head_dim);
  }
  if (tensor->tokens != want.tokens) {
    return mismatch("TENSOR_TOKENS", "tokens", tensor->tokens, want.tokens);
  }
  const auto dtype = static_cast<DType>(tensor->dtype);
  const int64_t element = SizeOf(dtype);
  if (tensor->data == nullptr || reinterpret_cast<uintptr_t>(tensor->data) % element != 0) {
    return InvalidArgument("TENSOR_DATA",
                           name + ".data is " + (tensor->data == nullptr ? "NULL" : "misaligned") +
                               "; it must point to elements of " + std::string(NameOf(dtype)));
  }
  const int64_t row = tensor->head_dim * element;
  Rows rows{static_cast<const std::byte*>(tensor->data), tensor->token_stride, tensor->head_stride,
            dtype};
  if (rows.head_stride == 0) rows.head_stride = row;
  if (rows.token_stride == 0) rows.token_stride = rows.head_stride * tensor->heads;
  KVS_RETURN_IF_ERROR(CheckStride(name + ".head_stride", rows.head_stride, row, element));
  KVS_RETURN_IF_ERROR(CheckStride(name + ".token_stride", rows.token_stride, row, element));
  return rows;
}

Result<LentTensor> ReadBlockTensor(std::string_view field, const kvs_block_tensor* tensor) {
  KVS_RETURN_IF_ERROR(NotNull(field, tensor));
  KVS_ASSIGN_OR_RETURN(const kvs_block_tensor known,
                       Grown("kvs_block_tensor", tensor, offsetof(kvs_block_tensor, dim_stride)));
  const kvs_memory_handle* const memory = tensor->memory;
  const std::string name = Name(field) + ".memory";
  KVS_RETURN_IF_ERROR(NotNull(name, memory));
  KVS_RETURN_IF_ERROR(StructSize("kvs_memory_handle", memory, memory->size, sizeof(*memory)));
  if (memory->kind < KVS_MEMORY_MEMFD || memory->kind > KVS_MEMORY_PROCESS) {
    return InvalidArgument("TENSOR_KIND", name + ".kind is " + std::to_string(memory->kind) +
                                              "; allowed: KVS_MEMORY_MEMFD (1), "
                                              "KVS_MEMORY_CUDA_FD (2), KVS_MEMORY_CUDA_IPC (3), "
                                              "KVS_MEMORY_PROCESS (4)");
  }
  const bool has_descriptor =
      memory->kind == KVS_MEMORY_MEMFD || memory->kind == KVS_MEMORY_CUDA_FD;
  if (has_descriptor && memory->fd < 0) {
    return InvalidArgument("TENSOR_HANDLE", name + ".fd is " + std::to_string(memory->fd) +
                                                "; it must be an open descriptor");
  }
  LentTensor out;
  out.kind = memory->kind;
  out.fd = memory->fd;
  std::copy(std::begin(memory->ipc), std::end(memory->ipc), out.ipc.begin());
  out.bytes = memory->bytes;
  out.offset = tensor->offset;
  out.address = static_cast<std::byte*>(tensor->address);
  out.dtype = tensor->dtype;
  out.blocks = tensor->blocks;
  out.block_tokens = tensor->block_tokens;
  out.heads = tensor->heads;
  out.head_dim = tensor->head_dim;
  out.block_stride = tensor->block_stride;
  out.slot_stride = tensor->slot_stride;
  out.head_stride = tensor->head_stride;
  out.dim_stride = known.dim_stride;
  return out;
}

Result<Plan> ReadBlockPlan(const char* text) {
  KVS_RETURN_IF_ERROR(NotNull("plan", text));
  return ParsePlan(text);
}

Result<DType> ReadBlockDType(int32_t dtype) {
  switch (dtype) {
    case KVS_F16:
      return DType::kF16;
    case KVS_BF16:
      return DType::kBF16;
    default:
      return InvalidArgument("BLOCK_SHAPE", "dtype = " + std::to_string(dtype) +
                                                ", and has to be KVS_F16 or KVS_BF16");
  }
}

}  // namespace kvstrata::client
