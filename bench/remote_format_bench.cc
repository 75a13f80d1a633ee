// SPDX-License-Identifier: Apache-2.0
// What the remote tier's format costs a core: values made ready to be sent, and opened in place,
// with remote.seal none and gcm; beside one read of the same bytes. CPU time, so that neighbours
// bend it less. Values of more than the last-level cache together are taken in turn.
//
// Usage: remote_format_bench [--json-out FILE] [--commit HASH] [--date DATE]
#include <cstdio>
#include <cstring>
#include <fstream>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "bench/results.h"
#include "server/tier/remote/remote_format.h"

namespace kvstrata::remote {
namespace {

constexpr uint64_t kMemory = uint64_t{128} << 20;
constexpr int kRounds = 9;

struct Row {
  std::string id;
  bench::Timing gbps;
  double baseline = 0;
};

class FormatBench {
 public:
  FormatBench(Seal seal, uint64_t bytes)
      : seal_(seal),
        bytes_(bytes),
        format_(RemoteSecret::Of("0123456789abcdef0123456789abcdef").value(), "uid:1000", {seal}),
        memory_(kMemory / sizeof(uint64_t)),
        room_(kStripeBytes) {
    std::mt19937_64 random(20261126);
    for (uint64_t& word : memory_) word = random();
  }

  // GB/s of reading the values' bytes once.
  double Reading() {
    std::vector<double> samples;
    for (int i = 0; i < kRounds; ++i) {
      const double begin = bench::ThreadUs();
      const uint64_t sum = std::accumulate(memory_.begin(), memory_.end(), uint64_t{0});
      samples.push_back(Rate(begin));
      if (sum == 0) std::puts("");  // or it would not be computed
    }
    return bench::TimingOf(samples).median;
  }

  std::vector<Row> Rows() {
    const double reading = Reading();
    std::vector<double> puts, gets;
    for (int i = 0; i < kRounds; ++i) {
      std::vector<Header> headers;
      const double begin = bench::ThreadUs();
      for (uint64_t v = 0; v < count(); ++v) headers.push_back(Put(v));
      puts.push_back(Rate(begin));
      // Opened in place: what was sealed lies there now, and what comes out is as it was.
      if (seal_ == Seal::kGcm) {
        for (uint64_t v = 0; v < count(); ++v) {
          headers[v] = Put(v);
          std::memcpy(At(v).data(), room_.data(), bytes_);
        }
      }
      const double opened = bench::ThreadUs();
      for (uint64_t v = 0; v < count(); ++v) Get(v, headers[v]);
      gets.push_back(Rate(opened));
    }
    const std::string id =
        "remote_format/" + std::string(SealName(seal_)) + "/" + std::to_string(bytes_ >> 10) + "K/";
    return {{id + "put", bench::TimingOf(puts), reading},
            {id + "get", bench::TimingOf(gets), reading}};
  }

 private:
  uint64_t count() const { return kMemory / bytes_; }
  double Rate(double begin) const {
    return static_cast<double>(kMemory) / (bench::ThreadUs() - begin) * 1e-3;
  }
  std::span<std::byte> At(uint64_t v) {
    return std::as_writable_bytes(std::span(memory_)).subspan(v * bytes_, bytes_);
  }
  Header Put(uint64_t v) {
    const std::span<const std::byte> buffer = At(v);
    const OutgoingValue value = format_.Prepare("a key", {&buffer, 1}, now_).value();
    return format_.Write(value, 0, room_).header;
  }
  void Get(uint64_t v, const Header& header) {
    const std::span<std::byte> buffer = At(v);
    IncomingValue value = format_.Expect("a key", {&buffer, 1}).value();
    KVS_CHECK(format_.Open(&value, 0, header, kHeaderBytes + bytes_, now_).ok());
  }

  const Seal seal_;
  const uint64_t bytes_;
  const WallTime now_ = std::chrono::system_clock::now();
  RemoteFormat format_;
  std::vector<uint64_t> memory_;
  std::vector<std::byte> room_;
};

}  // namespace
}  // namespace kvstrata::remote

int main(int argc, char** argv) {
  using namespace kvstrata::remote;
  namespace bench = kvstrata::bench;
  bench::Json told = bench::Json::array();
  for (const Seal seal : {Seal::kNone, Seal::kGcm}) {
    for (const uint64_t bytes : {uint64_t{64} << 10, uint64_t{1} << 20, kStripeBytes}) {
      for (Row& row : FormatBench(seal, bytes).Rows()) {
        std::printf("%-32s %6.2f GB/s (p10 %.2f, p90 %.2f), one read %.2f\n", row.id.c_str(),
                    row.gbps.median, row.gbps.p10, row.gbps.p90, row.baseline);
        told.push_back(bench::RowOf(row.id, row.gbps, "GB/s"));
        told.back()["baseline"] = {{"name", "one read"}, {"value", row.baseline}};
        told.back()["ratio"] = row.gbps.median / row.baseline;
      }
    }
  }
  bench::WriteResults(argc, argv, "remote-format", bench::DeviceName(),
                      "build/bin/remote_format_bench --json-out FILE",
                      {{"notes", "CPU time of one thread; 128 MiB of values in turn"}}, told);
  return 0;
}
