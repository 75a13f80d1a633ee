// SPDX-License-Identifier: Apache-2.0
// What CudaStep serves, asked without a GPU: each refusal names the option, the op that is missing
// and what is served, and docs/plans.md lists them all.
#include <fstream>
#include <set>

#include "gmock/gmock.h"
#include "kernels/plan/plan_axes.h"
#include "kernels/plan/plan_options.h"
#include "kernels/step/gpu/cuda_step.h"

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
       {"full",
        "window",
        "quest",
        "quest{page = 64, n_dense_layers = 2}",
        "quest{group = \"softmax\"}",
        "quest{score = \"deviation\"}",
        "quest{page = 8, score = \"deviation\", group = \"softmax\"}",
        "quest{page = 32, n_sink = 4, group = \"softmax\"}",
        "chess",
        "chess{page = 64, rho = [0.9, 0.9, 0.9], trigger = \"always\"}",
        "tokenselect",
        "tokenselect{theta = 1, append_departed = true, cosine = \"head\"}",
        "mosaickv",
        "mosaickv{share = 0.0625, keep = 16, neighbours = 2, block = 16, truncate = false}",
        "full{codec = \"packed\"}",
        "sentencekv",
        "sentencekv{pool = 1, n_dense_layers = 2}",
        "sekv",
        "sekv{rows = 0, n_dense_layers = 2}",
        "bits",
        "bits{bits = 3, unit = 32, sinks = 0}",
        "bits{unit = 128, recent = 128}",
        "bits{run = 8}",
        "bits{max_missed = 0.01, run = 16}",
        "bits{max_missed = 0.01}",
        "strata",
        "strata{share = 0.05}",
        "strata{keep = 4, skip_below = 0, sample = 1, n_dense_layers = 2}"}) {
    EXPECT_TRUE(Serves(plan).ok()) << Serves(plan).ToString();
  }
}

TEST(CudaServes, NamesTheKeyThatItDoesNotServe) {
  for (const auto& [plan, key] :
       {std::pair{"chess{cascade = \"literal\"}", "cascade = \"literal\""},
        {"chess{centred = true}", "centred = true"},
        {"chess{lists = \"layer\"}", "lists = \"layer\""},
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
        {"bits{codec = \"packed\"}", "codec = \"packed\" under selector \"bits\""},
        {"strata{share = 0.05, run = 8}", "run = 8"},
        {"strata{unit = 128}", "unit = 128"},
        {"bits{unit = 48}", "unit = 48"},
        {"bits{unit = 128}", "recent = 64 below unit = 128"},
        {"window{codec = \"packed\"}", "codec = \"packed\" under selector \"window\""},
        {"quest{page = 24}", "page = 24"}}) {
    const Status status = Serves(plan);
    EXPECT_EQ(status.code(), Code::kUnimplemented) << plan;
    EXPECT_EQ(status.reason(), "CUDA_PLAN") << plan;
    EXPECT_THAT(status.message(), HasSubstr(key));
    EXPECT_THAT(status.message(), HasSubstr("tokenselect")) << "what is served";
    EXPECT_THAT(status.message(), HasSubstr("codec planes (strata)")) << "what is served";
  }
}

// The lines of the table under "## On a GPU".
std::set<std::string> Documented() {
  std::ifstream file(KVS_PLANS_DOCUMENT);
  std::set<std::string> lines;
  bool inside = false;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("## ")) inside = line == "## On a GPU";
    if (inside && line.starts_with("| `")) lines.insert(line);
  }
  return lines;
}

// "| selector | codec | option | op |" of a plan that is refused; "" where it is served.
std::string LineOf(const std::string& pair, std::string_view text) {
  const Status status = Serves(std::string(text).c_str());
  if (status.ok()) return "";
  EXPECT_EQ(status.code(), Code::kUnimplemented) << text;
  EXPECT_EQ(status.reason(), "CUDA_PLAN") << text;
  const std::string message(status.message());
  const std::string refused = " is not served on a GPU: ", missing = " is missing there";
  const size_t option = message.find(refused), op = option + refused.size();
  const size_t end = message.find(missing);
  EXPECT_TRUE(option != message.npos && end != message.npos && end > op) << message;
  if (option == message.npos || end == message.npos) return pair + "?";
  const bool whole = message.starts_with("codec = ");
  return pair + (whole ? "all" : "`" + message.substr(0, option) + "`") + " | " +
         message.substr(op, end - op) + " |";
}

// Values that some option or other takes, and that are not its default.
constexpr std::string_view kValues[] = {"true",
                                        "false",
                                        "2",
                                        "24",
                                        "48",
                                        "0",
                                        "1",
                                        "0.5",
                                        "[0.9, 0.9, 0.9]",
                                        "\"mean\"",
                                        "\"drop\"",
                                        "\"softmax\"",
                                        "\"max\"",
                                        "\"literal\"",
                                        "\"search\"",
                                        "\"fixed\"",
                                        "\"head\"",
                                        "\"flat\"",
                                        "\"every\"",
                                        "\"always\"",
                                        "\"or\"",
                                        "\"host\"",
                                        "\"device\"",
                                        "\"no\"",
                                        "\"upper\"",
                                        "8"};

// The lines of one pair: that it is not served at all; of each option the first value that is not;
// or that it is served.
void AddLinesOf(std::string_view selector, std::string_view codec, std::set<std::string>* lines) {
  const std::string axes =
      "selector = \"" + std::string(selector) + "\", codec = \"" + std::string(codec) + "\"";
  const Result<Plan> plan = ParsePlan("{" + axes + "}");
  if (!plan.ok()) {
    EXPECT_EQ(plan.status().reason(), "PLAN_COMBINATION") << axes;
    return;
  }
  const std::string pair = "| `" + std::string(selector) + "` | `" + std::string(codec) + "` | ";
  std::set<std::string> refused;
  if (const std::string line = LineOf(pair, "{" + axes + "}"); !line.empty()) {
    lines->insert(line);
    return;
  }
  for (const OptionTable* table : TablesOf(*plan)) {
    for (const PlanOption& option : table->rows) {
      for (const std::string_view value : kValues) {
        const std::string with =
            "{" + axes + ", " + std::string(option.name) + " = " + std::string(value);
        std::string text = with + "}";
        // What is refused beside raw pages, and without a share.
        for (const char* beside : {", keep_raw = \"no\"}", ", share = 0.5}"}) {
          if (!ParsePlan(text).ok()) text = with + beside;
        }
        if (option.name == "codec" || !ParsePlan(text).ok()) continue;
        const std::string line = LineOf(pair, text);
        if (line.empty()) continue;
        EXPECT_THAT(line, HasSubstr(std::string(option.name) + " = " + std::string(value)));
        refused.insert(line);
        break;
      }
    }
  }
  if (refused.empty()) refused.insert(pair + "| |");
  lines->insert(refused.begin(), refused.end());
}

TEST(CudaServes, EveryCombinationOrNamesTheOpThatIsMissingAsDocumented) {
  std::set<std::string> lines;
  for (const std::string_view selector : kSelectorAxis.known) {
    for (const std::string_view codec : kCodecAxis.known) AddLinesOf(selector, codec, &lines);
  }
  EXPECT_EQ(lines, Documented()) << "docs/plans.md, \"On a GPU\"";
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
