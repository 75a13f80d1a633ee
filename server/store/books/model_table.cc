// SPDX-License-Identifier: Apache-2.0
#include "server/store/books/model_table.h"

#include <utility>

#include "base/check.h"
#include "server/store/books/sequence.h"

namespace kvstrata {
namespace {

bool IsUnused(const Model& model) { return model.sessions == 0 && model.pages == 0; }

}  // namespace

void ModelTable::Enter(std::shared_ptr<Model> model) {
  const uint64_t id = model->id;
  models_.emplace(id, std::move(model));
}

void ModelTable::NotePages(uint64_t model, uint64_t pages) { models_.at(model)->pages += pages; }

void ModelTable::NoteFreed(uint64_t model) {
  const auto found = models_.find(model);
  KVS_CHECK(found != models_.end());
  --found->second->pages;
  if (IsUnused(*found->second)) models_.erase(found);
}

void ModelTable::DropIfUnused(uint64_t model) {
  const auto found = models_.find(model);
  if (found != models_.end() && IsUnused(*found->second)) models_.erase(found);
}

void ModelTable::DropUnused() {
  std::erase_if(models_, [](const auto& entry) { return IsUnused(*entry.second); });
}

}  // namespace kvstrata
