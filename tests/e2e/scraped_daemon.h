// SPDX-License-Identifier: Apache-2.0
// ScrapedDaemon: a kvstratad with a disk of its own whose /metrics a test reads, and which of its
// metrics have moved since it began. Not in a program that loads libkvstrata_remote.so, as
// operator.h. Not thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "kvstrata/v1/admin.grpc.pb.h"
#include "proto/status_map.h"
#include "server/telemetry/metric_table.h"
#include "tests/e2e/engine.h"
#include "tests/fakes/daemon_process.h"
#include "tests/fakes/scratch_dir.h"

namespace kvstrata::testing {

inline constexpr int kScrapePatienceMs = 30'000;

using Values = std::map<std::string, double>;  // by series: name{labels}

// "kvstrata_sessions" of a series' name, a histogram's parts among it.
inline std::string MetricOf(const std::string& series) {
  std::string name = series.substr(0, series.find('{'));
  for (const std::string_view part : {"_bucket", "_sum", "_count"}) {
    if (!FindMetric(name) && name.ends_with(part)) name.resize(name.size() - part.size());
  }
  return name;
}

inline std::string Get(const std::string& path, const std::string& target,
                       const std::string& header = "") {
  const UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  std::strncpy(at.sun_path, path.c_str(), sizeof(at.sun_path) - 1);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&at), sizeof(at)) != 0) return "";
  const std::string request = "GET " + target + " HTTP/1.1\r\nHost: x\r\n" + header + "\r\n";
  (void)send(fd.get(), request.data(), request.size(), MSG_NOSIGNAL);
  std::string text;
  for (char part[4096];;) {
    pollfd wait{fd.get(), POLLIN, 0};
    if (poll(&wait, 1, kScrapePatienceMs) != 1) return "late";
    const ssize_t n = read(fd.get(), part, sizeof(part));
    if (n <= 0) return text;
    text.append(part, static_cast<size_t>(n));
  }
}

// A daemon that serves pages, and what its metrics have done since it began.
class ScrapedDaemon {
 public:
  explicit ScrapedDaemon(std::set<std::string>* moved,
                         const std::vector<std::string>& settings = {})
      : moved_(moved) {
    std::vector<std::string> flags;
    for (const std::string& s : settings) {
      flags.insert(flags.end(), {"--set", s});
    }
    for (const std::string& s :
         {"http.listen=unix:" + http(), "disk.path=" + tier(),
          std::string("disk.budget_bytes=16MiB"), std::string("disk.segment_bytes=1MiB"),
          std::string("disk.load_timeout=60s")}) {
      flags.insert(flags.end(), {"--set", s});
    }
    process_ = std::make_unique<DaemonProcess>(flags);
    stub_ = v1::Admin::NewStub(
        grpc::CreateChannel("unix:" + process_->socket(), grpc::InsecureChannelCredentials()));
    first_ = Scrape();
  }
  ~ScrapedDaemon() {
    Scrape();
    process_.reset();
  }

  std::string http() const { return folder_ / "http.sock"; }
  std::string tier() const { return folder_ / "tier"; }
  std::string socket() const { return process_->socket(); }
  pid_t pid() const { return process_->pid(); }
  const Values& first() const { return first_; }

  Values Scrape() {
    const std::string page = Get(http(), "/metrics");
    EXPECT_TRUE(page.starts_with("HTTP/1.1 200 OK\r\n")) << page.substr(0, 200);
    Values values;
    std::istringstream lines(page.substr(std::min(page.find("\r\n\r\n"), page.size())));
    for (std::string line; std::getline(lines, line);) {
      const size_t space = line.rfind(' ');
      if (line.empty() || line[0] == '#' || line[0] == '\r' || space == line.npos) continue;
      values[line.substr(0, space)] = std::stod(line.substr(space + 1));
    }
    for (const auto& [series, value] : values) {
      const auto before = first_.find(series);
      const double was = before == first_.end() ? 0 : before->second;
      if (!first_.empty() && value != was) moved_->insert(MetricOf(series));
    }
    return values;
  }
  // Scrapes until the series have more than `least` together.
  ::testing::AssertionResult Reaches(const std::vector<std::string>& series, double least = 0) {
    double last = 0;
    const bool there = Eventually(
        [&] {
          const Values values = Scrape();
          last = 0;
          for (const std::string& one : series) {
            const auto found = values.find(one);
            if (found != values.end()) last += found->second;
          }
          return last > least;
        },
        kScrapePatienceMs);
    if (there) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << series.front() << " stays at " << last;
  }
  ::testing::AssertionResult Reaches(const std::string& series, double least = 0) {
    return Reaches(std::vector<std::string>{series}, least);
  }

  template <typename Response, typename Request>
  Response Ask(grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*, const Request&,
                                                       Response*),
               const Request& request) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    Response response;
    asked_ = FromGrpc((stub_.get()->*method)(&context, request, &response));
    return response;
  }
  const kvstrata::Status& asked() const { return asked_; }
  void Drain(bool resume) {
    v1::DrainRequest request;
    request.set_resume(resume);
    ASSERT_TRUE(Eventually(
        [&] {
          const v1::DrainResponse r = Ask<v1::DrainResponse>(&v1::Admin::Stub::Drain, request);
          return resume ? !r.draining() : r.drained();
        },
        kScrapePatienceMs));
  }
  uint64_t Scrub() {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    const auto reader = stub_->Scrub(&context, v1::ScrubRequest());
    v1::ScrubResponse last;
    while (reader->Read(&last)) {
    }
    EXPECT_TRUE(reader->Finish().ok());
    return last.corrupt();
  }

 private:
  std::set<std::string>* const moved_;
  const ScratchDir folder_;
  std::unique_ptr<DaemonProcess> process_;
  std::unique_ptr<v1::Admin::Stub> stub_;
  kvstrata::Status asked_;
  Values first_;
};

}  // namespace kvstrata::testing
