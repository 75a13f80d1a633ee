// SPDX-License-Identifier: Apache-2.0
// A session of the C ABI over a fake transport (fake_session.h), and a step of it.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "client/include/kvstrata/kvstrata.h"
#include "tests/client/fake_session.h"
#include "tests/fakes/model_desc.h"

namespace kvstrata::client {

// A refusal: its code and reason, and that its message names what it should.
inline void ExpectRefused(int code, int want, const char* reason, const char* names) {
  EXPECT_EQ(code, want) << kvs_error_message();
  EXPECT_STREQ(kvs_error_reason(), reason);
  EXPECT_THAT(kvs_error_message(), ::testing::HasSubstr(names));
}

class AbiTest : public ::testing::Test {
 protected:
  AbiTest() {
    testing::Log() = {};
    EXPECT_EQ(kvs_attach("/nowhere", nullptr, &session_), KVS_OK);
  }
  ~AbiTest() override { kvs_detach(session_); }

  kvs_model_desc Desc() const {
    return kvstrata::testing::DescOf({2, 4, 2, 64, 16, KVS_F32}, "m", "d");
  }

  kvs_step* Begin(uint32_t tokens = 3) {
    ids_.assign(tokens, 1);
    const kvs_step_member member{testing::kFakeSequence, ids_.data(), tokens};
    kvs_step* step = nullptr;
    EXPECT_EQ(kvs_step_begin(session_, &member, 1, nullptr, &step, nullptr), KVS_OK);
    return step;
  }

  kvs_tensor Tensor(int heads, int tokens = 3) {
    return {buffer_, KVS_F32, heads, 64, tokens, 0, 0};
  }

  int AppendLayer(kvs_step* step, int layer) {
    const kvs_tensor kv = Tensor(2);
    return kvs_append(step, layer, &kv, &kv);
  }

  kvs_session* session_ = nullptr;
  std::vector<int32_t> ids_;
  alignas(64) float buffer_[3 * 4 * 64] = {};
};

}  // namespace kvstrata::client
