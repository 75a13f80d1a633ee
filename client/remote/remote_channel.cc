// SPDX-License-Identifier: Apache-2.0
#include "client/remote/remote_channel.h"

#include <grpcpp/create_channel_posix.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "base/unique_fd.h"
#include "client/daemon_socket.h"
#include "kvstrata/kvstrata.h"

namespace kvstrata::client {
namespace {

constexpr std::chrono::milliseconds kCloseTimeout{1000};
constexpr int kMaxMetadataBytes = 64 << 10;  // codes of a batch of thousands come in a trailer

}  // namespace

// Opens the session, keeps the stream, and remembers how it ended. gRPC's callback API would need
// no thread, but its own ones may sleep for ten seconds when the last channel goes; this one never
// sleeps longer than a slice.
class RemoteChannel::Lease {
 public:
  Lease(v1::Control::Stub* control, const v1::OpenSessionRequest& request)
      : reader_(control->PrepareAsyncOpenSession(&context_, request, &events_)),
        waits_([this] { Wait(); }) {
    reader_->StartCall(Tag(Event::kStarted));
  }
  ~Lease() {
    context_.TryCancel();
    waits_.join();
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  Result<uint64_t> AwaitSession(std::chrono::milliseconds timeout) {
    std::unique_lock lock(mu_);
    if (!changed_.wait_for(lock, timeout, [this] { return opened_ || ended_.has_value(); })) {
      return Status(Code::kDeadlineExceeded, "DEADLINE",
                    "the daemon accepted the connection but opened no session in " +
                        std::to_string(timeout.count()) + " ms");
    }
    if (opened_) return response_.session();
    return FromGrpc(ended_->ok() ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "stream ended")
                                 : *ended_);
  }
  // The daemon's version. REQUIRES: a session.
  const std::string& version() const { return response_.version(); }

  Status Alive() {
    std::lock_guard lock(mu_);
    if (!ended_.has_value()) return OkStatus();
    return Unavailable("DAEMON_GONE", "the daemon closed this session or died (" +
                                          ended_->error_message() + "); detach and attach anew");
  }

 private:
  enum class Event : intptr_t { kStarted, kRead, kFinished };
  static void* Tag(Event event) { return reinterpret_cast<void*>(event); }

  // The thread: from one event to the next, until nothing is left to come.
  void Wait() {
    constexpr std::chrono::milliseconds kSlice{250};
    for (;;) {
      void* tag = nullptr;
      bool ok = false;
      const auto next = events_.AsyncNext(&tag, &ok, std::chrono::system_clock::now() + kSlice);
      if (next == grpc::CompletionQueue::SHUTDOWN) return;
      if (next == grpc::CompletionQueue::GOT_EVENT) {
        GoOn(static_cast<Event>(reinterpret_cast<intptr_t>(tag)), ok);
      }
    }
  }
  void GoOn(Event event, bool ok) {
    if (event == Event::kFinished) return End();
    if (event == Event::kRead && ok) {
      std::lock_guard lock(mu_);
      opened_ = true;
      changed_.notify_all();
    }
    if (!ok) return reader_->Finish(&status_, Tag(Event::kFinished));
    // The second one ends with the stream: nothing more comes.
    reader_->Read(event == Event::kStarted ? &response_ : &more_, Tag(Event::kRead));
  }
  void End() {
    std::lock_guard lock(mu_);
    ended_ = status_;
    changed_.notify_all();
    events_.Shutdown();
  }

  grpc::ClientContext context_;
  grpc::CompletionQueue events_;
  const std::unique_ptr<grpc::ClientAsyncReader<v1::OpenSessionResponse>> reader_;
  v1::OpenSessionResponse response_, more_;
  grpc::Status status_;
  std::mutex mu_;
  std::condition_variable changed_;
  bool opened_ = false;                // guarded by mu_
  std::optional<grpc::Status> ended_;  // guarded by mu_
  std::thread waits_;
};

Result<std::unique_ptr<RemoteChannel>> RemoteChannel::Open(const AttachOptions& options,
                                                           const std::string& backend) {
  KVS_ASSIGN_OR_RETURN(UniqueFd fd,
                       ConnectToDaemon(options.socket, "", SOCK_STREAM, options.timeout));
  std::unique_ptr<RemoteChannel> channel(new RemoteChannel);
  channel->timeout_ = options.timeout;
  struct stat st {};
  if (fstat(fd.get(), &st) == 0) channel->socket_inode_ = st.st_ino;
  channel->socket_ = fd.release();
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);  // what we asked for; requests are limited by the daemon
  arguments.SetInt(GRPC_ARG_MAX_METADATA_SIZE, kMaxMetadataBytes);
  const std::shared_ptr<grpc::Channel> connection =
      grpc::CreateCustomInsecureChannelFromFd("kvstrata", channel->socket_, arguments);
  channel->control_ = v1::Control::NewStub(connection);
  channel->compute_ = v1::Compute::NewStub(connection);
  v1::OpenSessionRequest request;
  request.set_client_name(options.client_name);
  request.set_backend(backend);
  request.set_device_uuid(options.device_uuid);
  channel->lease_ = std::make_unique<Lease>(channel->control_.get(), request);
  KVS_ASSIGN_OR_RETURN(channel->session_, channel->lease_->AwaitSession(options.timeout));
  return channel;
}

RemoteChannel::~RemoteChannel() {
  if (session_ == 0) return;
  v1::CloseSessionRequest request;
  request.set_session(session_);
  v1::CloseSessionResponse response;
  // Nothing is left to do about an error here: the end of the stream ends the session as well.
  timeout_ = std::min(timeout_, kCloseTimeout);
  (void)Call(&v1::Control::Stub::CloseSession, request, &response);
}

// Bare: gRPC's own answer for a method that nobody serves. The services' refusals have a reason.
Status RemoteChannel::Translate(const grpc::Status& status) const {
  Status translated = FromGrpc(status);
  if (translated.reason() != "RPC_UNIMPLEMENTED") return translated;
  return Unimplemented("RPC_UNIMPLEMENTED", "the daemon is " + lease_->version() +
                                                " and does not know this call of a client of " +
                                                kvs_version() +
                                                ": restart the daemon with this client's release");
}

void RemoteChannel::AbandonAfterFork() {
  // gRPC may have closed it in the parent, and the number may be another file's by now.
  struct stat st {};
  if (fstat(socket_, &st) == 0 && S_ISSOCK(st.st_mode) && st.st_ino == socket_inode_) {
    close(socket_);
  }
}

Status RemoteChannel::Alive() const { return lease_->Alive(); }

}  // namespace kvstrata::client
