// SPDX-License-Identifier: Apache-2.0
// The rule of what is held (server/store/prompts/held_prefix.h), over views that a test writes
// down.
#include "server/store/prompts/held_prefix.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>

namespace kvstrata {
namespace {

// A letter a page or block: 'x' a device has it, 'h' the host, 'd' the tier alone, '-' nobody.
class Written final : public PrefixView {
 public:
  Written(std::string_view pages, std::string_view blocks) : pages_(pages), blocks_(blocks) {}
  HeldIn InMemory(Kind kind, size_t i) override {
    const char letter = At(kind, i);
    if (letter == 'x') return HeldIn::kDevice;
    return letter == 'h' ? HeldIn::kHost : HeldIn::kNothing;
  }
  bool InTier(Kind kind, size_t i) override {
    EXPECT_EQ(InMemory(kind, i), HeldIn::kNothing) << "the tier costs more";
    return At(kind, i) == 'd';
  }

 private:
  char At(Kind kind, size_t i) const { return kind == Kind::kPage ? pages_.at(i) : blocks_.at(i); }
  const std::string_view pages_, blocks_;
};

// Blocks of two pages of 16 tokens. `gaps`: 's' where a page is redundant.
HeldPrefix Find(std::string_view pages, std::string_view gaps = "", std::string_view blocks = "",
                bool has_index = false) {
  IndexLayout index;
  if (has_index) index.kind = IndexLayout::Kind::kMinMax;
  index.block_tokens = 32;
  std::vector<bool> redundant;
  for (const char c : gaps) redundant.push_back(c == 's');
  Written view(pages, blocks);
  return FindHeld(PrefixShape(pages.size(), 16, index), redundant, &view);
}

// As Written, and 'a' where the artefact stands for a page.
std::string Text(const HeldPrefix& held) {
  std::string text;
  for (const HeldIn where : held.pages) text += "-xhda"[static_cast<size_t>(where)];
  return text;
}

TEST(HeldPrefix, EndsAtTheFirstPageThatIsMissing) {
  EXPECT_EQ(Text(Find("xxdx")), "xxdx");
  EXPECT_EQ(Text(Find("xx-x")), "xx");
  EXPECT_EQ(Text(Find("-xxx")), "");
  EXPECT_TRUE(Find("xx-x").whole);
}

TEST(HeldPrefix, SaysWhereEachPageIs) {
  EXPECT_EQ(Text(Find("xhdhx")), "xhdhx");
  EXPECT_EQ(Text(Find("xh-d-x", "--s-s-")), "xhadax");
  EXPECT_EQ(Text(Find("xhdd", "ss-s")), "xhda")
      << "memory first; the tier is not asked for the last";
}

TEST(HeldPrefix, BlocksEndWithHeldPages) {
  EXPECT_EQ(Find("xxxxx", "", "hd", true).blocks, 2u);
  EXPECT_EQ(Find("xxx-x", "", "xx", true).blocks, 1u);
  EXPECT_EQ(Find("xxxxx", "", "-x", true).blocks, 0u) << "none behind one that is missing";
  EXPECT_EQ(Find("xxxxx", "", "-x", true).pages.size(), 5u) << "it is computed again";
}

TEST(HeldPrefix, RedundantPagesMayBeMissing) {
  const HeldPrefix held = Find("x--x", "-ss-");
  EXPECT_EQ(Text(held), "xaax");
  EXPECT_FALSE(held.whole);
  EXPECT_TRUE(Find("xxxx", "-ss-").whole);
  EXPECT_FALSE(Find("xdxx", "-ss-").whole) << "it is not fetched";
}

TEST(HeldPrefix, WithoutAllOfTheRestAnArtefactIsOfNoUse) {
  EXPECT_EQ(Text(Find("x--xx-", "-ss---")), "x");
  const HeldPrefix held = Find("xddxx-", "-ss---");
  EXPECT_EQ(Text(held), "xddxx") << "redundant pages are fetched then";
  EXPECT_TRUE(held.whole);
}

TEST(HeldPrefix, NorWithoutTheIndexOfWhatIsMissing) {
  EXPECT_EQ(Text(Find("xx-xxx", "ssss--", "xx-", true)), "xxaxxx");
  EXPECT_EQ(Text(Find("xx-xxx", "ssss--", "x-x", true)), "xx") << "page 2 ends in block 1";
}

TEST(HeldPrefix, NoRowsOfASpanThatIsCut) {
  Plan plan;
  plan.codec = CodecKind::kLowRank;
  const RawFree artefact{{{0, 30}, {40, 80}}, 80, Tier::kHost};
  EXPECT_TRUE(RedundantPages(plan, std::nullopt, 4, 16).empty());
  EXPECT_TRUE(RedundantPages(plan, artefact, 4, 16).empty());
  const std::vector<bool> want = {true, false, false, true, true};
  EXPECT_EQ(RedundantPages(plan, artefact, 5, 16), want) << "whole pages";
  plan.codec = CodecKind::kPacked;
  EXPECT_EQ(RedundantPages(plan, artefact, 4, 16), (std::vector<bool>{true, false, false, true}));
}

}  // namespace
}  // namespace kvstrata
