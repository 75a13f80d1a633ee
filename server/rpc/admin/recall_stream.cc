// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/admin/recall_stream.h"

#include <string>
#include <utility>

namespace kvstrata {
namespace {

constexpr std::chrono::microseconds kDefaultTimeout = std::chrono::seconds(60);
constexpr std::chrono::microseconds kMaxTimeout = std::chrono::hours(1);

void Write(const RecallProgress& progress, v1::AuditRecallResponse* out) {
  out->set_steps(progress.steps);
  out->set_wanted_steps(progress.wanted);
  out->set_dropped_steps(progress.dropped);
  out->set_first_position(static_cast<uint32_t>(progress.first_position));
  out->set_last_position(static_cast<uint32_t>(progress.last_position));
}

void Write(const RecallMetric& m, v1::RecallMetric* out) {
  out->set_samples(m.samples);
  out->set_mean(m.mean);
  out->set_p5(m.p5);
  out->set_p50(m.p50);
  out->set_p95(m.p95);
  out->set_min(m.min);
  out->set_max(m.max);
  out->mutable_histogram()->Add(m.histogram.begin(), m.histogram.end());
}

void Write(const RecallRow& row, v1::RecallRow* out) {
  out->set_layer(row.layer);
  Write(row.recall, out->mutable_recall());
  Write(row.error, out->mutable_error());
}

void Write(const RecallReport& report, v1::AuditRecallResponse* out) {
  Write(report.progress, out);
  const std::vector<double> recall = RecallBounds(), error = ErrorBounds();
  out->mutable_recall_bounds()->Add(recall.begin(), recall.end());
  out->mutable_error_bounds()->Add(error.begin(), error.end());
  Write(report.all, out->mutable_all());
  for (const RecallRow& row : report.layers) Write(row, out->add_layers());
}

Status TimedOut(uint64_t sequence, const RecallProgress& at, uint32_t every,
                std::chrono::microseconds timeout) {
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count();
  return {Code::kDeadlineExceeded, "RECALL_TIMEOUT",
          std::to_string(at.steps) + " of " + std::to_string(at.wanted) + " steps of sequence " +
              std::to_string(sequence) + " were sampled in " + std::to_string(ms) +
              " ms; sampled are decode steps of one token behind a complete " +
              "prompt (kvs_prefill_done), one in " + std::to_string(every) +
              ": wait longer, or ask for fewer or denser steps"};
}

}  // namespace

RecallStream* RecallStream::Start(ServiceContext* context, const v1::AuditRecallRequest& request) {
  std::shared_ptr<RecallStream> stream(new RecallStream(context));
  stream->self_ = stream;
  const Status status = stream->Begin(request);
  if (status.ok()) {
    stream->SetDeadline();
    {
      MutexLock lock(stream->mu_);
      stream->started_ = true;
    }
    stream->Tell();
  } else {
    stream->Finish(ToGrpc(status));
  }
  return stream.get();
}

Status RecallStream::Begin(const v1::AuditRecallRequest& request) {
  KVS_RETURN_IF_ERROR(context_->CheckAdmin());
  if (request.timeout_us() > static_cast<uint64_t>(kMaxTimeout.count())) {
    return InvalidArgument("RECALL_OPTION",
                           "timeout_us is " + std::to_string(request.timeout_us()) +
                               "; allowed: 1 .. " + std::to_string(kMaxTimeout.count()));
  }
  timeout_ =
      request.timeout_us() == 0 ? kDefaultTimeout : std::chrono::microseconds(request.timeout_us());
  RecallOptions options;
  if (request.every() != 0) options.every = request.every();
  if (request.steps() != 0) options.steps = request.steps();
  sequence_ = request.sequence();
  KVS_ASSIGN_OR_RETURN(const RecallStart start,
                       context_->store().recalls().StartRecallAudit(
                           sequence_, options, [self = shared_from_this()] { self->Changed(); }));
  audit_ = start.audit;
  MutexLock lock(mu_);
  response_.set_sequence(sequence_);
  response_.set_plan(start.sequence.plan.name);
  response_.set_plan_text(FormatPlan(start.sequence.plan));
  response_.set_transport(start.transport == Transport::kLinked ? "linked" : "remote");
  response_.set_every(options.every);
  Write(audit_->Progress(), &response_);
  return OkStatus();
}

void RecallStream::SetDeadline() {
  // Weak: the alarm is this object's own.
  deadline_.Set(std::chrono::system_clock::now() + timeout_, [weak = weak_from_this()](bool fired) {
    const std::shared_ptr<RecallStream> self = weak.lock();
    if (!fired || self == nullptr) return;
    self->EndAudit(TimedOut(self->sequence_, self->audit_->Progress(),
                            self->audit_->options().every, self->timeout_));
  });
}

void RecallStream::EndAudit(const Status& why) {
  context_->store().recalls().EndRecallAudit(sequence_, audit_->number(), why);
}

// The caller may be the attach server's loop: nothing is made or written on its thread.
void RecallStream::Changed() {
  context_->queue()->Post([self = shared_from_this()] { self->Tell(); });
}

void RecallStream::Tell() {
  MutexLock lock(mu_);
  changed_ = true;
  if (!started_ || writing_ || finished_) return;
  changed_ = false;
  Status why;
  if (audit_->Ended(&why)) {
    finished_ = true;
    Write(audit_->Report(), &response_);
    StartWriteAndFinish(&response_, grpc::WriteOptions(), ToGrpc(why));
  } else {
    writing_ = true;
    Write(audit_->Progress(), &response_);
    StartWrite(&response_);
  }
}

void RecallStream::OnWriteDone(bool) {
  {
    MutexLock lock(mu_);
    writing_ = false;
    if (!changed_) return;
  }
  Changed();
}

void RecallStream::OnCancel() {
  if (audit_ == nullptr) return;
  EndAudit({Code::kAborted, "RECALL_CANCELLED", "who asked for the audit went away"});
}

void RecallStream::OnDone() {
  if (audit_ != nullptr) {
    EndAudit({Code::kAborted, "RECALL_CANCELLED", "who asked for the audit went away"});
    deadline_.Cancel();
  }
  const std::shared_ptr<RecallStream> last = std::move(self_);
  under_way_.End();
}

}  // namespace kvstrata
