// SPDX-License-Identifier: Apache-2.0
#include "server/store/codecs/codec_extents.h"

#include <algorithm>
#include <utility>

#include "server/store/books/books.h"
#include "server/store/books/sequence.h"
#include "server/store/prompts/prefix_catalog.h"
#include "server/store/references/page_references.h"
#include "server/store/references/tables.h"
#include "server/store/space/page_allocator.h"
#include "server/store/space/raw_pages.h"

namespace kvstrata {
namespace {

// A table that no reader finds, of a sequence that is there (table_reader.h).
constexpr uint64_t kNoTable = 1;

std::vector<Run> Union(const std::vector<Run>& a, const std::vector<Run>& b) {
  std::vector<Run> all = a;
  all.insert(all.end(), b.begin(), b.end());
  return Normalize(std::move(all));
}

}  // namespace

CodecExtents::CodecExtents(Books& books, SessionCatalog& catalog, Tables& tables,
                           PageReferences& references, PageHolds& holds, PageAllocator& allocator,
                           PrefixCatalog& prefixes, RawPages& raw_pages)
    : books_(books),
      catalog_(catalog),
      tables_(tables),
      references_(references),
      holds_(holds),
      allocator_(allocator),
      prefixes_(prefixes),
      raw_pages_(raw_pages) {}

Status CodecExtents::TakeExtents(const Sequence& s, const RecompressOutput& output,
                                 FreshPages* fresh) {
  const Session& session = *catalog_.SessionOf(s.session);
  Status status;
  for (const ExtentDraft& draft : output.extents) {
    if (draft.kept >= 0) continue;
    const Tier tier = draft.tier;
    status =
        allocator_.Allocate({session.tenant, kDaemon, nullptr, s.model->id, PoolsOf(session, tier)},
                            draft.size(), 1, &fresh->pages);
    if (!status.ok()) break;
  }
  if (!status.ok()) {
    references_.FreePages(fresh->pages);
    fresh->pages.clear();
    return status;
  }
  fresh->hold = holds_.Begin();
  for (Page* page : fresh->pages) {
    page->sealed = true;
    holds_.Refer(fresh->hold, page);
  }
  return status;
}

Status CodecExtents::Swap(Sequence* s, const RecompressOutput& output, FreshPages* fresh,
                          std::unique_ptr<Recompressor> next, RecompressResult* result) {
  Session* session = catalog_.SessionOf(s->session);
  KVS_ASSIGN_OR_RETURN(
      shm::SequenceTable * table,
      tables_.ReserveTable(session, *s, s->table->page_capacity, output.extents.size()));
  std::vector<Extent> extents;
  size_t taken = 0;
  for (const ExtentDraft& draft : output.extents) {
    if (draft.kept >= 0) {
      extents.push_back(s->extents[static_cast<size_t>(draft.kept)]);
    } else {
      Page* const page = fresh->pages[taken++];
      extents.push_back({page, draft.size(), draft.tokens, ChecksumInHeader(draft.bytes),
                         DescriptionFor(*page, draft.bytes)});
      result->written_bytes += draft.size();
    }
    references_.RefPage(extents.back().page);
  }
  std::swap(s->extents, extents);
  references_.ReleaseExtents(&extents);
  DropFresh(fresh);
  CodecState& codec = *s->codec;
  codec.recompressor = std::move(next);
  codec.released = Union(codec.released, output.released);
  const std::vector<size_t> released = ReleasedPages(*s);
  if (s->plan.stored.keep_raw == KeepRaw::kNo)
    result->released_bytes += raw_pages_.GiveBack(s, released);
  result->extents = static_cast<uint32_t>(s->extents.size());
  tables_.Publish(session, s, table);
  references_.Advance(session->tenant);
  return OkStatus();
}

void CodecExtents::DropFresh(FreshPages* fresh) {
  holds_.End(fresh->hold);
  *fresh = {};
}

void CodecExtents::Discard(FreshPages* fresh) {
  Tenant* const tenant =
      fresh->pages.empty() ? nullptr : catalog_.tenant(fresh->pages.front()->arena->tenant);
  DropFresh(fresh);
  if (tenant != nullptr) references_.Advance(tenant);
}

Status CodecExtents::CopyDrafts(const RecompressOutput& output, const FreshPages& fresh,
                                PoolId packed_by) {
  size_t next = 0;
  for (const ExtentDraft& draft : output.extents) {
    if (draft.kept >= 0) continue;
    const Page& to = *fresh.pages[next++];
    const bool on_device = draft.on_device.data != nullptr;
    const std::span<const std::byte> bytes = draft.bytes;
    KVS_RETURN_IF_ERROR(
        on_device ? books_.memory.Fill(
                        to, bytes, {draft.on_device.data.get(), draft.on_device.size}, packed_by)
                  : books_.memory.Fill(to, {}, bytes, to.arena->pool));
  }
  return OkStatus();
}

std::shared_ptr<const std::vector<std::byte>> CodecExtents::DescriptionFor(
    const Page& page, std::span<const std::byte> extent) const {
  if (books_.memory.readable(page.arena->tier)) return nullptr;
  const auto size = static_cast<int64_t>(extent.size());
  const auto front = static_cast<size_t>(std::min(size, kExtentFrontBytes));
  return std::make_shared<const std::vector<std::byte>>(
      extent.begin(), extent.begin() + DescriptionBytes(extent.first(front), size));
}

void CodecExtents::EnterArtefact(Artefact artefact) {
  for (const Extent& extent : artefact.extents) {
    references_.RefPage(extent.page);
    ++extent.page->artefacts;
  }
  if (std::optional<Artefact> left = books_.artefacts.Insert(std::move(artefact))) {
    references_.ReleaseArtefact(std::move(*left));
  }
}

void CodecExtents::OfferArtefact(const PageKey& key, OfferedFor why) {
  const Artefact* const artefact = books_.artefacts.Peek(key);
  if (prefixes_.tier() == nullptr || artefact == nullptr) return;
  uint64_t bytes = 0;
  for (const Extent& extent : artefact->extents) bytes += extent.page->bytes;
  const uint32_t tenant = artefact->extents.front().page->arena->tenant;
  prefixes_.tier()->Offer({key, key, bytes, why, catalog_.tenant(tenant)->name});
}

void CodecExtents::KeepArtefact(const Sequence& s) {
  if (s.extents.empty() || s.chain.is_private()) return;
  const CodecState& codec = *s.codec;
  EnterArtefact({codec.prompt_key, s.extents, codec.recompressor, codec.released, s.prompt_tokens,
                 s.series.Slice(0, s.prompt_tokens)});
  if (!s.model->OfOneSession()) OfferArtefact(codec.prompt_key, OfferedFor::kArtefact);
  prefixes_.OfferKept(s, OfferedFor::kArtefact);
}

Status CodecExtents::TakeRest(Session* session, Sequence* s, const Artefact& artefact) {
  KVS_ASSIGN_OR_RETURN(
      shm::SequenceTable * table,
      tables_.ReserveTable(session, *s, s->table->page_capacity, artefact.extents.size()));
  std::vector<Extent> before = std::exchange(s->extents, artefact.extents);
  for (const Extent& extent : s->extents) references_.RefPage(extent.page);
  references_.ReleaseExtents(&before);
  s->codec->rest_load = 0;
  tables_.Publish(session, s, table);
  references_.Advance(session->tenant);
  return OkStatus();
}

void CodecExtents::LoseRest(Session* session, Sequence* s, const Status& why) {
  s->codec->rest_lost = why;
  const Result<shm::SequenceTable*> table =
      tables_.ReserveTable(session, *s, s->table->page_capacity);
  if (table.ok()) {
    tables_.Publish(session, s, *table);
    references_.Advance(session->tenant);
  } else {
    shm::SequenceSlot& slot = session->memory->tables()->slots[s->slot];
    slot.table_offset.store(kNoTable, std::memory_order_seq_cst);
  }
}

void CodecExtents::AttachArtefact(Session* session, Sequence* s) {
  CodecState& codec = *s->codec;
  codec.prompt_key = Artefacts::KeyOf(s->chain, s->last_key, s->tail, FormatPlan(s->plan),
                                      codec.parameters_digest);
  if (codec.opened_on != 0) codec.prompt_settled = codec.opened_on == s->prompt_tokens;
  // Rows that the engine computed itself may differ in a bit from those that were recompressed.
  if (!s->HoldsAll(s->prompt_tokens) || !s->extents.empty()) return;
  if (codec.work == CodecState::Work::kRunning) return;
  if (prefixes_.FindArtefact(codec.prompt_key, session->device) == nullptr) return;
  const Artefact* const artefact = books_.artefacts.Find(codec.prompt_key);
  const Result<shm::SequenceTable*> table =
      tables_.ReserveTable(session, *s, s->table->page_capacity, artefact->extents.size());
  if (!table.ok()) return;  // it is built anew when there is room
  s->extents = artefact->extents;
  for (const Extent& extent : s->extents) references_.RefPage(extent.page);
  codec.recompressor = artefact->recompressor;
  codec.released = artefact->released;
  codec.prompt_settled = true;
  const std::vector<size_t> released = ReleasedPages(*s);
  if (s->plan.stored.keep_raw == KeepRaw::kNo) {
    books_.counters.released_bytes += raw_pages_.GiveBack(s, released);
  } else {
    codec.place_raw = std::any_of(released.begin(), released.end(), [s](size_t i) {
      return s->pages[i]->arena->tier == Tier::kDevice;
    });
  }
  ++books_.counters.artefact_hits;
  tables_.Publish(session, s, *table);
  references_.Advance(session->tenant);
}

}  // namespace kvstrata
