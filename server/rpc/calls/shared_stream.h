// SPDX-License-Identifier: Apache-2.0
// SharedStream: a call that answers with a stream and that several threads may tell something. A
// subclass is a final class Stream with a constructor Stream(ServiceContext*, const Request&), and
// with Status Begin(const Request&), which starts it or says why not.
//
// Ownership: a stream owns itself until gRPC is done with it; whoever tells it something holds a
// share. Threads: any.
#pragma once

#include <grpcpp/alarm.h>

#include <chrono>
#include <memory>
#include <utility>

#include "base/sync.h"
#include "server/rpc/calls/service_context.h"

namespace kvstrata {

template <typename Stream, typename Request, typename Response>
class SharedStream : public grpc::ServerWriteReactor<Response>,
                     public std::enable_shared_from_this<Stream> {
 public:
  // The reactor of a new call of an operator; valid until gRPC calls OnDone.
  static Stream* Start(ServiceContext* context, const Request& request) {
    std::shared_ptr<Stream> stream(new Stream(context, request));
    stream->self_ = stream;
    Status status = context->CheckAdmin();
    if (status.ok()) status = stream->Begin(request);
    if (!status.ok()) stream->Finish(ToGrpc(status));
    return stream.get();
  }
  void OnDone() override {
    under_way_.End();
    const std::shared_ptr<Stream> last = std::move(self_);
  }

 protected:
  explicit SharedStream(ServiceContext* context)
      : context_(context), under_way_(context->calls()) {}

  // Has (this->*tell)() called then, unless the stream is gone. Weak: the alarm is its own. A new
  // one each time: the last may be in its callback.
  void TellAt(std::chrono::system_clock::time_point then, void (Stream::*tell)(),
              std::unique_ptr<grpc::Alarm>* alarm) {
    *alarm = std::make_unique<grpc::Alarm>();
    (*alarm)->Set(then, [weak = this->weak_from_this(), tell](bool fired) {
      const std::shared_ptr<Stream> self = weak.lock();
      if (fired && self != nullptr) (self.get()->*tell)();
    });
  }

  ServiceContext* const context_;
  Mutex mu_;

 private:
  CallUnderWay under_way_;        // until OnDone
  std::shared_ptr<Stream> self_;  // until OnDone
};

// ProgressStream: a SharedStream that tells how far something is, and ends when that does.
template <typename Stream, typename Request, typename Response>
class ProgressStream : public SharedStream<Stream, Request, Response> {
  using Base = SharedStream<Stream, Request, Response>;

 public:
  void OnWriteDone(bool) override {
    MutexLock lock(mu_);
    writing_ = false;
    if (ended_) FinishLocked();
  }

 protected:
  using Base::Base;
  using Base::mu_;

  // Makes `response_` say how far it is.
  virtual void FillIn() KVS_REQUIRES(mu_) = 0;
  // Tells it, unless a message is on its way.
  void TellLocked() KVS_REQUIRES(mu_) {
    if (writing_) return;
    FillIn();
    writing_ = true;
    this->StartWrite(&response_);
  }
  // It is over, and `why`. What comes after the first time is nothing to the caller.
  void End(const Status& why) KVS_EXCLUDES(mu_) {
    MutexLock lock(mu_);
    if (ended_) return;
    ended_ = true;
    why_ = why;
    if (!writing_) FinishLocked();
  }
  bool ended() const KVS_REQUIRES(mu_) { return ended_; }
  bool writing() const KVS_REQUIRES(mu_) { return writing_; }

  Response response_ KVS_GUARDED_BY(mu_);

 private:
  void FinishLocked() KVS_REQUIRES(mu_) {
    FillIn();
    response_.set_done(why_.ok());
    writing_ = true;  // nothing may follow
    this->StartWriteAndFinish(&response_, grpc::WriteOptions(), ToGrpc(why_));
  }

  bool writing_ KVS_GUARDED_BY(mu_) = false;
  bool ended_ KVS_GUARDED_BY(mu_) = false;
  Status why_ KVS_GUARDED_BY(mu_);
};

}  // namespace kvstrata
