// SPDX-License-Identifier: Apache-2.0
// An attach server over a small store, for tests of what hostile clients do to it.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>

#include "server/attach/attach_server.h"
#include "tests/fakes/scratch_dir.h"
#include "tests/server/attach_client.h"

namespace kvstrata::test {

class AttachFixture : public ::testing::Test {
 protected:
  void TearDown() override {
    server_.reset();
    store_.reset();
  }
  void StartServer(AttachOptions options = {}, StoreOptions store_options = SmallStore()) {
    auto store = Store::Create(store_options);
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    store_ = std::move(store).value();
    path_ = directory_ / "k.sock.attach";
    auto listener = UnixListener::Listen(path_, SOCK_SEQPACKET, -1);
    ASSERT_TRUE(listener.ok()) << listener.status().ToString();
    // As on a kernel before 6.16, which cannot refuse descriptors.
    LetPassDescriptors((*listener)->fd(), true);
    options.backend = "ref";
    auto server = AttachServer::Start(options, std::move(listener).value(), store_.get());
    ASSERT_TRUE(server.ok()) << server.status().ToString();
    server_ = std::move(server).value();
  }
  static StoreOptions SmallStore() {
    StoreOptions small;
    small.device_bytes = small.host_bytes = uint64_t{8} << 20;
    small.arena_bytes = 256 << 10;
    return small;
  }
  Client Attach(const char* name = "test") {
    std::optional<Client> client = Client::Attach(path_, name);
    EXPECT_TRUE(client.has_value());
    if (!client) std::abort();
    return std::move(*client);
  }

  const ScratchDir directory_;
  std::string path_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<AttachServer> server_;
};

}  // namespace kvstrata::test
