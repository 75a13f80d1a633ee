// SPDX-License-Identifier: Apache-2.0
// Op pick on the GPU: scores of the candidates to a DeviceSelection, with no host round trip.
//
// For each list (sequence b, group g): the indices of the `rule.take` largest of the scores of the
// candidates [first, last), ascending, as units (index + first). Bit for bit TopKRef (pick.h):
// equal scores keep the lower index, -0 equals 0, NaN ranks below everything. Where everything
// would be taken (or the sequence is shorter than rule.min_tokens) the selection is "all": no
// entries, and sink_end = recent_begin = 0, so that positions [0, tokens) are attended. Nothing is
// written for a sequence with kNoQuery tokens.
//
// One algorithm, three ways; all of them write the same bits. CTAs hold their scores in shared
// memory, agree on the digits of the k-th largest score through histograms, and write what they
// hold of the answer in place: order comes for free. Cost: reads the scores once (several times
// where a CTA has more than it holds).
// - A CTA a list: short lists, and many of them. No exchange.
// - A cluster of 8 CTAs a list, compute capability 9.0: they read each other's shared memory, and
//   meet 2 to 4 times at barriers of the cluster. Lists of at most 8 * kPickKeysOfCta scores; by
//   shape only those of more than 10240 that one CTA could hold too.
// - Several CTAs a list, a cooperative launch: they meet at 2 to 4 barriers over `scratch`. Longer
//   lists, and devices without clusters. A device that is busy with other kernels delays it until
//   all its CTAs fit (at most one an SM).
#pragma once

#include "kernels/cuda/batches/batch.h"
#include "kernels/cuda/batches/candidates.h"

namespace kvstrata::cuda {

// Scores that a CTA holds in shared memory, of a cluster or where it has a list of more than 10240
// alone (of other lists 10240). Where it has more, it reads all of its own several times.
inline constexpr int32_t kPickKeysOfCta = 24576;

// How the CTAs that share a list tell each other what they have. Tests and benchmarks choose.
enum class PickExchange {
  kByShape,
  kGlobalMemory,  // through `scratch`; no exchange where a list has one CTA
  kCluster,       // through the shared memory of a cluster, whatever ctas_per_list
};

struct PickBatch {
  const void* scores = nullptr;  // device [batch][groups][score_stride], 16-byte aligned
  DType dtype = DType::kF32;     // kF32 or kBF16
  int32_t score_stride = 0;      // candidates a list may have, a multiple of 8
  int32_t batch = 0, groups = 1;
  CandidateRule rule;
  const int32_t* tokens = nullptr;  // device [batch]
  // device [batch], units to take of each sequence in place of rule.take, at most list_stride where
  // not all are taken; null: rule.take. With take_each device [batch][groups], of each list, at
  // most list_stride and its candidates: whether all are attended is then rule's to say.
  const int32_t* takes = nullptr;
  bool take_each = false;
  bool ahead = false;  // launch.cuh; of tokens and takes
  // The selection (batch.h), written: units [batch][groups][list_stride], counts [batch][groups],
  // sink_end [batch], recent_begin [batch]. REQUIRES: list_stride >= rule.take.
  int32_t* units = nullptr;
  const uint64_t* lists = nullptr;  // device [batch][groups], where each list goes; null: units
  int32_t* counts = nullptr;
  int32_t* sink_end = nullptr;
  int32_t* recent_begin = nullptr;
  int32_t list_stride = 0;
  // device, PickScratchBytes, 16-byte aligned; all zero before the first call, and every call
  // leaves what the next one needs. Calls that share it must not overlap.
  void* scratch = nullptr;
  int32_t scratch_lists = 0;  // calls of several batch sizes share scratch if they say the same
                              // number here, at least batch * groups; 0: of this size alone
  int32_t ctas_per_list = 0;  // 0: chosen by shape; else 1 .. 128, not of a cluster
  PickExchange exchange = PickExchange::kByShape;
};

// Depends on the shape and on the current device's multiprocessors.
int64_t PickScratchBytes(const PickBatch& work);

// cudaErrorInvalidValue for a shape that it does not take, and for a cluster that the device or the
// length of the lists does not allow.
int PickCuda(const PickBatch& work, Stream stream);

}  // namespace kvstrata::cuda
