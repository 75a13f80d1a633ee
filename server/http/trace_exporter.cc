// SPDX-License-Identifier: Apache-2.0
#include "server/http/trace_exporter.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/address.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <charconv>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "server/telemetry/log.h"
#include "server/telemetry/thread_top.h"

namespace kvstrata {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using Error = boost::system::error_code;

constexpr int kServer = 2, kInternal = 1;       // SpanKind
constexpr int kOkStatus = 1, kErrorStatus = 2;  // StatusCode
constexpr uint64_t kMostAnswerBytes = 64 << 10;

std::string Text(std::string_view key, std::string_view value) {
  return "{\"key\":\"" + std::string(key) + "\",\"value\":{\"stringValue\":\"" +
         std::string(value) + "\"}}";
}

std::string Number(std::string_view key, uint64_t value) {
  return "{\"key\":\"kvstrata." + std::string(key) + "\",\"value\":{\"intValue\":\"" +
         std::to_string(value) + "\"}}";
}

std::string Json(const SpanRecord& s) {
  std::string attributes;
  for (const auto& [key, value] : s.numbers) {
    attributes += (attributes.empty() ? "" : ",") + Number(key, value);
  }
  if (!s.reason.empty()) {
    attributes += (attributes.empty() ? "" : ",") + Text("error.type", s.reason);
  }
  return "{\"traceId\":\"" + s.trace + "\",\"spanId\":\"" + s.span + "\",\"parentSpanId\":\"" +
         s.parent + "\",\"name\":\"" + std::string(s.name) +
         "\",\"kind\":" + std::to_string(s.request ? kServer : kInternal) +
         ",\"startTimeUnixNano\":\"" + std::to_string(s.begun_ns) + "\",\"endTimeUnixNano\":\"" +
         std::to_string(s.ended_ns) + "\",\"attributes\":[" + attributes +
         "],\"status\":{\"code\":" + std::to_string(s.reason.empty() ? kOkStatus : kErrorStatus) +
         "}}";
}

// One request: connects, sends, reads the answer, each after the other.
class Post : public std::enable_shared_from_this<Post> {
 public:
  Post(asio::io_context* loop, const TraceEndpoint& to, std::string body)
      : stream_(*loop), request_(http::verb::post, to.path, 11) {
    request_.set(http::field::host, to.host);
    request_.set(http::field::content_type, "application/json");
    request_.body() = std::move(body);
    request_.prepare_payload();
    parser_.body_limit(kMostAnswerBytes);
  }
  void Start(const TraceEndpoint& to) {
    stream_.async_connect({asio::ip::make_address(to.host), to.port},
                          [self = shared_from_this()](Error error) { self->Write(error); });
  }
  void Cut() { stream_.close(); }
  // "": it was taken.
  const std::string& why() const { return why_; }

 private:
  void Write(Error connected) {
    if (Failed(connected)) return;
    http::async_write(stream_, request_,
                      [self = shared_from_this()](Error error, size_t) { self->Read(error); });
  }
  void Read(Error written) {
    if (Failed(written)) return;
    http::async_read(stream_, buffer_, parser_,
                     [self = shared_from_this()](Error error, size_t) { self->Done(error); });
  }
  void Done(Error read) {
    if (Failed(read)) return;
    const unsigned status = parser_.get().result_int();
    why_ = status / 100 == 2 ? "" : "it answered " + std::to_string(status);
  }
  bool Failed(Error error) {
    if (error) why_ = error.message();
    return static_cast<bool>(error);
  }

  beast::tcp_stream stream_;
  http::request<http::string_body> request_;
  beast::flat_buffer buffer_;
  http::response_parser<http::string_body> parser_;
  std::string why_ = "no answer in time";
};

}  // namespace

std::optional<TraceEndpoint> ParseTraceEndpoint(std::string_view text) {
  constexpr std::string_view kScheme = "http://";
  if (!text.starts_with(kScheme)) return std::nullopt;
  text.remove_prefix(kScheme.size());
  TraceEndpoint to;
  if (const size_t slash = text.find('/'); slash != text.npos) {
    to.path = text.substr(slash);
    text = text.substr(0, slash);
    const auto plain = [](char c) { return c > ' ' && c < 0x7f; };
    if (!std::all_of(to.path.begin(), to.path.end(), plain)) return std::nullopt;
  }
  const size_t bracket = text.starts_with('[') ? text.find(']') : 0;
  if (bracket == text.npos) return std::nullopt;
  if (const size_t colon = text.find(':', bracket); colon != text.npos) {
    const std::string_view port = text.substr(colon + 1);
    const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), to.port);
    if (error != std::errc() || end != port.data() + port.size() || to.port == 0) {
      return std::nullopt;
    }
    text = text.substr(0, colon);
  }
  to.host = bracket == 0 ? text : text.substr(1, bracket - 1);
  if (bracket != 0 && bracket + 1 != text.size()) return std::nullopt;
  if (to.host == "localhost") to.host = "127.0.0.1";
  Error error;
  asio::ip::make_address(to.host, error);
  if (error) return std::nullopt;
  return to;
}

std::string OtlpJson(std::span<const SpanRecord> spans, std::string_view version) {
  std::string out = "{\"resourceSpans\":[{\"resource\":{\"attributes\":[" +
                    Text("service.name", "kvstratad") + "," + Text("service.version", version) +
                    "," + Text("service.instance.id", std::to_string(getpid())) +
                    "]},\"scopeSpans\":[{\"scope\":{\"name\":\"kvstrata\"},\"spans\":[";
  for (size_t i = 0; i < spans.size(); ++i) out += (i == 0 ? "" : ",") + Json(spans[i]);
  return out + "]}]}]}";
}

class TraceExporter::Impl {
 public:
  Impl(TraceEndpoint to, std::string version) : to_(std::move(to)), version_(std::move(version)) {
    thread_ = StartThread("kvs-trace", [this] { Run(); });
  }
  ~Impl() {
    stopping_ = true;
    Spans().End();
    loop_.stop();
    thread_.join();
  }

 private:
  void Run() {
    for (bool last = false; !last;) {
      Survive("kvs-trace", [&] {
        const std::vector<SpanRecord> spans = Spans().Take(kBatch, kLinger);
        last = stopping_;
        if (!spans.empty()) Send(spans);
      });
    }
  }

  void Send(const std::vector<SpanRecord>& spans) {
    loop_.restart();
    const bool last = stopping_;  // asked after restart: what stops it later ends run_for
    const auto post = std::make_shared<Post>(&loop_, to_, OtlpJson(spans, version_));
    post->Start(to_);
    loop_.run_for(last ? kLastDeadline : kDeadline);
    const std::string why = post->why();
    post->Cut();  // what is under way ends here
    loop_.restart();
    loop_.poll();
    Spans().Count(why.empty() ? SpanQueue::kExported : SpanQueue::kFailed, spans.size());
    if (why.empty() == taken_) return;
    taken_ = why.empty();
    LogEvent(taken_ ? LogLevel::kInfo : LogLevel::kWarn, "trace_export",
             {{"endpoint", to_.host + ":" + std::to_string(to_.port) + to_.path},
              {"taken", taken_},
              {"why", why}});
  }

  const TraceEndpoint to_;
  const std::string version_;
  asio::io_context loop_{1};
  std::atomic<bool> stopping_{false};
  bool taken_ = true;  // by the collector, the last time
  std::thread thread_;
};

Result<std::unique_ptr<TraceExporter>> TraceExporter::Start(TraceEndpoint to, std::string version) {
  Spans().Enable();
  try {
    return std::unique_ptr<TraceExporter>(
        new TraceExporter(std::make_unique<Impl>(std::move(to), std::move(version))));
  } catch (const std::system_error& error) {
    return ResourceExhausted("THREADS", std::string("no thread can be made: ") + error.what());
  }
}

TraceExporter::TraceExporter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TraceExporter::~TraceExporter() = default;

}  // namespace kvstrata
