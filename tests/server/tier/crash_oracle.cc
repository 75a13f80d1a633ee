// SPDX-License-Identifier: Apache-2.0
#include "tests/server/tier/crash_oracle.h"

#include <fcntl.h>
#include <unistd.h>

#include <map>
#include <optional>
#include <set>

#include "base/unique_fd.h"
#include "server/tier/disk/disk_tier.h"
#include "server/tier/disk/format/format.h"
#include "tests/fakes/scratch_dir.h"
#include "tests/server/tier/test_queues.h"
#include "tests/server/tier/tier_values.h"

namespace kvstrata {
namespace {

using Op = IoRequest::Op;
using disk::kBlockBytes;
using disk::SlotHeader;

constexpr uint64_t kSegmentBytes = 160 << 10;
constexpr uint32_t kSegments = 4;
constexpr uint64_t kMissing = 0;  // versions begin at 1

DiskTierOptions TierOptions(const std::string& directory, uint64_t segment_bytes, uint32_t segments,
                            IoHistory* history) {
  DiskTierOptions options;
  options.directory = directory;
  options.segment_bytes = segment_bytes;
  options.budget_bytes = segments * segment_bytes;
  options.budget_bytes += 2 * disk::CheckpointBytes(options.budget_bytes);
  options.depth = 4;
  options.new_queue = [history](uint32_t) {
    if (history == nullptr) return IoQueueChoice{NewInlineQueue(), OkStatus()};
    return IoQueueChoice{NewRecordingQueue(NewInlineQueue(), history), OkStatus()};
  };
  return options;
}

// The files of a tier by the numbers that an IoHistory has.
class Files {
 public:
  Files(const std::string& directory, uint32_t segments) {
    for (uint32_t i = 0; i < segments; ++i) Open(directory + "/segment." + std::to_string(i));
    for (uint32_t i = 0; i < 2; ++i) Open(directory + "/checkpoint." + std::to_string(i));
  }
  using Image = std::vector<std::vector<std::byte>>;
  Image Read() const {
    Image image;
    for (const UniqueFd& fd : fds_) {
      image.emplace_back(lseek(fd.get(), 0, SEEK_END));
      KVS_CHECK(pread(fd.get(), image.back().data(), image.back().size(), 0) ==
                static_cast<ssize_t>(image.back().size()));
    }
    return image;
  }
  void Write(const Image& image) const {
    for (size_t i = 0; i < image.size(); ++i) Write(i, 0, image[i].data(), image[i].size());
  }
  void Write(size_t file, uint64_t offset, const std::byte* data, size_t bytes) const {
    KVS_CHECK(pwrite(fds_[file].get(), data, bytes, static_cast<off_t>(offset)) ==
              static_cast<ssize_t>(bytes));
  }

 private:
  void Open(const std::string& path) {
    fds_.emplace_back(open(path.c_str(), O_RDWR | O_CLOEXEC));
    KVS_CHECK(fds_.back().get() >= 0);
  }
  std::vector<UniqueFd> fds_;
};

// What was asked of the tier, with the events of the history that it may have caused.
struct Asked {
  enum class Kind : uint8_t { kPut, kErase, kFlush };
  Kind kind = Kind::kFlush;
  std::string key;
  uint64_t version = kMissing;
  size_t begin = 0, end = 0;
};

struct Version {
  std::string key;
  AlignedBuffers value;
  std::vector<uint64_t> sizes;
};

// A random run of a tier, recorded.
class Workload {
 public:
  explicit Workload(uint32_t seed) : random_(seed) {
    auto tier = DiskTier::Open(TierOptions(path(), kSegmentBytes, kSegments, &history_), Soon());
    KVS_CHECK(tier.ok());
    tier_ = std::move(*tier);
    files_ = std::make_unique<Files>(path(), kSegments);
    for (int i = 0; i < 60; ++i) Step();
    tier_.reset();
  }

  std::string path() const { return dir_ / "tier"; }
  const IoHistory& history() const { return history_; }
  const Files& files() const { return *files_; }
  const std::map<uint64_t, Version>& versions() const { return versions_; }

  // Versions that may be seen of `key` when events before `cut` took place and the disk is honest.
  std::set<uint64_t> Legal(const std::string& key, size_t cut) const {
    std::set<uint64_t> legal = {kMissing};
    for (size_t i = 0; i < asked_.size() && asked_[i].begin < cut; ++i) {
      if (asked_[i].key != key) continue;
      if (IsDurable(i, cut)) legal.clear();
      legal.insert(asked_[i].version);
    }
    return legal;
  }
  // The first and last event of whoever wrote event `i`.
  std::pair<size_t, size_t> CausedWith(size_t i) const {
    for (const Asked& asked : asked_) {
      if (asked.begin <= i && i < asked.end) return {asked.begin, asked.end};
    }
    return {i, i + 1};
  }
  std::set<std::string> Keys() const {
    std::set<std::string> keys;
    for (const auto& [number, version] : versions_) keys.insert(version.key);
    return keys;
  }

 private:
  bool IsDurable(size_t i, size_t cut) const {
    for (size_t j = i + 1; j < asked_.size(); ++j) {
      if (asked_[j].kind == Asked::Kind::kFlush && asked_[j].end <= cut) return true;
    }
    return false;
  }

  void Step() {
    const uint32_t dice = random_() % 20;
    if (dice < 9) return PutSome();
    if (dice < 14) return EraseSome();
    const size_t begin = history_.size();
    if (dice < 18) KVS_CHECK(tier_->Flush(Soon()).ok());
    if (dice >= 18) KVS_CHECK(tier_->Checkpoint(Soon()).ok());
    asked_.push_back({Asked::Kind::kFlush, "", kMissing, begin, history_.size()});
  }

  void PutSome() {
    static const std::vector<std::vector<uint64_t>> kShapes = {
        {1500}, {4096}, {3000}, {3000, 2000}, {70000, 500}};
    std::vector<TierPut> puts;
    std::vector<uint64_t> numbers;
    std::set<std::string> keys;
    for (uint32_t n = 1 + random_() % 3; n > 0; --n) {
      const std::string key = "key " + std::to_string(random_() % 8);
      if (tier_->Contains(key) || !keys.insert(key).second) continue;
      const std::vector<uint64_t> sizes =
          kShapes[std::min<size_t>(random_() % 8, kShapes.size() - 1) %
                  (random_() % 4 == 0 ? kShapes.size() : 3)];
      const uint64_t number = versions_.size() + 1;
      versions_.emplace(number, Version{key, ValueOf(key, number, sizes), sizes});
      puts.push_back(PutOf(key, versions_.at(number).value));
      numbers.push_back(number);
    }
    const size_t begin = history_.size();
    tier_->Put(puts, Soon());
    for (size_t i = 0; i < puts.size(); ++i) {
      if (!puts[i].status.ok()) continue;  // full
      asked_.push_back({Asked::Kind::kPut, puts[i].key, numbers[i], begin, history_.size()});
    }
  }

  void EraseSome() {
    std::vector<std::string> keys;
    tier_->ForEach([&](const std::string& key, std::span<const uint64_t>) {
      if (random_() % 3 == 0) keys.push_back(key);
    });
    const size_t begin = history_.size();
    KVS_CHECK(tier_->Erase(keys, Soon()).ok());
    for (const std::string& key : keys) {
      asked_.push_back({Asked::Kind::kErase, key, kMissing, begin, history_.size()});
    }
  }

  std::mt19937 random_;
  ScratchDir dir_{"/dev/shm"};
  IoHistory history_;
  std::unique_ptr<DiskTier> tier_;
  std::unique_ptr<Files> files_;
  std::vector<Asked> asked_;
  std::map<uint64_t, Version> versions_;
};

const SlotHeader* HeaderIn(const IoEvent& event) {
  if (event.bytes.size() < kBlockBytes) return nullptr;
  const auto* header = reinterpret_cast<const SlotHeader*>(event.bytes.data());
  return header->magic == SlotHeader::kMagic ? header : nullptr;
}

// One state: the image that a crash at `cut` leaves, mounted and read.
class CrashState {
 public:
  CrashState(const Workload& workload, size_t cut, CrashKind kind, uint32_t seed)
      : workload_(workload), cut_(cut), kind_(kind), random_(seed) {}

  void Check(Findings* findings) {
    ++findings->states;
    ++findings->by_kind[static_cast<size_t>(kind_)];
    workload_.files().Write(MakeImage());
    const DiskTierOptions options =
        TierOptions(workload_.path(), kSegmentBytes, kSegments, nullptr);
    auto tier = DiskTier::Open(options, Soon());
    if (!tier.ok()) {
      ++findings->failed_starts;
      return Note("start: " + tier.status().ToString(), findings);
    }
    ReadAll(tier->get(), findings);
    if (random_() % 4 == 0) WriteOn(std::move(*tier), findings);
  }

 private:
  bool lies() const { return kind_ == CrashKind::kStale || kind_ == CrashKind::kMisdirected; }

  Files::Image MakeImage() {
    const IoHistory& history = workload_.history();
    Files::Image image(kSegments + 2);
    for (size_t i = 0; i < image.size(); ++i) {
      const uint64_t budget = kSegments * kSegmentBytes;
      image[i].resize(i < kSegments
                          ? kSegmentBytes
                          : disk::CheckpointBytes(budget + 2 * disk::CheckpointBytes(budget)));
    }
    ChooseVictim();
    for (size_t i = 0; i < cut_; ++i) {
      const IoEvent& event = history[i];
      if (event.op == Op::kWrite) Apply(i, event, &image);
    }
    return image;
  }

  bool Flushed(size_t i) const {
    const IoHistory& history = workload_.history();
    for (size_t j = i + 1; j < cut_; ++j) {
      if (history[j].op == Op::kFlush && history[j].file == history[i].file) return true;
    }
    return false;
  }

  // The write that is torn, stale or misdirected.
  void ChooseVictim() {
    std::vector<size_t> may;
    for (size_t i = 0; i < cut_; ++i) {
      const IoEvent& event = workload_.history()[i];
      if (event.op != Op::kWrite || (!lies() && Flushed(i))) continue;
      if (kind_ == CrashKind::kTorn4096 && event.bytes.size() <= kBlockBytes) continue;
      may.push_back(i);
    }
    if (may.empty()) return;
    victim_ = may[random_() % may.size()];
    victim_end_ = *victim_ + 1;
    unit_ = kind_ == CrashKind::kTorn512 ? 512 : kBlockBytes;
    if (kind_ == CrashKind::kStale) {
      const uint32_t units[] = {512, kBlockBytes, 1u << 30};
      unit_ = units[random_() % 3];
      const uint64_t parts = (workload_.history()[*victim_].bytes.size() + unit_ - 1) / unit_;
      stale_part_ = random_() % parts;
    }
    if (kind_ == CrashKind::kMisdirected) Misdirect();
  }

  // Where to: any block of any file; or, for every other header, its whole value to another slot.
  void Misdirect() {
    const IoEvent& event = workload_.history()[*victim_];
    const SlotHeader* header = HeaderIn(event);
    to_file_ = random_() % (kSegments + 2);
    const uint64_t blocks = (to_file_ < kSegments ? kSegmentBytes : 2 * kBlockBytes) / kBlockBytes;
    shift_ =
        static_cast<int64_t>(random_() % blocks * kBlockBytes) - static_cast<int64_t>(event.offset);
    if (header == nullptr || header->state != disk::SlotState::kValue) return;
    if (random_() % 2 == 0) return;
    const uint32_t slots = (kSegmentBytes / kBlockBytes - 2) / header->slot_blocks;
    to_file_ = event.file;
    slot_begin_ = event.offset;
    slot_end_ = event.offset + uint64_t{header->slot_blocks} * kBlockBytes;
    const uint64_t target = 2 + random_() % slots * header->slot_blocks;
    shift_ = static_cast<int64_t>(target * kBlockBytes) - static_cast<int64_t>(event.offset);
    std::tie(victim_, victim_end_) = workload_.CausedWith(*victim_);
  }

  bool IsVictim(size_t i, const IoEvent& event) const {
    if (!victim_ || i < *victim_ || i >= victim_end_) return false;
    if (slot_end_ == 0) return true;
    return event.file == to_file_ && event.offset >= slot_begin_ && event.offset < slot_end_;
  }

  void Apply(size_t i, const IoEvent& event, Files::Image* image) {
    if (kind_ == CrashKind::kLost && !Flushed(i)) return;
    if (kind_ == CrashKind::kReordered && !Flushed(i) && random_() % 2 == 0) return;
    if (kind_ < CrashKind::kTorn512 || !IsVictim(i, event)) return Store(event, image);
    if (kind_ == CrashKind::kMisdirected) {
      IoEvent elsewhere = event;
      elsewhere.file = to_file_;
      elsewhere.offset = static_cast<uint64_t>(static_cast<int64_t>(event.offset) + shift_);
      return Store(elsewhere, image);
    }
    for (uint64_t at = 0, part = 0; at < event.bytes.size(); at += unit_, ++part) {
      const bool there = kind_ == CrashKind::kStale ? part != stale_part_ : random_() % 2 == 0;
      const uint64_t bytes = std::min<uint64_t>(unit_, event.bytes.size() - at);
      if (there) {
        std::memcpy(&(*image)[event.file][event.offset + at], &event.bytes[at], bytes);
      }
    }
  }

  static void Store(const IoEvent& event, Files::Image* image) {
    std::vector<std::byte>& file = (*image)[event.file];
    if (event.offset >= file.size()) return;
    const uint64_t bytes = std::min<uint64_t>(event.bytes.size(), file.size() - event.offset);
    std::memcpy(&file[event.offset], event.bytes.data(), bytes);
  }

  // Whether the disk dropped an erasure of `key`, which nothing can find out.
  bool ErasureDropped(const std::string& key) const {
    if (!lies() || !victim_ || slot_end_ != 0) return false;
    const SlotHeader* erased = HeaderIn(workload_.history()[*victim_]);
    if (erased == nullptr || erased->state != disk::SlotState::kErased) return false;
    for (size_t i = *victim_; i-- > 0;) {  // what lay there before
      const IoEvent& event = workload_.history()[i];
      const SlotHeader* header = HeaderIn(event);
      if (header == nullptr || event.file != workload_.history()[*victim_].file ||
          event.offset != workload_.history()[*victim_].offset) {
        continue;
      }
      return header->key_view() == key;
    }
    return false;
  }

  void ReadAll(DiskTier* tier, Findings* findings) {
    tier->ForEach([&](const std::string& key, std::span<const uint64_t>) {
      if (workload_.Keys().contains(key)) return;
      ++findings->wrong;
      Note("a key that nobody stored", findings);
    });
    for (const std::string& key : workload_.Keys()) {
      const uint64_t seen = Read(tier, key, findings);
      const std::set<uint64_t> legal = workload_.Legal(key, cut_);
      if (legal.contains(seen) || (lies() && seen == kMissing)) continue;
      if (legal.contains(kMissing) && ErasureDropped(key)) continue;
      seen == kMissing ? ++findings->lost : ++findings->wrong;
      std::string what = key + " is version " + std::to_string(seen) + ", may be";
      for (const uint64_t version : legal) what += " " + std::to_string(version);
      Note(what, findings);
    }
  }

  // The version that is served; kMissing.
  uint64_t Read(DiskTier* tier, const std::string& key, Findings* findings) {
    const std::vector<uint64_t> sizes = tier->Sizes(key);
    if (sizes.empty()) return kMissing;
    const AlignedBuffers got(sizes);
    if (!GetOne(tier, key, got).ok()) return kMissing;
    ++findings->reads;
    for (const auto& [number, version] : workload_.versions()) {
      if (version.key == key && version.sizes == sizes && SameBytes(version.value, got)) {
        return number;
      }
    }
    return ~uint64_t{0};  // no version at all: never legal
  }

  // What the tier takes after a crash it keeps over the next start.
  void WriteOn(std::unique_ptr<DiskTier> tier, Findings* findings) {
    std::vector<std::string> keys(10);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = "key " + std::to_string(i);
    KVS_CHECK(tier->Erase(keys, Soon()).ok());
    const auto value = ValueOf("new", 0, {3000});
    for (const std::string& key : keys) (void)PutOne(tier.get(), key, value);
    if (random_() % 2 == 0) KVS_CHECK(tier->Checkpoint(Soon()).ok());
    tier.reset();
    auto again =
        DiskTier::Open(TierOptions(workload_.path(), kSegmentBytes, kSegments, nullptr), Soon());
    KVS_CHECK(again.ok());
    for (const std::string& key : keys) {
      const AlignedBuffers got({3000});
      if ((*again)->Sizes(key) == std::vector<uint64_t>{3000} &&
          GetOne(again->get(), key, got).ok() && SameBytes(got, value)) {
        continue;
      }
      ++findings->wrong;
      Note(key + " stored after the crash", findings);
    }
  }

  void Note(const std::string& what, Findings* findings) const {
    if (!findings->first.empty()) return;
    findings->first = "kind " + std::to_string(static_cast<int>(kind_)) + " cut " +
                      std::to_string(cut_) + " of " + std::to_string(workload_.history().size()) +
                      " victim " + (victim_ ? std::to_string(*victim_) : "none") + ": " + what;
  }

  const Workload& workload_;
  const size_t cut_;
  const CrashKind kind_;
  std::mt19937 random_;
  std::optional<size_t> victim_;
  size_t victim_end_ = 0;
  uint32_t unit_ = 512;
  uint64_t stale_part_ = 0;
  uint32_t to_file_ = 0;
  int64_t shift_ = 0;
  uint64_t slot_begin_ = 0, slot_end_ = 0;  // all of a value's writes are victims
};

// -- bit flips

constexpr uint64_t kFlipSegmentBytes = 256 << 10;
constexpr uint32_t kFlipSegments = 8, kFlipValues = 100;
const std::vector<std::vector<uint64_t>> kFlipShapes = {{1500}, {9000, 300}, {3000}, {16000}};

const std::vector<uint64_t>& FlipShape(uint32_t i) { return kFlipShapes[i % kFlipShapes.size()]; }

struct Bytes {
  size_t file = 0;
  uint64_t offset = 0, count = 0;
};

// A tier full of values, whose bytes on disk are known, flipped and put back.
class FlippedTier {
 public:
  FlippedTier(uint32_t seed, FlipFindings* findings) : random_(seed), findings_(findings) {
    auto tier = Open();
    files_ = std::make_unique<Files>(path(), kFlipSegments);
    for (uint32_t i = 0; i < kFlipValues; ++i) {
      values_.push_back(ValueOf(std::to_string(i), 0, FlipShape(i)));
      KVS_CHECK(PutOne(tier.get(), std::to_string(i), values_[i]).ok());
    }
    KVS_CHECK(tier->Checkpoint(Soon()).ok());
    tier.reset();
    image_ = files_->Read();
    FindBytes();
  }

  // One bit of each value, half of them in its header, while the tier is mounted.
  void FlipValues() {
    auto tier = Open();
    for (const auto& [i, header] : headers_) {
      Flip(random_() % 2 == 0 ? header : payloads_[i][random_() % payloads_[i].size()]);
    }
    for (uint32_t i = 0; i < kFlipValues; ++i) CountServed(tier.get(), i);
    tier.reset();
    files_->Write(image_);
  }

  // One bit of each header before a start that reads them.
  void FlipHeaders() {
    ClearCheckpoints();
    for (const auto& [i, header] : headers_) Flip(header);
    auto tier = Open();
    std::set<std::string> listed;
    tier->ForEach([&](const std::string& key, std::span<const uint64_t>) { listed.insert(key); });
    findings_->flips += kFlipValues;
    for (const std::string& key : listed) {
      findings_->undetected += GetOne(tier.get(), key, AlignedBuffers(tier->Sizes(key))).ok();
    }
    tier.reset();
    files_->Write(image_);
  }

  void FlipCheckpoint() {
    Flip(random_() % 4 == 0 ? Bytes{checkpoint_.file, 0, kBlockBytes} : checkpoint_);
    auto tier = Open();
    ++findings_->flips;
    findings_->undetected += tier->Stats().scanned_segments == 0;
    CountLost(tier.get());
    tier.reset();
    files_->Write(image_);
  }

  // One bit of one copy in each segment that has any.
  void FlipSuperblocks() {
    for (const size_t segment : formatted_) {
      Flip({segment, random_() % 2 * kBlockBytes, kBlockBytes});
    }
    findings_->flips += formatted_.size();
    if (auto tier = DiskTier::Open(Options(), Soon()); tier.ok()) {
      findings_->undetected += formatted_.size() - (*tier)->Stats().scanned_segments;
      CountLost(tier->get());
    } else {
      ++findings_->undetected;
    }
    files_->Write(image_);
  }

 private:
  std::string path() const { return dir_ / "tier"; }
  DiskTierOptions Options() const {
    return TierOptions(path(), kFlipSegmentBytes, kFlipSegments, nullptr);
  }
  std::unique_ptr<DiskTier> Open() const {
    auto tier = DiskTier::Open(Options(), Soon());
    KVS_CHECK(tier.ok());
    return std::move(*tier);
  }

  // From the files alone, by the format's own words.
  void FindBytes() {
    for (size_t file = 0; file < kFlipSegments; ++file) {
      const std::byte* base = image_[file].data();
      const auto* super = reinterpret_cast<const disk::Superblock*>(base);
      if (super->magic != disk::Superblock::kMagic) continue;
      formatted_.push_back(file);
      for (uint64_t block = 2; (block + super->slot_blocks) * kBlockBytes <= kFlipSegmentBytes;
           block += super->slot_blocks) {
        FindValue(file, block, reinterpret_cast<const SlotHeader*>(base + block * kBlockBytes));
      }
    }
    KVS_CHECK(headers_.size() == kFlipValues);
    for (size_t file : {kFlipSegments, kFlipSegments + 1}) {
      const auto* header = reinterpret_cast<const disk::CheckpointHeader*>(image_[file].data());
      if (header->magic != disk::CheckpointHeader::kMagic) continue;
      checkpoint_ = {file, kBlockBytes, header->entry_bytes};
    }
  }

  void FindValue(size_t file, uint64_t block, const SlotHeader* header) {
    if (header->magic != SlotHeader::kMagic) return;
    const auto i = static_cast<uint32_t>(std::stoul(std::string(header->key_view())));
    headers_[i] = {file, block * kBlockBytes, kBlockBytes};
    uint64_t at = (block + 1) * kBlockBytes;
    for (const uint64_t bytes : FlipShape(i)) {
      payloads_[i].push_back({file, at, bytes});
      at += disk::BlocksOf(bytes) * kBlockBytes;
    }
  }

  void Flip(const Bytes& where) {
    const uint64_t at = where.offset + random_() % where.count;
    const std::byte flipped = image_[where.file][at] ^ static_cast<std::byte>(1 << random_() % 8);
    files_->Write(where.file, at, &flipped, 1);
  }

  void ClearCheckpoints() {
    const std::vector<std::byte> zeros(kBlockBytes);
    for (size_t file : {kFlipSegments, kFlipSegments + 1}) {
      files_->Write(file, 0, zeros.data(), zeros.size());
    }
  }

  void CountServed(DiskTier* tier, uint32_t i) {
    ++findings_->flips;
    findings_->undetected += GetOne(tier, std::to_string(i), AlignedBuffers(FlipShape(i))).ok();
  }

  void CountLost(DiskTier* tier) {
    for (uint32_t i = 0; i < kFlipValues; ++i) {
      const AlignedBuffers got(FlipShape(i));
      const bool served = GetOne(tier, std::to_string(i), got).ok();
      findings_->lost += !served || !SameBytes(got, values_[i]);
    }
  }

  std::mt19937 random_;
  FlipFindings* const findings_;
  ScratchDir dir_{"/dev/shm"};
  std::unique_ptr<Files> files_;
  std::vector<AlignedBuffers> values_;
  Files::Image image_;
  std::map<uint32_t, Bytes> headers_;
  std::map<uint32_t, std::vector<Bytes>> payloads_;
  std::vector<size_t> formatted_;
  Bytes checkpoint_;
};

}  // namespace

FlipFindings FlipBits(uint32_t seed, const FlipCounts& counts) {
  FlipFindings findings;
  FlippedTier tier(seed, &findings);
  const auto until = [&](uint64_t flips, void (FlippedTier::*round)()) {
    const uint64_t end = findings.flips + flips;
    while (findings.flips < end) (tier.*round)();
  };
  until(counts.values, &FlippedTier::FlipValues);
  until(counts.headers, &FlippedTier::FlipHeaders);
  until(counts.checkpoints, &FlippedTier::FlipCheckpoint);
  until(counts.superblocks, &FlippedTier::FlipSuperblocks);
  return findings;
}

uint32_t TestSeed() {
  const char* given = std::getenv("KVS_TEST_SEED");
  const uint32_t seed =
      given != nullptr ? static_cast<uint32_t>(std::atoi(given)) : std::random_device()();
  std::printf("KVS_TEST_SEED=%u\n", seed);
  return seed;
}

Findings ReplayCrashes(uint32_t seed, uint64_t states, Until until) {
  Findings findings;
  const auto found = [&] { return until == Until::kFirstFinding && !findings.none(); };
  for (uint32_t run = 0; findings.states < states && !found(); ++run) {
    const Workload workload(seed + run);
    for (size_t cut = 0; cut <= workload.history().size() && !found(); ++cut) {
      for (size_t kind = 0; kind < static_cast<size_t>(CrashKind::kCount); ++kind) {
        const auto state_seed = static_cast<uint32_t>(seed + run * 1000003 + cut * 31 + kind);
        CrashState(workload, cut, static_cast<CrashKind>(kind), state_seed).Check(&findings);
      }
    }
  }
  return findings;
}

}  // namespace kvstrata
