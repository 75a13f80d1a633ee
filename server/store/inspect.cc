// Snapshots for operators.
#include <algorithm>
#include <cstring>
#include <set>

#include "server/store/store_impl.h"

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

}  // namespace

// Extents that artefacts alone refer to, and no pin keeps, once each.
std::set<const Page*> Store::Impl::UnusedExtents() const {
  std::set<const Page*> pages;
  for (const Artefact& artefact : artefacts_.all()) {
    if (prefix_.pinned().contains(artefact.key)) continue;
    for (const Extent& e : artefact.extents) {
      if (e.page->refs == e.page->artefacts) pages.insert(e.page);
    }
  }
  return pages;
}

std::vector<PoolInfo> Store::Impl::Pools() const {
  MutexLock lock(mu_);
  std::vector<PoolInfo> infos;
  for (const PoolId pool : pools_.ids()) {
    PoolInfo& info = infos.emplace_back();
    info.tier = pool.tier();
    info.device = pools_.name(pool);
    info.capacity_bytes = pools_.capacity(pool);
    info.arena_bytes = pools_.arena_bytes(pool);
    info.cached_bytes = prefix_.cached_bytes(pool);
    info.pinned_bytes = prefix_.pinned_bytes(pool);
    info.failure = pools_.failure(pool).message();
  }
  const auto info_of = [&infos](const Arena& arena) -> PoolInfo& {
    return arena.tier == Tier::kHost ? infos.back() : infos[arena.pool.device()];
  };
  for (const auto& [id, arena] : pools_.arenas()) {
    PoolInfo& info = info_of(*arena);
    ++info.arenas;
    info.retired_bytes += arena->retired;
    info.used_bytes += arena->extents.used() - arena->retired;
  }
  for (const Page* page : UnusedExtents()) {
    info_of(*page->arena).cached_bytes += page->bytes;
  }
  return infos;
}

std::vector<SessionInfo> Store::Impl::Sessions() const {
  MutexLock lock(mu_);
  std::vector<SessionInfo> infos;
  for (const auto& [id, session] : sessions_) {
    SessionInfo info;
    info.session = id;
    info.fenced = session->fenced;
    info.client_name = session->client_name;
    info.peer = session->peer;
    info.road = session->road;
    info.device = pools_.name(PoolId::Device(session->device));
    info.sequences = static_cast<uint32_t>(session->sequences.size());
    info.open_steps = CountReaders(*session->memory->header());
    std::set<const Page*> pages;  // shared ones count once
    for (const auto& [sequence_id, s] : session->sequences) {
      pages.insert(s->pages.begin(), s->pages.end());
      pages.insert(s->index_blocks.begin(), s->index_blocks.end());
      for (const Extent& extent : s->extents) pages.insert(extent.page);
    }
    pages.erase(nullptr);
    for (const Page* page : pages) info.used_bytes += page->bytes;
    info.age_us = AgeUs(session->opened);
    infos.push_back(std::move(info));
  }
  return infos;
}

std::vector<ModelInfo> Store::Impl::Models() const {
  MutexLock lock(mu_);
  std::map<uint64_t, ModelInfo> infos;
  for (const auto& [id, model] : models_) infos[id] = {id, model->desc, 0, 0};
  for (const auto& [id, s] : sequences_) ++infos[s->model->id].sequences;
  for (const PoolId pool : pools_.ids()) {
    for (const Page* page = prefix_.oldest(pool); page != nullptr; page = page->newer) {
      ++infos[page->model].cached_pages;
    }
  }
  std::vector<ModelInfo> list;
  for (auto& [id, info] : infos) list.push_back(std::move(info));
  return list;
}

SequenceInfo Store::Impl::InfoOf(const Sequence& s) const {
  SequenceInfo info;
  info.sequence = s.id;
  info.session = s.session;
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
  for (const std::vector<Page*>* list : {&s.pages, &s.index_blocks}) {
    for (const Page* page : *list) {
      if (page == nullptr) {
        ++info.absent_pages;
        continue;
      }
      (page->arena->tier == Tier::kDevice ? info.device_bytes : info.host_bytes) += page->bytes;
      if (list == &s.pages && page->refs > 1) ++info.shared_pages;
    }
  }
  info.extents = static_cast<uint32_t>(s.extents.size());
  for (const Extent& e : s.extents) {
    const bool device = e.page->arena->tier == Tier::kDevice;
    (device ? info.extent_device_bytes : info.extent_host_bytes) += e.page->bytes;
  }
  info.device_bytes += info.extent_device_bytes;
  info.host_bytes += info.extent_host_bytes;
  if (s.codec && !s.codec->failed.ok()) info.work_error = s.codec->failed.ToString();
  return info;
}

std::vector<SequenceInfo> Store::Impl::Sequences(uint64_t session) const {
  MutexLock lock(mu_);
  std::vector<SequenceInfo> infos;
  for (const auto& [id, s] : sequences_) {
    if (session == 0 || s->session == session) infos.push_back(InfoOf(*s));
  }
  std::sort(infos.begin(), infos.end(),
            [](const SequenceInfo& a, const SequenceInfo& b) { return a.sequence < b.sequence; });
  return infos;
}

Result<SequenceDetail> Store::Impl::Show(uint64_t sequence) const {
  MutexLock lock(mu_);
  KVS_ASSIGN_OR_RETURN(const Sequence* s, PeekSequence(sequence));
  const SessionMemory& memory = *sessions_.at(s->session)->memory;
  SequenceDetail detail;
  detail.info = InfoOf(*s);
  for (size_t i = 0; i < s->pages.size(); ++i) {
    detail.pages.push_back(
        InfoOfPage(s->pages[i], memory.ReadHeat(s->heat, static_cast<uint32_t>(i))));
  }
  for (const Page* block : s->index_blocks) detail.index_blocks.push_back(InfoOfPage(block, 0));
  for (const Extent& extent : s->extents) detail.extents.push_back(InfoOfExtent(extent));
  return detail;
}

StoreCounters Store::Impl::Counters() const {
  MutexLock lock(mu_);
  StoreCounters counters = counters_;
  counters.prefix_pages = prefix_.size();
  counters.artefacts = artefacts_.all().size();
  for (const auto& [id, arena] : pools_.arenas()) counters.retired_bytes += arena->retired;
  for (const auto& [id, session] : sessions_) {
    for (const auto& [epoch, table] : session->retired_tables.items()) {
      counters.retired_bytes += table->bytes;
    }
  }
  return counters;
}

}  // namespace kvstrata
