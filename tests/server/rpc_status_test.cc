// SPDX-License-Identifier: Apache-2.0
// Status over gRPC both ways, and the work queue under the services.
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <string>
#include <vector>

#include "kvstrata/wire/error_info.pb.h"
#include "kvstrata/wire/status.pb.h"
#include "proto/status_map.h"
#include "server/rpc/steps/work_queue.h"

namespace kvstrata {
namespace {

TEST(StatusMap, EveryCodeComesBackWithItsReasonAndMessage) {
  for (int code = 0; code <= 16; ++code) {
    if (CodeName(static_cast<Code>(code)) == "UNKNOWN" || code == 0) continue;
    const Status there(static_cast<Code>(code), "SOME_REASON", "field 3; allowed: 4");
    const Status back = FromGrpc(ToGrpc(there));
    EXPECT_EQ(back.ToString(), there.ToString());
  }
  EXPECT_TRUE(ToGrpc(OkStatus()).ok());
  EXPECT_TRUE(FromGrpc(grpc::Status::OK).ok());
}

TEST(StatusMap, DetailsAreAnErrorInfoOfOurDomain) {
  const grpc::Status status = ToGrpc(NotFound("MODEL_UNKNOWN", "model 7"));
  wire::Status rich;
  ASSERT_TRUE(rich.ParseFromString(status.error_details()));
  EXPECT_EQ(rich.code(), 5);
  EXPECT_EQ(rich.message(), "model 7");
  ASSERT_EQ(rich.details_size(), 1);
  EXPECT_EQ(rich.details(0).type_url(), "type.googleapis.com/google.rpc.ErrorInfo");
  wire::ErrorInfo info;
  ASSERT_TRUE(info.ParseFromString(rich.details(0).value()));
  EXPECT_EQ(info.reason(), "MODEL_UNKNOWN");
  EXPECT_EQ(info.domain(), "kvstrata");
}

TEST(StatusMap, AnotherDetailIsFoundByItsType) {
  const grpc::Status status = ToGrpc(Internal("X", "y"), {"kvstrata.v1.Thing", "bytes"});
  EXPECT_EQ(DetailOf(status, "kvstrata.v1.Thing"), "bytes");
  EXPECT_EQ(DetailOf(status, "kvstrata.v1.Other"), "");
  EXPECT_EQ(FromGrpc(status).reason(), "X");
}

TEST(StatusMap, ErrorsOfGrpcItselfGetAReason) {
  const auto reason = [](grpc::StatusCode code) { return FromGrpc({code, "m"}).reason(); };
  EXPECT_EQ(reason(grpc::StatusCode::UNAVAILABLE), "DAEMON_GONE");
  EXPECT_EQ(reason(grpc::StatusCode::DEADLINE_EXCEEDED), "DEADLINE");
  EXPECT_EQ(reason(grpc::StatusCode::RESOURCE_EXHAUSTED), "MESSAGE_TOO_LARGE");
  EXPECT_EQ(reason(grpc::StatusCode::UNIMPLEMENTED), "RPC_UNIMPLEMENTED");
  EXPECT_EQ(FromGrpc({grpc::StatusCode::CANCELLED, ""}).code(), Code::kAborted);
  EXPECT_EQ(FromGrpc({grpc::StatusCode::UNKNOWN, ""}).code(), Code::kInternal);
  EXPECT_EQ(FromGrpc({grpc::StatusCode::INTERNAL, "m", "garbage\xff"}).reason(), "RPC_FAILED");
}

TEST(StatusMap, LongMessagesAreCutBetweenCharacters) {
  std::string message = "x";  // odd, so that a cut in the middle of a character would show
  while (message.size() < 100000) message += "\xc3\xa9";
  const grpc::Status status = ToGrpc(Internal("X", message));
  EXPECT_LT(status.error_message().size() + status.error_details().size(), 8000u);
  std::string kept = status.error_message();
  ASSERT_TRUE(kept.ends_with(" ..."));
  kept.resize(kept.size() - 4);
  EXPECT_EQ(kept.size() % 2, 1u);
  EXPECT_TRUE(message.starts_with(kept));
}

TEST(WorkQueue, RunsEverythingBeforeItGoes) {
  std::atomic<int> done{0};
  {
    WorkQueue queue(3);
    for (int i = 0; i < 1000; ++i) queue.Post([&] { ++done; });
  }
  EXPECT_EQ(done, 1000);
}

TEST(Strand, RunsInOrderOneAtATime) {
  WorkQueue queue(4);
  const auto strand = std::make_shared<Strand>(&queue);
  std::vector<int> order;
  std::atomic<int> inside{0}, together{0};
  std::promise<void> last;
  int posted = 0;
  while (posted < 1000) {
    const auto outcome = strand->Post([&, i = posted] {
      if (++inside > 1) ++together;
      order.push_back(i);
      --inside;
    });
    if (outcome == Strand::Outcome::kQueued) ++posted;
  }
  strand->PostLast([&] { last.set_value(); });
  ASSERT_EQ(last.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_EQ(together, 0);
  ASSERT_EQ(order.size(), 1000u);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
}

TEST(Strand, OneThatIsStuckFillsUpAndStopsNobodyElse) {
  WorkQueue queue(2);
  const auto stuck = std::make_shared<Strand>(&queue);
  const auto other = std::make_shared<Strand>(&queue);
  std::promise<void> release, ran;
  stuck->Post([gate = release.get_future().share()] { gate.wait(); });
  for (size_t i = 1; i < Strand::kMaxWaiting; ++i) {
    ASSERT_EQ(stuck->Post([] {}), Strand::Outcome::kQueued);
  }
  EXPECT_EQ(stuck->Post([] {}), Strand::Outcome::kFull);
  other->Post([&] { ran.set_value(); });
  EXPECT_EQ(ran.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  stuck->PostLast([] {});  // always has room
  EXPECT_EQ(stuck->Post([] {}), Strand::Outcome::kClosed);
  release.set_value();
}

}  // namespace
}  // namespace kvstrata
