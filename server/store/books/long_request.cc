// SPDX-License-Identifier: Apache-2.0
#include "server/store/books/long_request.h"

#include <thread>

#include "base/check.h"
#include "server/store/books/session_catalog.h"

namespace kvstrata {

LongRequest::LongRequest(SessionCatalog* catalog, Session* session)
    : catalog_(catalog), session_(session) {
  KVS_CHECK(session->long_request == std::thread::id());
  session->long_request = std::this_thread::get_id();
  session->piece_pages = 0;
}

void LongRequest::End() {
  if (session_ == nullptr) return;
  session_->long_request = {};
  session_ = nullptr;
  catalog_->NoteFree();
}

// Who is not in a long request of the session has something unfinished in hand.
void SessionCatalog::LetOthersIn(Session* session, size_t pages) const {
  if (session == nullptr || session->long_request != std::this_thread::get_id()) return;
  session->piece_pages += pages;
  if (session->piece_pages < kPiecePages) return;
  session->piece_pages = 0;
  mu_.Yield();
}

void SessionCatalog::AwaitFree() const {
  std::unique_lock<std::mutex> lock(mu_.native(), std::adopt_lock);
  session_free_.wait(lock);
  lock.release();  // the caller's still
}

bool SessionCatalog::IsFree(const Session& session) {
  return session.long_request == std::thread::id() ||
         session.long_request == std::this_thread::get_id();
}

}  // namespace kvstrata
