// SPDX-License-Identifier: Apache-2.0
// Imported mode of the linked transport (kvstrata.h): the engine's tensors are named to the daemon,
// which copies from them; what is held is copied into them here, from the daemon's pages.
#include <algorithm>
#include <string>

#include "client/linked/linked_session.h"

namespace kvstrata::client {
namespace {

shm::BlockTensor MessageOf(const LentTensor& t, uint32_t descriptor) {
  shm::BlockTensor out{};
  out.kind = static_cast<uint32_t>(t.kind);
  out.descriptor = descriptor;
  std::copy(t.ipc.begin(), t.ipc.end(), out.ipc);
  out.bytes = t.bytes;
  out.offset = t.offset;
  out.block_stride = t.block_stride;
  out.slot_stride = t.slot_stride;
  out.head_stride = t.head_stride;
  out.dtype = t.dtype;
  out.blocks = t.blocks;
  out.block_tokens = t.block_tokens;
  out.heads = t.heads;
  out.head_dim = t.head_dim;
  return out;
}

bool HasDescriptor(const LentTensor& t) { return t.kind != KVS_MEMORY_CUDA_IPC; }

Status Refuse(std::string_view reason, std::string_view name, std::string_view field, int64_t value,
              const std::string& allowed) {
  return InvalidArgument(std::string(reason), std::string(name) + "." + std::string(field) +
                                                  " is " + std::to_string(value) +
                                                  "; allowed: " + allowed);
}

// Checks memory that the daemon does not see. The daemon checks the rest on what is staged.
Status CheckOwn(const Geometry& g, std::string_view name, const LentTensor& t) {
  constexpr int32_t kMaxBlockTokens = 1 << 16;
  if (t.address == nullptr) {
    return InvalidArgument("TENSOR_ADDRESS", std::string(name) +
                                                 ".address is NULL; KVS_MEMORY_PROCESS is copied "
                                                 "from there");
  }
  const auto dtype = static_cast<int32_t>(g.dtype);
  if (t.dtype != dtype) {
    return Refuse("TENSOR_DTYPE", name, "dtype", t.dtype, "the model's, " + std::to_string(dtype));
  }
  if (t.heads != g.kv_heads) {
    return Refuse("TENSOR_SHAPE", name, "heads", t.heads,
                  "the model's, " + std::to_string(g.kv_heads));
  }
  if (t.head_dim != g.head_dim) {
    return Refuse("TENSOR_SHAPE", name, "head_dim", t.head_dim,
                  "the model's, " + std::to_string(g.head_dim));
  }
  if (t.blocks < 1) return Refuse("TENSOR_SHAPE", name, "blocks", t.blocks, "at least 1");
  if (t.block_tokens >= 1 && t.block_tokens <= kMaxBlockTokens) return OkStatus();
  return Refuse("TENSOR_SHAPE", name, "block_tokens", t.block_tokens,
                "1 to " + std::to_string(kMaxBlockTokens));
}

// dim_stride becomes that of contiguous rows where it is 0.
Status CheckMemory(const Session::State& session, const Geometry& g, std::string_view name,
                   LentTensor* t) {
  const int64_t element = SizeOf(g.dtype);
  if (t->dim_stride == 0) t->dim_stride = element;
  if (t->kind != KVS_MEMORY_PROCESS) {
    if (t->dim_stride == element) return OkStatus();
    return Refuse("TENSOR_STRIDE", name, "dim_stride", t->dim_stride,
                  "0 or " + std::to_string(element) +
                      " in memory that the daemon reads; register it as KVS_MEMORY_PROCESS");
  }
  if (session.gpu_session == nullptr) return CheckOwn(g, name, *t);
  return Unimplemented("TENSOR_KIND", std::string(name) +
                                          ".memory.kind is KVS_MEMORY_PROCESS, and pages are a "
                                          "GPU's; lend CUDA memory");
}

Status CheckBlocks(const ImportedModel& model, std::span<const int32_t> blocks) {
  for (size_t layer = 0; layer < model.layers.size(); ++layer) {
    for (const LentTensor* t : {&model.layers[layer].keys, &model.layers[layer].values}) {
      if (t->address == nullptr) {
        return FailedPrecondition("TENSOR_ADDRESS",
                                  "layer " + std::to_string(layer) +
                                      " was registered without the tensors' addresses in this "
                                      "process; register it with them");
      }
      for (size_t i = 0; i < blocks.size(); ++i) {
        if (blocks[i] >= 0 && blocks[i] < t->blocks) continue;
        return InvalidArgument("BLOCK_UNKNOWN", "blocks[" + std::to_string(i) + "] is " +
                                                    std::to_string(blocks[i]) + "; allowed: 0 to " +
                                                    std::to_string(t->blocks - 1));
      }
    }
  }
  return OkStatus();
}

// Rows of one layer's keys or values, of one page and one block.
struct RowRun {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  int32_t rows = 0;
};

Status CopyRun(const Gpu& gpu, const PageLayout& page, const LentTensor& tensor, const RowRun& run,
               void* stream) {
  if (gpu.ops != nullptr) {
    cuda::CopyRowsBatch copy;
    copy.from = run.from;
    copy.from_row_stride = page.slot_stride;
    copy.from_head_stride = page.head_stride;
    copy.from_dtype = copy.to_dtype = page.dtype;
    copy.to = run.to;
    copy.to_row_stride = tensor.slot_stride;
    copy.to_head_stride = tensor.head_stride;
    copy.rows = run.rows;
    copy.heads = page.kv_heads;
    copy.dim = page.head_dim;
    return CudaStatus(*gpu.ops, gpu.ops->copy_rows(copy, stream), "loading blocks");
  }
  const auto element = static_cast<int32_t>(page.slot_stride / page.head_dim);
  CopyRows({run.to, tensor.slot_stride, tensor.head_stride, tensor.dim_stride},
           {const_cast<std::byte*>(run.from), page.slot_stride, page.head_stride, element},
           {run.rows, page.kv_heads, page.head_dim, element});
  return OkStatus();
}

}  // namespace

Status SequenceImported(uint64_t sequence) {
  return FailedPrecondition("SEQUENCE_IMPORTED",
                            "sequence " + std::to_string(sequence) +
                                " is imported: its session registered its model's tensors, and "
                                "the daemon fills its pages from them; run steps on a sequence of "
                                "another session");
}

Status Session::RegisterTensors(uint64_t model, int32_t layer, const LentTensor& k,
                                const LentTensor& v, bool same_memory) {
  KVS_ASSIGN_OR_RETURN(const State::RegisteredModel registered, ModelOf(state_.get(), model));
  const Geometry& geometry = registered.geometry;
  LentTensor keys = k, values = v;
  KVS_RETURN_IF_ERROR(CheckMemory(*state_, geometry, "keys", &keys));
  KVS_RETURN_IF_ERROR(CheckMemory(*state_, geometry, "values", &values));
  if ((keys.kind == KVS_MEMORY_PROCESS) != (values.kind == KVS_MEMORY_PROCESS)) {
    return InvalidArgument("TENSOR_KIND",
                           "of keys and values one is KVS_MEMORY_PROCESS, the other "
                           "is not; register both in the same way");
  }
  std::shared_ptr<StagedBlocks> staged;
  if (keys.kind == KVS_MEMORY_PROCESS) {
    KVS_ASSIGN_OR_RETURN(staged, Lending(state_.get()).StagedFor(model, keys, geometry));
    same_memory = true;
  }
  const LentTensor read_keys = staged ? staged->TensorOf(layer, 0) : keys;
  const LentTensor read_values = staged ? staged->TensorOf(layer, 1) : values;
  // Sent before the request is: the daemon finds them when it handles that.
  const auto send = [this](const LentTensor& tensor) -> Result<uint32_t> {
    if (!HasDescriptor(tensor)) return 0;
    const uint32_t number = state_->next_descriptor++;
    KVS_RETURN_IF_ERROR(state_->connection->SendDescriptor(number, tensor.fd, state_->Deadline()));
    return number;
  };
  KVS_ASSIGN_OR_RETURN(const uint32_t key_number, send(read_keys));
  uint32_t value_number = key_number;
  if (!same_memory) {
    KVS_ASSIGN_OR_RETURN(value_number, send(read_values));
  }
  const shm::RegisterTensors request{model, layer, 0, MessageOf(read_keys, key_number),
                                     MessageOf(read_values, value_number)};
  KVS_RETURN_IF_ERROR(state_->ring->Call(shm::kRegisterTensors, {BytesOf(request)}, nullptr));
  std::lock_guard<std::mutex> lock(state_->mu);
  ImportedModel& imported = state_->imported_models[model];
  imported.layers.resize(static_cast<size_t>(geometry.layers));
  imported.layers[static_cast<size_t>(layer)] = {keys, values};  // the daemon checked `layer`
  imported.staged = std::move(staged);
  return OkStatus();
}

Result<std::shared_ptr<StagedBlocks>> Lending::StagedFor(uint64_t model, const LentTensor& tensor,
                                                         const Geometry& geometry) {
  std::lock_guard<std::mutex> lock(session_.mu);
  if (const auto it = session_.imported_models.find(model); it != session_.imported_models.end()) {
    if (it->second.staged != nullptr) return it->second.staged;
  }
  KVS_ASSIGN_OR_RETURN(
      std::shared_ptr<StagedBlocks> made,
      StagedBlocks::Make(tensor, geometry.layers, static_cast<int32_t>(SizeOf(geometry.dtype))));
  return made;
}

Status Session::SealBlocks(uint64_t sequence, uint32_t first, std::span<const int32_t> blocks,
                           std::span<const int32_t> tokens) {
  KVS_ASSIGN_OR_RETURN(SequenceUse s, SequenceUse::Of(state_.get(), sequence, false));
  if (blocks.size() + tokens.size() > state_->ring->max_tokens()) {
    return InvalidArgument("ARGUMENT_RANGE",
                           std::to_string(blocks.size()) + " blocks and " +
                               std::to_string(tokens.size()) +
                               " tokens; allowed: " + std::to_string(state_->ring->max_tokens()) +
                               " of both together; seal fewer at a time");
  }
  ImportedModel model;
  {
    std::lock_guard<std::mutex> lock(state_->mu);
    const auto it = state_->imported_models.find(s->model);
    if (it != state_->imported_models.end()) model = it->second;
  }
  if (model.staged == nullptr) return Lending(state_.get()).Seal(sequence, {first, blocks, tokens});
  return Lending(state_.get()).SealStaged(s.get(), model, {first, blocks, tokens});
}

Status Lending::Seal(uint64_t sequence, const SealedBlocks& all) {
  const shm::SealBlocks request{sequence, all.first, static_cast<uint32_t>(all.blocks.size()),
                                static_cast<uint32_t>(all.tokens.size()), 0};
  return session_.ring->Call(
      shm::kSealBlocks, {BytesOf(request), std::as_bytes(all.blocks), std::as_bytes(all.tokens)},
      nullptr);
}

Result<uint32_t> Lending::Acknowledged(uint64_t sequence) {
  KVS_ASSIGN_OR_RETURN(const auto reply,
                       session_.ring->Ask<shm::AcknowledgedReply>(
                           shm::kAcknowledged, {BytesOf(shm::SequenceRef{sequence})}));
  return reply.tokens;
}

Result<uint32_t> Session::Acknowledged(uint64_t sequence) {
  KVS_ASSIGN_OR_RETURN(SequenceUse s, SequenceUse::Of(state_.get(), sequence, false));
  KVS_ASSIGN_OR_RETURN(const uint32_t tokens, Lending(state_.get()).Acknowledged(sequence));
  ReleaseStaged(s.get(), tokens);
  return tokens;
}

Status Session::LoadBlocks(uint64_t sequence, uint32_t first, std::span<const int32_t> blocks,
                           void* stream) {
  KVS_ASSIGN_OR_RETURN(SequenceUse s, SequenceUse::Of(state_.get(), sequence, false));
  if (state_->gpu_session == nullptr) KVS_RETURN_IF_ERROR(NoStream(stream));
  ImportedModel model;
  {
    std::lock_guard<std::mutex> lock(state_->mu);
    const auto it = state_->imported_models.find(s->model);
    if (!s->imported || it == state_->imported_models.end()) {
      return FailedPrecondition("SEQUENCE_OWNED",
                                "sequence " + std::to_string(sequence) +
                                    " is not imported: register its model's tensors, then open it");
    }
    model = it->second;
  }
  KVS_RETURN_IF_ERROR(CheckBlocks(model, blocks));
  KVS_ASSIGN_OR_RETURN(const uint32_t held, Lending(state_.get()).Acknowledged(sequence));
  const auto block_tokens = static_cast<uint32_t>(model.layers.front().keys.block_tokens);
  if (first % block_tokens != 0 || first > held) {
    return InvalidArgument("ARGUMENT_RANGE",
                           "first is " + std::to_string(first) + "; allowed: multiples of " +
                               std::to_string(block_tokens) + " up to the " + std::to_string(held) +
                               " tokens that are held or acknowledged");
  }
  const uint64_t asked = first + uint64_t{blocks.size()} * block_tokens;
  return Lending(state_.get())
      .CopyToBlocks(s.get(), model, first, static_cast<uint32_t>(std::min<uint64_t>(asked, held)),
                    blocks, stream);
}

Status Lending::CopyToBlocks(Sequence* s, const ImportedModel& model, uint32_t first, uint32_t end,
                             std::span<const int32_t> blocks, void* stream) {
  const TableClaim nothing{s, 0, false};
  KVS_ASSIGN_OR_RETURN(const int slot, session_.Enter({&nothing, 1}, nullptr));
  const Status copied = CopyPages(*s, model, first, end, blocks, stream);
  if (session_.gpu_session == nullptr) {
    session_.Leave(slot);
    return copied;
  }
  // The GPU leaves the epoch when it has read the pages.
  const Status left =
      CudaStatus(*session_.gpu.ops,
                 session_.gpu.ops->write_value(session_.gpu_session->ExitOf(slot), 0, stream),
                 "loading blocks");
  if (!left.ok()) {
    (void)session_.gpu.ops->synchronize(stream);
    session_.Leave(slot);
    return copied.ok() ? left : copied;
  }
  (void)session_.gpu_session->Ended(slot);
  return copied;
}

Status Lending::CopyPages(const Sequence& s, const ImportedModel& model, uint32_t first,
                          uint32_t end, std::span<const int32_t> blocks, void* stream) {
  const Geometry& g = s.state->geometry();
  const PageLayout layout = PageLayout::Of(g);
  const auto page_tokens = static_cast<uint32_t>(g.page_tokens);
  const auto block_tokens = static_cast<uint32_t>(model.layers.front().keys.block_tokens);
  if (end > uint64_t{s.table.pages} * page_tokens) {
    return Internal("TABLE_NOT_GROWN", "the daemon holds tokens that its table does not cover");
  }
  // Runs of positions that lie in one page and in one block.
  for (uint32_t p = first, n = 0; p < end; p += n) {
    const uint32_t slot = (p - first) % block_tokens, page_slot = p % page_tokens;
    n = std::min({block_tokens - slot, page_tokens - page_slot, end - p});
    const std::byte* const page = s.pages[p / page_tokens];
    if (page == nullptr) {
      return NotFound("PAGE_GONE", "position " + std::to_string(p) +
                                       " is held by a codec alone (the plan's keep_raw); compute "
                                       "it again");
    }
    const auto block = static_cast<int64_t>(blocks[(p - first) / block_tokens]);
    for (int32_t layer = 0; layer < g.layers; ++layer) {
      const ImportedModel::Layer& to = model.layers[static_cast<size_t>(layer)];
      const auto copy = [&](const LentTensor& t, int64_t offset) {
        return CopyRun(session_.gpu, layout, t,
                       {page + offset, t.address + block * t.block_stride + slot * t.slot_stride,
                        static_cast<int32_t>(n)},
                       stream);
      };
      const auto from = static_cast<int>(page_slot);
      KVS_RETURN_IF_ERROR(copy(to.keys, layout.KeyOffset(layer, 0, from)));
      KVS_RETURN_IF_ERROR(copy(to.values, layout.ValueOffset(layer, 0, from)));
    }
  }
  return OkStatus();
}

}  // namespace kvstrata::client
