// SPDX-License-Identifier: Apache-2.0
#include "tests/server/tier/value_tiers.h"

#include <utility>

#include "server/tier/disk/disk_tier.h"
#include "server/tier/disk/disk_value_tier.h"
#include "tests/fakes/disk_slots.h"
#include "tests/fakes/memory_value_tier.h"
#include "tests/fakes/scratch_dir.h"
#include "tests/server/tier/mooncake_store.h"
#include "tests/server/tier/redis_servers.h"
#include "tests/server/tier/redis_tiers.h"
#include "tests/server/tier/test_queues.h"
#include "tests/server/tier/tier_values.h"

namespace kvstrata {
namespace {

class InMemory final : public TierUnderTest {
 public:
  explicit InMemory(uint64_t bytes) : tier_(std::make_unique<testing::MemoryValueTier>(bytes)) {}
  ValueTier* tier() override { return tier_.get(); }
  void Destroy() override { tier_.reset(); }
  void Stall() override { tier_->Hold(); }
  void Release() override { tier_->Release(); }
  void Damage(const std::string& key) override { tier_->Damage(key); }

 private:
  std::unique_ptr<testing::MemoryValueTier> tier_;
};

class OnDisk final : public TierUnderTest {
 public:
  explicit OnDisk(uint64_t bytes) {
    constexpr uint64_t kSegment = 1 << 20;  // takes ten values of 100 kB
    DiskTierOptions options;
    options.directory = dir_ / "tier";
    options.segment_bytes = kSegment;
    options.budget_bytes = (bytes / kSegment + 1) * kSegment * 64 / 63 + 65536;
    options.depth = 128;
    options.new_queue = [this](uint32_t depth) {
      return IoQueueChoice{NewFaultyQueue(NewIoQueue(depth).queue, depth, &plan_), OkStatus()};
    };
    Result<std::unique_ptr<DiskTier>> opened = DiskTier::Open(options, Soon());
    KVS_CHECK(opened.ok());
    engine_ = std::move(*opened);
    tier_ = std::make_unique<DiskValueTier>(DiskValueTierOptions{}, engine_.get());
  }
  ValueTier* tier() override { return tier_.get(); }
  void Destroy() override { tier_.reset(); }
  void Stall() override {
    plan_.Set([](const IoRequest&) { return IoFault{IoFault::Kind::kHeld, 0}; });
  }
  void Release() override {
    plan_.Set(nullptr);
    plan_.Release();
  }
  void Damage(const std::string&) override {
    testing::FlipByte(testing::DiskSlots(dir_ / "tier").back());
  }

 private:
  const ScratchDir dir_{"/dev/shm"};
  FaultPlan plan_;
  std::unique_ptr<DiskTier> engine_;
  std::unique_ptr<DiskValueTier> tier_;
};

class InRedis final : public TierUnderTest {
 public:
  explicit InRedis(uint64_t bytes) : servers_({.max_memory = bytes + kServersOwn}) {
    RedisTierOptions options;
    options.servers = servers_.addresses();
    options.stall_timeout = std::chrono::minutes(1);  // tests wait while it is stalled
    options.survey_interval = std::chrono::milliseconds(5);
    Result<std::unique_ptr<RedisValueTier>> opened = RedisValueTier::Open(options, TestFormat());
    KVS_CHECK(opened.ok());
    tier_ = std::move(*opened);
    AwaitSurvey(*tier_);
  }
  ValueTier* tier() override { return tier_.get(); }
  void Destroy() override { tier_.reset(); }
  void Stall() override { servers_.Stop(0); }
  void Release() override { servers_.Continue(0); }
  void Damage(const std::string& key) override {
    const std::string name = TestFormat().NameOf(key, "");
    const std::string byte = servers_.Ask(0, {"GETRANGE", name, "600", "600"}).text;
    servers_.Ask(0, {"SETRANGE", name, "600", std::string(1, static_cast<char>(byte[0] ^ 1))});
  }
  void Settle() override { AwaitSurvey(*tier_); }

 private:
  static constexpr uint64_t kServersOwn = 4 << 20;  // connections and tables
  RedisServers servers_;
  std::unique_ptr<RedisValueTier> tier_;
};

class InMooncake final : public TierUnderTest {
 public:
  explicit InMooncake(uint64_t bytes)
      : store_(bytes + (1 << 20)), tier_(OpenMooncake(TestMooncake(), TestFormat())) {
    KVS_CHECK(AwaitReady(*tier_));
  }
  ValueTier* tier() override { return tier_.get(); }
  void Destroy() override { tier_.reset(); }
  void Stall() override { store_.Hold(); }
  void Release() override { store_.Release(); }
  void Damage(const std::string& key) override { store_.Flip(TestFormat().NameOf(key, ""), 600); }

 private:
  MooncakeFolder store_;
  std::unique_ptr<MooncakeValueTier> tier_;
};

template <typename T>
std::unique_ptr<TierUnderTest> Make(uint64_t bytes) {
  return std::make_unique<T>(bytes);
}

}  // namespace

const std::vector<TierRow>& TierRows() {
  static const std::vector<TierRow> rows = {{"memory", Make<InMemory>},
                                            {"disk", Make<OnDisk>},
                                            {"redis", Make<InRedis>, true},
                                            {"mooncake", Make<InMooncake>, true, false}};
  return rows;
}

}  // namespace kvstrata
