// SPDX-License-Identifier: Apache-2.0
// Tensors in messages: TensorRef to Rows, checked against what a step expects.
//
// Rows point into the message, which outlives the call that handles it. Pure functions; any thread.
// Errors: TENSOR_* (INVALID_ARGUMENT), named as in the C ABI.
#ifndef KVSTRATA_SERVER_RPC_STEPS_TENSOR_REF_H_
#define KVSTRATA_SERVER_RPC_STEPS_TENSOR_REF_H_

#include <string_view>

#include "base/status.h"
#include "kernels/step/step.h"
#include "kvstrata/v1/compute.pb.h"

namespace kvstrata {

struct TensorShape {
  int32_t tokens = 0, heads = 0, head_dim = 0;
};

// `field` names the tensor in errors.
Result<Rows> ReadTensor(std::string_view field, const v1::TensorRef& tensor,
                        const TensorShape& want);

// Makes `out` a tensor of that shape, with room inside; the rows to write are in it.
MutableRows MakeTensor(const TensorShape& shape, DType dtype, v1::TensorRef* out);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_RPC_STEPS_TENSOR_REF_H_
