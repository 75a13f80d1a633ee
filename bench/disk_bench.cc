// SPDX-License-Identifier: Apache-2.0
// What the disk tier's engine (server/tier/disk/disk_tier.h) gets out of a device; bench/disk.py
// runs it beside fio.
//
//   disk_bench fill  DIRECTORY VALUE_BYTES VALUES    writes values in batches, flushes
//   disk_bench read  DIRECTORY VALUE_BYTES VALUES    reads all of them, in the order written
//   disk_bench reads DIRECTORY VALUE_BYTES VALUES    the same in random order
//   disk_bench start DIRECTORY VALUE_BYTES VALUES    opens, with the checkpoint there is
// Prints a JSON object: seconds, values that came back, what the tier says of itself. Payload bytes
// are verified against their key by the engine's checksums alone. `fill` ends with a checkpoint,
// after the clock has stopped.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "server/tier/disk/disk_tier.h"

namespace kvstrata {
namespace {

constexpr uint64_t kPutBytes = uint64_t{64} << 20;  // as TierLoadsOptions::batch_bytes
// As there where several loads share the disk; one alone gets 64 MiB, which lose 7 % at 12 KiB a
// value.
constexpr uint64_t kGetBytes = uint64_t{16} << 20;
constexpr uint64_t kBlock = 4096;
constexpr auto kLongest = std::chrono::minutes(10);

Deadline Later() { return std::chrono::steady_clock::now() + kLongest; }

void Exit(const Status& why) {
  std::fprintf(stderr, "disk_bench: %s\n", why.ToString().c_str());
  std::exit(1);
}

std::string KeyOf(uint64_t i) { return "value " + std::to_string(i); }

struct Values {
  uint64_t bytes = 0, count = 0, batch_bytes = 0;
  uint64_t batch() const { return std::max<uint64_t>(batch_bytes / bytes, 1); }
  uint64_t blocks() const { return (bytes + kBlock - 1) / kBlock; }
};

// Random bytes for a batch, registered with the queues for the life of the process.
std::shared_ptr<std::byte> BatchMemory(DiskTier* tier, const Values& values) {
  const uint64_t bytes = values.batch() * (1 + values.blocks()) * kBlock;  // each with its header
  std::shared_ptr<std::byte> memory(static_cast<std::byte*>(std::aligned_alloc(kBlock, bytes)),
                                    std::free);
  const Status added = tier->AddMemory(memory, bytes, Later());
  if (!added.ok()) Exit(added);
  std::mt19937_64 random(values.bytes);
  for (uint64_t at = 0; at < bytes; at += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(memory.get() + at, &word, sizeof(word));
  }
  return memory;
}

std::byte* SlotOf(const std::shared_ptr<std::byte>& memory, const Values& values, uint64_t i) {
  return memory.get() + (i * (1 + values.blocks()) + 1) * kBlock;
}

uint64_t Fill(DiskTier* tier, const Values& values, const std::shared_ptr<std::byte>& memory) {
  for (uint64_t first = 0; first < values.count; first += values.batch()) {
    std::vector<TierPut> puts;
    for (uint64_t i = 0; i < std::min(values.batch(), values.count - first); ++i) {
      puts.push_back(
          {KeyOf(first + i), {{SlotOf(memory, values, i), values.bytes}}, memory, {}, true});
    }
    tier->Put(puts, Later());
    for (const TierPut& put : puts) {
      if (!put.status.ok()) Exit(put.status);
    }
  }
  const Status flushed = tier->Flush(Later());
  if (!flushed.ok()) Exit(flushed);
  return values.count;
}

uint64_t Read(DiskTier* tier, const Values& values, const std::shared_ptr<std::byte>& memory,
              bool shuffled) {
  std::vector<uint64_t> order(values.count);
  std::iota(order.begin(), order.end(), uint64_t{0});
  if (shuffled) std::shuffle(order.begin(), order.end(), std::mt19937_64(std::random_device{}()));
  uint64_t good = 0;
  for (uint64_t first = 0; first < values.count; first += values.batch()) {
    std::vector<TierGet> gets;
    for (uint64_t i = 0; i < std::min(values.batch(), values.count - first); ++i) {
      gets.push_back(
          {KeyOf(order[first + i]), {{SlotOf(memory, values, i), values.bytes}}, memory, {}, true});
    }
    tier->Get(gets, Later());
    for (const TierGet& get : gets) good += get.status.ok() ? 1 : 0;
  }
  return good;
}

int Main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: disk_bench fill|read|reads|start DIRECTORY VALUE_BYTES VALUES\n");
    return 2;
  }
  const std::string what = argv[1];
  const Values values{std::strtoull(argv[3], nullptr, 10), std::strtoull(argv[4], nullptr, 10),
                      what == "fill" ? kPutBytes : kGetBytes};
  DiskTierOptions options;
  options.directory = argv[2];
  const uint64_t slot = (values.bytes + kBlock - 1) / kBlock * kBlock + kBlock;
  options.budget_bytes = values.count * slot * 9 / 8 + 2 * options.segment_bytes;

  const auto seconds_since = [](std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  auto begin = std::chrono::steady_clock::now();
  Result<std::unique_ptr<DiskTier>> opened = DiskTier::Open(options, Later());
  if (!opened.ok()) Exit(opened.status());
  DiskTier* tier = opened->get();
  double seconds = seconds_since(begin);
  uint64_t done = tier->Stats().entries;
  if (what != "start") {
    const std::shared_ptr<std::byte> memory = BatchMemory(tier, values);
    begin = std::chrono::steady_clock::now();
    done =
        what == "fill" ? Fill(tier, values, memory) : Read(tier, values, memory, what == "reads");
    seconds = seconds_since(begin);
  }
  if (what == "fill") {
    const Status kept = tier->Checkpoint(Later());
    if (!kept.ok()) Exit(kept);
  }
  const DiskTierStats stats = tier->Stats();
  std::cout << nlohmann::json{{"seconds", seconds},
                              {"values", done},
                              {"queue", stats.queue},
                              {"direct", stats.direct},
                              {"scanned_segments", stats.scanned_segments}}
            << std::endl;
  return 0;
}

}  // namespace
}  // namespace kvstrata

int main(int argc, char** argv) { return kvstrata::Main(argc, argv); }
