// SPDX-License-Identifier: Apache-2.0
// The trace reader against good, truncated, foreign and mutated files: an answer or a specific
// error, never a fault. Buffers end where the file ends, so that ASan sees a byte too many.
#include "client/cli/trace.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <random>

#include "tests/cli/trace_file.h"

namespace kvstrata::cli {
namespace {

Status Read(const Bytes64& bytes) {
  auto file = Safetensors::Parse(bytes, "trace");
  if (!file.ok()) return file.status();
  return Trace::FromFile(std::move(*file)).status();
}

TraceFile Good() { return SmallTrace(20, 3, 4, {0, 2}); }

void ExpectRefused(const TraceFile& file, const std::string& reason, const std::string& word) {
  const Status status = Read(file.File());
  EXPECT_EQ(status.reason(), reason) << status.ToString();
  EXPECT_NE(status.message().find(word), std::string::npos) << status.ToString();
}

TEST(Trace, ReadsWhatWasWritten) {
  const Bytes64 bytes = Good().File();
  auto file = Safetensors::Parse(bytes, "trace");
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  auto trace = Trace::FromFile(std::move(*file));
  ASSERT_TRUE(trace.ok()) << trace.status().ToString();
  EXPECT_EQ(trace->shape().prompt, 20);
  EXPECT_EQ(trace->shape().steps, 3);
  ASSERT_EQ(trace->layers().size(), 2u);
  EXPECT_EQ(trace->layers()[1].layer, 2);
  EXPECT_EQ(trace->tokens()[2], 14);
  EXPECT_EQ(trace->surprisal().size(), 20u);
  EXPECT_EQ(trace->entropy().size(), 3u);
  EXPECT_EQ(trace->boundary().size(), 23u);
  EXPECT_EQ(trace->Metadata("model"), "random");
  const float k = FromBf16(trace->layers()[0].k[0]);
  EXPECT_TRUE(std::isfinite(k) && k != 0);
}

TEST(Trace, SurprisalsMayGoOnOverTheSteps) {
  TraceFile trace_file = Good();
  std::vector<float> nats(23);
  for (size_t i = 0; i < nats.size(); ++i) nats[i] = static_cast<float>(i);
  trace_file.Hide("surprisal");
  trace_file.Add("padding", "U8", {1}, std::vector<uint8_t>(1));  // behind 23 bytes of boundaries
  trace_file.Add("surprisal", "F32", {23}, nats);
  const Bytes64 bytes = trace_file.File();
  auto file = Safetensors::Parse(bytes, "trace");
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  const auto trace = Trace::FromFile(std::move(*file));
  ASSERT_TRUE(trace.ok()) << trace.status().ToString();
  EXPECT_EQ(trace->surprisal(), std::vector<float>(nats.begin(), nats.begin() + 20));
  EXPECT_EQ(trace->step_surprisal(), (std::vector<float>{20, 21, 22}));
  EXPECT_TRUE(trace->Prefix(10).step_surprisal().empty());
}

TEST(Trace, TruncatedAtEveryByteIsAnError) {
  const Bytes64 whole = Good().File();
  ASSERT_TRUE(Read(whole).ok());
  for (size_t n = 0; n < whole.size(); ++n) {
    const Bytes64 part(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(n));
    const Status status = Read(part);
    ASSERT_EQ(status.reason(), "TRACE_TRUNCATED")
        << "cut at byte " << n << ": " << status.ToString();
  }
}

TEST(Trace, MutatedHeadersNeverFault) {
  constexpr uint32_t kSeed = 20261121;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937 random(kSeed);
  const Bytes64 whole = Good().File();
  uint64_t header = 0;
  std::memcpy(&header, whole.data(), 8);
  int refused = 0;
  for (int i = 0; i < 4000; ++i) {
    Bytes64 bytes = whole;
    for (int change = 0; change < 1 + i % 4; ++change) {
      bytes[random() % (8 + header)] = static_cast<std::byte>(random() % 256);
    }
    const Status status = Read(bytes);
    refused += !status.ok();
    ASSERT_TRUE(status.ok() || status.reason().starts_with("TRACE_")) << status.ToString();
  }
  EXPECT_GT(refused, 2000);
}

TEST(Trace, ForeignFiles) {
  const auto reason = [](const std::string& text) {
    Bytes64 bytes(text.size());
    std::memcpy(bytes.data(), text.data(), text.size());
    return Read(bytes).reason();
  };
  EXPECT_EQ(reason(std::string("GGUF\x03\0\0\0 and more than eight bytes", 33)), "TRACE_FOREIGN");
  EXPECT_EQ(reason("PK\x03\x04 a zip file, such as an npz"), "TRACE_FOREIGN");
  EXPECT_EQ(reason(std::string("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10)), "TRACE_FOREIGN");
  TraceFile other = Good();
  other.metadata["format"] = "pt";
  ExpectRefused(other, "TRACE_FOREIGN", "kvstrata-trace");
}

TEST(Trace, MetadataIsChecked) {
  const struct {
    const char *key, *value, *reason;
  } cases[] = {
      {"format_version", "2", "TRACE_VERSION"},   {"layers", "", "TRACE_METADATA"},
      {"layers", "-4", "TRACE_METADATA"},         {"kv_heads", "0", "TRACE_METADATA"},
      {"query_heads", "2x", "TRACE_METADATA"},    {"head_dim", "80", "TRACE_METADATA"},
      {"page_tokens", "48", "TRACE_METADATA"},    {"keys", "rotated", "TRACE_METADATA"},
      {"N0", "99999999999999", "TRACE_METADATA"}, {"tail", "21", "TRACE_METADATA"},
      {"trace_layers", "0,4", "TRACE_METADATA"},  {"trace_layers", "2,0", "TRACE_METADATA"},
      {"trace_layers", "0,,2", "TRACE_METADATA"}, {"kv_heads", "3", "TRACE_METADATA"}};
  for (const auto& c : cases) {
    TraceFile file = Good();
    file.metadata[c.key] = c.value;
    SCOPED_TRACE(std::string(c.key) + " = " + c.value);
    const bool group = std::string(c.key) == "kv_heads" && std::string(c.value) == "3";
    ExpectRefused(file, c.reason, group ? "query_heads" : c.key);
  }
}

TEST(Trace, KeysBeforeRotaryEmbeddingSayOfWhich) {
  TraceFile file = Good();
  file.metadata["rope_theta"] = "for people";  // ignored where keys are stored rotated
  EXPECT_TRUE(Read(file.File()).ok());
  file.metadata["keys"] = "pre_rope";
  ExpectRefused(file, "TRACE_METADATA", "rope_theta");
  file.metadata["rope_theta"] = "500000.0";
  ExpectRefused(file, "TRACE_METADATA", "rope_dim");
  for (const char* dim : {"0", "33", "66"}) {
    file.metadata["rope_dim"] = dim;
    ExpectRefused(file, "TRACE_METADATA", "rope_dim");
  }
  file.metadata["rope_dim"] = "32";
  file.metadata["rope_scaling"] = "yarn";
  ExpectRefused(file, "TRACE_METADATA", "rope_scaling");
  file.metadata["rope_scaling"] = "none";
  file.metadata["rope_interleaved"] = "2";
  ExpectRefused(file, "TRACE_METADATA", "rope_interleaved");
  file.metadata["rope_interleaved"] = "1";
  const Bytes64 bytes = file.File();
  auto parsed = Safetensors::Parse(bytes, "trace");
  const auto trace = Trace::FromFile(std::move(parsed).value());
  ASSERT_TRUE(trace.ok()) << trace.status().ToString();
  EXPECT_EQ(trace->shape().rotary.theta, 500000);
  EXPECT_EQ(trace->shape().rotary.dim, 32);
  EXPECT_TRUE(trace->shape().rotary.interleaved);
}

TEST(Trace, TensorsAreChecked) {
  TraceFile wrong_dtype = Good();
  wrong_dtype.header["k.0"]["dtype"] = "F16";
  ExpectRefused(wrong_dtype, "TRACE_TENSOR",
                "'k.0' is F16 [23, 1, 64]; it must be BF16 [23, 1, 64]");
  TraceFile wrong_shape = Good();
  wrong_shape.header["q.2"]["shape"] = {7, 1, 128};
  ExpectRefused(wrong_shape, "TRACE_TENSOR", "'q.2' is BF16 [7, 1, 128]");
  TraceFile missing = Good();
  missing.metadata["trace_layers"] = "0,1,2";
  ExpectRefused(missing, "TRACE_TENSOR", "'k.1' is missing");
  TraceFile series = Good();
  series.metadata["N0"] = "19";
  series.metadata["T"] = "4";
  ExpectRefused(series, "TRACE_TENSOR", "surprisal");
}

TEST(Trace, HeaderContradictions) {
  TraceFile size = Good();
  size.header["k.0"]["shape"] = {23, 1, 63};
  ExpectRefused(size, "TRACE_HEADER", "k.0");
  TraceFile reversed = Good();
  reversed.header["v.0"]["data_offsets"] = {100, 50};
  ExpectRefused(reversed, "TRACE_HEADER", "v.0");
  TraceFile huge = Good();
  huge.header["v.0"]["shape"] = {int64_t{1} << 40, int64_t{1} << 40, 2};
  ExpectRefused(huge, "TRACE_HEADER", "v.0");
  TraceFile overlap = Good();
  overlap.header["v.0"]["data_offsets"] = overlap.header["k.0"]["data_offsets"];
  ExpectRefused(overlap, "TRACE_HEADER", "overlap");
  TraceFile behind = Good();
  behind.data.resize(behind.data.size() + 1);
  ExpectRefused(behind, "TRACE_HEADER", "belong to none");
}

TEST(Trace, ValuesAreFinite) {
  TraceFile file = SmallTrace(20, 0, 0, {0});
  const auto begin = file.header["k.0"]["data_offsets"][0].get<size_t>();
  const uint16_t nan = 0x7FC0;
  std::memcpy(file.data.data() + begin + 64, &nan, 2);
  ExpectRefused(file, "TRACE_VALUE", "k.0");
  TraceFile series = SmallTrace(20, 0, 0, {0});
  const auto at = series.header["surprisal"]["data_offsets"][0].get<size_t>();
  const float negative = -0.5f;
  std::memcpy(series.data.data() + at + 8, &negative, 4);
  ExpectRefused(series, "TRACE_VALUE", "'surprisal'[2]");
}

TEST(Trace, SeriesMayBeAbsent) {
  TraceFile file = SmallTrace(20, 2, 4, {0});
  TraceFile bare;
  bare.metadata = file.metadata;
  std::vector<int32_t> tokens(22);
  bare.Add("tokens", "I32", {22}, tokens);
  bare.Add("k.0", "BF16", {22, 1, 64}, std::vector<uint16_t>(22 * 64));
  bare.Add("v.0", "BF16", {22, 1, 64}, std::vector<uint16_t>(22 * 64));
  bare.Add("q.0", "BF16", {6, 2, 64}, std::vector<uint16_t>(6 * 2 * 64));
  EXPECT_TRUE(Read(bare.File()).ok()) << Read(bare.File()).ToString();
}

TEST(Trace, PathsThatAreNoFile) {
  EXPECT_EQ(Trace::Open("/nonexistent/x.safetensors").status().code(), Code::kNotFound);
  const Status directory = Trace::Open("/tmp").status();
  EXPECT_EQ(directory.reason(), "TRACE_UNREADABLE");
  EXPECT_NE(directory.message().find("a directory"), std::string::npos);
}

TEST(Trace, OpenMapsAFile) {
  const std::string path = testing::TempDir() + "trace_test." + std::to_string(getpid());
  const Bytes64 bytes = Good().File();
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  const auto trace = Trace::Open(path);
  EXPECT_TRUE(trace.ok()) << trace.status().ToString();
  std::ofstream(path, std::ios::binary | std::ios::trunc);
  EXPECT_EQ(Trace::Open(path).status().reason(), "TRACE_TRUNCATED");
  unlink(path.c_str());
}

}  // namespace
}  // namespace kvstrata::cli
