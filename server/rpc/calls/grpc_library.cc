// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/calls/grpc_library.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>

#include <string>

#include "base/sync.h"
#include "server/sockets/packet.h"
#include "server/telemetry/log.h"

namespace kvstrata {
namespace {

constexpr uint32_t kLibraryLogBurst = 5;

// One library's lines; any thread.
class LibraryLog {
 public:
  explicit LibraryLog(const char* library) : library_(library) {}

  void Write(LogLevel level, const std::string& why) KVS_EXCLUDES(mu_) {
    uint64_t suppressed = 0;
    {
      MutexLock lock(mu_);
      if (!limiter_.Allow(&suppressed)) return;
    }
    LogEvent(level, library_, {{"why", Printable(why)}, {"suppressed", suppressed}});
  }

 private:
  const char* const library_;
  Mutex mu_;
  LogLimiter limiter_ KVS_GUARDED_BY(mu_){kLibraryLogBurst};
};

void LogFromGrpc(gpr_log_func_args* line) {
  static LibraryLog log("grpc");
  log.Write(line->severity == GPR_LOG_SEVERITY_ERROR ? LogLevel::kWarn : LogLevel::kDebug,
            line->message);
}

void LogFromProtobuf(google::protobuf::LogLevel level, const char*, int,
                     const std::string& message) {
  static LibraryLog log("protobuf");
  log.Write(level == google::protobuf::LOGLEVEL_INFO ? LogLevel::kDebug : LogLevel::kWarn, message);
}

}  // namespace

void TakeOverLibraryLogs() {
  gpr_set_log_function(&LogFromGrpc);
  google::protobuf::SetLogHandler(&LogFromProtobuf);
}

}  // namespace kvstrata
