// SPDX-License-Identifier: Apache-2.0
#include "session/recall_samples.h"

#include <functional>

#include "gtest/gtest.h"
#include "tests/fakes/table_memory.h"
#include "tests/session/published_tables.h"

namespace kvstrata::test {
namespace {

struct Batch : StepBatch {
  using StepBatch::StepBatch;
};

class RecallSamplesTest : public ::testing::Test {
 protected:
  // A sequence in `slot`, at token `tokens` behind a complete prompt.
  SessionSequence* Decoding(uint32_t slot, uint32_t tokens) {
    published_.Publish(slot, 10 + slot, 4);
    sequences_.push_back(SequenceOf(slot, 10 + slot, tokens));
    EXPECT_TRUE(sequences_.back()->state->ClosePrompt().ok());
    return sequences_.back().get();
  }
  void Audit(uint32_t slot, uint32_t audit, uint32_t every) {
    published_.tables()->slots[slot].recall_audit = shm::RecallRequest{audit, every}.Packed();
  }
  // One new token of each.
  std::vector<uint32_t> Sample(const std::function<bool(int)>& shadow, int32_t new_tokens = 1,
                               bool kept = true) {
    std::vector<StepMember> members;
    for (const auto& s : sequences_) {
      members.push_back({s->state.get(), s->View(), new_tokens, kept});
    }
    const Batch batch(std::move(members));
    return SampleRecall(tables_, batch, sequences_, shadow);
  }

  PublishedTables published_;
  FakeMemory memory_;
  SequenceTables tables_{&memory_, published_.reader()};
  std::vector<std::unique_ptr<SessionSequence>> sequences_;
};

const auto kMeasured = [](int) { return true; };

TEST_F(RecallSamplesTest, StepsThatAreDueAreSampled) {
  Decoding(0, 20), Decoding(1, 21), Decoding(2, 20);
  EXPECT_TRUE(Sample(kMeasured).empty());
  for (const uint32_t slot : {0u, 1u}) Audit(slot, 7 + slot, 4);
  std::vector<int> measured;
  const auto shadow = [&](int member) {
    measured.push_back(member);
    return true;
  };
  EXPECT_EQ(Sample(shadow), (std::vector<uint32_t>{7, 0, 0}));
  EXPECT_EQ(measured, std::vector<int>{0});
  Audit(1, 8, 7);
  EXPECT_EQ(Sample(kMeasured), (std::vector<uint32_t>{7, 8, 0}));
}

TEST_F(RecallSamplesTest, PromptsAndPaddingAreNot) {
  Decoding(0, 20);
  Audit(0, 7, 1);
  EXPECT_TRUE(Sample(kMeasured, 2).empty());
  EXPECT_TRUE(Sample(kMeasured, 1, false).empty());
  EXPECT_EQ(Sample(kMeasured), std::vector<uint32_t>{7});
}

TEST_F(RecallSamplesTest, SamplesThatAreLostCountForTheirAudit) {
  SessionSequence* const s = Decoding(0, 20);
  Audit(0, 7, 1);
  const auto lost = [](int) { return false; };
  EXPECT_TRUE(Sample(lost).empty());
  EXPECT_TRUE(Sample(lost).empty());
  EXPECT_EQ(s->recall_dropped, 2u);
  EXPECT_EQ(Sample(kMeasured), std::vector<uint32_t>{7});
  EXPECT_EQ(s->recall_dropped, 2u);
  Audit(0, 9, 1);
  EXPECT_EQ(Sample(kMeasured), std::vector<uint32_t>{9});
  EXPECT_EQ(s->recall_dropped, 0u);
}

}  // namespace
}  // namespace kvstrata::test
