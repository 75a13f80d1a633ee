// SPDX-License-Identifier: Apache-2.0
// Values one by one over a real channel: a store over a disk, some of it damaged.
#include <set>

#include "server/tier/disk/disk_value_tier.h"
#include "server/work/tiers/tier_chain.h"
#include "server/work/tiers/value_catalog.h"
#include "tests/fakes/disk_slots.h"
#include "tests/fakes/scratch_dir.h"
#include "tests/server/rpc_fixture.h"

namespace kvstrata::test {
namespace {

using ::kvstrata::testing::DiskSlot;
using ::kvstrata::testing::DiskSlots;

constexpr int kPages = 10;

class RpcValuesTest : public ::testing::Test {
 protected:
  RpcValuesTest() {
    const uint64_t sequence = client_.Open(model_, "full", {}).value().sequence();
    EXPECT_TRUE(client_.Run(sequence, Ids(kPages * 16 + 5), &random_).ok());
    EXPECT_TRUE(Eventually([&] { return disk_->Stats().entries == kPages; }));
  }
  ~RpcValuesTest() override {
    client_.Cancel();
    daemon_.server().Shutdown(std::chrono::milliseconds(0));
    tiers_.reset();
    pages_.reset();
    values_.reset();
  }

  // Leaves the pages on disk alone.
  void Forget() {
    client_.Cancel();
    EXPECT_TRUE(Eventually([&] { return daemon_.store().inspection().Sessions().empty(); }));
    EXPECT_EQ(daemon_.store().eviction().Evict(false).pages(), static_cast<uint64_t>(kPages));
  }
  v1::ListValuesResponse List(const v1::ListValuesRequest& request) {
    v1::ListValuesResponse response;
    const Status s = Call(*client_.admin, &v1::Admin::Stub::ListValues, request, &response);
    EXPECT_TRUE(s.ok()) << s.ToString();
    return response;
  }
  Result<v1::ValueVerdict> Verify(const std::string& key) {
    v1::VerifyRequest request;
    request.add_keys(key);
    v1::VerifyResponse response;
    KVS_RETURN_IF_ERROR(Call(*client_.admin, &v1::Admin::Stub::Verify, request, &response));
    return response.values(0);
  }
  Status Get(const std::string& key, std::string* bytes, std::string* tier) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kDeadline);
    v1::GetValueRequest request;
    request.set_key(key);
    const auto stream = client_.admin->GetValue(&context, request);
    bytes->clear();
    for (v1::GetValueResponse piece; stream->Read(&piece);) {
      if (!piece.tier().empty()) *tier = piece.tier();
      *bytes += piece.data();
    }
    return FromGrpc(stream->Finish());
  }
  Status Scrub(v1::ScrubResponse* last, uint64_t rate = 0) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kDeadline);
    v1::ScrubRequest request;
    request.set_bytes_per_second(rate);
    const auto stream = client_.admin->Scrub(&context, request);
    while (stream->Read(last)) {
    }
    return FromGrpc(stream->Finish());
  }
  static std::string KeyOf(const DiskSlot& slot) {
    std::ifstream file(slot.file, std::ios::binary);
    file.seekg(static_cast<std::streamoff>(slot.offset + 72));
    std::string key(32, 0);
    file.read(key.data(), 32);
    return key;
  }

  const ScratchDir dir_;
  std::unique_ptr<DiskTier> disk_;
  std::unique_ptr<DiskValueTier> values_;
  std::unique_ptr<TierRow> pages_;
  std::unique_ptr<TierChain> tiers_;
  std::unique_ptr<ValueCatalog> catalog_;
  RpcDaemon daemon_{
      uint64_t{64} << 20, [this](Store* store, GrpcOptions* options) {
        DiskTierOptions tier;
        tier.directory = dir_ / "tier";
        tier.budget_bytes = 16 << 20;
        tier.segment_bytes = 1 << 20;
        disk_ =
            std::move(DiskTier::Open(tier, std::chrono::steady_clock::now() + kDeadline)).value();
        values_ = std::make_unique<DiskValueTier>(DiskValueTierOptions{}, disk_.get());
        TierRowOptions slow;  // a busy machine is no reason to fail
        slow.loads.load_timeout = kDeadline;
        pages_ = std::make_unique<TierRow>(slow, store, values_.get(), values_->Hooks());
        tiers_ = std::make_unique<TierChain>(store);
        tiers_->Add(pages_.get());
        catalog_ = std::make_unique<ValueCatalog>(store, values_.get());
        options->values.list = [this](const ValueFilter& f, uint64_t after, size_t n) {
          return catalog_->List(f, after, n);
        };
        options->values.get = [this](const std::string& k) { return catalog_->Get(k); };
        options->values.verify = [this](const std::string& k) { return catalog_->Verify(k); };
        options->scrub = [this](TierScrub scrub) {
          return pages_->scrubs().Begin(std::move(scrub));
        };
        options->drain = [this] { return pages_->writer().queue().Drain(); };
        options->resume = [this] { pages_->writer().Resume(); };
        options->resize_disk = [this](uint64_t bytes) {
          return values_->Resize(bytes, std::chrono::steady_clock::now() + kDeadline);
        };
        options->disk = [this] {
          DiskInfo info;
          info.draining = pages_->writer().queue().draining();
          info.drained = pages_->writer().queue().drained();
          info.entries = disk_->Stats().entries;
          info.capacity_bytes = disk_->Stats().capacity_bytes;
          info.refused = pages_->counters().refused;
          return info;
        };
      }};
  RpcClient client_{daemon_.Connect()};
  std::mt19937 random_{11};
  uint64_t model_ = client_.RegisterModel();
};

TEST_F(RpcValuesTest, MemoryAndDiskAreListedOnceEach) {
  v1::ListValuesResponse all = List({});
  ASSERT_EQ(all.values_size(), kPages);
  EXPECT_EQ(all.next(), 0u);
  for (const v1::Value& value : all.values()) {
    EXPECT_EQ(value.kind(), "page");
    EXPECT_EQ(value.model(), "toy");
    EXPECT_EQ(value.tokens(), 16u);
    ASSERT_EQ(value.tiers_size(), 2);
    EXPECT_EQ(value.tiers(0), "device");
    EXPECT_EQ(value.tiers(1), "disk");
  }
  Forget();  // the model goes with its last session and page
  RpcClient next{daemon_.Connect()};
  next.RegisterModel();
  all = List({});
  ASSERT_EQ(all.values_size(), kPages);
  for (const v1::Value& value : all.values()) {
    ASSERT_EQ(value.tiers_size(), 1);
    EXPECT_EQ(value.tiers(0), "disk");
    EXPECT_EQ(value.kind(), "page") << "told by its size";
  }
}

TEST_F(RpcValuesTest, AListGoesOnWhereItEnded) {
  v1::ListValuesRequest request;
  request.set_limit(3);
  std::set<std::string> keys;
  int values = 0;
  do {
    const v1::ListValuesResponse some = List(request);
    EXPECT_LE(some.values_size(), 3);
    values += some.values_size();
    for (const v1::Value& value : some.values()) keys.insert(value.key());
    request.set_after(some.next());
  } while (request.after() != 0);
  EXPECT_EQ(values, kPages);
  EXPECT_EQ(keys.size(), static_cast<size_t>(kPages));
}

TEST_F(RpcValuesTest, ListsAreFiltered) {
  v1::ListValuesRequest request;
  request.set_tier("host");
  EXPECT_EQ(List(request).values_size(), 0);
  request.set_tier("disk");
  EXPECT_EQ(List(request).values_size(), kPages);
  request.set_model_name("another");
  EXPECT_EQ(List(request).values_size(), 0);
  request.set_tier("moon");
  v1::ListValuesResponse response;
  EXPECT_EQ(Call(*client_.admin, &v1::Admin::Stub::ListValues, request, &response).reason(),
            "VALUE_FILTER");
}

TEST_F(RpcValuesTest, BytesAreTheSameFromMemoryAndDisk) {
  const std::string key = List({}).values(4).key();
  std::string memory, disk, tier;
  ASSERT_TRUE(Get(key, &memory, &tier).ok());
  EXPECT_EQ(tier, "device");
  EXPECT_FALSE(memory.empty());
  Forget();
  ASSERT_TRUE(Get(key, &disk, &tier).ok());
  EXPECT_EQ(tier, "disk");
  EXPECT_EQ(memory, disk);
  EXPECT_EQ(Get(std::string(32, 'x'), &disk, &tier).reason(), "VALUE_UNKNOWN");
  EXPECT_EQ(Get("short", &disk, &tier).reason(), "VALUE_KEY");
}

TEST_F(RpcValuesTest, ADamagedValueIsFoundAndLeaves) {
  const std::vector<DiskSlot> slots = DiskSlots(dir_ / "tier");
  ASSERT_EQ(slots.size(), static_cast<size_t>(kPages));
  FlipByte(slots[3]);
  const std::string key = KeyOf(slots[3]);
  EXPECT_EQ(Verify(KeyOf(slots[2]))->verdict(), "sound");
  EXPECT_EQ(Verify(key)->verdict(), "corrupt");
  EXPECT_EQ(Verify(key)->verdict(), "unchecked") << "memory has it yet";
  Forget();
  EXPECT_EQ(Verify(key)->verdict(), "gone");
  EXPECT_EQ(disk_->Stats().corrupt, 1u);
  EXPECT_EQ(disk_->Stats().entries, kPages - 1u);
}

TEST_F(RpcValuesTest, ACopyInMemoryThatDiffersIsFound) {
  const std::string key = List({}).values(0).key();
  v1::ListSequencesRequest all;
  v1::ListSequencesResponse sequences;
  ASSERT_TRUE(Call(*client_.admin, &v1::Admin::Stub::ListSequences, all, &sequences).ok());
  const SequenceDetail shown =
      daemon_.store().inspection().Show(sequences.sequences(0).sequence()).value();
  for (int i = 0; i < kPages; ++i) {  // a byte of each
    daemon_.store().devices().ArenaBase(shown.pages[i].arena)[shown.pages[i].offset] ^=
        std::byte{1};
  }
  const auto verdict = Verify(key);
  ASSERT_TRUE(verdict.ok());
  EXPECT_EQ(verdict->verdict(), "corrupt");
  EXPECT_EQ(verdict->tiers_size(), 2);
  EXPECT_EQ(disk_->Stats().entries, static_cast<uint64_t>(kPages)) << "the disk's is sound";
}

TEST_F(RpcValuesTest, AScrubReadsEveryValueAndFindsTheDamagedOnes) {
  v1::ScrubResponse last;
  ASSERT_TRUE(Scrub(&last).ok());
  EXPECT_TRUE(last.done());
  EXPECT_EQ(last.values(), static_cast<uint64_t>(kPages));
  EXPECT_GT(last.bytes(), 0u);
  EXPECT_EQ(last.corrupt(), 0u);
  const std::vector<DiskSlot> slots = DiskSlots(dir_ / "tier");
  FlipByte(slots.at(1));
  FlipByte(slots.at(8));
  ASSERT_TRUE(Scrub(&last).ok());
  EXPECT_EQ(last.values(), static_cast<uint64_t>(kPages));
  EXPECT_EQ(last.corrupt(), 2u);
  EXPECT_EQ(disk_->Stats().entries, kPages - 2u);
  ASSERT_TRUE(Scrub(&last).ok());
  EXPECT_EQ(last.corrupt(), 0u) << "they have left";
  EXPECT_EQ(last.values(), kPages - 2u);
}

TEST_F(RpcValuesTest, AScrubEndsWithItsClientAndLetsOpensIn) {
  Forget();
  grpc::ClientContext context;
  v1::ScrubRequest request;
  request.set_bytes_per_second(1);  // hours for each value
  const auto stream = client_.admin->Scrub(&context, request);
  v1::ScrubResponse first;
  ASSERT_TRUE(stream->Read(&first));
  EXPECT_FALSE(first.done());
  v1::ScrubResponse other;
  EXPECT_EQ(Scrub(&other).reason(), "SCRUB_RUNNING");
  RpcClient reader(daemon_.Connect());
  EXPECT_EQ(reader.Open(reader.RegisterModel(), "full", Ids(kPages * 16 + 5)).value().held_tokens(),
            kPages * 16u);
  context.TryCancel();
  while (stream->Read(&first)) {
  }
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_LT(first.values(), static_cast<uint64_t>(kPages));
  ASSERT_TRUE(Eventually([&] { return Scrub(&other).ok(); })) << "the first one has ended";
  EXPECT_EQ(other.values(), static_cast<uint64_t>(kPages));
}

TEST_F(RpcValuesTest, AScrubEndsWithTheDaemon) {
  grpc::ClientContext context;
  v1::ScrubRequest request;
  request.set_bytes_per_second(1);
  const auto stream = client_.admin->Scrub(&context, request);
  v1::ScrubResponse first;
  ASSERT_TRUE(stream->Read(&first));
  pages_->scrubs().Refuse();
  while (stream->Read(&first)) {
  }
  EXPECT_EQ(FromGrpc(stream->Finish()).reason(), "DAEMON_STOPPING");
}

TEST_F(RpcValuesTest, ADrainedDiskTakesNothingUntilItIsResumed) {
  v1::DrainRequest request;
  v1::DrainResponse response;
  const auto drain = [&] {
    const Status s = Call(*client_.admin, &v1::Admin::Stub::Drain, request, &response);
    EXPECT_TRUE(s.ok()) << s.ToString();
    return response.drained();
  };
  ASSERT_TRUE(Eventually(drain));
  EXPECT_TRUE(response.draining());
  EXPECT_EQ(response.refused(), 0u);
  const uint64_t sequence = client_.Open(model_, "full", {}).value().sequence();
  ASSERT_TRUE(client_.Run(sequence, Ids(4 * 16 + 1, 5000), &random_).ok());
  ASSERT_TRUE(drain());
  EXPECT_EQ(response.refused(), 4u);
  EXPECT_EQ(response.entries(), static_cast<uint64_t>(kPages));
  request.set_resume(true);
  EXPECT_FALSE(drain());
  EXPECT_FALSE(response.draining());
  EXPECT_TRUE(Eventually([&] { return disk_->Stats().entries == kPages + 4; }))
      << "what memory has and the disk has not";
}

TEST_F(RpcValuesTest, CapacitiesChangeAndNameTheirKeys) {
  v1::ResizeRequest request;
  v1::ResizeResponse response;
  const auto resize = [&](const char* tier, uint64_t bytes) {
    request.set_tier(tier);
    request.set_bytes(bytes);
    response.Clear();
    return Call(*client_.admin, &v1::Admin::Stub::Resize, request, &response);
  };
  ASSERT_TRUE(resize("device", 128 << 20).ok());
  EXPECT_EQ(response.capacity_bytes(), uint64_t{128} << 20);
  EXPECT_EQ(response.key(), "pool.device_bytes");
  EXPECT_EQ(daemon_.store().inspection().Pools()[0].capacity_bytes, uint64_t{128} << 20);
  ASSERT_TRUE(resize("disk", 20 << 20).ok());
  EXPECT_EQ(response.capacity_bytes(), disk_->Stats().capacity_bytes);
  EXPECT_GT(response.capacity_bytes(), uint64_t{16} << 20);
  EXPECT_EQ(response.key(), "disk.budget_bytes");
  EXPECT_EQ(resize("host", 4096).reason(), "POOL_SIZE");
  EXPECT_EQ(resize("disk", 4096).reason(), "DISK_BUDGET");
  EXPECT_EQ(resize("moon", 1 << 30).reason(), "TIER_UNKNOWN");
}

}  // namespace
}  // namespace kvstrata::test
