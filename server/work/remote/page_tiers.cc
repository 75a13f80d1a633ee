// SPDX-License-Identifier: Apache-2.0
#include "server/work/remote/page_tiers.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace kvstrata {
namespace {

// A load of which each tier reads a part, one after the other.
class SplitLoad : public std::enable_shared_from_this<SplitLoad> {
 public:
  SplitLoad(TierLoad load, TierPages* local, RemotePages* remote)
      : load_(std::move(load)), local_(local), remote_(remote), end_(load_.keys.size()) {
    for (size_t i = 0; i < load_.keys.size(); ++i) {
      const bool here = local_ != nullptr && local_->Holds(load_.keys[i]);
      if (here || load_.remote->values.contains(load_.keys[i])) {
        (here ? here_ : far_).push_back(i);
      } else {
        end_ = std::min(end_, i);  // it has left meanwhile
      }
    }
  }

  // False: neither tier took it, and nothing will be called.
  bool Begin() {
    Cut(&here_);
    if (here_.empty()) return BeginFar();
    TierLoad part = PartOf(here_);
    part.done = [self = shared_from_this()] { self->EndHere(); };
    if (local_->Load(std::move(part))) return true;
    end_ = std::min(end_, here_.front());
    return BeginFar();
  }

 private:
  // What lies behind a value that is missing is of no use.
  void Cut(std::vector<size_t>* part) const {
    part->erase(std::ranges::lower_bound(*part, end_), part->end());
  }
  TierLoad PartOf(const std::vector<size_t>& part) {
    TierLoad load;
    load.asked = load_.asked;
    for (const size_t i : part) load.keys.push_back(load_.keys[i]);
    load.take = [self = shared_from_this(), &part](size_t first,
                                                   std::span<const LoadedValue> values) {
      return self->Take(part, first, values);
    };
    return load;
  }
  // Hands values on in runs without a gap between them.
  bool Take(const std::vector<size_t>& part, size_t first, std::span<const LoadedValue> values) {
    for (size_t i = 0; i < values.size();) {
      const size_t at = part[first + i];
      size_t n = 1;
      while (i + n < values.size() && part[first + i + n] == at + n) ++n;
      if (!load_.take(at, values.subspan(i, n))) {
        end_ = std::min(end_, at);
        return false;
      }
      i += n;
      taken_ = first + i;
    }
    return true;
  }
  void EndHere() {
    if (taken_ < here_.size()) end_ = std::min(end_, here_[taken_]);
    if (!BeginFar()) load_.done();
  }
  bool BeginFar() {
    Cut(&far_);
    if (far_.empty()) return false;
    TierLoad part = PartOf(far_);
    part.remote = load_.remote;
    part.done = [self = shared_from_this()] { self->load_.done(); };
    return remote_->Load(std::move(part));
  }

  TierLoad load_;
  TierPages* const local_;
  RemotePages* const remote_;
  std::vector<size_t> here_, far_;  // keys, by number, in order
  size_t taken_ = 0;                // keys taken of those here
  size_t end_;                      // the first key that is missing
};

}  // namespace

PageTiers::PageTiers(Store* store, TierPages* local, RemotePages* remote, uint32_t min_tokens)
    : store_(store), local_(local), remote_(remote) {
  SetMinTokens(min_tokens);
}

PageTiers::~PageTiers() {
  remote_->Stop();  // what it has under way asks this object
  store_->prefixes().SetPageTier(local_);
}

void PageTiers::SetMinTokens(uint32_t min_tokens) {
  store_->prefixes().SetPageTier(this, min_tokens);
}

void PageTiers::Offer(const TierOffer& offer) {
  if (local_ != nullptr) local_->Offer(offer);
  remote_->Offer(offer);
}

bool PageTiers::Holds(const PageKey& key) const { return local_ != nullptr && local_->Holds(key); }

bool PageTiers::Load(TierLoad load) {
  if (load.remote != nullptr && !load.remote->values.empty()) {
    return std::make_shared<SplitLoad>(std::move(load), local_, remote_)->Begin();
  }
  load.remote = nullptr;
  return local_ != nullptr && local_->Load(std::move(load));
}

Status PageTiers::Pin(const PrefixPin& pin) {
  return local_ == nullptr ? OkStatus() : local_->Pin(pin);
}

Status PageTiers::Unpin(const PrefixPin& pin, bool forget) {
  return local_ == nullptr ? OkStatus() : local_->Unpin(pin, forget);
}

}  // namespace kvstrata
