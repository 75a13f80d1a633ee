// StoreImpl: all state of the store behind one lock, and the functions over it, by file:
//   store.cc           forwarding, sessions, models, plans
//   open_sequence.cc   open, fork, close; keys.cc: by the key that an engine gave
//   find_prefix.cc     what is held of a prompt, in memory and below
//   lookup.cc          what of that an open would be told; leases.cc: and that it stays held
//   step_events.cc     grow, commit, report, prefill_done: what a running sequence sends
//   publish.cc         tables: new versions, extension in place, arena grants
//   allocate.cc        pages: allocation and its fallbacks, references, retiring, reclaiming
//   capacity.cc        what allocation would find
//   long_request.cc    requests that grow with their tokens: by pieces, others between them
//   page_tier.cc       pages to and from the tier below; artefact_tier.cc: artefacts
//   pins.cc            prefixes that eviction spares
//   evict.cc           what an operator drops, or would
//   import.cc          sequences that the daemon fills from an engine's tensors
//   replicate.cc       a prefix that lies on another device
//   move.cc            copies between pools, private copies
//   device_failure.cc  what becomes of a pool whose device is lost
//   selected_pages.cc  what selectors chose, for eviction
//   watermarks.cc      what is moved in the background; capacities that change
//   recompress.cc      what is due, jobs of workers, publishing their extents, settling
//   work_requests.cc   what is asked of workers: builds (build_parts.cc), recompressions, their end
//   raw_pages.cc       raw pages that a codec made superfluous: given back, or moved to host
//   recall.cc          recall audits of sequences
//   inspect.cc         snapshots; audit.cc: the proof of the books
// Names that end in Locked need the lock; others take it. What FindSession and FindSequence answer
// is valid until the lock is given up, also by their next call: they wait for the session's long
// request.
#ifndef KVSTRATA_SERVER_STORE_STORE_IMPL_H_
#define KVSTRATA_SERVER_STORE_STORE_IMPL_H_

#include <array>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/sync.h"
#include "base/yielding_mutex.h"
#include "server/store/artefact_ledger.h"
#include "server/store/artefact_record.h"
#include "server/store/copy_rate.h"
#include "server/store/page_owner.h"
#include "server/store/page_tier.h"
#include "server/store/parameters.h"
#include "server/store/prefix_index.h"
#include "server/store/prefix_survey.h"
#include "server/store/sequence.h"
#include "server/store/store.h"
#include "server/store/work_requests.h"

namespace kvstrata {

class Store::Impl {
 public:
  using NamedPlans = std::map<std::string, Plan, std::less<>>;
  Impl(const StoreOptions& options, NamedPlans named_plans, uint64_t daemon_epoch,
       std::vector<StoreDevice> devices, std::unique_ptr<MemoryResource> host);

  // They read of pools_ only what is constant.
  Result<uint32_t> FindDevice(std::string_view name) const KVS_NO_THREAD_SAFETY_ANALYSIS;
  const std::string& DeviceName(uint32_t device) const KVS_NO_THREAD_SAFETY_ANALYSIS {
    return pools_.name(PoolId::Device(device));
  }
  Result<SessionSegments> OpenSession(const PeerIdentity& peer, Road road,
                                      std::string_view client_name, ArenaSink sink, uint32_t device)
      KVS_EXCLUDES(mu_);
  void EndSession(uint64_t session, SessionEnd how) KVS_EXCLUDES(mu_);
  Result<PassedTables> PassArenas(uint64_t session, bool writable, ArenaSink sink)
      KVS_EXCLUDES(mu_);
  Status CheckWriter(uint64_t session) KVS_EXCLUDES(mu_);
  void EndWriter(uint64_t session) KVS_EXCLUDES(mu_);
  Result<uint64_t> RegisterModel(uint64_t session, const ModelDesc& desc) KVS_EXCLUDES(mu_);
  Result<OpenedSequence> OpenSequence(uint64_t session, uint64_t model, std::string_view plan,
                                      std::span<const int32_t> tokens, const OpenOptions& options)
      KVS_EXCLUDES(mu_);
  void OpenSequence(uint64_t session, uint64_t model, std::string_view plan,
                    std::span<const int32_t> tokens, OpenDone done, const OpenOptions& options)
      KVS_EXCLUDES(mu_);
  Result<OpenedSequence> ForkSequence(uint64_t session, uint64_t sequence) KVS_EXCLUDES(mu_);
  Status Truncate(uint64_t session, uint64_t sequence, uint32_t tokens,
                  std::span<const int32_t> tail) KVS_EXCLUDES(mu_);
  Status CloseSequence(uint64_t session, uint64_t sequence) KVS_EXCLUDES(mu_);
  Result<OpenedSequence> GiveKey(uint64_t session, const Result<OpenedSequence>& opened,
                                 std::string_view key) KVS_EXCLUDES(mu_);
  Status CloseKey(uint64_t session, std::string_view key) KVS_EXCLUDES(mu_);
  Status TruncateKey(uint64_t session, std::string_view key, uint32_t tokens) KVS_EXCLUDES(mu_);
  Status Grow(uint64_t session, uint64_t sequence, uint32_t tokens, uint32_t writable,
              uint32_t index_writable) KVS_EXCLUDES(mu_);
  Status Commit(uint64_t session, uint64_t sequence, uint32_t first,
                std::span<const int32_t> tokens, uint32_t indexed_tokens) KVS_EXCLUDES(mu_);
  Status Report(uint64_t session, uint64_t sequence, uint32_t first, uint32_t n,
                const float* surprisal, const float* entropy, const uint8_t* boundary)
      KVS_EXCLUDES(mu_);
  Status PrefillDone(uint64_t session, uint64_t sequence) KVS_EXCLUDES(mu_);
  Result<Capacity> CountCapacity(uint64_t session, uint64_t model, std::string_view plan)
      KVS_EXCLUDES(mu_);
  Result<PrefixHit> Lookup(uint64_t session, uint64_t model, std::span<const int32_t> tokens,
                           const LookupPlan& open, Files files) KVS_EXCLUDES(mu_);
  void Lookup(uint64_t session, uint64_t model, std::span<const int32_t> tokens,
              const LookupPlan& open, LookupDone done) KVS_EXCLUDES(mu_);
  Result<PrefixHit> Lookup(uint64_t session, uint64_t model, std::span<const PageKey> keys)
      KVS_EXCLUDES(mu_);
  Result<PrefixHit> LookupFor(std::string_view tenant, uint64_t model,
                              std::span<const int32_t> tokens, const LookupPlan& open)
      KVS_EXCLUDES(mu_);
  void LookupLeased(uint64_t session, uint64_t model, std::span<const int32_t> tokens,
                    const LookupPlan& open, LookupDone done) KVS_EXCLUDES(mu_);
  void ExpireLeases(Clock::time_point now) KVS_EXCLUDES(mu_);
  Result<PrefixHit> LookupFor(std::string_view tenant, uint64_t model,
                              std::span<const PageKey> keys) KVS_EXCLUDES(mu_);

  Result<Geometry> ModelGeometry(uint64_t session, uint64_t model) KVS_EXCLUDES(mu_);
  Status ImportModel(uint64_t session, uint64_t model) KVS_EXCLUDES(mu_);
  Result<ImportJob> BeginImport(uint64_t session, uint64_t sequence, uint32_t tokens)
      KVS_EXCLUDES(mu_);
  Status FinishImport(const ImportJob& job, std::span<const int32_t> tokens,
                      uint32_t indexed_tokens) KVS_EXCLUDES(mu_);
  void AbandonImport(const ImportJob& job) KVS_EXCLUDES(mu_);

  void SetRecompressSink(RecompressSink* sink) KVS_EXCLUDES(mu_);
  Result<RecompressJob> TakeRecompression(uint64_t sequence) KVS_EXCLUDES(mu_);
  Status StageRecompression(RecompressJob* job) KVS_NO_THREAD_SAFETY_ANALYSIS;
  Result<RecompressResult> PublishRecompression(RecompressJob job,
                                                std::unique_ptr<Recompressor> next,
                                                RecompressOutput output) KVS_EXCLUDES(mu_);
  void AbandonRecompression(RecompressJob job, const Status& why) KVS_EXCLUDES(mu_);
  void OfferDue() KVS_EXCLUDES(mu_);
  bool UnderPressure() const KVS_EXCLUDES(mu_);
  void Settle(uint64_t session, uint64_t sequence, SettleDone done) KVS_EXCLUDES(mu_);
  std::vector<WorkInfo> Work() const KVS_EXCLUDES(mu_);
  // Calls what settled; after every method that may have closed or finished something.
  void TellSettled() KVS_EXCLUDES(mu_);

  Result<RecallStart> StartRecallAudit(uint64_t sequence, const RecallOptions& options,
                                       RecallAudit::Listener listener) KVS_EXCLUDES(mu_);
  void AddRecall(uint64_t session, uint64_t sequence, const RecallSamples& samples)
      KVS_EXCLUDES(mu_);
  void EndRecallAudit(uint64_t sequence, uint32_t audit, const Status& why) KVS_EXCLUDES(mu_);
  void EndRecallAudits(const Status& why) KVS_EXCLUDES(mu_);

  void SetPageTier(PageTier* tier) KVS_EXCLUDES(mu_);
  std::vector<SealedValue> Sealed(const PageKey& key) const KVS_EXCLUDES(mu_);
  bool CopySealed(const PageKey& key, size_t value, std::span<const std::span<std::byte>> to)
      KVS_EXCLUDES(mu_);

  void NoteStored(std::span<const PageKey> keys) KVS_EXCLUDES(mu_);
  void NoteRecord(const PageKey& artefact, std::span<const std::byte> value);

  Result<PinInfo> PinSequence(uint64_t sequence, std::chrono::microseconds ttl) KVS_EXCLUDES(mu_);
  Result<PinInfo> PinPrefix(std::string_view tenant, uint64_t model,
                            std::span<const int32_t> tokens, std::chrono::microseconds ttl)
      KVS_EXCLUDES(mu_);
  Status RemovePin(uint64_t pin) KVS_EXCLUDES(mu_);
  void ExpirePins() KVS_EXCLUDES(mu_);
  void RestorePins(std::vector<PrefixPin> pins) KVS_EXCLUDES(mu_);
  std::vector<PinInfo> Pins() KVS_EXCLUDES(mu_);
  PinLimits PinUse() const KVS_EXCLUDES(mu_);

  Memory memory(Tier tier) const KVS_EXCLUDES(mu_);
  std::byte* ArenaBase(uint32_t arena) const KVS_EXCLUDES(mu_);
  // Outside of the lock: who asks pins pages of the arena.
  Status ReachFromDevice(uint32_t arena, uint32_t device) const KVS_NO_THREAD_SAFETY_ANALYSIS;
  void LoseDevice(uint32_t device, const Status& why) KVS_NO_THREAD_SAFETY_ANALYSIS;
  Result<MoveResult> Move(uint64_t sequence, Tier to) KVS_EXCLUDES(mu_);
  void SetMoveSink(std::function<void()> wake) KVS_EXCLUDES(mu_);
  void SetReplicationQueue(std::function<void(std::function<void()>)> post) KVS_EXCLUDES(mu_);
  std::optional<uint64_t> MoveSome(uint64_t bytes) KVS_EXCLUDES(mu_);
  Result<ResizedPool> ResizePool(Tier tier, uint64_t bytes, std::string_view device)
      KVS_EXCLUDES(mu_);
  EvictResult Evict(bool dry_run) KVS_EXCLUDES(mu_);
  void Reclaim() KVS_EXCLUDES(mu_);

  std::vector<BlockInfo> Blocks(uint64_t* cursor, size_t records) const KVS_EXCLUDES(mu_);
  std::vector<BlockInfo> ArtefactBlocks() const KVS_EXCLUDES(mu_);
  bool HoldsBlock(const PageKey& key) const KVS_EXCLUDES(mu_);
  Result<BlockBytes> CopyBlock(const PageKey& key) KVS_EXCLUDES(mu_);

  std::vector<PoolInfo> Pools() const KVS_EXCLUDES(mu_);
  std::vector<SessionInfo> Sessions() const KVS_EXCLUDES(mu_);
  std::vector<ModelInfo> Models() const KVS_EXCLUDES(mu_);
  std::vector<SequenceInfo> Sequences(uint64_t session) const KVS_EXCLUDES(mu_);
  Result<SequenceDetail> Show(uint64_t sequence) const KVS_EXCLUDES(mu_);
  AuditReport Audit() const KVS_EXCLUDES(mu_);
  StoreCounters Counters() const KVS_EXCLUDES(mu_);
  Result<Plan> ResolvePlan(std::string_view text) const;
  uint64_t daemon_epoch() const { return daemon_epoch_; }
  WorkRequests& requests() { return *requests_; }
  const std::shared_ptr<UserLimits>& user_limits() const { return user_limits_; }

 private:
  friend class Auditor;
  friend class WorkRequests;
  friend struct AuditTestPeer;

  // Who pages are taken for and where from, first choice first.
  struct Taker {
    Tenant* tenant;
    uint64_t writer;         // a session or kDaemon
    const Session* session;  // null: the daemon
    uint64_t model;
    std::vector<PoolId> pools;
    bool evicts = true;  // else only what is free is taken
    uint64_t ahead = 0;  // bytes that are taken next: what is evicted makes room for them too
  };
  // What was not to be had.
  struct Shortage {
    uint64_t bytes = 0;  // of a page
    uint32_t pages = 0, got = 0;
    std::optional<uint64_t> fits;  // tokens that the sequence could have now
  };
  // What Move may copy.
  struct MoveLimit {
    uint64_t bytes = ~uint64_t{0};  // but for its first page
    uint64_t room = ~uint64_t{0};
    bool evicts = true;  // to make room for the copies
  };
  // A page on its way: `source` is pinned by a reference, `copy` belongs to the copy.
  struct Copy {
    bool index = false;
    uint32_t position = 0;  // in Sequence::pages or index_blocks
    Page* source = nullptr;
    Page* copy = nullptr;
    uint32_t rows = 0;       // of a page: leading tokens to copy (index blocks: all of it)
    bool keeps_key = false;  // the copy takes the source's place in the prefix index too
    uint32_t tenant = 0;
    bool used = false;  // result: it took the source's place
  };
  // A page of another device and its copy on the way; a load holds both.
  struct Replica {
    Page* source = nullptr;
    Page* copy = nullptr;
  };
  // A page that nobody uses on its way to host; a job keeps it readable.
  struct Demotion {
    Page* source = nullptr;
    Page* copy = nullptr;
    RecompressJob job;
  };
  struct Hit {
    std::vector<Page*> pages, index_blocks;  // null: a page that an artefact makes superfluous
    bool whole = true;                       // no page is null
  };
  // A sequence on its way to be opened.
  struct Opening {
    uint64_t session = 0;
    std::string tenant;   // of the session
    uint32_t device = 0;  // of the session
    std::unique_ptr<Sequence> sequence;
    std::vector<PageKey> keys;  // of the pages that it may be held for
    size_t tokens = 0;
    HoldLimits limits;
    uint32_t reserve_tokens = 0;
    std::vector<int32_t> rest;  // of them, those behind the pages of `keys`
    PageKey artefact{};         // of the prompt; zeros: the plan has no codec
    Clock::time_point asked;
    uint64_t load = 0;              // of loads_; 0: none
    std::vector<bool> loads_index;  // per key of the load: it is an index block's
    // The artefact on its way here: its record, and of its parts those that have come.
    std::optional<ArtefactRecord> record;
    std::vector<Extent> parts;
    PrefixQuestion question() const {
      return {tenant, sequence->plan, sequence->index, sequence->page_tokens(), keys};
    }
  };

  // store.cc
  Result<Session*> FindSession(uint64_t id) KVS_REQUIRES(mu_);
  Result<Sequence*> FindSequence(uint64_t session, uint64_t id) KVS_REQUIRES(mu_);
  Result<Sequence*> FindSequence(uint64_t id) KVS_REQUIRES(mu_);
  // The sequence as it is now, without waiting.
  Result<const Sequence*> PeekSequence(uint64_t id) const KVS_REQUIRES(mu_);
  static Result<const Session::KnownModel*> FindModel(const Session& session, uint64_t id);
  Tenant* TenantOf(const std::string& name) KVS_REQUIRES(mu_);
  Status MakeRoomForModel() KVS_REQUIRES(mu_);
  void DropSession(Session* session) KVS_REQUIRES(mu_);
  Status CheckRoomForSession(const Tenant& tenant) const KVS_REQUIRES(mu_);
  std::shared_ptr<Model> FindRegistered(const Tenant& tenant, const ModelDesc& desc) const
      KVS_REQUIRES(mu_);
  void LeaveModel(Model* model) KVS_REQUIRES(mu_);
  void DropUnusedPagesOf(const Model& model)
      KVS_REQUIRES(mu_);  // evict.cc; none of its pinned ones

  // long_request.cc
  class LongRequest;  // long_request.h
  // In a long request of `session`, after work on that many pages: if it was enough for a piece,
  // whoever waits for the lock has it first. In anything else: nothing.
  void LetOthersIn(Session* session, size_t pages) const KVS_REQUIRES(mu_);
  // Gives up the lock until some long request has ended.
  void AwaitFree() const KVS_NO_THREAD_SAFETY_ANALYSIS;
  // Nobody else's long request has it.
  static bool IsFree(const Session& session);

  // find_prefix.cc
  // In memory. `artefact`: the prompt's, if it may stand for raw pages. `device`: who asks; none:
  // pages of any device count. `found` is called for each page at once.
  Hit FindPrefix(const PrefixQuestion& q, const std::optional<RawFree>& artefact,
                 std::optional<uint32_t> device,
                 const std::function<void(Page*)>& found = nullptr) const KVS_REQUIRES(mu_);
  // In memory of any device and in the tier together. Takes nothing, and the lock by pieces.
  HeldPrefix FindAnywhere(const PrefixQuestion& q, const std::optional<RawFree>& artefact)
      KVS_EXCLUDES(mu_);
  // One in memory that a session of `device` may map; null if there is none. Its age stays.
  const Artefact* FindArtefact(const PageKey& key, uint32_t device) const KVS_REQUIRES(mu_);
  // An artefact in memory that a session of `device` may map; else nothing.
  std::optional<RawFree> RawFreeBy(const Plan& plan, const PageKey& artefact, uint32_t device) const
      KVS_REQUIRES(mu_);
  // Reads of pools_ only what is constant.
  bool OpensWithoutRaw(const Plan& plan) const KVS_NO_THREAD_SAFETY_ANALYSIS;

  // open_sequence.cc
  // What a sequence of that geometry gets for a plan; PLAN_* of one that cannot serve it.
  Result<Plan> PlanFor(const Plan& named, const Geometry& geometry) const;
  // Adds the pages to `to`, with a reference each.
  void RefAll(Session* session, std::span<Page* const> from, std::vector<Page*>* to)
      KVS_REQUIRES(mu_);
  // Fills `s`, which is nobody's yet, with the hit and new pages up to `cover` tokens.
  Status TakeForOpen(Session* session, Sequence* s, Hit hit, uint64_t cover) KVS_REQUIRES(mu_);
  Result<OpenedSequence> Enter(Session* session, std::unique_ptr<Sequence> s) KVS_REQUIRES(mu_);
  void CloseLocked(Session* session, Sequence* s) KVS_REQUIRES(mu_);
  // The codec's part of a new sequence; none for raw. May read files: not under the lock.
  Result<std::optional<CodecState>> NewCodec(const Plan& plan, const Geometry& geometry,
                                             Files files);
  // When an artefact of this prompt may be had at its end, nothing is due before.
  void AwaitArtefact(Sequence* s, const Opening& o) KVS_REQUIRES(mu_);
  // Gives a sequence that is held without its raw pages the artefact at once.
  void OpenOnArtefact(Sequence* s, const Opening& o) KVS_REQUIRES(mu_);
  // Nobody's sequence of that model and plan, for a session.
  Result<Opening> BeginOpening(uint64_t session, uint64_t model, std::string_view plan)
      KVS_EXCLUDES(mu_);
  // What needs no lock: checks, the codec, the keys.
  Result<Opening> PrepareOpen(uint64_t session, uint64_t model, std::string_view plan,
                              std::span<const int32_t> tokens, const OpenOptions& options,
                              Files files) KVS_EXCLUDES(mu_);
  // Cuts a hit to the pages that o.limits allow and that only the hit can tell.
  void LimitHit(const Opening& o, const Sequence& shape, Hit* hit) const KVS_REQUIRES(mu_);
  // Also ends its load, whatever comes of it. Called once.
  Result<OpenedSequence> FinishOpen(Opening* o) KVS_EXCLUDES(mu_);
  Result<OpenedSequence> FinishOpenLocked(Session* session, Opening* o) KVS_REQUIRES(mu_);

  // replicate.cc
  // Copies what of the prefix lies on another device to the session's, beside its pages; what could
  // not be copied is a miss. Takes as long as the copies.
  void Replicate(Opening* o) KVS_EXCLUDES(mu_);
  std::function<void(std::function<void()>)> SlowOpens() const KVS_EXCLUDES(mu_);
  // Replicate, then FinishOpen, in the replication queue's thread if there is something to copy.
  void ReplicateAndFinish(const std::shared_ptr<Opening>& o, const OpenDone& done)
      KVS_EXCLUDES(mu_);
  // The held prefix, if some of it does not lie on the session's device; else nothing.
  std::vector<Page*> PrefixElsewhere(const Opening& o) KVS_REQUIRES(mu_);
  bool IsOn(uint32_t device, const Page& page) const KVS_REQUIRES(mu_);
  std::vector<Replica> PlanReplicas(Opening* o) KVS_REQUIRES(mu_);
  bool CopyReplicas(std::span<const Replica> replicas) KVS_NO_THREAD_SAFETY_ANALYSIS;
  void EnterReplica(const Replica& replica, uint32_t device) KVS_REQUIRES(mu_);

  // page_tier.cc
  // Enters a sealed page or index block under its key; if somebody was faster, theirs is found and
  // ours stays private, unless theirs lies on another device: then it is a replica.
  void EnterPrefix(const Sequence& s, Page* page) KVS_REQUIRES(mu_);
  // Offers one that is there to the tier below, but for raw pages that the sequence is about to
  // give back.
  void OfferPage(const Sequence& s, const Page& page) KVS_REQUIRES(mu_);
  // Pages that it has all the same: behind its artefact, or when it closes.
  void OfferKept(const Sequence& s) KVS_REQUIRES(mu_);
  // Holds what memory has of the prefix until EndLoad; the keys that are to be read of it.
  std::vector<PageKey> BeginLoad(Opening* o) KVS_EXCLUDES(mu_);
  // A page for each value that can be used, else null; `*more`: a prefix without gaps goes on.
  std::vector<Page*> TakeForLoad(Opening* o, size_t first, std::span<const LoadedValue> values,
                                 bool* more) KVS_REQUIRES(mu_);
  bool TakeLoaded(Opening* o, size_t first, std::span<const LoadedValue> values,
                  std::span<const PageKey> keys) KVS_EXCLUDES(mu_);
  void GoOnOpening(Result<Opening> prepared, const OpenDone& done) KVS_EXCLUDES(mu_);
  // Reads what is missing of the prefix, then calls `then`.
  void LoadPrefix(const std::shared_ptr<Opening>& o, PageTier* tier, std::function<void()> then)
      KVS_EXCLUDES(mu_);
  // A reference of the load's own, until EndLoad.
  void HoldForLoad(Opening* o, Page* page) KVS_REQUIRES(mu_);
  // `session`: whose long request this is; null: nobody's.
  void EndLoad(Session* session, Opening* o) KVS_REQUIRES(mu_);
  // Keeps a page readable without the lock; ended by UnpinJob.
  RecompressJob PinForCopy(Page* page) KVS_REQUIRES(mu_);
  // REQUIRES: the page is held. They read of pools_ only what is constant.
  Status ReadPage(const Page& page, std::byte* to) KVS_NO_THREAD_SAFETY_ANALYSIS {
    return pools_.Read(page, to);
  }
  Status WritePage(const Page& page, const std::byte* from) KVS_NO_THREAD_SAFETY_ANALYSIS {
    return pools_.Write(page, from);
  }

  // artefact_tier.cc
  // Reads the prompt's artefact into artefacts_ if only the tier has it, then calls `then`.
  void LoadArtefact(const std::shared_ptr<Opening>& o, PageTier* tier, std::function<void()> then)
      KVS_EXCLUDES(mu_);
  // Asked before its record is read, and behind it.
  bool WantsArtefact(const Opening& o, const PageTier& tier) KVS_EXCLUDES(mu_);
  void LoadParts(const std::shared_ptr<Opening>& o, PageTier* tier, std::function<void()> then)
      KVS_EXCLUDES(mu_);
  bool TakePart(Opening* o, size_t i, const LoadedValue& value) KVS_EXCLUDES(mu_);
  void EnterLoadedArtefact(Opening* o) KVS_EXCLUDES(mu_);

  // lookup.cc
  Result<PageOwner> OwnerOf(uint64_t session, uint64_t model) KVS_EXCLUDES(mu_);
  Result<PageOwner> OwnerOf(std::string_view tenant, uint64_t model) KVS_EXCLUDES(mu_);
  // Raw pages; what an open of a plan would find.
  PrefixHit LookupOf(const PageOwner& owner, std::vector<PageKey> keys) KVS_EXCLUDES(mu_);
  Result<PrefixHit> LookupOf(const PageOwner& owner, std::span<const int32_t> tokens,
                             const LookupPlan& open, Files files) KVS_EXCLUDES(mu_);
  Result<PrefixHit> LookupAsOpened(const PageOwner& owner, std::span<const int32_t> tokens,
                                   const LookupPlan& open, Files files) KVS_EXCLUDES(mu_);
  // What an open would find of the artefact of a prompt of `tokens`, in memory or in the tier.
  std::optional<RawFree> RawFreeAnywhere(const Plan& plan, const PageKey& artefact, uint32_t device,
                                         size_t tokens) KVS_EXCLUDES(mu_);
  // Looks for one tenant's pages: a piece of a survey.
  void FindInMemory(const std::string& tenant, std::span<const PageKey> keys,
                    std::span<HeldIn> places) const KVS_EXCLUDES(mu_);

  // keys.cc
  Status EnterKey(uint64_t session, uint64_t sequence, std::string_view key) KVS_EXCLUDES(mu_);
  // The live sequence of the session's user that has it. KEY_UNKNOWN.
  Result<uint64_t> FindKey(uint64_t session, std::string_view key) KVS_REQUIRES(mu_);

  // leases.cc
  // A look-up on its way to its lease.
  struct Leasing {
    uint64_t session = 0, model = 0;
    std::vector<int32_t> tokens;
    LookupPlan open;
    LookupDone done;
  };
  // Renews the lease of what was found, or opens it.
  void HoldHit(const std::shared_ptr<const Leasing>& leasing, const PrefixHit& hit)
      KVS_EXCLUDES(mu_);
  void AnswerLeased(const Leasing& leasing, const LeasedPrompt& prompt,
                    const Result<OpenedSequence>& opened) KVS_EXCLUDES(mu_);
  Status CheckLease(uint64_t session, uint64_t model, const LookupPlan& open) KVS_EXCLUDES(mu_);
  // Whether the prompt's lease, if there is one, holds all of `hit`; it then ends anew.
  bool RenewLease(uint64_t session, const LeasedPrompt& prompt, const PrefixHit& hit,
                  std::chrono::milliseconds lease) KVS_EXCLUDES(mu_);
  void EnterLease(uint64_t session, const LeasedPrompt& prompt, uint64_t sequence,
                  std::chrono::milliseconds lease) KVS_EXCLUDES(mu_);

  // pins.cc
  uint64_t PinLimit() const KVS_REQUIRES(mu_);
  uint64_t PinnedBytes() const KVS_REQUIRES(mu_);
  void EnterPin(PrefixPin pin) KVS_REQUIRES(mu_);
  PrefixPin TakePin(std::map<uint64_t, PrefixPin>::iterator at) KVS_REQUIRES(mu_);
  Result<PinInfo> AddPin(PrefixPin pin, std::chrono::microseconds ttl) KVS_EXCLUDES(mu_);
  PinInfo InfoOf(const PrefixPin& pin) KVS_EXCLUDES(mu_);

  // step_events.cc
  static bool Writable(const Sequence& s, const Page* page);
  std::vector<Copy> PlanPrivateCopies(Session* session, const Sequence& s, uint32_t writable,
                                      uint32_t index_writable, bool* stale_flags) const
      KVS_REQUIRES(mu_);
  Status ExtendLocked(Session* session, Sequence* s, uint64_t tokens) KVS_REQUIRES(mu_);
  void KeepSeries(const Sequence& s, Page* page, Series series) KVS_REQUIRES(mu_);
  void KeepSeriesWithPages(Session* session, Sequence* s, uint32_t first, uint32_t end)
      KVS_REQUIRES(mu_);
  void SealLocked(Session* session, Sequence* s, std::span<const PageKey> keys,
                  std::span<const int32_t> tokens, uint32_t indexed_tokens) KVS_REQUIRES(mu_);
  static Status CheckPromised(const Sequence& s, std::span<const int32_t> tokens);
  Status CheckCommit(Session* session, const Sequence& s, uint32_t first,
                     std::span<const int32_t> tokens, uint32_t indexed_tokens) const
      KVS_REQUIRES(mu_);
  Status CommitLocked(Session* session, Sequence* s, std::span<const PageKey> keys,
                      std::span<const int32_t> tokens, uint32_t indexed_tokens) KVS_REQUIRES(mu_);

  // The piece [done, done + some) of a report of n positions from `first`.
  Status ReportSome(uint64_t session, uint64_t sequence, uint32_t first, uint32_t n, uint32_t done,
                    uint32_t some, const Series& piece) KVS_EXCLUDES(mu_);

  // Commits rows that the session wrote, or the daemon (an imported sequence's).
  Status CommitRows(uint64_t session, uint64_t sequence, uint32_t first,
                    std::span<const int32_t> tokens, uint32_t indexed_tokens, bool by_daemon)
      KVS_EXCLUDES(mu_);

  // import.cc
  // SEQUENCE_IMPORTED unless its session fills it.
  static Status CheckOwned(const Sequence& s);
  void PinImport(const Sequence& s, ImportJob* job) KVS_REQUIRES(mu_);
  Status StageImport(ImportJob* job) KVS_EXCLUDES(mu_);

  // publish.cc
  Result<shm::SequenceTable*> ReserveTable(Session* session, const Sequence& s,
                                           uint32_t page_capacity) KVS_REQUIRES(mu_);
  Result<shm::SequenceTable*> ReserveTable(Session* session, const Sequence& s,
                                           uint32_t page_capacity, size_t extents)
      KVS_REQUIRES(mu_);
  // Never fails: what can fail was reserved.
  void Publish(Session* session, Sequence* s, shm::SequenceTable* table) KVS_REQUIRES(mu_);
  void PublishInPlace(Session* session, Sequence* s) KVS_REQUIRES(mu_);
  static shm::PageEntry EntryOf(const Sequence& s, const Page* page);
  static void WriteExtents(const Sequence& s, shm::ExtentEntry* entries);
  void RefreshView(Session* session, Sequence* s, size_t first_page) KVS_REQUIRES(mu_);
  void GrantArena(Session* session, const Arena& arena) KVS_REQUIRES(mu_);
  void PassArena(const Session& session, const Arena& arena) KVS_REQUIRES(mu_);
  // Writes the pages from `first` on, each where its position says; grants their arenas.
  void WriteEntries(Session* session, const Sequence& s, std::span<Page* const> pages, size_t first,
                    shm::PageEntry* entries) KVS_REQUIRES(mu_);
  void Unpublish(Session* session, Sequence* s) KVS_REQUIRES(mu_);

  // allocate.cc
  Taker TakerOf(const Session& session, const Sequence& s) const;
  Status Allocate(const Taker& taker, uint64_t bytes, uint32_t n, std::vector<Page*>* out)
      KVS_REQUIRES(mu_);
  uint32_t AllocateIn(const Taker& taker, PoolId pool, uint64_t bytes, uint32_t n,
                      std::vector<Page*>* out) KVS_REQUIRES(mu_);
  // Where memory for a session's sequence comes from: of its device, else of host; or of host only.
  static std::vector<PoolId> PoolsOf(const Session& session, Tier tier);
  // "device", with the device's name where there are several; "host".
  std::string NameOfPool(PoolId pool) const KVS_REQUIRES(mu_);
  // Constant: without the lock.
  std::span<const PoolId> PoolIds() const KVS_NO_THREAD_SAFETY_ANALYSIS { return pools_.ids(); }
  // Takes up to `n`; what became of them all is for Allocate or TakeByPieces to settle.
  uint32_t AllocateSome(const Taker& taker, uint64_t bytes, uint32_t n, std::vector<Page*>* out)
      KVS_REQUIRES(mu_);
  // POOL_EXHAUSTED.
  Status Exhausted(const Taker& taker, const Shortage& shortage) const KVS_REQUIRES(mu_);
  // Adds `n` pages with a reference each, or none; how many could be had.
  uint32_t TakeByPieces(Session* session, Taker taker, uint64_t bytes, uint32_t n,
                        std::vector<Page*>* out) KVS_REQUIRES(mu_);
  // Gives back those behind the first `left`, which no table has named.
  void Untake(Session* session, std::vector<Page*>* pages, size_t left) KVS_REQUIRES(mu_);
  // Gives `s` the pages and index blocks that it is short of for `tokens`, a reference each; all or
  // nothing. No table names them yet.
  Status TakeUpTo(Session* session, Sequence* s, uint64_t tokens) KVS_REQUIRES(mu_);
  bool EvictFor(const Taker& taker, PoolId pool, uint64_t bytes) KVS_REQUIRES(mu_);
  void EvictPage(Page* page) KVS_REQUIRES(mu_);
  // Drops the oldest artefact of any tenant, or of one, that nobody uses and that has bytes in
  // `pool`.
  bool EvictArtefact(PoolId pool, const Tenant* tenant = nullptr) KVS_REQUIRES(mu_);
  // The limit that a pool's arenas count against.
  static Limit LimitOf(PoolId pool) {
    return pool.tier() == Tier::kHost ? Limit::kHostBytes : Limit::kDeviceBytes;
  }
  // capacity.cc
  using BytesByArena = std::unordered_map<uint32_t, uint64_t>;
  // Pages of `bytes` that the taker could have of a pool now: free ones, or also those that it
  // would evict, with `unused` bytes of artefacts' extents among them.
  uint64_t CountRoom(const Taker& taker, PoolId pool, uint64_t bytes,
                     const BytesByArena* unused) const KVS_REQUIRES(mu_);
  uint64_t PagesOfArenas(PoolId pool, uint64_t left, uint64_t bytes) const KVS_REQUIRES(mu_);
  static bool MayTakeFrom(const Taker& taker, const Arena& arena);
  Slots CountSlots(const Taker& taker, const TokenFit& fit, PoolId pool,
                   const BytesByArena* unused) const KVS_REQUIRES(mu_);
  // Adds what it has after eviction to `all`.
  PoolCapacity CapacityOf(const Taker& taker, const TokenFit& fit, PoolId pool,
                          const BytesByArena& unused, Slots* all) const KVS_REQUIRES(mu_);
  // Tokens that fit a sequence that is opened or grown, without evicting.
  uint64_t TokensThatFit(const Taker& taker, const Sequence& s) const KVS_REQUIRES(mu_);
  // The tokens of an open where `tokens` fit: it keeps pages ahead of its prompt.
  uint32_t OpenTokens(uint64_t tokens) const;

  // truncate.cc
  static Status CheckTruncate(const Sequence& s, uint32_t tokens);
  // Keeps and publishes what TruncateKey asks of the owner; nothing: no more.
  void Wish(Session* session, Sequence* s, std::optional<uint32_t> tokens) KVS_REQUIRES(mu_);
  // Whether so few tokens are what was asked for, which is over then.
  bool EndWish(Session* session, Sequence* s, uint32_t tokens) KVS_REQUIRES(mu_);
  void EndWorkBeyond(Sequence* s) KVS_REQUIRES(mu_);
  void CutLocked(Sequence* s, uint32_t tokens, std::span<const int32_t> tail) KVS_REQUIRES(mu_);
  std::vector<Page*> TakeBeyond(Sequence* s, uint32_t tokens) KVS_REQUIRES(mu_);

  bool TakeWorkPlace(Sequence* s) KVS_REQUIRES(mu_);
  // What its tenant may still have of the pool.
  uint64_t RoomOf(const Taker& taker, PoolId pool) const KVS_REQUIRES(mu_);
  // Whether its tenant may not have so much more of the pool.
  bool AtLimit(const Taker& taker, PoolId pool, uint64_t bytes) const KVS_REQUIRES(mu_);
  static bool MayAdopt(const Taker& taker, const Arena& arena);
  // Makes an arena for `bytes` within what its tenant may have.
  bool AddArena(const Taker& taker, PoolId pool, uint64_t bytes) KVS_REQUIRES(mu_);
  // Nobody uses it, and no pin keeps it.
  bool MayGo(const Artefact& artefact) const KVS_REQUIRES(mu_);
  void DropArtefact(Artefact artefact) KVS_REQUIRES(mu_);
  bool Fenced(const Arena& arena) const KVS_REQUIRES(mu_);
  void Release(Page* page) KVS_REQUIRES(mu_);
  void ReleaseAll(std::vector<Page*>* pages) KVS_REQUIRES(mu_);
  void ReleaseAll(Session* session, std::vector<Page*>* pages) KVS_REQUIRES(mu_);
  void ReleaseExtents(std::vector<Extent>* extents) KVS_REQUIRES(mu_);
  void Retire(Page* page) KVS_REQUIRES(mu_);
  void RefPage(Page* page) KVS_REQUIRES(mu_);
  void FreePages(std::span<Page* const> pages) KVS_REQUIRES(mu_);
  // What was retired before is free once the readers of now have left. Only after the tables that
  // named it are unpublished.
  void Advance(Tenant* tenant) KVS_REQUIRES(mu_);
  void ReclaimLocked() KVS_REQUIRES(mu_);
  // With nothing else in hand: others are let in.
  void ReclaimByPieces(Tenant* tenant) KVS_REQUIRES(mu_);
  // Reclaims at most `most` pages; returns whether there may be more.
  bool ReclaimLocked(Tenant* tenant, size_t most = ~size_t{0}) KVS_REQUIRES(mu_);

  // move.cc
  // A page for each to be the copy, and both pinned; or none. `fits`: Shortage's.
  Status TakeCopies(Session* session, const Taker& taker, std::vector<Copy>* copies,
                    std::optional<uint64_t> fits = {}) KVS_REQUIRES(mu_);
  void Pin(std::span<const Copy> copies) KVS_REQUIRES(mu_);
  void DropPin(Page* page) KVS_REQUIRES(mu_);
  // Takes the lock and discards them if it fails. Reads of pools_ only what is constant.
  Status CopyBytes(const std::vector<Copy>& copies,
                   const Geometry& geometry) KVS_NO_THREAD_SAFETY_ANALYSIS;
  void Unpin(const std::vector<Copy>& copies) KVS_REQUIRES(mu_);
  void Discard(const std::vector<Copy>& copies) KVS_REQUIRES(mu_);
  // Makes the copy what the source was, to the prefix index too.
  void TakeOver(Page* source, Page* copy) KVS_REQUIRES(mu_);
  // Puts the copies in the place of their sources where those still are, unpins and publishes.
  Status SwapIn(Session* session, Sequence* s, std::vector<Copy>* copies) KVS_REQUIRES(mu_);

  bool StepsRun() const KVS_EXCLUDES(mu_);

  // device_failure.cc
  // Makes the prefix index and the artefacts forget what lies on a device that is lost, once.
  void DropLost() KVS_REQUIRES(mu_);
  void DropLost(PoolId pool) KVS_REQUIRES(mu_);
  // DEVICE_FAILED if any of the sequence lies there.
  Status CheckHeld(const Sequence& s) const KVS_REQUIRES(mu_);

  Result<MoveResult> Move(uint64_t sequence, Tier to, MoveLimit limit) KVS_EXCLUDES(mu_);

  // watermarks.cc
  uint64_t HighMark(PoolId pool) const KVS_REQUIRES(mu_);
  uint64_t LowMark(PoolId pool) const KVS_REQUIRES(mu_);
  std::unordered_map<const Arena*, uint64_t> RetiredBytes(PoolId pool) const KVS_REQUIRES(mu_);
  // Used ones that are not retired.
  uint64_t HeldBytes(PoolId pool) const KVS_REQUIRES(mu_);
  // Wakes whoever moves if a pool is above its mark or its capacity; after what may make it so.
  void NoteFill() KVS_REQUIRES(mu_);
  // Called after a sequence opened.
  void NotePromotion(Session* session, const Sequence& s) KVS_REQUIRES(mu_);
  std::optional<uint64_t> PromoteSome(uint64_t bytes) KVS_EXCLUDES(mu_);
  // Nothing: the pool needs no relief, or nothing of it can go.
  std::optional<uint64_t> RelieveSome(PoolId pool, uint64_t bytes) KVS_EXCLUDES(mu_);
  // Has host make room down to its low mark for what `device` has cached; false: it does, or that
  // would be of no use.
  bool MakeHostRelieve(PoolId device) KVS_REQUIRES(mu_);
  // Copies to be for the coldest pages of `device`, as many as host has free room for.
  std::vector<Demotion> PlanDemotion(PoolId device, uint64_t bytes) KVS_REQUIRES(mu_);
  bool CopyDemotions(std::span<const Demotion> demotions) KVS_NO_THREAD_SAFETY_ANALYSIS;
  uint64_t FinishDemotion(std::span<const Demotion> demotions, bool copied) KVS_REQUIRES(mu_);
  // Both return the bytes of what went; replicas only among the coldest.
  uint64_t EvictReplicas(PoolId pool, uint64_t bytes) KVS_REQUIRES(mu_);
  uint64_t EvictColdest(PoolId pool, uint64_t bytes) KVS_REQUIRES(mu_);
  // Gives arenas beyond the capacity back, as far as nobody uses them.
  void ShrinkToCapacity(PoolId pool) KVS_REQUIRES(mu_);
  // Evicts all of an arena that nobody uses; whether there was one.
  bool EmptyAnArena(PoolId pool) KVS_REQUIRES(mu_);

  // selected_pages.cc
  // Gives the pages of a sequence that closes their chances, by what its steps selected.
  static void NoteSelected(const Session& session, const Sequence& s);

  // recompress.cc
  static RecompressInput InputOf(const Sequence& s);
  bool Due(Sequence* s) KVS_REQUIRES(mu_);
  // Offers the sequence if something of it is due; after everything that may make it so.
  void NoteDue(Sequence* s) KVS_REQUIRES(mu_);
  void OfferIfDue(Sequence* s) KVS_REQUIRES(mu_);  // nothing is new: not after a cancel
  void NoteFailed(Sequence* s, const Status& why) KVS_REQUIRES(mu_);
  void NoteDone(Sequence* s) KVS_REQUIRES(mu_);
  WorkInfo WorkOf(const Sequence& s) const KVS_REQUIRES(mu_);
  // Hands the sequence's waiters to TellSettled, when there is an answer for them.
  void AnswerWaiters(Sequence* s) KVS_REQUIRES(mu_);
  void AnswerWaiters(Sequence* s, const Status& status) KVS_REQUIRES(mu_);
  void PinJob(const Sequence& s, RecompressJob* job) KVS_REQUIRES(mu_);
  void UnpinJob(const RecompressJob& job) KVS_REQUIRES(mu_) { UnpinJob(job.id); }
  // With nothing else in hand, unless the job has few pages: others are let in.
  void UnpinJob(uint64_t job) KVS_REQUIRES(mu_);
  Status TakeExtents(const Sequence& s, const RecompressOutput& output, std::vector<Page*>* fresh)
      KVS_REQUIRES(mu_);
  void DropFresh(std::vector<Page*>* fresh) KVS_REQUIRES(mu_);
  // Outside of the lock: the pages are pinned.
  Result<std::byte*> StagePage(const Page& page, RecompressJob* job) KVS_NO_THREAD_SAFETY_ANALYSIS;
  // `packed_by`: the device in whose memory drafts lie that the host cannot read.
  Status CopyDrafts(const RecompressOutput& output, const std::vector<Page*>& fresh,
                    PoolId packed_by) KVS_NO_THREAD_SAFETY_ANALYSIS;
  // Describes an extent's bytes that lie in `page`; null where the host can read them there.
  std::shared_ptr<const std::vector<std::byte>> DescriptionFor(
      const Page& page, std::span<const std::byte> extent) const KVS_NO_THREAD_SAFETY_ANALYSIS;
  Status SwapExtents(Sequence* s, const RecompressOutput& output, std::vector<Page*>* fresh,
                     std::unique_ptr<Recompressor> next, RecompressResult* result)
      KVS_REQUIRES(mu_);
  void KeepArtefact(const Sequence& s) KVS_REQUIRES(mu_);
  // Takes references of its own to the extents.
  void EnterArtefact(Artefact artefact) KVS_REQUIRES(mu_);
  void AttachArtefact(Session* session, Sequence* s) KVS_REQUIRES(mu_);

  // raw_pages.cc
  static std::vector<size_t> ReleasedPages(const Sequence& s);
  void DropRaw(Page* page) KVS_REQUIRES(mu_);
  // Publishes no table; returns the bytes.
  uint64_t GiveBack(Sequence* s, std::span<const size_t> positions) KVS_REQUIRES(mu_);
  // Released pages that are not on `host`: there they go, or back, as the plan says.
  Status PlaceRaw(uint64_t sequence, uint64_t* bytes) KVS_EXCLUDES(mu_);
  bool GivesBack(const Sequence& s, size_t n) const KVS_REQUIRES(mu_);
  Status PlanPlacing(Sequence* s, std::vector<Copy>* copies, uint64_t* bytes) KVS_REQUIRES(mu_);
  bool UseHostCopies(Sequence* s, std::vector<size_t>* positions) KVS_REQUIRES(mu_);

  // recall.cc
  void AskRecall(Session* session, const Sequence& s, shm::RecallRequest request) KVS_REQUIRES(mu_);
  // Hands the end to TellSettled: the listener is not called under the lock.
  void StopRecall(Sequence* s, const Status& why) KVS_REQUIRES(mu_);

  // blocks.cc
  BlockInfo InfoOfBlock(const Page& page) const KVS_REQUIRES(mu_);
  // The keys of all artefacts, now.
  std::vector<PageKey> ArtefactKeys() const KVS_EXCLUDES(mu_);
  // Parts of one, in order; empty: it is gone.
  std::vector<ArtefactRecord::Part> PartsOf(const PageKey& artefact, BlockInfo* record) const
      KVS_EXCLUDES(mu_);
  // Keeps the extent of that part readable; null if there is none any more.
  Page* PinPart(const PageKey& part, RecompressJob* pin) KVS_EXCLUDES(mu_);

  // inspect.cc
  std::set<const Page*> UnusedExtents() const KVS_REQUIRES(mu_);
  // The sequence's numbers without those that CountPages adds.
  SequenceInfo InfoOf(const Sequence& s) const KVS_REQUIRES(mu_);
  // These let others in: what was found before may be gone.
  void CountPages(SequenceInfo* info) const KVS_REQUIRES(mu_);
  uint64_t BytesOf(std::span<const uint64_t> sequences) const KVS_REQUIRES(mu_);
  // Calls visit(sequence, page, whether it is an index block) for the sequence's pages and blocks,
  // as long as it is there.
  template <typename Visit>
  void VisitPages(uint64_t sequence, Visit&& visit) const KVS_REQUIRES(mu_);

  // Constant.
  const StoreOptions options_;
  const std::shared_ptr<UserLimits> user_limits_;
  const NamedPlans named_plans_;
  const uint64_t daemon_epoch_;
  // Have locks of their own.
  ParameterFiles parameters_;
  ArtefactLedger ledger_;
  CopyRate promote_rate_;

  mutable YieldingMutex mu_;
  mutable std::condition_variable session_free_;  // a long request has ended
  PagePools pools_ KVS_GUARDED_BY(mu_);
  PrefixIndex prefix_ KVS_GUARDED_BY(mu_);
  std::map<std::string, std::unique_ptr<Tenant>> tenants_ KVS_GUARDED_BY(mu_);
  std::vector<Tenant*> tenants_by_id_ KVS_GUARDED_BY(mu_);
  std::map<uint64_t, std::shared_ptr<Model>> models_ KVS_GUARDED_BY(mu_);
  std::map<uint64_t, std::unique_ptr<Session>> sessions_ KVS_GUARDED_BY(mu_);
  std::unordered_map<uint64_t, Sequence*> sequences_ KVS_GUARDED_BY(mu_);
  std::vector<Page*> pins_ KVS_GUARDED_BY(mu_);  // references of copies under way, both sides
  std::map<uint64_t, PrefixPin> pins_by_id_ KVS_GUARDED_BY(mu_);
  // References of prefixes that are being loaded from the tier below, by load.
  std::unordered_map<uint64_t, std::vector<Page*>> loads_ KVS_GUARDED_BY(mu_);
  PageTier* tier_ KVS_GUARDED_BY(mu_) = nullptr;
  // Pages that recompressions and the tier below read, by job; those of them that everybody else
  // has passed already.
  std::unordered_map<uint64_t, std::vector<Page*>> jobs_ KVS_GUARDED_BY(mu_);
  std::set<Page*> parked_ KVS_GUARDED_BY(mu_);
  Artefacts artefacts_ KVS_GUARDED_BY(mu_);
  RecompressSink* sink_ KVS_GUARDED_BY(mu_) = nullptr;
  bool due_unoffered_ KVS_GUARDED_BY(mu_) = false;                  // OfferDue has something to do
  std::array<bool, kMaxPools> lost_dropped_ KVS_GUARDED_BY(mu_){};  // DropLost has been there
  std::vector<std::pair<SettleDone, Status>> settled_ KVS_GUARDED_BY(mu_);
  std::function<void()> wake_mover_ KVS_GUARDED_BY(mu_);
  std::function<void(std::function<void()>)> post_replication_ KVS_GUARDED_BY(mu_);
  std::deque<uint64_t> promotions_ KVS_GUARDED_BY(mu_);  // sequences that opened on pages of host
  std::array<bool, kMaxPools> relieving_ KVS_GUARDED_BY(mu_){};  // between the marks
  uint64_t next_job_ KVS_GUARDED_BY(mu_) = 1;
  uint64_t next_pin_ KVS_GUARDED_BY(mu_) = 1;
  uint64_t next_load_ KVS_GUARDED_BY(mu_) = 1;
  uint32_t next_recall_ KVS_GUARDED_BY(mu_) = 1;
  StoreCounters counters_ KVS_GUARDED_BY(mu_);
  const std::unique_ptr<WorkRequests> requests_;  // its state is guarded by mu_
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_STORE_IMPL_H_
