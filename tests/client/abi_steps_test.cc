// SPDX-License-Identifier: Apache-2.0
// Steps of the C ABI over a fake transport: members, tensors, selections, handles after their end.
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <thread>

#include "tests/client/abi_fixture.h"

namespace kvstrata::client {
namespace {

using testing::kFakeSequence;
using testing::Log;

TEST_F(AbiTest, HandlesAfterTheirEnd) {
  kvs_session* other = nullptr;
  ASSERT_EQ(kvs_attach("/s", nullptr, &other), KVS_OK);
  kvs_step* step = Begin();
  kvs_detach(other);
  kvs_detach(other);
  kvs_detach(nullptr);
  ExpectRefused(kvs_ping(other), KVS_INVALID_ARGUMENT, "HANDLE_INVALID", "session");
  ExpectRefused(kvs_ping(nullptr), KVS_INVALID_ARGUMENT, "ARGUMENT_NULL", "session");
  // A handle of the other kind, and one that never was.
  ExpectRefused(kvs_ping(reinterpret_cast<kvs_session*>(step)), KVS_INVALID_ARGUMENT,
                "HANDLE_INVALID", "session");
  ExpectRefused(kvs_step_end(reinterpret_cast<kvs_step*>(session_), nullptr), KVS_INVALID_ARGUMENT,
                "HANDLE_INVALID", "step");
  kvs_step_abort(step);
  kvs_step_abort(step);
  kvs_step_abort(nullptr);
  ExpectRefused(AppendLayer(step, 0), KVS_INVALID_ARGUMENT, "HANDLE_INVALID", "step");
  ExpectRefused(kvs_step_end(step, nullptr), KVS_INVALID_ARGUMENT, "HANDLE_INVALID", "step");
  EXPECT_EQ(Log().committed, 0);
}

TEST_F(AbiTest, DetachEndsOpenStepsFirst) {
  kvs_session* other = nullptr;
  ASSERT_EQ(kvs_attach("/s", nullptr, &other), KVS_OK);
  kvs_step* mine = Begin();
  const int32_t id = 1;
  const kvs_step_member member{kFakeSequence, &id, 1};
  kvs_step* step = nullptr;
  ASSERT_EQ(kvs_step_begin(other, &member, 1, nullptr, &step, nullptr), KVS_OK);
  const int dropped = Log().dropped;
  kvs_detach(other);
  EXPECT_EQ(Log().dropped, dropped + 1);
  EXPECT_EQ(Log().detached, 1);
  ExpectRefused(kvs_step_end(step, nullptr), KVS_INVALID_ARGUMENT, "HANDLE_INVALID", "step");
  EXPECT_EQ(AppendLayer(mine, 0), KVS_OK);  // the other session's step lives
  kvs_step_abort(mine);
}

TEST_F(AbiTest, StepMembers) {
  kvs_step* step = nullptr;
  const int32_t id = 1;
  kvs_step_member members[] = {{kFakeSequence, &id, 1}, {kFakeSequence, &id, 0}};
  int32_t codes[2] = {-1, -1};
  ExpectRefused(kvs_step_begin(session_, nullptr, 1, nullptr, &step, codes), KVS_INVALID_ARGUMENT,
                "ARGUMENT_NULL", "members");
  ExpectRefused(kvs_step_begin(session_, members, 0, nullptr, &step, codes), KVS_INVALID_ARGUMENT,
                "ARGUMENT_RANGE", "n 0");
  ExpectRefused(kvs_step_begin(session_, members, SIZE_MAX, nullptr, &step, nullptr),
                KVS_INVALID_ARGUMENT, "ARGUMENT_RANGE", "n ");
  ExpectRefused(kvs_step_begin(session_, members, 2, nullptr, &step, codes), KVS_INVALID_ARGUMENT,
                "ARGUMENT_RANGE", "members[1].n 0");
  EXPECT_EQ(codes[0], KVS_OK);
  EXPECT_EQ(codes[1], KVS_INVALID_ARGUMENT);
  members[1] = {12345, &id, 1};
  ExpectRefused(kvs_step_begin(session_, members, 2, nullptr, &step, codes), KVS_NOT_FOUND,
                "SEQUENCE_UNKNOWN", "12345");
  EXPECT_EQ(codes[0], KVS_OK);
  EXPECT_EQ(codes[1], KVS_NOT_FOUND);
  int stream = 0;
  ExpectRefused(kvs_step_begin(session_, members, 1, &stream, &step, nullptr), KVS_UNIMPLEMENTED,
                "STREAM", "pass NULL");
  EXPECT_EQ(Log().begun, 0);
}

TEST_F(AbiTest, Tensors) {
  kvs_step* step = Begin();
  const kvs_tensor good = Tensor(2);
  struct Case {
    std::function<void(kvs_tensor*)> spoil;
    const char* reason;
    const char* names;
  };
  const Case cases[] = {
      {[](auto* t) { t->dtype = 0; }, "TENSOR_DTYPE", "v.dtype 0"},
      {[](auto* t) { t->heads = 4; }, "TENSOR_HEADS", "v.heads 4; expected 2"},
      {[](auto* t) { t->heads = -1; }, "TENSOR_HEADS", "v.heads -1"},
      {[](auto* t) { t->head_dim = 128; }, "TENSOR_HEAD_DIM", "v.head_dim 128; expected 64"},
      {[](auto* t) { t->tokens = INT32_MAX; }, "TENSOR_TOKENS", "expected 3"},
      {[](auto* t) { t->data = nullptr; }, "TENSOR_DATA", "v.data is NULL"},
      {[this](auto* t) { t->data = reinterpret_cast<char*>(buffer_) + 1; }, "TENSOR_DATA",
       "misaligned"},
      {[](auto* t) { t->token_stride = -512; }, "TENSOR_STRIDE", "v.token_stride -512"},
      {[](auto* t) { t->head_stride = 128; }, "TENSOR_STRIDE", "from 256 to 2^40"},
      {[](auto* t) { t->head_stride = 258; }, "TENSOR_STRIDE", "a multiple of 4"},
      {[](auto* t) { t->token_stride = INT64_MAX; }, "TENSOR_STRIDE", "v.token_stride"},
  };
  for (const Case& c : cases) {
    kvs_tensor bad = good;
    c.spoil(&bad);
    ExpectRefused(kvs_append(step, 0, &good, &bad), KVS_INVALID_ARGUMENT, c.reason, c.names);
  }
  ExpectRefused(kvs_append(step, 0, nullptr, &good), KVS_INVALID_ARGUMENT, "ARGUMENT_NULL", "k");
  ExpectRefused(kvs_append(step, 2, &good, &good), KVS_INVALID_ARGUMENT, "ARGUMENT_RANGE",
                "layer 2; allowed: 0..1");
  ExpectRefused(kvs_append(step, -1, &good, &good), KVS_INVALID_ARGUMENT, "ARGUMENT_RANGE",
                "layer -1");
  const kvs_tensor q = Tensor(4);
  ExpectRefused(kvs_attend(step, 0, &q, &q, nullptr), KVS_FAILED_PRECONDITION, "LAYER_NOT_APPENDED",
                "layer 0");
  ExpectRefused(kvs_select(step, 0, &q), KVS_FAILED_PRECONDITION, "LAYER_NOT_APPENDED", "layer 0");
  ASSERT_EQ(kvs_append(step, 0, &good, &good), KVS_OK);
  EXPECT_EQ(Log().k.head_stride, 256);
  EXPECT_EQ(Log().k.token_stride, 512);
  kvs_tensor half = q;
  half.dtype = KVS_BF16;
  half.head_stride = 256;
  ASSERT_EQ(kvs_attend(step, 0, &q, &half, nullptr), KVS_OK);
  EXPECT_EQ(Log().out.dtype, DType::kBF16);
  EXPECT_EQ(Log().out.token_stride, 1024);
  ExpectRefused(kvs_select(step, 0, &good), KVS_INVALID_ARGUMENT, "TENSOR_HEADS",
                "q.heads 2; expected 4");
  kvs_step_abort(step);
}

// The rows of an append that fails have taken the place of those that were there.
TEST_F(AbiTest, AnAppendThatFailsLeavesTheLayerWithoutRows) {
  kvs_step* step = Begin();
  ASSERT_EQ(AppendLayer(step, 0), KVS_OK);
  ASSERT_EQ(AppendLayer(step, 1), KVS_OK);
  Log().append_fails = true;
  ExpectRefused(AppendLayer(step, 1), KVS_INVALID_ARGUMENT, "TENSOR_NOT_FINITE", "on purpose");
  Log().append_fails = false;
  const kvs_tensor q = Tensor(4);
  ExpectRefused(kvs_select(step, 1, &q), KVS_FAILED_PRECONDITION, "LAYER_NOT_APPENDED", "layer 1");
  ExpectRefused(kvs_step_end(step, nullptr), KVS_FAILED_PRECONDITION, "LAYER_MISSING", "layer 1");
  EXPECT_EQ(Log().committed, 0);
}

TEST_F(AbiTest, AStepWithoutAllLayersCommitsNothing) {
  kvs_step* step = Begin();
  ASSERT_EQ(AppendLayer(step, 0), KVS_OK);
  ExpectRefused(kvs_step_end(step, nullptr), KVS_FAILED_PRECONDITION, "LAYER_MISSING", "layer 1");
  EXPECT_EQ(Log().committed, 0);
  EXPECT_EQ(Log().dropped, 1);
  step = Begin();
  ASSERT_EQ(AppendLayer(step, 1), KVS_OK);
  ASSERT_EQ(AppendLayer(step, 0), KVS_OK);
  EXPECT_EQ(kvs_step_end(step, nullptr), KVS_OK);
  EXPECT_EQ(Log().committed, 1);
  EXPECT_EQ(Log().dropped, 2);
}

TEST_F(AbiTest, Selections) {
  kvs_step* step = Begin();
  uint32_t groups = 0;
  ExpectRefused(kvs_selection_groups(step, 0, &groups), KVS_FAILED_PRECONDITION, "NOTHING_SELECTED",
                "kvs_select");
  const kvs_tensor q = Tensor(4), kv = Tensor(2);
  ASSERT_EQ(kvs_append(step, 0, &kv, &kv), KVS_OK);
  ASSERT_EQ(kvs_select(step, 0, &q), KVS_OK);
  ASSERT_EQ(kvs_selection_groups(step, 0, &groups), KVS_OK);
  EXPECT_EQ(groups, 2u);
  int32_t out[2] = {};
  size_t n = 0;
  ExpectRefused(kvs_selection_groups(step, 1, &groups), KVS_INVALID_ARGUMENT, "ARGUMENT_RANGE",
                "member 1; allowed: 0..0");
  ExpectRefused(kvs_selection(step, 0, 2, KVS_TOKENS, out, 2, &n), KVS_INVALID_ARGUMENT,
                "ARGUMENT_RANGE", "group 2; allowed: 0..1");
  ExpectRefused(kvs_selection(step, 0, 0, 7, out, 2, &n), KVS_INVALID_ARGUMENT, "ARGUMENT_RANGE",
                "what 7");
  ExpectRefused(kvs_selection(step, 0, 0, KVS_TOKENS, nullptr, 2, &n), KVS_INVALID_ARGUMENT,
                "ARGUMENT_NULL", "out");
  ASSERT_EQ(kvs_selection(step, 0, 1, KVS_TOKENS, out, 2, &n), KVS_OK);
  EXPECT_EQ(n, 3u);  // more than fits
  EXPECT_EQ(out[1], 1);
  ASSERT_EQ(kvs_selection(step, 0, 1, KVS_TOKENS, nullptr, 0, &n), KVS_OK);
  EXPECT_EQ(n, 3u);
  ASSERT_EQ(kvs_selection(step, 0, 1, KVS_UNITS, out, 2, &n), KVS_OK);
  kvs_cost cost{};
  ExpectRefused(kvs_attend_cost(step, 0, &cost), KVS_INVALID_ARGUMENT, "STRUCT_SIZE", "kvs_cost");
  cost.size = sizeof(cost);
  ExpectRefused(kvs_attend_cost(step, 9, &cost), KVS_INVALID_ARGUMENT, "ARGUMENT_RANGE",
                "member 9");
  ASSERT_EQ(kvs_attend_cost(step, 0, &cost), KVS_OK);
  EXPECT_EQ(cost.coarse_rows, 2u);
  EXPECT_EQ(n, 0u);
  kvs_step_abort(step);
}

TEST_F(AbiTest, PageTablesAndArrays) {
  kvs_page pages[1] = {};
  size_t n = 0;
  uint64_t version = 0;
  ASSERT_EQ(kvs_page_table(session_, kFakeSequence, pages, 1, &n, &version), KVS_OK);
  EXPECT_EQ(n, 2u);
  EXPECT_EQ(version, 3u);
  EXPECT_EQ(pages[0].flags, 1u);
  kvs_array array{};
  ASSERT_EQ(kvs_inspect(session_, kFakeSequence, "two", &array), KVS_OK);
  EXPECT_EQ(array.type, KVS_ARRAY_U8);
  EXPECT_EQ(array.dims, 1);
  EXPECT_EQ(array.shape[0], 2);
  EXPECT_EQ(static_cast<unsigned char*>(array.data)[1], 5);
  kvs_array_free(&array);
  EXPECT_EQ(array.data, nullptr);
  kvs_array_free(&array);
  kvs_array_free(nullptr);
  ASSERT_EQ(kvs_inspect(session_, kFakeSequence, "empty", &array), KVS_OK);
  EXPECT_EQ(array.bytes, 0u);
  kvs_array_free(&array);
  ExpectRefused(kvs_inspect(session_, kFakeSequence, "none", &array), KVS_NOT_FOUND,
                "INSPECT_UNKNOWN", "two, empty");
  ExpectRefused(kvs_inspect(session_, kFakeSequence, "deep", &array), KVS_INTERNAL, "INSPECT_SHAPE",
                "5 dimensions");
}

TEST_F(AbiTest, ErrorsAreTheThreadsOwn) {
  EXPECT_NE(kvs_ping(nullptr), KVS_OK);
  std::thread([] {
    EXPECT_STREQ(kvs_error_message(), "");
    EXPECT_STREQ(kvs_error_reason(), "");
  }).join();
  EXPECT_STREQ(kvs_error_reason(), "ARGUMENT_NULL");
  EXPECT_EQ(kvs_ping(session_), KVS_OK);
  EXPECT_STREQ(kvs_error_reason(), "ARGUMENT_NULL");  // the last failure's
}

TEST_F(AbiTest, AForkedChildIsRefused) {
  kvs_step* step = Begin();
  const pid_t child = fork();
  if (child == 0) {
    const bool refused = kvs_ping(session_) == KVS_FAILED_PRECONDITION &&
                         std::strcmp(kvs_error_reason(), "FORKED") == 0 &&
                         kvs_step_end(step, nullptr) == KVS_FAILED_PRECONDITION;
    kvs_step_abort(step);
    kvs_detach(session_);
    kvs_session* own = nullptr;
    const bool attaches = kvs_attach("/s", nullptr, &own) == KVS_OK && kvs_ping(own) == KVS_OK;
    _exit(refused && attaches ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(AppendLayer(step, 0), KVS_OK);
  kvs_step_abort(step);
}

}  // namespace
}  // namespace kvstrata::client
