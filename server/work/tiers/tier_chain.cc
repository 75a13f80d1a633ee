// SPDX-License-Identifier: Apache-2.0
#include "server/work/tiers/tier_chain.h"

#include <algorithm>
#include <optional>
#include <ranges>
#include <span>
#include <utility>

namespace kvstrata {
namespace {

using Rows = std::vector<TierRow*>;

// A search of far rows, one after the other.
class ChainSearch : public std::enable_shared_from_this<ChainSearch> {
 public:
  ChainSearch(TierSearch search, const Rows& rows)
      : search_(std::move(search)), done_(std::move(search_.done)), rows_(rows) {}

  // Asks the first row from `from` on that takes it. False: none does, and nothing will be called.
  bool Begin(size_t from) {
    for (size_t row = from; row < rows_.size(); ++row) {
      TierSearch ask = search_;
      ask.done = [self = shared_from_this(), row](TierFinds finds) {
        self->Found(row, std::move(finds));
      };
      if (rows_[row]->Search(std::move(ask))) return true;
    }
    return false;
  }

 private:
  void Found(size_t row, TierFinds finds) {
    for (auto& [key, value] : finds.values) value.row = row;
    all_.values.merge(finds.values);
    all_.deadline = std::max(all_.deadline, finds.deadline);
    LeaveOutFound();
    if (search_.keys.empty() || !Begin(row + 1)) done_(std::move(all_));
  }
  void LeaveOutFound() {
    const auto pages = [this] {
      return std::ranges::count_if(search_.keys, &TierSearch::Key::page);
    };
    const auto before = static_cast<uint32_t>(pages());
    std::erase_if(search_.keys,
                  [this](const TierSearch::Key& k) { return all_.values.contains(k.key); });
    search_.artefact = search_.artefact && !search_.keys.empty() && !search_.keys.front().page &&
                       search_.keys.front().key == search_.keys.front().place;
    const auto left = static_cast<uint32_t>(pages());
    search_.bytes = before == 0 ? 0 : search_.bytes / before * left;
    search_.tokens = before == 0 ? 0 : search_.tokens / before * left;
  }

  TierSearch search_;  // what is not found yet
  const std::function<void(TierFinds)> done_;
  const Rows& rows_;
  TierFinds all_;
};

// A load of which each row reads a part, one after the other.
class ChainLoad : public std::enable_shared_from_this<ChainLoad> {
 public:
  ChainLoad(TierLoad load, const Rows& rows)
      : load_(std::move(load)), rows_(rows), parts_(rows.size()), end_(load_.keys.size()) {
    for (size_t i = 0; i < load_.keys.size(); ++i) {
      if (const std::optional<size_t> row = RowOf(load_.keys[i])) {
        parts_[*row].push_back(i);
      } else {
        end_ = std::min(end_, i);  // it has left meanwhile
      }
    }
  }

  // Has the first row from `from` on read that has a part. False: none does, and nothing will be
  // called.
  bool Begin(size_t from) {
    for (size_t row = from; row < rows_.size(); ++row) {
      std::vector<size_t>& part = parts_[row];
      // What lies behind a value that is missing is of no use.
      part.erase(std::ranges::lower_bound(part, end_), part.end());
      if (part.empty()) continue;
      taken_ = 0;
      if (rows_[row]->Load(PartOf(row))) return true;
      end_ = std::min(end_, part.front());
    }
    return false;
  }

 private:
  // The first row that has it.
  std::optional<size_t> RowOf(const PageKey& key) const {
    const auto near = std::ranges::find_if(
        rows_, [&key](const TierRow* row) { return !row->far() && row->Holds(key); });
    if (near != rows_.end()) return near - rows_.begin();
    if (load_.finds == nullptr) return std::nullopt;
    const auto found = load_.finds->values.find(key);
    if (found == load_.finds->values.end()) return std::nullopt;
    return found->second.row;
  }
  TierLoad PartOf(size_t row) {
    TierLoad load;
    load.asked = load_.asked;
    load.longer = load_.longer;
    if (rows_[row]->far()) load.finds = load_.finds;
    for (const size_t i : parts_[row]) load.keys.push_back(load_.keys[i]);
    load.take = [self = shared_from_this(), row](size_t first,
                                                 std::span<const LoadedValue> values) {
      return self->Take(self->parts_[row], first, values);
    };
    load.done = [self = shared_from_this(), row] { self->End(row); };
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
  void End(size_t row) {
    if (taken_ < parts_[row].size()) end_ = std::min(end_, parts_[row][taken_]);
    if (!Begin(row + 1)) load_.done();
  }

  TierLoad load_;
  const Rows& rows_;
  std::vector<std::vector<size_t>> parts_;  // keys of each row, by number, in order
  size_t taken_ = 0;                        // keys of the part that is read now
  size_t end_;                              // the first key that is missing
};

}  // namespace

TierChain::~TierChain() {
  for (TierRow* const row : rows_ | std::views::reverse) {
    row->Stop();  // what it has under way asks this object
  }
  store_->prefixes().SetPageTier(nullptr);
}

void TierChain::Add(TierRow* row) {
  rows_.push_back(row);
  Refresh();
}

void TierChain::Refresh() {
  std::optional<uint32_t> min_tokens;
  for (const TierRow* const row : rows_) {
    if (row->far()) min_tokens = std::min(min_tokens.value_or(UINT32_MAX), row->min_tokens());
  }
  store_->prefixes().SetPageTier(this, min_tokens);
}

void TierChain::Offer(const TierOffer& offer) {
  for (TierRow* const row : rows_) row->writer().queue().Offer(offer);
}

bool TierChain::Holds(const PageKey& key) const {
  return std::ranges::any_of(rows_,
                             [&key](const TierRow* row) { return !row->far() && row->Holds(key); });
}

bool TierChain::Search(TierSearch search) {
  return std::make_shared<ChainSearch>(std::move(search), rows_)->Begin(0);
}

bool TierChain::Load(TierLoad load) {
  const bool found = load.finds != nullptr && !load.finds->values.empty();
  if (!found && rows_.size() == 1) return rows_[0]->Load(std::move(load));
  return std::make_shared<ChainLoad>(std::move(load), rows_)->Begin(0);
}

Status TierChain::Pin(const PrefixPin& pin) {
  Status first;
  for (TierRow* const row : rows_) {
    const Status status = row->Pin(pin);
    if (first.ok()) first = status;
  }
  return first;
}

Status TierChain::Unpin(const PrefixPin& pin, bool forget) {
  Status first;
  for (TierRow* const row : rows_) {
    const Status status = row->Unpin(pin, forget);
    if (first.ok()) first = status;
  }
  return first;
}

}  // namespace kvstrata
