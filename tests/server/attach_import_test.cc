// SPDX-License-Identifier: Apache-2.0
// Lending over the wire: descriptors beside the ring, requests that are too short or name what was
// not sent, tensors that are let go when the client goes. What is copied is importer_test's.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "server/attach/attach_server.h"
#include "server/work/importer.h"
#include "tests/fakes/lent_blocks.h"
#include "tests/fakes/scratch_dir.h"
#include "tests/server/attach_client.h"

namespace kvstrata {
namespace {

using namespace test;  // NOLINT: the client of this folder
using ::kvstrata::testing::BlockShape;
using ::kvstrata::testing::kBlockLayouts;
using ::kvstrata::testing::LentBlocks;

constexpr int32_t kRow = 128;  // SmallModel: one layer, one head of 64 x bf16

void RowOf(int32_t, int side, int32_t, int32_t position, std::byte* to) {
  std::memset(to, 1 + side + position % 100, kRow);
}

// Descriptors of this process, the daemon's too, that are of this file.
size_t DescriptorsOf(int file) {
  struct stat want {
  }, found{};
  EXPECT_EQ(fstat(file, &want), 0);
  size_t n = 0;
  for (int fd = 0; fd < 1024; ++fd) {
    n += fstat(fd, &found) == 0 && found.st_ino == want.st_ino && found.st_dev == want.st_dev;
  }
  return n;
}

class AttachImportTest : public ::testing::Test {
 protected:
  void SetUp() override {
    StoreOptions small;
    small.device_bytes = small.host_bytes = uint64_t{8} << 20;
    small.arena_bytes = 256 << 10;
    store_ = std::move(Store::Create(small)).value();
    importer_ = std::make_unique<Importer>(ImporterOptions{}, store_.get(), &Backends().front());
    auto listener = UnixListener::Listen(Path(), SOCK_SEQPACKET, -1);
    ASSERT_TRUE(listener.ok()) << listener.status().ToString();
    AttachOptions options;
    options.imports = importer_.get();
    server_ = std::move(AttachServer::Start(options, std::move(*listener), store_.get())).value();
  }
  ~AttachImportTest() override { server_.reset(); }
  std::string Path() const { return directory_ / "k.attach"; }

  static bool SendFd(const Client& client, uint32_t number, int fd, uint32_t type = 5) {
    shm::Descriptor packet{type, number};
    iovec part{&packet, sizeof(packet)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (fd >= 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
    }
    return sendmsg(client.socket(), &message, MSG_NOSIGNAL) == sizeof(packet);
  }
  static shm::RegisterTensors Request(uint64_t model, const LentBlocks& blocks, uint32_t number) {
    shm::RegisterTensors request{};
    request.model = model;
    for (const int side : {0, 1}) {
      shm::BlockTensor& t = side == 0 ? request.keys : request.values;
      const auto s = blocks.StridesOf(0, side);
      t.kind = shm::BlockTensor::kMemfd;
      t.descriptor = number;
      t.bytes = blocks.bytes();
      t.offset = static_cast<uint64_t>(s.offset);
      t.block_stride = s.block;
      t.slot_stride = s.slot;
      t.head_stride = s.head;
      t.dtype = 3;
      t.blocks = blocks.shape().blocks;
      t.block_tokens = blocks.shape().block_tokens;
      t.heads = 1;
      t.head_dim = 64;
    }
    return request;
  }
  static Bytes SealOf(uint64_t sequence, uint32_t first, const std::vector<int32_t>& blocks,
                      const std::vector<int32_t>& tokens) {
    Bytes payload = PodBytes(shm::SealBlocks{sequence, first, static_cast<uint32_t>(blocks.size()),
                                             static_cast<uint32_t>(tokens.size()), 0});
    PutTokens(&payload, blocks);
    PutTokens(&payload, tokens);
    return payload;
  }

  const ScratchDir directory_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<Importer> importer_;
  std::unique_ptr<AttachServer> server_;
};

TEST_F(AttachImportTest, RegistersSealsAcknowledgesAndLetsGo) {
  LentBlocks blocks({1, 32, 16, 1, kRow}, kBlockLayouts[1]);
  blocks.Put({7, 3, 5}, 48, RowOf);
  {
    std::optional<Client> client = Client::Attach(Path());
    ASSERT_TRUE(client.has_value());
    const uint64_t model = client->Register();
    const shm::RegisterTensors request = Request(model, blocks, 9);
    EXPECT_STREQ(client->Call(shm::kRegisterTensors, PodBytes(request)).error.reason,
                 "TENSOR_HANDLE");
    ASSERT_TRUE(SendFd(*client, 9, blocks.fd()));
    const Reply registered = client->Call(shm::kRegisterTensors, PodBytes(request));
    ASSERT_TRUE(registered.ok()) << registered.error.message;
    EXPECT_TRUE(Eventually([&] { return DescriptorsOf(blocks.fd()) == 2; }));
    const uint64_t s = client->Open(model, "full", Tokens(49)).As<shm::SequenceReply>().sequence;
    ASSERT_TRUE(client->Call(shm::kSealBlocks, SealOf(s, 0, {7, 3, 5}, Tokens(48))).ok());
    ASSERT_TRUE(client->Settle(s).ok());
    const Reply done = client->Call(shm::kAcknowledged, PodBytes(shm::SequenceRef{s}));
    EXPECT_EQ(done.As<shm::AcknowledgedReply>().tokens, 48u);
    const SequenceDetail detail = *store_->inspection().Show(s);
    std::byte want[kRow];
    for (int32_t p = 0; p < 48; ++p) {
      const PageInfo& page = detail.pages[static_cast<size_t>(p / 16)];
      RowOf(0, 0, 0, p, want);
      EXPECT_EQ(std::memcmp(store_->devices().ArenaBase(page.arena) + page.offset + p % 16 * kRow,
                            want, kRow),
                0)
          << "position " << p;
    }
    // What the session may not do with such a sequence it hears; it costs nobody anything.
    EXPECT_STREQ(client->Call(shm::kForkSequence, PodBytes(shm::SequenceRef{s})).error.reason,
                 "SEQUENCE_IMPORTED");
    EXPECT_STREQ(client->Call(shm::kAcknowledged, PodBytes(shm::SequenceRef{99})).error.reason,
                 "SEQUENCE_UNKNOWN");
  }
  EXPECT_TRUE(Eventually([&] { return DescriptorsOf(blocks.fd()) == 1; }))
      << "the daemon keeps the memory of a session that has gone";
  EXPECT_TRUE(store_->inspection().Audit().findings.empty());
}

TEST_F(AttachImportTest, WhatBreaksTheFormatCostsTheSession) {
  LentBlocks blocks({1, 32, 16, 1, kRow}, kBlockLayouts[0]);
  const std::pair<const char*, std::function<void(Client&)>> cases[] = {
      {"a packet without a descriptor", [](Client& c) { SendFd(c, 1, -1); }},
      {"another packet", [&](Client& c) { SendFd(c, 1, blocks.fd(), 77); }},
      {"a number that waits already",
       [&](Client& c) {
         SendFd(c, 1, blocks.fd());
         SendFd(c, 1, blocks.fd());
       }},
      {"too many",
       [&](Client& c) {
         for (uint32_t i = 0; i < 65; ++i) SendFd(c, i, blocks.fd());
       }},
      {"a short RegisterTensors", [](Client& c) { c.Send(shm::kRegisterTensors, 1, Bytes(287)); }},
      {"tokens that are not there",
       [](Client& c) {
         Bytes seal = SealOf(1, 0, {1}, Tokens(16));
         seal.resize(seal.size() - 4);
         c.Send(shm::kSealBlocks, 1, seal);
       }},
      {"a long Acknowledged", [](Client& c) { c.Send(shm::kAcknowledged, 1, Bytes(16)); }},
  };
  for (const auto& [what, send] : cases) {
    std::optional<Client> client = Client::Attach(Path());
    ASSERT_TRUE(client.has_value());
    send(*client);
    EXPECT_TRUE(SawEof(client->socket())) << what;
  }
  EXPECT_TRUE(Eventually([&] { return server_->counters().hung_up == std::size(cases); }));
}

}  // namespace
}  // namespace kvstrata
