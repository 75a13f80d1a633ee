// SPDX-License-Identifier: Apache-2.0
#include "server/store/sequences/inspection.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <unordered_map>

#include "kernels/codec/codec.h"
#include "kernels/select/notice.h"
#include "kernels/select/why_in_full.h"
#include "server/store/books/books.h"
#include "server/store/books/plans.h"
#include "server/store/books/sequence.h"
#include "server/store/lookups/prefix_pins.h"
#include "server/store/references/eviction.h"
#include "server/store/references/models.h"
#include "server/store/references/page_references.h"
#include "server/store/sequences/sequences.h"
#include "server/store/sequences/sessions.h"

namespace kvstrata {
namespace {

uint64_t AgeUs(Clock::time_point since) {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - since).count());
}

PageInfo InfoOfPage(const Page* page, uint32_t selected) {
  PageInfo info;
  info.selected = selected;
  info.absent = page == nullptr;
  if (info.absent) return info;
  info.arena = page->arena->id;
  info.offset = page->offset;
  info.tier = page->arena->tier;
  info.sealed = page->sealed;
  info.shared = page->refs > 1;
  info.references = page->refs;
  return info;
}

ExtentInfo InfoOfExtent(const Extent& extent) {
  const Page& page = *extent.page;
  ExtentHeader header{};
  const std::byte* const at = extent.description ? extent.description->data() : page.base();
  if (extent.bytes >= sizeof(header)) std::memcpy(&header, at, sizeof(header));
  ExtentInfo info;
  info.arena = page.arena->id;
  info.offset = page.offset;
  info.bytes = extent.bytes;
  info.tier = page.arena->tier;
  info.kind = static_cast<ExtentKind>(header.kind);
  info.tokens = extent.tokens;
  info.references = page.refs;
  return info;
}

std::string ArrivingTextOf(const Sequence& s) {
  const Status& lost = s.codec->rest_lost;
  return lost.ok() ? Say(Notice::kRestDue, {s.extents.back().tokens.end}) : lost.ToString();
}

// Why its steps attend everything, as far as the daemon knows: sessions have sentences and the
// prompt's queries to themselves.
std::string InFullTextOf(const Sequence& s) {
  std::string why = WhyInFull(s.plan, static_cast<int32_t>(s.tokens), s.prefill_done);
  if (!why.empty() || !s.codec || !s.extents.empty()) return why;
  SelectContext context;
  context.prompt_tokens = static_cast<int32_t>(s.prompt_tokens);
  context.view.tokens = static_cast<int32_t>(s.tokens);
  context.surprisal = s.series.surprisal;
  const Codec& codec = CodecOf(s.plan);
  return codec.stores() ? codec.why_raw(s.plan, context) : "";
}

}  // namespace

std::vector<PoolInfo> Inspection::Pools() const {
  StoreLock lock(books_.mu);
  std::vector<PoolInfo> infos;
  for (const PoolId pool : books_.memory.ids()) {
    PoolInfo& info = infos.emplace_back();
    info.tier = pool.tier();
    info.device = books_.memory.name(pool);
    info.capacity_bytes = books_.memory.capacity(pool);
    info.arena_bytes = books_.pools.arena_bytes(pool);
    info.taken_bytes = books_.pools.taken(pool);
    info.cached_bytes = books_.prefix.cached_bytes(pool);
    info.pinned_bytes = books_.prefix.pinned_bytes(pool);
    info.failure = books_.memory.failure(pool).message();
  }
  const auto info_of = [&infos](const Arena& arena) -> PoolInfo& {
    return arena.tier == Tier::kHost ? infos.back() : infos[arena.pool.device()];
  };
  for (const auto& [id, arena] : books_.pools.arenas()) {
    PoolInfo& info = info_of(*arena);
    ++info.arenas;
    info.retired_bytes += arena->retired;
    info.used_bytes += arena->extents.used() - arena->retired;
  }
  for (const Page* page : eviction_.UnusedExtents()) {
    info_of(*page->arena).cached_bytes += page->bytes;
  }
  return infos;
}

template <typename Visit>
void Inspection::VisitPages(uint64_t sequence, Visit&& visit) const {
  Result<const Sequence*> s = catalog_.PeekSequence(sequence);
  for (size_t at = 0, visited = 0; s.ok(); ++at) {
    const std::vector<Page*>&pages = (*s)->pages, &blocks = (*s)->index_blocks;
    if (at >= pages.size() + blocks.size()) return;
    const bool block = at >= pages.size();
    visit(*s, block ? blocks[at - pages.size()] : pages[at], block);
    if (++visited % kPiecePages != 0) continue;
    books_.mu.Yield();
    s = catalog_.PeekSequence(sequence);
  }
}

std::vector<SessionInfo> Inspection::Sessions() const {
  StoreLock lock(books_.mu);
  std::vector<SessionInfo> infos;
  std::vector<std::vector<uint64_t>> sequences;
  for (const auto& [id, session] : catalog_.sessions()) {
    SessionInfo info;
    info.session = id;
    info.fenced = session->fenced;
    info.client_name = session->client_name;
    info.peer = session->peer;
    info.transport = session->transport;
    info.device = books_.memory.name(PoolId::Device(session->device));
    info.sequences = static_cast<uint32_t>(session->sequences.size());
    info.open_steps = CountReaders(*session->memory->header());
    info.age_us = AgeUs(session->opened);
    if (session->last_step != Clock::time_point()) {
      info.last_step_us = std::max<uint64_t>(AgeUs(session->last_step), 1);
    }
    infos.push_back(std::move(info));
    sequences.emplace_back();
    for (const auto& [sequence, s] : session->sequences) sequences.back().push_back(sequence);
  }
  for (size_t i = 0; i < infos.size(); ++i) infos[i].used_bytes = BytesOf(sequences[i]);
  return infos;
}

uint64_t Inspection::BytesOf(std::span<const uint64_t> sequences) const {
  std::unordered_map<const Page*, uint64_t> bytes;  // shared ones count once
  const auto add = [&bytes](const Sequence*, const Page* page, bool) {
    if (page != nullptr) bytes[page] = page->bytes;
  };
  for (const uint64_t sequence : sequences) {
    VisitPages(sequence, add);
    const Result<const Sequence*> s = catalog_.PeekSequence(sequence);
    for (size_t i = 0; s.ok() && i < (*s)->extents.size(); ++i) {
      add(*s, (*s)->extents[i].page, false);
    }
  }
  uint64_t sum = 0;
  for (const auto& [page, n] : bytes) sum += n;
  return sum;
}

std::vector<ModelInfo> Inspection::Models() const {
  StoreLock lock(books_.mu);
  std::map<uint64_t, ModelInfo> infos;
  for (const auto& [id, model] : books_.models.all()) infos[id] = {id, model->desc, 0, 0};
  for (auto& [id, info] : infos) info.cached_pages = books_.prefix.cached_pages(id);
  for (const auto& [id, s] : catalog_.sequences()) ++infos[s->model->id].sequences;
  std::vector<ModelInfo> list;
  for (auto& [id, info] : infos) list.push_back(std::move(info));
  return list;
}

void Inspection::CountPages(SequenceInfo* info) const {
  VisitPages(info->sequence, [info](const Sequence*, const Page* page, bool block) {
    if (page == nullptr) {
      ++info->absent_pages;
      return;
    }
    (page->arena->tier == Tier::kDevice ? info->device_bytes : info->host_bytes) += page->bytes;
    if (!block && page->refs > 1) ++info->shared_pages;
  });
}

SequenceInfo Inspection::InfoOf(const Sequence& s) const {
  SequenceInfo info;
  info.sequence = s.id;
  info.session = s.session;
  info.key = s.key;
  info.model = s.model->id;
  info.model_name = s.model->desc.name;
  info.plan = s.plan;
  info.tokens = s.tokens;
  info.capacity_tokens = static_cast<uint32_t>(s.capacity_tokens());
  info.pages = static_cast<uint32_t>(s.pages.size());
  info.index_blocks = static_cast<uint32_t>(s.index_blocks.size());
  info.version = s.version;
  info.age_us = AgeUs(s.opened);
  info.prompt_tokens = s.prompt_tokens;
  info.held_tokens = s.held_tokens;
  info.steps = s.steps;
  info.private_pages = s.chain.is_private();
  info.extents = static_cast<uint32_t>(s.extents.size());
  for (const Extent& e : s.extents) {
    const bool device = e.page->arena->tier == Tier::kDevice;
    (device ? info.extent_device_bytes : info.extent_host_bytes) += e.page->bytes;
  }
  info.device_bytes += info.extent_device_bytes;
  info.host_bytes += info.extent_host_bytes;
  if (s.codec && !s.codec->failed.ok()) info.work_error = s.codec->failed.ToString();
  if (s.codec && s.codec->rest_load != 0) info.arriving = ArrivingTextOf(s);
  info.in_full = InFullTextOf(s);
  info.break_even_tokens = plans_.BreakEven(s.plan, s.model->desc.geometry);
  return info;
}

std::vector<SequenceInfo> Inspection::Sequences(uint64_t session) const {
  StoreLock lock(books_.mu);
  std::vector<SequenceInfo> infos;
  for (const auto& [id, s] : catalog_.sequences()) {
    if (session == 0 || s->session == session) infos.push_back(InfoOf(*s));
  }
  for (SequenceInfo& info : infos) CountPages(&info);
  std::sort(infos.begin(), infos.end(),
            [](const SequenceInfo& a, const SequenceInfo& b) { return a.sequence < b.sequence; });
  return infos;
}

Result<SequenceDetail> Inspection::Show(uint64_t sequence) const {
  StoreLock lock(books_.mu);
  KVS_ASSIGN_OR_RETURN(const Sequence* s, catalog_.PeekSequence(sequence));
  SequenceDetail detail;
  detail.info = InfoOf(*s);
  for (const Extent& extent : s->extents) detail.extents.push_back(InfoOfExtent(extent));
  detail.pages.reserve(s->pages.size());
  const auto add = [&](const Sequence* now, const Page* page,
                       bool block) KVS_NO_THREAD_SAFETY_ANALYSIS {
    if (block) return detail.index_blocks.push_back(InfoOfPage(page, 0));
    const SessionMemory& memory = *catalog_.SessionOf(now->session)->memory;
    const auto position = static_cast<uint32_t>(detail.pages.size());
    detail.pages.push_back(InfoOfPage(page, memory.ReadCount(now->access_counters, position)));
  };
  VisitPages(sequence, add);
  CountPages(&detail.info);
  return detail;
}

std::string_view Inspection::WhyUncounted(const Sequence& s, const Session& session) const {
  if (s.plan.selector == SelectorKind::kFull) return "full";
  const bool emulated = books_.memory.name(PoolId::Device(session.device)).starts_with("emulated");
  return emulated ? "" : "gpu";
}

SelectionSample Inspection::SampleOf(const Sequence& s, uint32_t buckets,
                                     uint32_t bucket_tokens) const {
  const Session& session = *catalog_.SessionOf(s.session);
  SelectionSample sample;
  sample.page_tokens = s.page_tokens();
  sample.layers = static_cast<uint32_t>(s.model->desc.geometry.layers);
  sample.uncounted = WhyUncounted(s, session);
  SelectionTotals& totals = sample.totals;
  totals.tokens = s.tokens;
  totals.steps = s.steps;
  const uint32_t pages = s.PagesFor(s.tokens);
  const uint32_t width = std::max(BucketPages(pages, buckets), bucket_tokens / sample.page_tokens);
  totals.bucket_tokens = width * sample.page_tokens;
  totals.counts.resize((pages + width - 1) / width);
  for (uint32_t page = 0; page < pages; ++page) {
    totals.counts[page / width] += session.memory->ReadCount(s.access_counters, page);
  }
  return sample;
}

Result<SelectionSample> Inspection::Selections(uint64_t sequence, uint32_t buckets,
                                               uint32_t bucket_tokens) const {
  StoreLock lock(books_.mu);
  KVS_ASSIGN_OR_RETURN(const Sequence* s, catalog_.PeekSequence(sequence));
  return SampleOf(*s, buckets, bucket_tokens);
}

std::vector<LiveSequence> Inspection::Newest(size_t most, uint32_t buckets) const {
  StoreLock lock(books_.mu);
  std::vector<uint64_t> ids;
  for (const auto& [id, s] : catalog_.sequences()) ids.push_back(id);
  const size_t n = std::min(most, ids.size());
  std::partial_sort(ids.begin(), ids.begin() + static_cast<ptrdiff_t>(n), ids.end(),
                    std::greater<>());
  std::vector<LiveSequence> live;
  for (size_t i = n; i-- > 0;) {
    books_.mu.Yield();
    const Result<const Sequence*> s = catalog_.PeekSequence(ids[i]);
    if (!s.ok()) continue;  // closed meanwhile
    live.push_back(
        {InfoOf(**s), catalog_.SessionOf((*s)->session)->client_name, SampleOf(**s, buckets, 0)});
    CountPages(&live.back().info);
  }
  return live;
}

StoreCounters Inspection::Counters() const {
  StoreLock lock(books_.mu);
  StoreCounters counters = books_.counters;
  counters.prefix_pages = books_.prefix.size();
  counters.sessions = static_cast<uint64_t>(std::ranges::count_if(
      catalog_.sessions(), [](const auto& entry) { return !entry.second->fenced; }));
  counters.sequences = catalog_.sequences().size();
  counters.models = books_.models.all().size();
  counters.artefacts = books_.artefacts.all().size();
  for (const auto& [id, arena] : books_.pools.arenas()) counters.retired_bytes += arena->retired;
  for (const auto& [id, session] : catalog_.sessions()) {
    for (const auto& [epoch, table] : session->retired_tables.items()) {
      counters.retired_bytes += table->bytes;
    }
  }
  return counters;
}

}  // namespace kvstrata
