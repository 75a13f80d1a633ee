// SPDX-License-Identifier: Apache-2.0
// RecallStream: the AuditRecall call. It starts a recall audit in the store, tells its progress,
// and ends with the report and with how the audit ended. The call's end is the audit's, and the
// other way round: a client that goes away, or the deadline, ends it in the store too.
//
// The audit's listener holds a share. Cost: reports are made on work threads.
#include <chrono>
#include <memory>
#include <string>

#include "kvstrata/v1/admin.grpc.pb.h"
#include "server/rpc/admin/admin_service.h"
#include "server/rpc/calls/copy_fields.h"
#include "server/rpc/calls/shared_stream.h"

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
  KVS_COPY_FIELDS(out, m, samples, mean, p5, p50, p95, min, max);
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

class RecallStream final
    : public SharedStream<RecallStream, v1::AuditRecallRequest, v1::AuditRecallResponse> {
 public:
  RecallStream(ServiceContext* context, const v1::AuditRecallRequest&) : SharedStream(context) {}
  Status Begin(const v1::AuditRecallRequest& request) {
    if (request.timeout_us() > static_cast<uint64_t>(kMaxTimeout.count())) {
      return InvalidArgument("RECALL_OPTION",
                             "timeout_us is " + std::to_string(request.timeout_us()) +
                                 "; allowed: 1 .. " + std::to_string(kMaxTimeout.count()));
    }
    timeout_ = request.timeout_us() == 0 ? kDefaultTimeout
                                         : std::chrono::microseconds(request.timeout_us());
    RecallOptions options;
    if (request.every() != 0) options.every = request.every();
    if (request.steps() != 0) options.steps = request.steps();
    sequence_ = request.sequence();
    KVS_ASSIGN_OR_RETURN(const RecallStart start,
                         context_->store().recalls().StartRecallAudit(
                             sequence_, options, [self = shared_from_this()] { self->Changed(); }));
    audit_ = start.audit;
    TellAt(std::chrono::system_clock::now() + timeout_, &RecallStream::TimeOut, &deadline_);
    {
      MutexLock lock(mu_);
      response_.set_sequence(sequence_);
      response_.set_plan(start.sequence.plan.name);
      response_.set_plan_text(FormatPlan(start.sequence.plan));
      response_.set_transport(start.transport == Transport::kLinked ? "linked" : "remote");
      response_.set_every(options.every);
      Write(audit_->Progress(), &response_);
      started_ = true;
    }
    Tell();
    return OkStatus();
  }

  void OnWriteDone(bool) override {
    {
      MutexLock lock(mu_);
      writing_ = false;
      if (!changed_) return;
    }
    Changed();
  }
  void OnCancel() override {
    if (audit_ == nullptr) return;
    EndAudit({Code::kAborted, "RECALL_CANCELLED", "who asked for the audit went away"});
  }
  void OnDone() override {
    OnCancel();
    if (deadline_ != nullptr) deadline_->Cancel();
    SharedStream::OnDone();
  }

 private:
  void TimeOut() {
    EndAudit(TimedOut(sequence_, audit_->Progress(), audit_->options().every, timeout_));
  }
  // Something was added, or it ended; from the store.
  // The caller may be the attach server's loop: nothing is made or written on its thread.
  void Changed() {
    context_->queue()->Post([self = shared_from_this()] { self->Tell(); });
  }
  // Writes what there is to say, unless a write is under way: then its end comes back here.
  void Tell() KVS_EXCLUDES(mu_) {
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
  // Ends the audit, which ends the call. Nothing if it has ended.
  void EndAudit(const Status& why) {
    context_->store().recalls().EndRecallAudit(sequence_, audit_->number(), why);
  }

  // Constant after Start.
  std::shared_ptr<RecallAudit> audit_;  // null: it was refused
  uint64_t sequence_ = 0;
  std::chrono::microseconds timeout_{0};
  std::unique_ptr<grpc::Alarm> deadline_;

  v1::AuditRecallResponse response_ KVS_GUARDED_BY(mu_);
  bool started_ KVS_GUARDED_BY(mu_) = false;
  bool writing_ KVS_GUARDED_BY(mu_) = false;
  bool changed_ KVS_GUARDED_BY(mu_) = false;  // since the write under way began
  bool finished_ KVS_GUARDED_BY(mu_) = false;
};

}  // namespace

WriteReactor<v1::AuditRecallResponse>* AdminService::AuditRecall(
    CallContext*, const v1::AuditRecallRequest* request) {
  return RecallStream::Start(context_, *request);
}

}  // namespace kvstrata
