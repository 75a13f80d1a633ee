// SPDX-License-Identifier: Apache-2.0
// What the store's tests attach with: a session that keeps its grants, and a sequence that behaves
// as the client library does (grow when the table says so, write rows, commit).
//
// Every row carries a canary: a rolling hash of the token ids up to it. So a page is right exactly
// if its bytes belong to the prefix that it stands for, whoever wrote or copied it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/codec/extent.h"
#include "kernels/plan/plan.h"
#include "proto/table_reader.h"
#include "server/store/store.h"
#include "tests/fakes/fake_gpu_memory.h"

namespace kvstrata::testing {

// One layer, one head, 64 x bf16, 16 tokens a page: 4096 bytes a page.
inline ModelDesc SmallModel() {
  ModelDesc desc;
  desc.name = "small";
  desc.digest = "digest";
  desc.geometry = {1, 2, 1, 64, 16, DType::kBF16};
  return desc;
}

inline StoreOptions SmallPools(uint64_t device_pages, uint64_t host_pages) {
  StoreOptions options;
  options.device_bytes = device_pages * 4096;
  options.host_bytes = host_pages * 4096;
  options.arena_bytes = 32 * 4096;
  options.headroom_tokens = 16;
  return options;
}

inline std::unique_ptr<Store> NewStore(const StoreOptions& options) {
  Result<std::unique_ptr<Store>> store = Store::Create(options);
  EXPECT_TRUE(store.ok()) << store.status().ToString();
  return std::move(store).value();
}

inline std::vector<int32_t> Tokens(int32_t n, int32_t first = 0) {
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  for (int32_t i = 0; i < n; ++i) tokens[static_cast<size_t>(i)] = first + i;
  return tokens;
}

inline void ExpectClean(const Store& store) {
  for (const std::string& finding : store.inspection().Audit().findings) ADD_FAILURE() << finding;
}

inline uint64_t UsedBytes(const Store& store) {
  uint64_t used = 0;
  for (const PoolInfo& pool : store.inspection().Pools())
    used += pool.used_bytes + pool.retired_bytes;
  return used;
}

class TestSession {
 public:
  explicit TestSession(Store* store, const std::string& tenant = "uid:1",
                       Transport transport = Transport::kLinked, uint32_t device = 0)
      : store_(store) {
    PeerIdentity peer;
    peer.tenant = tenant;
    Result<SessionSegments> segments = store->sessions().OpenSession(
        peer, transport, "test", [this](const ArenaGrant& g) { grants_[g.arena] = g.writable; },
        device);
    EXPECT_TRUE(segments.ok()) << segments.status().ToString();
    segments_ = *segments;
    reader_ = shm::TableReader(segments_.header, segments_.tables, segments_.table_bytes);
    Result<uint64_t> model = store->models().RegisterModel(id(), SmallModel());
    EXPECT_TRUE(model.ok()) << model.status().ToString();
    model_ = *model;
  }

  uint64_t id() const { return segments_.session; }
  uint64_t model() const { return model_; }
  Store* store() const { return store_; }
  shm::TableReader& reader() { return reader_; }
  const SessionSegments& segments() const { return segments_; }
  const std::map<uint32_t, bool>& grants() const { return grants_; }

  Result<OpenedSequence> Open(std::string_view plan, std::span<const int32_t> tokens) {
    return store_->openings().OpenSequence(id(), model_, plan, tokens);
  }

 private:
  Store* store_;
  SessionSegments segments_;
  shm::TableReader reader_;
  std::map<uint32_t, bool> grants_;
  uint64_t model_ = 0;
};

class TestSequence {
 public:
  TestSequence(TestSession* session, const OpenedSequence& opened,
               std::span<const int32_t> held_tokens)
      : session_(session),
        opened_(opened),
        index_(IndexOf(opened.plan, opened.geometry)),
        indexed_(opened.indexed_tokens) {
    for (const int32_t token : held_tokens.first(opened.held_tokens)) Push(token);
  }

  // Opens and computes the rest of the prompt.
  static TestSequence Prompt(TestSession* session, std::string_view plan,
                             std::span<const int32_t> tokens) {
    Result<OpenedSequence> opened = session->Open(plan, tokens);
    EXPECT_TRUE(opened.ok()) << opened.status().ToString();
    TestSequence s(session, *opened, tokens);
    const Status status = s.Append(tokens.subspan(opened->held_tokens));
    EXPECT_TRUE(status.ok()) << status.ToString();
    return s;
  }

  uint64_t id() const { return opened_.sequence; }
  const OpenedSequence& opened() const { return opened_; }
  uint32_t size() const { return static_cast<uint32_t>(hashes_.size()); }
  shm::TableView Table() const { return session_->reader().Read(opened_.slot, id()); }
  std::byte* At(const shm::PageEntry* e) const {
    std::byte* base = session_->store()->devices().ArenaBase(e->arena);
    EXPECT_NE(base, nullptr);
    const bool gpu =
        session_->store()->devices().handle_type(static_cast<Tier>(e->tier)) != HandleType::kMemfd;
    return base + e->offset + (gpu ? kGpuShift : 0);
  }

  // One step: begin (grow if needed, catch the index up), write the rows, commit.
  Status Append(std::span<const int32_t> tokens) {
    if (tokens.empty()) return OkStatus();
    const uint32_t first = size(), end = first + static_cast<uint32_t>(tokens.size());
    if (NeedsGrow(end)) {
      KVS_RETURN_IF_ERROR(
          session_->store()->steps().Grow(session_->id(), id(), end, first, indexed_));
    }
    const int slot = session_->reader().Enter();
    const shm::TableView table = Table();
    EXPECT_GE(table.pages * 16, end);
    CatchUp(table);
    for (const int32_t token : tokens) {
      Push(token);
      const uint32_t at = size() - 1;
      EXPECT_TRUE(session_->grants().at(table.page(at / 16)->arena))
          << "page not granted for writing";
      for (const bool value : {false, true}) {
        std::memcpy(At(table.page(at / 16)) + RowOffset(at, value), &hashes_[at], 8);
      }
    }
    session_->reader().Leave(slot);
    return session_->store()->steps().Commit(session_->id(), id(), first, tokens, indexed_);
  }
  // Takes back the tokens from `tokens` on.
  Status Truncate(uint32_t tokens) {
    const std::span<const int32_t> tail =
        std::span(ids_).first(std::min<size_t>(tokens, ids_.size())).subspan(tokens / 16 * 16);
    KVS_RETURN_IF_ERROR(
        session_->store()->sequences().Truncate(session_->id(), id(), tokens, tail));
    hashes_.resize(tokens);
    ids_.resize(tokens);
    if (index_.level_count > 0) indexed_ = std::min(indexed_, tokens / Unit() * Unit());
    return OkStatus();
  }
  Status Append(int32_t token) { return Append(std::span(&token, 1)); }

  Result<TestSequence> Fork() const {
    Result<OpenedSequence> opened =
        session_->store()->sequences().ForkSequence(session_->id(), id());
    if (!opened.ok()) return opened.status();
    TestSequence copy = *this;
    copy.opened_ = *opened;
    return copy;
  }
  Status Close() { return session_->store()->sequences().CloseSequence(session_->id(), id()); }

  // Every row that extents of the fake codec (tests/fakes/copying_codec.h) hold is right, and rows
  // without a page are held by one.
  void ExpectExtents(const shm::TableView& table) const {
    ASSERT_TRUE(shm::ExtentsSound(table));
    std::vector<bool> held(size());
    for (uint32_t i = 0; i < table.extents(); ++i) {
      const shm::ExtentEntry& e = *table.extent(i);
      const shm::PageEntry at{e.arena, 0, e.tier, e.offset};
      ASSERT_TRUE(session_->grants().contains(e.arena)) << "extent not granted";
      ASSERT_LE(static_cast<uint32_t>(e.end), size());
      for (int32_t t = e.begin; t < e.end; ++t) {
        uint64_t seen = 0;
        std::memcpy(&seen, At(&at) + sizeof(ExtentHeader) + (t - e.begin) * 128, 8);
        ASSERT_EQ(seen, hashes_[static_cast<size_t>(t)])
            << "sequence " << id() << ", extent " << i << ", token " << t;
        held[static_cast<size_t>(t)] = true;
      }
    }
    for (uint32_t i = 0; i < size(); ++i) {
      if ((table.page(i / 16)->flags & shm::kPageAbsent) == 0) continue;
      ASSERT_TRUE(held[i]) << "sequence " << id() << ", token " << i << " is nowhere";
    }
  }
  // Every row and every index row is what this sequence's tokens say.
  void ExpectIntact() const { ExpectIntact(Table()); }
  void ExpectIntact(const shm::TableView& table) const {
    ASSERT_NE(table.table, nullptr);
    ASSERT_GE(table.pages * 16, size());
    for (uint32_t i = 0; i < size(); ++i) {
      if ((table.page(i / 16)->flags & shm::kPageAbsent) != 0) continue;
      for (const bool value : {false, true}) {
        uint64_t seen = 0;
        std::memcpy(&seen, At(table.page(i / 16)) + RowOffset(i, value), 8);
        ASSERT_EQ(seen, hashes_[i]) << "sequence " << id() << ", token " << i;
      }
    }
    ExpectExtents(table);
    for (uint32_t unit = 0; index_.level_count > 0 && (unit + 1) * Unit() <= indexed_; ++unit) {
      uint64_t seen = 0;
      std::memcpy(&seen, IndexRow(table, unit), 8);
      ASSERT_EQ(seen, hashes_[(unit + 1) * Unit() - 1]) << "sequence " << id() << ", unit " << unit;
    }
  }

 private:
  void Push(int32_t token) {
    uint64_t h = hashes_.empty() ? 1469598103934665603u : hashes_.back();
    h = (h ^ static_cast<uint32_t>(token)) * 1099511628211u;
    hashes_.push_back(h ^ (h >> 29));
    ids_.push_back(token);
  }
  // Where a token's key or value lies in its page.
  static uint32_t RowOffset(uint32_t token, bool value) {
    return (value ? 2048 : 0) + token % 16 * 128;
  }
  uint32_t Unit() const { return static_cast<uint32_t>(index_.levels[0].unit_tokens); }
  std::byte* IndexRow(const shm::TableView& table, uint32_t unit) const {
    const auto per_block = static_cast<uint32_t>(index_.levels[0].units_per_block);
    return At(table.index_block(unit / per_block)) +
           index_.RowOffset(0, 0, 0, 0, static_cast<int>(unit % per_block));
  }
  bool NeedsGrow(uint32_t end) const {
    const shm::TableView t = Table();
    if (t.pages * 16 < end) return true;
    for (uint32_t i = size() / 16; i < t.pages; ++i) {
      if ((t.page(i)->flags & shm::kPageShared) != 0) return true;
    }
    if (index_.level_count == 0) return false;
    if (t.index_blocks < static_cast<uint32_t>(index_.BlocksFor(static_cast<int32_t>(end)))) {
      return true;
    }
    const uint32_t from = indexed_ / static_cast<uint32_t>(index_.block_tokens);
    for (uint32_t i = from; i < t.index_blocks; ++i) {
      if ((t.index_block(i)->flags & shm::kPageShared) != 0) return true;
    }
    return false;
  }
  void CatchUp(const shm::TableView& table) {
    if (index_.level_count == 0) return;
    for (; indexed_ + Unit() <= size(); indexed_ += Unit()) {
      std::memcpy(IndexRow(table, indexed_ / Unit()), &hashes_[indexed_ + Unit() - 1], 8);
    }
  }

  TestSession* session_;
  OpenedSequence opened_;
  IndexLayout index_;
  uint32_t indexed_ = 0;
  std::vector<uint64_t> hashes_;
  std::vector<int32_t> ids_;
};

}  // namespace kvstrata::testing
