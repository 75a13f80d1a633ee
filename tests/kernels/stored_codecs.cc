// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/stored_codecs.h"

#include "tests/kernels/codec_fixture.h"
#include "tests/kernels/toy_codec.h"

namespace kvstrata {
namespace {

// Tokens one by one, one list for all heads.
Plan VotePlan(CodecKind codec) {
  Plan plan = PackedPlan();
  plan.codec = codec;
  plan.selector = SelectorKind::kVote;
  plan.vote.budget = 60;
  plan.vote.sinks = 5;
  plan.vote.recent = 20;
  plan.packed.keep = 64;
  plan.packed.segment = 64;
  plan.packed.buffer = 16;
  plan.packed.truncate = false;
  return plan;
}

// Blocks, a list a KV head.
[[maybe_unused]] Plan BlockPlan() {
  Plan plan = VotePlan(CodecKind::kPacked);
  plan.selector = SelectorKind::kBlock;
  plan.block.share = 0.4;
  return plan;
}

// Spans, a list a query head.
[[maybe_unused]] Plan BucketPlan() {
  Plan plan = SpanPlan();
  plan.selector = SelectorKind::kBucket;
  plan.lowrank.r_max = 64;
  plan.lowrank.alpha = 1.5;
  plan.bucket.budget = 50;
  plan.bucket.per_query_head = true;
  return plan;
}

// All rows by all of their planes.
Plan FinePlan() {
  Plan plan = PlanesPlan();
  plan.fine.share = 1;
  return plan;
}
Plan LowerOnHostPlan() {
  Plan plan = FinePlan();
  plan.planes.lower = Tier::kHost;
  return plan;
}

}  // namespace

std::span<const StoredCodec> StoredCodecs() {
  static const StoredCodec codecs[] = {
      {"raw", CodecOf(VotePlan(CodecKind::kRaw)), VotePlan(CodecKind::kRaw), 1e-5},
#ifndef KVS_WITHOUT_MOSAICKV
      {"packed", CodecOf(BlockPlan()), VotePlan(CodecKind::kPacked), 0.03},
      {"packed_blocks", CodecOf(BlockPlan()), BlockPlan(), 0.03},
#endif
#ifndef KVS_WITHOUT_SEKV
      {"lowrank", CodecOf(BucketPlan()), BucketPlan(), 0.03},
#endif
      {"planes", CodecOf(FinePlan()), FinePlan(), 0.03, false},
      {"lower_planes", CodecOf(FinePlan()), LowerOnHostPlan(), 0.03, false},
      {"toy", testing::kToyCodec, VotePlan(CodecKind::kRaw), 1e-5},
  };
  return codecs;
}

}  // namespace kvstrata
