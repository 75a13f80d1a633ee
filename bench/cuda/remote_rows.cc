// SPDX-License-Identifier: Apache-2.0
#include "bench/cuda/remote_rows.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "bench/results.h"
#include "kernels/pages/dtype.h"
#include "tests/fakes/daemon_process.h"
#include "tests/fakes/remote_client.h"

namespace kvstrata::cuda {
namespace {

constexpr int kLayers = 2, kHeads = 32, kKvHeads = 8, kDim = 128, kPage = 16;
constexpr int32_t kTokens = 32 * 1024, kChunk = 512;
constexpr int kWarmUps = 5, kCalls = 60;

struct RemotePlan {
  const char *name, *text;
};
constexpr std::array kPlans = {RemotePlan{"full", "full"},
                               RemotePlan{"quest", "quest{budget = 2048, min_tokens = 0}"}};

void Check(const Status& status, const char* what) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", what, status.ToString().c_str());
  std::exit(1);
}
template <typename T>
T Checked(Result<T> result, const char* what) {
  Check(result.status(), what);
  return std::move(result).value();
}

class RemoteSteps {
 public:
  RemoteSteps(const std::string& socket, const char* plan) : client_(socket) {
    Check(client_.failure(), "OpenSession");
    v1::RegisterModelRequest request;
    request.set_name("llama-3.1-8b");
    request.set_digest("remote");
    v1::Geometry* const g = request.mutable_geometry();
    g->set_layers(kLayers);
    g->set_query_heads(kHeads);
    g->set_kv_heads(kKvHeads);
    g->set_head_dim(kDim);
    g->set_page_tokens(kPage);
    g->set_dtype(v1::DTYPE_BF16);
    v1::RegisterModelResponse model;
    Check(client_.Call(&v1::Control::Stub::RegisterModel, std::move(request), &model),
          "RegisterModel");
    const std::vector<int32_t> prompt(kTokens, 1);
    uint32_t held = 0;
    sequence_ = Checked(client_.Open(model.model(), plan, prompt, &held), "OpenSequence");
    for (int32_t at = 0; at < kTokens; at += kChunk) {
      const std::vector<int32_t> ids(kChunk, 1);
      const uint64_t step = Checked(client_.Begin(sequence_, ids), "StepBegin");
      for (int layer = 0; layer < kLayers; ++layer) {
        const v1::TensorRef rows = Random(kChunk, kKvHeads);
        Check(client_.Append(step, layer, rows, rows), "Append");
      }
      Check(client_.End(step), "StepEnd");
    }
    Check(client_.CallOf<v1::PrefillDoneRequest, v1::PrefillDoneResponse>(
              &v1::Compute::Stub::PrefillDone, sequence_),
          "PrefillDone");
  }

  // Each call of each layer of the steps behind the first few.
  struct Times {
    std::vector<double> append, select, attend, ping;
  };
  Times Measure() {
    Times times;
    for (int i = 0; i < kWarmUps + kCalls / kLayers; ++i) {
      const uint64_t step = Checked(client_.Begin(sequence_, std::array{2}), "StepBegin");
      for (int layer = 0; layer < kLayers; ++layer) {
        const v1::TensorRef k = Random(1, kKvHeads), v = Random(1, kKvHeads), q = Random(1, kHeads);
        const bool counts = i >= kWarmUps;
        const auto time = [counts](std::vector<double>* to, const auto& call) {
          const double begin = bench::NowUs();
          call();
          if (counts) to->push_back(bench::NowUs() - begin);
        };
        time(&times.append, [&] { Check(client_.Append(step, layer, k, v), "Append"); });
        time(&times.select, [&] { Check(client_.Select(step, layer, q).status(), "Select"); });
        time(&times.attend,
             [&] { Check(client_.Attend(step, layer, q, false).status(), "Attend"); });
        time(&times.ping, [&] {
          v1::PingResponse response;
          Check(client_.Call(&v1::Control::Stub::Ping, v1::PingRequest(), &response), "Ping");
        });
      }
      Check(client_.End(step), "StepEnd");
    }
    return times;
  }

 private:
  v1::TensorRef Random(int tokens, int heads) {
    std::normal_distribution<float> normal;
    std::vector<BF16> rows(static_cast<size_t>(tokens) * static_cast<size_t>(heads) * kDim);
    for (BF16& x : rows) x = FromFloat<BF16>(normal(rng_));
    return testing::RemoteClient::Tensor<BF16>(v1::DTYPE_BF16, tokens, heads, kDim, rows);
  }

  testing::RemoteClient client_;
  uint64_t sequence_ = 0;
  std::mt19937 rng_{std::random_device{}()};
};

void AddRow(const std::string& id, const char* plan, const std::vector<double>& us, double ping,
            bench::Json* rows) {
  const bench::Timing t = bench::TimingOf(us);
  std::printf("%-28s %9.1f us  p10 %9.1f  p90 %9.1f\n", id.c_str(), t.median, t.p10, t.p90);
  std::fflush(stdout);
  rows->push_back(bench::RowOf(id, t));
  rows->back().update({{"plan", plan},
                       {"tokens", kTokens},
                       {"baseline", {{"name", "ping"}, {"value", ping}}},
                       {"ratio", ping / t.median}});
}

}  // namespace

void RemoteRows(const std::string& only, bench::Json* rows) {
  for (const bool on_gpu : {true, false}) {
    for (const RemotePlan& plan : kPlans) {
      const std::string id =
          std::string("remote/") + plan.name + (on_gpu ? "/gpu/32K" : "/cpu/32K");
      if (!id.starts_with(only.substr(0, id.size()))) continue;
      const testing::DaemonProcess daemon(
          {"--set", on_gpu ? "pool.device=cuda" : "pool.device=emulated", "--set",
           "pool.device_bytes=1GiB", "--set", "pool.host_bytes=64MiB"});
      RemoteSteps steps(daemon.socket(), plan.text);
      const RemoteSteps::Times times = steps.Measure();
      const double ping = bench::TimingOf(times.ping).median;
      AddRow(id + "/append", plan.text, times.append, ping, rows);
      AddRow(id + "/select", plan.text, times.select, ping, rows);
      AddRow(id + "/attend", plan.text, times.attend, ping, rows);
    }
  }
}

}  // namespace kvstrata::cuda
