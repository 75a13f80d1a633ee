// SPDX-License-Identifier: Apache-2.0
// StoreOptions: what a store is made of. Plain values; what is called says from which thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "kernels/codec/codec.h"
#include "kernels/pages/page_view.h"
#include "kernels/plan/plan.h"
#include "kernels/step/break_even.h"
#include "server/memory/memory_resource.h"
#include "server/store/options/cluster_tenants.h"
#include "server/store/options/session_types.h"
#include "server/store/options/user_limits.h"

namespace kvstrata {

// A device whose memory the store hands out.
struct StoreDevice {
  std::string name;  // a GPU's UUID; "emulated", "emulated-1", ...
  std::unique_ptr<MemoryResource> memory;
  uint64_t bytes = ~uint64_t{0};  // its pool has at most so many
};

// What may change while the store serves (Store::Apply).
struct StoreSettings {
  uint32_t max_sessions = 1024;
  uint64_t pin_limit_bytes = 0;  // for all pins together; 0: half of both pools
  // Bytes a second from host to device by moves while a step runs; 0: as fast as it goes.
  uint64_t promote_rate = 0;
  // Percent of a pool's capacity: above the first, MoveSome makes room, until the second.
  uint32_t high_percent = 90, low_percent = 80;
  // About one in so many decode steps whose plan selects is measured beside full attention
  // (recall_audits.h); 0: none.
  uint32_t recall_every = 4096;
  bool operator==(const StoreSettings&) const = default;
};

struct StoreOptions : StoreSettings {
  // Pool capacities, of each device and of the host; memory is touched when used.
  uint64_t device_bytes = uint64_t{4} << 30;
  uint64_t host_bytes = uint64_t{4} << 30;
  uint64_t arena_bytes = 0;                 // 0: capacity / 64 within 16 MiB .. 256 MiB
  std::shared_ptr<UserLimits> user_limits;  // null: users have no limits
  ClusterTenants cluster_tenants;           // users that page keys do not call by their own name
  uint32_t headroom_tokens = 64;            // pages kept ahead of what is committed
  std::vector<std::pair<std::string, std::string>> named_plans;  // configuration: name, text

  // Codecs (kernels/codec/codec.h: NewRecompressor, ParseParameters). Null: rows stay raw.
  std::function<std::unique_ptr<Recompressor>(const Plan&, const Geometry&, ParametersPtr)>
      new_recompressor;
  std::function<Result<ParametersPtr>(std::span<const std::byte>, const std::string&,
                                      const Geometry&, const Plan&)>
      parse_parameters;
  // Whether the device pool's memory can serve a plan; null: it can serve all. Asked when a
  // sequence opens.
  std::function<Status(const Plan&, const Geometry&)> serves;
  StepsOn steps_on = StepsOn::kCpu;  // what min_tokens = "auto" is for
  // Where plans' `parameters` lie, in this order; "": no such folder.
  std::string parameters_directory, shipped_parameters;
  // Called once when a pool's device is lost (DEVICE_FAILED). In any thread, perhaps under the
  // store's lock: it must not call the store. Null: nobody asks.
  std::function<void(PoolId, const Status&)> on_pool_failure;
  // The clock for pins; tests set it.
  std::function<std::chrono::steady_clock::time_point()> now = std::chrono::steady_clock::now;
  // After a failed recompression (no memory, say), doubled with each that follows, up to 64 times.
  std::chrono::microseconds recompress_retry{1'000'000};
};

}  // namespace kvstrata
