// SPDX-License-Identifier: Apache-2.0
// RedisValueTiers over servers of a test.
#pragma once

#include <memory>
#include <string>
#include <thread>

#include "base/check.h"
#include "server/tier/redis/redis_threads.h"
#include "server/tier/redis/redis_value_tier.h"

namespace kvstrata {

inline remote::RemoteFormat TestFormat(const std::string& tenant = "tenant",
                                       remote::Seal seal = remote::Seal::kNone) {
  const auto secret = remote::RemoteSecret::Of("a-secret-for-tests-of-more-than-32-characters");
  KVS_CHECK(secret.ok());
  remote::RemoteFormatOptions options;
  options.seal = seal;
  return {*secret, tenant, options};
}

// What the tier says of its servers was asked after this call began.
inline void AwaitSurvey(const RedisValueTier& tier) {
  const RedisSurvey& survey = tier.threads()->survey();
  for (const uint64_t before = survey.ended(); survey.ended() < before + 2;) {
    std::this_thread::yield();
  }
}

}  // namespace kvstrata
