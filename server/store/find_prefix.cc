// What memory has of a prompt: the view of an open that is about to take it, under the lock.
#include <functional>
#include <utility>

#include "server/store/store_impl.h"

namespace kvstrata {
namespace {

class IndexView final : public PrefixView {
 public:
  // `device`: who asks; none: pages of any device count.
  IndexView(const PrefixIndex& prefix, std::optional<uint32_t> device,
            std::span<const PageKey> keys, const PrefixShape& shape, const IndexLayout& index,
            const std::function<void(Page*)>& found)
      : prefix_(prefix),
        device_(device),
        keys_(keys),
        shape_(shape),
        index_(index),
        found_(found) {}

  bool HasPage(size_t i, bool) override { return Note(i, keys_[i], &pages); }
  bool HasBlock(size_t i) override {
    return Note(i, IndexBlockKey(keys_[(i + 1) * shape_.block_pages - 1], index_), &blocks);
  }

  std::vector<Page*> pages, blocks;  // as far as somebody asked; null: it is not there

 private:
  bool Note(size_t i, const PageKey& key, std::vector<Page*>* found) const {
    Page* const page = device_ ? prefix_.FindFor(*device_, key) : prefix_.Find(key);
    if (found->size() <= i) found->resize(i + 1);
    (*found)[i] = page;
    if (page != nullptr && found_) found_(page);
    return page != nullptr;
  }

  const PrefixIndex& prefix_;
  const std::optional<uint32_t> device_;
  const std::span<const PageKey> keys_;
  const PrefixShape& shape_;
  const IndexLayout& index_;
  const std::function<void(Page*)>& found_;
};

}  // namespace

Store::Impl::Hit Store::Impl::FindPrefix(const Sequence& s, std::span<const PageKey> keys,
                                         const std::vector<bool>& superfluous,
                                         std::optional<uint32_t> device,
                                         const std::function<void(Page*)>& found) const {
  const PrefixShape shape(keys.size(), s.page_tokens(), s.index);
  IndexView view(prefix_, device, keys, shape, s.index, found);
  const HeldPrefix held = FindHeld(shape, superfluous, &view);
  view.pages.resize(held.pages);
  view.blocks.resize(held.blocks);
  return {std::move(view.pages), std::move(view.blocks), held.whole};
}

std::optional<RawFree> Store::Impl::RawFreeBy(const Plan& plan, const PageKey& artefact,
                                              uint32_t device) const {
  const Artefact* found = artefacts_.Peek(artefact);
  if (found == nullptr || !found->MappableFrom(device) || !OpensWithoutRaw(plan)) {
    return std::nullopt;
  }
  const Extent& first = found->extents.front();
  const Residence where =
      first.page->arena->tier == Tier::kDevice ? Residence::kDevice : Residence::kHost;
  return RawFree{found->released, found->extents.back().tokens.end, where};
}

// Kernels of a GPU compute a prompt from its raw pages alone.
bool Store::Impl::OpensWithoutRaw(const Plan& plan) const {
  return plan.stored.keep_raw == KeepRaw::kNo && pools_.memory(Tier::kDevice) == Memory::kMemfd;
}

std::vector<bool> Store::Impl::Superfluous(const Opening& o) const {
  const Sequence& s = *o.sequence;
  if (!s.codec) return {};
  const std::optional<RawFree> free = RawFreeBy(s.plan, o.artefact, o.device);
  if (!free) return {};
  return SuperfluousPages(s.plan, *free, o.keys.size(), s.page_tokens());
}

}  // namespace kvstrata
