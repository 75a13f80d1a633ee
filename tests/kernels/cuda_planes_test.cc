// SPDX-License-Identifier: Apache-2.0
// Codec planes in a CudaStep on a table of ops that is a GPU in host memory and computes as `ref`
// does: tables, lengths, which layers and members attend in full. The kernels:
// tests/cuda/cuda_step_planes_test.cc.
#include "kernels/ops/pack_planes/plane_digits.h"
#include "kernels/plans/strata/gpu/mid_cell_run.h"
#include "kernels/step/gpu/cuda_step.h"
#include "kernels/step/gpu/memory/cuda_hot_rows.h"
#include "tests/fakes/planes_gpu.h"
#include "tests/kernels/codec_fixture.h"

namespace kvstrata {
namespace {

constexpr uint64_t kSeed = 71;
constexpr int32_t kTokens = 700;
constexpr char kPlan[] =
    "strata{fine_above = 3, sample = 2, sinks = 5, recent = 20, n_dense_layers = 1, min_tokens = "
    "300}";

constexpr char kShare[] = "strata{share = 0.2, sinks = 5, recent = 20, min_tokens = 300}";

constexpr char kLowerOnHost[] =
    "strata{fine_above = 3, sample = 2, sinks = 5, recent = 20, lower = \"host\", min_tokens = "
    "300}";

constexpr char kOpensOnUpper[] =
    "strata{fine_above = 3, sample = 2, sinks = 5, recent = 20, n_dense_layers = 1, min_tokens = "
    "300, keep_raw = \"no\", open_on = \"upper\"}";

constexpr char kOpensOnFourBits[] =
    "strata{keep = 4, fine_above = 3, skip_below = 0, sample = 2, min_tokens = 300, keep_raw = "
    "\"no\", open_on = \"upper\"}";

constexpr char kOpensOnUpperAndHost[] =
    "strata{fine_above = 3, sample = 2, sinks = 5, recent = 20, lower = \"host\", min_tokens = "
    "300, keep_raw = \"no\", open_on = \"upper\"}";

// The codec's half of a plan; it seals from the first group on.
Plan SealedBy(const std::string& plan) {
  Plan sealed = PlanesPlan();
  sealed.planes = PlanOf(plan).planes;
  return sealed;
}

Geometry Shape() {
  Geometry g{.layers = 2, .query_heads = 6, .kv_heads = 2, .head_dim = 64};
  g.dtype = DType::kBF16;
  return g;
}

// A sequence that a Step and a CudaStep read on the same pages and extents.
struct Member {
  Member(const Geometry& g, const Inputs& in, const std::string& plan, int32_t prompt)
      : sequence(SealedBy(plan), g, in),
        on_cpu(g, PlanOf(plan), prompt, prompt),
        on_gpu(g, PlanOf(plan), prompt, prompt) {
    sequence.Commit(prompt);
    sequence.PrefillDone();
    EXPECT_TRUE(on_cpu.ClosePrompt().ok());
    EXPECT_TRUE(on_gpu.ClosePrompt().ok());
  }
  // For `more` tokens, whose rows are on the pages already. The GPU's is in `gpu_view`.
  SequenceView View(int32_t more) {
    const int32_t tokens = on_cpu.tokens();
    sequence.Commit(tokens + more);
    SequenceView view = sequence.View();
    view.tokens = tokens;
    PlaceExtents(&view);
    view.version = ++version;
    gpu_view = view;
    if (arriving) HideLower();
    EXPECT_TRUE(on_cpu.Refresh(view).ok());
    EXPECT_TRUE(on_gpu.Refresh(gpu_view).ok());
    return view;
  }
  // The sequence as it is opened on what is packed: its prompt is not complete, and goes on there.
  void Reopen() {
    sequence.Settle();
    const int32_t held = sequence.View().extents[sequence.extents().size() - 1].tokens.end;
    on_cpu = SequenceState(sequence.geometry(), on_cpu.plan(), held, held);
    on_gpu = SequenceState(sequence.geometry(), on_gpu.plan(), held, held);
  }

  // Tokens that no step of the test has.
  void Skip(int32_t count) {
    sequence.Commit(on_cpu.tokens() + count);
    on_cpu.Advance(count);
    on_gpu.Advance(count);
  }
  // Where a store would put them: at multiples of 64.
  void PlaceExtents(SequenceView* view) {
    copies.clear(), extents.clear();
    for (int32_t i = 0; i < view->extent_count; ++i) {
      ExtentView e = view->extents[i];
      Bytes& copy = copies.emplace_back(static_cast<size_t>(e.bytes) + 63);
      std::byte* const at = copy.data() + (64 - reinterpret_cast<uintptr_t>(copy.data()) % 64) % 64;
      std::memcpy(at, e.data, static_cast<size_t>(e.bytes));
      e.data = at;
      extents.push_back(e);
    }
    view->extents = extents.data();
  }

  // The GPU's table has upper runs alone; on the CPU lower ones are what stands for them there.
  void HideLower() {
    upper.clear();
    for (const ExtentView& e : extents) {
      if (KindOf(e) == ExtentKind::kPlanes) {
        upper.push_back(e);
        upper.back().rest_due = true;
        continue;
      }
      const Geometry& g = sequence.geometry();
      const PlanesOptions& o = on_gpu.plan().planes;
      const Bytes run = MidCellRun({g.head_dim, o.unit, o.keep});
      auto* at = const_cast<std::byte*>(e.data) + kPlanesFrontBytes;
      const int32_t runs = g.layers * g.kv_heads * (e.tokens.end - e.tokens.begin) / o.unit;
      for (int32_t i = 0; i < runs; ++i) at = std::ranges::copy(run, at).out;
    }
    gpu_view.extents = upper.data();
    gpu_view.extent_count = static_cast<int32_t>(upper.size());
  }

  CodecSequence sequence;
  SequenceState on_cpu, on_gpu;
  SequenceView gpu_view;
  bool arriving = false;  // lower runs are on their way
  uint64_t version = 0;
  std::vector<Bytes> copies;
  std::vector<ExtentView> extents, upper;
};

class CudaPlanesTest : public ::testing::Test {
 protected:
  CudaPlanesTest() { testing::failing = -1; }

  void Add(const std::string& plan, int32_t prompt) {
    members_.push_back(std::make_unique<Member>(g_, in_, plan, prompt));
  }
  // What both kinds of step answer to n new tokens of each member, of all layers.
  void Run(const std::vector<int32_t>& n) {
    std::vector<StepMember> cpu, gpu;
    std::vector<float> k, v;
    views_.clear();
    for (size_t i = 0; i < n.size(); ++i) {
      views_.push_back(members_[i]->View(n[i]));
      cpu.push_back({&members_[i]->on_cpu, views_.back(), n[i]});
      gpu.push_back({&members_[i]->on_gpu, members_[i]->gpu_view, n[i]});
    }
    Step host(cpu, **FindBackend("ref"), InlineExecutor());
    auto device = CudaStep::Begin(gpu, &workspace_, nullptr, {});
    ASSERT_TRUE(device.ok()) << device.status().ToString();
    for (int layer = 0; layer < g_.layers; ++layer) {
      ASSERT_NO_FATAL_FAILURE(Layer(host, **device, layer, n));
    }
    host.End();
    ASSERT_TRUE((*device)->End(nullptr).ok());
  }
  void Layer(Step& host, CudaStep& device, int layer, const std::vector<int32_t>& n) {
    const std::vector<BF16> k = Packed(in_.keys, g_.kv_heads, layer, n);
    const std::vector<BF16> v = Packed(in_.values, g_.kv_heads, layer, n);
    const std::vector<BF16> q = Packed(in_.queries, g_.query_heads, layer, n);
    const size_t size = q.size();
    std::vector<float> want(size, NAN), got(size, NAN);
    ASSERT_TRUE(host.Append(layer, RowsOf(k, g_.kv_heads), RowsOf(v, g_.kv_heads)).ok());
    ASSERT_TRUE(device.Append(layer, RowsOf(k, g_.kv_heads), RowsOf(v, g_.kv_heads)).ok());
    host.Attend(layer, RowsOf(q, g_.query_heads), OutOf(want), nullptr);
    const Status attended = device.Attend(layer, RowsOf(q, g_.query_heads), OutOf(got), nullptr);
    ASSERT_TRUE(attended.ok()) << attended.ToString();
    size_t row = 0;
    for (size_t i = 0; i < n.size(); ++i) {
      const int member = static_cast<int>(i);
      const size_t count = static_cast<size_t>(n[i] * g_.query_heads * g_.head_dim);
      for (size_t c = row; c < row + count; ++c) {
        ASSERT_NEAR(got[c], want[c], 1e-4) << "layer " << layer << " member " << i;
      }
      row += count;
      const auto selection = device.ReadSelection(member);
      ASSERT_TRUE(selection.ok());
      EXPECT_EQ(selection->full, host.selection(member).full);
      EXPECT_EQ(selection->runs, host.selection(member).runs);
      EXPECT_EQ(selection->fine.has_value(), host.selection(member).fine.has_value());
      coarse_ += selection->fine.has_value() ? 1 : 0;
      if (n[i] > 1) continue;  // read for each token
      const auto cost = device.ReadCost(member);
      ASSERT_TRUE(cost.ok()) << cost.status().ToString();
      EXPECT_EQ(cost->attend_bytes, host.cost(member).attend_bytes);
      EXPECT_GE(cost->rows + cost->coarse_rows,
                host.cost(member).rows + host.cost(member).coarse_rows);
    }
  }
  std::vector<BF16> Packed(const std::vector<float>& of, int32_t heads, int layer,
                           const std::vector<int32_t>& n) const {
    std::vector<BF16> rows;
    for (size_t i = 0; i < n.size(); ++i) {
      for (int32_t t = views_[i].tokens; t < views_[i].tokens + n[i]; ++t) {
        const float* const row = in_.Row(of, heads, t, layer, 0);
        for (int c = 0; c < heads * g_.head_dim; ++c) rows.push_back(FromFloat<BF16>(row[c]));
      }
    }
    return rows;
  }
  Rows RowsOf(const std::vector<BF16>& rows, int32_t heads) const {
    return {reinterpret_cast<const std::byte*>(rows.data()), heads * g_.row_bytes(), g_.row_bytes(),
            DType::kBF16};
  }
  MutableRows OutOf(std::vector<float>& rows) const {
    const int64_t row = g_.head_dim * int64_t{sizeof(float)};
    return {reinterpret_cast<std::byte*>(rows.data()), g_.query_heads * row, row, DType::kF32};
  }

  const Geometry g_ = Shape();
  const Inputs in_{g_, kTokens, kSeed};
  CudaWorkspace workspace_{testing::PlanesGpuOps(), g_};
  std::vector<std::unique_ptr<Member>> members_;
  std::vector<SequenceView> views_;
  int coarse_ = 0;  // layers that some member attended by plane 0
};

// Extents of eight groups and of one, none, and a member below min_tokens whose groups are sealed
// all the same; groups fill, and raw pages go.
TEST_F(CudaPlanesTest, AttendsAsAStepDoes) {
  Add(kPlan, 581);
  Add(kPlan, 250);
  Add(kPlan, 40);
  Add(kPlan, 350);
  Add(kLowerOnHost, 450);
  Add(kShare, 400);
  for (int i = 0; i < 8; ++i) {
    SCOPED_TRACE(i);
    ASSERT_NO_FATAL_FAILURE(Run({1, 1, 1, 1, 1, 1}));
    for (const auto& m : members_) {
      m->Skip(8);
      m->sequence.Settle();
    }
  }
  EXPECT_EQ(members_[0]->sequence.extents().size(), 3u) << "of 8, 1 and 1 groups";
  EXPECT_GE(coarse_, 2 * 7);
  EXPECT_EQ(members_[0]->on_gpu.on_gpu.hot_rows, nullptr);
  EXPECT_GE(members_[4]->on_gpu.on_gpu.hot_rows->table().groups, 8);
  EXPECT_EQ(members_[4]->on_gpu.Clone()->on_gpu.hot_rows, nullptr) << "a fork's";
  // A batch of another shape in between.
  members_.resize(2);
  ASSERT_NO_FATAL_FAILURE(Run({1, 1}));
}

// What stands for lower runs that are on their way is not looked for among those that come, nor
// kept, and no graph is stale because they have come.
TEST_F(CudaPlanesTest, UntilLowerRunsAreHereOthersStandForThem) {
  Add(kOpensOnUpper, 581);
  Add(kPlan, 350);
  Add(kOpensOnFourBits, 450);
  Add(kOpensOnUpperAndHost, 450);
  Add(kOpensOnUpper, 200);  // in full
  for (const auto& m : members_) {
    m->sequence.Settle();
    m->arriving = m->on_gpu.plan().planes.open_on_upper;
  }
  for (int i = 0; i < 2; ++i) ASSERT_NO_FATAL_FAILURE(Run({1, 1, 1, 1, 1}));
  EXPECT_GT(coarse_, 0);
  EXPECT_EQ(members_[3]->on_gpu.on_gpu.hot_rows, nullptr);
  const uint64_t generation = workspace_.generation();
  ASSERT_NO_FATAL_FAILURE(Run({1, 1, 1, 1, 3}));
  for (const size_t i : {3, 0, 2, 4}) {
    SCOPED_TRACE(i);
    members_[i]->arriving = false;
    ASSERT_NO_FATAL_FAILURE(Run({1, 1, 1, 1, 1}));
  }
  EXPECT_NE(members_[3]->on_gpu.on_gpu.hot_rows, nullptr);
  EXPECT_EQ(workspace_.generation(), generation);
}

// The last tokens of a prompt whose rows are in groups alone, several and one by one.
TEST_F(CudaPlanesTest, APromptGoesOnWithoutItsRawRows) {
  Add(kOpensOnUpper, 583);
  Add(kPlan, 460);
  Add(kOpensOnUpper, 333);
  for (const auto& m : members_) m->Reopen();
  members_[2]->arriving = true;
  EXPECT_EQ(members_[0]->View(1).pages[3], nullptr);
  ASSERT_NO_FATAL_FAILURE(Run({3, 5, 2}));
  for (int i = 0; i < 3; ++i) ASSERT_NO_FATAL_FAILURE(Run({1, 1, 1}));
  EXPECT_EQ(coarse_, 0);
  for (const auto& m : members_) {
    ASSERT_TRUE(m->on_cpu.ClosePrompt().ok());
    ASSERT_TRUE(m->on_gpu.ClosePrompt().ok());
  }
  members_[2]->arriving = false;
  ASSERT_NO_FATAL_FAILURE(Run({1, 1, 1}));
  EXPECT_GT(coarse_, 0);
}

TEST(MidCellRun, CountsAsPlaneZeroAloneButForHalfOfAStep) {
  for (const auto& [dim, tokens, keep] :
       {std::tuple{64, 64, 8}, {64, 16, 4}, {128, 64, 4}, {256, 64, 8}}) {
    SCOPED_TRACE(std::to_string(dim) + ", " + std::to_string(keep));
    const PlanesFormat f = {dim, tokens, keep};
    Bytes upper(static_cast<size_t>(f.upper_bytes()), std::byte{0x3C});  // finite steps
    const Bytes lower = MidCellRun(f);
    ASSERT_EQ(lower.size(), static_cast<size_t>(f.lower_bytes()));
    for (const PlanesSide side : {PlanesSide::kKeys, PlanesSide::kValues}) {
      for (int32_t t = 0; t < tokens; ++t) {
        std::vector<double> off;
        for (int32_t c = 0; c < dim; ++c) {
          const auto at = [&](int planes) {
            return NumberAt<double>(f, upper.data(), lower.data(), planes, {side, t, c});
          };
          off.push_back(at(f.planes()) - at(1));
        }
        F16 step;
        std::memcpy(&step, upper.data() + StepOffset(f, {side, t, 0}), 2);
        const double half = ToFloat(step) * (keep == 8 ? 0.5 : 8);
        for (const double x : off) ASSERT_DOUBLE_EQ(std::abs(x), half);
        RotateHadamard(off.data(), dim);
        for (const double x : off) ASSERT_LE(std::abs(x), 1.5 * half) << "rotated back";
      }
    }
  }
}

// Several new tokens attend everything by all planes: as under a plan that does.
TEST_F(CudaPlanesTest, SeveralNewTokensAttendInFull) {
  Add("strata{recent = 4096, min_tokens = 0}", 300);
  members_[0]->sequence.Settle();
  ASSERT_NO_FATAL_FAILURE(Run({7}));
  // The GPU's half of another plan answers the same.
  Member other(g_, in_, kPlan, 300);
  other.sequence.Settle();
  SequenceView view = other.View(7);
  Member& full = *members_[0];
  full.on_cpu.Truncate(300);
  full.on_gpu.Truncate(300);
  views_ = {full.View(7)};
  Step host({{&full.on_cpu, views_[0], 7}}, **FindBackend("ref"), InlineExecutor());
  auto device = CudaStep::Begin({{&other.on_gpu, view, 7}}, &workspace_, nullptr, {});
  ASSERT_TRUE(device.ok()) << device.status().ToString();
  const std::vector<BF16> k = Packed(in_.keys, g_.kv_heads, 1, {7});
  const std::vector<BF16> v = Packed(in_.values, g_.kv_heads, 1, {7});
  const std::vector<BF16> q = Packed(in_.queries, g_.query_heads, 1, {7});
  std::vector<float> want(q.size(), NAN), got(q.size(), NAN);
  ASSERT_TRUE(host.Append(1, RowsOf(k, g_.kv_heads), RowsOf(v, g_.kv_heads)).ok());
  ASSERT_TRUE((*device)->Append(1, RowsOf(k, g_.kv_heads), RowsOf(v, g_.kv_heads)).ok());
  host.Attend(1, RowsOf(q, g_.query_heads), OutOf(want), nullptr);
  ASSERT_TRUE((*device)->Attend(1, RowsOf(q, g_.query_heads), OutOf(got), nullptr).ok());
  for (size_t c = 0; c < got.size(); ++c) ASSERT_NEAR(got[c], want[c], 1e-4) << c;
}

TEST_F(CudaPlanesTest, RefusesExtentsThatItCannotRead) {
  Add(kPlan, 350);
  Member& m = *members_[0];
  m.sequence.Settle();
  const auto begin = [&] {
    const SequenceView view = m.View(1);
    return CudaStep::Begin({{&m.on_gpu, view, 1}}, &workspace_, nullptr, {}).status();
  };
  EXPECT_TRUE(begin().ok());
  // As groups of four bits they can be parsed, and are not the plan's.
  for (Bytes& extent : m.sequence.mutable_extents()) extent[68] ^= std::byte{8 ^ 4};
  const Status refused = begin();
  EXPECT_EQ(refused.reason(), "EXTENT_INVALID") << refused.ToString();
}

}  // namespace
}  // namespace kvstrata
