// Store: the catalog of one daemon. Sessions, models, sequences, pages, the prefix index, published
// tables; everything that the ring server and the gRPC services act on.
//
// Ownership: the store owns all pages and segments; sessions own sequences; sequences and the
// prefix index hold references to pages. A page goes back to its pool when nothing refers to it and
// every reader that may see it has left its epoch (epochs.h).
// Thread-safety: every method may be called from any thread; one lock inside, held for microseconds
// (pages are copied and tokens hashed outside of it). What grows with the tokens of a request
// (open, fork, grow, commit, close, the end of a session) works in pieces of some 200 us and lets
// others have the lock between them. Such a request has its session to itself: what else is asked
// of the session, or of its sequences, waits until it is done; snapshots do not. Errors:
// SESSION_UNKNOWN, MODEL_UNKNOWN, SEQUENCE_UNKNOWN (also a sequence of another session),
// POOL_EXHAUSTED (RESOURCE_EXHAUSTED; nothing was taken), the PLAN_* of kernels/plan.h, and those
// that a method names. DEVICE_FAILED (UNAVAILABLE): the sequence has pages on a device that is lost
// to the daemon; close it and open it again, it is then served from host memory.
#ifndef KVSTRATA_SERVER_STORE_STORE_H_
#define KVSTRATA_SERVER_STORE_STORE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "kernels/page_view.h"
#include "kernels/plan.h"
#include "kernels/step/break_even.h"
#include "proto/shm_layout.h"
#include "server/memory/memory_resource.h"
#include "server/store/blocks.h"
#include "server/store/capacity.h"
#include "server/store/hold_limits.h"
#include "server/store/import_job.h"
#include "server/store/page_tier.h"
#include "server/store/pins.h"
#include "server/store/prefix_hit.h"
#include "server/store/prefix_key.h"
#include "server/store/recall_audit.h"
#include "server/store/recompress_job.h"
#include "server/store/user_limits.h"

namespace kvstrata {

class WorkRequests;  // work_requests.h

enum class Tier : uint16_t { kDevice = 0, kHost = 1 };
std::string_view NameOf(Tier tier);

// A pool: that of the host, or that of a device, by its number in the store.
class PoolId {
 public:
  static constexpr uint32_t kMaxDevices = 64;

  static constexpr PoolId Host() { return PoolId(0); }
  static constexpr PoolId Device(uint32_t device) { return PoolId(device + 1); }

  Tier tier() const { return index_ == 0 ? Tier::kHost : Tier::kDevice; }
  uint32_t device() const { return index_ - 1; }  // REQUIRES: tier() is kDevice
  size_t index() const { return index_; }         // below 1 + the number of devices
  auto operator<=>(const PoolId&) const = default;

 private:
  explicit constexpr PoolId(uint32_t index) : index_(index) {}
  uint32_t index_;
};

// A device whose memory the store hands out.
struct StoreDevice {
  std::string name;  // a GPU's UUID; "emulated", "emulated-1", ...
  std::unique_ptr<MemoryResource> memory;
  uint64_t bytes = ~uint64_t{0};  // its pool has at most so many
};

struct StoreOptions {
  // Pool capacities, of each device and of the host; memory is touched when used.
  uint64_t device_bytes = uint64_t{4} << 30;
  uint64_t host_bytes = uint64_t{4} << 30;
  uint64_t arena_bytes = 0;  // 0: capacity / 64 within 16 MiB .. 256 MiB
  uint32_t max_sessions = 1024;
  std::shared_ptr<UserLimits> user_limits;  // null: users have no limits
  uint32_t headroom_tokens = 64;            // pages kept ahead of what is committed
  std::vector<std::pair<std::string, std::string>> named_plans;  // configuration: name, text

  // Codecs (kernels/codec/codec.h: NewRecompressor, ParseSpanParameters). Null: rows stay raw.
  std::function<std::unique_ptr<Recompressor>(const Plan&, const Geometry&,
                                              std::shared_ptr<const SpanParameters>)>
      new_recompressor;
  std::function<Result<SpanParameters>(std::span<const std::byte>, const std::string&,
                                       const Geometry&, const Plan&)>
      parse_parameters;
  // Whether the device pool's memory can serve a plan; null: it can serve all. Asked when a
  // sequence opens.
  std::function<Status(const Plan&, const Geometry&)> serves;
  StepsOn steps_on = StepsOn::kCpu;  // what min_tokens = "auto" is for
  std::string parameters_directory;  // where plans' `parameters` lie; "": there are none
  uint64_t pin_limit_bytes = 0;      // of all pins together; 0: half of both pools
  // Bytes a second from host to device by moves while a step runs; 0: as fast as it goes.
  uint64_t promote_rate = 0;
  // Called once when a pool's device is lost (DEVICE_FAILED). In any thread, perhaps under the
  // store's lock: it must not call the store. Null: nobody asks.
  std::function<void(PoolId, const Status&)> on_pool_failure;
  // Percent of a pool's capacity: above the first, MoveSome makes room, until the second.
  uint32_t high_percent = 90, low_percent = 80;
  // The clock for pins; tests turn it.
  std::function<std::chrono::steady_clock::time_point()> now = std::chrono::steady_clock::now;
  // After a failed recompression (no memory, say), doubled with each that follows, up to 64 times.
  std::chrono::microseconds recompress_retry{1'000'000};
};

// Who is at the other end; from the kernel, never from a request.
struct PeerIdentity {
  uint32_t uid = 0, gid = 0, pid = 0;
  std::string tenant;  // "uid:1000"
};

enum class Road : uint8_t { kLinked, kRemote };

// An arena that a session may map. Descriptors stay owned by the store.
struct ArenaGrant {
  uint32_t arena = 0;
  uint64_t bytes = 0;
  Tier tier = Tier::kDevice;
  bool writable = false;
  Memory memory = Memory::kMemfd;
  int fd = -1;  // read-only or writable descriptor, as `writable` says
};
// Called, under the store's lock, before a table that names the arena is published.
using ArenaSink = std::function<void(const ArenaGrant&)>;

struct SessionSegments {
  uint64_t session = 0;
  uint64_t daemon_epoch = 0;
  int session_fd = -1;                   // writable by both
  int table_fd = -1;                     // read-only for the client
  shm::SessionHeader* header = nullptr;  // the daemon's mappings
  const shm::TableHeader* tables = nullptr;
  uint64_t session_bytes = 0, table_bytes = 0;
};

// What a process without the library maps of a session besides arenas.
struct PassedTables {
  UniqueFd table_fd;  // read-only; its own, so that it outlives the session
  uint64_t table_bytes = 0, daemon_epoch = 0;
  uint32_t device = 0;
  uint32_t arenas = 0;  // that were passed at once
};

struct ModelDesc {
  std::string name, digest, layout, adapter;
  Geometry geometry;
  int32_t rank = 0, ranks = 1;
  std::vector<int32_t> boundary_tokens;
  bool operator==(const ModelDesc&) const = default;
};

struct OpenedSequence {
  uint64_t sequence = 0;
  uint32_t slot = 0;
  uint32_t held_tokens = 0;
  uint32_t indexed_tokens = 0;
  uint32_t surprisal_tokens = 0;  // leading ones whose surprisal was stored with held pages
  uint32_t bounded_tokens = 0;    // leading ones of which it is known whether they end a sentence
  Plan plan;
  Geometry geometry;
  std::vector<int32_t> boundary_tokens;  // of the model
  std::vector<uint8_t> boundary;         // sentence ends of leading tokens, stored with held pages
  bool imported = false;                 // import_job.h
};

enum class SessionEnd : uint8_t {
  kDetached,  // the client said that it unmapped everything: memory may be reused at once
  kEof,   // the connection is gone, the process may live: sequences close, its arenas are fenced
  kDied,  // the process is dead: the fence falls
};

struct OpenOptions {
  HoldLimits hold;
  // Pages and index blocks for so many tokens, the prompt's among them, are taken at open, or it is
  // refused. 0, or fewer than the prompt has: those for the prompt.
  uint32_t reserve_tokens = 0;
};

using OpenDone = std::function<void(const Result<OpenedSequence>&)>;

// Snapshots for the admin service: plain values, ordered by id.
struct PoolInfo {
  Tier tier = Tier::kDevice;
  std::string device;  // its name; of host ""
  uint64_t capacity_bytes = 0, used_bytes = 0, cached_bytes = 0, arena_bytes = 0, retired_bytes = 0;
  uint64_t pinned_bytes = 0;  // that only pins keep
  uint32_t arenas = 0;
  std::string failure;  // why its device is lost; "": it is not
};
struct SessionInfo {
  uint64_t session = 0;
  std::string client_name;
  PeerIdentity peer;
  Road road = Road::kLinked;
  std::string device;   // whose memory it gets
  bool fenced = false;  // ended, but its process lives and may still read its arenas
  uint32_t sequences = 0, open_steps = 0;
  uint64_t used_bytes = 0, age_us = 0;
};
struct ModelInfo {
  uint64_t model = 0;
  ModelDesc desc;
  uint64_t sequences = 0, cached_pages = 0;
};
struct SequenceInfo {
  uint64_t sequence = 0, session = 0, model = 0;
  std::string model_name;
  Plan plan;
  uint32_t tokens = 0, capacity_tokens = 0, pages = 0, shared_pages = 0, index_blocks = 0;
  uint64_t version = 0, device_bytes = 0, host_bytes = 0, age_us = 0;
  uint32_t prompt_tokens = 0, held_tokens = 0;
  // Extents of its codec; their bytes are in device_bytes and host_bytes too.
  uint32_t extents = 0, absent_pages = 0;
  uint64_t extent_device_bytes = 0, extent_host_bytes = 0;
  std::string work_error;  // of its last recompression; "" if it published
  std::string key;         // that its engine gave it; "": none
};
struct PageInfo {
  uint32_t arena = 0;
  uint64_t offset = 0;
  Tier tier = Tier::kDevice;
  bool absent = false;  // given back: all else is zero but `selected`
  bool sealed = false, shared = false;
  uint32_t references = 0, selected = 0;
};
struct ExtentInfo {
  uint32_t arena = 0;
  uint64_t offset = 0, bytes = 0;
  Tier tier = Tier::kDevice;
  ExtentKind kind = ExtentKind::kPackedSegment;
  Run tokens;
  uint32_t references = 0;
};
struct SequenceDetail {
  SequenceInfo info;
  std::vector<PageInfo> pages, index_blocks;
  std::vector<ExtentInfo> extents;
};
struct AuditReport {
  std::vector<std::string> findings;  // empty: clean
  uint64_t pages = 0, bytes = 0, sequences = 0, sessions = 0;
};
struct StoreCounters {
  uint64_t publications = 0, retired_bytes = 0, prefix_pages = 0;
  uint64_t lookup_tokens = 0, lookup_hit_tokens = 0;
  uint64_t recompressions = 0, recompress_failures = 0;  // published; not
  uint64_t recompressed_bytes = 0, released_bytes = 0;   // extents written; raw pages given up
  uint64_t artefacts = 0, artefact_hits = 0;             // held; prompts that needed no work
  uint64_t loaded_pages = 0;                             // from the tier below, index blocks too
  uint64_t loaded_artefacts = 0;                         // from there
  uint64_t evicted_pages = 0, evicted_stored_pages = 0;  // from memory; of these, in the tier below
  uint64_t promoted_pages = 0, demoted_pages = 0;        // by MoveSome
  uint64_t replicated_pages = 0;  // from one device to another, because a sequence opened on them
  uint64_t sessions = 0, sequences = 0, models = 0;  // now
};
// A pool, or all of a tier, after the capacity was changed.
struct ResizedPool {
  uint64_t capacity_bytes = 0;
  uint64_t taken_bytes = 0;  // by arenas; those beyond the capacity go back when they are empty
  uint64_t evicted_pages = 0;
};
struct RecallStart {
  std::shared_ptr<RecallAudit> audit;
  SequenceInfo sequence;  // as it is now
  Road road = Road::kLinked;
};
// What an eviction drops, or would, of one tier.
struct EvictedTier {
  Tier tier = Tier::kDevice;
  uint64_t pages = 0, bytes = 0;  // recompressed prompts' extents too
  uint64_t stored_pages = 0;      // of these: in the tier below, hence no loss
  uint64_t artefact_pages = 0;    // of these: extents of recompressed prompts
  uint64_t pinned_bytes = 0;      // kept, because pinned
};
struct EvictResult {
  std::vector<EvictedTier> tiers;  // device, host
  uint64_t pages() const;
  uint64_t bytes() const;
};
struct PinLimits {
  uint64_t used_bytes = 0, limit_bytes = 0;
};
struct MoveResult {
  uint64_t pages = 0, bytes = 0, version = 0;
};

class Store {
 public:
  // PLAN_NAMED_INVALID when a named plan does not parse; POOL_SIZE when both pools are empty.
  static Result<std::unique_ptr<Store>> Create(const StoreOptions& options);
  // With memory of the caller's choosing (a device backend; tests that inject failures): of one
  // device, or of several of one kind (1 to PoolId::kMaxDevices), with different names.
  static Result<std::unique_ptr<Store>> Create(const StoreOptions& options,
                                               std::unique_ptr<MemoryResource> device,
                                               std::unique_ptr<MemoryResource> host);
  static Result<std::unique_ptr<Store>> Create(const StoreOptions& options,
                                               std::vector<StoreDevice> devices,
                                               std::unique_ptr<MemoryResource> host);
  ~Store();

  // --- devices ---
  // The number of the one of that name; "": of the first. NOT_FOUND DEVICE_UNKNOWN names them all.
  Result<uint32_t> FindDevice(std::string_view name) const;
  const std::string& DeviceName(uint32_t device) const;

  // --- sessions ---
  // Its sequences get memory of `device` and of the host, and see no other device's: pages of a
  // prefix that lie on another one are copied when they open.
  Result<SessionSegments> OpenSession(const PeerIdentity& peer, Road road,
                                      std::string_view client_name, ArenaSink sink,
                                      uint32_t device = 0);
  // Idempotent; kEof may be followed by kDied. kDetached and kDied unmap the segments and close
  // their descriptors: SessionSegments is void after them. kEof keeps them, because readers that
  // are inside a step still hold back memory. While the session has writers (PassArenas) all are
  // kEof.
  void EndSession(uint64_t session, SessionEnd how);
  // For a process without the library: passes every arena that the session was granted to `sink`,
  // now, and every later one before a table names it, instead of to the sink of before. With
  // `writable` the session's own arenas come writable; the process counts as a writer then until
  // EndWriter, and nobody else gets those arenas while there is one. Else all come read-only.
  // RESOURCE_EXHAUSTED WRITER_LIMIT: kMaxWriters of the session live. Cost: a system call an arena.
  static constexpr uint32_t kMaxWriters = 8;
  Result<PassedTables> PassArenas(uint64_t session, bool writable, ArenaSink sink);
  // FAILED_PRECONDITION NOT_WRITABLE: it has no writer.
  Status CheckWriter(uint64_t session);
  // A writer's process has ended.
  void EndWriter(uint64_t session);

  // --- models and sequences ---
  Result<uint64_t> RegisterModel(uint64_t session, const ModelDesc& desc);
  // Attaches to the longest held prefix (at most tokens - 1), reserves pages for the rest,
  // publishes the first table. SEQUENCE_LIMIT, TABLES_FULL (RESOURCE_EXHAUSTED), SEQUENCE_TOO_LONG,
  // PARAMETERS_* (parameters.h), PLAN_COMBINATION of a plan that cannot serve the model.
  Result<OpenedSequence> OpenSequence(uint64_t session, uint64_t model, std::string_view plan,
                                      std::span<const int32_t> tokens,
                                      const OpenOptions& options = {});
  // The same, after what the tier below has of the prefix beyond memory was read, what lies on
  // another device copied, and the plan's parameters read: never waits for any of it, calls `done`
  // once, at once in this thread or later in the tier's or the replication queue's. A page that is
  // lost, corrupt or late ends the prefix, and is no error.
  void OpenSequence(uint64_t session, uint64_t model, std::string_view plan,
                    std::span<const int32_t> tokens, OpenDone done,
                    const OpenOptions& options = {});
  Result<OpenedSequence> ForkSequence(uint64_t session, uint64_t sequence);
  // Takes back the tokens from position `tokens` on: their pages go, unless others hold or find
  // them. What workers have of those tokens ends. `tail`: the ids of the tokens that are left
  // behind the last whole page. TRUNCATE_TOKENS, TRUNCATE_TAIL; TRUNCATE_PROMPT inside a prompt
  // that is complete, TRUNCATE_PACKED where a codec alone holds the rows; SEQUENCE_IMPORTED.
  Status Truncate(uint64_t session, uint64_t sequence, uint32_t tokens,
                  std::span<const int32_t> tail);
  Status CloseSequence(uint64_t session, uint64_t sequence);
  // What an open answered, now with that key ("": as it was); closed again where that fails.
  // INVALID_ARGUMENT KEY_TEXT: up to 63 bytes, no control characters; ALREADY_EXISTS KEY_IN_USE.
  Result<OpenedSequence> GiveKey(uint64_t session, const Result<OpenedSequence>& opened,
                                 std::string_view key);
  // Closes the live sequence of that key, of any session of the session's user. Whoever steps with
  // it meanwhile keeps what the step reads. NOT_FOUND KEY_UNKNOWN.
  Status CloseKey(uint64_t session, std::string_view key);
  // Has the owner of the live sequence of that key truncate it, whichever session of the session's
  // user it is: what it keeps of the sequence is its own to cut. The wish is published in the
  // sequence's slot, and over when the owner has truncated to so few tokens, or was refused it. Of
  // several that wait the least counts. What is about to go is not packed meanwhile. KEY_UNKNOWN,
  // and as Truncate, of what was committed until now; a linked owner may have what it has pages
  // for, whose commits are on their way: then no TRUNCATE_TOKENS, and nothing is cut if it has not.
  Status TruncateKey(uint64_t session, std::string_view key, uint32_t tokens);
  // Makes the table cover `tokens`, with private pages from position `writable` on and private
  // index blocks from `index_writable` on; publishes before it returns. SEQUENCE_TOO_LONG;
  // GROW_SEALED when `writable` lies in a page that is full.
  Status Grow(uint64_t session, uint64_t sequence, uint32_t tokens, uint32_t writable,
              uint32_t index_writable);
  // New tokens are in the pages of all layers. Seals full pages, keys them, extends the table ahead
  // of need (without pages left it does not: the next Grow says POOL_EXHAUSTED).
  // COMMIT_OUT_OF_ORDER when `first` is not the sequence's length; COMMIT_BEYOND_TABLE,
  // COMMIT_TO_SHARED, COMMIT_INDEX when the client wrote, or says it wrote, where it may not;
  // SEQUENCE_IMPORTED, as Grow and ForkSequence.
  Status Commit(uint64_t session, uint64_t sequence, uint32_t first,
                std::span<const int32_t> tokens, uint32_t indexed_tokens);
  // Any array may be null. REPORT_POSITION, REPORT_VALUE.
  Status Report(uint64_t session, uint64_t sequence, uint32_t first, uint32_t n,
                const float* surprisal, const float* entropy, const uint8_t* boundary);
  Status PrefillDone(uint64_t session, uint64_t sequence);
  // The longest prefix that memory and the tier below hold together. With a plan: what an open of
  // it, without options, on that device ("": the session's) would answer now, by the same rule
  // (held_prefix.h); it may fail as that open would (PLAN_*, PARAMETERS_*), or by DEVICE_UNKNOWN.
  // Without: raw pages of any device, of at most tokens - 1.
  // It says what is held, not what there is room for: an open that finds no memory for copies, or a
  // value damaged, or the disk late, holds less. What it knows of an artefact that lies on
  // disk alone is in ArtefactLedger, which after a start is filled in the background.
  // Idempotent; takes nothing, reads no disk, holds the lock for 256 pages at a time. May read a
  // plan's parameters, once. Cost: hashing (prefix_key.h) and a hash look-up or two a page.
  Result<PrefixHit> Lookup(uint64_t session, uint64_t model, std::span<const int32_t> tokens,
                           const LookupPlan& open = {});
  // The same, never waiting for a file: calls `done` once, at once in this thread, or later in the
  // replication queue's. With a lease (the others take none) what is answered stays held so long,
  // or until the session ends: the daemon opens the plan for the session, as OpenSequence does, on
  // what is held alone, and closes it then. `done` may come in the tier's thread, too. The same
  // prompt and plan again renew the lease. INVALID_ARGUMENT LEASE_TIME, LEASE_PLAN, LEASE_DEVICE;
  // RESOURCE_EXHAUSTED SEQUENCE_LIMIT, TABLES_FULL: nothing is answered then.
  void Lookup(uint64_t session, uint64_t model, std::span<const int32_t> tokens,
              const LookupPlan& open, LookupDone done);
  // Raw pages whose keys are known. In memory another tenant's keys are a miss; the tier below
  // knows no tenants: there the key, which nobody else can compute, is the permission.
  Result<PrefixHit> Lookup(uint64_t session, uint64_t model, std::span<const PageKey> keys);
  // How many tokens of the model, with what the plan keeps beside them in its index, the session
  // could open or grow to as things are. Takes nothing, promises nothing: others may be faster, and
  // an open has limits of its own (SEQUENCE_LIMIT, TABLES_FULL). PLAN_*. Frees what readers have
  // left; then looks, under the lock, at every arena, at the free extents of the session's own, and
  // at the extents of artefacts.
  Result<Capacity> CountCapacity(uint64_t session, uint64_t model, std::string_view plan);
  // An operator's: of any tenant, attached or not; its device "" is the first. MODEL_UNKNOWN.
  Result<PrefixHit> LookupFor(std::string_view tenant, uint64_t model,
                              std::span<const int32_t> tokens, const LookupPlan& open = {});
  Result<PrefixHit> LookupFor(std::string_view tenant, uint64_t model,
                              std::span<const PageKey> keys);

  // Ends the leases whose time is over. For housekeeping; no I/O.
  void ExpireLeases(std::chrono::steady_clock::time_point now);

  // --- imported sequences (import_job.h) ---
  Result<Geometry> ModelGeometry(uint64_t session, uint64_t model);
  // Sequences that the session opens of this model from now on are imported.
  Status ImportModel(uint64_t session, uint64_t model);
  // Room for `tokens` behind those that are committed. FAILED_PRECONDITION SEQUENCE_OWNED,
  // SEQUENCE_TOO_LONG, MEMORY_EXHAUSTED, COPY_FAILED. One job of a sequence at a time.
  Result<ImportJob> BeginImport(uint64_t session, uint64_t sequence, uint32_t tokens);
  // Commits `tokens`, whose rows the job wrote, and index rows up to `indexed_tokens`. What fails
  // (the sequence was closed, say) commits nothing.
  Status FinishImport(const ImportJob& job, std::span<const int32_t> tokens,
                      uint32_t indexed_tokens);
  void AbandonImport(const ImportJob& job);

  // --- recompression (recompress_job.h) ---
  // Null: nobody; waiting settles are answered UNAVAILABLE WORK_STOPPED then.
  void SetRecompressSink(RecompressSink* sink);
  // NOT_FOUND when the sequence is gone, ABORTED WORK_NOTHING when nothing is due (any more).
  Result<RecompressJob> TakeRecompression(uint64_t sequence);
  // Before a run: copies what it reads of a pool that the host cannot read to the host, and points
  // the job there; its other pages become null. On such a pool it takes as much host memory as the
  // rows that the run reads. ABORTED when cancelled; RESOURCE_EXHAUSTED MEMORY_EXHAUSTED;
  // COPY_FAILED. The job is to be abandoned then.
  Status StageRecompression(RecompressJob* job);
  // Copies the drafts into extents, publishes a table that names them with `next` as the sequence's
  // Recompressor, and gives up raw pages as the plan's keep_raw says. `next` and `output` are those
  // of the job; with a job that has none, only raw pages are placed. Takes as long as the copies.
  // What fails leaves the sequence as it was: SEQUENCE_UNKNOWN (closed meanwhile), POOL_EXHAUSTED,
  // TABLES_FULL, DRAFT_INVALID (INTERNAL).
  Result<RecompressResult> PublishRecompression(RecompressJob job,
                                                std::unique_ptr<Recompressor> next,
                                                RecompressOutput output);
  // `why` is shown; ABORTED is no failure.
  void AbandonRecompression(RecompressJob job, const Status& why);
  // Offers again what the sink refused and what has waited out a failure. Cheap when there is none.
  void OfferDue();
  // Whether a device pool is above its watermark (80 %): who releases most should go first.
  bool UnderPressure() const;
  // Calls `done` once nothing of the sequence is due, queued or running: at once, in this thread,
  // or later in a worker's, without any lock; with the error when its last recompression failed.
  // SEQUENCE_UNKNOWN, ABORTED SEQUENCE_CLOSED, UNAVAILABLE WORK_STOPPED.
  void Settle(uint64_t session, uint64_t sequence, SettleDone done);
  std::vector<WorkInfo> Work() const;
  // What is asked of the workers: builds, recompressions, their end (work_requests.h).
  WorkRequests& requests();
  // The options' limits, or one without any.
  const std::shared_ptr<UserLimits>& user_limits() const;

  // --- recall audits (recall_audit.h) ---
  // Asks the sequence's steps for samples until the audit has enough or ends. SEQUENCE_UNKNOWN;
  // INVALID_ARGUMENT RECALL_OPTION; FAILED_PRECONDITION RECALL_RUNNING (one audit of a sequence at
  // a time), RECALL_RAW_GONE. Ends that the store makes: OK; RECALL_RAW_GONE; ABORTED
  // SEQUENCE_CLOSED, SESSION_ENDED; DATA_LOSS RECALL_SAMPLE.
  Result<RecallStart> StartRecallAudit(uint64_t sequence, const RecallOptions& options,
                                       RecallAudit::Listener listener);
  // Samples of an audit that has ended are ignored. Never an error of the sequence.
  void AddRecall(uint64_t session, uint64_t sequence, const RecallSamples& samples);
  // Nothing if it has ended.
  void EndRecallAudit(uint64_t sequence, uint32_t audit, const Status& why);
  void EndRecallAudits(const Status& why);

  // --- the tier below (page_tier.h) ---
  // Null: there is none. It outlives all its loads and is unset before it ends.
  void SetPageTier(PageTier* tier);
  // What is to be written for an offered key: a page or index block, or the parts of an artefact
  // and at last its record, which is of no use without all of them. Empty: it left memory.
  std::vector<SealedValue> Sealed(const PageKey& key) const;
  // Copies the buffers of one of them, outside of the lock; false: it is not there any more, or of
  // another size.
  bool CopySealed(const PageKey& key, size_t value, std::span<const std::span<std::byte>> to);

  // The tier has these now.
  void NoteStored(std::span<const PageKey> keys);
  // It has this value of an artefact's key; nothing if that is no record.
  void NoteRecord(const PageKey& artefact, std::span<const std::byte> value);

  // --- pins (pins.h) ---
  // Pins its leading full pages, their index, and its artefact with the pages that that needs, now.
  // Errors of all: INVALID_ARGUMENT PIN_TTL (1 ms to 366 days); RESOURCE_EXHAUSTED PIN_LIMIT, where
  // what pins share counts for each; those of the tier below, which leave nothing pinned. Waits for
  // the disk, where there is one. FAILED_PRECONDITION PIN_NOTHING.
  Result<PinInfo> PinSequence(uint64_t sequence, std::chrono::microseconds ttl);
  // Pins the leading whole pages of `tokens` that are held, in whatever tier; not the index.
  // NOT_FOUND PIN_MISS, MODEL_UNKNOWN.
  Result<PinInfo> PinPrefix(std::string_view tenant, uint64_t model,
                            std::span<const int32_t> tokens, std::chrono::microseconds ttl);
  // NOT_FOUND PIN_UNKNOWN; those of the tier below: the pin has ended, and may be back after a
  // restart.
  Status RemovePin(uint64_t pin);
  // Ends those whose time is over. For housekeeping; no I/O.
  void ExpirePins();
  // Pins of an earlier daemon, which the tier keeps already.
  void RestorePins(std::vector<PrefixPin> pins);
  // All pins, by number.
  std::vector<PinInfo> Pins();
  PinLimits PinUse() const;

  // --- memory ---
  // What the arenas of a tier are, on every device.
  Memory memory(Tier tier) const;
  // The daemon's own mapping of an arena; null if there is none of that id. Valid while a reader is
  // inside an epoch and its table names the arena.
  std::byte* ArenaBase(uint32_t arena) const;
  // Lets kernels of a device follow that mapping, too; done when it returns. As long as ArenaBase
  // is valid. INTERNAL TABLE_INVALID; RESOURCE_EXHAUSTED HOST_UNREACHABLE; DEVICE_FAILED.
  Status ReachFromDevice(uint32_t arena, uint32_t device) const;
  // Whoever runs steps on a device found that it answers nothing any more: `why`, DEVICE_FAILED.
  void LoseDevice(uint32_t device, const Status& why);
  // Copies a sequence's sealed pages to another pool (`device`: that of its session's device),
  // publishes a table that names the copies, and retires the originals nobody else refers to.
  // Readers inside a step keep what they see.
  Result<MoveResult> Move(uint64_t sequence, Tier to);
  // Calls `wake`, under the store's lock, whenever MoveSome may have something to do. Null: nobody
  // moves anything.
  void SetMoveSink(std::function<void()> wake);
  // Where opens that have to copy a prefix from another device, or to read a plan's parameters, go
  // on: `post` has each function run once, one after the other, in a thread that may wait, and the
  // store outlives that. Null: they do so in the caller's thread.
  void SetReplicationQueue(std::function<void(std::function<void()>)> post);
  // A piece of what is to be moved, at most `bytes` of copies but for a page: of sequences that
  // opened on pages of `host` these, to `device` while it is below its high mark; of a pool that
  // went above its high mark, until its low one, pages that nobody uses: from device to host while
  // that is below its own, else they are evicted. Returns the bytes copied; nothing: there is
  // nothing to do. One thread at a time.
  std::optional<uint64_t> MoveSome(uint64_t bytes);
  // Changes the capacity of a pool, of `device` of each device or of the one named, and evicts what
  // nobody uses as far as that empties arenas that are beyond it. INVALID_ARGUMENT POOL_SIZE: 1 MiB
  // to 16 TiB; DEVICE_UNKNOWN. The result is the sum over the pools.
  Result<ResizedPool> ResizePool(Tier tier, uint64_t bytes, std::string_view device = "");
  // Drops cached pages and artefacts that no sequence uses and no pin keeps; with `dry_run` only
  // counts them.
  EvictResult Evict(bool dry_run);
  // Frees what every reader has passed; called by the daemon's housekeeping and by allocation.
  void Reclaim();

  // --- values (blocks.h) ---
  // Pages and index blocks under a key, of at most `records` records from `*cursor` on (0: the
  // first), which it moves; at the end it is kNoMoreBlocks. Holds the lock for 256 at a time.
  std::vector<BlockInfo> Blocks(uint64_t* cursor, size_t records) const;
  // Records and parts of artefacts. Holds the lock for one artefact at a time.
  std::vector<BlockInfo> ArtefactBlocks() const;
  // Whether a page or index block is under this key. A look-up.
  bool HoldsBlock(const PageKey& key) const;
  // A copy of any of these, made outside of the lock. NOT_FOUND BLOCK_UNKNOWN: memory has none.
  Result<BlockBytes> CopyBlock(const PageKey& key);

  // --- inspection ---
  // Each sequence as it was at some moment; others get in between. Audit holds the lock for all.
  std::vector<PoolInfo> Pools() const;  // of the devices, then of the host
  std::vector<SessionInfo> Sessions() const;
  std::vector<ModelInfo> Models() const;
  std::vector<SequenceInfo> Sequences(uint64_t session) const;  // 0: all
  Result<SequenceDetail> Show(uint64_t sequence) const;
  AuditReport Audit() const;
  StoreCounters Counters() const;
  // Named plans of the configuration, then presets.
  Result<Plan> ResolvePlan(std::string_view text) const;
  uint64_t daemon_epoch() const;

  class Impl;  // store_impl.h

 private:
  friend struct AuditTestPeer;
  explicit Store(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_STORE_H_
