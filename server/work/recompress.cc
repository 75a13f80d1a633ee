// SPDX-License-Identifier: Apache-2.0
#include "server/work/recompress.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "kernels/segment/segmenter.h"
#include "server/store/codecs/builds.h"
#include "server/store/codecs/work_requests.h"
#include "server/telemetry/log.h"
#include "server/telemetry/thread_top.h"
#include "server/telemetry/traffic.h"

namespace kvstrata {
namespace {

// A worker's share of a build (server/store/requests/build_job.h): index rows from keys, extents of
// a codec from rows.

using Clock = std::chrono::steady_clock;

void Summarise(BuildJob* job, const Backend& backend, Executor* executor) {
  SequenceView view;
  view.pages = job->pages.data();
  view.index_blocks = job->blocks.data();
  view.tokens = static_cast<int32_t>(job->to);
  SegmenterOf(job->plan.segmenter())
      .Update(job->geometry, job->index, view, static_cast<int32_t>(job->from),
              static_cast<int32_t>(job->to), backend, *executor);
}

std::vector<Run> Union(std::vector<Run> a, const std::vector<Run>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return Normalize(std::move(a));
}

// The drafts as the next run sees them.
std::vector<ExtentView> ViewOf(const std::vector<ExtentDraft>& drafts) {
  std::vector<ExtentView> views;
  for (const ExtentDraft& d : drafts) {
    ExtentView& view = views.emplace_back();
    view.data = d.bytes.data();
    view.bytes = static_cast<int64_t>(d.bytes.size());
    view.tokens = d.tokens;
  }
  return views;
}

// Makes the extents of the whole prompt, run after run, as for a sequence that nobody else looks
// at.
Result<BuiltExtents> Recompress(BuildJob* job, const Backend& backend, Executor* executor) {
  BuiltExtents made;
  made.recompressor = job->recompressor->Clone();
  RecompressInput& input = job->input;
  input.backend = &backend;
  input.executor = executor;
  std::vector<ExtentView> views;
  while (made.recompressor->Due(input)) {
    KVS_ASSIGN_OR_RETURN(RecompressOutput output, made.recompressor->Run(input));
    for (ExtentDraft& d : output.extents) {
      if (d.kept >= 0) d = std::move(made.extents[static_cast<size_t>(d.kept)]);
    }
    made.extents = std::move(output.extents);
    made.released = Union(std::move(made.released), output.released);
    views = ViewOf(made.extents);
    input.view.extents = views.data();
    input.view.extent_count = static_cast<int32_t>(views.size());
    ++input.view.version;
  }
  return made;
}

// Blocks need no result: they are where the job says. Without memory the build is given up, as
// after any failure.
Result<BuiltExtents> RunPiece(BuildJob* job, const Backend& backend, Executor* executor) {
  try {
    if (job->recompressor != nullptr) return Recompress(job, backend, executor);
    Summarise(job, backend, executor);
    return BuiltExtents{};
  } catch (const std::bad_alloc&) {
    return ResourceExhausted("MEMORY", "the daemon has no memory to build this");
  }
}

// Makes and hands over piece after piece until the sequence's build is over. Takes as long as that:
// index rows read all keys once; a codec takes seconds. Holds no lock.
void RunBuild(Builds* builds, uint64_t sequence, const Backend& backend, Executor* executor) {
  const Clock::time_point start = Clock::now();
  while (true) {
    Result<BuildJob> job = builds->TakeBuild(sequence);
    if (!job.ok()) break;
    Result<BuiltExtents> made = RunPiece(&*job, backend, executor);
    if (made.ok() && job->recompressor == nullptr) {
      builds->PublishBlocks(std::move(*job));
    } else if (made.ok()) {
      builds->PublishExtents(std::move(*job), std::move(*made));
    } else {
      builds->AbandonBuild(std::move(*job), made.status());
    }
  }
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start);
  LogEvent(LogLevel::kDebug, "build_left", {{"sequence", sequence}, {"run_us", us.count()}});
}

constexpr uint32_t kWorkPatience = 150;  // all of a long prompt, by one thread

// Threads that this one makes (those of its ops) inherit it.
void RunOn(const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  if (const int error = pthread_setaffinity_np(pthread_self(), sizeof(set), &set); error != 0) {
    LogEvent(LogLevel::kWarn, "work_cpus", {{"errno", error}, {"why", "workers run on all cores"}});
  }
}

// Without memory the job is given up, as after any failure.
Result<RecompressOutput> RunStaged(Store* store, RecompressJob* job, Recompressor* recompressor) {
  try {
    KVS_RETURN_IF_ERROR(store->recompression().StageRecompression(job));
    return recompressor->Run(job->input);
  } catch (const std::bad_alloc&) {
    return ResourceExhausted("MEMORY", "the daemon has no memory to recompress this sequence");
  }
}

void LogFailure(const RecompressJob& job, const Status& why) {
  const bool closed = why.code() == Code::kAborted || why.code() == Code::kNotFound;
  LogEvent(closed ? LogLevel::kDebug : LogLevel::kWarn, "recompress_failed",
           {{"sequence", job.sequence},
            {"plan", job.plan},
            {"reason", why.reason()},
            {"why", why.message()}});
}

}  // namespace

RecompressQueue::RecompressQueue(const WorkOptions& options, Store* store, const Backend* backend,
                                 std::vector<const GpuPackers*> gpu_packers)
    : options_(options), store_(store), backend_(backend), gpu_packers_(std::move(gpu_packers)) {
  try {
    threads_.reserve(options_.threads);
    for (uint32_t i = 0; i < options_.threads; ++i) {
      threads_.push_back(StartThread("kvs-work", [this] { Run(); }));
    }
  } catch (const std::system_error&) {
    Stop();  // those that there are
    throw;
  }
  if (!threads_.empty()) store_->requests().SetSink(this);
}

RecompressQueue::~RecompressQueue() { Stop(); }

void RecompressQueue::Stop() {
  {
    MutexLock lock(mu_);
    if (stopping_) return;
    stopping_ = true;
  }
  if (!threads_.empty()) store_->requests().SetSink(nullptr);  // cancels what runs
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

bool RecompressQueue::stopping() const {
  MutexLock lock(mu_);
  return stopping_;
}

size_t RecompressQueue::waiting() const {
  MutexLock lock(mu_);
  return entries_.size();
}

bool RecompressQueue::Push(Entry entry) {
  {
    MutexLock lock(mu_);
    if (stopping_ || entries_.size() >= options_.queue) return false;
    entries_.push_back(entry);
  }
  wake_.notify_one();
  return true;
}

void RecompressQueue::Erase(uint64_t sequence, bool build) {
  MutexLock lock(mu_);
  std::erase_if(entries_, [sequence, build](const Entry& e) {
    return e.sequence == sequence && e.build == build;
  });
}

bool RecompressQueue::Offer(uint64_t sequence, int64_t releasable_bytes) {
  return Push({sequence, releasable_bytes, false});
}
void RecompressQueue::Withdraw(uint64_t sequence) { Erase(sequence, false); }
bool RecompressQueue::OfferBuild(uint64_t sequence) { return Push({sequence, 0, true}); }
void RecompressQueue::WithdrawBuild(uint64_t sequence) { Erase(sequence, true); }

RecompressQueue::Entry RecompressQueue::Next() {
  {
    std::unique_lock<std::mutex> lock(mu_.native());
    const auto ready = [this]()
                           KVS_NO_THREAD_SAFETY_ANALYSIS { return stopping_ || !entries_.empty(); };
    if (!wake_.wait_for(lock, kRetryEvery, ready)) return {};
  }
  const bool pressed = store_->moves().UnderPressure();
  MutexLock lock(mu_);
  if (stopping_ || entries_.empty()) return {};
  const auto less = [](const Entry& a, const Entry& b) {
    return a.releasable_bytes < b.releasable_bytes;
  };
  const auto at =
      pressed ? std::max_element(entries_.begin(), entries_.end(), less) : entries_.begin();
  const Entry entry = *at;
  entries_.erase(at);
  return entry;
}

void RecompressQueue::Run() {
  RunOn(options_.cpus);
  std::unique_ptr<Executor> pool;
  Survive("kvs-work", [&] {
    if (options_.op_threads > 1) pool = NewThreadPool(static_cast<int>(options_.op_threads));
  });
  Heartbeat beat("kvs-work", kWorkPatience);
  while (!stopping()) {
    Executor* const executor = pool ? pool.get() : &InlineExecutor();
    const Entry next = Next();
    const LoopIteration iteration(&beat);
    Survive("kvs-work", [&] {
      if (next.build) {
        RunBuild(&store_->builds(), next.sequence, *backend_, executor);
      } else if (next.sequence != 0) {
        Recompress(next.sequence, executor);
      }
      store_->recompression().OfferDue();
    });
  }
}

void RecompressQueue::Recompress(uint64_t sequence, Executor* executor) {
  Result<RecompressJob> taken = store_->recompression().TakeRecompression(sequence);
  if (!taken.ok()) return;  // closed, or done by the way
  RecompressJob job = std::move(*taken);
  job.input.backend = backend_;
  job.input.executor = executor;
  if (!gpu_packers_.empty()) job.input.gpu_packers = gpu_packers_[job.device];
  const Clock::time_point start = Clock::now();
  std::unique_ptr<Recompressor> next;
  RecompressOutput output;
  if (job.recompressor != nullptr) {
    next = job.recompressor->Clone();
    Result<RecompressOutput> ran = RunStaged(store_, &job, next.get());
    if (!ran.ok()) {
      LogFailure(job, ran.status());
      return store_->recompression().AbandonRecompression(std::move(job), ran.status());
    }
    output = std::move(*ran);
  }
  const uint64_t run_us = MicrosSince(start);
  RecompressJob logged;  // what is left to say when the job has gone
  logged.sequence = job.sequence;
  logged.plan = job.plan;
  logged.waited_us = job.waited_us;
  const std::string warning = output.warning;
  const Result<RecompressResult> done = store_->recompression().PublishRecompression(
      std::move(job), std::move(next), std::move(output));
  if (!done.ok()) return LogFailure(logged, done.status());
  const uint64_t publish_us = MicrosSince(start) - run_us;
  NoteTime(Timed::kPublish, std::chrono::microseconds(publish_us));
  if (!warning.empty()) {
    LogEvent(LogLevel::kWarn, "max_loss",
             {{"sequence", logged.sequence}, {"plan", logged.plan}, {"why", warning}});
  }
  LogEvent(LogLevel::kDebug, "recompressed",
           {{"sequence", logged.sequence},
            {"plan", logged.plan},
            {"extents", done->extents},
            {"written_bytes", done->written_bytes},
            {"released_bytes", done->released_bytes},
            {"waited_us", logged.waited_us},
            {"run_us", run_us},
            {"publish_us", publish_us}});
}

}  // namespace kvstrata
