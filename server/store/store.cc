#include "server/store/store.h"

#include <sys/random.h>

#include <algorithm>
#include <cctype>
#include <utility>

#include "server/store/long_request.h"

namespace kvstrata {
namespace {

constexpr size_t kMaxModels = 1024;
constexpr uint32_t kOperatorsSessions = 16;
constexpr size_t kMaxText = 256;
constexpr size_t kMaxBoundaryTokens = 1 << 16;

std::string_view Trim(std::string_view text) {
  const auto space = [](char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; };
  while (!text.empty() && space(text.front())) text.remove_prefix(1);
  while (!text.empty() && space(text.back())) text.remove_suffix(1);
  return text;
}

uint64_t NewDaemonEpoch() {
  uint64_t epoch = 0;
  if (getrandom(&epoch, sizeof(epoch), 0) != sizeof(epoch)) {
    epoch = static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  }
  return epoch | 1;  // never 0
}

Status CheckText(std::string_view field, const std::string& value, bool required) {
  if (value.size() <= kMaxText && !(required && value.empty())) return OkStatus();
  return InvalidArgument("MODEL_TEXT", std::string(field) + " has " + std::to_string(value.size()) +
                                           " bytes; allowed: " + (required ? "1" : "0") + " to " +
                                           std::to_string(kMaxText));
}

Status Validate(const ModelDesc& desc, uint64_t largest_pool) {
  KVS_RETURN_IF_ERROR(CheckText("name", desc.name, true));
  // Pages are shared by digest: without one, different weights would be taken for the same.
  KVS_RETURN_IF_ERROR(CheckText("digest", desc.digest, true));
  KVS_RETURN_IF_ERROR(CheckText("layout", desc.layout, false));
  KVS_RETURN_IF_ERROR(CheckText("adapter", desc.adapter, false));
  KVS_RETURN_IF_ERROR(Validate(desc.geometry));
  if (desc.ranks != 1 || desc.rank != 0) {
    return Unimplemented("MODEL_RANKS", "rank is " + std::to_string(desc.rank) + " of " +
                                            std::to_string(desc.ranks) +
                                            "; this build serves rank 0 of 1");
  }
  if (desc.boundary_tokens.size() > kMaxBoundaryTokens) {
    return InvalidArgument("MODEL_BOUNDARY_TOKENS",
                           "boundary_tokens has " + std::to_string(desc.boundary_tokens.size()) +
                               " entries; allowed: at most 65536");
  }
  if (static_cast<uint64_t>(desc.geometry.page_bytes()) > largest_pool) {
    return InvalidArgument("MODEL_PAGE_TOO_LARGE", "a page of this geometry has " +
                                                       std::to_string(desc.geometry.page_bytes()) +
                                                       " bytes; allowed: at most a pool's " +
                                                       std::to_string(largest_pool));
  }
  return OkStatus();
}

Result<Store::Impl::NamedPlans> ParseNamedPlans(const StoreOptions& options) {
  Store::Impl::NamedPlans plans;
  for (const auto& [name, text] : options.named_plans) {
    Result<Plan> plan = ParsePlan(text);
    if (!plan.ok()) {
      return InvalidArgument("PLAN_NAMED_INVALID",
                             "plan '" + name + "': " + plan.status().message());
    }
    plans.insert_or_assign(name, *plan);
  }
  return plans;
}

}  // namespace

Store::Impl::Impl(const StoreOptions& options, NamedPlans named_plans, uint64_t daemon_epoch,
                  std::vector<StoreDevice> devices, std::unique_ptr<MemoryResource> host)
    : options_(options),
      user_limits_(options.user_limits ? options.user_limits : std::make_shared<UserLimits>()),
      named_plans_(std::move(named_plans)),
      daemon_epoch_(daemon_epoch),
      parameters_(options.parameters_directory, options.parse_parameters),
      promote_rate_(options.promote_rate),
      pools_(std::move(devices), options.device_bytes, std::move(host), options.host_bytes,
             options.arena_bytes),
      requests_(std::make_unique<WorkRequests>(this)) {
  pools_.on_failure = options_.on_pool_failure;
  // Called by pools_ alone, hence under mu_.
  pools_.on_drop = [this](const Arena& arena) KVS_NO_THREAD_SAFETY_ANALYSIS {
    Tenant* const tenant = tenants_by_id_[arena.tenant];
    for (Session* s : tenant->sessions) s->granted.erase(arena.id);
    user_limits_->Give(tenant->user, LimitOf(arena.pool), arena.block.bytes);
  };
}

Result<uint32_t> Store::Impl::FindDevice(std::string_view name) const {
  if (name.empty()) return 0;
  std::string known;
  for (uint32_t device = 0; device < pools_.devices(); ++device) {
    if (DeviceName(device) == name) return device;
    known += (device == 0 ? "'" : ", '") + DeviceName(device) + "'";
  }
  return NotFound("DEVICE_UNKNOWN",
                  "no device of this daemon is '" + std::string(name) + "'; there are " + known);
}

Result<Session*> Store::Impl::FindSession(uint64_t id) {
  for (auto it = sessions_.find(id); it != sessions_.end() && !it->second->fenced;
       it = sessions_.find(id)) {
    if (IsFree(*it->second)) return it->second.get();
    AwaitFree();
  }
  return NotFound("SESSION_UNKNOWN",
                  "session " + std::to_string(id) + " does not exist or has ended; attach again");
}

Result<const Sequence*> Store::Impl::PeekSequence(uint64_t id) const {
  const auto it = sequences_.find(id);
  if (it != sequences_.end()) return it->second;
  return NotFound("SEQUENCE_UNKNOWN",
                  "sequence " + std::to_string(id) + " does not exist or was closed");
}

Result<Sequence*> Store::Impl::FindSequence(uint64_t id) {
  for (auto it = sequences_.find(id); it != sequences_.end(); it = sequences_.find(id)) {
    if (IsFree(*sessions_.at(it->second->session))) return it->second;
    AwaitFree();
  }
  return PeekSequence(id).status();
}

Result<Sequence*> Store::Impl::FindSequence(uint64_t session, uint64_t id) {
  KVS_ASSIGN_OR_RETURN(Session * owner, FindSession(session));
  const auto it = owner->sequences.find(id);
  if (it != owner->sequences.end()) return it->second.get();
  return NotFound("SEQUENCE_UNKNOWN", "sequence " + std::to_string(id) + " is none of session " +
                                          std::to_string(session) + ", or was closed");
}

Result<const Session::KnownModel*> Store::Impl::FindModel(const Session& session, uint64_t id) {
  const auto it = session.models.find(id);
  if (it != session.models.end()) return &it->second;
  return NotFound("MODEL_UNKNOWN", "model " + std::to_string(id) +
                                       " was not registered by session " +
                                       std::to_string(session.id) + "; register it first");
}

Tenant* Store::Impl::TenantOf(const std::string& name) {
  std::unique_ptr<Tenant>& tenant = tenants_[name];
  if (!tenant) {
    tenant = std::make_unique<Tenant>();
    tenant->id = static_cast<uint32_t>(tenants_by_id_.size());
    tenant->name = name;
    tenant->user = user_limits_->For(name);
    tenants_by_id_.push_back(tenant.get());
  }
  return tenant.get();
}

Status Store::Impl::CheckRoomForSession(const Tenant& tenant) const {
  const bool reserved = !user_limits_->IsOperator(tenant.name) && options_.max_sessions >= 64;
  const uint32_t most = options_.max_sessions - (reserved ? kOperatorsSessions : 0);
  if (sessions_.size() < most) return OkStatus();
  return ResourceExhausted("SESSION_LIMIT",
                           "the daemon has all the sessions that it may have (session.max " +
                               std::to_string(options_.max_sessions) +
                               (reserved ? ", some for operators" : "") + "); try again later");
}

Result<SessionSegments> Store::Impl::OpenSession(const PeerIdentity& peer, Road road,
                                                 std::string_view client_name, ArenaSink sink,
                                                 uint32_t device) {
  MutexLock lock(mu_);
  KVS_CHECK(device < pools_.devices());  // FindDevice
  Tenant* tenant = TenantOf(peer.tenant);
  KVS_RETURN_IF_ERROR(user_limits_->Take(tenant->user, Limit::kAttachesPerSecond));
  KVS_ASSIGN_OR_RETURN(UserPlace place,
                       UserPlace::Take(user_limits_, tenant->name, Limit::kSessions));
  KVS_RETURN_IF_ERROR(CheckRoomForSession(*tenant));
  const uint64_t id = tenant->NextId(&tenant->sessions_made);
  KVS_ASSIGN_OR_RETURN(std::unique_ptr<SessionMemory> memory,
                       SessionMemory::Create(id, daemon_epoch_, tenant->epoch));
  auto session = std::make_unique<Session>();
  session->id = id;
  session->place = std::move(place);
  session->tenant = tenant;
  session->peer = peer;
  session->road = road;
  session->device = device;
  session->client_name = client_name.substr(0, kMaxText);
  session->sink = std::move(sink);
  session->memory = std::move(memory);
  session->opened = Clock::now();
  const SessionMemory& m = *session->memory;
  const SessionSegments segments{id,         daemon_epoch_, m.session_fd(),    m.table_fd(),
                                 m.header(), m.tables(),    m.session_bytes(), m.table_bytes()};
  tenant->sessions.push_back(session.get());
  sessions_.emplace(id, std::move(session));
  return segments;
}

void Store::Impl::EndSession(uint64_t id, SessionEnd how) {
  MutexLock lock(mu_);
  auto it = sessions_.find(id);
  for (; it != sessions_.end() && !IsFree(*it->second); it = sessions_.find(id)) AwaitFree();
  if (it == sessions_.end()) return;
  Session* session = it->second.get();
  Tenant* tenant = session->tenant;
  LongRequest request(this, session);
  if (!session->fenced) {
    for (const auto& [sequence, s] : session->sequences) {
      StopRecall(s.get(), Status(Code::kAborted, "SESSION_ENDED",
                                 "the session of sequence " + std::to_string(sequence) +
                                     " ended: its client detached or died"));
    }
    while (!session->sequences.empty()) {
      CloseLocked(session, session->sequences.begin()->second.get());
    }
    for (auto& [model_id, model] : session->models) LeaveModel(model.first.get());
    session->models.clear();
    session->sink = nullptr;
    session->fenced = true;
    Advance(session->tenant);
  }
  request.End();
  if (how != SessionEnd::kEof && session->writers == 0) DropSession(session);
  ReclaimByPieces(tenant);
  NoteFill();
}

void Store::Impl::LeaveModel(Model* model) {
  if (--model->sessions != 0) return;
  model->place = {};
  if (model->OfOneSession() && model->pages != 0) DropUnusedPagesOf(*model);
  if (model->pages == 0) models_.erase(model->id);
}

void Store::Impl::DropSession(Session* session) {
  std::erase(session->tenant->sessions, session);
  pools_.Orphan(session->id);
  sessions_.erase(session->id);
}

Status Store::Impl::MakeRoomForModel() {
  if (models_.size() < kMaxModels) return OkStatus();
  std::erase_if(models_, [](const auto& entry) {
    return entry.second->sessions == 0 && entry.second->pages == 0;
  });
  // Then one that only cached pages keep, the oldest of whoever has most of those.
  std::map<uint32_t, std::vector<Model*>> left;
  for (const auto& [id, model] : models_) {
    if (model->sessions == 0) left[model->tenant].push_back(model.get());
  }
  const auto most = std::ranges::max_element(
      left, {}, [](const auto& of_tenant) { return of_tenant.second.size(); });
  if (models_.size() >= kMaxModels && most != left.end()) {
    DropUnusedPagesOf(**std::ranges::min_element(most->second, {}, &Model::id));
    for (Tenant* tenant : tenants_by_id_) Advance(tenant);
    ReclaimLocked();
  }
  if (models_.size() < kMaxModels) return OkStatus();
  return ResourceExhausted("MODEL_LIMIT", "the daemon has all the " + std::to_string(kMaxModels) +
                                              " models that it may have; try again later");
}

// Others' models of that description are others'.
std::shared_ptr<Model> Store::Impl::FindRegistered(const Tenant& tenant,
                                                   const ModelDesc& desc) const {
  for (const auto& [id, known] : models_) {
    if (known->tenant == tenant.id && known->desc == desc) return known;
  }
  return nullptr;
}

Result<uint64_t> Store::Impl::RegisterModel(uint64_t session_id, const ModelDesc& desc) {
  MutexLock lock(mu_);
  KVS_ASSIGN_OR_RETURN(Session * session, FindSession(session_id));
  const uint64_t largest =
      std::max(pools_.capacity(PoolId::Device(session->device)), pools_.capacity(PoolId::Host()));
  KVS_RETURN_IF_ERROR(Validate(desc, largest));
  Tenant* const tenant = session->tenant;
  std::shared_ptr<Model> model = FindRegistered(*tenant, desc);
  UserPlace place;
  if (!model || model->sessions == 0) {
    KVS_ASSIGN_OR_RETURN(place, UserPlace::Take(user_limits_, tenant->name, Limit::kModels));
  }
  if (!model) {
    KVS_RETURN_IF_ERROR(MakeRoomForModel());
    model = std::make_shared<Model>();
    model->id = tenant->NextId(&tenant->models_made);
    model->tenant = tenant->id;
    model->desc = desc;
    models_.emplace(model->id, model);
  }
  if (model->sessions == 0) model->place = std::move(place);
  const auto [it, added] = session->models.try_emplace(
      model->id, std::make_pair(model, KeyChain(session->tenant->name, desc)));
  if (added) ++model->sessions;
  return it->first;
}

Result<Plan> Store::Impl::ResolvePlan(std::string_view text) const {
  const std::string_view trimmed = Trim(text);
  const size_t brace = std::min(trimmed.find('{'), trimmed.size());
  const auto it = named_plans_.find(Trim(trimmed.substr(0, brace)));
  if (it == named_plans_.end()) return ParsePlan(text);
  if (brace == trimmed.size()) return it->second;
  return InvalidArgument("PLAN_OPTION_INVALID",
                         "plan '" + it->first +
                             "' is a named plan of the daemon's configuration and takes no options "
                             "here; write its preset with options, or change [plans." +
                             it->first + "]");
}

// --- forwarding ---

Store::Store(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Store::~Store() = default;

Result<std::unique_ptr<Store>> Store::Create(const StoreOptions& options) {
  return Create(options, NewEmulatedDevice(), NewHostPinned());
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
  KVS_ASSIGN_OR_RETURN(Impl::NamedPlans plans, ParseNamedPlans(options));
  return std::unique_ptr<Store>(new Store(std::make_unique<Impl>(
      options, std::move(plans), NewDaemonEpoch(), std::move(devices), std::move(host))));
}

const std::shared_ptr<UserLimits>& Store::user_limits() const { return impl_->user_limits(); }
Result<uint32_t> Store::FindDevice(std::string_view name) const { return impl_->FindDevice(name); }
const std::string& Store::DeviceName(uint32_t device) const { return impl_->DeviceName(device); }
Result<SessionSegments> Store::OpenSession(const PeerIdentity& peer, Road road,
                                           std::string_view client_name, ArenaSink sink,
                                           uint32_t device) {
  return impl_->OpenSession(peer, road, client_name, std::move(sink), device);
}
void Store::EndSession(uint64_t session, SessionEnd how) {
  impl_->EndSession(session, how);
  impl_->TellSettled();
}
Result<PassedTables> Store::PassArenas(uint64_t session, bool writable, ArenaSink sink) {
  return impl_->PassArenas(session, writable, std::move(sink));
}
Status Store::CheckWriter(uint64_t session) { return impl_->CheckWriter(session); }
void Store::EndWriter(uint64_t session) { impl_->EndWriter(session); }
Result<uint64_t> Store::RegisterModel(uint64_t session, const ModelDesc& desc) {
  return impl_->RegisterModel(session, desc);
}
Result<OpenedSequence> Store::OpenSequence(uint64_t session, uint64_t model, std::string_view plan,
                                           std::span<const int32_t> tokens,
                                           const OpenOptions& options) {
  return impl_->OpenSequence(session, model, plan, tokens, options);
}
void Store::OpenSequence(uint64_t session, uint64_t model, std::string_view plan,
                         std::span<const int32_t> tokens, OpenDone done,
                         const OpenOptions& options) {
  impl_->OpenSequence(session, model, plan, tokens, std::move(done), options);
}
Result<OpenedSequence> Store::ForkSequence(uint64_t session, uint64_t sequence) {
  return impl_->ForkSequence(session, sequence);
}
Status Store::CloseSequence(uint64_t session, uint64_t sequence) {
  const Status status = impl_->CloseSequence(session, sequence);
  impl_->TellSettled();
  return status;
}
Result<OpenedSequence> Store::GiveKey(uint64_t session, const Result<OpenedSequence>& opened,
                                      std::string_view key) {
  Result<OpenedSequence> named = impl_->GiveKey(session, opened, key);
  impl_->TellSettled();
  return named;
}
Status Store::TruncateKey(uint64_t session, std::string_view key, uint32_t tokens) {
  return impl_->TruncateKey(session, key, tokens);
}
Status Store::CloseKey(uint64_t session, std::string_view key) {
  const Status status = impl_->CloseKey(session, key);
  impl_->TellSettled();
  return status;
}
Status Store::Truncate(uint64_t session, uint64_t sequence, uint32_t tokens,
                       std::span<const int32_t> tail) {
  const Status status = impl_->Truncate(session, sequence, tokens, tail);
  impl_->TellSettled();
  return status;
}
Status Store::Grow(uint64_t session, uint64_t sequence, uint32_t tokens, uint32_t writable,
                   uint32_t index_writable) {
  return impl_->Grow(session, sequence, tokens, writable, index_writable);
}
Status Store::Commit(uint64_t session, uint64_t sequence, uint32_t first,
                     std::span<const int32_t> tokens, uint32_t indexed_tokens) {
  return impl_->Commit(session, sequence, first, tokens, indexed_tokens);
}
Status Store::Report(uint64_t session, uint64_t sequence, uint32_t first, uint32_t n,
                     const float* surprisal, const float* entropy, const uint8_t* boundary) {
  return impl_->Report(session, sequence, first, n, surprisal, entropy, boundary);
}
Status Store::PrefillDone(uint64_t session, uint64_t sequence) {
  return impl_->PrefillDone(session, sequence);
}
Result<PrefixHit> Store::Lookup(uint64_t session, uint64_t model, std::span<const int32_t> tokens,
                                const LookupPlan& open) {
  return impl_->Lookup(session, model, tokens, open, Files::kRead);
}
void Store::Lookup(uint64_t session, uint64_t model, std::span<const int32_t> tokens,
                   const LookupPlan& open, LookupDone done) {
  if (open.lease.count() != 0) {
    return impl_->LookupLeased(session, model, tokens, open, std::move(done));
  }
  impl_->Lookup(session, model, tokens, open, std::move(done));
}
Result<PrefixHit> Store::Lookup(uint64_t session, uint64_t model, std::span<const PageKey> keys) {
  return impl_->Lookup(session, model, keys);
}
Result<PrefixHit> Store::LookupFor(std::string_view tenant, uint64_t model,
                                   std::span<const int32_t> tokens, const LookupPlan& open) {
  return impl_->LookupFor(tenant, model, tokens, open);
}
Result<PrefixHit> Store::LookupFor(std::string_view tenant, uint64_t model,
                                   std::span<const PageKey> keys) {
  return impl_->LookupFor(tenant, model, keys);
}
Result<Capacity> Store::CountCapacity(uint64_t session, uint64_t model, std::string_view plan) {
  return impl_->CountCapacity(session, model, plan);
}
void Store::ExpireLeases(Clock::time_point now) { impl_->ExpireLeases(now); }
Result<Geometry> Store::ModelGeometry(uint64_t session, uint64_t model) {
  return impl_->ModelGeometry(session, model);
}
Status Store::ImportModel(uint64_t session, uint64_t model) {
  return impl_->ImportModel(session, model);
}
Result<ImportJob> Store::BeginImport(uint64_t session, uint64_t sequence, uint32_t tokens) {
  return impl_->BeginImport(session, sequence, tokens);
}
Status Store::FinishImport(const ImportJob& job, std::span<const int32_t> tokens,
                           uint32_t indexed_tokens) {
  return impl_->FinishImport(job, tokens, indexed_tokens);
}
void Store::AbandonImport(const ImportJob& job) { impl_->AbandonImport(job); }
void Store::SetPageTier(PageTier* tier) { impl_->SetPageTier(tier); }
std::vector<SealedValue> Store::Sealed(const PageKey& key) const { return impl_->Sealed(key); }
bool Store::CopySealed(const PageKey& key, size_t value, std::span<const std::span<std::byte>> to) {
  return impl_->CopySealed(key, value, to);
}
void Store::NoteStored(std::span<const PageKey> keys) { impl_->NoteStored(keys); }
void Store::NoteRecord(const PageKey& artefact, std::span<const std::byte> value) {
  impl_->NoteRecord(artefact, value);
}
Result<PinInfo> Store::PinSequence(uint64_t sequence, std::chrono::microseconds ttl) {
  return impl_->PinSequence(sequence, ttl);
}
Result<PinInfo> Store::PinPrefix(std::string_view tenant, uint64_t model,
                                 std::span<const int32_t> tokens, std::chrono::microseconds ttl) {
  return impl_->PinPrefix(tenant, model, tokens, ttl);
}
Status Store::RemovePin(uint64_t pin) { return impl_->RemovePin(pin); }
void Store::ExpirePins() { impl_->ExpirePins(); }
void Store::RestorePins(std::vector<PrefixPin> pins) { impl_->RestorePins(std::move(pins)); }
std::vector<PinInfo> Store::Pins() { return impl_->Pins(); }
PinLimits Store::PinUse() const { return impl_->PinUse(); }
void Store::SetRecompressSink(RecompressSink* sink) {
  impl_->SetRecompressSink(sink);
  impl_->TellSettled();
}
Result<RecompressJob> Store::TakeRecompression(uint64_t sequence) {
  Result<RecompressJob> job = impl_->TakeRecompression(sequence);
  impl_->TellSettled();
  return job;
}
Status Store::StageRecompression(RecompressJob* job) { return impl_->StageRecompression(job); }

Result<RecompressResult> Store::PublishRecompression(RecompressJob job,
                                                     std::unique_ptr<Recompressor> next,
                                                     RecompressOutput output) {
  Result<RecompressResult> result =
      impl_->PublishRecompression(std::move(job), std::move(next), std::move(output));
  impl_->TellSettled();
  return result;
}
void Store::AbandonRecompression(RecompressJob job, const Status& why) {
  impl_->AbandonRecompression(std::move(job), why);
  impl_->TellSettled();
}
void Store::OfferDue() {
  impl_->OfferDue();
  impl_->TellSettled();
}
WorkRequests& Store::requests() { return impl_->requests(); }
bool Store::UnderPressure() const { return impl_->UnderPressure(); }
void Store::Settle(uint64_t session, uint64_t sequence, SettleDone done) {
  impl_->Settle(session, sequence, std::move(done));
  impl_->TellSettled();
}
std::vector<WorkInfo> Store::Work() const { return impl_->Work(); }
Result<RecallStart> Store::StartRecallAudit(uint64_t sequence, const RecallOptions& options,
                                            RecallAudit::Listener listener) {
  return impl_->StartRecallAudit(sequence, options, std::move(listener));
}
void Store::AddRecall(uint64_t session, uint64_t sequence, const RecallSamples& samples) {
  impl_->AddRecall(session, sequence, samples);
  impl_->TellSettled();
}
void Store::EndRecallAudit(uint64_t sequence, uint32_t audit, const Status& why) {
  impl_->EndRecallAudit(sequence, audit, why);
  impl_->TellSettled();
}
void Store::EndRecallAudits(const Status& why) {
  impl_->EndRecallAudits(why);
  impl_->TellSettled();
}
Memory Store::memory(Tier tier) const { return impl_->memory(tier); }
std::byte* Store::ArenaBase(uint32_t arena) const { return impl_->ArenaBase(arena); }
Status Store::ReachFromDevice(uint32_t arena, uint32_t device) const {
  return impl_->ReachFromDevice(arena, device);
}
void Store::LoseDevice(uint32_t device, const Status& why) { impl_->LoseDevice(device, why); }
Result<MoveResult> Store::Move(uint64_t sequence, Tier to) { return impl_->Move(sequence, to); }
void Store::SetMoveSink(std::function<void()> wake) { impl_->SetMoveSink(std::move(wake)); }
void Store::SetReplicationQueue(std::function<void(std::function<void()>)> post) {
  impl_->SetReplicationQueue(std::move(post));
}
std::optional<uint64_t> Store::MoveSome(uint64_t bytes) { return impl_->MoveSome(bytes); }
Result<ResizedPool> Store::ResizePool(Tier tier, uint64_t bytes, std::string_view device) {
  return impl_->ResizePool(tier, bytes, device);
}
EvictResult Store::Evict(bool dry_run) { return impl_->Evict(dry_run); }
void Store::Reclaim() { impl_->Reclaim(); }
std::vector<BlockInfo> Store::Blocks(uint64_t* cursor, size_t records) const {
  return impl_->Blocks(cursor, records);
}
std::vector<BlockInfo> Store::ArtefactBlocks() const { return impl_->ArtefactBlocks(); }
bool Store::HoldsBlock(const PageKey& key) const { return impl_->HoldsBlock(key); }
Result<BlockBytes> Store::CopyBlock(const PageKey& key) { return impl_->CopyBlock(key); }
std::vector<PoolInfo> Store::Pools() const { return impl_->Pools(); }
std::vector<SessionInfo> Store::Sessions() const { return impl_->Sessions(); }
std::vector<ModelInfo> Store::Models() const { return impl_->Models(); }
std::vector<SequenceInfo> Store::Sequences(uint64_t session) const {
  return impl_->Sequences(session);
}
Result<SequenceDetail> Store::Show(uint64_t sequence) const { return impl_->Show(sequence); }
AuditReport Store::Audit() const { return impl_->Audit(); }
StoreCounters Store::Counters() const { return impl_->Counters(); }
Result<Plan> Store::ResolvePlan(std::string_view text) const { return impl_->ResolvePlan(text); }
uint64_t Store::daemon_epoch() const { return impl_->daemon_epoch(); }

}  // namespace kvstrata
