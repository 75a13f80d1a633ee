// SPDX-License-Identifier: Apache-2.0
#include "server/store/store.h"

#include <utility>

#include "server/store/store_parts.h"

namespace kvstrata {
namespace {

StoreOptions WithLimits(StoreOptions options) {
  if (!options.user_limits) options.user_limits = std::make_shared<UserLimits>();
  return options;
}

}  // namespace

Store::Parts::Parts(const StoreOptions& given, Plans::Named named_plans,
                    std::vector<StoreDevice> device_memory, std::unique_ptr<MemoryResource> host)
    : options(WithLimits(given)),
      plans(options, std::move(named_plans)),
      books(options, std::move(device_memory), std::move(host)) {}

Store::Store(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
Store::~Store() = default;

Result<std::unique_ptr<Store>> Store::Create(const StoreOptions& options) {
  return Create(options, NewEmulatedDevice(), NewHostMemory());
}

Result<std::unique_ptr<Store>> Store::Create(const StoreOptions& options,
                                             std::unique_ptr<MemoryResource> device,
                                             std::unique_ptr<MemoryResource> host) {
  std::vector<StoreDevice> devices;
  devices.push_back({"emulated", std::move(device)});
  return Create(options, std::move(devices), std::move(host));
}

Result<std::unique_ptr<Store>> Store::Create(const StoreOptions& options,
                                             std::vector<StoreDevice> devices,
                                             std::unique_ptr<MemoryResource> host) {
  if (options.device_bytes < kMemoryGranularity && options.host_bytes < kMemoryGranularity) {
    return InvalidArgument("POOL_SIZE",
                           "device_bytes and host_bytes are both below 4096; one of "
                           "the pools must hold pages");
  }
  KVS_ASSIGN_OR_RETURN(Plans::Named plans, Plans::Parse(options));
  return std::unique_ptr<Store>(new Store(
      std::make_unique<Parts>(options, std::move(plans), std::move(devices), std::move(host))));
}

void Store::Apply(const StoreSettings& settings) {
  parts_->copies.SetPromoteRate(settings.promote_rate);
  StoreLock lock(parts_->books.mu);
  static_cast<StoreSettings&>(parts_->options) = settings;
  parts_->watermarks.NoteFill();
}

Sessions& Store::sessions() const { return parts_->sessions; }
Models& Store::models() const { return parts_->models; }
Devices& Store::devices() const { return parts_->devices; }
Plans& Store::plans() const { return parts_->plans; }
Openings& Store::openings() const { return parts_->openings; }
StepEvents& Store::steps() const { return parts_->steps; }
Sequences& Store::sequences() const { return parts_->sequences; }
Imports& Store::imports() const { return parts_->imports; }
Lookups& Store::lookups() const { return parts_->lookups; }
Leases& Store::leases() const { return parts_->leases; }
PrefixPins& Store::pins() const { return parts_->pins; }
PrefixCatalog& Store::prefixes() const { return parts_->prefixes; }
SealedValues& Store::values() const { return parts_->values; }
CapacityCounter& Store::capacity() const { return parts_->capacity; }
Moves& Store::moves() const { return parts_->moves; }
Replication& Store::replication() const { return parts_->replication; }
Eviction& Store::eviction() const { return parts_->eviction; }
PageReferences& Store::references() const { return parts_->references; }
Recompression& Store::recompression() const { return parts_->recompression; }
Builds& Store::builds() const { return parts_->builds; }
WorkRequests& Store::requests() const { return parts_->requests; }
RecallAudits& Store::recalls() const { return parts_->recalls; }
Inspection& Store::inspection() const { return parts_->inspection; }
const std::shared_ptr<UserLimits>& Store::user_limits() const {
  return parts_->options.user_limits;
}
const ClusterTenants& Store::cluster_tenants() const { return parts_->options.cluster_tenants; }
uint64_t Store::daemon_epoch() const { return parts_->sessions.daemon_epoch(); }

}  // namespace kvstrata
