// SPDX-License-Identifier: Apache-2.0
// TraceExporter: sends what Spans() has to an OpenTelemetry collector, as OTLP/HTTP in JSON.
//
// One thread ("kvs-trace"); nobody waits for it. A request has kDeadline; what the collector does
// not take then is lost, counted as failed, and told when that begins and ends ("trace_export").
// Boost.Beast speaks HTTP. Plain text: for a collector on this machine, or a network of one's own.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "server/telemetry/spans.h"

namespace kvstrata {

struct TraceEndpoint {
  std::string host;  // an address: no name is looked up, which has no deadline
  uint16_t port = 4318;
  std::string path = "/v1/traces";
};
// "http://127.0.0.1:4318/v1/traces"; port and path may be left out, "localhost" is an address.
std::optional<TraceEndpoint> ParseTraceEndpoint(std::string_view text);

// One ExportTraceServiceRequest.
std::string OtlpJson(std::span<const SpanRecord> spans, std::string_view version);

class TraceExporter {
 public:
  static constexpr std::chrono::milliseconds kDeadline{2000};
  static constexpr std::chrono::milliseconds kLinger{200};        // for more spans of a request
  static constexpr std::chrono::milliseconds kLastDeadline{200};  // at the end
  static constexpr size_t kBatch = 512;

  // Enables Spans(). RESOURCE_EXHAUSTED THREADS.
  static Result<std::unique_ptr<TraceExporter>> Start(TraceEndpoint to, std::string version);
  // Sends what there is, for kLastDeadline at most.
  ~TraceExporter();

 private:
  class Impl;
  explicit TraceExporter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvstrata
