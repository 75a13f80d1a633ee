// SPDX-License-Identifier: Apache-2.0
// Op attend_planes on the GPU (attend_planes.h): one query token a sequence, over a
// batch's sealed groups, chosen by `fine_above`. Two kernels: the first makes the normalisers from
// every `sample`-th group and from what is always fine, the second streams all groups once.
//
// A warp has a group at a time. Plane 0 of its keys meets the queries, times the group's steps, on
// tensor cores; so do values' codes and weights, of the strips that are read. Lower rows of fine
// tokens are asked for when they are chosen and used a group later: their logits are the coarse
// ones and a correction. Strips that are left out are not fetched.
//
// Precision: products of query and step, and coarse weights times steps, are rounded to fp16 (11
// bits), sums are fp32. So it may decide a near-tie otherwise than ref. The same inputs give the
// same bits; what is chosen does not depend on how work is split.
// sm_90: it takes up to 227 KB of shared memory a CTA.
// Cost: the bytes that PlanesBytesRead counts, and keys of every `sample`-th group once more. With
// d = 128 a group is some 750 instructions of a warp; that some are fine 290, each of them 105
// more.
#ifndef KVSTRATA_KERNELS_OPS_ATTEND_PLANES_ATTEND_PLANES_CUDA_H_
#define KVSTRATA_KERNELS_OPS_ATTEND_PLANES_ATTEND_PLANES_CUDA_H_

#include "kernels/cuda/batches/batch.h"
#include "kernels/ops/attend_planes/attend_planes.h"
#include "kernels/ops/merge/partials.h"
#include "kernels/ops/pack_planes/device_planes_cuda.h"

namespace kvstrata::cuda {

// What was chosen and what that cost. Null: not wanted.
struct PlanesReport {
  uint8_t* fine = nullptr;      // device [batch][kv_heads][stride], of sealed tokens: 1 if fine
  uint8_t* strips = nullptr;    // device [batch][kv_heads][stride / 16]: 1 if not left out
  int64_t stride = 0;           // a multiple of 64, at least as many as there are sealed tokens
  uint64_t* fetched = nullptr;  // device [batch][kv_heads], bytes; added to by both kernels
};

struct AttendPlanesBatch {
  DevicePlanes planes;  // format.tokens 64
  PlanesRule rule;      // fine_above > 0, run 1
  int32_t batch = 0;
  int32_t group = 0;                 // query heads a KV head, 1..8
  const int32_t* tokens = nullptr;   // device [batch], N: raw rows and the new one included
  const int32_t* groups = nullptr;   // device [batch], that are sealed; fewer tokens than N
  const uint8_t* in_full = nullptr;  // device [batch]: 1 for those that attend all of it finely, as
                                     // if there were no candidates; null: none
  const void* q = nullptr;           // device [batch][kv_heads * group][head_dim]
  DType q_dtype = DType::kBF16;
  int64_t q_stride = 0;  // elements from a sequence's queries to the next's; a multiple of 8
  float scale = 1.0f;    // factor of the logits, > 0
  bool ahead = false;    // launch.cuh; of tables, lengths, in_full and groups

  Partials with;       // raw rows', at least one part: compared with, and merged into the output
  AttentionOutput to;  // to.rows null: `partial` is written instead
  Partials partial;    // 1 part: sealed tokens', rotated back
  PlanesReport report;
  // device, AttendPlanesWorkspaceBytes, 16-byte aligned; zero before the first call and after each
  void* workspace = nullptr;
};

// Enough for any batch of at most so many sequences of this shape (planes.format, kv_heads, group)
// on the current GPU.
int64_t AttendPlanesWorkspaceBytes(const AttendPlanesBatch& work);

// cudaErrorInvalidValue: a shape outside the ranges above. Calls that share a workspace must be
// ordered by a stream.
int AttendPlanesCuda(const AttendPlanesBatch& work, Stream stream);

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_PLANES_ATTEND_PLANES_CUDA_H_
