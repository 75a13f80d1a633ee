// SPDX-License-Identifier: Apache-2.0
// RedisValueTier behind a proxy that lies: never a wrong byte. KVS_TEST_GETS: how many gets
// (1e4 by default).
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "server/tier/blocking_calls.h"
#include "tests/server/tier/lying_proxy.h"
#include "tests/server/tier/redis_servers.h"
#include "tests/server/tier/redis_tiers.h"
#include "tests/server/tier/tier_values.h"

namespace kvstrata {
namespace {

constexpr uint64_t kKeys = 60;

uint64_t Given(const char* name, uint64_t otherwise) {
  const char* const given = std::getenv(name);
  return given != nullptr ? std::strtoull(given, nullptr, 10) : otherwise;
}

std::unique_ptr<RedisValueTier> OpenTier(const std::string& address, remote::Seal seal) {
  RedisTierOptions options;
  options.servers = {address};
  Result<std::unique_ptr<RedisValueTier>> tier =
      RedisValueTier::Open(options, TestFormat("tenant", seal));
  KVS_CHECK(tier.ok());
  return std::move(*tier);
}

class RedisLies : public ::testing::TestWithParam<remote::Seal> {};

TEST_P(RedisLies, NoByteIsWrong) {
  const uint64_t wanted = Given("KVS_TEST_GETS", 10000);
  const uint64_t seed = Given("KVS_TEST_SEED", std::random_device()());
  std::printf("KVS_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  const RedisServers servers;
  const LyingProxy proxy(servers.port(0), seed);
  const auto honest = OpenTier(servers.address(0), GetParam());
  const auto lied_to = OpenTier("127.0.0.1:" + std::to_string(proxy.port()), GetParam());
  const std::vector<uint64_t> sizes = {700, 40, 900};  // equal ones: swapped values fit
  std::vector<AlignedBuffers> values, into;
  for (uint64_t i = 0; i < kKeys; ++i) {
    values.push_back(ValueOf(std::to_string(i), 0, sizes));
    into.emplace_back(sizes);
  }
  uint64_t answered = 0, hits = 0, wrong = 0;
  const Deadline end = Soon() + std::chrono::minutes(8);
  while (answered < wanted && std::chrono::steady_clock::now() < end) {
    std::vector<TierPut> puts;
    std::vector<TierGet> gets;
    for (uint64_t i = 0; i < kKeys; ++i) {
      puts.push_back(PutOf(std::to_string(i), values[i]));
      gets.push_back({std::to_string(i), into[i].buffers(), into[i].owner(), {}});
    }
    PutAndWait(honest.get(), puts, Soon());
    GetAndWait(lied_to.get(), gets, Soon());
    for (uint64_t i = 0; i < kKeys; ++i) {
      answered += gets[i].status.code() != Code::kUnavailable;
      hits += gets[i].status.ok();
      wrong += gets[i].status.ok() && !SameBytes(into[i], values[i]);
    }
  }
  EXPECT_EQ(wrong, 0u);
  EXPECT_GE(answered, wanted);
  EXPECT_GT(hits, wanted / 2);
  EXPECT_GT(proxy.flips(), wanted / 20);
  EXPECT_GT(proxy.swaps(), wanted / 20);
  EXPECT_GT(proxy.cuts(), 0u);
  EXPECT_GE(lied_to->Stats().damaged, wanted / 10);
}

INSTANTIATE_TEST_SUITE_P(All, RedisLies, ::testing::Values(remote::Seal::kNone, remote::Seal::kGcm),
                         [](const auto& row) { return std::string(SealName(row.param)); });

}  // namespace
}  // namespace kvstrata
