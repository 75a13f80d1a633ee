// SPDX-License-Identifier: Apache-2.0
// What the C ABI does by itself, over a fake transport: arguments, error texts, sequences.
#include <unistd.h>

#include <cmath>
#include <cstddef>
#include <functional>
#include <string>

#include "client/include/kvstrata/block_attention.h"
#include "client/include/kvstrata/block_planes.h"
#include "tests/client/abi_fixture.h"

namespace kvstrata::client {
namespace {

using testing::kFakeModel;
using testing::kFakeSequence;
using testing::Log;

TEST_F(AbiTest, LibraryNamesItself) {
  EXPECT_EQ(kvs_abi_version(), KVS_ABI_VERSION);
  EXPECT_STREQ(kvs_version(), KVS_VERSION);
  EXPECT_STREQ(kvs_transport(), "fake");
  EXPECT_STREQ(kvs_code_name(KVS_DATA_LOSS), "DATA_LOSS");
  EXPECT_STREQ(kvs_code_name(99), "UNKNOWN");
}

TEST_F(AbiTest, AttachOptions) {
  kvs_session* other = nullptr;
  ExpectRefused(kvs_attach("/s", nullptr, nullptr), KVS_INVALID_ARGUMENT, "ARGUMENT_NULL", "out");
  kvs_attach_options o{};
  ExpectRefused(kvs_attach("/s", &o, &other), KVS_INVALID_ARGUMENT, "STRUCT_SIZE",
                "kvs_attach_options.size 0");
  o.size = sizeof(o);
  o.threads = 5000;
  ExpectRefused(kvs_attach("/s", &o, &other), KVS_INVALID_ARGUMENT, "ARGUMENT_RANGE",
                "threads 5000; allowed: 0..1024");
  o.threads = 2;
  const std::string long_name(64, 'x');
  o.client_name = long_name.c_str();
  ExpectRefused(kvs_attach("/s", &o, &other), KVS_INVALID_ARGUMENT, "TEXT_INVALID", "client_name");
  o.client_name = "engine";
  o.backend = "ref";
  o.timeout_ms = 70;
  ASSERT_EQ(kvs_attach("/s", &o, &other), KVS_OK);
  EXPECT_EQ(Log().options.client_name, "engine");
  EXPECT_EQ(Log().options.backend, "ref");
  EXPECT_EQ(Log().options.threads, 2u);
  EXPECT_EQ(Log().options.timeout.count(), 70);
  kvs_detach(other);
}

TEST_F(AbiTest, NewerCallersStructs) {
  struct Newer {
    kvs_attach_options known;
    uint64_t unknown;
  } o{};
  o.known.size = sizeof(o);
  kvs_session* other = nullptr;
  ASSERT_EQ(kvs_attach("/s", &o.known, &other), KVS_OK);
  kvs_detach(other);
  o.unknown = 1;
  ExpectRefused(kvs_attach("/s", &o.known, &other), KVS_INVALID_ARGUMENT, "STRUCT_SIZE",
                "does not know");
}

TEST_F(AbiTest, AttentionOverBlocks) {
  kvs_block_shape shape{};
  shape.size = sizeof(shape);
  shape.layers = 2;
  shape.query_heads = 8;
  shape.kv_heads = 2;
  shape.head_dim = 128;
  shape.dtype = KVS_BF16;
  shape.block_tokens = 64;
  int64_t bytes = -1;
  ASSERT_EQ(kvs_block_attention_index_bytes("full", &shape, &bytes), KVS_OK);
  EXPECT_EQ(bytes, 0);
  ASSERT_EQ(kvs_block_attention_index_bytes("quest", &shape, &bytes), KVS_OK);
  EXPECT_EQ(bytes, 2 * 4 * 2 * 128 * 2);  // heads, units, minimum and maximum
  ASSERT_EQ(kvs_block_attention_index_bytes("bits", &shape, &bytes), KVS_OK);
  EXPECT_EQ(bytes, 2 * (4 * 128 + 64 * 128 / 4));
  ExpectRefused(kvs_block_attention_index_bytes("chess", &shape, &bytes), KVS_UNIMPLEMENTED,
                "BLOCK_PLAN", "plan \"chess\"");
  ExpectRefused(kvs_block_attention_index_bytes(nullptr, &shape, &bytes), KVS_INVALID_ARGUMENT,
                "ARGUMENT_NULL", "plan");
  shape.dtype = KVS_F32;
  ExpectRefused(kvs_block_attention_index_bytes("quest", &shape, &bytes), KVS_INVALID_ARGUMENT,
                "BLOCK_SHAPE", "dtype = 1");
  auto* const none = reinterpret_cast<kvs_block_attention*>(uintptr_t{16} << 20);
  ExpectRefused(kvs_block_attention_bind(none, nullptr, 0, nullptr), KVS_INVALID_ARGUMENT,
                "HANDLE_INVALID", "attention is not a live handle");
  ExpectRefused(kvs_block_attention_begin(nullptr, nullptr, nullptr), KVS_INVALID_ARGUMENT,
                "ARGUMENT_NULL", "attention");
  kvs_block_attention_close(nullptr);
}

TEST_F(AbiTest, BlocksOfPlanesOfAnEngine) {
  kvs_planes_shape shape{};
  shape.size = sizeof(shape);
  shape.layers = 32;
  shape.query_heads = 32;
  shape.kv_heads = 8;
  shape.head_dim = 128;
  shape.dtype = KVS_BF16;
  shape.block_tokens = 64;
  kvs_planes_form form{};
  form.size = sizeof(form);
  ASSERT_EQ(kvs_block_planes_form("strata", &shape, &form), KVS_OK) << kvs_error_message();
  EXPECT_EQ(form.token_bytes, 268);
  EXPECT_EQ(form.slot_bytes, 8u << 20);
  EXPECT_EQ(form.workspace_bytes, 0u);  // not asked for
  EXPECT_EQ(form.lower_token_bytes, 0);
  ASSERT_EQ(kvs_block_planes_form("strata{lower = 'host'}", &shape, &form), KVS_OK);
  EXPECT_EQ(form.token_bytes, 102);
  EXPECT_EQ(form.lower_token_bytes, 192);
  kvs_planes_form older{offsetof(kvs_planes_form, lower_token_bytes), 0, 0, 0, -1};
  ASSERT_EQ(kvs_block_planes_form("strata", &shape, &older), KVS_OK) << kvs_error_message();
  EXPECT_EQ(older.token_bytes, 268);
  EXPECT_EQ(older.lower_token_bytes, -1);  // it has none
  older.size -= 8;
  ExpectRefused(kvs_block_planes_form("strata", &shape, &older), KVS_INVALID_ARGUMENT,
                "STRUCT_SIZE", "kvs_planes_form.size 24");
  ExpectRefused(kvs_block_planes_form("quest", &shape, &form), KVS_UNIMPLEMENTED, "BLOCK_PLAN",
                "plan \"quest\"");
  ExpectRefused(kvs_block_planes_form("strata{unit = 32}", &shape, &form), KVS_UNIMPLEMENTED,
                "BLOCK_PLAN", "unit = 32");
  ExpectRefused(kvs_block_planes_form(nullptr, &shape, &form), KVS_INVALID_ARGUMENT,
                "ARGUMENT_NULL", "plan");
  shape.block_tokens = 16;
  ExpectRefused(kvs_block_planes_form("strata", &shape, &form), KVS_INVALID_ARGUMENT, "BLOCK_SHAPE",
                "block_tokens = 16");
  shape.dtype = KVS_F32;
  ExpectRefused(kvs_block_planes_form("strata", &shape, &form), KVS_INVALID_ARGUMENT, "BLOCK_SHAPE",
                "dtype = 1");
  auto* const none = reinterpret_cast<kvs_block_planes*>(uintptr_t{16} << 20);
  ExpectRefused(kvs_block_planes_bind(none, nullptr, 0, nullptr), KVS_INVALID_ARGUMENT,
                "HANDLE_INVALID", "planes is not a live handle");
  ExpectRefused(kvs_block_planes_bind_lower(none, nullptr, 0), KVS_INVALID_ARGUMENT,
                "HANDLE_INVALID", "planes is not a live handle");
  ExpectRefused(kvs_block_planes_begin(nullptr, nullptr, nullptr), KVS_INVALID_ARGUMENT,
                "ARGUMENT_NULL", "planes");
  kvs_block_planes_close(nullptr);
}

TEST_F(AbiTest, DefaultSocketFollowsTheEnvironment) {
  setenv("KVSTRATA_SOCKET", "/from/env", 1);
  kvs_session* other = nullptr;
  ASSERT_EQ(kvs_attach(nullptr, nullptr, &other), KVS_OK);
  EXPECT_EQ(Log().options.socket, "/from/env");
  kvs_detach(other);
  unsetenv("KVSTRATA_SOCKET");
  setenv("XDG_RUNTIME_DIR", "/run/user/9", 1);
  EXPECT_EQ(DefaultSocket(), "/run/user/9/kvstrata/kvstratad.sock");
  unsetenv("XDG_RUNTIME_DIR");
  EXPECT_EQ(DefaultSocket(),
            geteuid() == 0 ? "/run/kvstrata/kvstratad.sock"
                           : "/tmp/kvstrata-" + std::to_string(geteuid()) + "/kvstratad.sock");
}

TEST_F(AbiTest, OpensWithOptions) {
  const int32_t tokens[] = {1, 2, 3};
  kvs_opened opened{};
  opened.size = sizeof(opened);
  ASSERT_EQ(kvs_sequence_open_with(session_, kFakeModel, "full", tokens, 3, nullptr, &opened),
            KVS_OK);
  EXPECT_EQ(opened.sequence, kFakeSequence);
  EXPECT_EQ(opened.held, 16u);
  EXPECT_EQ(opened.indexed, 8u);
  EXPECT_EQ(opened.surprisal_tokens, 12u);
  EXPECT_EQ(opened.boundary_tokens, 4u);
  EXPECT_EQ(Log().open.max_held, 0u);
  EXPECT_FALSE(Log().open.only_reported);

  kvs_open_options options{sizeof(options), 48, 1, 500, 0, nullptr};
  const auto open = [&] {
    return kvs_sequence_open_with(session_, kFakeModel, "full", tokens, 3, &options, &opened);
  };
  ASSERT_EQ(open(), KVS_OK);
  EXPECT_EQ(Log().open.max_held, 48u);
  EXPECT_TRUE(Log().open.only_reported);
  EXPECT_EQ(Log().open.reserve_tokens, 500u);
  options.size = offsetof(kvs_open_options, reserve_tokens);  // as in an older header
  ASSERT_EQ(open(), KVS_OK);
  EXPECT_EQ(Log().open.max_held, 48u);
  EXPECT_EQ(Log().open.reserve_tokens, 0u);
  EXPECT_FALSE(Log().open.private_pages);
  options.size = sizeof(options);
  options.private_pages = 1;
  ASSERT_EQ(open(), KVS_OK);
  EXPECT_TRUE(Log().open.private_pages);
  options.private_pages = 2;
  ExpectRefused(open(), KVS_INVALID_ARGUMENT, "ARGUMENT_RANGE", "private_pages 2; allowed: 0..1");
  options.only_reported = 2;
  ExpectRefused(open(), KVS_INVALID_ARGUMENT, "ARGUMENT_RANGE", "only_reported 2; allowed: 0..1");
  options = {8, 0, 0, 0, 0};
  ExpectRefused(open(), KVS_INVALID_ARGUMENT, "STRUCT_SIZE", "kvs_open_options.size 8");
  options = {sizeof(options), 0, 0, 0, 0};
  opened.size = 8;
  ExpectRefused(open(), KVS_INVALID_ARGUMENT, "STRUCT_SIZE", "kvs_opened.size 8");
  ExpectRefused(kvs_sequence_open_with(session_, 1, nullptr, tokens, 3, &options, &opened),
                KVS_INVALID_ARGUMENT, "STRUCT_SIZE", "kvs_opened");
  ExpectRefused(kvs_sequence_open_with(session_, 1, "full", tokens, 3, &options, nullptr),
                KVS_INVALID_ARGUMENT, "ARGUMENT_NULL", "out is NULL");
}

TEST_F(AbiTest, WorkIsAskedForAndEnded) {
  const kvs_sequence sequence = kFakeSequence;
  kvs_build_result built{};
  built.size = sizeof(built);
  ASSERT_EQ(kvs_sequence_build(session_, sequence, "quest", &built), KVS_OK);
  EXPECT_EQ(Log().plan, "quest");
  EXPECT_EQ(built.indexed_tokens, 40u);
  EXPECT_EQ(built.built_blocks, 3u);
  EXPECT_EQ(built.extents, 2u);
  ASSERT_EQ(kvs_sequence_build(session_, sequence, nullptr, nullptr), KVS_OK);
  EXPECT_EQ(Log().plan, "") << "its own";
  built.size = 8;
  ExpectRefused(kvs_sequence_build(session_, sequence, nullptr, &built), KVS_INVALID_ARGUMENT,
                "STRUCT_SIZE", "kvs_build_result.size 8");
  EXPECT_EQ(kvs_sequence_recompress(session_, sequence), KVS_OK);
  EXPECT_EQ(kvs_work_cancel(session_, sequence), KVS_OK);
}

TEST_F(AbiTest, LateTokensAndPadding) {
  const int32_t ids[] = {7, 8, 9};
  const kvs_step_member members[] = {
      {kFakeSequence, ids, 3}, {kFakeSequence, nullptr, 2}, {kFakeSequence, ids, 1}};
  kvs_step_options options{sizeof(options), nullptr, 1, 0};
  kvs_step* step = nullptr;
  ASSERT_EQ(kvs_step_begin_with(session_, members, 3, &options, &step, nullptr), KVS_OK);
  kvs_step_abort(step);
  ASSERT_EQ(Log().members.size(), 3u);
  EXPECT_EQ(Log().members[0].late, 0u);
  EXPECT_FALSE(Log().members[0].padding);
  EXPECT_EQ(Log().members[1].late, 2u);
  EXPECT_FALSE(Log().members[1].padding);
  EXPECT_TRUE(Log().members[2].padding);
  EXPECT_EQ(Log().members[2].n(), 1u);
  ASSERT_EQ(kvs_step_begin_with(session_, members, 3, nullptr, &step, nullptr), KVS_OK);
  kvs_step_abort(step);
  EXPECT_FALSE(Log().members[2].padding);
  options.padding = 4;
  ExpectRefused(kvs_step_begin_with(session_, members, 3, &options, &step, nullptr),
                KVS_INVALID_ARGUMENT, "ARGUMENT_RANGE", "padding 4; allowed: 0..3");
  options = {sizeof(options), nullptr, 0, 1};
  ExpectRefused(kvs_step_begin_with(session_, members, 3, &options, &step, nullptr),
                KVS_INVALID_ARGUMENT, "ARGUMENT_RANGE", "reserved 1");

  EXPECT_EQ(kvs_late_tokens(session_, members, 1, 1), KVS_OK);
  ASSERT_EQ(Log().late.size(), 1u);
  EXPECT_EQ(Log().late[0].n, 3u);
  EXPECT_TRUE(Log().late_on_gpu);
  ExpectRefused(kvs_late_tokens(session_, members, 2, 0), KVS_INVALID_ARGUMENT, "ARGUMENT_NULL",
                "members[1].tokens");
  ExpectRefused(kvs_late_tokens(session_, members, 1, 2), KVS_INVALID_ARGUMENT, "ARGUMENT_RANGE",
                "on_gpu 2");
}

TEST_F(AbiTest, KeysOfSequences) {
  kvs_open_options options{sizeof(options), 0, 0, 0, 0, "request 17"};
  kvs_opened opened{};
  opened.size = sizeof(opened);
  const auto open = [&] {
    return kvs_sequence_open_with(session_, kFakeModel, "full", nullptr, 0, &options, &opened);
  };
  ASSERT_EQ(open(), KVS_OK);
  EXPECT_EQ(Log().opened_key, "request 17");
  options.size = offsetof(kvs_open_options, key);  // as in an older header
  ASSERT_EQ(open(), KVS_OK);
  EXPECT_EQ(Log().opened_key, "");
  const std::string longer(64, 'k');
  options = {sizeof(options), 0, 0, 0, 0, longer.c_str()};
  ExpectRefused(open(), KVS_INVALID_ARGUMENT, "ARGUMENT_RANGE", "bytes of key 64");
  EXPECT_EQ(kvs_close_key(session_, "request 17"), KVS_OK);
  EXPECT_EQ(Log().closed_key, "request 17");
  ExpectRefused(kvs_close_key(session_, nullptr), KVS_INVALID_ARGUMENT, "ARGUMENT_NULL", "key");
  EXPECT_EQ(kvs_truncate_key(session_, "request 18", 17), KVS_OK);
  EXPECT_EQ(Log().truncated_key, "request 18");
  EXPECT_EQ(Log().truncated_to, 17u);
  ExpectRefused(kvs_truncate_key(session_, longer.c_str(), 0), KVS_INVALID_ARGUMENT,
                "ARGUMENT_RANGE", "bytes of key 64");
}

TEST_F(AbiTest, LooksUp) {
  const int32_t tokens[] = {1, 2, 3};
  kvs_lookup_result found{};
  found.size = sizeof(found);
  ASSERT_EQ(kvs_lookup(session_, kFakeModel, nullptr, tokens, 3, &found), KVS_OK);
  EXPECT_EQ(Log().plan, "");
  EXPECT_EQ(Log().prompt, (std::vector<int32_t>{1, 2, 3}));
  EXPECT_EQ(found.held, 48u);
  EXPECT_EQ(found.indexed, 32u);
  EXPECT_EQ(found.device_tokens, 16u);
  EXPECT_EQ(found.host_tokens, 24u);
  EXPECT_EQ(found.disk_tokens, 8u);

  kvs_lookup_options options{sizeof(options), "quest", "GPU-1", 250, 0};
  const auto look = [&] { return kvs_lookup(session_, kFakeModel, &options, tokens, 3, &found); };
  ASSERT_EQ(look(), KVS_OK);
  EXPECT_EQ(Log().plan, "quest");
  EXPECT_EQ(Log().lookup_device, "GPU-1");
  EXPECT_EQ(Log().lease_ms, 250u);
  options.size = offsetof(kvs_lookup_options, lease_ms);  // as in an older header
  ASSERT_EQ(look(), KVS_OK);
  EXPECT_EQ(Log().lease_ms, 0u);
  options.size = sizeof(options);
  const std::string long_name(64, 'x');
  options.device_uuid = long_name.c_str();
  ExpectRefused(look(), KVS_INVALID_ARGUMENT, "ARGUMENT_RANGE", "bytes of device_uuid 64");
  options = {8, nullptr, nullptr, 0, 0};
  ExpectRefused(look(), KVS_INVALID_ARGUMENT, "STRUCT_SIZE", "kvs_lookup_options.size 8");
  options = {sizeof(options), nullptr, nullptr, 0, 0};
  found.size = 8;
  ExpectRefused(look(), KVS_INVALID_ARGUMENT, "STRUCT_SIZE", "kvs_lookup_result.size 8");
  ExpectRefused(kvs_lookup(session_, kFakeModel, nullptr, nullptr, 3, &found), KVS_INVALID_ARGUMENT,
                "STRUCT_SIZE", "kvs_lookup_result");
  ExpectRefused(kvs_lookup(session_, kFakeModel, nullptr, tokens, 3, nullptr), KVS_INVALID_ARGUMENT,
                "ARGUMENT_NULL", "out is NULL");
}

TEST_F(AbiTest, SaysWhatThereIsRoomFor) {
  kvs_capacity_result room{};
  room.size = sizeof(room);
  ASSERT_EQ(kvs_capacity(session_, kFakeModel, "quest", &room), KVS_OK);
  EXPECT_EQ(Log().plan, "quest");
  EXPECT_EQ(room.device.free.tokens, 16u);
  EXPECT_EQ(room.device.after_eviction.bytes, 2u);
  EXPECT_EQ(room.device.limit.tokens, 48u);
  EXPECT_EQ(room.host.free.bytes, 4u);
  EXPECT_EQ(room.host.after_eviction.tokens, 80u);
  EXPECT_EQ(room.host.limit.bytes, 6u);
  EXPECT_EQ(room.open_tokens, 112u);
  const auto refused = [&](const char* plan, kvs_capacity_result* out) {
    return kvs_capacity(session_, kFakeModel, plan, out);
  };
  ExpectRefused(refused(nullptr, &room), KVS_INVALID_ARGUMENT, "ARGUMENT_NULL", "plan is NULL");
  ExpectRefused(refused("full", nullptr), KVS_INVALID_ARGUMENT, "ARGUMENT_NULL", "out is NULL");
  room.size = 8;
  ExpectRefused(refused("full", &room), KVS_INVALID_ARGUMENT, "STRUCT_SIZE",
                "kvs_capacity_result.size 8");
}

TEST_F(AbiTest, PlansSayWhatTheyNeed) {
  uint32_t needs = 0;
  char text[512];
  ASSERT_EQ(kvs_plan_needs(session_, "named", &needs, text, sizeof(text)), KVS_OK);
  EXPECT_EQ(needs, uint32_t{KVS_NEEDS_TOKEN_IDS | KVS_NEEDS_PREFILL_DONE | KVS_NEEDS_ENTROPY});
  EXPECT_NE(std::string(text).find("\nentropy: "), std::string::npos) << text;
  ASSERT_EQ(kvs_plan_needs(session_, "full", &needs, nullptr, 0), KVS_OK);
  EXPECT_EQ(needs, uint32_t{KVS_NEEDS_TOKEN_IDS});
  ASSERT_EQ(kvs_plan_needs(session_, "sekv", &needs, text, 6), KVS_OK);
  EXPECT_STREQ(text, "token");
  ExpectRefused(kvs_plan_needs(session_, "qest", &needs, text, sizeof(text)), KVS_INVALID_ARGUMENT,
                "PLAN_UNKNOWN", "qest");
  ExpectRefused(kvs_plan_needs(session_, nullptr, &needs, text, sizeof(text)), KVS_INVALID_ARGUMENT,
                "ARGUMENT_NULL", "plan is NULL");
  ExpectRefused(kvs_plan_needs(session_, "full", nullptr, text, sizeof(text)), KVS_INVALID_ARGUMENT,
                "ARGUMENT_NULL", "needs is NULL");
  ExpectRefused(kvs_plan_needs(session_, "full", &needs, text, 0), KVS_INVALID_ARGUMENT,
                "ARGUMENT_RANGE", "capacity 0");
}

TEST_F(AbiTest, ModelDescriptions) {
  struct Case {
    std::function<void(kvs_model_desc*)> spoil;
    int code;
    const char* reason;
    const char* names;
  };
  const std::string long_digest(80, 'x');
  const Case cases[] = {
      {[](auto* d) { d->size = 8; }, KVS_INVALID_ARGUMENT, "STRUCT_SIZE", "kvs_model_desc.size 8"},
      {[](auto* d) { d->name = nullptr; }, KVS_INVALID_ARGUMENT, "ARGUMENT_NULL", "name"},
      {[](auto* d) { d->name = ""; }, KVS_INVALID_ARGUMENT, "TEXT_INVALID", "name has 0"},
      {[](auto* d) { d->name = "a\nb"; }, KVS_INVALID_ARGUMENT, "TEXT_INVALID", "control"},
      {[&](auto* d) { d->digest = long_digest.c_str(); }, KVS_INVALID_ARGUMENT, "TEXT_INVALID",
       "digest has more than 79"},
      {[](auto* d) { d->scale = -1; }, KVS_INVALID_ARGUMENT, "GEOMETRY_INVALID", "scale is -1"},
      {[](auto* d) { d->scale = NAN; }, KVS_INVALID_ARGUMENT, "GEOMETRY_INVALID", "scale is nan"},
      {[](auto* d) { d->dtype = 9; }, KVS_INVALID_ARGUMENT, "MODEL_DTYPE", "dtype 9"},
      {[](auto* d) { d->keys_pre_rope = 1; }, KVS_INVALID_ARGUMENT, "MODEL_ROPE",
       "rope_theta 0; allowed: 1 to 1e12"},
      {[](auto* d) { d->keys_pre_rope = 1, d->rope_theta = 1 / 0.0; }, KVS_INVALID_ARGUMENT,
       "MODEL_ROPE", "rope_theta inf"},
      {[](auto* d) { d->keys_pre_rope = 1, d->rope_theta = 1e4, d->rope_dim = 66; },
       KVS_INVALID_ARGUMENT, "MODEL_ROPE", "rope_dim 66; allowed: 0 (the whole head)"},
      {[](auto* d) { d->keys_pre_rope = 1, d->rope_theta = 1e4, d->rope_dim = 31; },
       KVS_INVALID_ARGUMENT, "MODEL_ROPE", "rope_dim 31"},
      {[](auto* d) { d->keys_pre_rope = 1, d->rope_theta = 1e4, d->rope_interleaved = 2; },
       KVS_INVALID_ARGUMENT, "MODEL_ROPE", "rope_interleaved 2; allowed: 0"},
      {[](auto* d) { d->rope_theta = 1e4; }, KVS_INVALID_ARGUMENT, "MODEL_ROPE",
       "rope_theta 10000; with keys_pre_rope 0 it must be 0"},
      {[](auto* d) { d->rope_dim = 64; }, KVS_INVALID_ARGUMENT, "MODEL_ROPE", "rope_dim 64; with"},
      {[](auto* d) { d->rope_interleaved = 1; }, KVS_INVALID_ARGUMENT, "MODEL_ROPE",
       "rope_interleaved 1; with"},
      {[](auto* d) { d->keys_pre_rope = 2; }, KVS_INVALID_ARGUMENT, "ARGUMENT_RANGE",
       "keys_pre_rope 2; allowed: 0..1"},
      {[](auto* d) { d->ranks = 0; }, KVS_INVALID_ARGUMENT, "ARGUMENT_RANGE", "ranks 0"},
      {[](auto* d) { d->ranks = 2; }, KVS_UNIMPLEMENTED, "TENSOR_PARALLEL", "ranks 2"},
      {[](auto* d) { d->rank = 1; }, KVS_INVALID_ARGUMENT, "ARGUMENT_RANGE", "rank 1"},
      {[](auto* d) { d->boundary_count = 3; }, KVS_INVALID_ARGUMENT, "ARGUMENT_NULL",
       "boundary_tokens is NULL"},
      {[](auto* d) { d->boundary_count = SIZE_MAX; }, KVS_INVALID_ARGUMENT, "ARGUMENT_RANGE",
       "boundary_tokens has"},
  };
  kvs_model model = 0;
  kvs_model_desc older = Desc();
  older.size = offsetof(kvs_model_desc, scale);
  older.scale = 3;  // whatever lies behind a struct of an older header
  ASSERT_EQ(kvs_model_register(session_, &older, &model), KVS_OK) << kvs_error_message();
  EXPECT_EQ(Log().model.geometry.scale, 0);
  older.size = sizeof(older);
  ASSERT_EQ(kvs_model_register(session_, &older, &model), KVS_OK) << kvs_error_message();
  EXPECT_EQ(Log().model.geometry.scale, 3);
  for (const Case& c : cases) {
    kvs_model_desc desc = Desc();
    c.spoil(&desc);
    ExpectRefused(kvs_model_register(session_, &desc, &model), c.code, c.reason, c.names);
  }
  for (const auto& spoil : std::vector<std::function<void(kvs_model_desc*)>>{
           [](auto* d) { d->layers = 0; }, [](auto* d) { d->layers = -5; },
           [](auto* d) { d->query_heads = 5; }, [](auto* d) { d->kv_heads = 0; },
           [](auto* d) { d->head_dim = 80; }, [](auto* d) { d->page_tokens = 17; }}) {
    kvs_model_desc desc = Desc();
    spoil(&desc);
    EXPECT_EQ(kvs_model_register(session_, &desc, &model), KVS_INVALID_ARGUMENT);
  }
  const int32_t ends[] = {13, 30};
  kvs_model_desc desc = Desc();
  desc.boundary_tokens = ends;
  desc.boundary_count = 2;
  ASSERT_EQ(kvs_model_register(session_, &desc, &model), KVS_OK);
  EXPECT_EQ(model, kFakeModel);
  EXPECT_EQ(Log().model.boundary_tokens, (std::vector<int32_t>{13, 30}));
  EXPECT_EQ(Log().model.geometry, testing::kFakeGeometry);
}

TEST_F(AbiTest, Sequences) {
  kvs_sequence s = 0;
  uint32_t held = 0;
  const int32_t ids[] = {5, 6};
  ExpectRefused(kvs_sequence_open(session_, 1, nullptr, ids, 2, &s, &held), KVS_INVALID_ARGUMENT,
                "ARGUMENT_NULL", "plan");
  ExpectRefused(kvs_sequence_open(session_, 1, "full", nullptr, 2, &s, &held), KVS_INVALID_ARGUMENT,
                "ARGUMENT_NULL", "tokens is NULL, but its count is 2");
  ExpectRefused(kvs_sequence_open(session_, 1, "full", ids, SIZE_MAX, &s, &held),
                KVS_INVALID_ARGUMENT, "ARGUMENT_RANGE", "tokens has");
  ExpectRefused(kvs_sequence_open(session_, 1, "full", ids, 2, nullptr, &held),
                KVS_INVALID_ARGUMENT, "ARGUMENT_NULL", "out");
  ASSERT_EQ(kvs_sequence_open(session_, 1, "quest{budget = 64}", ids, 2, &s, nullptr), KVS_OK);
  EXPECT_EQ(s, kFakeSequence);
  EXPECT_EQ(Log().plan, "quest{budget = 64}");
  EXPECT_EQ(Log().prompt, (std::vector<int32_t>{5, 6}));

  uint32_t tokens = 0;
  EXPECT_EQ(kvs_sequence_tokens(session_, s, &tokens), KVS_OK);
  EXPECT_EQ(tokens, 40u);
  ExpectRefused(kvs_sequence_tokens(session_, 99, &tokens), KVS_NOT_FOUND, "SEQUENCE_UNKNOWN",
                "99");
  ExpectRefused(kvs_sequence_tokens(session_, s, nullptr), KVS_INVALID_ARGUMENT, "ARGUMENT_NULL",
                "tokens");
  char text[9];
  ASSERT_EQ(kvs_sequence_status(session_, s, text, sizeof(text)), KVS_OK);
  EXPECT_STREQ(text, "a status");
  ExpectRefused(kvs_sequence_plan(session_, s, text, 0), KVS_INVALID_ARGUMENT, "ARGUMENT_RANGE",
                "capacity 0");
  ExpectRefused(kvs_report(session_, s, UINT32_MAX, 2, nullptr, nullptr, nullptr),
                KVS_INVALID_ARGUMENT, "ARGUMENT_RANGE", "first 4294967295");
  ExpectRefused(kvs_report(session_, s, 2, INT32_MAX, nullptr, nullptr, nullptr),
                KVS_INVALID_ARGUMENT, "ARGUMENT_RANGE", "first + n");
}

TEST_F(AbiTest, LentTensors) {
  kvs_memory_handle memory{};
  memory.size = sizeof(memory);
  memory.kind = KVS_MEMORY_CUDA_IPC;
  memory.fd = -1;
  memory.ipc[63] = 7;
  memory.bytes = 4096;
  kvs_block_tensor keys{};
  keys.size = sizeof(keys);
  keys.memory = &memory;
  keys.offset = 64;
  keys.block_stride = -5;  // the daemon's to refuse
  kvs_block_tensor values = keys;
  ASSERT_EQ(kvs_tensors_register(session_, kFakeModel, 1, &keys, &values), KVS_OK);
  EXPECT_EQ(testing::Log().keys.ipc[63], 7);
  EXPECT_EQ(testing::Log().keys.block_stride, -5);
  EXPECT_TRUE(testing::Log().same_memory);
  const auto refused = [&](const char* reason, const char* says) {
    ExpectRefused(kvs_tensors_register(session_, kFakeModel, 1, &keys, &values),
                  KVS_INVALID_ARGUMENT, reason, says);
  };
  memory.kind = KVS_MEMORY_MEMFD;
  refused("TENSOR_HANDLE", "keys.memory.fd is -1");
  memory.kind = 0;
  refused("TENSOR_KIND", "keys.memory.kind is 0");
  memory.size = 0;
  refused("STRUCT_SIZE", "kvs_memory_handle.size 0");
  keys.memory = nullptr;
  refused("ARGUMENT_NULL", "keys.memory");

  const int32_t ids[2] = {1, 2};
  EXPECT_EQ(kvs_blocks_seal(session_, kFakeSequence, 0, ids, 1, ids, 2), KVS_OK);
  ExpectRefused(kvs_blocks_seal(session_, kFakeSequence, 0, nullptr, 1, ids, 2),
                KVS_INVALID_ARGUMENT, "ARGUMENT_NULL", "blocks");
  ExpectRefused(kvs_blocks_acknowledged(session_, kFakeSequence, nullptr), KVS_INVALID_ARGUMENT,
                "ARGUMENT_NULL", "tokens");
  uint32_t tokens = 0;
  EXPECT_EQ(kvs_blocks_acknowledged(session_, kFakeSequence, &tokens), KVS_OK);
  EXPECT_EQ(tokens, 32u);
  EXPECT_EQ(kvs_blocks_load(session_, kFakeSequence, 0, ids, 2, nullptr), KVS_OK);
}

}  // namespace
}  // namespace kvstrata::client
