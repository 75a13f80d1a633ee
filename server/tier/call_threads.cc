// SPDX-License-Identifier: Apache-2.0
#include "server/tier/call_threads.h"

#include <pthread.h>

#include <cstdint>
#include <optional>
#include <system_error>
#include <utility>

#include "server/telemetry/thread_top.h"

namespace kvstrata {
namespace {

constexpr uint32_t kCallPatience = 60;  // for calls that have deadlines of their own

}  // namespace

CallThreads::CallThreads(const char* name, size_t count, CallQueue* queue)
    : name_(name), queue_(queue) {
  try {
    for (size_t i = 0; i < count; ++i) {
      threads_.emplace_back([this] { Serve(); });
      pthread_setname_np(threads_.back().native_handle(), name_);
    }
  } catch (const std::system_error&) {
    StopAndJoin();  // those that there are
    throw;
  }
}

CallThreads::~CallThreads() { StopAndJoin(); }

void CallThreads::StopAndJoin() {
  queue_->Stop();
  for (std::thread& thread : threads_) thread.join();
}

void CallThreads::Serve() {
  WarmUpAllocator();
  Heartbeat beat(name_, kCallPatience);
  while (std::optional<CallQueue::Task> task = queue_->Next()) {
    const LoopIteration iteration(&beat);
    Survive(name_, [&] { queue_->Run(std::move(*task)); });
  }
}

}  // namespace kvstrata
