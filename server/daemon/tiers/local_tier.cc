// SPDX-License-Identifier: Apache-2.0
#include "server/daemon/tiers/local_tier.h"

#include <utility>
#include <vector>

#include "server/rpc/calls/copy_fields.h"
#include "server/telemetry/log.h"
#include "server/work/tiers/lost_value_log.h"
#include "server/work/tiers/pin_records.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kResizeTimeout{10};

DiskTierOptions TellingOfLosses(DiskTierOptions disk) {
  disk.lost = [log = std::make_shared<LostValueLog>()](std::string_view key, uint32_t segment,
                                                       const Status& why) {
    const auto now = Clock::now().time_since_epoch();
    log->Tell(key, segment, why, std::chrono::duration_cast<std::chrono::seconds>(now).count());
  };
  return disk;
}

DiskValueTierOptions ValuesOf(const Config& config) {
  DiskValueTierOptions values = config.disk_values;
  values.readers = config.tier_pages.loads.readers;
  return values;
}

}  // namespace

LocalTier::LocalTier(const Config& config, std::unique_ptr<DiskTier> disk)
    : directory_(config.disk.directory),
      start_timeout_(config.disk_start_timeout),
      options_(config.tier_pages),
      disk_(std::move(disk)),
      values_(ValuesOf(config), disk_.get()) {}

Result<std::unique_ptr<LocalTier>> LocalTier::Open(const Config& config) {
  KVS_ASSIGN_OR_RETURN(auto disk, DiskTier::Open(TellingOfLosses(config.disk),
                                                 Clock::now() + config.disk_start_timeout));
  const DiskTierStats stats = disk->Stats();
  std::unique_ptr<LocalTier> tier(new LocalTier(config, std::move(disk)));
  LogEvent(stats.degraded.ok() ? LogLevel::kInfo : LogLevel::kWarn, "disk_open",
           {{"path", config.disk.directory},
            {"queue", stats.queue},
            {"direct", stats.direct},
            {"capacity_bytes", stats.capacity_bytes},
            {"entries", stats.entries},
            {"scanned_segments", stats.scanned_segments},
            {"cut_segments", stats.cut_segments},
            {"degraded", stats.degraded.message()}});
  return tier;
}

void LocalTier::Use(Store* store, TierChain* tiers) {
  row_ = std::make_unique<TierRow>(options_, store, &values_, values_.Hooks());
  tiers->Add(row_.get());
  RestorePins(store, Clock::now() + start_timeout_);
  NoteRecords(store, &values_, row_.get(), [](size_t records) {
    LogEvent(LogLevel::kInfo, "artefact_records", {{"records", records}});
  });
}

void LocalTier::RestorePins(Store* store, Deadline deadline) {
  std::vector<PrefixPin> pins;
  for (PrefixPin& pin : ReadPins(&values_, deadline)) {
    const bool over = pin.expires <= Clock::now();
    const Status status = over ? ErasePin(&values_, pin.id, deadline) : row_->Pin(pin);
    if (!status.ok()) {
      LogEvent(LogLevel::kWarn, "pin_restore",
               {{"pin", pin.id}, {"reason", status.reason()}, {"why", status.message()}});
    }
    if (!over) pins.push_back(std::move(pin));
  }
  if (!pins.empty()) LogEvent(LogLevel::kInfo, "pins_restored", {{"pins", pins.size()}});
  store->pins().RestorePins(std::move(pins));
}

void LocalTier::Configure(const TierRowOptions& options) { row_->Configure(options); }

void LocalTier::Stop(std::chrono::microseconds timeout) {
  row_->Stop();
  const TierRowCounters c = row_->counters();
  LogEvent(LogLevel::kInfo, "tier_pages",
           {{"written", c.written},
            {"dropped", c.dropped()},
            {"gone", c.gone},
            {"failed", c.failed},
            {"evicted", values_.Stats().evicted},
            {"checkpoints", values_.checkpoints()},
            {"read", c.read},
            {"late", c.late_loads},
            {"refused", c.refused_loads}});
  const Status status = values_.Checkpoint(Clock::now() + timeout / 4);
  if (status.ok()) return;
  LogEvent(LogLevel::kWarn, "disk_checkpoint_failed",
           {{"reason", status.reason()}, {"why", status.message()}});
}

std::string LocalTier::illness() const { return values_.Stats().illness; }

DiskInfo LocalTier::Info() const {
  const DiskTierStats stats = disk_->Stats();
  const TierStats values = values_.Stats();
  const TierRowCounters counters = row_->counters();
  DiskInfo info;
  info.path = directory_;
  info.queue = stats.queue;
  info.degraded = stats.degraded.message();
  KVS_ASSIGN_FIELDS(info, stats, direct, breaker_open, capacity_bytes, used_bytes, entries, corrupt,
                    io_errors, deadlines, stopped_segments, last_error, last_error_time_us,
                    left_alone_since_us, retry);
  KVS_ASSIGN_FIELDS(info, counters, waiting, written, gone, failed, read, late_loads, refused_loads,
                    refused);
  info.dropped = counters.dropped();
  info.evicted = values.evicted;
  info.sick = !values.illness.empty();
  info.draining = row_->writer().queue().draining();
  info.drained = row_->writer().queue().drained();
  return info;
}

void LocalTier::Offer(GrpcOptions* options) {
  options->disk = [this] { return Info(); };
  options->drain = [this] { return row_->writer().queue().Drain(); };
  options->resume = [this] { row_->writer().Resume(); };
  options->resize_disk = [this](uint64_t bytes) {
    return values_.Resize(bytes, Clock::now() + kResizeTimeout);
  };
  options->scrub = [this](TierScrub scrub) { return row_->scrubs().Begin(std::move(scrub)); };
}

}  // namespace kvstrata
