// SPDX-License-Identifier: Apache-2.0
// RepeatedCall on a table of ops that only counts: when a call becomes a graph, and when it stops
// being one.
#include "kernels/step/gpu/memory/repeated_call.h"

#include <gtest/gtest.h>

namespace kvstrata {
namespace {

int captures, launches, destroyed, failing;  // counts of the fake GPU
char stream_of_captures, graph_of_captures;

const cuda::CudaOps& FakeOps() {
  static const cuda::CudaOps ops = [] {
    cuda::CudaOps fake;
    fake.error_text = [](int) { return "failed on purpose"; };
    fake.begin_capture = [](cuda::Stream* stream) {
      ++captures;
      *stream = &stream_of_captures;
      return 0;
    };
    fake.end_capture = [](cuda::Stream, cuda::Graph* graph) {
      *graph = failing != 0 ? nullptr : &graph_of_captures;
      return failing;
    };
    fake.launch_graph = [](cuda::Graph, cuda::Stream) {
      ++launches;
      return 0;
    };
    fake.destroy_graph = [](cuda::Graph) {
      ++destroyed;
      return 0;
    };
    return fake;
  }();
  return ops;
}

class RepeatedCalls : public ::testing::Test {
 protected:
  RepeatedCalls() { captures = launches = destroyed = failing = 0; }
  Status Run(const void* q) {
    return call_.Run(FakeOps(), {.q = q}, &stream_, [this] {
      ++(stream_ == &stream_of_captures ? captured_ : enqueued_);
      return status_;
    });
  }
  void RunOften(const void* q) {
    for (int i = 0; i < 9; ++i) ASSERT_TRUE(Run(q).ok());
  }

  RepeatedCall call_;
  cuda::Stream stream_ = nullptr;
  int enqueued_ = 0, captured_ = 0;
  Status status_ = OkStatus();
  char a_ = 0, b_ = 0;  // tensors
};

TEST_F(RepeatedCalls, AreGraphsOnceTheyWereSeenAlike) {
  RunOften(&a_);
  EXPECT_EQ(enqueued_, RepeatedCall::kSeen);
  EXPECT_EQ(captured_, 1);
  EXPECT_EQ(launches, 9 - RepeatedCall::kSeen);
  EXPECT_TRUE(call_.has_graph());
  EXPECT_EQ(stream_, nullptr);  // the engine's again
}

TEST_F(RepeatedCalls, OfOtherTensorsAreOthers) {
  RunOften(&a_);
  ASSERT_TRUE(Run(&b_).ok());
  EXPECT_EQ(enqueued_, RepeatedCall::kSeen + 1);
  EXPECT_FALSE(call_.has_graph());
  EXPECT_EQ(destroyed, 1);
  for (int i = 0; i < 9; ++i) ASSERT_TRUE(Run(i % 2 == 0 ? &a_ : &b_).ok());
  EXPECT_EQ(captures, 1);  // never twice alike
}

TEST_F(RepeatedCalls, StayAsTheyAreWhereACaptureFails) {
  failing = 1;
  RunOften(&a_);
  EXPECT_EQ(enqueued_, 9);
  EXPECT_EQ(captures, 1);  // it is tried once
  EXPECT_FALSE(call_.has_graph());
}

TEST_F(RepeatedCalls, SayWhyTheyFail) {
  for (int i = 0; i < RepeatedCall::kSeen; ++i) ASSERT_TRUE(Run(&a_).ok());
  status_ = FailedPrecondition("CAPTURE_ALLOCATES", "no room");
  EXPECT_EQ(Run(&a_).reason(), "CAPTURE_ALLOCATES");
  EXPECT_FALSE(call_.has_graph());
  EXPECT_EQ(destroyed, 1);  // what was captured of it
  EXPECT_EQ(stream_, nullptr);
}

}  // namespace
}  // namespace kvstrata
