// SPDX-License-Identifier: Apache-2.0
// BuildPages: the pages of a build's pieces (builds.h): what a worker reads is kept and copied
// where the host cannot read it, what it made is copied into pages and entered.
//
// Ownership: a job's hold keeps what it reads, until LetGo or Copy; fresh pages are their caller's
// until Discard. Thread-safety: methods that say so are called under the store's lock, all others
// without it, from any thread. Cost: of copies.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "base/status.h"
#include "server/store/codecs/codec_extents.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/pages/prefix_key.h"
#include "server/store/requests/build_job.h"

namespace kvstrata {

// A page, or an index block, that is copied to the host for a piece.
struct StagedPage {
  const Page* page = nullptr;
  std::byte** address = nullptr;  // null: to `to`
  std::byte* to = nullptr;
};

class BuildPages {
 public:
  BuildPages(Books& books, SessionCatalog& catalog, Tables& tables, PageReferences& references,
             PageHolds& holds, PrefixCatalog& prefixes, CodecExtents& extents)
      : books_(books),
        catalog_(catalog),
        tables_(tables),
        references_(references),
        holds_(holds),
        prefixes_(prefixes),
        extents_(extents) {}

  // What a piece reads and where its blocks go: index blocks of `rows`, or all of the sequence.
  void FillBlocks(const Sequence& s, Run rows, BuildJob* job, std::vector<StagedPage>* staged)
      KVS_REQUIRES(store_lock);
  void FillExtents(const Sequence& s, BuildJob* job, std::vector<StagedPage>* staged)
      KVS_REQUIRES(store_lock);
  // Copies what the host cannot read, or is added to, to the host. RESOURCE_EXHAUSTED
  // MEMORY_EXHAUSTED; COPY_FAILED.
  Status Stage(const std::vector<StagedPage>& staged, BuildJob* job) const KVS_EXCLUDES(store_lock);
  void LetGo(const BuildJob& job) KVS_REQUIRES(store_lock);

  // Lets the job go, and takes pages with the drafts' bytes if `check`, called under the lock,
  // agrees. POOL_EXHAUSTED, COPY_FAILED.
  Status Copy(const BuildJob& job, const RecompressOutput& output, FreshPages* fresh,
              const std::function<Status()>& check) KVS_EXCLUDES(store_lock);
  // Enters blocks under their keys; those of the sequence's `own` plan into its table. TABLES_FULL.
  Status EnterBlocks(Sequence* s, bool own, const BuildJob& job, const FreshPages& fresh)
      KVS_REQUIRES(store_lock);
  // Enters the extents as the artefact of that key, and offers it.
  void EnterExtents(const Sequence& s, const PageKey& key, const BuildJob& job,
                    const RecompressOutput& output, const FreshPages& fresh, BuiltExtents* made)
      KVS_REQUIRES(store_lock);
  // Gives up those that nobody was given.
  void Discard(FreshPages* fresh) KVS_REQUIRES(store_lock);

 private:
  void ReadLocked(Page* page, BuildJob* job, std::byte** address, std::vector<StagedPage>* staged)
      KVS_REQUIRES(store_lock);

  Books& books_;
  SessionCatalog& catalog_;
  Tables& tables_;
  PageReferences& references_;
  PageHolds& holds_;
  PrefixCatalog& prefixes_;
  CodecExtents& extents_;
};

}  // namespace kvstrata
