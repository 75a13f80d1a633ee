// SPDX-License-Identifier: Apache-2.0
#include "kernels/blocks/block_shape.h"

#include <string>
#include <string_view>

#include "kernels/plan/plan.h"

namespace kvstrata {
namespace {

struct Field {
  std::string_view name;
  int64_t value;
};

Status Wrong(const Field& field, std::string_view wanted) {
  return InvalidArgument("BLOCK_SHAPE", std::string(field.name) + " = " +
                                            std::to_string(field.value) + ", and has to be " +
                                            std::string(wanted));
}

}  // namespace

Status CheckBlockShape(const BlockShape& s) {
  Geometry geometry = s.geometry;
  geometry.page_tokens = 16;
  KVS_RETURN_IF_ERROR(Validate(geometry));
  if (s.block_tokens != 16 && s.block_tokens != 32 && s.block_tokens != 64 &&
      s.block_tokens != 128) {
    return Wrong({"block_tokens", s.block_tokens}, "16, 32, 64 or 128");
  }
  for (const Field& stride :
       {Field{"block_stride", s.block_stride}, Field{"head_stride", s.head_stride},
        Field{"slot_stride", s.slot_stride}, Field{"value_offset", s.value_offset},
        Field{"index_offset", s.index_offset}}) {
    if (stride.value <= 0 || stride.value % 16 != 0) {
      return Wrong(stride, "a multiple of 16 bytes above 0");
    }
  }
  constexpr int32_t kMostRows = 65535;
  if (s.max_rows < 1 || s.max_rows > kMostRows) {
    return Wrong({"max_rows", s.max_rows}, "1 to 65535");
  }
  if (s.max_decodes < 1 || s.max_decodes > s.max_rows) {
    return Wrong({"max_decodes", s.max_decodes}, "1 to max_rows");
  }
  if (s.max_tokens < 1 || s.max_tokens > kMostMinTokens) {
    return Wrong({"max_tokens", s.max_tokens}, "1 to 2^29");
  }
  return OkStatus();
}

}  // namespace kvstrata
