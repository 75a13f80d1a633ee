// SPDX-License-Identifier: Apache-2.0
// What the suites of planes share: formats, groups of random rows packed by ref, and the part of a
// test vector (tests/golden/README.md) that is about planes.
#pragma once

#include "kernels/ops/attend_planes/attend_planes.h"
#include "kernels/ops/pack_planes/pack_planes.h"
#include "tests/kernels/golden_bits.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata {

inline std::vector<PlanesFormat> PlanesFormats() {
  std::vector<PlanesFormat> formats;
  for (int dim : kDims) {
    for (int tokens : {16, 48, 64}) {
      for (int keep : {8, 4}) formats.push_back({dim, tokens, keep});
    }
  }
  return formats;
}

inline std::string NameOf(const PlanesFormat& f) {
  return "dim " + std::to_string(f.dim) + " tokens " + std::to_string(f.tokens) + " keep " +
         std::to_string(f.keep);
}

// A group's two runs of bytes, with poison around and before what an op writes.
struct PlanesGroup {
  static constexpr std::byte kPoison{0xA5};
  static constexpr size_t kGuard = 64;

  PlanesFormat format;
  std::vector<std::byte> upper, lower;

  explicit PlanesGroup(const PlanesFormat& f)
      : format(f),
        upper(static_cast<size_t>(f.upper_bytes()) + 2 * kGuard, kPoison),
        lower(static_cast<size_t>(f.lower_bytes()) + 2 * kGuard, kPoison) {}
  PlanesGroup(const PagedFixture& keys, const PagedFixture& values, int begin,
              const PlanesFormat& f)
      : PlanesGroup(keys.rows, values.rows, begin, f) {}
  PlanesGroup(const PagedRows& keys, const PagedRows& values, int begin, const PlanesFormat& f)
      : PlanesGroup(f) {
    const PackPlanesWork work{keys, values, begin, f, Upper(), Lower()};
    PackPlanesRef(&work, 1, InlineExecutor());
    for (const auto* bytes : {&upper, &lower}) {
      for (size_t i = 0; i < kGuard; ++i) {
        EXPECT_EQ((*bytes)[i], kPoison);
        EXPECT_EQ((*bytes)[bytes->size() - 1 - i], kPoison);
      }
    }
  }
  std::byte* Upper() { return upper.data() + kGuard; }
  std::byte* Lower() { return lower.data() + kGuard; }

  // Rows [tokens][dim] of keys, then of values.
  std::pair<std::vector<float>, std::vector<float>> Unpacked() {
    const size_t size = static_cast<size_t>(format.tokens) * static_cast<size_t>(format.dim);
    std::vector<float> keys(size, kNaN), values(size, kNaN);
    const UnpackPlanesWork work{format, Upper(), Lower(), keys.data(), values.data()};
    UnpackPlanesRef(&work, 1, InlineExecutor());
    return {keys, values};
  }
};

// The groups of a sequence's tokens [0, groups * format.tokens).
struct PlanesFixture {
  std::vector<PlanesGroup> groups;
  std::vector<const std::byte*> upper, lower;

  PlanesFixture(const PagedRows& keys, const PagedRows& values, const PlanesFormat& f, int count) {
    for (int g = 0; g < count; ++g) groups.emplace_back(keys, values, g * f.tokens, f);
    for (PlanesGroup& group : groups) {
      upper.push_back(group.Upper());
      lower.push_back(group.Lower());
    }
    rows = {f, upper.data(), lower.data(), count};
  }
  PlanesFixture(const PlanesFixture&) = delete;

  PlanesRows rows;
};

// Options of `planes`, `planes_above` or `planes_runs` in a vector's parameters.
struct GoldenPlanes {
  PlanesFormat format;
  PlanesRule rule;

  static GoldenPlanes Of(const GoldenArrays& golden, const std::string& plan) {
    const std::string& params = golden.Get("params", "|u1").data;
    const size_t at = params.find("\"" + plan + "\": {");
    const std::string mine = params.substr(at, params.find('}', at) - at);
    const auto option = [&mine](const std::string& name) {
      const std::string text = mine.substr(mine.find("\"" + name + "\": ") + name.size() + 4);
      return text.starts_with("null") ? 0 : std::stod(text);
    };
    const auto whole = [&](const std::string& name) { return static_cast<int32_t>(option(name)); };
    const auto dim = static_cast<int32_t>(golden.Get("keys_bf16", "<u2").shape[3]);
    return {{dim, whole("unit"), whole("keep")},
            {option("share"), option("fine_above"), option("skip_below"), whole("run"),
             whole("sample"), whole("n_sink"), whole("n_recent")}};
  }
};

inline constexpr int kGoldenPlanes[] = {10, 11, 12};  // seeds of the cases
inline GoldenArrays GoldenPlanesCase(int seed) {
  return GoldenArrays(KVS_GOLDEN "/case_0" + std::to_string(seed) + ".npz");
}

}  // namespace kvstrata
