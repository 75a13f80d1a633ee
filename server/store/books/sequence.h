// SPDX-License-Identifier: Apache-2.0
// What the store keeps of a session, a tenant, a model and a sequence. Plain records: the functions
// over them are the owners' (store.h), their guard is the store's lock.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "server/store/books/segments.h"
#include "server/store/options/session_types.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/user_limits.h"
#include "server/store/pages/artefacts.h"
#include "server/store/pages/epochs.h"
#include "server/store/pages/page.h"
#include "server/store/pages/page_tier.h"
#include "server/store/reports/recall_audit.h"
#include "server/store/requests/prefix_hit.h"
#include "server/store/requests/recompress_job.h"

namespace kvstrata {

using Clock = std::chrono::steady_clock;

inline uint64_t MicrosSince(Clock::time_point since) {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - since).count());
}

inline constexpr uint32_t kMaxSequenceTokens = uint32_t{1} << 24;

// SEQUENCE_TOO_LONG, with the name of the field that asks for so many.
inline Status CheckLength(std::string_view field, uint64_t tokens) {
  if (tokens <= kMaxSequenceTokens) return OkStatus();
  return InvalidArgument("SEQUENCE_TOO_LONG", std::string(field) + ": " + std::to_string(tokens) +
                                                  "; allowed: at most " +
                                                  std::to_string(kMaxSequenceTokens));
}

// Whole pages that a prompt may be held for: at most n - 1 tokens, so that a step has a query; n -
// n_obs where the plan watches the prompt's last queries, which only computing gives (ADR 5).
inline size_t UsablePages(size_t tokens, uint32_t page_tokens, const Plan* plan) {
  const bool watches = plan != nullptr && plan->selector == SelectorKind::kBucket;
  const size_t computed =
      watches ? std::max<size_t>(1, static_cast<size_t>(plan->bucket.n_obs)) : 1;
  return tokens <= computed ? 0 : (tokens - computed) / page_tokens;
}

struct Model {
  // Nobody else registers it: its pages go with its session, and never to the tier below.
  bool OfOneSession() const { return desc.digest.starts_with("session:"); }

  uint64_t id = 0;
  uint32_t tenant = 0;  // whose it is: no other tenant hears whether it is registered
  ModelDesc desc;
  double prefill_rate = 0;  // tokens a second that engines computed of the last prompts; 0: none
  uint32_t sessions = 0;    // that registered it
  UserPlace place;          // while there is one
  uint64_t pages = 0;       // records of pages and index blocks
};

// Sessions of one tenant may see each other's sealed pages; nobody else's.
struct Tenant {
  // Ids that clients see count by tenant: nobody learns how many others have made.
  static constexpr uint64_t kIds = 1'000'000'000'000;
  uint64_t NextId(uint64_t* made) const { return id * kIds + ++*made; }

  uint32_t id = 0;
  std::string name;
  std::string name_in_keys;  // ClusterTenants
  UserLimits::User* user = nullptr;
  uint64_t sessions_made = 0, models_made = 0, sequences_made = 0;
  std::map<std::string, uint64_t, std::less<>> keys;  // that engines gave to live sequences
  uint64_t epoch = 1;                                 // published to all sessions of the tenant
  RetireQueue<Page*> retired;
  std::vector<Session*> sessions;  // fenced ones too: their processes may still read
};

// What a sequence has besides whose plan stores rows by a codec.
struct CodecState {
  enum class Work : uint8_t { kIdle, kDue, kQueued, kRunning };

  // Never changed: a worker runs a clone, which takes its place when its extents are published. So
  // a fork shares it, and a run that fails leaves nothing behind.
  std::shared_ptr<const Recompressor> recompressor;
  std::string parameters_digest;

  Work work = Work::kIdle;
  UserPlace queued;  // while it is
  std::shared_ptr<std::atomic<bool>> cancelled = std::make_shared<std::atomic<bool>>(false);
  Clock::time_point since;     // it is due, or runs
  Clock::time_point retry_at;  // after a failure
  uint32_t runs = 0, failures = 0;
  Status failed;                // why the last run failed
  bool paused = false;          // cancelled: it is not offered before something new comes
  uint64_t released_bytes = 0;  // raw ones, so far
  std::vector<SettleDone> waiters;

  std::vector<Run> released;  // positions whose raw rows the plan needs no more
  bool place_raw = false;     // pages among them wait for a place on `host`

  PageKey prompt_key{};         // key of the artefact; set when the prompt is complete
  bool prompt_settled = false;  // all of the prompt is recompressed: what follows may be shown
  uint32_t awaited_prompt = 0;  // an artefact of a prompt this long may be had: nothing is due
  // The sequence is held without its raw pages: it opened on the artefact of a prompt this long (0:
  // it did not), which ends with these tokens behind the held ones.
  uint32_t opened_on = 0;
  std::vector<int32_t> promised;
  // The hold of the load that brings the second of every two extents, which it opened without
  // (rest_loads.cc); 0: none. Nothing is due before. Not OK: why they do not come.
  uint64_t rest_load = 0;
  Status rest_lost;

  // The current table as addresses, for RecompressInput.
  std::vector<std::byte*> pages;
  std::vector<ExtentView> extents;

  // What of it is the child's after a fork.
  void OnFork() {
    work = Work::kIdle;
    cancelled = std::make_shared<std::atomic<bool>>(false);
    runs = failures = 0;
    failed = OkStatus();
    paused = false;
    released_bytes = 0;
    waiters.clear();
  }
};

// What a sequence counts as among its user's.
struct SequencePlace {
  UserPlace taken;
  uint64_t lease = 0;  // the lease's sequence that gave it (leases.h); 0: none did
};

struct Sequence {
  uint64_t id = 0;
  uint64_t session = 0;
  std::string key;  // in Tenant::keys; "": none
  SequencePlace place;
  std::shared_ptr<Model> model;
  KeyChain chain;  // private: MakePrivate
  Plan plan;
  IndexLayout index;
  uint32_t slot = 0;

  uint32_t tokens = 0;          // committed
  uint32_t indexed_tokens = 0;  // index rows are valid up to here
  uint32_t held_tokens = 0;     // found at open
  uint32_t prompt_tokens = 0;
  uint64_t steps = 0;  // that committed tokens
  bool prefill_done = false;
  bool imported = false;        // imports.h
  std::vector<PageKey> groups;  // each group's first page (page_tier.h), as far as it is full
  PageKey last_key{};           // key of the last whole page; zeros: none
  PageKey prompt_last_key{};    // the same of the prompt, when that is complete
  std::vector<int32_t> tail;    // token ids behind the last whole page
  // What another session wants left of them (TruncateKey), until the owner has cut it.
  std::optional<uint32_t> truncate_to;
  Series series;

  std::vector<Page*> pages, index_blocks;  // one reference each; null: a page that was released
  std::vector<Extent> extents;             // one reference each, ordered by their tokens
  std::optional<CodecState> codec;         // none: codec raw
  shm::SequenceTable* table = nullptr;     // the current version
  uint64_t version = 0;
  AccessCounters access_counters;
  std::shared_ptr<RecallAudit> recall;  // null: none is running
  uint32_t sampled = 0;                 // the sample that was asked for in the background; 0: none
  Clock::time_point opened;

  uint32_t page_tokens() const { return static_cast<uint32_t>(model->desc.geometry.page_tokens); }
  uint32_t PagesFor(uint64_t n) const {
    return static_cast<uint32_t>((n + page_tokens() - 1) / page_tokens());
  }
  uint32_t BlocksFor(uint64_t n) const {
    if (index.kind == IndexLayout::Kind::kNone) return 0;
    const uint64_t block = static_cast<uint64_t>(index.block_tokens);
    return static_cast<uint32_t>((n + block - 1) / block);
  }
  // Where a remote tier keeps a full page, and the index block that ends with it.
  PageKey PlaceOf(size_t page) const {
    const size_t group = page / kGroupPages;
    return group < groups.size() ? groups[group] : PageKey{};
  }
  // Blocks end where pages end, so that a page's key names a block too.
  bool SharesIndex() const {
    return index.kind != IndexLayout::Kind::kNone &&
           index.block_tokens % model->desc.geometry.page_tokens == 0;
  }
  // Raw rows below this are not wanted by the plan's index any more.
  uint32_t summarised_tokens() const {
    return index.kind == IndexLayout::Kind::kNone ? tokens : std::min(tokens, indexed_tokens);
  }
  // Whether it found all of a prompt of `n` tokens that can be found.
  bool HoldsAll(uint64_t n) const {
    return held_tokens >= UsablePages(n, page_tokens(), &plan) * page_tokens();
  }
  uint64_t capacity_tokens() const { return uint64_t{page_tokens()} * pages.size(); }
};

// From here on nobody finds anything of the sequence: no page or index block is entered into the
// prefix index, no artefact is kept or taken, nothing is offered to a tier, and all its keys are
// its own. What was entered before stays as it is. A fork of it is private too, and it stays so
// when it is truncated. A second call changes nothing.
void MakePrivate(Sequence* s);
// SEQUENCE_IMPORTED unless its session fills it.
Status CheckOwned(const Sequence& s);
// Whether whoever fills the sequence may write the page: it is nobody else's, and not full.
bool Writable(const Sequence& s, const Page* page);
// Whole pages among the released positions that the sequence still has, in order. REQUIRES: a
// codec.
std::vector<size_t> ReleasedPages(const Sequence& s);

// A sequence that the daemon opened to hold what a look-up answered.
struct Lease {
  uint64_t sequence = 0;
  Clock::time_point ends;
};

struct Session {
  uint64_t id = 0;
  Tenant* tenant = nullptr;
  PeerIdentity peer;
  Transport transport = Transport::kLinked;
  uint32_t device = 0;  // whose memory its sequences get; it maps no other device's
  std::string client_name;
  ArenaSink sink;
  bool sink_writes = true;  // else it gets no descriptor that writes
  std::unique_ptr<SessionMemory> memory;
  UserPlace place;
  bool fenced = false;   // kEof: only its readers and its arenas are left, until it died
  EndedSession ended;    // the first of its ends, which closed everything
  uint32_t writers = 0;  // processes that PassArenas gave its own arenas writable
  // books.h: whose request has it to itself; none: nobody's. What was worked on since others
  // were let in, and a sequence of it that is in no map meanwhile.
  std::thread::id long_request;
  size_t piece_pages = 0;
  const Sequence* outside = nullptr;
  Clock::time_point opened, last_step{};  // a step that committed tokens; {}: none did

  using KnownModel = std::pair<std::shared_ptr<Model>, KeyChain>;
  std::unordered_map<uint64_t, KnownModel> models;
  std::map<uint64_t, std::unique_ptr<Sequence>> sequences;
  std::map<LeasedPrompt, Lease> leases;        // leases of its look-ups
  std::unordered_set<uint64_t> imports;        // models whose sequences are imported
  std::unordered_map<uint32_t, bool> granted;  // arena -> writable
  RetireQueue<shm::SequenceTable*> retired_tables;
  RetireQueue<AccessCounters> retired_counters;
};

}  // namespace kvstrata
