// SPDX-License-Identifier: Apache-2.0
// Checks of what callers of the C ABI pass. Every failure is INVALID_ARGUMENT (or UNIMPLEMENTED for
// what the design knows and this build has not), with a message that names the field, its value and
// what is allowed. Stateless; any thread.
#ifndef KVSTRATA_CLIENT_ABI_ABI_ARGUMENTS_H_
#define KVSTRATA_CLIENT_ABI_ABI_ARGUMENTS_H_

#include <algorithm>
#include <cstring>
#include <string_view>

#include "base/status.h"
#include "client/include/kvstrata/kvstrata.h"
#include "client/session.h"
#include "kernels/pages/dtype.h"
#include "kernels/pages/page_view.h"
#include "kernels/plan/plan.h"

namespace kvstrata::client {

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

}  // namespace kvstrata::client

#endif  // KVSTRATA_CLIENT_ABI_ABI_ARGUMENTS_H_
