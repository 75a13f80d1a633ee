// SPDX-License-Identifier: Apache-2.0
// ExtentDescriptions: which bytes are copied, when, and what is kept.
#include "kernels/codec/extent_descriptions.h"

#include <gtest/gtest.h>

#include <cstring>

namespace kvstrata {
namespace {

// An extent that no parser knows: its description is its front.
std::vector<std::byte> Unknown(size_t bytes, std::byte fill) {
  return std::vector<std::byte>(bytes, fill);
}

class Descriptions : public ::testing::Test {
 protected:
  Status Describe(ExtentView* extent) {
    return descriptions_.Describe(
        [this](std::byte* to, const std::byte* from, uint64_t bytes) -> Status {
          ++reads_;
          if (fails_) return Internal("FAILED", "on purpose");
          std::memcpy(to, from, bytes);
          return OkStatus();
        },
        extent);
  }
  static ExtentView ViewOf(const std::vector<std::byte>& bytes, kvstrata::Run tokens) {
    return {bytes.data(), static_cast<int64_t>(bytes.size()), tokens, nullptr, 0};
  }

  ExtentDescriptions descriptions_;
  int reads_ = 0;
  bool fails_ = false;
};

TEST_F(Descriptions, AreTheBytesThatParsersRead) {
  const std::vector<std::byte> bytes = Unknown(5000, std::byte{7});
  ExtentView view = ViewOf(bytes, {0, 64});
  ASSERT_TRUE(Describe(&view).ok());
  ASSERT_NE(view.description, nullptr);
  EXPECT_NE(view.description, bytes.data());
  EXPECT_EQ(view.description_bytes,
            DescriptionBytes(std::span(bytes).first(kExtentFrontBytes), 5000));
  EXPECT_EQ(
      std::memcmp(view.description, bytes.data(), static_cast<size_t>(view.description_bytes)), 0);
}

TEST_F(Descriptions, AreCopiedOnceAndForgottenWithTheirTable) {
  const std::vector<std::byte> a = Unknown(400, std::byte{1}), b = Unknown(100, std::byte{2});
  std::vector<ExtentView> table = {ViewOf(a, {0, 64}), ViewOf(b, {64, 128})};
  for (ExtentView& view : table) ASSERT_TRUE(Describe(&view).ok());
  descriptions_.KeepOnly(table);
  const std::byte* const kept = table[0].description;
  const int after_two = reads_;

  std::vector<ExtentView> next = {ViewOf(a, {0, 64})};
  ASSERT_TRUE(Describe(&next[0]).ok());
  EXPECT_EQ(next[0].description, kept);
  EXPECT_EQ(reads_, after_two) << "copied again";
  descriptions_.KeepOnly(next);
  ExtentView back = ViewOf(b, {64, 128});
  ASSERT_TRUE(Describe(&back).ok());
  EXPECT_GT(reads_, after_two) << "kept for no table";

  // Other tokens at the same place are another extent.
  const int before = reads_;
  ExtentView other = ViewOf(a, {0, 32});
  ASSERT_TRUE(Describe(&other).ok());
  EXPECT_GT(reads_, before);
}

TEST_F(Descriptions, OfAFailedReadNothingIsKept) {
  const std::vector<std::byte> bytes = Unknown(400, std::byte{3});
  ExtentView view = ViewOf(bytes, {0, 64});
  fails_ = true;
  EXPECT_EQ(Describe(&view).reason(), "FAILED");
  EXPECT_EQ(view.description, nullptr);
  fails_ = false;
  ASSERT_TRUE(Describe(&view).ok());
  EXPECT_EQ(view.description[0], std::byte{3});
}

}  // namespace
}  // namespace kvstrata
