// SPDX-License-Identifier: Apache-2.0
#include "server/store/codecs/work_requests.h"

#include <algorithm>
#include <string>
#include <utility>

#include "server/store/books/books.h"
#include "server/store/books/devices.h"
#include "server/store/books/sequence.h"
#include "server/store/codecs/builds.h"
#include "server/store/codecs/recompression.h"
#include "server/store/requests/answers.h"

namespace kvstrata {
namespace {

using Work = CodecState::Work;

Status NoCodec(const Sequence& s) {
  return FailedPrecondition("RECOMPRESS_RAW", "sequence " + std::to_string(s.id) + " has plan '" +
                                                  s.plan.name +
                                                  "', whose codec is raw: its rows stay as they "
                                                  "are; open it with a plan of codec packed or "
                                                  "lowrank");
}

}  // namespace

void WorkRequests::SetSink(RecompressSink* sink) {
  answers_.TellAfter([&] {
    StoreLock lock(mu_);
    recompression_.SetSinkLocked(sink);
    if (sink == nullptr) builds_.EndAllLocked(WorkersStopped());
  });
}

std::vector<WorkInfo> WorkRequests::Work() const {
  StoreLock lock(mu_);
  std::vector<WorkInfo> list;
  recompression_.ListLocked(&list);
  builds_.ListLocked(&list);
  std::stable_sort(list.begin(), list.end(),
                   [](const WorkInfo& a, const WorkInfo& b) { return a.sequence < b.sequence; });
  return list;
}

Status WorkRequests::Recompress(uint64_t session, uint64_t sequence, SettleDone done) {
  {
    StoreLock lock(mu_);
    KVS_ASSIGN_OR_RETURN(Sequence * s, catalog_.FindSequenceFor(session, sequence));
    if (!s->codec) return NoCodec(*s);
    KVS_RETURN_IF_ERROR(devices_.CheckHeld(*s));
    if (recompression_.sink() == nullptr) return WorkersStopped();
    recompression_.NoteAsked(s);
    if (done) {
      s->codec->waiters.push_back(std::move(done));
      recompression_.AnswerWaiters(s);
    }
  }
  answers_.Tell();
  return OkStatus();
}

Result<WorkProgress> WorkRequests::Progress(uint64_t session, uint64_t sequence) {
  StoreLock lock(mu_);
  KVS_ASSIGN_OR_RETURN(const Sequence* s, catalog_.FindSequenceFor(session, sequence));
  if (!s->codec) return NoCodec(*s);
  WorkProgress progress;
  progress.done = s->codec->work == Work::kIdle || s->codec->paused;
  if (!progress.done) progress.work = recompression_.WorkOf(*s);
  progress.extents = static_cast<uint32_t>(s->extents.size());
  progress.released_bytes = s->codec->released_bytes;
  return progress;
}

Result<bool> WorkRequests::Cancel(uint64_t session, uint64_t sequence) {
  bool ran = false;
  {
    StoreLock lock(mu_);
    KVS_ASSIGN_OR_RETURN(Sequence * s, catalog_.FindSequenceFor(session, sequence));
    ran = builds_.EndBuildLocked(sequence, WorkCancelled(sequence));
    if (s->codec && s->codec->work != Work::kIdle) {
      CodecState& codec = *s->codec;
      codec.paused = true;
      if (codec.work == Work::kRunning) {
        ran = true;
        // The next run has a flag of its own.
        codec.cancelled->store(true, std::memory_order_relaxed);
        codec.cancelled = std::make_shared<std::atomic<bool>>(false);
      } else {
        if (recompression_.sink() != nullptr) recompression_.sink()->Withdraw(sequence);
        codec.work = Work::kDue;
        codec.queued = {};
      }
      recompression_.AnswerWaiters(s, WorkCancelled(sequence));
    }
  }
  answers_.Tell();
  return ran;
}

}  // namespace kvstrata
