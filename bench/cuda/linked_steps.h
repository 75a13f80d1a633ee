// SPDX-License-Identifier: Apache-2.0
// Steps: sequences of a linked session and the captured graph of their decode step, as an engine
// makes them.
#pragma once

#include <cuda_runtime_api.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "bench/abi_calls.h"
#include "bench/cuda/linked_plans.h"
#include "bench/cuda/replay_timing.h"
#include "bench/cuda/step_tensors.h"
#include "client/include/kvstrata/kvstrata.h"
#include "kvstrata/v1/admin.grpc.pb.h"
#include "tests/cuda/device_array.h"
#include "tests/fakes/model_desc.h"

namespace kvstrata::cuda {

using bench::Must;

// kvs_select and kvs_attend together: microseconds of the thread's own time, and of the clock.
struct CallTimes {
  std::vector<double> cpu, clock;
};

// `batch` sequences of `tokens` random rows in a model of their own, and a graph of their decode
// step.
class Steps {
 public:
  // surprisal: of each prompt token. digest: of the model, by default like no other's.
  Steps(kvs_session* session, const Plan& plan, int batch, int32_t tokens,
        std::vector<float> surprisal = {},
        const std::string& digest = std::to_string(std::random_device{}()))
      : session_(session),
        digest_(digest),
        steps_a_query_(plan.steps_a_query),
        period_(plan.period),
        layers_(LayersOf(plan, batch, tokens)),
        tensors_(plan, batch),
        sentences_(plan.sentences),
        surprisal_(plan.surprisals ? RandomSurprisal(tokens) : std::move(surprisal)) {
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    const kvs_model model = RegisterModel();
    const std::vector<uint8_t> ends = ends_.Next(tokens);
    const std::string text = TextOf(plan, tokens, surprisal_);
    for (int i = 0; i < batch; ++i) Open(model, text.c_str(), tokens, i, ends);
    reported_ = static_cast<uint32_t>(tokens);
    Step([this](kvs_step* step) { Layers(step, Batch(), true); });  // memory before the capture
    Capture();
  }
  ~Steps() {
    cudaGraphExecDestroy(graph_);
    for (const kvs_step_member& member : members_) {
      Must(kvs_sequence_close(session_, member.sequence), "kvs_sequence_close");
    }
    cudaStreamDestroy(stream_);
  }

  // All pages of the first sequence but the last go to the host's memory, and the graph is captured
  // anew.
  void Demote(const std::string& socket) {
    Check(cudaStreamSynchronize(stream_), "the steps before");
    const auto admin = v1::Admin::NewStub(
        grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials()));
    v1::MoveRequest request;
    request.set_sequence(members_[0].sequence);
    grpc::ClientContext context;
    v1::MoveResponse moved;
    if (const grpc::Status status = admin->Demote(&context, request, &moved); !status.ok()) {
      std::fprintf(stderr, "Demote: %s\n", status.error_message().c_str());
      std::exit(1);
    }
    Check(cudaGraphExecDestroy(graph_), "cudaGraphExecDestroy");
    Capture();
  }
  int layers() const { return layers_; }
  // How many steps a launch makes.
  int steps() const { return std::max(steps_a_query_, 1); }
  cudaStream_t stream() const { return stream_; }
  kvs_sequence sequence() const { return members_.front().sequence; }
  uint32_t held() const { return held_; }  // tokens of the last prompt that were there already
  size_t tensor_bytes() const { return tensors_.bytes(); }
  void Launch() {
    if (steps_a_query_ > 0) tensors_.MoveQuery(stream_);
    for (int i = 0; i < steps(); ++i) LaunchStep();
  }
  void LaunchStep() {
    Step([this](kvs_step* step) {
      Must(kvs_step_replay(step), "kvs_step_replay");
      Check(cudaGraphLaunch(graph_, stream_), "cudaGraphLaunch");
    });
  }
  // Microseconds of a layer: of replays, or of whole periods of a plan that has them.
  bench::Timing Time() {
    if (period_ > 1) return TimePeriods(period_);
    return TimeReplays<Steps>({this}, layers() * steps(), kReplays);
  }
  // Microseconds of a layer, the mean of `period` steps that follow each other without a pause.
  bench::Timing TimePeriods(int period) {
    cudaEvent_t begin, end;
    Check(cudaEventCreate(&begin), "cudaEventCreate");
    Check(cudaEventCreate(&end), "cudaEventCreate");
    std::vector<double> us;
    for (int i = 0; i < kPeriods; ++i) {
      Launch();  // still running when the period's first step is enqueued
      Check(cudaEventRecord(begin, stream_), "cudaEventRecord");
      for (int step = 0; step < period; ++step) Launch();
      Check(cudaEventRecord(end, stream_), "cudaEventRecord");
      Check(cudaEventSynchronize(end), "a period");
      float ms = 0;
      Check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
      us.push_back(double{ms} * 1e3 / period / layers_);
    }
    Check(cudaEventDestroy(begin), "cudaEventDestroy");
    Check(cudaEventDestroy(end), "cudaEventDestroy");
    return bench::TimingOf(us);
  }
  // Microseconds, by the clock, that a step's calls take.
  bench::Timing TimeOnCpu() {
    std::vector<double> us;
    for (int i = 0; i < kReplays; ++i) {
      Check(cudaStreamSynchronize(stream_), "a step");
      const double begin = bench::NowUs();
      LaunchStep();
      us.push_back(bench::NowUs() - begin);
    }
    return bench::TimingOf(us);
  }
  // One kvs_select and kvs_attend, called layer by layer with the same tensors in every step.
  CallTimes TimeCalls() {
    for (int i = 0; i < kWarmSteps; ++i) {
      Step([this](kvs_step* step) { Layers(step, Batch(), true); });
    }
    CallTimes times;
    while (times.cpu.size() < kCalls) {
      Check(cudaStreamSynchronize(stream_), "a step");
      Step([&](kvs_step* step) { Layers(step, Batch(), true, &times); });
    }
    return times;
  }
  bool Sound() const { return tensors_.Sound(); }
  void MustBeSound(const std::string& id) const {
    if (Sound()) return;
    std::fprintf(stderr, "%s: an output is not a number\n", id.c_str());
    std::exit(1);
  }

 private:
  void Report(kvs_sequence sequence, uint32_t first, const std::vector<uint8_t>& ends) {
    Must(kvs_report(session_, sequence, first, static_cast<uint32_t>(ends.size()), nullptr, nullptr,
                    ends.data()),
         "kvs_report");
  }
  kvs_model RegisterModel() {
    const kvs_model_desc desc =
        testing::DescOf({layers_, kHeads, kKvHeads, kDim, kPage}, "llama-3.1-8b", digest_.c_str());
    kvs_model model = 0;
    Must(kvs_model_register(session_, &desc, &model), "kvs_model_register");
    return model;
  }
  // A sequence whose prompt is like no other's.
  void Open(kvs_model model, const char* plan, int32_t tokens, int32_t id,
            const std::vector<uint8_t>& ends) {
    const std::vector<int32_t> prompt(static_cast<size_t>(tokens), id);
    kvs_sequence sequence = 0;
    Must(kvs_sequence_open(session_, model, plan, prompt.data(), prompt.size(), &sequence, &held_),
         "kvs_sequence_open");
    const auto run = [&](int32_t n, bool attend) {
      StepOf({{sequence, prompt.data(), static_cast<uint32_t>(n)}},
             [&](kvs_step* step) { Layers(step, n, attend); });
    };
    const int32_t appended = sentences_ ? tokens - kObserved : tokens;
    for (auto done = static_cast<int32_t>(held_); done < appended; done += kChunk) {
      run(std::min(kChunk, appended - done), false);
    }
    if (sentences_) run(kObserved, true);
    if (sentences_) Report(sequence, 0, ends);
    if (!surprisal_.empty()) {
      Must(kvs_report(session_, sequence, 0, static_cast<uint32_t>(tokens), surprisal_.data(),
                      nullptr, nullptr),
           "kvs_report");
    }
    Must(kvs_prefill_done(session_, sequence), "kvs_prefill_done");
    Must(kvs_settle(session_, sequence), "kvs_settle");  // with a codec: all is packed
    members_.push_back({sequence, &id_, 1});
  }
  template <typename Fn>
  void StepOf(const std::vector<kvs_step_member>& members, const Fn& work) {
    kvs_step* step = nullptr;
    Must(kvs_step_begin(session_, members.data(), members.size(), stream_, &step, nullptr),
         "kvs_step_begin");
    work(step);
    Must(kvs_step_end(step, stream_), "kvs_step_end");
  }
  template <typename Fn>
  void Step(const Fn& work) {
    StepOf(members_, work);
    if (!sentences_) return;
    const std::vector<uint8_t> ends = ends_.Next(1);
    for (const kvs_step_member& member : members_) Report(member.sequence, reported_, ends);
    ++reported_;
  }
  int32_t Batch() const { return static_cast<int32_t>(members_.size()); }
  // `tokens` new rows, of one sequence or of a batch. calls: gets what each layer's selection and
  // attention take.
  void Layers(kvs_step* step, int32_t tokens, bool attend, CallTimes* calls = nullptr) {
    const kvs_tensor rows = attend ? tensors_.StepRows(tokens) : tensors_.PromptRows(tokens),
                     q = tensors_.Queries(tokens), o = tensors_.Output(tokens);
    for (int layer = 0; layer < layers_; ++layer) {
      Must(kvs_append(step, layer, &rows, &rows), "kvs_append");
      if (!attend) continue;
      const double clock = bench::NowUs(), cpu = bench::ThreadUs();
      if (calls != nullptr) Must(kvs_select(step, layer, &q), "kvs_select");
      Must(kvs_attend(step, layer, &q, &o, nullptr), "kvs_attend");
      if (calls == nullptr) continue;
      calls->cpu.push_back(bench::ThreadUs() - cpu);
      calls->clock.push_back(bench::NowUs() - clock);
    }
  }
  void Capture() {
    Step([this](kvs_step* step) {
      cudaGraph_t captured = nullptr;
      Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "BeginCapture");
      Layers(step, Batch(), true);
      Check(cudaStreamEndCapture(stream_, &captured), "EndCapture");
      Check(cudaGraphInstantiate(&graph_, captured, 0), "Instantiate");
      Check(cudaGraphDestroy(captured), "cudaGraphDestroy");
      Check(cudaGraphLaunch(graph_, stream_), "cudaGraphLaunch");
    });
  }

  kvs_session* const session_;
  const std::string digest_;
  const int steps_a_query_, period_;
  const int layers_;
  StepTensors tensors_;
  const bool sentences_;
  const std::vector<float> surprisal_;
  uint32_t held_ = 0;
  SentenceEnds ends_;
  uint32_t reported_ = 0;
  const int32_t id_ = 0;                  // id of every new token
  std::vector<kvs_step_member> members_;  // members of a decode step
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace kvstrata::cuda
