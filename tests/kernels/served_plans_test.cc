// What CudaStep serves, asked without a GPU: each refusal names the key and what is served.
#include "gmock/gmock.h"
#include "kernels/step/cuda_step.h"

namespace kvstrata {
namespace {

using testing::HasSubstr;

Geometry Llama() {
  return {.layers = 2, .query_heads = 32, .kv_heads = 8, .head_dim = 128, .dtype = DType::kBF16};
}

Status Serves(const char* plan, const Geometry& g = Llama()) {
  return CudaServes(ParsePlan(plan).value(), g);
}

TEST(CudaServes, PlansOfAllPresets) {
  for (const char* plan :
       {"full", "window", "quest", "quest{page = 64, n_dense_layers = 2}",
        "quest{group = \"softmax\"}", "strata", "strata{n_sink = 0}", "chess",
        "chess{page = 64, rho = [0.9, 0.9, 0.9], trigger = \"always\"}", "tokenselect",
        "tokenselect{theta = 1, append_departed = true, cosine = \"head\"}", "mosaickv",
        "mosaickv{share = 0.0625, keep = 16, neighbours = 2, block = 16, truncate = false}",
        "full{codec = \"packed\"}", "sentencekv", "sentencekv{pool = 1, n_dense_layers = 2}",
        "sekv", "sekv{rows = 0, n_dense_layers = 2}"}) {
    EXPECT_TRUE(Serves(plan).ok()) << Serves(plan).ToString();
  }
}

TEST(CudaServes, NamesTheKeyThatItDoesNotServe) {
  for (const auto& [plan, key] :
       {std::pair{"chess{cascade = \"literal\"}", "cascade = \"literal\""},
        {"chess{centred = true}", "centred = true"},
        {"chess{rest = \"mean\"}", "rest = \"mean\""},
        {"chess{page = 48}", "page = 48"},
        {"tokenselect{max_pool = 3}", "max_pool = 3"},
        {"tokenselect{scale = false}", "scale = false"},
        {"tokenselect{codec = \"packed\"}", "codec = \"packed\""},
        {"sentencekv{keep_rest = true}", "keep_rest = true"},
        {"sentencekv{per_query_head = true}", "per_query_head = true"},
        {"sentencekv{codec = \"lowrank\"}", "codec = \"lowrank\""},
        {"mosaickv{strategy = \"search\"}", "strategy = \"search\""},
        {"mosaickv{group = \"softmax\"}", "group = \"softmax\""},
        {"mosaickv{codec = \"raw\"}", "codec = \"raw\""},
        {"quest{rest = \"mean\"}", "rest = \"mean\""},
        {"quest{codec = \"packed\"}", "codec = \"packed\" under selector \"minmax\""},
        {"window{codec = \"packed\"}", "codec = \"packed\" under selector \"window\""},
        {"quest{page = 24}", "page = 24"}}) {
    const Status status = Serves(plan);
    EXPECT_EQ(status.code(), Code::kUnimplemented) << plan;
    EXPECT_EQ(status.reason(), "CUDA_PLAN") << plan;
    EXPECT_THAT(status.message(), HasSubstr(key));
    EXPECT_THAT(status.message(), HasSubstr("tokenselect")) << "what is served";
  }
}

TEST(CudaServes, NamesWhatOfAModelItDoesNotServe) {
  const auto refused = [](Geometry g, const char* what) {
    EXPECT_EQ(Serves("full", g).reason(), "CUDA_MODEL") << what;
    EXPECT_THAT(Serves("full", g).message(), HasSubstr(what));
  };
  Geometry g = Llama();
  g.dtype = DType::kF32;
  refused(g, "f32");
  g = Llama();
  g.kv_heads = 2;
  refused(g, "16 query heads");
  g = Llama();
  g.rotary.dim = 128;
  refused(g, "before rotary embedding");
}

}  // namespace
}  // namespace kvstrata
