// SPDX-License-Identifier: Apache-2.0
// Tokens of the attach socket: good once, for a while, for their user.
#include "server/attach/peers/attach_tokens.h"

#include <gtest/gtest.h>

namespace kvstrata {
namespace {

using std::chrono::milliseconds;

constexpr uint32_t kAda = 1000, kBob = 1001;

class AttachTokensTest : public ::testing::Test {
 protected:
  AttachToken Issue(uint32_t uid = kAda, milliseconds lifetime = {}) {
    const Result<AttachToken> token = tokens_.Issue(uid, {7, true}, lifetime);
    EXPECT_TRUE(token.ok()) << token.status().ToString();
    return token.ok() ? *token : AttachToken{};
  }
  std::string Redeem(uint32_t uid, const AttachToken& token) {
    return std::string(tokens_.Redeem(uid, token).status().reason());
  }

  AttachTokens::Clock::time_point now_{};
  AttachTokens tokens_{[this] { return now_; }};
};

TEST_F(AttachTokensTest, GoodOnce) {
  const AttachToken token = Issue();
  const Result<TokenGrant> grant = tokens_.Redeem(kAda, token);
  ASSERT_TRUE(grant.ok()) << grant.status().ToString();
  EXPECT_EQ(grant->session, 7u);
  EXPECT_TRUE(grant->writable);
  const Status again = tokens_.Redeem(kAda, token).status();
  EXPECT_EQ(again.code(), Code::kUnauthenticated);
  EXPECT_EQ(again.reason(), "TOKEN_USED");
}

TEST_F(AttachTokensTest, AnothersIsUnknownAndStaysGood) {
  const AttachToken token = Issue();
  AttachToken guess = token;
  guess.back() ^= 1;
  EXPECT_EQ(Redeem(kAda, guess), "TOKEN_UNKNOWN");
  EXPECT_EQ(Redeem(kBob, token), "TOKEN_UNKNOWN");
  // To the last word what any other bytes are told.
  EXPECT_EQ(tokens_.Redeem(kBob, token).status().message(),
            tokens_.Redeem(kBob, guess).status().message());
  EXPECT_TRUE(tokens_.Redeem(kAda, token).ok());
}

TEST_F(AttachTokensTest, Expires) {
  const AttachToken brief = Issue(kAda, milliseconds(5)), usual = Issue();
  now_ += milliseconds(5);
  EXPECT_EQ(Redeem(kAda, brief), "TOKEN_EXPIRED");
  now_ += AttachTokens::kLifetime - milliseconds(6);
  EXPECT_TRUE(tokens_.Redeem(kAda, usual).ok());
  EXPECT_EQ(tokens_.Issue(kAda, {}, AttachTokens::kMaxLifetime + milliseconds(1)).status().reason(),
            "TOKEN_LIFETIME");
}

TEST_F(AttachTokensTest, OfOneUserSoManyWait) {
  const AttachToken first = Issue();
  AttachToken last{};
  for (size_t i = 1; i < AttachTokens::kMaxTokens; ++i) last = Issue();
  EXPECT_NE(first, last);
  EXPECT_EQ(tokens_.Issue(kAda, {}).status().reason(), "TOKEN_LIMIT");
  Issue(kBob);
  EXPECT_TRUE(tokens_.Redeem(kAda, last).ok());
  EXPECT_EQ(Redeem(kAda, last), "TOKEN_USED");
  Issue();  // in its place
  EXPECT_EQ(Redeem(kAda, last), "TOKEN_UNKNOWN");
  now_ += AttachTokens::kLifetime;
  Issue();
  EXPECT_EQ(Redeem(kAda, first), "TOKEN_UNKNOWN");
}

}  // namespace
}  // namespace kvstrata
