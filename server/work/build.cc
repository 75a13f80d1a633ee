// SPDX-License-Identifier: Apache-2.0
#include "server/work/build.h"

#include <chrono>
#include <new>
#include <utility>
#include <vector>

#include "kernels/segment/segmenter.h"
#include "server/telemetry/log.h"

namespace kvstrata {
namespace {

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

}  // namespace

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

}  // namespace kvstrata
