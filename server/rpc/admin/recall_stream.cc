// SPDX-License-Identifier: Apache-2.0
// RecallStream: the AuditRecall call. It starts a recall audit in the store, tells its progress,
// and ends with the report and with how the audit ended. The call's end is the audit's, and the
// other way round: a client that goes away, or the deadline, ends it in the store too.
//
// Ownership: a stream owns itself until gRPC is done with it; the audit's listener and the alarm
// hold shares. Threads: any. Cost: reports are made on work threads.
#include <grpcpp/alarm.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "base/sync.h"
#include "kvstrata/v1/admin.grpc.pb.h"
#include "server/rpc/admin/admin_service.h"
#include "server/rpc/calls/service_context.h"

namespace kvstrata {
namespace {

class RecallStream final : public grpc::ServerWriteReactor<v1::AuditRecallResponse>,
                           public std::enable_shared_from_this<RecallStream> {
 public:
  // The reactor of a new call; valid until gRPC calls OnDone.
  static RecallStream* Start(ServiceContext* context, const v1::AuditRecallRequest& request);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  explicit RecallStream(ServiceContext* context)
      : context_(context), under_way_(context->calls()) {}
  Status Begin(const v1::AuditRecallRequest& request);
  void SetDeadline();
  // Something was added, or it ended; from the store.
  void Changed();
  // Writes what there is to say, unless a write is under way: then its end comes back here.
  void Tell() KVS_EXCLUDES(mu_);
  // Ends the audit, which ends the call. Nothing if it has ended.
  void EndAudit(const Status& why);

  ServiceContext* const context_;
  CallUnderWay under_way_;              // until OnDone
  std::shared_ptr<RecallStream> self_;  // until OnDone

  // Constant after Start.
  std::shared_ptr<RecallAudit> audit_;  // null: it was refused
  uint64_t sequence_ = 0;
  std::chrono::microseconds timeout_{0};
  grpc::Alarm deadline_;

  Mutex mu_;
  v1::AuditRecallResponse response_ KVS_GUARDED_BY(mu_);
  bool started_ KVS_GUARDED_BY(mu_) = false;
  bool writing_ KVS_GUARDED_BY(mu_) = false;
  bool changed_ KVS_GUARDED_BY(mu_) = false;  // since the write under way began
  bool finished_ KVS_GUARDED_BY(mu_) = false;
};

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

}  // namespace

grpc::ServerWriteReactor<v1::AuditRecallResponse>* AdminService::AuditRecall(
    grpc::CallbackServerContext*, const v1::AuditRecallRequest* request) {
  return RecallStream::Start(context_, *request);
}

}  // namespace kvstrata
