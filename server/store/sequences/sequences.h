// SPDX-License-Identifier: Apache-2.0
// Sequences: forks, closes and truncations of live ones, and the keys that engines give them, so
// that another process of the user ends or cuts what one opened.
//
// Thread-safety: methods that say so are called under the store's lock, all others from any thread.
// A fork and a close work in pieces (books.h). Errors: SESSION_UNKNOWN, SEQUENCE_UNKNOWN
// (also a sequence of another session), DEVICE_FAILED, TABLES_FULL, and those that a method names.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/requests/opened_sequence.h"

namespace kvstrata {

class Sequences {
 public:
  Sequences(Books& books, const StoreOptions& options, Answers& answers, SessionCatalog& catalog,
            Devices& devices, Tables& tables, PageReferences& references, Watermarks& watermarks,
            PrefixCatalog& prefixes, SequenceEntry& entry, Recompression& recompression,
            RawPages& raw_pages, RecallAudits& recalls, Builds& builds)
      : books_(books),
        options_(options),
        answers_(answers),
        catalog_(catalog),
        devices_(devices),
        tables_(tables),
        references_(references),
        watermarks_(watermarks),
        prefixes_(prefixes),
        entry_(entry),
        recompression_(recompression),
        raw_pages_(raw_pages),
        recalls_(recalls),
        builds_(builds) {}

  Result<OpenedSequence> ForkSequence(uint64_t session, uint64_t sequence) KVS_EXCLUDES(store_lock);
  Status CloseSequence(uint64_t session, uint64_t sequence) KVS_EXCLUDES(store_lock);
  // Takes back the tokens from position `tokens` on: their pages go, unless others hold or find
  // them. What workers have of those tokens ends. `tail`: the ids of the tokens that are left
  // behind the last whole page. TRUNCATE_TOKENS, TRUNCATE_TAIL; TRUNCATE_PROMPT inside a prompt
  // that is complete, TRUNCATE_PACKED where a codec alone holds the rows; SEQUENCE_IMPORTED.
  Status Truncate(uint64_t session, uint64_t sequence, uint32_t tokens,
                  std::span<const int32_t> tail) KVS_EXCLUDES(store_lock);

  // Whoever fills the sequence found that its rows are not what their tokens and the model make:
  // MakePrivate (sequence.h), before those rows are committed, so that nobody is held for them.
  Status MakePrivate(uint64_t session, uint64_t sequence) KVS_EXCLUDES(store_lock);

  // What an open answered, now with that key ("": as it was); closed again where that fails.
  // INVALID_ARGUMENT KEY_TEXT: up to 63 bytes, no control characters; ALREADY_EXISTS KEY_IN_USE.
  Result<OpenedSequence> GiveKey(uint64_t session, const Result<OpenedSequence>& opened,
                                 std::string_view key) KVS_EXCLUDES(store_lock);
  // Closes the live sequence of that key, of any session of the session's user. Whoever steps with
  // it meanwhile keeps what the step reads. NOT_FOUND KEY_UNKNOWN.
  Status CloseKey(uint64_t session, std::string_view key) KVS_EXCLUDES(store_lock);
  // Has the owner of the live sequence of that key truncate it, whichever session of the session's
  // user it is: what it keeps of the sequence is its own to cut. The wish is published in the
  // sequence's slot, and over when the owner has truncated to so few tokens, or was refused it. Of
  // several that wait the least counts. What is about to go is not packed meanwhile. KEY_UNKNOWN,
  // and as Truncate, of what was committed until now; a linked owner may have what it has pages
  // for, whose commits are on their way: then no TRUNCATE_TOKENS, and nothing is cut if it has not.
  Status TruncateKey(uint64_t session, std::string_view key, uint32_t tokens)
      KVS_EXCLUDES(store_lock);

  // A session ends, in a long request of its own: closes its sequences. The bytes that nobody else
  // had.
  uint64_t CloseAllOf(Session* session) KVS_REQUIRES(store_lock);

 private:
  // A part of a long request.
  void CloseLocked(Session* session, Sequence* s) KVS_REQUIRES(store_lock);
  // Gives the pages of a sequence that closes their credits, by what its steps selected.
  static void NoteSelected(const Session& session, const Sequence& s);
  // keys.cc
  Status EnterKey(uint64_t session, uint64_t sequence, std::string_view key)
      KVS_EXCLUDES(store_lock);
  // The live sequence of the session's user that has it. KEY_UNKNOWN.
  Result<uint64_t> FindKey(uint64_t session, std::string_view key) KVS_REQUIRES(store_lock);
  // truncate.cc
  Status TruncateKeyNow(uint64_t session, std::string_view key, uint32_t tokens)
      KVS_EXCLUDES(store_lock);
  Status TruncateNow(uint64_t session, uint64_t sequence, uint32_t tokens,
                     std::span<const int32_t> tail) KVS_EXCLUDES(store_lock);
  static Status CheckTruncate(const Sequence& s, uint32_t tokens);
  // Keeps and publishes what TruncateKey asks of the owner; nothing: no more.
  void Wish(Session* session, Sequence* s, std::optional<uint32_t> tokens) KVS_REQUIRES(store_lock);
  // Whether so few tokens are what was asked for, which is over then.
  bool EndWish(Session* session, Sequence* s, uint32_t tokens) KVS_REQUIRES(store_lock);
  void EndWorkBeyond(Sequence* s) KVS_REQUIRES(store_lock);
  // Those from number `kept` on.
  void DropExtents(Sequence* s, size_t kept) KVS_REQUIRES(store_lock);
  void CutLocked(Sequence* s, uint32_t tokens, std::span<const int32_t> tail)
      KVS_REQUIRES(store_lock);
  std::vector<Page*> TakeBeyond(Sequence* s, uint32_t tokens) KVS_REQUIRES(store_lock);

  Books& books_;
  const StoreOptions& options_;
  Answers& answers_;
  SessionCatalog& catalog_;
  Devices& devices_;
  Tables& tables_;
  PageReferences& references_;
  Watermarks& watermarks_;
  PrefixCatalog& prefixes_;
  SequenceEntry& entry_;
  Recompression& recompression_;
  RawPages& raw_pages_;
  RecallAudits& recalls_;
  Builds& builds_;
};

}  // namespace kvstrata
