// What is held of a prompt, as an open is about to take it: in memory alone, under the lock. And as
// whoever plans or tells it: in memory and in the tier below, the lock taken by pieces.
#include <functional>
#include <utility>

#include "server/store/store_impl.h"

namespace kvstrata {
namespace {

class IndexView final : public PrefixView {
 public:
  // `device`: who asks; none: pages of any device count.
  IndexView(const PrefixIndex& prefix, std::optional<uint32_t> device,
            const PrefixQuestion& question, const PrefixShape& shape,
            const std::function<void(Page*)>& found)
      : prefix_(prefix), device_(device), question_(question), shape_(shape), found_(found) {}

  HeldIn InMemory(Part part, size_t i) override {
    if (part == Part::kPage) return Note(i, question_.keys[i], &pages);
    const PageKey& last = question_.keys[(i + 1) * shape_.block_pages - 1];
    return Note(i, IndexBlockKey(last, question_.index), &blocks);
  }
  // What of it is wanted was read before.
  bool InTier(Part, size_t) override { return false; }

  std::vector<Page*> pages, blocks;  // as far as somebody asked; null: it is not there

 private:
  HeldIn Note(size_t i, const PageKey& key, std::vector<Page*>* found) const {
    Page* const page = device_ ? prefix_.FindFor(*device_, key) : prefix_.Find(key);
    if (found->size() <= i) found->resize(i + 1);
    (*found)[i] = page;
    if (page == nullptr) return HeldIn::kNothing;
    if (found_) found_(page);
    return InMemoryOf(page->arena->tier);
  }

  const PrefixIndex& prefix_;
  const std::optional<uint32_t> device_;
  const PrefixQuestion& question_;
  const PrefixShape& shape_;
  const std::function<void(Page*)>& found_;
};

}  // namespace

Store::Impl::Hit Store::Impl::FindPrefix(const PrefixQuestion& q,
                                         const std::optional<RawFree>& artefact,
                                         std::optional<uint32_t> device,
                                         const std::function<void(Page*)>& found) const {
  const PrefixShape shape(q.keys.size(), q.page_tokens, q.index);
  IndexView view(prefix_, device, q, shape, found);
  const HeldPrefix held =
      FindHeld(shape, SuperfluousPages(q.plan, artefact, q.keys.size(), q.page_tokens), &view);
  view.pages.resize(held.pages.size());
  view.blocks.resize(held.blocks);
  return {std::move(view.pages), std::move(view.blocks), held.whole};
}

HeldPrefix Store::Impl::FindAnywhere(const PrefixQuestion& q,
                                     const std::optional<RawFree>& artefact) {
  const PageTier* tier = nullptr;
  {
    MutexLock lock(mu_);
    DropLost();
    tier = tier_;
  }
  const PrefixShape shape(q.keys.size(), q.page_tokens, q.index);
  const auto memory = [this, &q](std::span<const PageKey> keys, std::span<HeldIn> places) {
    FindInMemory(q.tenant, keys, places);
  };
  PrefixSurvey survey(q, shape, memory, tier);
  return FindHeld(shape, SuperfluousPages(q.plan, artefact, q.keys.size(), q.page_tokens), &survey);
}

const Artefact* Store::Impl::FindArtefact(const PageKey& key, uint32_t device) const {
  const Artefact* const found = artefacts_.Peek(key);
  return found != nullptr && found->MappableFrom(device) ? found : nullptr;
}

std::optional<RawFree> Store::Impl::RawFreeBy(const Plan& plan, const PageKey& artefact,
                                              uint32_t device) const {
  const Artefact* found = FindArtefact(artefact, device);
  if (found == nullptr || !OpensWithoutRaw(plan)) return std::nullopt;
  const Extent& first = found->extents.front();
  const Residence where =
      first.page->arena->tier == Tier::kDevice ? Residence::kDevice : Residence::kHost;
  return RawFree{found->released, found->extents.back().tokens.end, where};
}

// Kernels of a GPU compute a prompt from its raw pages alone.
bool Store::Impl::OpensWithoutRaw(const Plan& plan) const {
  return plan.stored.keep_raw == KeepRaw::kNo && pools_.memory(Tier::kDevice) == Memory::kMemfd;
}

}  // namespace kvstrata
