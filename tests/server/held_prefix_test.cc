// The rule of what is held (server/store/held_prefix.h), over views that a test writes down.
#include "server/store/held_prefix.h"

#include <gtest/gtest.h>

#include <string_view>

namespace kvstrata {
namespace {

// A letter a page or block: 'x' it is there, '-' it is not, 'd' if it is fetched.
class Written final : public PrefixView {
 public:
  Written(std::string_view pages, std::string_view blocks) : pages_(pages), blocks_(blocks) {}
  bool HasPage(size_t i, bool superfluous) override {
    return pages_.at(i) == 'x' || (pages_.at(i) == 'd' && !superfluous);
  }
  bool HasBlock(size_t i) override { return blocks_.at(i) == 'x'; }

 private:
  const std::string_view pages_, blocks_;
};

// Blocks of two pages of 16 tokens. `gaps`: 's' where a page is superfluous.
HeldPrefix Find(std::string_view pages, std::string_view gaps = "", std::string_view blocks = "",
                bool has_index = false) {
  IndexLayout index;
  if (has_index) index.kind = IndexLayout::Kind::kMinMax;
  index.block_tokens = 32;
  std::vector<bool> superfluous;
  for (const char c : gaps) superfluous.push_back(c == 's');
  Written view(pages, blocks);
  return FindHeld(PrefixShape(pages.size(), 16, index), superfluous, &view);
}

TEST(HeldPrefix, EndsAtTheFirstPageThatIsMissing) {
  EXPECT_EQ(Find("xxdx").pages, 4u);
  EXPECT_EQ(Find("xx-x").pages, 2u);
  EXPECT_EQ(Find("-xxx").pages, 0u);
  EXPECT_TRUE(Find("xx-x").whole);
}

TEST(HeldPrefix, BlocksEndWithHeldPages) {
  EXPECT_EQ(Find("xxxxx", "", "xx", true).blocks, 2u);
  EXPECT_EQ(Find("xxx-x", "", "xx", true).blocks, 1u);
  EXPECT_EQ(Find("xxxxx", "", "-x", true).blocks, 0u) << "none behind one that is missing";
  EXPECT_EQ(Find("xxxxx", "", "-x", true).pages, 5u) << "it is computed again";
}

TEST(HeldPrefix, SuperfluousPagesMayBeMissing) {
  const HeldPrefix held = Find("x--x", "-ss-");
  EXPECT_EQ(held.pages, 4u);
  EXPECT_FALSE(held.whole);
  EXPECT_TRUE(Find("xxxx", "-ss-").whole);
  EXPECT_FALSE(Find("xdxx", "-ss-").whole) << "it is not fetched";
}

TEST(HeldPrefix, WithoutAllOfTheRestAnArtefactIsOfNoUse) {
  EXPECT_EQ(Find("x--xx-", "-ss---").pages, 1u);
  const HeldPrefix held = Find("xddxx-", "-ss---");
  EXPECT_EQ(held.pages, 5u) << "superfluous pages are fetched then";
  EXPECT_TRUE(held.whole);
}

TEST(HeldPrefix, NorWithoutTheIndexOfWhatIsMissing) {
  EXPECT_EQ(Find("xx-xxx", "ssss--", "xx-", true).pages, 6u);
  EXPECT_EQ(Find("xx-xxx", "ssss--", "x-x", true).pages, 2u) << "page 2 ends in block 1";
}

TEST(HeldPrefix, NoRowsOfASpanThatIsCut) {
  Plan plan;
  plan.codec = CodecKind::kLowRank;
  const RawFree artefact{{{0, 30}, {40, 80}}, 80, Residence::kHost};
  EXPECT_TRUE(SuperfluousPages(plan, artefact, 4, 16).empty());
  const std::vector<bool> want = {true, false, false, true, true};
  EXPECT_EQ(SuperfluousPages(plan, artefact, 5, 16), want) << "whole pages";
  plan.codec = CodecKind::kPacked;
  EXPECT_EQ(SuperfluousPages(plan, artefact, 4, 16), (std::vector<bool>{true, false, false, true}));
}

}  // namespace
}  // namespace kvstrata
