// SPDX-License-Identifier: Apache-2.0
// CodecWorks: the work items of ops that one codec alone has, within those of an attention
// (attend_works.h) or of a selection that scores keys (score_works.h). The codec's folder has the
// class, in a list of which every class is made once, when it is first asked for.
//
// Threads: one call at a time. Cost: memory is kept from round to round.
#pragma once

#include <memory>
#include <vector>

#include "kernels/backend/backend.h"

namespace kvstrata {

class CodecWorks {
 public:
  virtual ~CodecWorks() = default;
  virtual void Clear() = 0;
  virtual void Run(const Backend& backend, Executor& executor) = 0;
};

class CodecWorkList {
 public:
  CodecWorkList() = default;
  // A copy has no items: they are those of a call under way.
  CodecWorkList(const CodecWorkList&) {}
  CodecWorkList& operator=(const CodecWorkList&) {
    list_.clear();
    return *this;
  }

  template <typename Works>
  Works& Of() {
    for (const auto& works : list_) {
      if (auto* const found = dynamic_cast<Works*>(works.get()); found != nullptr) return *found;
    }
    auto made = std::make_unique<Works>();
    Works& works = *made;
    list_.push_back(std::move(made));
    return works;
  }
  void Clear() {
    for (const auto& works : list_) works->Clear();
  }
  void Run(const Backend& backend, Executor& executor) {
    for (const auto& works : list_) works->Run(backend, executor);
  }

 private:
  std::vector<std::unique_ptr<CodecWorks>> list_;
};

}  // namespace kvstrata
