// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/finite_rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <optional>
#include <string>
#include <type_traits>

#include "kernels/ops/append/append.h"
#include "kernels/pages/element.h"

namespace kvstrata {
namespace {

std::string TextOf(float x) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", static_cast<double>(x));
  return text;
}

// The largest finite number of the type.
float LargestOf(DType dtype) {
  return WithElement(dtype, []<typename T>() {
    using Bits = std::remove_const_t<decltype(kNotFinite<T>)>;
    return ToFloat(std::bit_cast<T>(static_cast<Bits>(kNotFinite<T> - 1)));
  });
}

// token: of the batch.
Status NotFinite(const AppendedElement& at, int32_t token, DType dtype) {
  const std::string place = std::string(at.is_value ? "v[" : "k[") + std::to_string(token) + "][" +
                            std::to_string(at.head) + "][" + std::to_string(at.channel) + "] is " +
                            TextOf(at.source);
  const std::string why = std::isfinite(at.source)
                              ? ", and the pages' dtype " + std::string(NameOf(dtype)) +
                                    " holds at most " + TextOf(LargestOf(dtype)) +
                                    "; register the model with a wider one"
                              : "; keys and values must be finite: look at the model's numerics";
  return InvalidArgument("TENSOR_NOT_FINITE", place + why + "; nothing of the step is kept");
}

}  // namespace

Status CheckFinite(const StepBatch& batch, const Rows& k, const Rows& v) {
  AppendWork w;
  w.layout = PageLayout::Of(batch.member(0).state->geometry());
  w.tokens = batch.tokens();
  w.k = {k.data, k.token_stride, k.head_stride, k.dtype};
  w.v = {v.data, v.token_stride, v.head_stride, v.dtype};
  const std::optional<AppendedElement> at = FirstNotFinite(w);
  return at ? NotFinite(*at, at->token, w.layout.dtype) : OkStatus();
}

Status CheckWritten(const StepBatch& batch, int layer) {
  AppendWork w;
  w.layout = PageLayout::Of(batch.member(0).state->geometry());
  const PageLayout& layout = w.layout;
  int32_t token = 0;
  for (int i = 0; i < batch.members(); ++i) {
    const StepMember& m = batch.member(i);
    // Runs of positions that lie in one page.
    const int32_t end = m.view.tokens + m.new_tokens;
    for (int32_t t = m.view.tokens, n = 0; t < end; t += n) {
      const int32_t slot = t % layout.page_tokens;
      n = std::min(layout.page_tokens - slot, end - t);
      const std::byte* const keys =
          m.view.pages[t / layout.page_tokens] + layout.KeyOffset(layer, 0, slot);
      w.tokens = n;
      w.k = {keys, layout.slot_stride, layout.head_stride, layout.dtype};
      w.v = {keys + layout.value_offset, layout.slot_stride, layout.head_stride, layout.dtype};
      const std::optional<AppendedElement> at = FirstNotFinite(w);
      if (at) return NotFinite(*at, token + at->token, layout.dtype);
      token += n;
    }
  }
  return OkStatus();
}

}  // namespace kvstrata
