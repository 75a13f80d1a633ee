// SPDX-License-Identifier: Apache-2.0
// What every function of the C ABI does around its body: finds the session, keeps the thread's last
// error, lets nothing be thrown into C. For abi*.cc alone.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "client/include/kvstrata/block_attention.h"
#include "client/include/kvstrata/block_planes.h"
#include "client/include/kvstrata/kvstrata.h"
#include "client/session.h"
#include "kernels/blocks/block_attention.h"
#include "kernels/blocks/block_planes.h"
#include "kernels/pages/dtype.h"
#include "kernels/pages/page_view.h"
#include "kernels/plan/plan.h"

namespace kvstrata::client {

// Handles of the C ABI: sessions, steps and attentions over blocks that are alive in this process.
//
// A handle is a number that is never used again, dressed as a pointer, so that one used after its
// end, twice, or of the other kind is an error and never a crash. Look-ups share ownership: what a
// call uses stays until the call returns, whatever other threads end meanwhile.
// Threads: any; one short lock, held across fork() so that a child can be refused.
struct SessionHandle {
  std::unique_ptr<Session> session;
  pid_t owner = 0;  // the process that attached
};

struct StepHandle {
  std::shared_ptr<SessionHandle> session;  // before `step`: it must go after it
  std::unique_ptr<SessionStep> step;
  std::vector<bool> appended;  // per layer
  bool selected = false;       // some layer was
  std::atomic_flag busy;       // a call is inside
};

// Attends over an engine's own blocks: a BlockAttention, or BlockPlanes.
template <typename Attention>
struct BlocksHandle {
  std::unique_ptr<Attention> attention;
  pid_t owner = 0;
};

kvs_session* AddSession(std::unique_ptr<Session> session);
kvs_step* AddStep(std::shared_ptr<SessionHandle> session, std::unique_ptr<SessionStep> step);
kvs_block_attention* AddBlocks(std::unique_ptr<BlockAttention> attention);
kvs_block_planes* AddBlocks(std::unique_ptr<BlockPlanes> attention);

// HANDLE_INVALID (INVALID_ARGUMENT); FORKED (FAILED_PRECONDITION) in another process than its own.
Result<std::shared_ptr<SessionHandle>> FindSession(const kvs_session* handle);
Result<std::shared_ptr<StepHandle>> FindStep(const kvs_step* handle);
Result<std::shared_ptr<BlocksHandle<BlockAttention>>> FindBlocks(const kvs_block_attention* handle);
Result<std::shared_ptr<BlocksHandle<BlockPlanes>>> FindBlocks(const kvs_block_planes* handle);

// Removes a handle; null when there is none such. A session's steps are removed with it and go
// first. In a forked child what was removed is abandoned, not ended.
std::shared_ptr<StepHandle> TakeStep(const kvs_step* handle);
void EndSession(const kvs_session* handle);
void EndBlocks(const kvs_block_attention* handle);
void EndBlocks(const kvs_block_planes* handle);

// Checks of what callers of the C ABI pass. Every failure is INVALID_ARGUMENT (or UNIMPLEMENTED for
// what the design knows and this build has not), with a message that names the field, its value and
// what is allowed. Stateless; any thread.

// ARGUMENT_NULL
Status NotNull(std::string_view field, const void* pointer);
// ARGUMENT_NULL when there are elements but no array; ARGUMENT_RANGE when n > limit.
Status ArrayOf(std::string_view field, const void* data, uint64_t n, uint64_t limit);
// ARGUMENT_RANGE unless low <= value <= high.
Status InRange(std::string_view field, int64_t value, int64_t low, int64_t high);

// STRUCT_SIZE when a caller's struct is smaller than ours, or larger with bytes set that this
// library does not know.
Status StructSize(std::string_view name, const void* caller, size_t size, size_t ours);
// A struct that has grown, as ours: what a caller of an older header does not know is zero.
// `first`: its size in the first header. STRUCT_SIZE as above.
template <typename T>
Result<T> Grown(std::string_view name, const T* caller, size_t first) {
  const size_t known = std::min(std::max(caller->size, first), sizeof(T));
  KVS_RETURN_IF_ERROR(StructSize(name, caller, caller->size, known));
  T ours{};
  std::memcpy(&ours, caller, known);
  return ours;
}

// options may be null; socket may be null.
Result<AttachOptions> ReadAttachOptions(const char* socket, const kvs_attach_options* options);
Result<ModelSpec> ReadModelDesc(const kvs_model_desc& caller);

// For attention over an engine's own blocks. ARGUMENT_NULL, and as ParsePlan.
Result<Plan> ReadBlockPlan(const char* text);
// BLOCK_SHAPE: neither KVS_F16 nor KVS_BF16.
Result<DType> ReadBlockDType(int32_t dtype);
// A kvs_block_shape's or a kvs_planes_shape's. BLOCK_SHAPE, and as Validate.
template <typename Shape>
Result<Geometry> ReadBlockGeometry(const Shape& from) {
  Geometry g;
  g.layers = from.layers;
  g.query_heads = from.query_heads;
  g.kv_heads = from.kv_heads;
  g.head_dim = from.head_dim;
  g.scale = static_cast<float>(from.scale);
  KVS_ASSIGN_OR_RETURN(g.dtype, ReadBlockDType(from.dtype));
  KVS_RETURN_IF_ERROR(Validate(g));
  return g;
}

// What a step expects of a tensor.
struct TensorShape {
  int32_t tokens = 0, heads = 0, head_dim = 0;
};
// TENSOR_*; strides of 0 become those of a contiguous tensor.
Result<Rows> ReadTensor(std::string_view field, const kvs_tensor* tensor, const TensorShape& want);
// STRUCT_SIZE, ARGUMENT_NULL, TENSOR_KIND, TENSOR_HANDLE (no descriptor). All else is the daemon's
// to check.
Result<LentTensor> ReadBlockTensor(std::string_view field, const kvs_block_tensor* tensor);

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

// `field`: what the function calls its handle.
template <typename Handle, typename F>
int WithBlocks(std::string_view field, Handle* handle, F body) {
  return Guarded([&]() -> Status {
    KVS_RETURN_IF_ERROR(NotNull(field, handle));
    KVS_ASSIGN_OR_RETURN(const auto found, FindBlocks(handle));
    return body(*found->attention);
  });
}

}  // namespace kvstrata::client
