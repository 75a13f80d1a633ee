// SPDX-License-Identifier: Apache-2.0
#include "server/attach/ring/ring_handlers.h"

#include <iterator>
#include <string>

#include "server/telemetry/log.h"
#include "server/telemetry/traffic.h"

namespace kvstrata {

void AwaitedRequests::Expire(ReplyRing* replies) {
  const auto now = std::chrono::steady_clock::now();
  for (auto it = deadlines_.begin(); it != deadlines_.end();) {
    if (now < it->second) {
      ++it;
      continue;
    }
    replies->Answer(
        it->first,
        Status(Code::kDeadlineExceeded, "SETTLE_TIMEOUT",
               "workers are still busy with the sequence; `kvstrata work ls` shows the queue"));
    it = deadlines_.erase(it);
  }
}

void OpenSequences::NoteEvent(uint64_t sequence, const Status& status) {
  if (status.ok()) return;
  LogEvent(LogLevel::kDebug, "event_refused",
           {{"session", session_}, {"sequence", sequence}, {"reason", status.reason()}});
  const auto found = sequences_.find(sequence);
  if (found != sequences_.end() && found->second.error.ok()) found->second.error = status;
}

Status OpenSequences::TakeEventError(uint64_t sequence) {
  const auto found = sequences_.find(sequence);
  if (found == sequences_.end()) {
    return NotFound("SEQUENCE_UNKNOWN",
                    "sequence " + std::to_string(sequence) + " is not open in this session");
  }
  return std::exchange(found->second.error, OkStatus());
}

void OpenSequences::NoteTokens(uint64_t sequence, uint64_t tokens) {
  const auto found = sequences_.find(sequence);
  if (found == sequences_.end()) return;
  found->second.tokens = std::max(found->second.tokens, static_cast<uint32_t>(tokens));
}

uint32_t OpenSequences::TokensOf(uint64_t sequence) const {
  const auto found = sequences_.find(sequence);
  return found == sequences_.end() ? 0 : found->second.tokens;
}

uint64_t OpenSequences::WorkToClose(uint64_t of_sequence, uint64_t of_token) const {
  uint64_t work = 0;
  for (const auto& [id, sequence] : sequences_) work += of_sequence + of_token * sequence.tokens;
  return work;
}

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

namespace kvstrata::ring {

namespace {

Malformed OnPing(RingState* state, const RingFrame& frame) {
  if (!frame.payload.empty()) return "Ping with a payload";
  state->replies.Answer(frame.header.id, OkStatus());
  return kHandled;
}

constexpr std::pair<shm::MessageType, Handler> kHandlers[] = {
    {shm::kPing, OnPing},
    {shm::kRegisterModel, OnRegisterModel},
    {shm::kOpenSequence, OnOpen},
    {shm::kForkSequence, OnFork},
    {shm::kCloseSequence, OnClose},
    {shm::kGrow, OnGrow},
    {shm::kTruncate, OnTruncate},
    {shm::kCloseKey, OnCloseKey},
    {shm::kTruncateKey, OnTruncateKey},
    {shm::kSettle, OnSettle},
    {shm::kLookup, OnLookup},
    {shm::kCapacity, OnCapacity},
    {shm::kRegisterTensors, OnRegisterTensors},
    {shm::kSealBlocks, OnSealBlocks},
    {shm::kAcknowledged, OnAcknowledged},
    {shm::kPlanText, OnPlanText},
    {shm::kBuild, OnBuild},
    {shm::kRecompress, OnRecompress},
    {shm::kCancelWork, OnCancelWork},
    {shm::kCommit, OnCommit},
    {shm::kReport, OnReport},
    {shm::kPrefillDone, OnPrefillDone},
    {shm::kRecall, OnRecall},
    {shm::kVerified, OnVerified},
};

}  // namespace

Handler HandlerOf(uint32_t type) {
  const auto found = std::ranges::find(kHandlers, type, [](const auto& row) { return row.first; });
  return found == std::end(kHandlers) ? nullptr : found->second;
}

bool AnswerLate(RingState* state) {
  if (!state->box->any()) return false;
  const LateAnswers late = state->box->Take();
  state->awaited.EndOpenings(late.opened.size() + late.looked_up.size());
  for (const auto& [id, request, opened] : late.opened) {
    if (opened.ok()) {
      NoteTime(Timed::kOpen, std::chrono::steady_clock::now() - request.begun);
      state->tensors.Opened(request.model, request.tokens, *opened);
    }
    AnswerOpened(state, id, opened, request.asked);
  }
  for (const LookupAnswer& answer : late.looked_up) AnswerLookedUp(state, answer);
  for (const auto& [id, status] : late.settled) {
    if (state->awaited.Answered(id))
      state->replies.Answer(id, status);  // else it has had its answer
  }
  for (const auto& [id, result] : late.built) {
    if (state->awaited.Answered(id)) AnswerBuilt(state, id, result);
  }
  return true;
}

}  // namespace kvstrata::ring
