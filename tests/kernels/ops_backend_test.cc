// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <string>

#include "kernels/backend/backend.h"
#include "kernels/cpu/simd_target.h"

namespace kvstrata {
namespace {

using ::testing::HasSubstr;

class BackendTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const char* value = getenv("KVSTRATA_BACKEND")) before_ = value;
    unsetenv("KVSTRATA_BACKEND");
  }
  void TearDown() override {
    unsetenv("KVSTRATA_BACKEND");
    if (!before_.empty()) setenv("KVSTRATA_BACKEND", before_.c_str(), 1);
  }
  std::string before_;
};

TEST_F(BackendTest, BestComesFirstAndEveryNameIsFound) {
  EXPECT_EQ(Backends().front().name, AvailableSimdTargets().empty() ? "ref" : "simd");
  EXPECT_EQ(Backends().back().name, "ref");
  for (const Backend& backend : Backends()) {
    const auto found = FindBackend(backend.name);
    ASSERT_TRUE(found.ok());
    EXPECT_EQ(*found, &backend);
  }
  EXPECT_EQ(*FindBackend(""), &Backends().front());
}

TEST_F(BackendTest, TheEnvironmentDecidesWhenNobodyElseDoes) {
  setenv("KVSTRATA_BACKEND", "ref", 1);
  EXPECT_EQ((*FindBackend(""))->name, "ref");
  EXPECT_EQ((*FindBackend(Backends().front().name))->name, Backends().front().name);
}

TEST_F(BackendTest, UnknownNamesSayWhatThereIs) {
  const Status status = FindBackend("cuda").status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_EQ(status.reason(), "BACKEND_UNKNOWN");
  EXPECT_THAT(status.message(), HasSubstr("'cuda'"));
  EXPECT_THAT(status.message(), HasSubstr("ref"));
  setenv("KVSTRATA_BACKEND", "fast", 1);
  EXPECT_THAT(FindBackend("").status().message(), HasSubstr("KVSTRATA_BACKEND is 'fast'"));
}

}  // namespace
}  // namespace kvstrata
