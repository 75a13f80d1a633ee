// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/admin/watch_stream.h"

#include <chrono>
#include <optional>

#include "server/telemetry/event_ring.h"

namespace kvstrata {
namespace {

// Shorter than the grace in which a daemon that stops lets calls end.
constexpr std::chrono::milliseconds kBetween{100};

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

}  // namespace

WatchStream::WatchStream(ServiceContext* context, const v1::WatchRequest& request)
    : context_(context),
      follow_(request.follow()),
      under_way_(context->calls()),
      after_(RecentEvents().Begin(request.after())) {}

WatchStream* WatchStream::Start(ServiceContext* context, const v1::WatchRequest& request) {
  std::shared_ptr<WatchStream> stream(new WatchStream(context, request));
  stream->self_ = stream;
  const Status admin = context->CheckAdmin();
  if (admin.ok()) {
    stream->Tell();
  } else {
    stream->Finish(ToGrpc(admin));
  }
  return stream.get();
}

void WatchStream::FillIn() {
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

void WatchStream::Tell() {
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
  TellLater();
}

void WatchStream::TellLater() {
  // Weak: the alarm is this object's own. A new one: the last may be in its callback.
  next_ = std::make_unique<grpc::Alarm>();
  next_->Set(std::chrono::system_clock::now() + kBetween, [weak = weak_from_this()](bool fired) {
    const std::shared_ptr<WatchStream> self = weak.lock();
    if (fired && self != nullptr) self->Tell();
  });
}

void WatchStream::FinishLocked(const grpc::Status& status) {
  finished_ = true;
  Finish(status);
}

void WatchStream::OnWriteDone(bool ok) {
  {
    MutexLock lock(mu_);
    writing_ = false;
    cancelled_ |= !ok;
  }
  Tell();
}

void WatchStream::OnCancel() {
  {
    MutexLock lock(mu_);
    cancelled_ = true;
  }
  Tell();
}

void WatchStream::OnDone() {
  under_way_.End();
  const std::shared_ptr<WatchStream> last = std::move(self_);
}

}  // namespace kvstrata
