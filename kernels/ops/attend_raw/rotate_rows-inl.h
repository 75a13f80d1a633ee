// SPDX-License-Identifier: Apache-2.0
// Rotary embedding on the fly: rows of keys and queries, rotated to their places as they are read.
// Included once per Highway target.
//
// Rotated rows are fp32 in "half order": the first channels of all pairs, then the second ones,
// then the channels that are not rotated. Both layouts of pairs meet there, and a dot product of
// two rotated rows is that of the rows in their own order.
// Cost a row: two complex products a pair (the rotation, then the row), once for all queries of the
// KV head; one product a pair more where the row's position / 64 is not that of the row before and
// at least 64.
#if defined(KVSTRATA_KERNELS_OPS_ATTEND_RAW_ROTATE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVSTRATA_KERNELS_OPS_ATTEND_RAW_ROTATE_ROWS_INL_H_
#undef KVSTRATA_KERNELS_OPS_ATTEND_RAW_ROTATE_ROWS_INL_H_
#else
#define KVSTRATA_KERNELS_OPS_ATTEND_RAW_ROTATE_ROWS_INL_H_
#endif

#include "kernels/ops/attend_raw/row_cursor.h"
#include "kernels/ops/simd_rows-inl.h"
#include "kernels/pages/rotary.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {

struct Rotation {
  VF cos, sin;
};

// The product of two rotations' pairs [i, i + N); each [pairs] cosines, then [pairs] sines.
HWY_INLINE Rotation Compose(const float* a, const float* b, int pairs, int i) {
  const DF d;
  const VF ac = hn::LoadU(d, a + i), as = hn::LoadU(d, a + pairs + i);
  const VF bc = hn::LoadU(d, b + i), bs = hn::LoadU(d, b + pairs + i);
  return {hn::NegMulAdd(as, bs, hn::Mul(ac, bc)), hn::MulAdd(as, bc, hn::Mul(ac, bs))};
}
HWY_INLINE void ComposeOne(const float* a, const float* b, int pairs, int i, float* cos,
                           float* sin) {
  const float ac = a[i], as = a[pairs + i], bc = b[i], bs = b[pairs + i];
  *cos = ac * bc - as * bs;
  *sin = as * bc + ac * bs;
}

// The channels of pairs [i, i + N) of a row.
template <typename T>
HWY_INLINE void LoadPairs(const T* row, const Rotary& rotary, int i, VF& x, VF& y) {
  if (rotary.interleaved) {
    const VF a = LoadFloats(row + 2 * i), b = LoadFloats(row + 2 * i + kN);
    x = hn::ConcatEven(DF(), b, a);
    y = hn::ConcatOdd(DF(), b, a);
  } else {
    x = LoadFloats(row + i);
    y = LoadFloats(row + rotary.pairs() + i);
  }
}

// Rotates the rows of one work item. REQUIRES: work.rotary is not null.
class RowRotator {
 public:
  explicit RowRotator(const AttendWork& work)
      : work_(work), rotary_(work.rotary->rotary()), next_(work.row_place) {}
  RowRotator(const RowRotator&) = delete;

  // Query `head` of query token `token`; out [dim].
  HWY_INLINE void Query(int token, int head, float* out) {
    const float* q = work_.q + token * work_.q_token + int64_t{head} * work_.k.dim;
    Rotate(q, work_.query_place + token, out);
  }

  // The keys of the next tile; out [tile.count][dim].
  template <typename T>
  HWY_INLINE void Keys(const RowTile& tile, float* out) {
    for (int i = 0; i < tile.count; ++i) {
      const int32_t place = work_.row_place < 0 ? tile.position[i] : next_++;
      Rotate(reinterpret_cast<const T*>(tile.k[i]), place, out + i * work_.k.dim);
    }
  }

 private:
  template <typename T>
  HWY_INLINE void Rotate(const T* row, int32_t place, float* out) {
    const DF d;
    constexpr int n = static_cast<int>(kN);
    const int pairs = rotary_.pairs(), dim = work_.k.dim;
    Seek(place >> RotaryTable::kDigitBits);
    const float* fine = work_.rotary->Row(0, place % RotaryTable::kRadix);
    int i = 0;
    for (; i + n <= pairs; i += n) {
      const Rotation rotation = Compose(coarse_, fine, pairs, i);
      VF x, y;
      LoadPairs(row, rotary_, i, x, y);
      hn::StoreU(hn::NegMulAdd(y, rotation.sin, hn::Mul(x, rotation.cos)), d, out + i);
      hn::StoreU(hn::MulAdd(x, rotation.sin, hn::Mul(y, rotation.cos)), d, out + pairs + i);
    }
    for (; i < pairs; ++i) {
      float cos, sin;
      ComposeOne(coarse_, fine, pairs, i, &cos, &sin);
      const float x = ToFloat(row[rotary_.interleaved ? 2 * i : i]);
      const float y = ToFloat(row[rotary_.interleaved ? 2 * i + 1 : pairs + i]);
      out[i] = x * cos - y * sin;
      out[pairs + i] = y * cos + x * sin;
    }
    int c = 2 * pairs;
    for (; c + n <= dim; c += n) hn::StoreU(LoadFloats(row + c), d, out + c);
    for (; c < dim; ++c) out[c] = ToFloat(row[c]);
  }

  // Makes coarse_ the rotation by `block` * 64 positions.
  HWY_INLINE void Seek(int32_t block) {
    if (block == block_) return;
    block_ = block;
    const RotaryTable& table = *work_.rotary;
    coarse_ = table.Row(1, block % RotaryTable::kRadix);
    for (int level = 2; (block >>= RotaryTable::kDigitBits) != 0; ++level) {
      Multiply(coarse_, table.Row(level, block % RotaryTable::kRadix));
      coarse_ = product_;
    }
  }
  // product_ = a * b; a may be product_.
  HWY_INLINE void Multiply(const float* a, const float* b) {
    const DF d;
    constexpr int n = static_cast<int>(kN);
    const int pairs = rotary_.pairs();
    int i = 0;
    for (; i + n <= pairs; i += n) {
      const Rotation rotation = Compose(a, b, pairs, i);
      hn::StoreU(rotation.cos, d, product_ + i);
      hn::StoreU(rotation.sin, d, product_ + pairs + i);
    }
    for (; i < pairs; ++i) ComposeOne(a, b, pairs, i, product_ + i, product_ + pairs + i);
  }

  const AttendWork& work_;
  const Rotary rotary_;
  int32_t next_;        // place of the next row, where they stand one by one
  int32_t block_ = -1;  // that coarse_ is for
  const float* coarse_ = nullptr;
  float product_[kHeadDimMax];
};

}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_RAW_ROTATE_ROWS_INL_H_
