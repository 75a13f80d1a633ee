#include "server/attach/ring_session.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "server/attach/frame_reader.h"
#include "server/attach/packet.h"
#include "server/telemetry/log.h"
#include "server/telemetry/refusals.h"
#include "server/telemetry/traffic.h"

namespace kvstrata {
namespace {

Status ReadModel(const shm::RegisterModel& in, std::span<const int32_t> boundaries,
                 ModelDesc* out) {
  const auto text = [](std::string_view field, std::span<const char> from, std::string* to) {
    if (ReadText(from, to) && Printable(*to) == *to) return OkStatus();
    return InvalidArgument("MODEL_TEXT", "model " + std::string(field) +
                                             " is not NUL-terminated UTF-8 without control "
                                             "characters in " +
                                             std::to_string(from.size()) + " bytes");
  };
  KVS_RETURN_IF_ERROR(text("name", in.name, &out->name));
  KVS_RETURN_IF_ERROR(text("digest", in.digest, &out->digest));
  KVS_RETURN_IF_ERROR(text("layout", in.layout, &out->layout));
  KVS_RETURN_IF_ERROR(text("adapter", in.adapter, &out->adapter));
  if (!IsDType(in.dtype)) {
    return InvalidArgument("MODEL_DTYPE", "model dtype " + std::to_string(in.dtype) +
                                              "; allowed: 1 (f32), 2 (f16), 3 (bf16)");
  }
  if (in.keys_pre_rope != 0 && in.keys_pre_rope != 1) {
    return InvalidArgument("MODEL_KEYS", "model keys_pre_rope " + std::to_string(in.keys_pre_rope) +
                                             "; allowed: 0 (post_rope), 1 (pre_rope)");
  }
  out->geometry = {in.layers,   in.query_heads, in.kv_heads,
                   in.head_dim, in.page_tokens, static_cast<DType>(in.dtype)};
  out->geometry.scale = static_cast<float>(in.scale);
  KVS_ASSIGN_OR_RETURN(out->geometry.rotary, ReadRotary({in.keys_pre_rope != 0, in.rope_theta,
                                                         in.rope_dim, in.rope_interleaved},
                                                        in.head_dim));
  out->rank = in.rank;
  out->ranks = in.ranks;
  out->boundary_tokens.assign(boundaries.begin(), boundaries.end());
  return OkStatus();
}

}  // namespace

Result<std::unique_ptr<RingSession>> RingSession::Map(const SessionSegments& segments, Store* store,
                                                      RingOptions options) {
  void* base = mmap(nullptr, segments.session_bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                    segments.session_fd, 0);
  if (base == MAP_FAILED) {
    return ResourceExhausted("SESSION_MAP", "cannot map a session segment of " +
                                                std::to_string(segments.session_bytes) +
                                                " bytes: " + std::strerror(errno));
  }
  return std::unique_ptr<RingSession>(
      new RingSession(static_cast<std::byte*>(base), segments, store, std::move(options)));
}

RingSession::RingSession(std::byte* base, const SessionSegments& segments, Store* store,
                         RingOptions options)
    : base_(base),
      bytes_(segments.session_bytes),
      session_(segments.session),
      store_(store),
      options_(std::move(options)),
      box_(new AnswerBox{.wake = options_.wake}) {
  // The client has not got the segment yet: its header can still be believed.
  auto* header = reinterpret_cast<shm::SessionHeader*>(base_);
  KVS_CHECK(header->request_ring_offset + shm::kRequestRingBytes <= bytes_);
  KVS_CHECK(header->reply_ring_offset + shm::kReplyRingBytes <= bytes_);
  requests_ = shm::RingConsumer(&header->request, base_ + header->request_ring_offset,
                                shm::kRequestRingBytes);
  replies_ =
      shm::RingProducer(&header->reply, base_ + header->reply_ring_offset, shm::kReplyRingBytes);
}

RingSession::~RingSession() { munmap(base_, bytes_); }

bool RingSession::PrepareSleep() {
  requests_.PrepareSleep();
  if (box_->any.load(std::memory_order_acquire)) return false;
  return !MayTake() || (!held_ && requests_.Empty());
}

void RingSession::CancelSleep() { requests_.CancelSleep(); }

RingSession::Outcome RingSession::Malformed(std::string why) {
  malformed_ = std::move(why);
  return Outcome::kMalformed;
}

RingSession::Outcome RingSession::Handle(const Frame& frame) {
  const uint32_t type = frame.header.type;
  if (type < shm::kCommit && frame.header.id == 0) return Malformed("request without an id");
  switch (type) {
    case shm::kPing:
      if (!frame.payload.empty()) return Malformed("Ping with a payload");
      Answer(frame.header.id, OkStatus());
      return Outcome::kWorked;
    case shm::kRegisterModel:
      return OnRegisterModel(frame);
    case shm::kOpenSequence:
      return OnOpen(frame);
    case shm::kForkSequence:
      return OnFork(frame);
    case shm::kCloseSequence:
      return OnClose(frame);
    case shm::kGrow:
      return OnGrow(frame);
    case shm::kTruncate:
      return OnTruncate(frame);
    case shm::kCloseKey:
      return OnCloseKey(frame);
    case shm::kTruncateKey:
      return OnTruncateKey(frame);
    case shm::kSettle:
      return OnSettle(frame);
    case shm::kLookup:
      return OnLookup(frame);
    case shm::kCapacity:
      return OnCapacity(frame);
    case shm::kDetach:
      return OnDetach(frame);
    case shm::kRegisterTensors:
      return OnRegisterTensors(frame);
    case shm::kSealBlocks:
      return OnSealBlocks(frame);
    case shm::kAcknowledged:
      return OnAcknowledged(frame);
    case shm::kPlanText:
      return OnPlanText(frame);
    case shm::kBuild:
      return OnBuild(frame);
    case shm::kRecompress:
      return OnRecompress(frame);
    case shm::kCancelWork:
      return OnCancelWork(frame);
    case shm::kCommit:
      return OnCommit(frame);
    case shm::kReport:
      return OnReport(frame);
    case shm::kPrefillDone:
      return OnPrefillDone(frame);
    case shm::kRecall:
      return OnRecall(frame);
    default:
      return Malformed("unknown message type " + std::to_string(type));
  }
}

// --- replies -------------------------------------------------------------------------------------

void RingSession::Answer(uint64_t id, const Status& status, std::span<const std::byte> head,
                         std::span<const std::byte> tail) {
  if (!status.ok()) {
    NoteRefusal(status, {"ring", options_.peer.uid, options_.peer.pid, session_, ""});
  }
  shm::ErrorReply reply{};
  reply.code = static_cast<int32_t>(status.code());
  reply.payload_bytes = static_cast<uint32_t>(head.size() + tail.size());
  CopyText(status.reason(), reply.reason);
  CopyText(status.message(), reply.message);
  if (backlog_.empty() && TryPush(id, BytesOf(reply), head, tail)) return;
  NoteReplyWaits();
  Waiting waiting{id, {}};
  for (const auto part : {BytesOf(reply), head, tail}) {
    waiting.bytes.insert(waiting.bytes.end(), part.begin(), part.end());
  }
  backlog_used_ += waiting.bytes.size();
  backlog_.push_back(std::move(waiting));
}

bool RingSession::TryPush(uint64_t id, std::span<const std::byte> reply,
                          std::span<const std::byte> head, std::span<const std::byte> tail) {
  if (!replies_.Push(shm::kReply, id, {reply, head, tail})) return false;
  if (replies_.ConsumerSleeps()) replies_.FutexWake();
  return true;
}

void RingSession::FlushBacklog() {
  while (!backlog_.empty() && TryPush(backlog_.front().id, backlog_.front().bytes, {}, {})) {
    backlog_used_ -= backlog_.front().bytes.size();
    backlog_.pop_front();
  }
}

void RingSession::AnswerOpened(uint64_t id, const Result<OpenedSequence>& opened, uint32_t tokens) {
  if (!opened.ok()) return Answer(id, opened.status());
  const OpenedSequence& s = opened.value();
  sequences_.try_emplace(s.sequence);
  LogEvent(LogLevel::kDebug, "sequence_opened",
           {{"session", session_},
            {"sequence", s.sequence},
            {"plan", s.plan.name},
            {"held_tokens", s.held_tokens}});
  NoteTokens(s.sequence, tokens);
  const std::string plan = FormatPlan(s.plan);
  // Ends that the frame has no room for are reported by the engine again, as if never stored.
  const size_t besides =
      sizeof(shm::FrameHeader) + sizeof(shm::ErrorReply) + sizeof(shm::SequenceReply) + plan.size();
  const size_t ends = std::min(s.boundary.size(), replies_.max_frame() - besides);
  // Where the model names the tokens that end sentences, a client knows the ends by itself.
  const uint32_t bounded = s.boundary_tokens.empty()
                               ? std::min(s.bounded_tokens, static_cast<uint32_t>(ends))
                               : s.bounded_tokens;
  std::vector<std::byte> text(plan.size() + ends);
  std::memcpy(text.data(), plan.data(), plan.size());
  if (ends != 0) std::memcpy(text.data() + plan.size(), s.boundary.data(), ends);
  const shm::SequenceReply reply{s.sequence,
                                 s.slot,
                                 s.held_tokens,
                                 s.indexed_tokens,
                                 static_cast<uint32_t>(plan.size()),
                                 s.surprisal_tokens,
                                 static_cast<uint32_t>(ends),
                                 bounded,
                                 0};
  Answer(id, OkStatus(), BytesOf(reply), text);
}

// --- errors of events ----------------------------------------------------------------------------

void RingSession::NoteEvent(uint64_t sequence, const Status& status) {
  if (status.ok()) return;
  LogEvent(LogLevel::kDebug, "event_refused",
           {{"session", session_}, {"sequence", sequence}, {"reason", status.reason()}});
  const auto found = sequences_.find(sequence);
  if (found != sequences_.end() && found->second.error.ok()) found->second.error = status;
}

Status RingSession::TakeEventError(uint64_t sequence) {
  const auto found = sequences_.find(sequence);
  if (found == sequences_.end()) {
    return NotFound("SEQUENCE_UNKNOWN",
                    "sequence " + std::to_string(sequence) + " is not open in this session");
  }
  return std::exchange(found->second.error, OkStatus());
}

// --- messages ------------------------------------------------------------------------------------

RingSession::Outcome RingSession::OnRegisterModel(const Frame& frame) {
  shm::RegisterModel in;
  std::span<const std::byte> rest = frame.payload;
  std::span<const int32_t> boundaries;
  if (!Take(&rest, &in) || in.boundary_count < 0 ||
      !TakeArray(&rest, static_cast<uint32_t>(in.boundary_count), &boundaries) || !rest.empty()) {
    return Malformed("RegisterModel of a wrong size");
  }
  ModelDesc desc;
  if (Status status = ReadModel(in, boundaries, &desc); !status.ok()) {
    Answer(frame.header.id, status);
    return Outcome::kWorked;
  }
  const Result<uint64_t> model = store_->models().RegisterModel(session_, desc);
  const shm::ModelReply reply{model.ok() ? model.value() : 0};
  Answer(frame.header.id, model.status(),
         model.ok() ? BytesOf(reply) : std::span<const std::byte>());
  return Outcome::kWorked;
}

RingSession::Outcome RingSession::OnOpen(const Frame& frame) {
  shm::OpenSequence in;
  std::span<const std::byte> rest = frame.payload;
  std::span<const char> plan;
  std::span<const int32_t> tokens;
  if (!Take(&rest, &in) || !TakeArray(&rest, (uint64_t{in.plan_bytes} + 3) & ~uint64_t{3}, &plan) ||
      !TakeArray(&rest, in.tokens, &tokens) || !rest.empty()) {
    return Malformed("OpenSequence of a wrong size");
  }
  std::string key;
  if (!ReadText(in.key, &key)) return Malformed("OpenSequence with a key that does not end");
  const std::string_view text(plan.data(), strnlen(plan.data(), plan.size()));
  const uint64_t id = frame.header.id;
  OpenRequest request{
      in.model, {}, std::max(in.tokens, in.reserve_tokens), std::chrono::steady_clock::now()};
  if (imported_models_.contains(in.model)) request.tokens.assign(tokens.begin(), tokens.end());
  const OpenOptions options{
      {in.max_held_tokens, (in.flags & shm::OpenSequence::kOnlyReported) != 0}, in.reserve_tokens};
  ++opening_;
  store_->openings().OpenSequence(
      session_, in.model, text, tokens,
      [box = box_, store = store_, session = session_, id, request,
       key](const Result<OpenedSequence>& opened) {
        box->PutOpened(id, request, store->sequences().GiveKey(session, opened, key));
      },
      options);
  AnswerLate();  // most have nothing to wait for
  return Outcome::kWorked;
}

RingSession::Outcome RingSession::OnPlanText(const Frame& frame) {
  shm::PlanText in;
  std::span<const std::byte> rest = frame.payload;
  std::span<const char> plan;
  if (!Take(&rest, &in) || !TakeArray(&rest, (uint64_t{in.plan_bytes} + 3) & ~uint64_t{3}, &plan) ||
      !rest.empty()) {
    return Malformed("PlanText of a wrong size");
  }
  const Result<Plan> named =
      store_->plans().ResolvePlan({plan.data(), strnlen(plan.data(), plan.size())});
  const std::string text = named.ok() ? FormatPlan(*named) : "";
  Answer(frame.header.id, named.status(), std::as_bytes(std::span(text)));
  return Outcome::kWorked;
}

RingSession::Outcome RingSession::OnFork(const Frame& frame) {
  shm::SequenceRef in;
  std::span<const std::byte> rest = frame.payload;
  if (!Take(&rest, &in) || !rest.empty()) return Malformed("ForkSequence of a wrong size");
  if (const Status earlier = TakeEventError(in.sequence); !earlier.ok()) {
    Answer(frame.header.id, earlier);
  } else {
    AnswerOpened(frame.header.id, store_->sequences().ForkSequence(session_, in.sequence),
                 TokensOf(in.sequence));
  }
  return Outcome::kWorked;
}

RingSession::Outcome RingSession::OnClose(const Frame& frame) {
  shm::SequenceRef in;
  std::span<const std::byte> rest = frame.payload;
  if (!Take(&rest, &in) || !rest.empty()) return Malformed("CloseSequence of a wrong size");
  sequences_.erase(in.sequence);
  if (imported_.erase(in.sequence) != 0) options_.import->Closed(in.sequence);
  const Status closed = store_->sequences().CloseSequence(session_, in.sequence);
  if (closed.ok()) {
    LogEvent(LogLevel::kDebug, "sequence_closed",
             {{"session", session_}, {"sequence", in.sequence}});
  }
  Answer(frame.header.id, closed);
  return Outcome::kWorked;
}

RingSession::Outcome RingSession::OnCloseKey(const Frame& frame) {
  shm::SequenceKey in;
  std::span<const std::byte> rest = frame.payload;
  std::string key;
  if (!Take(&rest, &in) || !rest.empty() || !ReadText(in.key, &key)) {
    return Malformed("CloseKey of a wrong size");
  }
  Answer(frame.header.id, store_->sequences().CloseKey(session_, key));
  return Outcome::kWorked;
}

RingSession::Outcome RingSession::OnTruncateKey(const Frame& frame) {
  shm::TruncateKey in;
  std::span<const std::byte> rest = frame.payload;
  std::string key;
  if (!Take(&rest, &in) || !rest.empty() || !ReadText(in.key, &key)) {
    return Malformed("TruncateKey of a wrong size");
  }
  Answer(frame.header.id, store_->sequences().TruncateKey(session_, key, in.tokens));
  return Outcome::kWorked;
}

RingSession::Outcome RingSession::OnGrow(const Frame& frame) {
  shm::Grow in;
  std::span<const std::byte> rest = frame.payload;
  if (!Take(&rest, &in) || !rest.empty()) return Malformed("Grow of a wrong size");
  Status status = TakeEventError(in.sequence);
  if (status.ok()) {
    status = store_->steps().Grow(session_, in.sequence, in.tokens, in.writable, in.index_writable);
    if (status.ok()) NoteTokens(in.sequence, in.tokens);
  }
  Answer(frame.header.id, status);
  return Outcome::kWorked;
}

RingSession::Outcome RingSession::OnTruncate(const Frame& frame) {
  shm::Truncate in;
  std::span<const std::byte> rest = frame.payload;
  std::span<const int32_t> tail;
  if (!Take(&rest, &in) || !TakeArray(&rest, in.tail, &tail) || !rest.empty()) {
    return Malformed("Truncate of a wrong size");
  }
  Status status = TakeEventError(in.sequence);
  if (status.ok()) status = store_->sequences().Truncate(session_, in.sequence, in.tokens, tail);
  Answer(frame.header.id, status);
  return Outcome::kWorked;
}

RingSession::Outcome RingSession::OnSettle(const Frame& frame) {
  shm::SequenceRef in;
  std::span<const std::byte> rest = frame.payload;
  if (!Take(&rest, &in) || !rest.empty()) return Malformed("Settle of a wrong size");
  // Events are handled in the order of the ring, before this frame.
  if (const Status earlier = TakeEventError(in.sequence); !earlier.ok()) {
    Answer(frame.header.id, earlier);
    return Outcome::kWorked;
  }
  const uint64_t id = frame.header.id;
  if (!Await(id)) return Malformed("a request's id that waits for its answer already");
  Settle(in.sequence, [box = box_, id](const Status& status) { box->PutSettled(id, status); });
  AnswerLate();  // most have nothing to wait for
  return Outcome::kWorked;
}

void RingSession::AnswerBox::PutSettled(uint64_t id, const Status& status) {
  {
    MutexLock lock(mu);
    settled.emplace_back(id, status);
  }
  Tell();
}

void RingSession::AnswerBox::PutOpened(uint64_t id, const OpenRequest& request,
                                       const Result<OpenedSequence>& sequence) {
  {
    MutexLock lock(mu);
    opened.push_back({id, request, sequence});
  }
  Tell();
}

void RingSession::AnswerBox::Tell() {
  any.store(true, std::memory_order_release);
  if (wake && std::this_thread::get_id() != serving.load()) wake();
}

bool RingSession::AnswerLate() {
  if (!box_->any.load(std::memory_order_acquire)) return false;
  std::vector<std::pair<uint64_t, Status>> settled;
  std::vector<Open> opened;
  std::vector<std::pair<uint64_t, Result<BuildResult>>> built;
  std::vector<LookedUp> looked_up;
  {
    MutexLock lock(box_->mu);
    looked_up.swap(box_->looked_up);
    settled.swap(box_->settled);
    opened.swap(box_->opened);
    built.swap(box_->built);
    box_->any.store(false, std::memory_order_release);
  }
  opening_ -= opened.size() + looked_up.size();
  for (const auto& [id, request, sequence] : opened) {
    if (sequence.ok()) {
      NoteTime(Timed::kOpen, std::chrono::steady_clock::now() - request.begun);
      NoteImported(request, *sequence);
    }
    AnswerOpened(id, sequence, request.asked);
  }
  for (const LookedUp& answer : looked_up) AnswerLookedUp(answer);
  for (const auto& [id, status] : settled) {
    if (settling_.erase(id) != 0) Answer(id, status);  // else it has had its answer
  }
  for (const auto& [id, result] : built) {
    if (settling_.erase(id) != 0) AnswerBuilt(id, result);
  }
  return true;
}

void RingSession::ExpireSettles() {
  const auto now = std::chrono::steady_clock::now();
  for (auto it = settling_.begin(); it != settling_.end();) {
    if (now < it->second) {
      ++it;
      continue;
    }
    Answer(it->first,
           Status(Code::kDeadlineExceeded, "SETTLE_TIMEOUT",
                  "workers are still busy with the sequence; `kvstrata work ls` shows the queue"));
    it = settling_.erase(it);
  }
}

RingSession::Outcome RingSession::OnDetach(const Frame& frame) {
  if (!frame.payload.empty()) return Malformed("Detach with a payload");
  // The end of the session wipes its segment, and the reply with it: that waits until the client
  // has read it. Until then this is as good: sequences are closed before the reply.
  imported_.clear();
  options_.import.reset();
  store_->sessions().EndSession(session_, SessionEnd::kEof);
  sequences_.clear();
  Answer(frame.header.id, OkStatus());
  return Outcome::kDetached;
}

RingSession::Outcome RingSession::OnCommit(const Frame& frame) {
  shm::Commit in;
  std::span<const std::byte> rest = frame.payload;
  std::span<const int32_t> tokens;
  if (!Take(&rest, &in) || !TakeArray(&rest, in.tokens, &tokens) || !rest.empty()) {
    return Malformed("Commit of a wrong size");
  }
  NoteEvent(in.sequence,
            store_->steps().Commit(session_, in.sequence, in.first, tokens, in.indexed_tokens));
  NoteTokens(in.sequence, std::min<uint64_t>(uint64_t{in.first} + in.tokens, 1u << 24));
  return Outcome::kWorked;
}

RingSession::Outcome RingSession::OnReport(const Frame& frame) {
  shm::Report in;
  std::span<const std::byte> rest = frame.payload;
  if (!Take(&rest, &in)) return Malformed("Report of a wrong size");
  const auto has = [&in](uint32_t flag) { return (in.flags & flag) != 0; };
  std::span<const float> surprisal, entropy;
  std::span<const uint8_t> boundary;
  if (!TakeArray(&rest, has(shm::Report::kSurprisal) ? in.n : 0, &surprisal) ||
      !TakeArray(&rest, has(shm::Report::kEntropy) ? in.n : 0, &entropy) ||
      !TakeArray(&rest, has(shm::Report::kBoundary) ? in.n : 0, &boundary) || !rest.empty()) {
    return Malformed("Report of a wrong size");
  }
  NoteEvent(in.sequence,
            store_->steps().Report(session_, in.sequence, in.first, in.n,
                                   has(shm::Report::kSurprisal) ? surprisal.data() : nullptr,
                                   has(shm::Report::kEntropy) ? entropy.data() : nullptr,
                                   has(shm::Report::kBoundary) ? boundary.data() : nullptr));
  return Outcome::kWorked;
}

RingSession::Outcome RingSession::OnPrefillDone(const Frame& frame) {
  shm::SequenceRef in;
  std::span<const std::byte> rest = frame.payload;
  if (!Take(&rest, &in) || !rest.empty()) return Malformed("PrefillDone of a wrong size");
  const bool imported = imported_.contains(in.sequence);  // then its copies come first
  NoteEvent(in.sequence, imported ? options_.import->Seal({in.sequence, 0, {}, {}, true})
                                  : store_->steps().PrefillDone(session_, in.sequence));
  return Outcome::kWorked;
}

// What it says is the audit's matter alone: it never fails the sequence.
RingSession::Outcome RingSession::OnRecall(const Frame& frame) {
  shm::Recall in;
  std::span<const std::byte> rest = frame.payload;
  std::span<const int32_t> layers;
  std::span<const float> recall, error;
  if (!Take(&rest, &in) || !TakeArray(&rest, in.layers, &layers) ||
      !TakeArray(&rest, uint64_t{in.layers} * in.heads, &recall) ||
      !TakeArray(&rest, uint64_t{in.layers} * in.heads, &error) || !rest.empty()) {
    return Malformed("Recall of a wrong size");
  }
  store_->recalls().AddRecall(
      session_, in.sequence,
      {in.audit, static_cast<int32_t>(in.position), static_cast<int32_t>(in.heads),
       (in.flags & shm::Recall::kRawGone) != 0, in.dropped, layers, recall, error,
       (in.flags & shm::Recall::kCaptured) != 0});
  return Outcome::kWorked;
}

}  // namespace kvstrata
