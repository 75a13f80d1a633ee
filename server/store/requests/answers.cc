// SPDX-License-Identifier: Apache-2.0
#include "server/store/requests/answers.h"

namespace kvstrata {

void Answers::Add(SettleDone done, Status status) {
  answers_.emplace_back(std::move(done), std::move(status));
}

void Answers::Tell() {
  std::vector<std::pair<SettleDone, Status>> answers;
  {
    StoreLock lock(mu_);
    answers.swap(answers_);
  }
  for (const auto& [done, status] : answers) done(status);
}

}  // namespace kvstrata
