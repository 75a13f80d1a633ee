// SPDX-License-Identifier: Apache-2.0
// ModelTable: the models by number, and how many pages each has.
//
// A model is there as long as a session registered it or a page is its own (models.h). Ownership:
// sequences share models. Thread-safety: all methods under the store's lock. Cost: a look-up.
#ifndef KVSTRATA_SERVER_STORE_BOOKS_MODEL_TABLE_H_
#define KVSTRATA_SERVER_STORE_BOOKS_MODEL_TABLE_H_

#include <cstdint>
#include <map>
#include <memory>

#include "server/store/options/store_fwd.h"

namespace kvstrata {

class ModelTable {
 public:
  const std::map<uint64_t, std::shared_ptr<Model>>& all() const { return models_; }
  void Enter(std::shared_ptr<Model> model);
  // So many more pages are the model's.
  void NotePages(uint64_t model, uint64_t pages);
  // One of its pages is no more; the last takes along a model that nobody registered.
  void NoteFreed(uint64_t model);
  // Forgets the model, or all of them, if it is there, nobody registered it and it has no pages.
  void DropIfUnused(uint64_t model);
  void DropUnused();

 private:
  std::map<uint64_t, std::shared_ptr<Model>> models_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_BOOKS_MODEL_TABLE_H_
