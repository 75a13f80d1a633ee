// From published tables to addresses: reading, growing and resolving them (linked_session.h).
#include <algorithm>
#include <string>
#include <thread>

#include "client/linked_session.h"

namespace kvstrata::client {
namespace {

constexpr int kPinAttempts = 4;

uint32_t PagesFor(const Geometry& g, int32_t tokens) {
  return static_cast<uint32_t>((int64_t{tokens} + g.page_tokens - 1) / g.page_tokens);
}

Status TableInvalid(uint64_t sequence) {
  return {Code::kDataLoss, "TABLE_INVALID",
          "the table of sequence " + std::to_string(sequence) +
              " is gone or breaks bounds; close the sequence or attach anew"};
}

Status ClosedByKey(uint64_t sequence) {
  return NotFound("SEQUENCE_CLOSED", "sequence " + std::to_string(sequence) +
                                         " was closed by its key, by another session of its user");
}

}  // namespace

Result<std::byte*> Session::State::Resolve(const shm::PageEntry& entry, uint64_t bytes) {
  Result<std::byte*> at = arenas.Resolve(entry, bytes);
  if (at.ok() || at.status().reason() != "ARENA_UNKNOWN") return at;
  // Its descriptor was sent before the table was published; a full socket may have delayed it.
  const auto deadline = Deadline();
  while (!at.ok() && at.status().reason() == "ARENA_UNKNOWN") {
    if (!connection->AwaitPacket(deadline)) return at;
    at = arenas.Resolve(entry, bytes);
  }
  return at;
}

Status Session::State::LoadExtents(Sequence* s, const shm::TableView& view) {
  s->extents.clear();
  if (!shm::ExtentsSound(view)) return TableInvalid(s->id);
  s->extents.reserve(view.extents());
  for (uint32_t i = 0; i < view.extents(); ++i) {
    const shm::ExtentEntry& e = *view.extent(i);
    KVS_ASSIGN_OR_RETURN(const std::byte* const at,
                         Resolve({e.arena, e.flags, e.tier, e.offset}, e.bytes));
    s->extents.push_back({at, static_cast<int64_t>(e.bytes), {e.begin, e.end}});
    const bool far = gpu_session != nullptr && e.tier == 0;
    if (!far) continue;
    KVS_RETURN_IF_ERROR(
        s->descriptions.Describe(ReaderOf("reading an extent"), &s->extents.back()));
  }
  s->descriptions.KeepOnly(s->extents);
  return OkStatus();
}

FarRead Session::State::ReaderOf(const char* what) const {
  return [this, what](std::byte* to, const std::byte* from, uint64_t bytes) {
    return CudaStatus(*gpu.ops, gpu.ops->copy_2d(gpu.device, to, from, {bytes, bytes, 1}), what);
  };
}

Status Session::State::Load(Sequence* s) {
  const shm::TableView view = reader.Read(s->slot, s->id);
  if (view.table == nullptr && reader.Closed(s->slot, s->id)) return ClosedByKey(s->id);
  if (view.table == nullptr) return TableInvalid(s->id);
  if (view.table->version != s->version) {
    s->pages.clear();
    s->far_pages.clear();
    s->has_far_pages = false;
    s->blocks.clear();
    // Extents of one table and the next are never in the same place, but for those that are kept.
    if (view.table->version != s->version + 1) s->descriptions.Clear();
    s->version = 0;  // until all of it was loaded
    KVS_RETURN_IF_ERROR(LoadExtents(s, view));
    s->version = view.table->version;
  }
  s->table = view;
  const auto page_bytes = static_cast<uint64_t>(s->state->geometry().page_bytes());
  s->far_pages.resize(view.pages);
  for (auto i = static_cast<uint32_t>(s->pages.size()); i < view.pages; ++i) {
    const bool far = gpu_session != nullptr && view.page(i)->tier != 0;
    s->far_pages[i] = far ? 1 : 0;
    s->has_far_pages |= far;
    if ((view.page(i)->flags & shm::kPageAbsent) != 0) {
      s->pages.push_back(nullptr);
      continue;
    }
    KVS_ASSIGN_OR_RETURN(std::byte* const at, Resolve(*view.page(i), page_bytes));
    s->pages.push_back(at);
  }
  const auto block_bytes = static_cast<uint64_t>(s->state->index().block_bytes);
  for (auto i = static_cast<uint32_t>(s->blocks.size()); i < view.index_blocks; ++i) {
    KVS_ASSIGN_OR_RETURN(std::byte* const at, Resolve(*view.index_block(i), block_bytes));
    s->blocks.push_back(at);
  }
  return OkStatus();
}

void Session::State::TakeIndex(Sequence* s) {
  SequenceState& state = *s->state;
  if (state.index().kind == IndexLayout::Kind::kNone) return;
  const auto own = static_cast<uint32_t>(state.indexed_tokens());
  const uint32_t indexed =
      shm::IndexedTokens(s->table, static_cast<uint32_t>(state.index().block_tokens), own,
                         static_cast<uint32_t>(state.tokens()));
  if (indexed == own) return;  // what is this process's own the daemon may not know yet
  state.NoteIndexed(static_cast<int32_t>(indexed));
  s->told_indexed = std::max(s->told_indexed, indexed);
}

bool Session::State::Holds(const Claim& claim) {
  const Sequence& s = *claim.sequence;
  const SequenceState& state = *s.state;
  const uint32_t pages = PagesFor(state.geometry(), claim.tokens_after);
  if (pages > s.table.pages) return false;
  if (claim.tokens_after > state.tokens()) {
    const auto first = static_cast<uint32_t>(state.tokens() / state.geometry().page_tokens);
    for (uint32_t i = first; i < pages; ++i) {
      if (!arenas.Writable(*s.table.page(i))) return false;
    }
  }
  const IndexLayout& index = state.index();
  if (index.kind == IndexLayout::Kind::kNone) return true;
  const auto blocks = static_cast<uint32_t>(index.BlocksFor(state.tokens()));
  if (blocks > s.table.index_blocks) return false;
  if (!claim.write_index) return true;
  const auto first = static_cast<uint32_t>(state.indexed_tokens() / index.block_tokens);
  for (uint32_t i = first; i < blocks; ++i) {
    if (!arenas.Writable(*s.table.index_block(i))) return false;
  }
  return true;
}

Status Session::State::Grow(const Claim& claim) {
  const SequenceState& state = *claim.sequence->state;
  const shm::Grow grow{claim.sequence->id, static_cast<uint32_t>(claim.tokens_after),
                       static_cast<uint32_t>(state.tokens()),
                       static_cast<uint32_t>(state.indexed_tokens()), 0};
  return ring->Call(shm::kGrow, {BytesOf(grow)}, nullptr);
}

Result<int> Session::State::Pin(std::span<const Claim> claims, int32_t* codes) {
  for (int attempt = 0; attempt < kPinAttempts; ++attempt) {
    const int slot = reader.Enter();
    if (slot < 0) {
      return ResourceExhausted("STEPS_OPEN", std::to_string(shm::kMaxReaders) +
                                                 " steps of this session are open; end one");
    }
    if (gpu_session != nullptr) gpu_session->Entered(slot);
    Status failed;
    const auto fail = [&](size_t i, const Status& status) {
      if (codes != nullptr) codes[i] = static_cast<int32_t>(status.code());
      if (failed.ok()) failed = status;
    };
    std::vector<size_t> short_ones;
    for (size_t i = 0; i < claims.size(); ++i) {
      const Status loaded = Load(claims[i].sequence);
      if (loaded.ok()) TakeIndex(claims[i].sequence);
      if (!loaded.ok()) {
        fail(i, loaded);
      } else if (!Holds(claims[i])) {
        short_ones.push_back(i);
      }
    }
    if (failed.ok() && short_ones.empty()) return slot;
    // The daemon may need memory that this epoch pins: leave it before asking.
    reader.Leave(slot);
    for (const size_t i : short_ones) {
      if (const Status grown = Grow(claims[i]); !grown.ok()) fail(i, grown);
    }
    if (!failed.ok()) return failed;
  }
  return Internal("TABLE_NOT_GROWN",
                  "the daemon said that it grew the sequence's table, but it still does not cover "
                  "the step; daemon and library differ");
}

Result<std::shared_ptr<Sequence>> Session::State::Find(uint64_t sequence) {
  std::lock_guard<std::mutex> lock(mu);
  const auto it = sequences.find(sequence);
  if (it == sequences.end()) {
    return NotFound("SEQUENCE_UNKNOWN",
                    "sequence " + std::to_string(sequence) +
                        " is not open in this session: it was closed, or is another session's");
  }
  return it->second;
}

Result<SequenceUse> SequenceUse::Of(Session::State* session, uint64_t sequence, bool in_step_too) {
  KVS_ASSIGN_OR_RETURN(std::shared_ptr<Sequence> s, session->Find(sequence));
  std::unique_lock<std::mutex> lock(s->mu, std::try_to_lock);
  if (!lock.owns_lock()) {
    return FailedPrecondition("SEQUENCE_BUSY", "sequence " + std::to_string(sequence) +
                                                   " is in use by another thread; one at a time");
  }
  if (s->in_step && !in_step_too) {
    return FailedPrecondition("SEQUENCE_BUSY", "sequence " + std::to_string(sequence) +
                                                   " is in an open step; end or abort it first");
  }
  return SequenceUse(std::move(s), std::move(lock));
}

Result<SequenceUse> SequenceUse::Current(Session::State* session, uint64_t sequence,
                                         bool in_step_too) {
  KVS_ASSIGN_OR_RETURN(SequenceUse s, Of(session, sequence, in_step_too));
  KVS_RETURN_IF_ERROR(session->TruncateAsAsked(s.get()));
  return s;
}

Status Session::State::TruncateAsAsked(Sequence* s) {
  if (s->in_step || s->late_tokens > 0) return OkStatus();
  const std::optional<uint32_t> asked = reader.TruncateTo(s->slot, s->id);
  if (!asked) return OkStatus();
  return Truncate(s, std::min(*asked, static_cast<uint32_t>(s->state->tokens())));
}

Status Session::State::Tell(Sequence* s, shm::MessageType type,
                            std::initializer_list<std::span<const std::byte>> parts) {
  KVS_RETURN_IF_ERROR(TellDone(s));
  if (s->deferred.empty()) return ring->Post(type, parts);
  Sequence::Deferred& event = s->deferred.emplace_back();
  event.type = type;
  for (const auto& part : parts)
    event.message.insert(event.message.end(), part.begin(), part.end());
  return OkStatus();
}

bool Session::State::Waits(const Sequence::Deferred& event) const {
  return event.reader_slot >= 0 && !gpu_session->Done(event.reader_slot, event.number);
}

Status Session::State::TellDone(Sequence* s) {
  for (; !s->deferred.empty(); s->deferred.pop_front()) {
    const Sequence::Deferred& event = s->deferred.front();
    if (Waits(event) || event.missing > 0) break;
    if (event.audit != 0) OfferShadow(s, event);
    if (event.type == shm::kPad) continue;
    KVS_RETURN_IF_ERROR(ring->Post(event.type, {std::span(event.message)}));
  }
  return OkStatus();
}

Status Session::State::TellAll(Sequence* s, std::chrono::steady_clock::time_point deadline) {
  while (true) {
    KVS_RETURN_IF_ERROR(TellDone(s));
    if (s->deferred.empty()) return OkStatus();
    if (std::ranges::none_of(s->deferred, [&](const auto& e) { return Waits(e); })) {
      return IdsMissing(*s);
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      return {Code::kDeadlineExceeded, "DEADLINE",
              "the GPU did not finish the steps of sequence " + std::to_string(s->id) + " in " +
                  std::to_string(options.timeout.count()) +
                  " ms; synchronise the stream, or raise timeout_ms"};
    }
    // Nothing wakes a thread when the GPU writes memory.
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void Session::State::OfferRecall(Sequence* s, uint32_t audit, int32_t position,
                                 const ShadowSample& sample, uint32_t flags) {
  const bool measured = !sample.layers.empty();
  const shm::Recall event{s->id,
                          audit,
                          static_cast<uint32_t>(position),
                          static_cast<uint32_t>(sample.layers.size()),
                          measured ? static_cast<uint32_t>(s->state->geometry().query_heads) : 0,
                          flags | (sample.raw_gone ? uint32_t{shm::Recall::kRawGone} : 0),
                          s->recall_dropped};
  const auto bytes = [](const auto& array) { return std::as_bytes(std::span(array)); };
  if (!ring->Offer(shm::kRecall, {BytesOf(event), bytes(sample.layers), bytes(sample.recall),
                                  bytes(sample.error)})) {
    ++s->recall_dropped;
  }
}

void Session::State::OfferShadow(Sequence* s, const Sequence::Deferred& event) {
  s->shadow_waits = false;
  if (s->shadow->captured()) {
    OfferRecall(s, event.audit, event.position, {}, shm::Recall::kCaptured);
  } else if (s->shadow->lost()) {
    ++s->recall_dropped;
  } else {
    OfferRecall(s, event.audit, event.position, s->shadow->Read(), 0);
  }
}

Status Session::State::TellIndexed(Sequence* s) {
  return kvstrata::TellIndexed(s, [&](uint32_t first, uint32_t indexed) {
    const shm::Commit commit{s->id, first, 0, indexed, 0};
    return ring->Post(shm::kCommit, {BytesOf(commit)});
  });
}

}  // namespace kvstrata::client
