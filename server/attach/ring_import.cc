// What a session that lends its engine's tensors asks (server/store/import_sink.h).
#include <algorithm>
#include <string>
#include <utility>

#include "server/attach/frame_reader.h"
#include "server/attach/ring_session.h"

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

}  // namespace

Status RingSession::RegisterTensors(const shm::RegisterTensors& in) {
  if (options_.import == nullptr) {
    return Unimplemented("IMPORT_NONE", "this daemon copies from no engine's tensors");
  }
  KVS_RETURN_IF_ERROR(CheckKind("keys", in.keys));
  KVS_RETURN_IF_ERROR(CheckKind("values", in.values));
  // Both may lie in one memory.
  std::map<uint32_t, PassedFd> taken;
  const auto descriptor = [&](const shm::BlockTensor& tensor) -> Result<int> {
    if (tensor.kind == shm::BlockTensor::kCudaIpc) return -1;
    PassedFd& fd = taken[tensor.descriptor];
    if (!fd && options_.take_descriptor) fd = options_.take_descriptor(tensor.descriptor);
    if (fd) return fd.get();
    return InvalidArgument("TENSOR_HANDLE", "no descriptor " + std::to_string(tensor.descriptor) +
                                                " has come by the attach socket; send it first");
  };
  KVS_ASSIGN_OR_RETURN(const int key_fd, descriptor(in.keys));
  KVS_ASSIGN_OR_RETURN(const int value_fd, descriptor(in.values));
  KVS_RETURN_IF_ERROR(options_.import->Register(in.model, in.layer, LentOf(in.keys, key_fd),
                                                LentOf(in.values, value_fd)));
  imported_models_.insert(in.model);
  return OkStatus();
}

RingSession::Outcome RingSession::OnRegisterTensors(const Frame& frame) {
  shm::RegisterTensors in;
  std::span<const std::byte> rest = frame.payload;
  if (!Take(&rest, &in) || !rest.empty()) return Malformed("RegisterTensors of a wrong size");
  Answer(frame.header.id, RegisterTensors(in));
  return Outcome::kWorked;
}

RingSession::Outcome RingSession::OnSealBlocks(const Frame& frame) {
  shm::SealBlocks in;
  std::span<const std::byte> rest = frame.payload;
  std::span<const int32_t> blocks, tokens;
  if (!Take(&rest, &in) || !TakeArray(&rest, in.blocks, &blocks) ||
      !TakeArray(&rest, in.tokens, &tokens) || !rest.empty()) {
    return Malformed("SealBlocks of a wrong size");
  }
  Status status = TakeEventError(in.sequence);
  if (status.ok()) {
    status = options_.import == nullptr
                 ? NotFound("SEQUENCE_UNKNOWN", "this daemon has no imported sequences")
                 : options_.import->Seal({in.sequence, in.first, blocks, tokens});
  }
  Answer(frame.header.id, status);
  return Outcome::kWorked;
}

RingSession::Outcome RingSession::OnAcknowledged(const Frame& frame) {
  shm::SequenceRef in;
  std::span<const std::byte> rest = frame.payload;
  if (!Take(&rest, &in) || !rest.empty()) return Malformed("Acknowledged of a wrong size");
  const Result<uint32_t> tokens =
      options_.import == nullptr
          ? NotFound("SEQUENCE_UNKNOWN", "this daemon has no imported sequences")
          : options_.import->Acknowledged(in.sequence);
  const shm::AcknowledgedReply reply{tokens.ok() ? *tokens : 0, 0};
  Answer(frame.header.id, tokens.status(),
         tokens.ok() ? BytesOf(reply) : std::span<const std::byte>());
  return Outcome::kWorked;
}

void RingSession::AwaitCopies(uint64_t sequence, SettleDone then) {
  if (!imported_.contains(sequence)) return then(OkStatus());
  options_.import->Settle(sequence, std::move(then));
}

void RingSession::Settle(uint64_t sequence, SettleDone done) {
  AwaitCopies(sequence, [store = store_, session = session_, sequence,
                         done = std::move(done)](const Status& copied) {
    if (!copied.ok()) return done(copied);
    store->recompression().Settle(session, sequence, done);
  });
}

void RingSession::NoteImported(const OpenRequest& request, const OpenedSequence& opened) {
  if (!opened.imported) return;
  imported_.insert(opened.sequence);
  options_.import->Opened(opened.sequence, request.model,
                          std::span(request.tokens).first(opened.held_tokens));
}

}  // namespace kvstrata
