// SPDX-License-Identifier: Apache-2.0
// The vectors that tests/reference/remote_format.py made, docs/remote_format.md's example among
// them: our keys, names and headers are those, and we read what it wrote.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/server/tier/remote_attacks.h"

namespace kvstrata::remote {
namespace {

std::string FromHex(std::string_view hex) {
  std::string bytes;
  for (size_t i = 0; i < hex.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16)));
  }
  return bytes;
}
struct Vector {
  explicit Vector(const nlohmann::json& json)
      : name(json["name"]),
        key(FromHex(std::string(json["key"]))),
        place(FromHex(std::string(json["place"]))),
        sizes(json["sizes"]),
        stripes(json["stripes"]),
        seal(json["seal"] == "gcm" ? Seal::kGcm : Seal::kNone),
        secret(RemoteSecret::Of(std::string(json["secret"])).value()),
        keys(secret.Keys(std::string(json["tenant"]), seal)),
        format(secret, std::string(json["tenant"]), {seal}),
        written(At(json["written"])) {
    uint64_t start = 0;
    for (const uint64_t size : sizes) {
      std::vector<std::byte>& buffer = buffers.emplace_back(size);
      for (uint64_t i = 0; i < size; ++i) {
        buffer[i] = static_cast<std::byte>((i + start) * 167 >> 4 & 255);
      }
      ++start;
    }
  }
  std::string name, key, place;
  std::vector<uint64_t> sizes;
  nlohmann::json stripes;
  Seal seal;
  RemoteSecret secret;
  TenantKeys keys;
  RemoteFormat format;
  WallTime written;
  Buffers buffers;
};

TEST(RemoteVectors, AreWhatIsWrittenAndRead) {
  std::ifstream file(KVS_SOURCE_DIR "/tests/golden/remote_format.json");
  const nlohmann::json all = nlohmann::json::parse(file);
  ASSERT_GE(all.size(), 8u);
  for (const nlohmann::json& json : all) {
    const Vector vector(json);
    SCOPED_TRACE(vector.name);
    EXPECT_EQ(ToHex(vector.keys.place), json["keys"][0]);
    EXPECT_EQ(ToHex(vector.keys.name), json["keys"][1]);
    EXPECT_EQ(ToHex(vector.keys.envelope), json["keys"][2]);
    std::vector<Object> objects = Put(vector.format, vector.key, vector.buffers, vector.written);
    ASSERT_EQ(objects.size(), vector.stripes.size());
    for (uint32_t i = 0; i < objects.size(); ++i) {
      const nlohmann::json& stripe = vector.stripes[i];
      EXPECT_EQ(vector.format.NameOf(vector.key, vector.place, i), stripe["name"]);
      const std::span<const std::byte> header = std::span(objects[i]).first(kHeaderBytes);
      if (vector.seal == Seal::kNone) {
        EXPECT_EQ(ToHex(header), stripe["header"]);
        continue;
      }
      const std::string sealed =
          FromHex(std::string(stripe["header"]) + std::string(stripe["bytes"]));
      ASSERT_EQ(sealed.size(), objects[i].size());
      std::memcpy(objects[i].data(), sealed.data(), sealed.size());
    }
    Buffers got;
    const Status status =
        Get(vector.format, vector.key, vector.sizes, objects, &got, vector.written);
    EXPECT_TRUE(status.ok()) << status.ToString();
    EXPECT_TRUE(got == vector.buffers);
  }
}

}  // namespace
}  // namespace kvstrata::remote
