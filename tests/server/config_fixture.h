// SPDX-License-Identifier: Apache-2.0
// ConfigTest: a configuration of files in a folder of its own, variables and flags, as user 1000.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>

#include "server/config/config.h"
#include "tests/fakes/scratch_dir.h"

namespace kvstrata::test {

class ConfigTest : public ::testing::Test {
 protected:
  void SetUp() override {
    sources_.default_file = directory_ / "none.toml";
    sources_.uid = 1000;
  }

  // Writes the file and makes it the one that --config names.
  void UseFile(std::string_view text) {
    sources_.file = directory_ / "k.toml";
    std::ofstream(sources_.file) << text;
  }
  // conf.d/NAME beside it.
  void AddFile(const std::string& name, std::string_view text) {
    std::filesystem::create_directory(directory_ / "conf.d");
    std::ofstream(directory_ / "conf.d/" + name) << text;
  }
  // The configuration if it is without a mistake; else what a start says of them.
  static Result<Config> LoadConfig(const ConfigSources& sources) {
    LoadedConfig loaded = ReadConfig(sources);
    if (!loaded.mistakes.empty()) return Joined(loaded.mistakes);
    return std::move(loaded.config);
  }
  Config Load() {
    Result<Config> config = LoadConfig(sources_);
    EXPECT_TRUE(config.ok()) << config.status().ToString();
    return config.ok() ? std::move(config).value() : Config{};
  }
  Status Fail() {
    const Result<Config> config = LoadConfig(sources_);
    EXPECT_FALSE(config.ok());
    return config.status();
  }
  static const ConfigEntry& Entry(const Config& config, std::string_view key) {
    for (const ConfigEntry& e : config.entries) {
      if (e.key == key) return e;
    }
    ADD_FAILURE() << "no entry " << key;
    static const ConfigEntry none;
    return none;
  }

  const ScratchDir directory_;
  ConfigSources sources_;
};

}  // namespace kvstrata::test
