// SPDX-License-Identifier: Apache-2.0
// What every function of the C ABI does around its body: finds the session, keeps the thread's last
// error, lets nothing be thrown into C. For abi*.cc alone.
#ifndef KVSTRATA_CLIENT_ABI_ABI_CALL_H_
#define KVSTRATA_CLIENT_ABI_ABI_CALL_H_

#include <exception>
#include <memory>
#include <new>
#include <string>
#include <string_view>

#include "client/abi/abi_arguments.h"
#include "client/abi/abi_handles.h"

namespace kvstrata::client {

inline constexpr uint64_t kMaxTokens = uint64_t{1} << 30;  // tokens of one call
inline constexpr uint64_t kMaxLayers = 512;  // layers of a call about an engine's own blocks

// The kvs_code; an error becomes the calling thread's last.
int CodeOf(const Status& status);

inline constexpr size_t kMaxPlanBytes = size_t{1} << 16;

// "" for null; ARGUMENT_RANGE: more than `limit` bytes. `field`: "bytes of plan".
Result<std::string_view> ReadView(std::string_view field, const char* text, size_t limit);

// Copies a text that a caller asked for, cut at `capacity` and always terminated.
Status CopyOut(std::string_view field, const std::string& from, char* text, size_t capacity);

template <typename F>
int Guarded(F body) {
  try {
    return CodeOf(body());
  } catch (const std::bad_alloc&) {
    return CodeOf(ResourceExhausted("OUT_OF_MEMORY", "this process has no memory left"));
  } catch (const std::exception& e) {
    return CodeOf(Internal("EXCEPTION", e.what()));
  }
}

template <typename F>
int WithSession(kvs_session* handle, F body) {
  return Guarded([&]() -> Status {
    KVS_RETURN_IF_ERROR(NotNull("session", handle));
    KVS_ASSIGN_OR_RETURN(const std::shared_ptr<SessionHandle> found, FindSession(handle));
    return body(*found->session);
  });
}

}  // namespace kvstrata::client

#endif  // KVSTRATA_CLIENT_ABI_ABI_CALL_H_
