// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/steps/tensor_ref.h"

#include <string>

namespace kvstrata {

Result<Rows> ReadTensor(std::string_view field, const v1::TensorRef& tensor,
                        const TensorShape& want) {
  const std::string name(field);
  const auto mismatch = [&](const char* reason, const char* what, int64_t got, int64_t expected) {
    return InvalidArgument(reason, name + "." + what + " " + std::to_string(got) + "; expected " +
                                       std::to_string(expected));
  };
  if (!IsDType(tensor.dtype())) {
    return InvalidArgument("TENSOR_DTYPE", name + ".dtype " + std::to_string(tensor.dtype()) +
                                               "; allowed: " + AllDTypes("DTYPE"));
  }
  if (tensor.heads() != want.heads) {
    return mismatch("TENSOR_HEADS", "heads", tensor.heads(), want.heads);
  }
  if (tensor.head_dim() != want.head_dim) {
    return mismatch("TENSOR_HEAD_DIM", "head_dim", tensor.head_dim(), want.head_dim);
  }
  if (tensor.tokens() != want.tokens) {
    return mismatch("TENSOR_TOKENS", "tokens", tensor.tokens(), want.tokens);
  }
  const auto dtype = static_cast<DType>(tensor.dtype());
  const int64_t row = want.head_dim * SizeOf(dtype);
  const int64_t bytes = int64_t{want.tokens} * want.heads * row;
  if (static_cast<int64_t>(tensor.inline_().size()) != bytes) {
    return mismatch("TENSOR_DATA", "inline has bytes",
                    static_cast<int64_t>(tensor.inline_().size()), bytes);
  }
  return Rows{reinterpret_cast<const std::byte*>(tensor.inline_().data()), want.heads * row, row,
              dtype};
}

MutableRows MakeTensor(const TensorShape& shape, DType dtype, v1::TensorRef* out) {
  out->set_dtype(static_cast<v1::DType>(dtype));
  out->set_tokens(shape.tokens);
  out->set_heads(shape.heads);
  out->set_head_dim(shape.head_dim);
  const int64_t row = shape.head_dim * SizeOf(dtype);
  std::string* bytes = out->mutable_inline_();
  bytes->resize(static_cast<size_t>(shape.tokens) * shape.heads * row);
  return {reinterpret_cast<std::byte*>(bytes->data()), shape.heads * row, row, dtype};
}

}  // namespace kvstrata
