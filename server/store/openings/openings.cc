// SPDX-License-Identifier: Apache-2.0
#include "server/store/openings/openings.h"

#include <functional>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "server/store/books/books.h"
#include "server/store/books/plans.h"
#include "server/store/lookups/prefix_loads.h"
#include "server/store/lookups/replication.h"
#include "server/store/openings/opening_ends.h"

namespace kvstrata {

Result<Opening> Openings::PrepareOpen(uint64_t session_id, uint64_t model_id,
                                      std::string_view plan_text, std::span<const int32_t> tokens,
                                      const OpenOptions& options, Files files) {
  KVS_RETURN_IF_ERROR(CheckLength("tokens", tokens.size()));
  KVS_RETURN_IF_ERROR(CheckLength("reserve_tokens", options.reserve_tokens));
  const Clock::time_point begun = Clock::now();
  KVS_ASSIGN_OR_RETURN(
      Opening o, BeginOpening(&books_.mu, &catalog_, plans_, session_id, model_id, plan_text));
  Sequence* const s = o.sequence.get();
  KVS_ASSIGN_OR_RETURN(s->codec, plans_.NewCodec(s->plan, s->model->desc.geometry, files));
  o.tokens = tokens.size();
  o.reserve_tokens = options.reserve_tokens;
  // Hashing costs as much as all the rest: never under the lock.
  PromptKeys keys;  // none: what has no keys finds nothing, and asks no tier
  if (options.private_pages) {
    MakePrivate(s);
  } else {
    keys = KeysOf(s->chain, s->page_tokens(), s->plan,
                  s->codec ? &s->codec->parameters_digest : nullptr, tokens);
  }
  const size_t usable = keys.pages.size();
  if (usable != 0) {
    const std::span<const int32_t> behind = tokens.subspan(usable * s->page_tokens());
    o.prompt = {model_id, "", keys.pages.back(), {behind.begin(), behind.end()}};
  }
  o.limits = options.hold;
  o.keys = std::move(keys.pages);
  o.keys.resize(o.limits.Pages(usable, s->page_tokens()));
  // An artefact is of a prompt that is held whole.
  if (o.keys.size() == usable) o.artefact = keys.artefact;
  const std::span<const int32_t> rest = tokens.subspan(o.keys.size() * s->page_tokens());
  o.rest.assign(rest.begin(), rest.end());
  o.times.begun = begun;
  o.times.prepared = Clock::now();
  return o;
}

Result<OpenedSequence> Openings::OpenSequence(uint64_t session, uint64_t model,
                                              std::string_view plan,
                                              std::span<const int32_t> tokens,
                                              const OpenOptions& options) {
  KVS_ASSIGN_OR_RETURN(Opening o, PrepareOpen(session, model, plan, tokens, options, Files::kRead));
  replication_.Replicate(&o);
  return ends_.Finish(&o);
}

void Openings::OpenSequence(uint64_t session, uint64_t model, std::string_view plan,
                            std::span<const int32_t> tokens, OpenDone done,
                            const OpenOptions& options) {
  const std::function<void(std::function<void()>)> post = replication_.SlowOpens();
  Result<Opening> prepared =
      PrepareOpen(session, model, plan, tokens, options, post ? Files::kKnown : Files::kRead);
  if (prepared.ok() || prepared.status().reason() != kFileUnread) {
    return GoOnOpening(std::move(prepared), done);
  }
  post([this, session, model, plan = std::string(plan),
        tokens = std::vector<int32_t>(tokens.begin(), tokens.end()), options, done] {
    const auto prepare = [&]() -> Result<Opening> {
      try {
        return PrepareOpen(session, model, plan, tokens, options, Files::kRead);
      } catch (const std::bad_alloc&) {
        return ResourceExhausted("MEMORY", "the daemon has no memory to open this sequence");
      }
    };
    GoOnOpening(prepare(), done);
  });
}

void Openings::GoOnOpening(Result<Opening> prepared, const OpenDone& done) {
  if (!prepared.ok()) return done(prepared.status());
  PageTier* tier = nullptr;
  {
    StoreLock lock(books_.mu);
    tier = prefixes_.tier();
  }
  const auto o = std::make_shared<Opening>(std::move(*prepared));
  if (tier == nullptr) return ReplicateAndFinish(o, done);
  o->asked = Clock::now();
  loads_.SearchRemote(o, tier, [this, o, tier, done] {
    try {
      LoadAndFinish(o, tier, done);
    } catch (const std::bad_alloc&) {
      done(ResourceExhausted("MEMORY", "the daemon has no memory to open this sequence"));
    }
  });
}

void Openings::ReplicateAndFinish(const std::shared_ptr<Opening>& o, const OpenDone& done) {
  replication_.GoOn(*o, [this, o, done] {
    Result<OpenedSequence> opened =
        ResourceExhausted("MEMORY", "the daemon has no memory to open this sequence");
    try {
      replication_.Replicate(o.get());
      opened = ends_.Finish(o.get());
    } catch (const std::bad_alloc&) {
      // In threads that have no request to answer; he who asked hears it here.
    }
    done(opened);
  });
}

void Openings::LoadAndFinish(const std::shared_ptr<Opening>& o, PageTier* tier,
                             const OpenDone& done) {
  loads_.LoadArtefact(o, tier, [this, o, tier, done] {
    try {
      loads_.LoadPrefix(o, tier, [this, o, done] {
        ReplicateAndFinish(o, [this, o, done](const Result<OpenedSequence>& opened) {
          done(opened);
          if (o->awaits_rest) LoadRest(o);
        });
      });
    } catch (const std::bad_alloc&) {
      done(ResourceExhausted("MEMORY", "the daemon has no memory to open this sequence"));
    }
  });
}

}  // namespace kvstrata
