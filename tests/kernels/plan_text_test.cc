// SPDX-License-Identifier: Apache-2.0
// The text of plans: what it is byte for byte, and that an option's two words are one option.
#include <set>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/plan_options.h"

namespace kvstrata {
namespace {

std::string TextOf(const std::string& plan) {
  const Result<Plan> parsed = ParsePlan(plan);
  EXPECT_TRUE(parsed.ok()) << plan << ": " << parsed.status().ToString();
  return parsed.ok() ? FormatPlan(*parsed) : "";
}

struct Written {
  const char* plan;
  const char* text;
};

// Artefacts on disk and in memory are found by this text (docs/disk_format.md): where a byte of it
// changes, what was stored before is never found again.
constexpr Written kTexts[] = {
    {"full", "full{codec = \"raw\", tier = \"device\", min_tokens = 4096, n_dense_layers = 0}"},
    {"window",
     "window{codec = \"raw\", tier = \"device\", min_tokens = 4096, n_dense_layers = "
     "0, compact = false, n_sink = 4, n_recent = 2044}"},
    {"quest",
     "quest{codec = \"raw\", tier = \"device\", min_tokens = 4096, n_dense_layers = "
     "0, compact = false, n_sink = 0, n_recent = 1, page = 16, budget = 2048, group = "
     "\"max\", rest = \"drop\"}"},
    {"chess",
     "chess{codec = \"raw\", tier = \"device\", min_tokens = 4096, n_dense_layers = "
     "0, compact = false, page = 32, pages_per_chunk = 8, chunks_per_grid = 8, sinks "
     "= 1, window = 16, rho = [0.5, 0.2, 0.1], cascade = \"top\", trigger = "
     "\"entropy\", combine = \"and\", thresholds = [inf, inf], every = 10, centred = "
     "false, rest = \"drop\", tree = false}"},
    {"tokenselect",
     "tokenselect{codec = \"raw\", tier = \"device\", min_tokens = 4096, "
     "n_dense_layers = 0, compact = false, k = 2048, n_init = 128, n_local = 512, "
     "theta = 0.9, cosine = \"flat\", append_departed = false, max_pool = 1, scale = "
     "true, chunk = 512}"},
    {"sentencekv",
     "sentencekv{codec = \"raw\", tier = \"device\", min_tokens = 4096, "
     "n_dense_layers = 0, compact = false, tau = 1024, r = 2.0, n_obs = 32, start = "
     "32, recent = 32, pool = 7, max_length = 100, keep_rest = false, per_query_head "
     "= false}"},
    {"sekv",
     "sekv{codec = \"lowrank\", tier = \"device\", min_tokens = 4096, n_dense_layers "
     "= 0, rows = -1, rows_share = 0.25, alpha = 2.0, l_min = 4, r_max = 32, d_route "
     "= 0, local = 512, parameters = \"\", factors = \"host\", max_loss = 0.3, "
     "keep_raw = \"auto\"}"},
    {"mosaickv",
     "mosaickv{codec = \"packed\", tier = \"device\", min_tokens = 4096, "
     "n_dense_layers = 0, share = 0.1, group = \"max\", strategy = \"fixed\", keep = "
     "0, neighbours = 1, block = 8, truncate = true, segment = 65536, buffer = 32, "
     "closing = \"loss\", close_loss = 256.0, max_loss = 0.3, keep_raw = \"auto\"}"},
    {"bits",
     "bits{codec = \"raw\", tier = \"device\", min_tokens = 4096, n_dense_layers = 0, "
     "bits = 2, unit = 64, sinks = 4, recent = 64, budget = 2048}"},
    {"bits{max_missed = 0.01}",
     "bits{codec = \"raw\", tier = \"device\", min_tokens = 4096, n_dense_layers = 0, "
     "bits = 2, unit = 64, sinks = 4, recent = 64, max_missed = 0.01, budget = \"all\"}"},
    {"strata",
     "strata{codec = \"planes\", tier = \"device\", min_tokens = 4096, n_dense_layers = 0, "
     "fine_above = 8.0, skip_below = 2.0, sample = 16, sinks = 4, recent = 64, keep = 8, "
     "unit = 64, keep_raw = \"auto\"}"},
    {"strata{keep = 4, unit = 128, share = 0.05}",
     "strata{codec = \"planes\", tier = \"device\", min_tokens = 4096, n_dense_layers = 0, "
     "share = 0.05, skip_below = 2.0, run = 1, sample = 1, sinks = 4, recent = 64, keep = 4, "
     "unit = 128, keep_raw = \"auto\"}"},
    {"strata{lower = 'host', hot = 4}",
     "strata{codec = \"planes\", tier = \"device\", min_tokens = 4096, n_dense_layers = 0, "
     "fine_above = 8.0, skip_below = 2.0, sample = 16, sinks = 4, recent = 64, keep = 8, "
     "unit = 64, lower = \"host\", hot = 4, keep_raw = \"auto\"}"},
    {"bits{run = 8}",
     "bits{codec = \"raw\", tier = \"device\", min_tokens = 4096, n_dense_layers = 0, "
     "bits = 2, unit = 64, sinks = 4, recent = 64, run = 8, budget = 2048}"},
    {"quest{score = 'deviation'}",
     "quest{codec = \"raw\", tier = \"device\", min_tokens = 4096, n_dense_layers = "
     "0, compact = false, n_sink = 0, n_recent = 1, page = 16, budget = 2048, group = "
     "\"max\", score = \"deviation\", rest = \"drop\"}"},
    {"bits{budget = 512, max_missed = 0.01}",
     "bits{codec = \"raw\", tier = \"device\", min_tokens = 4096, n_dense_layers = 0, "
     "bits = 2, unit = 64, sinks = 4, recent = 64, max_missed = 0.01, budget = 512}"},
    {"{selector = 'full', codec = 'packed'}",
     "{segmenter = \"none\", selector = \"full\", codec = \"packed\", tier = "
     "\"device\", min_tokens = 4096, n_dense_layers = 0, strategy = \"fixed\", keep = "
     "0, neighbours = 1, block = 8, truncate = true, segment = 65536, buffer = 32, "
     "closing = \"loss\", close_loss = 256.0, max_loss = 0.3, keep_raw = \"auto\"}"},
    {"quest{codec = 'packed'}",
     "quest{codec = \"packed\", tier = \"device\", min_tokens = 4096, n_dense_layers "
     "= 0, n_sink = 0, n_recent = 1, page = 16, budget = 2048, group = \"max\", rest "
     "= \"drop\", strategy = \"fixed\", keep = 0, neighbours = 1, block = 8, truncate "
     "= true, segment = 65536, buffer = 32, closing = \"loss\", close_loss = 256.0, "
     "max_loss = 0.3, keep_raw = \"auto\"}"},
    {"sentencekv{codec = 'lowrank'}",
     "sentencekv{codec = \"lowrank\", tier = \"device\", min_tokens = 4096, "
     "n_dense_layers = 0, tau = 1024, max_length = 100, per_query_head = false, alpha "
     "= 2.0, l_min = 4, r_max = 32, d_route = 0, local = 512, parameters = \"\", "
     "factors = \"host\", max_loss = 0.3, keep_raw = \"auto\"}"},
    {"mosaickv{codec = 'raw'}",
     "mosaickv{codec = \"raw\", tier = \"device\", min_tokens = 4096, n_dense_layers "
     "= 0, compact = false, n_recent = 32, page = 16, share = 0.1, group = \"max\", "
     "rest = \"drop\"}"},
    {"mosaickv{strategy = 'search', closing = 'drift', max_loss = 1}",
     "mosaickv{codec = \"packed\", tier = \"device\", min_tokens = 4096, "
     "n_dense_layers = 0, share = 0.1, group = \"max\", strategy = \"search\", "
     "max_channel_loss = 0.05, max_block_loss = 0.5, truncate = true, segment = "
     "65536, buffer = 32, closing = \"drift\", drift = 1.5, min_segment = 4096, "
     "max_loss = 1.0, keep_raw = \"auto\"}"},
    {"quest{min_tokens = 'auto', batch = 8, rest = 'mean'}",
     "quest{codec = \"raw\", tier = \"device\", min_tokens = \"auto\", batch = 8, "
     "n_dense_layers = 0, compact = false, n_sink = 0, n_recent = 1, page = 16, "
     "budget = 2048, group = \"max\", rest = \"mean\"}"},
};

TEST(PlanText, IsWhatStoredArtefactsAreFoundBy) {
  for (const Written& w : kTexts) EXPECT_EQ(TextOf(w.plan), w.text) << w.plan;
}

struct Words {
  const char* native;
  const char* paper;
};

// One word for one thing, whatever the selector's paper calls it (docs/plans.md, "Words").
constexpr Words kWords[] = {
    {"window{sinks = 8, recent = 100}", "window{n_sink = 8, n_recent = 100}"},
    {"quest{sinks = 8, recent = 100, unit = 32, budget = 64}",
     "quest{n_sink = 8, n_recent = 100, page = 32, budget = 64}"},
    {"chess{unit = 16, sinks = 2, recent = 5}", "chess{page = 16, sinks = 2, window = 5}"},
    {"tokenselect{budget = 64, sinks = 8, recent = 100}",
     "tokenselect{k = 64, n_init = 8, n_local = 100}"},
    {"sentencekv{budget = 64, sinks = 8, recent = 100}",
     "sentencekv{tau = 64, start = 8, recent = 100}"},
    {"sentencekv{codec = 'lowrank', budget = 64}", "sentencekv{codec = 'lowrank', tau = 64}"},
    {"mosaickv{codec = 'raw', unit = 8, recent = 100}",
     "mosaickv{codec = 'raw', page = 8, n_recent = 100}"},
};

TEST(PlanText, BothWordsOfAnOptionAreOnePlanAndOneText) {
  for (const Words& w : kWords) {
    const Result<Plan> native = ParsePlan(w.native), paper = ParsePlan(w.paper);
    ASSERT_TRUE(native.ok()) << w.native << ": " << native.status().ToString();
    ASSERT_TRUE(paper.ok()) << w.paper << ": " << paper.status().ToString();
    EXPECT_EQ(*native, *paper) << w.native;
    EXPECT_EQ(FormatPlan(*native), FormatPlan(*paper)) << w.native;
    EXPECT_NE(FormatPlan(*native), TextOf(native->name)) << "nothing was set: " << w.native;
  }
}

TEST(PlanText, NoWordMeansTwoOptionsOfAPlan) {
  for (const Written& w : kTexts) {
    std::set<std::string_view> words;
    for (const OptionTable* table : TablesOf(*ParsePlan(w.plan))) {
      for (const PlanOption& o : table->rows) {
        EXPECT_TRUE(words.insert(o.name).second) << w.plan << ": " << o.name;
        if (o.native.empty()) continue;
        EXPECT_TRUE(words.insert(o.native).second) << w.plan << ": " << o.native;
      }
    }
  }
}

struct Segmented {
  const char* plan;
  const char* segmenter;
};

// The segmenter is what selector and codec need. Saying so changes nothing.
TEST(PlanText, NamesTheSegmenterThatFollows) {
  const Segmented plans[] = {{"selector = \"full\"", "none"},
                             {"selector = \"minmax\", codec = \"packed\"", "page"},
                             {"selector = \"cascade\"", "hierarchy"},
                             {"selector = \"bucket\", codec = \"raw\"", "sentence"},
                             {"selector = \"bucket\", codec = \"lowrank\"", "span"},
                             {"selector = \"block\", codec = \"packed\"", "loss"},
                             {"selector = \"block\", codec = \"raw\"", "page"},
                             {"selector = \"bits\"", "bits"}};
  for (const Segmented& p : plans) {
    const std::string named = "segmenter = \"" + std::string(p.segmenter) + "\", ";
    const std::string text = TextOf("{" + std::string(p.plan) + "}");
    EXPECT_THAT(text, ::testing::StartsWith("{" + named)) << p.plan;
    EXPECT_EQ(TextOf("{" + named + p.plan + "}"), text) << p.plan;
  }
}

}  // namespace
}  // namespace kvstrata
