// SPDX-License-Identifier: Apache-2.0
// Codec lowrank against docs/spec/sekv.md, and its file of parameters.
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "kernels/plans/sekv/lowrank_recompressor.h"
#include "kernels/plans/sekv/ops/span_ops.h"
#include "kernels/plans/sekv/span_factors.h"
#include "kernels/plans/sekv/span_gates.h"
#include "tests/kernels/codec_fixture.h"

namespace kvstrata {
namespace {

constexpr uint64_t kSeed = 79;
using Ints = std::vector<int32_t>;
using Tokens = Run;  // testing::Test has a Run of its own
using Runs = std::vector<Run>;

Geometry SmallGeometry() { return {.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64}; }

std::vector<float> SomeSurprisal(int32_t n) {
  std::mt19937_64 random(kSeed);
  std::exponential_distribution<float> nats(1.0f);
  std::vector<float> surprisal(static_cast<size_t>(n));
  for (float& x : surprisal) x = nats(random);
  return surprisal;
}

std::unique_ptr<SpanStorage> Parsed(CodecSequence& s) {
  auto storage = SpanStorage::Parse(s.View(), s.geometry());
  EXPECT_TRUE(storage.ok()) << storage.status().ToString();
  return storage.ok() ? std::move(*storage) : nullptr;
}

template <typename T>
std::vector<T> Inspected(CodecSequence& s, const std::string& name) {
  const auto storage = Parsed(s);
  const auto array = InspectSpans(s.Context(storage.get()), name);
  EXPECT_TRUE(array.ok()) << array.status().ToString();
  std::vector<T> values(array->bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), array->bytes.data(), array->bytes.size());
  return values;
}

// Rows of every 40 tokens lie in 3 directions of their own.
void MakeLocal(Inputs* in) {
  std::mt19937_64 random(kSeed);
  std::normal_distribution<float> normal;
  const int32_t dim = in->g.head_dim;
  const int64_t heads = int64_t{in->g.layers} * in->g.kv_heads;
  for (std::vector<float>* rows : {&in->keys, &in->values}) {
    std::vector<float> basis(static_cast<size_t>(heads * 3 * dim));
    for (int64_t row = 0; row < in->n * heads; ++row) {
      if (row % (40 * heads) == 0) {
        for (float& x : basis) x = normal(random);
      }
      float* x = rows->data() + row * dim;
      std::fill(x, x + dim, 0.0f);
      for (int64_t j = 0; j < 3; ++j) {
        const float weight = normal(random) * 0.5f;
        const float* b = basis.data() + (row % heads * 3 + j) * dim;
        for (int32_t c = 0; c < dim; ++c) x[c] += weight * b[c];
      }
    }
  }
}

// Anchors every 40 tokens.
std::vector<float> EveryForty(int32_t n) {
  std::vector<float> surprisal(static_cast<size_t>(n), 0.1f);
  for (int32_t t = 39; t < n; t += 40) surprisal[static_cast<size_t>(t)] = 9;
  return surprisal;
}

std::unique_ptr<CodecSequence> Settled(const Plan& plan, const Inputs& in, int32_t prompt,
                                       std::vector<float> surprisal,
                                       const std::string& backend = "ref") {
  auto s = std::make_unique<CodecSequence>(plan, in.g, in, nullptr, backend);
  s->Commit(prompt);
  s->PrefillDone();
  s->Report(std::move(surprisal));
  s->Commit(in.n);
  s->Settle();
  return s;
}

TEST(SpanCodec, AttentionEqualsRawWhereNothingIsLost) {
  for (const std::string& backend : BackendNames()) {
    Inputs in(SmallGeometry(), 330, kSeed);
    in.g.dtype = DType::kF32;
    MakeLocal(&in);
    const auto s = Settled(SpanPlan(), in, 311, EveryForty(311), backend);
    const auto storage = Parsed(*s);
    ASSERT_EQ(storage->end(), 279);
    EXPECT_THAT(Inspected<int32_t>(*s, "k_rank"), ::testing::Each(8));
    for (int layer = 0; layer < 2; ++layer) {
      for (int h = 0; h < in.g.query_heads; ++h) {
        const float* q = in.Query(5, layer, h);
        Attention got(64), want(64);
        AttendStored(*storage, in.g, s->backend(), q, layer, h, &got);
        AttendInputs(in, q, layer, h / 2, {storage->end(), in.n}, &got);
        AttendInputs(in, q, layer, h / 2, {0, in.n}, &want);
        EXPECT_LT(ErrorOf(got.Output(), want.Output()), 1e-2) << backend;
      }
    }
  }
}

TEST(SpanCodec, CoarseRowsAreMeansWeightedBySurprisal) {
  const Inputs in(SmallGeometry(), 200, kSeed);
  const std::vector<float> surprisal = SomeSurprisal(200);
  const auto s = Settled(SpanPlan(), in, 200, surprisal);
  const auto storage = Parsed(*s);
  ASSERT_GE(storage->spans().size(), 2u);
  for (size_t i = 0; i < storage->spans().size(); ++i) {
    const Tokens span = storage->spans()[i];
    double sum = 0;
    for (int32_t t = span.begin; t < span.end; ++t) sum += surprisal[static_cast<size_t>(t)];
    const auto row = storage->KeyMeans(0, 1, 1).Row(static_cast<int32_t>(i));
    for (int c = 0; c < 64; ++c) {
      double mean = 0;
      for (int32_t t = span.begin; t < span.end; ++t) {
        mean += surprisal[static_cast<size_t>(t)] / sum * in.Key(t, 1, 1)[c];
      }
      const float got = ToFloat(reinterpret_cast<const BF16*>(row)[c]);
      EXPECT_NEAR(got, mean, std::abs(mean) / 128 + 1e-6);
    }
    EXPECT_NEAR(storage->log_length()[i], std::log(span.end - span.begin), 1e-6);
  }
}

TEST(SpanCodec, RawRowsAreTheModelsOwn) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    Inputs in(SmallGeometry(), 200, kSeed);
    in.g.dtype = dtype;
    const auto s = Settled(SpanPlan(), in, 200, SomeSurprisal(200));
    const auto storage = Parsed(*s);
    const SpanStorage::Part& part = storage->parts()[0];
    ASSERT_GT(part.raw_count, 1);
    const PagedRows keys = storage->RawKeys(0, 1, 0), values = storage->RawValues(0, 1, 1);
    for (int32_t i = 0; i < part.raw_count; ++i) {
      const int32_t t = part.raw_positions[i];
      float k = 0, v = 0;
      if (dtype == DType::kF32) {
        std::memcpy(&k, keys.Row(i) + 4 * 7, 4), std::memcpy(&v, values.Row(i) + 4 * 7, 4);
      } else if (dtype == DType::kF16) {
        k = ToFloat(reinterpret_cast<const F16*>(keys.Row(i))[7]);
        v = ToFloat(reinterpret_cast<const F16*>(values.Row(i))[7]);
      } else {
        k = ToFloat(reinterpret_cast<const BF16*>(keys.Row(i))[7]);
        v = ToFloat(reinterpret_cast<const BF16*>(values.Row(i))[7]);
      }
      EXPECT_NEAR(k, in.Key(t, 1, 0)[7], 2e-3 * std::abs(k));
      EXPECT_NEAR(v, in.Value(t, 1, 1)[7], 2e-3 * std::abs(v));
    }
  }
}

TEST(SpanCodec, PositionsAreSpansOrRaw) {
  const Inputs in(SmallGeometry(), 210, kSeed);
  const auto s = Settled(SpanPlan(), in, 200, SomeSurprisal(200));
  Ints all = Inspected<int32_t>(*s, "raw");
  const auto storage = Parsed(*s);
  for (const Tokens& span : storage->spans()) {
    EXPECT_GE(span.end - span.begin, 4);
    for (int32_t t = span.begin; t < span.end; ++t) all.push_back(t);
  }
  std::ranges::sort(all);
  Ints want(200);
  for (int32_t t = 0; t < 200; ++t) want[static_cast<size_t>(t)] = t;
  EXPECT_EQ(all, want);
  EXPECT_EQ(storage->raw_rows() + 32, static_cast<int>(Inspected<int32_t>(*s, "raw").size()));
}

TEST(SpanCodec, AllAnchorsAndNoAnchors) {
  const Inputs in(SmallGeometry(), 120, kSeed);
  Plan plan = SpanPlan();
  const auto flat = Settled(plan, in, 120, std::vector<float>(120, 2.0f));
  // H_0 = 0 differs from the others, so nothing is above mean + 2 deviations.
  EXPECT_EQ(Inspected<int32_t>(*flat, "spans"), (Ints{1, 88}));
  EXPECT_EQ(Inspected<int32_t>(*flat, "anchors"), Ints{0});
  plan.lowrank.alpha = -100;
  const auto dense = Settled(plan, in, 120, SomeSurprisal(120));
  EXPECT_TRUE(Parsed(*dense)->spans().empty());
  EXPECT_EQ(Parsed(*dense)->raw_rows(), 88);
  EXPECT_EQ(Inspected<int32_t>(*dense, "anchors").size(), 120u);
  EXPECT_TRUE(Inspected<float>(*dense, "k_longest").empty());
}

TEST(SpanCodec, WaitsForItsInputs) {
  const Inputs in(SmallGeometry(), 200, kSeed);
  Plan plan = SpanPlan();
  CodecSequence s(plan, in.g, in);
  s.Commit(200);
  s.PrefillDone();
  EXPECT_FALSE(s.recompressor().Due(s.Input())) << "no surprisal";
  std::vector<float> surprisal = SomeSurprisal(200);
  s.Report(std::vector<float>(surprisal.begin(), surprisal.end() - 1));
  EXPECT_FALSE(s.recompressor().Due(s.Input())) << "one is missing";
  surprisal[150] = NAN;
  s.Report(surprisal);
  EXPECT_FALSE(s.recompressor().Due(s.Input())) << "a gap";
  surprisal[150] = 1;
  surprisal[0] = NAN;
  s.Report(surprisal);
  EXPECT_TRUE(s.recompressor().Due(s.Input())) << "H_0 is 0 by definition";
  plan.zoom.rows = 500;
  CodecSequence budgeted(plan, in.g, in);
  budgeted.Commit(200);
  budgeted.PrefillDone();
  budgeted.Report(surprisal);
  EXPECT_FALSE(budgeted.recompressor().Due(budgeted.Input())) << "the budget holds all";
  plan.zoom.rows = 200;
  CodecSequence exceeded(plan, in.g, in);
  exceeded.Commit(200);
  exceeded.PrefillDone();
  exceeded.Report(surprisal);
  EXPECT_TRUE(exceeded.recompressor().Due(exceeded.Input())) << "N = 201";
}

TEST(SpanCodec, FactorsGoWhereThePlanSays) {
  const Inputs in(SmallGeometry(), 120, kSeed);
  for (const Tier tier : {Tier::kHost, Tier::kDevice}) {
    Plan plan = SpanPlan();
    plan.lowrank.factors = tier;
    CodecSequence s(plan, in.g, in);
    s.Commit(120);
    s.PrefillDone();
    s.Report(SomeSurprisal(120));
    const auto output = s.recompressor().Run(s.Input());
    ASSERT_TRUE(output.ok()) << output.status().ToString();
    ASSERT_EQ(output->extents.size(), 3u);
    EXPECT_EQ(output->extents[0].tier, Tier::kDevice);
    EXPECT_EQ(output->extents[1].tier, tier);
    EXPECT_EQ(output->extents[2].tier, Tier::kDevice);
  }
}

TEST(SpanCodec, LongPromptsAreSeveralParts) {
  const Inputs in(SmallGeometry(), 700, kSeed);
  const auto run = [&](int64_t bytes) {
    auto s = std::make_unique<CodecSequence>(SpanPlan(), in.g, in);
    const auto recompressor = NewSpanRecompressor(
        SpanPlan(), in.g, std::make_shared<SpanParameters>(SomeParameters(in.g, SpanPlan())),
        bytes);
    s->UseCloneOf(*recompressor);
    s->keep_pages = true;
    s->Commit(700);
    s->PrefillDone();
    s->Report(SomeSurprisal(700));
    s->Settle();
    return s;
  };
  const auto whole = run(int64_t{1} << 40), split = run(50000);
  EXPECT_EQ(Parsed(*whole)->parts().size(), 1u);
  EXPECT_GT(Parsed(*split)->parts().size(), 8u);
  for (const std::string name : {"anchors", "raw", "spans", "k_mean", "v_mean", "k_rank", "v_rank",
                                 "k_longest", "v_longest"}) {
    EXPECT_EQ(Inspected<uint32_t>(*split, name), Inspected<uint32_t>(*whole, name)) << name;
  }
  EXPECT_EQ(split->released(), whole->released());
  EXPECT_NE(Parsed(*split)->id(), 0u);
  EXPECT_NE(Parsed(*split)->id(), Parsed(*split)->id()) << "a GPU's tables are told apart by it";
  // Norms of a later part are of the first part's routers.
  const auto storage = Parsed(*split);
  const float* w = storage->Router(1, 3);
  const float* mean_norm = storage->InverseNorms(2, 1, 3);
  const auto* mean = reinterpret_cast<const BF16*>(storage->KeyMeans(2, 1, 1).Row(0));
  double squares = 0;
  for (int i = 0; i < storage->d_route(); ++i) {
    double dot = 0;
    for (int c = 0; c < 64; ++c) dot += double{w[i * 64 + c]} * double{ToFloat(mean[c])};
    squares += dot * dot;
  }
  EXPECT_NEAR(mean_norm[0] * std::sqrt(squares), 1, 1e-5);
}

TEST(SpanCodec, WithoutParametersThereIsNoRouter) {
  const Inputs in(SmallGeometry(), 200, kSeed);
  const auto s = Settled(SpanPlan(), in, 200, SomeSurprisal(200));
  const auto storage = Parsed(*s);
  EXPECT_FALSE(storage->trained());
  EXPECT_EQ(storage->d_route(), 0);
  EXPECT_EQ(storage->AddressesOf(0).routers, 0);
  EXPECT_EQ(storage->Threshold(1, 3), 0);
}

// --- gates and parameters ---

TEST(SpanGates, ComponentsBelowTheFloorGoButNeverTheFirst) {
  Inputs in(SmallGeometry(), 200, kSeed);
  MakeLocal(&in);
  const Plan plan = SpanPlan();
  auto parameters = std::make_shared<SpanParameters>(SomeParameters(in.g, plan));
  // sigmoid(-3) = 0.047, sigmoid(4) = 0.98
  parameters->bias[2].assign(8, -3.0f);
  parameters->bias[2][2] = 4.0f;
  CodecSequence s(plan, in.g, in, parameters);
  s.Commit(200);
  s.PrefillDone();
  s.Report(EveryForty(200));
  s.Settle();
  EXPECT_THAT(Inspected<int32_t>(s, "k_rank"), ::testing::Each(2));
  const auto storage = Parsed(s);
  EXPECT_TRUE(storage->trained());
  EXPECT_EQ(storage->Threshold(1, 2), 0.25f);
  EXPECT_EQ(std::memcmp(storage->Router(1, 2), parameters->w.data() + 6 * 16 * 64, 16 * 64 * 4), 0);
}

TEST(SpanGates, NetworkSeesSpectrumAndDirection) {
  const Plan plan = SpanPlan();
  const Geometry g = SmallGeometry();
  SpanParameters p = SomeParameters(g, plan);
  // Hidden 0 = GELU(s_2 / s_1), hidden 1 = GELU(k_0 / |k|); gate 0 adds what GELU makes of both.
  p.weight[0][0 * 72 + 1] = 1;
  p.weight[0][1 * 72 + 8] = 1;
  p.weight[1][0 * 64 + 0] = p.weight[1][0 * 64 + 1] = 1;
  p.weight[2][0] = 1;
  std::vector<BF16> mean(64, FromFloat<BF16>(0));
  mean[0] = FromFloat<BF16>(3);
  mean[1] = FromFloat<BF16>(-4);
  const std::vector<float> spectrum = {4, 2, 1};
  const auto gelu = [](double x) { return x * 0.5 * (1 + std::erf(x / std::sqrt(2.0))); };
  const double hidden = gelu(gelu(0.5) + gelu(0.6));
  const std::vector<double> gates = SpanGates(spectrum, mean, &p);
  ASSERT_EQ(gates.size(), 3u);
  EXPECT_NEAR(gates[0], 1 / (1 + std::exp(-hidden)), 1e-9);
  EXPECT_NEAR(gates[1], 0.5, 1e-9);
}

// Every component that SurelyKept counts is kept, of spectra of every shape.
TEST(SpanGates, SurelyKeptAreNeverDropped) {
  std::mt19937_64 random(kSeed);
  std::normal_distribution<float> normal;
  const Plan plan = SpanPlan();
  SpanParameters p = SomeParameters(SmallGeometry(), plan);
  int32_t counted = 0, dropped = 0;
  for (int round = 0; round < 60; ++round) {
    for (auto& layer : p.weight) {
      for (float& x : layer) x = 0.1f * normal(random);
    }
    for (float& x : p.bias[2]) x = 3 * normal(random);
    std::vector<BF16> mean(64);
    for (BF16& x : mean) x = FromFloat<BF16>(normal(random));
    for (int32_t rank = 1; rank <= 8; ++rank) {
      const int32_t kept = SurelyKept(rank, mean, &p);
      counted += kept;
      for (int32_t ones = 0; ones <= rank; ++ones) {
        std::vector<float> spectrum(static_cast<size_t>(rank));
        std::fill_n(spectrum.begin(), ones, 3.0f);
        const std::vector<double> gates = SpanGates(spectrum, mean, &p);
        const auto above =
            std::count_if(gates.begin() + 1, gates.end(), [](double g) { return g >= kGateFloor; });
        EXPECT_GE(1 + above, kept) << "round " << round << " rank " << rank << " ones " << ones;
        dropped += rank - 1 - static_cast<int32_t>(above);
      }
    }
  }
  EXPECT_GT(counted, 600);  // so it says something, and there is something to say it of
  EXPECT_GT(dropped, 600);
  EXPECT_EQ(SurelyKept(5, {}, nullptr), 5);
}

TEST(SpanGates, AComponentThatSomeSpectrumDropsIsNotSure) {
  const Plan plan = SpanPlan();
  SpanParameters p = SomeParameters(SmallGeometry(), plan);
  const std::vector<BF16> mean(64, FromFloat<BF16>(1));
  p.bias[2][1] = -1.5f;  // above the floor
  EXPECT_EQ(SurelyKept(3, mean, &p), 3);
  // The second gate goes with s_2 / s_1, which may be anything from 0 to 1.
  p.weight[0][1] = 5;
  p.weight[1][0] = 1;
  for (const float sign : {-1.0f, 1.0f}) {
    p.weight[2][64] = sign;
    p.bias[2][1] = sign < 0 ? -1.5f : -4.0f;
    EXPECT_EQ(SurelyKept(3, mean, &p), 2) << sign;
    const auto gate = [&](float second) {
      return SpanGates(std::vector{1.0f, second, 0.0f}, mean, &p)[1];
    };
    EXPECT_GE(gate(sign < 0 ? 0.0f : 1.0f), kGateFloor);
    EXPECT_LT(gate(sign < 0 ? 1.0f : 0.0f), kGateFloor);
  }
}

int decompositions = 0;

void CountedSvd(const SvdWork* work, int64_t n, Executor& executor) {
  decompositions += static_cast<int>(n);
  kSpanRef.svd(work, n, executor);
}

// Where gates stay open the factors of 20 tokens are no smaller than their rows: no need to look.
TEST(SpanGates, ShortSpansAreDecomposedOnlyWhereGatesMayClose) {
  Plan plan = SpanPlan();
  plan.lowrank.r_max = 32;
  const int32_t n = 20, dim = 64;
  std::mt19937_64 random(kSeed);
  std::normal_distribution<float> normal;
  std::vector<BF16> rows(static_cast<size_t>(n * dim));
  for (BF16& x : rows) x = FromFloat<BF16>(normal(random));
  std::byte* const page = reinterpret_cast<std::byte*>(rows.data());
  const PagedRows paged = {&page, 0, dim * 2, n, dim, DType::kBF16};
  const std::vector<float> surprisal(static_cast<size_t>(n), 1.0f);
  Backend counting = **FindBackend("ref");
  SpanOps ops = kSpanRef;
  ops.svd = CountedSvd;
  counting.lowrank = &ops;
  SpanParameters p = SomeParameters(SmallGeometry(), plan);
  for (const auto& [bias, rank, svds] : {std::tuple(6.0f, -1, 0), std::tuple(-6.0f, 1, 2)}) {
    p.bias[2].assign(32, bias);
    decompositions = 0;
    plan.stored.max_loss = 1;
    const SpanForm form = CompressSpan({paged, paged, {0, n}, surprisal}, plan, &p, counting);
    EXPECT_EQ(form.keys.rank, rank);
    EXPECT_EQ(form.values.rank, rank);
    EXPECT_EQ(decompositions, svds) << "bias " << bias;
  }
}

struct Tensor {
  std::string name;
  std::vector<int64_t> shape;
};

// A safetensors file of zeros but for each tensor's first value, its index.
std::string FileOf(const std::vector<Tensor>& tensors) {
  std::string header = "{", data;
  for (const Tensor& t : tensors) {
    size_t elements = 1;
    std::string shape;
    for (const int64_t n : t.shape) {
      elements *= static_cast<size_t>(n);
      shape += (shape.empty() ? "" : ",") + std::to_string(n);
    }
    const size_t begin = data.size();
    const float index = static_cast<float>(&t - tensors.data());
    data.append(reinterpret_cast<const char*>(&index), 4);
    data.resize(begin + 4 * elements);
    header += (header.size() > 1 ? "," : "") + ("\"" + t.name) +
              "\":{\"dtype\":\"F32\",\"shape\":[" + shape + "],\"data_offsets\":[" +
              std::to_string(begin) + "," + std::to_string(data.size()) + "]}";
  }
  header += "}";
  while (header.size() % 8 != 0) header += ' ';
  const uint64_t length = header.size();
  std::string file(reinterpret_cast<const char*>(&length), sizeof(length));
  return file + header + data;
}

Result<SpanParameters> Parse(const std::string& file, const Geometry& g, const Plan& plan) {
  return ParseSpanParameters(std::as_bytes(std::span(file)), "p", g, plan);
}

TEST(SpanParametersFile, ReadsEveryTensorOrNamesIt) {
  const Geometry g = SmallGeometry();
  const Plan plan = SpanPlan();
  const std::vector<Tensor> good = {{"W", {2, 4, 16, 64}},        {"tau", {2, 4}},
                                    {"g_phi.0.weight", {64, 72}}, {"g_phi.0.bias", {64}},
                                    {"g_phi.2.weight", {64, 64}}, {"g_phi.2.bias", {64}},
                                    {"g_phi.4.weight", {8, 64}},  {"g_phi.4.bias", {8}}};
  const auto loaded = Parse(FileOf(good), g, plan);
  ASSERT_TRUE(loaded.ok()) << loaded.status().ToString();
  EXPECT_EQ(loaded->w.size(), size_t{2 * 4 * 16 * 64});
  EXPECT_EQ(loaded->tau[0], 1);
  EXPECT_EQ(loaded->weight[1][0], 4);
  EXPECT_EQ(loaded->bias[2][0], 7);
  for (size_t i = 0; i < good.size(); ++i) {
    std::vector<Tensor> wrong = good;
    wrong[i].shape[0] += 1;
    const Status shape = Parse(FileOf(wrong), g, plan).status();
    EXPECT_EQ(shape.reason(), "PARAMETERS_INVALID");
    EXPECT_NE(shape.message().find("'" + good[i].name + "'"), std::string::npos);
    wrong = good;
    wrong.erase(wrong.begin() + static_cast<int64_t>(i));
    EXPECT_EQ(Parse(FileOf(wrong), g, plan).status().reason(), "PARAMETERS_INVALID");
  }
  EXPECT_EQ(Parse("{", g, plan).status().reason(), "PARAMETERS_INVALID");
  EXPECT_TRUE(loaded->norm.empty());
  std::vector<Tensor> more = good;
  more.push_back({"norm", {2, 4}});
  EXPECT_EQ(Parse(FileOf(more), g, plan)->norm.size(), 8u);
  more.back().shape = {2, 3};
  EXPECT_THAT(std::string(Parse(FileOf(more), g, plan).status().message()),
              ::testing::HasSubstr("'norm'"));
}

TEST(SpanParametersFile, HasDirectionsOfItsOwnWhereThePlanNamesNone) {
  const Geometry g = SmallGeometry();
  Plan plan = SpanPlan();
  std::vector<Tensor> file = {{"W", {2, 4, 48, 64}},        {"tau", {2, 4}},
                              {"g_phi.0.weight", {64, 72}}, {"g_phi.0.bias", {64}},
                              {"g_phi.2.weight", {64, 64}}, {"g_phi.2.bias", {64}},
                              {"g_phi.4.weight", {8, 64}},  {"g_phi.4.bias", {8}}};
  EXPECT_FALSE(Parse(FileOf(file), g, plan).ok()) << "the plan says 16";
  plan.lowrank.d_route = 0;
  EXPECT_EQ(Parse(FileOf(file), g, plan)->d_route, 48);
  file[0].shape[2] = 65;
  EXPECT_EQ(Parse(FileOf(file), g, plan).status().reason(), "PARAMETERS_INVALID");
}

TEST(SpanCodec, InspectionNamesWhatItHas) {
  const Inputs in(SmallGeometry(), 100, kSeed);
  CodecSequence s(SpanPlan(), in.g, in);
  EXPECT_EQ(InspectSpans(s.Context(nullptr), "spans").status().reason(), "NO_SPANS");
}

}  // namespace
}  // namespace kvstrata
