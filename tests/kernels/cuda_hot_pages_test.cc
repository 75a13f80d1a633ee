// How much of a GPU a sequence's hot cache takes.
#include "kernels/step/cuda_hot_pages.h"

#include <gtest/gtest.h>

namespace kvstrata {
namespace {

int32_t Slots(const char* plan, int32_t pages, int32_t page_tokens = 16) {
  Geometry g;
  g.layers = 32;
  g.query_heads = 32;
  g.kv_heads = 8;
  g.head_dim = 128;
  g.page_tokens = page_tokens;
  return CudaHotPages::SlotsOf(ParsePlan(plan).value(), g, pages);
}

TEST(CudaHotPages, HasSlotsForWhatAStepAttends) {
  constexpr int32_t k128K = 131072 / 16;
  // Lists of pages twice, and both ends of the ranges that are always attended.
  EXPECT_EQ(Slots("quest", k128K), 2 * 128 + 8);
  EXPECT_EQ(Slots("quest", k128K / 4, 64), 2 * 128 + 8);  // each unit may be in a page of its own
  EXPECT_EQ(Slots("quest{page = 64}", k128K), 2 * 128 + 8);
  EXPECT_EQ(Slots("window{n_sink = 16, n_recent = 496}", k128K), 2 * (32 + 4));
  EXPECT_EQ(Slots("chess", k128K), 2 * 40 * 2 + 2 * (27 * 2 + 4));
  // Lists of tokens once.
  EXPECT_EQ(Slots("sentencekv", k128K), 1024 + 2 * (4 + 4));
  EXPECT_EQ(Slots("tokenselect", k128K), 2048 + 2 * (40 + 4));
}

TEST(CudaHotPages, HasNoMoreSlotsThanPages) {
  EXPECT_EQ(Slots("quest", 100), 100);
  EXPECT_EQ(Slots("tokenselect{k = 100000}", 1 << 20), cuda::kHotSlotsMax);
}

}  // namespace
}  // namespace kvstrata
