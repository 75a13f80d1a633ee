// SPDX-License-Identifier: Apache-2.0
// WatchStream: the Watch call. Sends what the event ring has, then looks for more ten times a
// second: whoever logs an event knows nothing of watchers and waits for none. Between two messages
// a stream holds one batch of events, however slowly its caller reads.
//
// Cost: a look at the ring ten times a second.
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "kvstrata/v1/admin.grpc.pb.h"
#include "server/rpc/admin/admin_service.h"
#include "server/rpc/calls/shared_stream.h"
#include "server/telemetry/event_ring.h"

namespace kvstrata {
namespace {

// Shorter than the grace in which a daemon that stops lets calls end.
constexpr std::chrono::milliseconds kWatchInterval{100};

void Write(const RecordedEvent& event, v1::Event* out) {
  out->set_number(event.number);
  out->set_time_us(event.time_us);
  out->set_level(std::string(NameOf(event.level)));
  out->set_name(event.name);
  for (const RecordedEvent::Field& field : event.fields) {
    v1::EventField* added = out->add_fields();
    added->set_key(field.key);
    added->set_value(field.value);
    added->set_text(field.quoted);
  }
}

class WatchStream final : public SharedStream<WatchStream, v1::WatchRequest, v1::WatchResponse> {
 public:
  static constexpr int kBatch = 64;  // events of a message

  WatchStream(ServiceContext* context, const v1::WatchRequest& request)
      : SharedStream(context),
        follow_(request.follow()),
        after_(RecentEvents().Begin(request.after())) {}
  Status Begin(const v1::WatchRequest&) {
    Tell();
    return OkStatus();
  }

  void OnWriteDone(bool ok) override {
    {
      MutexLock lock(mu_);
      writing_ = false;
      cancelled_ |= !ok;
    }
    Tell();
  }
  void OnCancel() override {
    {
      MutexLock lock(mu_);
      cancelled_ = true;
    }
    Tell();
  }

 private:
  // Sends what there is, waits for more, or ends.
  void Tell() KVS_EXCLUDES(mu_) {
    MutexLock lock(mu_);
    if (finished_ || writing_) return;
    if (cancelled_) return FinishLocked(grpc::Status::CANCELLED);
    // Seen first, so that what was logged before the end is sent.
    const bool stopping = context_->stopping();
    FillIn();
    if (response_.events_size() != 0) {
      writing_ = true;
      return StartWrite(&response_);
    }
    if (!follow_) return FinishLocked(grpc::Status::OK);
    if (stopping) return FinishLocked(ToGrpc(ServiceContext::Stopping()));
    TellAt(std::chrono::system_clock::now() + kWatchInterval, &WatchStream::Tell, &next_);
  }
  void FillIn() KVS_REQUIRES(mu_) {
    response_.Clear();
    while (response_.events_size() < kBatch) {
      uint64_t missed = 0;
      const std::optional<RecordedEvent> event = RecentEvents().Next(after_, &missed);
      if (!event) return;
      // What is gone goes before a message's first event.
      if (missed != 0 && response_.events_size() != 0) return;
      response_.set_missed(response_.missed() + missed);
      Write(*event, response_.add_events());
      after_ = event->number;
    }
  }
  void FinishLocked(const grpc::Status& status) KVS_REQUIRES(mu_) {
    finished_ = true;
    Finish(status);
  }

  const bool follow_;

  std::unique_ptr<grpc::Alarm> next_ KVS_GUARDED_BY(mu_);
  v1::WatchResponse response_ KVS_GUARDED_BY(mu_);
  uint64_t after_ KVS_GUARDED_BY(mu_);  // the last event that was sent
  bool writing_ KVS_GUARDED_BY(mu_) = false;
  bool cancelled_ KVS_GUARDED_BY(mu_) = false;
  bool finished_ KVS_GUARDED_BY(mu_) = false;
};

}  // namespace

WriteReactor<v1::WatchResponse>* AdminService::Watch(CallContext*,
                                                     const v1::WatchRequest* request) {
  return WatchStream::Start(context_, *request);
}

}  // namespace kvstrata
