// SPDX-License-Identifier: Apache-2.0
// A reload of the configuration's files, by SIGHUP and by Admin.ReloadConfig: what can change does,
// the rest is named, a mistake changes nothing, and decodes beside it are what they were.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

#include "kvstrata/v1/admin.grpc.pb.h"
#include "proto/status_map.h"
#include "tests/e2e/engine.h"
#include "tests/e2e/main.h"
#include "tests/e2e/operator.h"
#include "tests/fakes/daemon_process.h"
#include "tests/fakes/scratch_dir.h"

namespace kvstrata::testing {
namespace {

constexpr std::chrono::seconds kDeadline{20};

class ReloadTest : public ::testing::Test {
 protected:
  ReloadTest() {
    std::filesystem::create_directory(folder_ / "conf.d");
    Write("k.toml", "[pool]\ndevice_bytes = \"32MiB\"\nhost_bytes = \"32MiB\"\n");
    daemon_ =
        std::make_unique<DaemonProcess>(std::vector<std::string>{"--config", folder_ / "k.toml"});
    stub_ = v1::Admin::NewStub(
        grpc::CreateChannel("unix:" + daemon_->socket(), grpc::InsecureChannelCredentials()));
  }
  ~ReloadTest() override {
    stub_.reset();
    daemon_.reset();
  }

  // As tools do it: a reload sees the old file or the new one.
  void Write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / "new") << text;
    std::filesystem::rename(folder_ / "new", folder_ / name);
  }
  template <typename Request, typename Response>
  kvstrata::Status Call(grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*,
                                                                const Request&, Response*),
                        const Request& request, Response* response) {
    return CallAdmin(stub_.get(), method, request, response);
  }
  kvstrata::Status Reload(bool dry_run, v1::ReloadConfigResponse* response) {
    v1::ReloadConfigRequest request;
    request.set_dry_run(dry_run);
    response->Clear();
    return Call(&v1::Admin::Stub::ReloadConfig, request, response);
  }
  v1::ConfigEntry Entry(const std::string& key) {
    v1::GetConfigResponse config;
    EXPECT_TRUE(Call(&v1::Admin::Stub::GetConfig, v1::GetConfigRequest(), &config).ok());
    for (const auto& entry : config.entries()) {
      if (entry.key() == key) return entry;
    }
    return {};
  }
  // How many events of that name have these fields.
  int Told(const std::string& name, const std::map<std::string, std::string>& fields) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kDeadline);
    const auto reader = stub_->Watch(&context, v1::WatchRequest());
    int told = 0;
    for (v1::WatchResponse batch; reader->Read(&batch);) {
      for (const auto& event : batch.events()) {
        size_t found = 0;
        for (const auto& f : event.fields()) {
          const auto wanted = fields.find(f.key());
          found += wanted != fields.end() && wanted->second == f.value() ? 1 : 0;
        }
        told += event.name() == name && found == fields.size() ? 1 : 0;
      }
    }
    EXPECT_TRUE(reader->Finish().ok());
    return told;
  }
  void Hangup() { ASSERT_EQ(kill(daemon_->pid(), SIGHUP), 0); }

  const ScratchDir folder_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<v1::Admin::Stub> stub_;
};

const v1::ConfigChange* Find(const v1::ReloadConfigResponse& response, const std::string& key) {
  for (const auto& change : response.changes()) {
    if (change.key() == key) return &change;
  }
  return nullptr;
}

TEST_F(ReloadTest, WhatCanChangeDoesAndTheRestIsNamed) {
  Engine engine(Linked(), daemon_->socket());
  ASSERT_EQ(engine.code(), KVS_OK) << engine.error();
  EXPECT_EQ(engine.Open("mine", Prompt(64, 1)), 0u) << "there is no such plan yet";
  Write("conf.d/50.toml",
        "plans.mine = \"window{n_recent = 64}\"\nsession.max = 1\n\nwork.queue = 7\n");
  v1::ReloadConfigResponse dry, done;
  ASSERT_TRUE(Reload(true, &dry).ok());
  EXPECT_EQ(dry.changes_size(), 3);
  EXPECT_EQ(engine.Open("mine", Prompt(64, 1)), 0u) << "a dry run changes nothing";
  EXPECT_EQ(Entry("session.max").value(), "1024");
  EXPECT_EQ(Told("reloaded", {}), 0);

  ASSERT_TRUE(Reload(false, &done).ok());
  EXPECT_EQ(done.DebugString(), dry.DebugString());
  const v1::ConfigChange* change = Find(done, "work.queue");
  ASSERT_NE(change, nullptr);
  EXPECT_TRUE(change->needs_restart());
  EXPECT_EQ(change->before(), "1024");
  EXPECT_EQ(change->after(), "7");
  EXPECT_EQ(change->where(), folder_ / "conf.d/50.toml:4:14");
  change = Find(done, "plans.mine");
  ASSERT_NE(change, nullptr);
  EXPECT_FALSE(change->needs_restart());
  EXPECT_EQ(change->before(), "");
  EXPECT_NE(engine.Open("mine", Prompt(64, 1)), 0u) << engine.error();
  Engine second(Linked(), daemon_->socket());
  EXPECT_NE(second.code(), KVS_OK) << "session.max = 1, and one is there";
  EXPECT_EQ(Entry("session.max").where(), folder_ / "conf.d/50.toml:2:15");
  EXPECT_EQ(Entry("work.queue").value(), "1024") << "what it runs with";
  EXPECT_TRUE(Entry("session.max").reloads());
  EXPECT_FALSE(Entry("work.queue").reloads());
  EXPECT_EQ(Told("config_changed", {{"key", "work.queue"}, {"effect", "needs a restart"}}), 1);
  EXPECT_EQ(Told("reloaded", {{"applied", "2"}, {"need_restart", "1"}}), 1);

  // Without the file again, by the signal.
  std::filesystem::remove(folder_ / "conf.d/50.toml");
  Hangup();
  ASSERT_TRUE(Eventually([&] { return Told("reloaded", {{"by", "SIGHUP"}}) == 1; }));
  EXPECT_EQ(Entry("session.max").value(), "1024");
  EXPECT_EQ(engine.Open("mine", Prompt(64, 1)), 0u) << "the plan is gone";
  EXPECT_EQ(Told("config_changed", {{"key", "plans.mine"}, {"after", ""}}), 1);
}

TEST_F(ReloadTest, ATablesKeyMayNeedARestartToo) {
  const std::string name = "remote.tenants.uid:7.name", rate = "remote.tenants.uid:7.read_rate";
  Write("conf.d/10.toml", "[remote.tenants.\"uid:7\"]\nname = \"search\"\nread_rate = \"1MiB\"\n");
  v1::ReloadConfigResponse response;
  for (const int changes : {2, 1}) {
    ASSERT_TRUE(Reload(false, &response).ok());
    EXPECT_EQ(response.changes_size(), changes);
    const v1::ConfigChange* change = Find(response, name);
    ASSERT_NE(change, nullptr) << "each reload names it";
    EXPECT_TRUE(change->needs_restart());
    EXPECT_EQ(Entry(name).key(), "") << "what it runs with";
    EXPECT_EQ(Entry(rate).value(), "1MiB");
  }
}

TEST_F(ReloadTest, AMistakeAnywhereChangesNothing) {
  Write("conf.d/10.toml", "session.max = 5\n");
  Write("conf.d/20.toml", "\npin.limit_bytes = \"lots\"\nlog.lvel = \"info\"\n");
  v1::ReloadConfigResponse response;
  const kvstrata::Status refused = Reload(false, &response);
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  for (const char* part : {"/conf.d/20.toml:2:", "/conf.d/20.toml:3:", "lots", "log.level"}) {
    EXPECT_NE(refused.message().find(part), std::string::npos) << refused.ToString();
  }
  EXPECT_EQ(Entry("session.max").value(), "1024");
  EXPECT_EQ(Told("reload_failed", {{"reason", "CONFIG_VALUE"}}), 1);
  Hangup();
  ASSERT_TRUE(Eventually([&] {
    return Told("reload_failed", {{"by", "SIGHUP"}, {"reason", "CONFIG_KEY"}}) == 1;
  }));
  EXPECT_EQ(Entry("session.max").value(), "1024");
  EXPECT_EQ(Told("reloaded", {}), 0);
  EXPECT_EQ(Told("config_changed", {}), 0);
}

TEST_F(ReloadTest, AStepUnderWayIsNotDisturbed) {
  Write("conf.d/10.toml", "plans.mine = \"full\"\n");
  v1::ReloadConfigResponse response;
  ASSERT_TRUE(Reload(false, &response).ok());
  Engine engine(Linked(), daemon_->socket());
  std::vector<int32_t> history = Prompt(100, 3);
  const kvs_sequence s = engine.Prefill("mine", history);
  ASSERT_NE(s, 0u) << engine.error();

  // Between two layers of one step.
  kvs_step* step = engine.Begin(s, {7});
  ASSERT_NE(step, nullptr) << engine.error();
  engine.Layer(step, 0, {7}, 100);
  Write("conf.d/10.toml",
        "plans.mine = \"window{n_recent = 16}\"\npool.high_percent = 1\n"
        "pool.low_percent = 1\nmove.bytes_per_second = 0\n");
  ASSERT_TRUE(Reload(false, &response).ok());
  EXPECT_EQ(response.changes_size(), 4);
  const std::vector<float> out = engine.Layer(step, 1, {7}, 100);
  ASSERT_EQ(engine.code(), KVS_OK) << engine.error();
  ASSERT_EQ(Linked().kvs_step_end(step, nullptr), KVS_OK);
  history.push_back(7);
  const std::vector<float> want = engine.model().Expected(1, history);
  for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(out[i], want[i], 1e-5) << i;

  // Beside a reload after the other.
  std::atomic<bool> ends{false};
  int reloads = 0;
  std::thread reloader([&] {
    for (; !ends; ++reloads) {
      Write("conf.d/10.toml",
            "plans.mine = \"window{n_recent = " + std::to_string(16 + reloads % 2) +
                "}\"\nmove.promote_rate = \"" + std::to_string(64 + reloads % 2) +
                "MiB\"\npool.high_percent = " + std::to_string(1 + reloads % 2) +
                "\npool.low_percent = 1\n");
      v1::ReloadConfigResponse each;
      EXPECT_TRUE(Reload(false, &each).ok());
    }
  });
  for (int32_t i = 0; i < 300; ++i) {
    EXPECT_TRUE(engine.DecodesRight(s, &history, i)) << "the sequence keeps its plan, step " << i;
  }
  ends = true;
  reloader.join();
  EXPECT_GT(reloads, 0);
  EXPECT_EQ(Told("refused", {}), 0);
}

TEST_F(ReloadTest, TheLogLevelLastsUntilAReload) {
  v1::SetLogLevelRequest request;
  v1::SetLogLevelResponse response;
  ASSERT_TRUE(Call(&v1::Admin::Stub::SetLogLevel, request, &response).ok());
  EXPECT_EQ(response.level(), "warn") << "asked for, not set";
  request.set_level("debug");
  ASSERT_TRUE(Call(&v1::Admin::Stub::SetLogLevel, request, &response).ok());
  EXPECT_EQ(response.level(), "debug");
  EXPECT_EQ(response.before(), "warn");
  const std::string me = "uid:" + std::to_string(geteuid());
  EXPECT_EQ(Told("log_level_set", {{"after", "debug"}, {"by", me}}), 1);
  EXPECT_EQ(Entry("log.level").origin(), "operator");
  EXPECT_EQ(Entry("log.level").where(), me);
  Engine engine(Linked(), daemon_->socket());
  ASSERT_NE(engine.Prefill("full", Prompt(40, 9)), 0u) << engine.error();
  EXPECT_TRUE(Eventually([&] { return Told("sequence_opened", {}) == 1; })) << "of level debug";

  request.set_level("loud");
  const kvstrata::Status refused = Call(&v1::Admin::Stub::SetLogLevel, request, &response);
  EXPECT_EQ(refused.reason(), "CONFIG_VALUE");
  EXPECT_NE(refused.message().find("loud"), std::string::npos);

  v1::ReloadConfigResponse changes;
  ASSERT_TRUE(Reload(false, &changes).ok());
  ASSERT_EQ(changes.changes_size(), 1) << "back to the flag's";
  EXPECT_EQ(changes.changes(0).after(), "warn");
  ASSERT_NE(engine.Prefill("full", Prompt(40, 10)), 0u) << engine.error();
  EXPECT_EQ(Told("sequence_opened", {}), 1);
}

}  // namespace
}  // namespace kvstrata::testing
