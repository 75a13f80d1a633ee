// SPDX-License-Identifier: Apache-2.0
// Op attend_planes on the GPU (attend_planes.h): one query token a sequence, over a
// batch's sealed groups. Chosen by `fine_above` it is two kernels: the first makes the normalisers
// from every `sample`-th group and from what is always fine, the second streams all groups once.
// With a `share` four more choose between them, which stream all keys once more. With `share` 1
// everything is fine: one kernel, which reads all digits as one stream.
//
// A warp has a group at a time. Plane 0 of its keys meets the queries, times the group's steps, on
// tensor cores; so do values' codes and weights, of the strips that are read. Lower rows of fine
// tokens are asked for when they are chosen and used a group later: their logits are the coarse
// ones and a correction. Strips that are left out are not fetched.
//
// Precision: products of query and step, weights, and these times steps are rounded to fp16 (11
// bits), sums are fp32. So it may decide a near-tie otherwise than ref. The same inputs give the
// same bits; what is chosen does not depend on how work is split.
// sm_90: it takes up to 227 KB of shared memory a CTA.
// Cost: the bytes that PlanesBytesRead counts, and keys of every `sample`-th group once more. With
// d = 128 a group is some 430 instructions of a warp, 400 more where strips are read, and 350 for
// up to eight fine tokens.
#pragma once

#include "kernels/cuda/batches/batch.h"
#include "kernels/ops/attend_planes/attend_planes.h"
#include "kernels/ops/merge/partials.h"
#include "kernels/ops/pack_planes/device_planes_cuda.h"

namespace kvstrata::cuda {

// Copies on the GPU of lower rows that were fine lately, for lower runs that lie on the host. Each
// group has `rows` of them, with a tag each; the op keeps both. Sinks, the window and sequences of
// which all is fine are read past them. They are a sequence's own, or lie in blocks.
struct HotSequence {
  uint64_t tags = 0;    // device [heads][groups][rows], a byte each, at first 0; 0: there are none
  uint64_t copies = 0;  // device [heads][groups][rows][bytes of a lower row], 16-byte aligned
  int64_t groups = 0;   // that there is room for; those behind them have none
};
// In blocks (DevicePlanes::hot_offset) a record has a claim, tags and the copies. A block may be
// several sequences': the first warp that asks has the record in a launch, others read past it.
struct HotRows {
  const HotSequence* sequences = nullptr;  // device [batch]; null: no sequence has any of its own
  int32_t rows = 0;                        // 1..32
  int32_t first_head = 0;                  // the layer's
  // device: another number than the last launch over the same records had; the same one uses no
  // copies, with equal outputs. Launches over the same records are ordered by a stream. Null: they
  // are not looked at. head_dim 64 and 128
  const uint32_t* launch = nullptr;

  constexpr bool IsThere() const { return sequences != nullptr || launch != nullptr; }
};

// What was chosen and what that cost. Null: not wanted.
struct PlanesReport {
  uint8_t* fine = nullptr;      // device [batch][kv_heads][stride], of sealed tokens: 1 if fine
  uint8_t* strips = nullptr;    // device [batch][kv_heads][stride / 16]: 1 if not left out
  int64_t stride = 0;           // a multiple of 64, at least as many as there are sealed tokens
  uint64_t* fetched = nullptr;  // device [batch][kv_heads], bytes; added to by kernels
  uint64_t* hot = nullptr;      // the same, of them those that HotRows had
};

struct AttendPlanesBatch {
  DevicePlanes planes;  // format.tokens 64
  PlanesRule rule;      // run 1; fine_above > 0, or share > 0 (from 1 on everything is fine)
  int32_t batch = 0;
  int32_t group = 0;  // query heads a KV head, 1..8
  // device [batch], N: raw rows and the new one included; 0: all of the sequence is fine
  const int32_t* tokens = nullptr;
  const int32_t* groups = nullptr;  // device [batch], that are sealed; fewer tokens than N
  const void* q = nullptr;          // device [batch][kv_heads * group][head_dim]
  DType q_dtype = DType::kBF16;
  int64_t q_stride = 0;  // elements from a sequence's queries to the next's; a multiple of 8
  float scale = 1.0f;    // factor of the logits, > 0
  bool ahead = false;    // launch.cuh; of tables, lengths and groups
  HotRows hot;           // where not everything is fine; in blocks with fine_above
  Partials with;         // raw rows', at least one part: compared with, and merged into the output
  AttentionOutput to;    // to.rows null: `partial` is written instead
  Partials partial;      // 1 part: sealed tokens', rotated back
  PlanesReport report;
  uint32_t* counters = nullptr;  // device [batch * kv_heads], zero; left zero
  void* workspace = nullptr;     // device, AttendPlanesWorkspaceBytes, 16-byte aligned
};

// Enough for any batch of at most so many sequences of this shape (planes but for addresses, group)
// and rule on the current GPU. That of a share below 1 is enough for any: of each token that a
// sequence has room for it has 4 bytes a query head and 4 a KV head.
int64_t AttendPlanesWorkspaceBytes(const AttendPlanesBatch& work);

// cudaErrorInvalidValue: a shape outside the ranges above. Calls that share a workspace must be
// ordered by a stream.
int AttendPlanesCuda(const AttendPlanesBatch& work, Stream stream);

}  // namespace kvstrata::cuda
